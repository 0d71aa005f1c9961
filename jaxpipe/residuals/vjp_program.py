"""A range of operators with a storage plan: the forward and the backward program of one pipeline stage.

    forward(vjp, inputs)                              -> outputs, stash
    backward(vjp, parameters, stash, cotangents)      -> input cotangents

The backward pass can be had in two parts, so that a schedule may delay the second:

    run_backward(vjp, vjp.input_steps, parameters, stash, cotangents) -> cotangents of `vjp.input_part` and `vjp.saved`
    run_backward(vjp, vjp.weight_steps, parameters, stash, saved)     -> cotangents of `vjp.weight_part`
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpipe import _compat
from jaxpipe.array_types import Array, TensorNumber
from jaxpipe.graph.allowed_codecs import FAST, Policy
from jaxpipe.graph.graph import Graph, Operator, live, ordered
from jaxpipe.graph.primitives import PRODUCTS
from jaxpipe.graph.reverse_walk import needed
from jaxpipe.graph.row_slices import slice_rows
from jaxpipe.residuals.backward_graph import BackwardGraph, BackwardOp, build_backward_graph, divided, step_ends
from jaxpipe.residuals.choose_formats import ResidualPlan, check_plan, default_plan, kept_by_policies, refitted, ties
from jaxpipe.residuals.rematerialize import Rematerializer, is_heavy
from jaxpipe.residuals.run_steps import Absorb, JoinedWalk, Walk
from jaxpipe.residuals.stored_formats import encode, has_overflowed, part_avals
from jaxpipe.residuals.xla_cpu import GroupedWalk
from jaxpipe.targets.building import current


#: Slices of a product at most, whatever else a program holds.
MOST_SLICES = 32


@dataclass(frozen=True, eq=False)
class VJPProgram:
    """The forward and the backward program of a graph, as data.

    Attributes:
      backward_graph: what the forward program computes and what the backward pass needs.
      plan: the format of each tensor.
      weights: tensors that follow from parameters alone, whose gradients a GPU makes first, or last.
    """

    backward_graph: BackwardGraph
    plan: ResidualPlan
    weights: frozenset[TensorNumber]

    @property
    def graph(self) -> Graph:
        """The forward graph, residual operators included."""
        return self.backward_graph.graph

    @property
    def stash_avals(self) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
        """Shape and dtype of the parts of each stored tensor."""
        return tuple(part_avals(self.graph.tensors[t], codec) for t, codec in self.plan.codecs.items())

    @property
    def parameters(self) -> tuple[TensorNumber, ...]:
        """The inputs that the backward pass is handed again, instead of storing them."""
        return tuple(t for t in self.graph.inputs if t in self.graph.parameters)

    @property
    def input_part(self) -> tuple[TensorNumber, ...]:
        """The inputs whose cotangent is ready after the first part of the split backward pass."""
        return tuple(t for t in self.backward_graph.wrt if t not in self._deferred)

    @property
    def weight_part(self) -> tuple[TensorNumber, ...]:
        """The inputs whose cotangent the second part makes."""
        return tuple(t for t in self.backward_graph.wrt if t in self._deferred)

    @property
    def input_steps(self) -> tuple[BackwardOp, ...]:
        """The backward steps of the first part."""
        return tuple(early for _, early in self._halves if early is not None)

    @property
    def weight_steps(self) -> tuple[BackwardOp, ...]:
        """The backward steps of the second part."""
        return tuple(late for late, _ in self._halves if late is not None)

    @property
    def saved(self) -> tuple[TensorNumber, ...]:
        """The tensors whose cotangent the input part hands to the weight part."""
        inner = self._deferred.intersection(t for step in self.weight_steps for t in step.cotangents_out)
        return tuple(ordered(t for step in self.weight_steps for t in step.cotangents_in if t not in inner))

    @functools.cached_property
    def _deferred(self) -> set[TensorNumber]:
        """The tensors whose cotangent the weight part makes.

        Cotangents of weights of convolutions and matrix products, which cost as much as those of their inputs, are
        delayed, and with them whatever leads from there to a parameter. All other cotangents (biases, scales) are cheap
        and small, and come with the input part.
        """
        steps, available = self.backward_graph.steps, self.backward_graph.source.derived_from_parameters
        deferred = {t for step in steps if step.name in PRODUCTS for t in step.cotangents_out if t in available}
        for step in reversed(steps):
            if not deferred.isdisjoint(step.cotangents_in):
                deferred.update(step.cotangents_out)
        return deferred

    @functools.cached_property
    def _halves(self) -> list[tuple[BackwardOp | None, BackwardOp | None]]:
        """Each backward step, as far as it is in the weight part and in the input part."""
        return [divided(step, self._deferred) for step in self.backward_graph.steps]


@dataclass(frozen=True, eq=False)
class SlicedProgram:
    """The programs, the operators of the first graph that run in the loop over slices, and the number of slices."""

    vjp: VJPProgram
    operators: tuple[Operator, ...]
    count: int


def build(
    graph: Graph,
    wrt: Iterable[TensorNumber],
    *,
    policy: Policy = FAST,
    held: Iterable[TensorNumber] = (),
    seeds: Iterable[TensorNumber] | None = None,
    plan: ResidualPlan | None = None,
) -> VJPProgram:
    """Linearize a graph and store its tensors by a plan, or by the default one.

    Args:
      graph: operators (a whole model, or ``graph.section(start, stop)``).
      wrt: inputs, as tensor numbers, that receive a cotangent.
      policy: the codecs that the plan may use.
      held: inputs that are kept alive anyway, so that to store them costs nothing.
      seeds: the outputs that will be given a cotangent; all if left out.
      plan: what is stored; codecs are set for the tensors of this graph.
    """
    backward_graph = build_backward_graph(graph, wrt, policy=policy, seeds=seeds)
    given = None if plan is None else refitted(plan, backward_graph.graph)
    return assemble(backward_graph, given or default_plan(backward_graph, policy, held))


def in_slices(
    graph: Graph,
    wrt: Iterable[TensorNumber],
    *,
    policy: Policy = FAST,
    held: Iterable[TensorNumber] = (),
    seeds: Iterable[TensorNumber] | None = None,
) -> SlicedProgram | None:
    """Return the programs of a graph with its largest product in slices; None if what follows that is not row-wise.

    None as well if a save policy keeps something of it: slices are computed again.

    A slice is no larger than the largest of the tensors that are less than half of the product, or than a 32nd of it.
    Arguments as ``build`` has them.
    """
    sizes = [graph.tensors[t].bytes for op in graph.operators for t in op.outputs]
    largest = max((graph.tensors[op.outputs[0]].bytes for op in graph.operators if op.name == "dot_general"), default=0)
    others = max((size for size in sizes if 2 * size < largest), default=0)
    sliced = slice_rows(graph, max(others, largest // MOST_SLICES))
    if sliced is None or not kept_by_policies(graph).isdisjoint(sliced.operators):
        return None
    built = build(sliced.graph, wrt, policy=policy, held=held, seeds=seeds)
    return SlicedProgram(built, sliced.operators, sliced.count)


def assemble(backward_graph: BackwardGraph, plan: ResidualPlan) -> VJPProgram:
    """Return the programs of a backward graph under a plan for its residuals.

    Raises:
      ValueError: if the plan does not give the backward pass what it needs, or stores more.
    """
    check_plan(backward_graph, plan)
    return VJPProgram(backward_graph, plan, backward_graph.source.derived_from_parameters)


def forward(vjp: VJPProgram, inputs: Sequence[Array]) -> tuple[list[Array], list[tuple[Array, ...]]]:
    """Run the forward program; return its outputs and the stash, the parts of each of ``vjp.plan.stored``.

    A GPU's scheduler puts off what nobody waits for: left alone, it would pack a tensor just before the backward pass
    unpacks it, and keep it whole until then. So each product waits for all that was to be packed before it; its
    operands are written to memory in any case, which keeps elementwise chains in one kernel. A mask of what a
    convolution reads is made of that as it was written, so that XLA leaves a ReLU to the convolution before it.

    Numbers that are compared are written as well. Computed again by what packs the comparison, they may be rounded
    otherwise: none of them may be equal to their maximum then.
    """
    graph, stored = vjp.graph, vjp.plan.stored
    env = dict(graph.constants)
    env.update(zip(graph.inputs, inputs, strict=True))
    stash: dict[TensorNumber, tuple[Array, ...]] = {}
    packed: list[Array] = []
    available = graph.derived_from_parameters
    convolutions = [op for op in graph.operators if op.name == "conv_general_dilated" and current().order == "joined"]
    numbers = set[TensorNumber]().union(*ties(vjp.backward_graph).values())
    convolved = {t for op in convolutions for t in op.inputs} - available
    for op in live(graph.operators, [*graph.outputs, *stored]):
        late = {t: _compat.wait(env[t], packed) for t in op.inputs if t not in available} if is_heavy(op) else {}
        if late:
            packed = []
        if any(graph.tensors[t].bits == 1 for t in op.outputs):
            late = {t: _compat.barrier(env[t]) for t in op.inputs if t in convolved}
        env.update(zip(op.outputs, op.evaluate(*(late.get(t, env[t]) for t in op.inputs)), strict=True))
        env.update((t, _compat.computed_once(env[t])) for t in numbers.intersection(op.outputs))
        for t in op.outputs:
            if t in vjp.plan.codecs:
                stash[t] = encode(env[t], vjp.plan.codecs[t])
                packed += [part for part in stash[t] if part is not env[t]]
    for t in stored:
        if t not in stash:
            stash[t] = encode(env[t], vjp.plan.codecs[t])
    return [_compat.wait(env[t], packed) for t in graph.outputs], [stash[t] for t in stored]


def overflows(vjp: VJPProgram, stash: Sequence[Sequence[Array]]) -> Array:
    """Return how many tensors of a stash did not fit and will be computed again, ``int32[]``."""
    stored = zip(vjp.plan.codecs.values(), stash, strict=True)
    flags = [has_overflowed(parts, codec) for codec, parts in stored if codec.may_overflow]
    return functools.reduce(jnp.add, (flag.astype(jnp.int32) for flag in flags), jnp.int32(0))


def backward(
    vjp: VJPProgram,
    parameters: Sequence[Array],
    stash: Sequence[Sequence[Array]],
    cotangents: Sequence[Array | None],
    *,
    barriers: bool = False,
) -> list[Array | None]:
    """The cotangents of the inputs ``vjp.backward_graph.wrt``; None where the outputs do not depend on one.

    Args:
      cotangents: one for each output; None for zero. Those of an output that is returned twice add up.
      parameters, stash, barriers: as ``run_backward`` has them.
    """
    received: dict[TensorNumber, Array] = {}
    for t, value in zip(vjp.backward_graph.source.outputs, cotangents, strict=True):
        if value is not None:
            received[t] = value if t not in received else jnp.add(received[t], value)
    results = run_backward(vjp, vjp.backward_graph.steps, parameters, stash, received, barriers=barriers)
    return [results.get(t) for t in vjp.backward_graph.wrt]


def run_backward(
    vjp: VJPProgram,
    steps: Sequence[BackwardOp],
    parameters: Sequence[Array],
    stash: Sequence[Sequence[Array]],
    received: Mapping[TensorNumber, Array],
    *,
    keep: Iterable[TensorNumber] = (),
    barriers: bool = False,
    absorb: Absorb | None = None,
) -> Mapping[TensorNumber, Array]:
    """Run backward steps in reverse; cotangents are summed in the order in which JAX sums them.

    Args:
      steps: in the order of the program.
      parameters: values of ``vjp.parameters``.
      stash: what ``forward`` returned.
      received: the cotangents that are given, by tensor.
      keep: tensors whose cotangents are returned besides those of ``vjp.backward_graph.wrt``.
      barriers: run the steps behind barriers (see ``jaxpipe.residuals.xla_cpu``) if XLA needs them; not under
        ``vmap``.
      absorb: what is returned for some inputs in place of the cotangent.

    Returns:
      Cotangents by tensor; none for tensors on which the given ones do not depend.
    """
    graph, absorb = vjp.backward_graph, absorb or {}
    stored = dict(zip(vjp.plan.stored, stash, strict=True))
    values = dict(zip(vjp.parameters, parameters, strict=True))
    rematerializer = Rematerializer(vjp.graph, vjp.plan, values, stored, barriers)
    kind = JoinedWalk if current().order == "joined" else Walk if rematerializer.zero is None else GroupedWalk
    waits = current().order != "stepwise"
    walk = kind(graph, dict(received), rematerializer, frozenset((*keep, *graph.wrt)), absorb, vjp.weights, waits)
    absorbed = walk.run(needed(steps, received, step_ends)[0][::-1])
    walk.received.update((t, absorb[t](walk.received[t])) for t in absorb if t in walk.received and t not in absorbed)
    return walk.received


def reached(vjp: VJPProgram, seeds: Iterable[TensorNumber]) -> frozenset[TensorNumber]:
    """The tensors that receive a cotangent when those of the outputs ``seeds`` are given."""
    return frozenset(needed(vjp.backward_graph.steps, seeds, step_ends)[1])
