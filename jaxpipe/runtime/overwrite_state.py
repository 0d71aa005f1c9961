"""New parameters and optimizer state, each written over the old one before the next is computed.

    gradient, old state ─▶ new state ─▶ written ─▶ read there ─▶ new parameter ─▶ written     and the next parameter

So nothing as large as the parameters of a stage is made besides. XLA copies a buffer that is written to unless all that
reads what was there before is known to come first; fences between the steps say so.
"""

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxpipe import _compat
from jaxpipe.graph.graph import Operator, ordered, run
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate, exchanged_values, held_by, operators_of
from jaxpipe.runtime.spmd.buffer_layout import Layout
from jaxpipe.runtime.stage_switch import overwrite
from jaxpipe.sharding.mesh_axes import STAGE


@dataclass(frozen=True, eq=False)
class Renewal:
    """A parameter or a part of the optimizer state that gets a new value.

    Attributes:
      old, new: tensor numbers.
      operators: that make the new value, of what is there when those before it have been written.
    """

    old: int
    new: int
    operators: tuple[Operator, ...]

    @property
    def reads(self) -> list[int]:
        """The tensors that the operators read and do not write; with no operators, the new value."""
        written = {t for op in self.operators for t in op.outputs}
        return ordered(t for t in (*(t for op in self.operators for t in op.inputs), self.new) if t not in written)


def renewals(update: PartitionedUpdate, s: int, everywhere: Collection[int]) -> list[Renewal]:
    """Return what a stage writes, in order: the state that a new parameter is computed from, then that parameter."""
    parameters, _, state = held_by(update, s)
    olds, news = (*update.parameters, *update.state), (*update.new_parameters, *update.new_state)
    new = dict(zip(olds, news, strict=True))
    maker = {t: op for op in operators_of(update, s) for t in op.outputs}
    known = set(everywhere)
    left = dict.fromkeys(state)
    renewed = []

    def renew(t: int) -> None:
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


def _behind(wanted: int, maker: dict[int, Operator], known: Collection[int]) -> list[Operator]:
    """The operators that make a tensor from what is known, in an order in which they can run."""
    chain: dict[int, Operator] = {}
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


def run_update(
    update: PartitionedUpdate,
    layouts: tuple[Layout, Layout, Layout],
    device_buffers: tuple[Sequence[Any], Sequence[Any]],
    gradients: Sequence[Any],
    shared: Sequence[Any],
    unless: Any = None,
) -> tuple[list[Any], list[Any], list[Any]]:
    """One update, inside ``shard_map``.

    Args:
      layouts: of parameters, gradients and state; gradients are cast to the types in which the optimizer takes them.
      device_buffers: this device's buffers of parameters and of state.
      shared: the state of which every stage has a copy.
      unless: whether nothing changes.

    Returns:
      Parameters, state, and shared state.
    """
    stages = range(len(layouts[0].avals))

    def read(s: int) -> Any:
        parameters, sums, state = (
            x.read(s, buffers)
            for x, buffers in zip(layouts, (device_buffers[0], gradients, device_buffers[1]), strict=True)
        )
        taken = zip(held_by(update, s)[1], sums, strict=True)
        return parameters, [x.astype(update.graph.tensors[t].dtype) for t, x in taken], state

    everywhere = exchanged_values(update, read, shared, len(stages))

    branches = [functools.partial(_overwrite_stage, update, s, everywhere, layouts) for s in stages]
    parameters, state = overwrite(lax.axis_index(STAGE), branches, tuple(map(list, device_buffers)), gradients, unless)
    new = [everywhere[n] for n, s in zip(update.new_state, update.state_stage, strict=True) if s is None]
    if unless is not None:
        new = [jnp.where(unless, before, after) for before, after in zip(shared, new, strict=True)]
    return parameters, state, new


def _overwrite_stage(
    update: PartitionedUpdate,
    s: int,
    everywhere: dict[int, Any],
    layouts: tuple[Layout, Layout, Layout],
    device_buffers: tuple[Sequence[Any], Sequence[Any]],
    gradients: Sequence[Any],
    after: Any,
) -> tuple[list[Any], list[Any]]:
    """A stage's new parameters and state in place of the old ones.

    Args:
      everywhere: values by tensor number that all stages have, those that were exchanged included.
      after: an integer before which nothing is done.
    """
    numbers = held_by(update, s)
    hidden = [_compat.disguise(x, after) for x in gradients]
    begun, _ = _compat.fence(((device_buffers[0], hidden, device_buffers[1]), after))
    buffers = _Buffers(layouts, s, numbers, tuple(map(list, begun)))
    known = dict(everywhere)
    steps = renewals(update, s, everywhere.keys())
    home = {step.new: step.old for step in steps}
    touched = [[step.old, *(home.get(t, t) for t in step.reads)] for step in steps]
    written: dict[int, int] = {}  # a new value: the old one in whose place it is
    before = None
    for number, step in enumerate(steps):
        for t in step.reads:
            if t in written:
                known[t] = buffers.read(written[t])  # not to be computed again from what was there before
            elif t in numbers[1]:
                value = buffers.read(t).astype(update.graph.tensors[t].dtype)
                known[t] = value if before is None else _compat.disguise(value, buffers.read(before))
            elif t not in known:
                known[t] = buffers.read(t)
        run(step.operators, known)
        known.setdefault(step.old, buffers.read(step.old))  # for those that compute with the old value later
        buffers.write(step.old, known[step.new])
        buffers.fence(t for ts in touched[number : number + 2] for t in ts)
        written[step.new] = before = step.old
    return buffers.held[0], buffers.held[2]


class _Buffers:
    """A device's buffers of parameters, gradients and state, while a stage writes to them.

    Attributes:
      layouts: of each.
      held: the buffers of each.
    """

    def __init__(
        self, layouts: Sequence[Layout], s: int, numbers: Sequence[Sequence[int]], held: tuple[list[Any], ...]
    ):
        self.layouts, self.held, self._s = layouts, held, s
        self._place = {t: (part, n) for part, ts in enumerate(numbers) for n, t in enumerate(ts)}

    def read(self, t: int) -> Any:
        """A tensor."""
        part, n = self._place[t]
        value = self.layouts[part].get(self._s, n, self.held[part])
        # XLA writes over what a fused computation reads, but not if it has another shape in there.
        return _compat.fence(value) if self.layouts[part].is_whole(self._s, n) else value

    def write(self, t: int, value: Any) -> None:
        """Another value for a tensor."""
        part, n = self._place[t]
        value = _compat.fence(value) if self.layouts[part].is_whole(self._s, n) else value
        self.held[part][:] = self.layouts[part].put(self._s, n, self.held[part], value)

    def fence(self, tensors: Iterable[int]) -> None:
        """Nothing that was done with the buffers of these tensors is done later than this, and nothing new before."""
        places = [self._place[t] for t in tensors if t in self._place]
        buffers = list(dict.fromkeys((part, self.layouts[part].places[self._s][n][0]) for part, n in places))
        fenced = _compat.fence([self.held[part][k] for part, k in buffers])
        for (part, k), value in zip(buffers, fenced, strict=True):
            self.held[part][k] = value
