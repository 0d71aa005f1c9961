"""A step whose decorated functions store what a level says: traced, lowered and compiled when that is first needed.

What XLA reserves for a level is kept on disk, by program, device and versions: a later process compiles only the level
that it takes.
"""

# More than 15 of our modules: what a step is made of, how it is traced and compiled, and what of it is kept meet here.
import contextlib
import functools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr

from jaxpipe import multihost
from jaxpipe.array_types import PyTree
from jaxpipe.costs.count_products import count_products
from jaxpipe.costs.profile_cache import versions_for
from jaxpipe.costs.reserved_bytes import reserved_bytes
from jaxpipe.models.undecorated import undecorated
from jaxpipe.residuals.chosen_storage import Choices, DecoratedProgram, choosing, whole_scans
from jaxpipe.residuals.two_passes import StoredPasses
from jaxpipe.step.step_arguments import Call, jitter, split_arguments
from jaxpipe.step.step_front import DEFAULT, PLAIN, StepFront, step_front
from jaxpipe.step.step_template import StepTemplate, step_template
from jaxpipe.targets.building import building_for
from jaxpipe.text.kept_files import keep, kept_path, read_kept
from jaxpipe.text.progress import phase, tell
from jaxpipe.text.stable_text import digest, stable_text
from jaxpipe.text.units import bytes_text


class Needs(NamedTuple):
    """The bytes that XLA reserves on a device for a step, and the products that it runs."""

    bytes: int
    products: int


@dataclass(frozen=True, eq=False)
class Variant:
    """A step with the storage of one level: what ``jax.jit`` made of it, and its programs."""

    jitted: Any
    traced: Any

    @cached_property
    def lowered(self) -> Any:
        """The step for XLA."""
        return self.traced.lower()

    @cached_property
    def compiled(self) -> Any:
        """The compiled step."""
        return self.lowered.compile()

    @cached_property
    def products(self) -> int:
        """The matrix products and convolutions that it runs."""
        return count_products(self.jaxpr)[0]

    @property
    def jaxpr(self) -> Jaxpr:
        """The traced step."""
        return getattr(self.traced, "traced", self.traced).jaxpr.jaxpr


class StepVariants:
    """The levels of a step for some arguments."""

    def __init__(self, call: Call, like: "StepVariants | None" = None, split: "StepVariants | None" = None):
        """Trace the plain step.

        Args:
          call: the step.
          like: the same step for arguments of the same shapes, whose needs are taken to be these, until it is compiled.
          split: the same step; here scans, but for those over layers, are operators like others.
        """
        self._call, self._like, self._whole = call, like, split is not None
        self._variants: dict[str, Variant] = {} if split is None else {PLAIN: split.plain}
        self._met: dict[str, DecoratedProgram] = {}
        self.compilations = 0
        self.seconds = 0.0  # of compilations
        self.plain = self.variant(PLAIN)
        self._path = self._kept_path()
        assumed = {} if like is None else dict(like.known)
        self._kept = multihost.from_first(lambda: read_kept(self._path, dict[str, dict[str, Needs]]) or {})
        # The needs of the levels that were compiled here or in an earlier process.
        self.known: dict[str, Needs] = assumed | self._kept.get("", {})

    @cached_property
    def programs(self) -> Mapping[str, DecoratedProgram]:
        """The decorated programs that are differentiated, by key."""
        if self._template is None:
            self.variant(DEFAULT)
        self.known |= self._kept.get(_digest(self._met), {})
        return self._met

    @cached_property
    def with_whole_scans(self) -> "StepVariants | None":
        """The levels of the step with scans, but for those over layers, as operators like others; None without any."""
        others = StepVariants(self._call, split=self)
        return None if others.programs.keys() <= self.programs.keys() else others

    @cached_property
    def front(self) -> StepFront:
        """The levels that there are."""
        if self._like is not None and self._like.programs.keys() == self.programs.keys():
            return self._like.front
        return step_front(self.programs, self._call.device)

    def needs(self, level: str) -> Needs:
        """Return the needs of a level, which is compiled if they are not known."""
        return self.known[level] if level in self.known else self.compile(level)

    def compile(self, level: str) -> Needs:
        """Compile a level and return its needs."""
        variant = self.variant(level)
        with phase("trace"):
            assert variant.lowered
        start = time.perf_counter()
        with phase("compile"):
            size = reserved_bytes(variant.compiled)
        self.compilations += 1
        self.seconds += time.perf_counter() - start
        self.known[level] = Needs(size, variant.products)
        tell(f"Step with {level} storage: XLA reserves {bytes_text(size)}")
        self._kept.setdefault("" if level == PLAIN else _digest(self.programs), {})[level] = self.known[level]
        multihost.from_first(lambda: keep(self._path, self._kept))
        return self.known[level]

    def variant(self, level: str) -> Variant:
        """Return the step with the storage of a level, traced."""
        if level not in self._variants:
            with phase("trace"):
                self._variants[level] = self._traced(level)
        return self._variants[level]

    @cached_property
    def _template(self) -> StepTemplate | None:
        with phase("trace"), building_for(self._call.device), whole_scans(self._whole):
            return step_template(self._call, self._met)

    def _traced(self, level: str) -> Variant:
        call, template = self._call, None if level == PLAIN else self._template
        chosen = {} if level in (PLAIN, DEFAULT) else self.front.storage(level)
        choices = Choices(lambda program: StoredPasses(program.default), chosen, self._met)
        step = call.step
        if template is not None:
            step = template.with_storage(choices.passes)

        @functools.wraps(call.step)
        def traced(*args: PyTree, **kwargs: PyTree) -> PyTree:
            with contextlib.ExitStack() as stack:
                if level == PLAIN:
                    stack.enter_context(undecorated(True))
                elif template is None:
                    stack.enter_context(choosing(choices))
                    stack.enter_context(whole_scans(self._whole))
                stack.enter_context(building_for(call.device))
                return step(*args, **kwargs)

        jitted = jitter((call.args, call.kwargs))(traced, **call.options)
        return Variant(jitted, jitted.trace(*call.args, **call.kwargs))

    def _kept_path(self) -> Path:
        """Return the file of what is known of this step, on its device and with these versions, by its decorations."""
        call, flags = self._call, os.environ.get("XLA_FLAGS", "")
        shardings = [str(getattr(leaf, "sharding", None)) for leaf in split_arguments((call.args, call.kwargs))[1]]
        settings = [*versions_for(call.device), call.device.device_kind, call.options, shardings, flags]
        return kept_path("steps", stable_text([self.plain.jaxpr, settings], values=False))


def _digest(programs: Mapping[str, DecoratedProgram]) -> str:
    return digest(" ".join(sorted(programs)))
