"""A range of operators with a storage plan: the forward and the backward program of one pipeline stage.

    forward(stage, inputs)                              -> outputs, stash
    backward(stage, parameters, stash, cotangents)      -> input cotangents

The backward pass can be had in two parts, so that a schedule may delay the second:

    backward_input(stage, parameters, stash, cotangents) -> cotangents of `stage.input_part`, saved
    backward_weight(stage, parameters, stash, saved)     -> cotangents of `stage.weight_part`
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe import _compat
from jaxpipe.demand import Backward, Linearization, linearize
from jaxpipe.graph import Graph, live, ordered, run
from jaxpipe.policy import FAST, Policy
from jaxpipe.stash import Storage, decode, encode, has_overflowed, part_avals
from jaxpipe.storage import Choices, Derivations, check_plan, default_plan


#: Operators whose weight cotangent is worth delaying: it costs as much as the input cotangent.
_HEAVY = ("conv_general_dilated", "dot_general")


#: Operators whose backward program takes its operands as whole arrays.
_UNFUSED = frozenset(("checkpoint", "cond", "custom_vjp_call", "dot_general", "remat", "remat2", "scan", "while"))


@dataclass(frozen=True, eq=False)
class Stage:
    """The two programs of a stage, as data.

    Attributes:
      linearization: what the stage computes and what its backward pass needs.
      storage: the choice for each tensor.
      parameters: inputs (tensor numbers) that the backward pass is handed again, instead of storing them.
      input_part, weight_part: inputs whose cotangent is ready after each part of the split backward pass.
      input_steps, weight_steps: the backward steps of each part.
      saved: tensors whose cotangent the input part hands to the weight part.
    """

    linearization: Linearization
    storage: Choices
    parameters: tuple[int, ...]
    input_part: tuple[int, ...]
    weight_part: tuple[int, ...]
    input_steps: tuple[Backward, ...]
    weight_steps: tuple[Backward, ...]
    saved: tuple[int, ...]

    @property
    def graph(self) -> Graph:
        """The forward graph, residual operators included."""
        return self.linearization.graph

    @property
    def stash_avals(self) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
        """Shape and dtype of the parts of each stored tensor."""
        return tuple(part_avals(self.graph.tensors[t], self.storage.forms[t]) for t in self.storage.stored)


def build(
    graph: Graph,
    wrt: Iterable[int],
    *,
    policy: Policy = FAST,
    held: Iterable[int] = (),
    seeds: Iterable[int] | None = None,
) -> Stage:
    """Linearize a graph and store its tensors by the default plan.

    Args:
      graph: the stage's operators (a whole model, or ``graph.section(start, stop)``).
      wrt: inputs, as tensor numbers, that receive a cotangent.
      policy: the codecs that the plan may use.
      held: inputs that are kept alive anyway, so that to store them costs nothing.
      seeds: the outputs that will be given a cotangent; all if left out.
    """
    linearization = linearize(graph, wrt, policy=policy, seeds=seeds)
    return assemble(linearization, default_plan(linearization, policy, held))


def assemble(linearization: Linearization, storage: Choices) -> Stage:
    """A stage of a linearization and a storage plan for it.

    Raises:
      ValueError: if the plan does not give the backward pass what it needs, or stores more.
    """
    check_plan(linearization, storage)
    deferred, input_steps, weight_steps = _split(linearization)
    made = {t for step in weight_steps for t in step.cotangents_out}
    saved = tuple(ordered(t for step in weight_steps for t in step.cotangents_in if t not in made or t not in deferred))
    weight_part = tuple(t for t in linearization.wrt if t in deferred)
    return Stage(
        linearization=linearization,
        storage=storage,
        parameters=tuple(t for t in linearization.graph.inputs if t in linearization.graph.parameters),
        input_part=tuple(t for t in linearization.wrt if t not in deferred),
        weight_part=weight_part,
        input_steps=input_steps,
        weight_steps=weight_steps,
        saved=saved,
    )


def forward(stage: Stage, inputs: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """Run the stage; returns its outputs and the stash, the parts of each of ``stage.storage.stored``."""
    graph = stage.graph
    env = dict(graph.constants)
    env.update(zip(graph.inputs, inputs, strict=True))
    stored = stage.storage.stored
    run(live(graph.operators, [*graph.outputs, *stored]), env)
    stash = [encode(env[t], graph.tensors[t], stage.storage.forms[t]) for t in stored]
    return [env[t] for t in graph.outputs], stash


def overflows(stage: Stage, stash: Sequence[Sequence[Any]]) -> jax.Array:
    """How many sparse tensors of a stash did not fit and will be computed again, ``int32[]``."""
    stored = zip(stage.storage.stored, stash, strict=True)
    flags = [has_overflowed(parts, stage.storage.forms[t]) for t, parts in stored if t in stage.storage.sparse]
    return functools.reduce(jnp.add, (flag.astype(jnp.int32) for flag in flags), jnp.int32(0))


def backward(
    stage: Stage,
    parameters: Sequence[Any],
    stash: Sequence[Sequence[Any]],
    cotangents: Sequence[Any | None],
    *,
    beside_forward: bool = True,
) -> list[Any | None]:
    """The cotangents of the inputs ``stage.linearization.wrt``; None where the outputs do not depend on one.

    Args:
      parameters: values of ``stage.parameters``.
      stash: what ``forward`` returned.
      cotangents: one for each output; None for zero.
      beside_forward: whether XLA sees ``forward`` in the same computation, so that it must be kept from merging what
        is recomputed with what was computed there.
    """
    received = _received(stage, cotangents)
    recall = _Recall(stage, parameters, stash, beside_forward)
    _walk(stage, stage.linearization.backward, received, recall)
    return [received.get(t) for t in stage.linearization.wrt]


def backward_input(
    stage: Stage,
    parameters: Sequence[Any],
    stash: Sequence[Sequence[Any]],
    cotangents: Sequence[Any | None],
    *,
    beside_forward: bool = True,
) -> tuple[list[Any | None], list[Any | None]]:
    """First part: cotangents of ``stage.input_part``, and those saved for ``backward_weight``."""
    received = _received(stage, cotangents)
    recall = _Recall(stage, parameters, stash, beside_forward)
    _walk(stage, stage.input_steps, received, recall, keep=frozenset(stage.saved))
    return [received.get(t) for t in stage.input_part], [received.get(t) for t in stage.saved]


def backward_weight(
    stage: Stage,
    parameters: Sequence[Any],
    stash: Sequence[Sequence[Any]],
    saved: Sequence[Any | None],
    *,
    beside_forward: bool = True,
) -> list[Any | None]:
    """Second part: cotangents of ``stage.weight_part``."""
    received = {t: value for t, value in zip(stage.saved, saved, strict=True) if value is not None}
    recall = _Recall(stage, parameters, stash, beside_forward)
    _walk(stage, stage.weight_steps, received, recall, keep=frozenset(stage.saved))
    return [received.get(t) for t in stage.weight_part]


def reached(stage: Stage, seeds: Iterable[int]) -> frozenset[int]:
    """The tensors that receive a cotangent when those of the outputs ``seeds`` are given."""
    received = set(seeds)
    for step in reversed(stage.linearization.backward):
        if not received.isdisjoint(step.cotangents_in):
            received.update(step.cotangents_out)
    return frozenset(received)


def _received(stage: Stage, cotangents: Sequence[Any | None]) -> dict[int, Any]:
    """Cotangents by tensor number; those of an output returned twice add up."""
    received: dict[int, Any] = {}
    for t, value in zip(stage.linearization.source.outputs, cotangents, strict=True):
        if value is not None:
            received[t] = value if t not in received else jnp.add(received[t], value)
    return received


def _walk(
    stage: Stage,
    steps: Sequence[Backward],
    received: dict[int, Any],
    recall: "_Recall",
    keep: frozenset[int] = frozenset(),
) -> None:
    """Run backward steps in reverse; cotangents are summed in the order in which JAX sums them."""
    keep = keep | set(stage.linearization.wrt)
    tensors = stage.linearization.source.tensors
    for step in reversed(steps):
        present = [t for t in step.cotangents_in if t in received]
        if not present:
            continue
        needs = recall.fetch(step, received[present[0]])
        seeds = [received[t] if t in received else _compat.zeros(tensors[t].aval) for t in step.cotangents_in]
        for t in present:
            if t not in keep:
                del received[t]
        with jax.named_scope(step.path or step.name):
            results = step.program.evaluate([*needs, *seeds])
        for t, value in zip(step.cotangents_out, results, strict=True):
            received[t] = value if t not in received else jnp.add(received[t], value)


class _Recall:
    """Values of forward tensors during a backward pass: decoded or recomputed when first needed, then kept.

    What is loaded from the stash is tied to the cotangents of the step that needs it, so that XLA can neither
    decode nor recompute it any earlier.
    """

    def __init__(
        self, stage: Stage, parameters: Sequence[Any], stash: Sequence[Sequence[Any]], beside_forward: bool = True
    ):
        self._stage = stage
        self._beside_forward = beside_forward
        self._derivations = Derivations(stage.graph)
        self._given: dict[int, Any] = dict(stage.graph.constants)
        self._given.update(zip(stage.parameters, parameters, strict=True))
        self._values = dict(self._given)
        self._stash = dict(zip(stage.storage.stored, stash, strict=True))
        self._loaded: dict[int, Any] = {}

    def fetch(self, step: Backward, after: Any) -> list[Any]:
        """Values of the tensors that a backward step needs, not before the cotangent ``after``."""
        missing = [t for t in step.needs if t not in self._values]
        if missing:
            program, loads = self._derivations.of(missing, self._stage.storage, self._values)
            tied = iter(_compat.tie([part for t in loads for part in self._stash[t]], after))
            for t in loads:
                parts = [next(tied) for _ in self._stash[t]]
                if self._beside_forward:
                    hidden = [_compat.disguise(part, after) for part in parts]
                else:
                    hidden = parts
                self._values[t] = self._restore(t, hidden)
                if self._stage.storage.forms[t].storage is Storage.KEEP:
                    (self._loaded[t],) = parts
            run(program, self._values)
        # What does not fuse with its operands would have to copy a disguised one.
        first = self._loaded if step.name in _UNFUSED else {}
        return [first.get(t, self._values[t]) for t in step.needs]

    def _restore(self, t: int, parts: Sequence[Any]) -> Any:
        """A stored tensor from its parts; one that did not fit, from tensors that are stored whole."""
        tensor, form = self._stage.graph.tensors[t], self._stage.storage.forms[t]
        if not form.storage.is_sparse:
            return decode(parts, tensor, form)

        def again() -> Any:
            program, leaves = self._derivations.fallback(t, self._stage.storage, self._given)
            values = dict(self._given)
            values.update((u, self._restore(u, self._stash[u])) for u in leaves)
            run(program, values)
            return values[t]

        return jax.lax.cond(has_overflowed(parts, form), again, lambda: decode(parts, tensor, form))


def _split(linearization: Linearization) -> tuple[frozenset[int], tuple[Backward, ...], tuple[Backward, ...]]:
    """Part the backward steps; returns the tensors whose cotangent the weight part makes, and both lists.

    Cotangents of weights of convolutions and matrix products are delayed, and with them whatever leads from there
    to a parameter. All other cotangents (biases, scales) are cheap and small, and come with the input part.
    """
    at_hand = linearization.source.derived_from_parameters()
    deferred = {
        t for step in linearization.backward if step.name in _HEAVY for t in step.cotangents_out if t in at_hand
    }
    for step in reversed(linearization.backward):
        if not deferred.isdisjoint(step.cotangents_in):
            deferred.update(step.cotangents_out)
    input_steps, weight_steps = [], []
    for step in linearization.backward:
        early = [k for k, t in enumerate(step.cotangents_out) if t not in deferred]
        late = [k for k, t in enumerate(step.cotangents_out) if t in deferred]
        if early:
            input_steps.append(_restrict(step, early))
        if late:
            weight_steps.append(_restrict(step, late))
    return frozenset(deferred), tuple(input_steps), tuple(weight_steps)


def _restrict(step: Backward, positions: Sequence[int]) -> Backward:
    """The part of a step that makes the cotangents at some of its positions."""
    if len(positions) == len(step.cotangents_out):
        return step
    program = step.program
    outputs = [program.outputs[k] for k in positions]
    operators = live(program.operators, outputs)
    read = {*outputs, *(t for op in operators for t in op.inputs)}
    count = len(step.needs)
    needs = [k for k in range(count) if program.inputs[k] in read]
    seeds = [k for k in range(len(step.cotangents_in)) if program.inputs[count + k] in read]
    return replace(
        step,
        needs=tuple(step.needs[k] for k in needs),
        cotangents_in=tuple(step.cotangents_in[k] for k in seeds),
        cotangents_out=tuple(step.cotangents_out[k] for k in positions),
        program=replace(
            program,
            operators=operators,
            inputs=tuple(program.inputs[k] for k in (*needs, *(count + k for k in seeds))),
            outputs=tuple(outputs),
        ),
    )
