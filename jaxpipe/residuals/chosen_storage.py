"""The storage that a budget chooses for decorated programs, while the step that calls them is traced.

    with choosing(choices): trace the step ──▶ choices.met: its decorated programs that are differentiated

A user context, so that JAX traces functions under ``jit`` again for other choices.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import jax

from jaxpipe.array_types import AnyJaxpr, TensorNumber
from jaxpipe.graph.allowed_codecs import Policy
from jaxpipe.graph.graph import Graph
from jaxpipe.graph.program_text import program_text
from jaxpipe.residuals import vjp_program
from jaxpipe.residuals.backward_graph import BackwardGraph, build_backward_graph
from jaxpipe.residuals.choose_formats import ResidualPlan, default_plan
from jaxpipe.residuals.vjp_program import SlicedProgram, VJPProgram, in_slices
from jaxpipe.text.stable_text import digest


@dataclass(frozen=True, eq=False)
class DecoratedProgram:
    """A decorated function or module, as it is differentiated.

    Attributes:
      jaxpr: as it was traced.
      graph: its operators.
      wrt: inputs that receive a cotangent.
      policy: the codecs that its decoration allows.
      held: inputs that are kept alive anyway.
      iterations: of scans around it, each of which stores; None outside of scans.
      axes: makes the named axes that it may name a context, in which its derivative is traced.
    """

    jaxpr: AnyJaxpr
    graph: Graph
    wrt: tuple[TensorNumber, ...]
    policy: Policy
    held: frozenset[TensorNumber]
    iterations: int | None
    axes: Callable[[], contextlib.AbstractContextManager[object]]

    @cached_property
    def key(self) -> str:
        """A word that programs share, in all processes, which can be stored alike: with equal needs of derivatives."""
        needs = [step.needs for step in self.backward_graph.steps]
        settings = self.wrt, self.policy.codecs_name, sorted(self.held), self.iterations, needs
        return digest(f"{settings} {program_text(self.backward_graph.graph)}")

    @cached_property
    def backward_graph(self) -> BackwardGraph:
        """Its backward pass, whatever is stored."""
        with self.axes(), choosing(None):
            return build_backward_graph(self.graph, self.wrt, policy=self.policy)

    @cached_property
    def default(self) -> VJPProgram:
        """Its programs with default storage."""
        return self._assembled(self.backward_graph, default_plan(self.backward_graph, self.policy, self.held))

    @cached_property
    def sliced(self) -> SlicedProgram | None:
        """Its programs with the largest product in slices, if that is possible."""
        with self.axes():
            return in_slices(self.graph, self.wrt, policy=self.policy, held=self.held)

    def with_storage(self, plan: ResidualPlan, sliced: bool) -> VJPProgram:
        """Return its programs with other storage."""
        if not sliced:
            return self._assembled(self.backward_graph, plan)
        assert self.sliced is not None
        return self._assembled(self.sliced.vjp.backward_graph, plan)

    def _assembled(self, backward_graph: BackwardGraph, plan: ResidualPlan) -> VJPProgram:
        """Return programs that know what follows from parameters alone.

        A function has not said what its parameters are: it is differentiated by them, and its caller keeps them. Where
        a result follows from such inputs alone, batches are among them.
        """
        vjp, graph = vjp_program.assemble(backward_graph, plan), self.graph
        weights = graph.with_parameters([t in self.held and t in self.wrt for t in graph.inputs])
        known = weights.derived_from_parameters
        return vjp if graph.parameters or known.intersection(graph.outputs) else replace(vjp, weights=known)


class Passes(Protocol):
    """The two passes of a decorated program, and what is kept between them."""

    def forward(self, values: Any) -> tuple[Any, Any]:
        """Return outputs, and what the backward pass needs: a tree of arrays."""
        ...

    def backward(self, kept: Any, cotangents: Any) -> Any:
        """Return the gradients of the program's ``wrt``; cotangents and gradients are None for zero."""
        ...


#: What a budget says of a program: how its passes run.
Storage = Callable[[DecoratedProgram], Passes]


@dataclass(frozen=True, eq=False)
class Choices:
    """The storage that a budget chooses for the programs of a step.

    Attributes:
      otherwise: the storage of programs for which none is chosen.
      storage: that of others, by their keys.
      met: all programs that are met.
    """

    otherwise: Storage
    storage: Mapping[str, Storage] = field(default_factory=dict)
    met: dict[str, DecoratedProgram] = field(default_factory=dict)

    def passes(self, program: DecoratedProgram) -> Passes:
        """Return the passes of a program, and note that it was met."""
        self.met.setdefault(program.key, program)
        return self.storage.get(program.key, self.otherwise)(program)


#: A context in which decorated programs that are traced run as some choices say, and are noted there; None, as outside
#: of such a step: by default.
choosing = jax.make_user_context(default_value=None)

#: True where scans in decorated programs that are traced are operators like others, which may run again; not those over
#: layers.
whole_scans = jax.make_user_context(default_value=False)
