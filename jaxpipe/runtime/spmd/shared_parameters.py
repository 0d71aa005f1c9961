"""Parameters that stages on several devices use (tied embeddings): they live on one, the others borrow them.

    before the ticks:  the owner's value ──all-reduce of its bits──▶ every device
    after the ticks:   the borrowers' gradients ──all-reduce──▶ added to the owner's

Once a step, not once a micro-batch. JAX adds the cotangents of all uses for each micro-batch and then those of the
micro-batches; here each use is added up over the micro-batches first, which rounds otherwise.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax

from jaxpipe.array_types import Array
from jaxpipe.runtime.spmd.lockstep_program import LockstepProgram
from jaxpipe.runtime.stage_switch import switch
from jaxpipe.runtime.uint32_words import from_words, to_words
from jaxpipe.schedules.table import DeviceNumber
from jaxpipe.sharding.mesh_axes import STAGE


def borrow(program: LockstepProgram, buffers: Sequence[Array]) -> list[Array]:
    """This device's buffers, and behind them the value of every shared parameter; inside ``shard_map``."""
    if not program.shared:
        return list(buffers)
    avals = program.avals(program.shared)

    def values(device: DeviceNumber) -> list[Array]:
        local = dict(zip(program.held(device)[0], program.parameters.read(device, buffers), strict=True))
        zeros = [jnp.zeros(a.shape, a.dtype) for a in avals]
        return [to_words(local.get(t, zero)) for t, zero in zip(program.shared, zeros, strict=True)]

    words = lax.psum(_by_device(program, values), STAGE)
    return [*buffers, *(from_words(w, a) for w, a in zip(words, avals, strict=True))]


def give_back(program: LockstepProgram, sums: Sequence[Array]) -> list[Array]:
    """This device's gradient buffers, with what others have computed for its parameters."""
    if not program.shared_trained:
        return list(sums)
    count = len(program.gradients.buffers)
    buffers, borrowed = list(sums[:count]), lax.psum(list(sums[count:]), STAGE)

    def added(device: DeviceNumber) -> list[Array]:
        gradient_of = dict(zip(program.shared_trained, borrowed, strict=True))
        local = zip(program.trained(device), program.sums.read(device, buffers), strict=True)
        return program.sums.write(
            device, [g + gradient_of[t].reshape(g.shape) if t in gradient_of else g for t, g in local]
        )

    return _by_device(program, added)


def _by_device(program: LockstepProgram, function: Callable[[DeviceNumber], list[Array]]) -> list[Array]:
    branches = [lambda device=device: function(device) for device in program.device_numbers]
    return switch(lax.axis_index(STAGE), branches)
