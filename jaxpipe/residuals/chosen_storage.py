"""The storage that a budget chooses for decorated programs, while the step that calls them is traced.

    with choosing(choices): trace the step ──▶ choices.met: its decorated programs that are differentiated

A user context, so that JAX traces functions under ``jit`` again for other choices.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import jax

from jaxpipe.array_types import TensorNumber
from jaxpipe.graph.allowed_codecs import Policy
from jaxpipe.graph.graph import Graph
from jaxpipe.graph.program_text import program_text
from jaxpipe.residuals import vjp_program
from jaxpipe.residuals.backward_graph import build_backward_graph
from jaxpipe.residuals.choose_formats import ResidualPlan
from jaxpipe.residuals.sliced_program import in_slices
from jaxpipe.residuals.vjp_program import VJPProgram
from jaxpipe.text.stable_text import digest


@dataclass(frozen=True, eq=False)
class DecoratedProgram:
    """A decorated function or module, as it is differentiated.

    Attributes:
      graph: its operators.
      wrt: inputs that receive a cotangent.
      policy: the codecs that its decoration allows.
      held: inputs that are kept alive anyway.
    """

    graph: Graph
    wrt: tuple[TensorNumber, ...]
    policy: Policy
    held: frozenset[TensorNumber]

    @cached_property
    def key(self) -> str:
        """A word that equal programs share, in all processes."""
        settings = self.wrt, self.policy.name, sorted(self.held)
        return digest(f"{settings} {program_text(self.graph)}")

    def by_default(self) -> VJPProgram:
        """Return its programs with default storage."""
        return vjp_program.build(self.graph, self.wrt, policy=self.policy, held=self.held)


@dataclass(frozen=True)
class Storage:
    """The storage of a program: a format for each tensor, and whether its largest product runs in slices."""

    plan: ResidualPlan
    sliced: bool = False

    def of(self, program: DecoratedProgram) -> VJPProgram:
        """Return the programs with this storage."""
        graph, wrt, policy = program.graph, program.wrt, program.policy
        if not self.sliced:
            return vjp_program.assemble(build_backward_graph(graph, wrt, policy=policy), self.plan)
        sliced = in_slices(graph, wrt, policy=policy, held=program.held)
        assert sliced is not None
        return vjp_program.assemble(sliced.vjp.backward_graph, self.plan)


@dataclass(frozen=True, eq=False)
class Choices:
    """The storage of some programs by their keys, others have that by default; and all programs that are met."""

    storage: Mapping[str, Storage] = field(default_factory=dict)
    met: dict[str, DecoratedProgram] = field(default_factory=dict)

    def programs_of(self, program: DecoratedProgram) -> tuple[VJPProgram, bool]:
        """Return the programs of a decorated function, and whether their storage was chosen."""
        self.met.setdefault(program.key, program)
        chosen = self.storage.get(program.key)
        return (program.by_default(), False) if chosen is None else (chosen.of(program), True)


_choices = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def choosing(choices: Choices) -> Iterator[None]:
    """Give decorated programs that are traced meanwhile the storage of some choices, and note them there."""
    with _choices(choices):
        yield


def current_choices() -> Choices | None:
    """Return the choices of the step that is being traced; None outside of such a step."""
    return _choices.value
