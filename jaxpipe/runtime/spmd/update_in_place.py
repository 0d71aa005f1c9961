"""The optimizer of all stages, each of which writes new values over the old ones, in their order.

XLA copies a buffer that is written to unless all that reads what was there before is known to come first; barriers
between the steps say so.
"""

import functools
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax import lax

from jaxpipe import _compat
from jaxpipe.array_types import Array, TensorNumber
from jaxpipe.graph.graph import run
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate, exchanged_values, held_by
from jaxpipe.runtime.overwrite_state import renewals
from jaxpipe.runtime.spmd.buffer_layout import Layout
from jaxpipe.runtime.stage_switch import overwrite
from jaxpipe.sharding.mesh_axes import STAGE


def run_update(
    update: PartitionedUpdate,
    layouts: tuple[Layout, Layout, Layout],
    device_buffers: tuple[Sequence[Array], Sequence[Array]],
    gradients: Sequence[Array],
    shared: Sequence[Array],
    unless: Array | None = None,
) -> tuple[list[Array], list[Array], list[Array]]:
    """Run one update, inside ``shard_map``, unless nothing changes: parameters, state, and shared state.

    The layouts are those of parameters, gradients and state.
    """
    stages = range(len(layouts[0].avals))

    def read(s: int) -> tuple[list[Array], list[Array], list[Array]]:
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
    everywhere: dict[TensorNumber, Array],
    layouts: tuple[Layout, Layout, Layout],
    device_buffers: tuple[Sequence[Array], Sequence[Array]],
    gradients: Sequence[Array],
    after: Array,
) -> tuple[list[Array], list[Array]]:
    """Write a stage's new parameters and state in place of the old ones; nothing is done before ``after``."""
    numbers = held_by(update, s)
    hidden = [_compat.disguise(x, after) for x in gradients]
    begun, _ = _compat.barrier(((device_buffers[0], hidden, device_buffers[1]), after))
    buffers = _Buffers(layouts, s, numbers, tuple(map(list, begun)))
    known = dict(everywhere)
    steps = renewals(update, s, everywhere.keys())
    home = {step.new: step.old for step in steps}
    touched = [[step.old, *(home.get(t, t) for t in step.reads)] for step in steps]
    written: dict[TensorNumber, TensorNumber] = {}  # a new value: the old one in whose place it is
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
        buffers.barrier(t for ts in touched[number : number + 2] for t in ts)
        written[step.new] = before = step.old
    return buffers.held[0], buffers.held[2]


class _Buffers:
    """A device's buffers of parameters, gradients and state, while a stage writes to them."""

    def __init__(
        self,
        layouts: Sequence[Layout],
        s: int,
        numbers: Sequence[Sequence[TensorNumber]],
        held: tuple[list[Array], ...],
    ):
        self.layouts, self.held, self._s = layouts, held, s
        self._place = {t: (part, n) for part, ts in enumerate(numbers) for n, t in enumerate(ts)}

    def read(self, t: TensorNumber) -> Array:
        """A tensor."""
        part, n = self._place[t]
        value = self.layouts[part].get(self._s, n, self.held[part])
        # XLA writes over what a fused computation reads, but not if it has another shape in there.
        return _compat.barrier(value) if self.layouts[part].is_whole(self._s, n) else value

    def write(self, t: TensorNumber, value: Array) -> None:
        """Another value for a tensor."""
        part, n = self._place[t]
        value = _compat.barrier(value) if self.layouts[part].is_whole(self._s, n) else value
        self.held[part][:] = self.layouts[part].put(self._s, n, self.held[part], value)

    def barrier(self, tensors: Iterable[TensorNumber]) -> None:
        """Nothing that was done with the buffers of these tensors is done later than this, and nothing new before."""
        places = [self._place[t] for t in tensors if t in self._place]
        buffers = list(dict.fromkeys((part, self.layouts[part].places[self._s][n][0]) for part, n in places))
        values = _compat.barrier([self.held[part][k] for part, k in buffers])
        for (part, k), value in zip(buffers, values, strict=True):
            self.held[part][k] = value
