"""New parameters and optimizer state, each written over the old one before the next is computed.

    gradient, old state ─▶ new state ─▶ written ─▶ read there ─▶ new parameter ─▶ written     and the next parameter

So nothing as large as the parameters of a stage is made besides. XLA copies a buffer that is written to unless all that
reads what was there before is known to come first; barriers between the steps say so.
"""

from collections.abc import Collection
from dataclasses import dataclass

from jaxpipe.array_types import TensorNumber
from jaxpipe.graph.graph import Operator, ordered
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate, held_by


@dataclass(frozen=True, eq=False)
class Renewal:
    """A parameter or a part of the optimizer state that gets a new value."""

    old: TensorNumber
    new: TensorNumber
    operators: tuple[Operator, ...]  # that make the new value, of what is known after the renewals before

    @property
    def reads(self) -> list[TensorNumber]:
        """The tensors that the operators read and do not write; with no operators, the new value."""
        written = {t for op in self.operators for t in op.outputs}
        return ordered(t for t in (*(t for op in self.operators for t in op.inputs), self.new) if t not in written)


def renewals(update: PartitionedUpdate, s: int, everywhere: Collection[TensorNumber]) -> list[Renewal]:
    """Return the writes of a stage in order: the state that a new parameter is computed from, then that parameter."""
    parameters, _, state = held_by(update, s)
    new = update.new_of
    makers = (op for op in update.graph.operators if any(update.stage_of.get(t) == s for t in op.outputs))
    maker = {t: op for op in makers for t in op.outputs}
    known = set(everywhere)
    left = dict.fromkeys(state)
    renewed = []

    def renew(t: TensorNumber) -> None:
        operators = _behind(new[t], maker, known)
        renewed.append(Renewal(t, new[t], tuple(operators)))
        known.update(u for op in operators for u in op.outputs)

    for t in parameters:
        for u in Renewal(t, new[t], tuple(_behind(new[t], maker, known))).reads:
            if u in left:
                left.pop(u)
                renew(u)
        renew(t)
    for t in left:
        renew(t)
    return [x for x in renewed if x.new != x.old]


def _behind(
    wanted: TensorNumber, maker: dict[TensorNumber, Operator], known: Collection[TensorNumber]
) -> list[Operator]:
    """The operators that make a tensor from what is known, in an order in which they can run."""
    chain: dict[TensorNumber, Operator] = {}
    waiting = [(wanted, False)]
    while waiting:
        t, ready = waiting.pop()
        op = maker.get(t)
        if op is None or t in known or op.outputs[0] in chain:
            continue
        if ready:
            chain[op.outputs[0]] = op
        else:
            waiting += [(t, True), *((u, False) for u in reversed(op.inputs))]
    return list(chain.values())
