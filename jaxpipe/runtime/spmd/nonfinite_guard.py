"""A step whose loss or gradient is not finite changes nothing."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.array_types import Array
from jaxpipe.runtime.spmd.lockstep_program import LockstepProgram
from jaxpipe.runtime.train_state import TrainState
from jaxpipe.sharding.mesh_axes import DATA, STAGE


T = TypeVar("T")


class NonFinite(NamedTuple):
    """The place at which a step met a value that is not finite."""

    stages: Array  # by stage, whether a gradient is not finite
    stopped: Array  # a gradient or the loss is not finite


def look(loss: Array, gradients: Sequence[Array], program: LockstepProgram) -> NonFinite:
    """Look at the loss and at the gradients that this device has made; inside ``shard_map``."""
    here = sum((jnp.sum(~jnp.isfinite(g), dtype=jnp.int32) for g in gradients), start=jnp.int32(0)) > 0
    row = jnp.zeros((program.num_devices,), jnp.int32).at[lax.axis_index(STAGE)].set(here.astype(jnp.int32))
    stages = lax.psum(row, (STAGE, DATA) if program.replicated else (STAGE,)) > 0
    return NonFinite(stages, jnp.any(stages) | ~jnp.isfinite(loss))


def guard(old: TrainState, new: TrainState, nonfinite: NonFinite, skip: bool) -> tuple[TrainState, dict[str, Array]]:
    """Return the new state, or the old one's bits if something is not finite, and what was noticed.

    A step that is skipped is a step: the next one draws other random numbers. One that raises has not been made.
    ``run_update`` has left what the optimizer writes as it was.
    """

    def either(before: T, after: T) -> T:
        return jax.tree.map(lambda a, b: jnp.where(nonfinite.stopped, a, b), before, after)

    guarded = replace(
        new,
        variables=either(old.variables, new.variables),
        residual=either(old.residual, new.residual),
        step=new.step if skip else either(old.step, new.step),
        skipped=old.skipped + (nonfinite.stopped.astype(jnp.int32) if skip else 0),
    )
    noticed = {"nonfinite_stages": nonfinite.stages, "stopped": nonfinite.stopped}
    return guarded, noticed | ({"skipped": guarded.skipped} if skip else {})
