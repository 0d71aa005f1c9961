"""The parameters that an optimizer trains: those whose gradients some part of its update reads.

    new parameters, state that belongs to none ──what they are made of──▶ state ──what that is made of──▶ gradients

A gradient that is not among them (``optax.set_to_zero``, a mask, a group of ``multi_transform``) is not computed. State
that would only have counted it, such as the moments of a parameter that is set back behind Adam, stays as it was.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from jaxpipe.array_types import TensorNumber
from jaxpipe.graph.graph import Operator, dependents, live
from jaxpipe.graph.primitives import ADDITIONS, KEEPS_ZERO
from jaxpipe.models.traced_update import TracedUpdate


def without_frozen(update: TracedUpdate, trained: Sequence[bool] | None = None) -> TracedUpdate:
    """Leave gradients out of an update that it does not need, or those of parameters that are not ``trained``."""
    graph, count = update.graph, len(update.trained)
    gradients, state = graph.inputs[count : 2 * count], graph.inputs[2 * count :]
    needed = _needed(update)
    if trained is None:
        trained = [t in needed for t in gradients]
    lost = [t for t, kept in zip(gradients, trained, strict=True) if not kept]
    assert needed.isdisjoint(lost), "the update needs a gradient that was thought not to be needed"
    changed, zeros = dependents(graph.operators, lost), _zeros(graph.operators)
    pairs = zip(graph.inputs[:count], graph.outputs[:count], strict=True)
    parameters = [old if _adds_zero(graph.producers.get(new), old, zeros) else new for old, new in pairs]
    new_state = [old if new in changed else new for old, new in zip(state, graph.outputs[count:], strict=True)]
    outputs = (*parameters, *new_state)
    inputs = tuple(t for t in graph.inputs if t not in lost)
    small = replace(graph, inputs=inputs, outputs=outputs, operators=live(graph.operators, outputs))
    return replace(update, graph=small, trained=tuple(trained))


def _needed(update: TracedUpdate) -> set[TensorNumber]:
    """The tensors behind all new parameters, behind state of no parameter, and behind state that these depend on."""
    graph, count = update.graph, len(update.trained)
    owner = [update.owner[k] for k in update.state_stacks.leaf_of]
    state = list(zip(graph.inputs[2 * count :], graph.outputs[count:], strict=True))
    wanted = {*graph.outputs[:count], *(new for (_, new), k in zip(state, owner, strict=True) if k is None)}
    while True:
        needed = wanted | {t for op in live(graph.operators, wanted) for t in op.inputs}
        more = {new for old, new in state if old in needed} - wanted
        if not more:
            return needed
        wanted |= more


def _zeros(operators: Sequence[Operator]) -> set[TensorNumber]:
    """The tensors that are zeros written into the program, and so are no matter what."""
    zeros: set[TensorNumber] = set()
    for op in operators:
        numbers = [np.all(np.asarray(x) == 0) for x in op.literals if not isinstance(x, str)]
        if op.name in KEEPS_ZERO and all(numbers) and all(t in zeros for t in op.inputs):
            zeros.update(op.outputs)
    return zeros


def _adds_zero(op: Operator | None, old: TensorNumber, zeros: Collection[TensorNumber]) -> bool:
    """True if an operator adds zero to a tensor."""
    if op is None or op.name not in ADDITIONS or old not in op.inputs:
        return False
    others = [t for t in op.inputs if t != old]
    added = [*(t in zeros for t in others), *(not np.any(x) for x in op.literals)]
    return added == [True]
