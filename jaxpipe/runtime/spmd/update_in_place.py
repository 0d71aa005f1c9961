"""The optimizer of all stages, each of which writes new values over the old ones, in their order.

XLA copies a buffer that is written to unless all that reads what was there before is known to come first; barriers
between the steps say so.
"""

import functools
from collections.abc import Sequence

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
        buffers = device_buffers[0], gradients, device_buffers[1]
        parameters, sums, state = (layout.read(s, x) for layout, x in zip(layouts, buffers, strict=True))
        taken = zip(held_by(update, s)[1], sums, strict=True)
        return parameters, [x.astype(update.graph.tensors[t].dtype) for t, x in taken], state

    everywhere = exchanged_values(update, read, shared, len(stages))

    def branch(
        s: int, buffers: tuple[list[Array], list[Array]], gradients: Sequence[Array], turn: Array
    ) -> tuple[list[Array], list[Array]]:
        numbers = held_by(update, s)
        place = {t: (part, n) for part, tensors in enumerate(numbers) for n, t in enumerate(tensors)}
        hidden = [_compat.disguise(x, turn) for x in gradients]
        held, _ = _compat.barrier(([buffers[0], hidden, buffers[1]], turn))

        def get(t: TensorNumber) -> Array:
            part, n = place[t]
            # XLA writes over what a fused computation reads, but not if it has another shape in there.
            return _compat.barrier(layouts[part].get(s, n, held[part])).astype(update.graph.tensors[t].dtype)

        known, home = dict(everywhere), {}
        for step in renewals(update, s, everywhere.keys()):
            for t in step.reads:
                if t in home:
                    known[t] = get(home[t])  # not to be computed again from what was there before
                elif t not in known:
                    known[t] = get(t)
            run(step.operators, known)
            known.setdefault(step.old, get(step.old))  # for those that compute with the old value later
            part, n = place[step.old]
            held[part] = layouts[part].put(s, n, held[part], _compat.barrier(known[step.new]))
            held = _compat.barrier(held)
            home[step.new] = step.old
        return list(held[0]), list(held[2])

    branches = [functools.partial(branch, s) for s in stages]
    buffers = list(device_buffers[0]), list(device_buffers[1])
    parameters, state = overwrite(lax.axis_index(STAGE), branches, buffers, gradients, unless)
    new = [everywhere[n] for n, s in zip(update.new_state, update.state_stage, strict=True) if s is None]
    if unless is not None:
        new = [jnp.where(unless, before, after) for before, after in zip(shared, new, strict=True)]
    return parameters, state, new
