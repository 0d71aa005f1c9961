"""The optimizer of all stages, each of which writes new values over the old ones, in their order.

XLA copies a buffer that is written to unless all that reads what was there before is known to come first; barriers
between the steps say so.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from jax import lax

from jaxpipe import _compat
from jaxpipe.array_types import Array, TensorNumber
from jaxpipe.graph.graph import run
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate, compute, held_by, renewals
from jaxpipe.runtime.spmd.buffer_layout import Place
from jaxpipe.runtime.spmd.lockstep_program import LockstepProgram
from jaxpipe.runtime.spmd.stage_switch import overwrite, switch
from jaxpipe.runtime.train_state import TrainState
from jaxpipe.runtime.uint32_words import pack_words, unpack_words
from jaxpipe.sharding.mesh_axes import STAGE


#: Buffers of a device, by group.
Buffers: TypeAlias = dict[str, list[Array]]


def run_update(
    program: LockstepProgram, state: TrainState, gradients: Sequence[Array], unless: Array | None
) -> TrainState:
    """Run one update, inside ``shard_map``: a state with new parameters, optimizer state, and shared state.

    If ``unless`` is not zero, parameters and optimizer state stay; the shared state is new.
    """
    assert program.update is not None
    by_stage = program.update.by_stage
    written = {"parameters": list(state.parameters), "optimizer": list(state.optimizer)}
    places = [_places(by_stage, program, d) for d in program.device_numbers]

    def taken(t: TensorNumber, x: Array) -> Array:
        """Return an array in the type in which the optimizer takes it."""
        return x.astype(by_stage.graph.tensors[t].dtype)

    def read(s: int) -> dict[TensorNumber, Array]:
        buffers = {**written, "gradients": gradients}
        return {t: taken(t, place.get(buffers[group])) for t, (group, place) in places[s].items()}

    everywhere = _known_everywhere(by_stage, read, state.shared, range(program.num_devices))

    def branch(s: int, written: Buffers, gradients: Sequence[Array], turn: Array) -> Buffers:
        hidden = [_compat.disguise(x, turn) for x in gradients]
        buffers, _ = _compat.barrier(({**written, "gradients": hidden}, turn))
        known, unread = dict(everywhere), dict(places[s])
        for step in renewals(by_stage, s, everywhere.keys()):
            for t in (*step.reads, step.old):
                if t in unread:
                    group, place = unread.pop(t)
                    # XLA writes over what a fused computation reads, but not if it has another shape in there.
                    known[t] = taken(t, _compat.barrier(place.get(buffers[group])))
            run(step.operators, known)
            # Later steps read the new value where it is now, lest it is computed again from what was there before.
            group, place = unread[step.new] = places[s][step.old]
            new = place.put(buffers[group], _compat.barrier(known[step.new]))
            buffers = _compat.barrier({**buffers, group: new})
        return {group: buffers[group] for group in written}

    branches = [partial(branch, s) for s in program.device_numbers]
    written = overwrite(lax.axis_index(STAGE), branches, written, gradients, unless)
    shared = tuple(everywhere[t] for t, s in zip(by_stage.new_state, by_stage.state_stage, strict=True) if s is None)
    return replace(state, shared=shared, **{group: tuple(buffers) for group, buffers in written.items()})


def _places(update: PartitionedUpdate, program: LockstepProgram, device: int) -> dict[TensorNumber, tuple[str, Place]]:
    """Return the groups and the places of a device's arrays by their numbers in the optimizer."""
    layouts = {"parameters": program.parameters, "gradients": program.taken, "optimizer": program.state["optimizer"]}
    places = {group: layout.places[device].values() for group, layout in layouts.items()}
    pairs = zip(held_by(update, device), places.items(), strict=True)
    return {t: (group, place) for tensors, (group, held) in pairs for t, place in zip(tensors, held, strict=True)}


def _known_everywhere(
    update: PartitionedUpdate, read: Callable[[int], dict[TensorNumber, Array]], shared: Sequence[Array], stages: range
) -> dict[TensorNumber, Array]:
    """Return the values that all stages know before they compute new parameters, by tensor."""
    graph = update.graph
    names = [update.state[k] for k in update.leaves_of(None)]
    known = dict(graph.constants) | dict(zip(names, shared, strict=True))

    def send(tensors: Sequence[TensorNumber], s: int) -> Array:
        here = known | read(s)
        mine = [t for t in tensors if update.stage_of[t] == s]
        compute(update, s, mine, here)
        return pack_words([here[t] if t in mine else graph.tensors[t].aval for t in tensors])

    for tensors in update.exchanged:
        words = lax.psum(switch(lax.axis_index(STAGE), [partial(send, tensors, s) for s in stages]), STAGE)
        known.update(zip(tensors, unpack_words(words, [graph.tensors[t].aval for t in tensors]), strict=True))
    compute(update, None, [t for op in graph.operators for t in op.outputs if t not in update.stage_of], known)
    return known
