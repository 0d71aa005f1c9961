"""A range of operators with a storage plan: the forward and the backward program of one pipeline stage.

    forward(vjp, inputs)                              -> outputs, stash
    backward(vjp, parameters, stash, cotangents)      -> input cotangents

The backward pass can be had in two parts, so that a schedule may delay the second:

    backward_input(vjp, parameters, stash, cotangents) -> cotangents of `vjp.input_part`, saved
    backward_weight(vjp, parameters, stash, saved)     -> cotangents of `vjp.weight_part`
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe import _compat
from jaxpipe.graph.codec_policy import FAST, Policy
from jaxpipe.graph.graph import Graph, live, ordered
from jaxpipe.residuals.backward_graph import BackwardGraph, BackwardOp, build_backward_graph, restricted
from jaxpipe.residuals.choose_formats import ResidualPlan, check_plan, default_plan
from jaxpipe.residuals.rematerialize import Rematerializer, groups, is_heavy
from jaxpipe.residuals.stored_formats import encode, has_overflowed, part_avals


#: Operators whose weight cotangent is worth delaying: it costs as much as the input cotangent.
_HEAVY = ("conv_general_dilated", "dot_general")


@dataclass(frozen=True, eq=False)
class VJPProgram:
    """The forward and the backward program of a graph, as data.

    Attributes:
      backward_graph: what the forward program computes and what the backward pass needs.
      plan: the format of each tensor.
      parameters: inputs (tensor numbers) that the backward pass is handed again, instead of storing them.
      input_part, weight_part: inputs whose cotangent is ready after each part of the split backward pass.
      input_steps, weight_steps: the backward steps of each part.
      saved: tensors whose cotangent the input part hands to the weight part.
    """

    backward_graph: BackwardGraph
    plan: ResidualPlan
    parameters: tuple[int, ...]
    input_part: tuple[int, ...]
    weight_part: tuple[int, ...]
    input_steps: tuple[BackwardOp, ...]
    weight_steps: tuple[BackwardOp, ...]
    saved: tuple[int, ...]

    @property
    def graph(self) -> Graph:
        """The forward graph, residual operators included."""
        return self.backward_graph.graph

    @property
    def stash_avals(self) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
        """Shape and dtype of the parts of each stored tensor."""
        return tuple(part_avals(self.graph.tensors[t], self.plan.formats[t]) for t in self.plan.stored)


def build(
    graph: Graph,
    wrt: Iterable[int],
    *,
    policy: Policy = FAST,
    held: Iterable[int] = (),
    seeds: Iterable[int] | None = None,
) -> VJPProgram:
    """Linearize a graph and store its tensors by the default plan.

    Args:
      graph: operators (a whole model, or ``graph.section(start, stop)``).
      wrt: inputs, as tensor numbers, that receive a cotangent.
      policy: the codecs that the plan may use.
      held: inputs that are kept alive anyway, so that to store them costs nothing.
      seeds: the outputs that will be given a cotangent; all if left out.
    """
    backward_graph = build_backward_graph(graph, wrt, policy=policy, seeds=seeds)
    return assemble(backward_graph, default_plan(backward_graph, policy, held))


def assemble(backward_graph: BackwardGraph, plan: ResidualPlan) -> VJPProgram:
    """Return the programs of a backward graph under a plan for its residuals.

    Raises:
      ValueError: if the plan does not give the backward pass what it needs, or stores more.
    """
    check_plan(backward_graph, plan)
    deferred, input_steps, weight_steps = _split(backward_graph)
    written = {t for step in weight_steps for t in step.cotangents_out}
    saved = tuple(
        ordered(t for step in weight_steps for t in step.cotangents_in if t not in written or t not in deferred)
    )
    weight_part = tuple(t for t in backward_graph.wrt if t in deferred)
    return VJPProgram(
        backward_graph=backward_graph,
        plan=plan,
        parameters=tuple(t for t in backward_graph.graph.inputs if t in backward_graph.graph.parameters),
        input_part=tuple(t for t in backward_graph.wrt if t not in deferred),
        weight_part=weight_part,
        input_steps=input_steps,
        weight_steps=weight_steps,
        saved=saved,
    )


def forward(vjp: VJPProgram, inputs: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """Run the forward program; return its outputs and the stash, the parts of each of ``vjp.plan.stored``.

    A GPU's scheduler puts off what nobody waits for: left alone, it would pack a tensor just before the backward pass
    unpacks it, and keep it whole until then. So each product waits for all that was to be packed before it; its
    operands are written to memory in any case, which keeps elementwise chains in one kernel.
    """
    graph, stored = vjp.graph, vjp.plan.stored
    env = dict(graph.constants)
    env.update(zip(graph.inputs, inputs, strict=True))
    stash: dict[int, tuple[Any, ...]] = {}
    packed: list[Any] = []
    at_hand = graph.derived_from_parameters()
    for op in live(graph.operators, [*graph.outputs, *stored]):
        late = {t: _compat.wait(env[t], packed) for t in op.inputs if t not in at_hand} if is_heavy(op) else {}
        if late:
            packed = []
        env.update(zip(op.outputs, op.evaluate(*(late.get(t, env[t]) for t in op.inputs)), strict=True))
        for t in op.outputs:
            if vjp.plan.is_stored(t):
                stash[t] = encode(env[t], graph.tensors[t], vjp.plan.formats[t])
                packed += [part for part in stash[t] if part is not env[t]]
    for t in stored:
        if t not in stash:
            stash[t] = encode(env[t], graph.tensors[t], vjp.plan.formats[t])
    return [_compat.wait(env[t], packed) for t in graph.outputs], [stash[t] for t in stored]


def overflows(vjp: VJPProgram, stash: Sequence[Sequence[Any]]) -> jax.Array:
    """Return how many sparse tensors of a stash did not fit and will be computed again, ``int32[]``."""
    stored = zip(vjp.plan.stored, stash, strict=True)
    flags = [has_overflowed(parts, vjp.plan.formats[t]) for t, parts in stored if t in vjp.plan.sparse]
    return functools.reduce(jnp.add, (flag.astype(jnp.int32) for flag in flags), jnp.int32(0))


def backward(
    vjp: VJPProgram,
    parameters: Sequence[Any],
    stash: Sequence[Sequence[Any]],
    cotangents: Sequence[Any | None],
    *,
    fenced: bool = False,
) -> list[Any | None]:
    """The cotangents of the inputs ``vjp.backward_graph.wrt``; None where the outputs do not depend on one.

    Args:
      parameters: values of ``vjp.parameters``.
      stash: what ``forward`` returned.
      cotangents: one for each output; None for zero.
      fenced: run the steps behind fences (see ``jaxpipe.residuals.rematerialize``) if XLA needs them; not under
        ``vmap``.
    """
    received = _received(vjp, cotangents)
    rematerializer = _rematerializer(vjp, parameters, stash, fenced)
    _walk(vjp, vjp.backward_graph.steps, received, rematerializer)
    return [received.get(t) for t in vjp.backward_graph.wrt]


def backward_input(
    vjp: VJPProgram,
    parameters: Sequence[Any],
    stash: Sequence[Sequence[Any]],
    cotangents: Sequence[Any | None],
    *,
    fenced: bool = False,
) -> tuple[list[Any | None], list[Any | None]]:
    """First part: cotangents of ``vjp.input_part``, and those saved for ``backward_weight``."""
    received = _received(vjp, cotangents)
    rematerializer = _rematerializer(vjp, parameters, stash, fenced)
    _walk(vjp, vjp.input_steps, received, rematerializer, keep=frozenset(vjp.saved))
    return [received.get(t) for t in vjp.input_part], [received.get(t) for t in vjp.saved]


def backward_weight(
    vjp: VJPProgram,
    parameters: Sequence[Any],
    stash: Sequence[Sequence[Any]],
    saved: Sequence[Any | None],
    *,
    fenced: bool = False,
) -> list[Any | None]:
    """Second part: cotangents of ``vjp.weight_part``."""
    received = {t: value for t, value in zip(vjp.saved, saved, strict=True) if value is not None}
    rematerializer = _rematerializer(vjp, parameters, stash, fenced)
    _walk(vjp, vjp.weight_steps, received, rematerializer, keep=frozenset(vjp.saved))
    return [received.get(t) for t in vjp.weight_part]


def reached(vjp: VJPProgram, seeds: Iterable[int]) -> frozenset[int]:
    """The tensors that receive a cotangent when those of the outputs ``seeds`` are given."""
    received = set(seeds)
    for step in reversed(vjp.backward_graph.steps):
        if not received.isdisjoint(step.cotangents_in):
            received.update(step.cotangents_out)
    return frozenset(received)


def _received(vjp: VJPProgram, cotangents: Sequence[Any | None]) -> dict[int, Any]:
    """Cotangents by tensor number; those of an output returned twice add up."""
    received: dict[int, Any] = {}
    for t, value in zip(vjp.backward_graph.source.outputs, cotangents, strict=True):
        if value is not None:
            received[t] = value if t not in received else jnp.add(received[t], value)
    return received


def _rematerializer(
    vjp: VJPProgram, parameters: Sequence[Any], stash: Sequence[Sequence[Any]], fenced: bool
) -> Rematerializer:
    values = dict(zip(vjp.parameters, parameters, strict=True))
    return Rematerializer(vjp.graph, vjp.plan, values, dict(zip(vjp.plan.stored, stash, strict=True)), fenced)


def _walk(
    vjp: VJPProgram,
    steps: Sequence[BackwardOp],
    received: dict[int, Any],
    rematerializer: Rematerializer,
    keep: frozenset[int] = frozenset(),
) -> None:
    """Run backward steps in reverse; cotangents are summed in the order in which JAX sums them."""
    keep = keep | set(vjp.backward_graph.wrt)
    if not rematerializer.fenced:
        _run_steps(vjp, steps[::-1], received, rematerializer, keep)
        return
    cotangents, values = vjp.backward_graph.source.tensors, vjp.graph.tensors
    outlines = [_Outline(group) for group in groups(steps[::-1])]
    for outline in reversed(outlines):
        outline.keep = keep
        keep = keep.union(*(step.cotangents_in for step in outline.steps))
    known, pending = set(rematerializer.values), set(received)
    for outline in outlines:
        outline.go(rematerializer, pending, known)
    for k, outline in enumerate(outlines):
        if not outline.runs:
            continue
        written = sorted(outline.written)
        shared = sorted(outline.rematerialized & set().union(*(later.read for later in outlines[k + 1 :])))

        def behind(
            outline: _Outline = outline, written: Sequence[int] = written, shared: Sequence[int] = shared
        ) -> Any:
            inner, cotangents_of_group = rematerializer.copy(), dict(received)
            _run_steps(vjp, outline.steps, cotangents_of_group, inner, outline.keep)
            return [cotangents_of_group[t] for t in written], [inner.values[t] for t in shared]

        avals = [cotangents[t].aval for t in written], [values[t].aval for t in shared]
        new, rematerialized = rematerializer.fence(behind, avals)
        for t in outline.consumed:
            received.pop(t, None)
        received.update(zip(written, new, strict=True))
        rematerializer.values.update(zip(shared, rematerialized, strict=True))


class _Outline:
    """The cotangents and forward tensors that a group of steps reads and makes, and those that it must keep."""

    def __init__(self, steps: Sequence[BackwardOp]):
        self.steps = steps
        self.runs = False
        self.keep: frozenset[int] = frozenset()
        self.written: set[int] = set()
        self.consumed: set[int] = set()
        self.rematerialized: set[int] = set()
        self.read: set[int] = set()

    def go(self, rematerializer: Rematerializer, received: set[int], known: set[int]) -> None:
        """Walk through the steps; changes what is received and known."""
        here = set(known)
        for step in self.steps:
            present = {t for t in step.cotangents_in if t in received}
            if not present:
                continue
            self.runs = True
            program, loads = rematerializer.sources(step, here)
            self.read |= {*step.needs, *(t for op in program for t in op.inputs)}
            new = {*loads, *(t for op in program for t in op.outputs)}
            self.rematerialized |= {t for t in new if rematerializer.is_kept(t)}
            here |= new
            received -= present - self.keep
            self.written -= present - self.keep
            self.consumed |= present - self.keep
            received |= set(step.cotangents_out)
            self.written |= set(step.cotangents_out)
        known |= self.rematerialized


def _run_steps(
    vjp: VJPProgram,
    steps: Sequence[BackwardOp],
    received: dict[int, Any],
    rematerializer: Rematerializer,
    keep: frozenset[int],
) -> None:
    """Run backward steps in the order given.

    XLA:CPU runs whatever it can as early as it can: there each step's values wait for its cotangent. On a GPU a
    product's values wait for its cotangents, and those of all steps up to the next product for its results, which are
    in memory in any case: a barrier amid an elementwise chain would cut its kernel in two.
    """
    tensors = vjp.backward_graph.source.tensors
    early = _compat.runs_breadth_first()
    if not early:
        ready = list(received)
        received.update(zip(ready, rematerializer.load(_light(steps), [received[t] for t in ready]), strict=True))
    for place, step in enumerate(steps):
        present = [t for t in step.cotangents_in if t in received]
        if not present:
            continue
        if not early and is_heavy(step):
            received.update(zip(present, rematerializer.load([step], [received[t] for t in present]), strict=True))
        needs = rematerializer.fetch(step, received[present[0]])
        seeds = [received[t] if t in received else _compat.zeros(tensors[t].aval) for t in step.cotangents_in]
        for t in present:
            if t not in keep:
                del received[t]
        with jax.named_scope(step.path or step.name):
            results = step.program.evaluate([*needs, *seeds])
        if not early and is_heavy(step):
            results = rematerializer.load(_light(steps[place + 1 :]), results)
        for t, value in zip(step.cotangents_out, results, strict=True):
            received[t] = value if t not in received else jnp.add(received[t], value)


def _light(steps: Iterable[BackwardOp]) -> Iterable[BackwardOp]:
    """The steps before the first product."""
    return itertools.takewhile(lambda step: not is_heavy(step), steps)


def _split(backward_graph: BackwardGraph) -> tuple[frozenset[int], tuple[BackwardOp, ...], tuple[BackwardOp, ...]]:
    """Part the backward steps; returns the tensors whose cotangent the weight part makes, and both lists.

    Cotangents of weights of convolutions and matrix products are delayed, and with them whatever leads from there
    to a parameter. All other cotangents (biases, scales) are cheap and small, and come with the input part.
    """
    at_hand = backward_graph.source.derived_from_parameters()
    deferred = {t for step in backward_graph.steps if step.name in _HEAVY for t in step.cotangents_out if t in at_hand}
    for step in reversed(backward_graph.steps):
        if not deferred.isdisjoint(step.cotangents_in):
            deferred.update(step.cotangents_out)
    input_steps, weight_steps = [], []
    for step in backward_graph.steps:
        early = [k for k, t in enumerate(step.cotangents_out) if t not in deferred]
        late = [k for k, t in enumerate(step.cotangents_out) if t in deferred]
        if early:
            input_steps.append(restricted(step, early))
        if late:
            weight_steps.append(restricted(step, late))
    return frozenset(deferred), tuple(input_steps), tuple(weight_steps)
