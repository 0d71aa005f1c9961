"""The optimizer of all stages, each of which writes new values over the old ones, in their order.

XLA copies a buffer that is written to unless all that reads what was there before is known to come first; barriers
between the steps say so.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from jax import lax

from jaxpipe import _compat
from jaxpipe.array_types import Array, Shaped, TensorNumber
from jaxpipe.graph.graph import operator_ends, run
from jaxpipe.graph.reverse_walk import needed
from jaxpipe.runtime.executable_plan import Update
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate, held_by, operators_of
from jaxpipe.runtime.overwrite_state import renewals
from jaxpipe.runtime.spmd.lockstep_program import LockstepProgram
from jaxpipe.runtime.spmd.stage_switch import overwrite, switch
from jaxpipe.runtime.train_state import TrainState
from jaxpipe.runtime.uint32_words import pack_given, unpack_words
from jaxpipe.sharding.mesh_axes import STAGE


def run_update(
    update: Update, program: LockstepProgram, state: TrainState, gradients: Sequence[Array], unless: Array | None
) -> TrainState:
    """Run one update, inside ``shard_map``: a state with new parameters, optimizer state, and shared state.

    If ``unless`` is not zero, parameters and optimizer state stay; the shared state is new.
    """
    by_stage, held = update.by_stage, [held_by(update.by_stage, s) for s in program.device_numbers]
    parameters, gradient = (
        layout.numbered([tensors[part] for tensors in held])
        for part, layout in enumerate((program.parameters, program.taken(update)))
    )
    layout = parameters.joined(program.optimizer(update)).joined(gradient)
    written = [*state.parameters, *state.optimizer]

    def taken(t: TensorNumber, x: Array) -> Array:
        """Return an array in the type in which the optimizer takes it."""
        return x.astype(by_stage.graph.tensors[t].dtype)

    def read(s: int) -> dict[TensorNumber, Array]:
        return {t: taken(t, x) for t, x in layout.read(s, [*written, *gradients]).items()}

    everywhere = _known_everywhere(by_stage, read, state.shared, range(program.num_devices))

    def branch(s: int, written: list[Array], gradients: Sequence[Array], turn: Array) -> list[Array]:
        hidden = [_compat.disguise(x, turn) for x in gradients]
        buffers, _ = _compat.barrier(([*written, *hidden], turn))
        known, home = dict(everywhere), {}

        def get(t: TensorNumber) -> Array:
            # XLA writes over what a fused computation reads, but not if it has another shape in there.
            return taken(t, _compat.barrier(layout.get(s, t, buffers)))

        for step in renewals(by_stage, s, everywhere.keys()):
            for t in step.reads:
                if t in home:
                    known[t] = get(home[t])  # not to be computed again from what was there before
                elif t not in known:
                    known[t] = get(t)
            run(step.operators, known)
            known.setdefault(step.old, get(step.old))  # for those that compute with the old value later
            buffers = _compat.barrier(layout.put(s, step.old, buffers, _compat.barrier(known[step.new])))
            home[step.new] = step.old
        return buffers[: len(written)]

    branches = [partial(branch, s) for s in program.device_numbers]
    written = overwrite(lax.axis_index(STAGE), branches, written, gradients, unless)
    shared = tuple(everywhere[t] for t, s in zip(by_stage.new_state, by_stage.state_stage, strict=True) if s is None)
    count = len(state.parameters)
    return replace(state, parameters=tuple(written[:count]), optimizer=tuple(written[count:]), shared=shared)


def _known_everywhere(
    update: PartitionedUpdate, read: Callable[[int], dict[TensorNumber, Array]], shared: Sequence[Array], stages: range
) -> dict[TensorNumber, Array]:
    """Return the values that all stages know before they compute new parameters, by tensor."""
    graph, known = update.graph, dict(update.graph.constants)
    names = [t for t, s in zip(update.state, update.state_stage, strict=True) if s is None]
    known.update(zip(names, shared, strict=True))
    common = [op for op in graph.operators if not any(t in update.stage_of for t in op.outputs)]

    def send(tensors: Sequence[TensorNumber], avals: Sequence[Shaped], s: int) -> Array:
        here = known | read(s)
        mine = [t for t in tensors if update.stage_of[t] == s]
        run(needed(operators_of(update, s), mine, operator_ends, known=here)[0], here)
        return pack_given({k: here[t] for k, t in enumerate(tensors) if t in mine}, avals)

    for number, tensors in enumerate((*update.exchanged, ())):
        run([op for op in common if update.round[op.outputs[0]] == number], known)
        if tensors:
            avals = [graph.tensors[t].aval for t in tensors]
            branches = [partial(send, tensors, avals, s) for s in stages]
            words = lax.psum(switch(lax.axis_index(STAGE), branches), STAGE)
            known.update(zip(tensors, unpack_words(words, avals), strict=True))
    return known
