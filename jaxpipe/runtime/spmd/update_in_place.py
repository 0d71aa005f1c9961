"""The optimizer of all stages, each of which writes new values over the old ones, in their order.

XLA copies a buffer that is written to unless all that reads what was there before is known to come first; barriers
between the steps say so.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax.numpy as jnp
from jax import lax

from jaxpipe import _compat
from jaxpipe.array_types import Array, TensorNumber
from jaxpipe.graph.graph import operator_ends, run
from jaxpipe.graph.reverse_walk import needed
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate, held_by, operators_of
from jaxpipe.runtime.overwrite_state import renewals
from jaxpipe.runtime.spmd.buffer_layout import Layout
from jaxpipe.runtime.spmd.stage_switch import overwrite, switch
from jaxpipe.runtime.uint32_words import pack_words, unpack_words, word_count
from jaxpipe.sharding.mesh_axes import STAGE


#: Parameters, gradients and optimizer state: layouts, a device's buffers, or a stage's arrays.
Parts: TypeAlias = tuple[Sequence[Array], Sequence[Array], Sequence[Array]]


def run_update(
    update: PartitionedUpdate,
    layouts: tuple[Layout, Layout, Layout],
    buffers: Parts,
    shared: Sequence[Array],
    unless: Array | None = None,
) -> tuple[list[Array], list[Array], list[Array]]:
    """Run one update, inside ``shard_map``, unless nothing changes: parameters, state, and shared state."""
    stages = range(len(layouts[0].avals))

    def read(s: int) -> dict[TensorNumber, Array]:
        """A stage's arrays, in the types in which the optimizer takes them."""
        arrays = (layout.read(s, x) for layout, x in zip(layouts, buffers, strict=True))
        pairs = (pair for part in zip(held_by(update, s), arrays, strict=True) for pair in zip(*part, strict=True))
        return {t: x.astype(update.graph.tensors[t].dtype) for t, x in pairs}

    everywhere = _known_everywhere(update, read, shared, len(stages))

    def branch(
        s: int, own: tuple[list[Array], list[Array]], gradients: Sequence[Array], turn: Array
    ) -> tuple[list[Array], list[Array]]:
        place = {t: (part, n) for part, tensors in enumerate(held_by(update, s)) for n, t in enumerate(tensors)}
        hidden = [_compat.disguise(x, turn) for x in gradients]
        held, _ = _compat.barrier(([own[0], hidden, own[1]], turn))

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
    own = list(buffers[0]), list(buffers[2])
    parameters, state = overwrite(lax.axis_index(STAGE), branches, own, buffers[1], unless)
    new = [everywhere[n] for n, s in zip(update.new_state, update.state_stage, strict=True) if s is None]
    if unless is not None:
        new = [jnp.where(unless, before, after) for before, after in zip(shared, new, strict=True)]
    return parameters, state, new


def _known_everywhere(
    update: PartitionedUpdate,
    read: Callable[[int], dict[TensorNumber, Array]],
    shared_state: Sequence[Array],
    num_stages: int,
) -> dict[TensorNumber, Array]:
    """Return the values that all stages know before they compute new parameters, by tensor."""
    graph, known = update.graph, dict(update.graph.constants)
    shared = [t for t, s in zip(update.state, update.state_stage, strict=True) if s is None]
    known.update(zip(shared, shared_state, strict=True))
    common = [op for op in graph.operators if not any(t in update.stage_of for t in op.outputs)]

    def send(tensors: Sequence[TensorNumber], s: int) -> Array:
        here = known | read(s)
        mine = [t for t in tensors if update.stage_of[t] == s]
        run(needed(operators_of(update, s), mine, operator_ends, known=here)[0], here)
        avals = [graph.tensors[t].aval for t in tensors]
        values = [here[t] if t in mine else jnp.zeros(a.shape, a.dtype) for t, a in zip(tensors, avals, strict=True)]
        return pack_words(values, sum(map(word_count, avals)))

    for number, tensors in enumerate((*update.exchanged, ())):
        run([op for op in common if update.round[op.outputs[0]] == number], known)
        if tensors:
            branches = [functools.partial(send, tensors, s) for s in range(num_stages)]
            words = lax.psum(switch(lax.axis_index(STAGE), branches), STAGE)
            known.update(zip(tensors, unpack_words(words, [graph.tensors[t].aval for t in tensors]), strict=True))
    return known
