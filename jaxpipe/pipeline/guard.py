"""A step whose loss or gradient is not finite changes nothing."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.pipeline.program import DATA, STAGE, Program
from jaxpipe.pipeline.state import TrainState


#: What to do about it: nothing, raise ``NonFiniteError``, or leave the step out.
OnNonFinite = Literal["raise", "skip"] | None


def guard(
    old: TrainState, new: TrainState, loss: Any, gradients: Sequence[Any], program: Program, skip: bool
) -> tuple[TrainState, dict[str, Any]]:
    """The new state, or the old one's bits if the loss or a gradient is not finite; inside ``shard_map``.

    A step that is skipped is a step: the next one draws other random numbers. One that raises has not been made.

    Args:
      old, new: the state before and after the step.
      loss: of the batch.
      gradients: that this device has made.
      program: what has run.
      skip: whether to skip the step, rather than raise.

    Returns:
      The state; and in which stages gradients are not finite, and whether the step was stopped.
    """
    here = sum((jnp.sum(~jnp.isfinite(g), dtype=jnp.int32) for g in gradients), start=jnp.int32(0)) > 0
    row = jnp.zeros((program.num_devices,), jnp.int32).at[program.own].set(here.astype(jnp.int32))
    stages = lax.psum(row, (STAGE, DATA) if program.replicated else (STAGE,)) > 0
    stopped = jnp.any(stages) | ~jnp.isfinite(loss)

    def kept(before: Any, after: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(stopped, a, b), before, after)

    guarded = replace(
        new,
        **{
            name: kept(getattr(old, name), getattr(new, name))
            for name in ("parameters", "variables", "optimizer", "residual", "shared")
        },
        step=new.step if skip else kept(old.step, new.step),
        skipped=old.skipped + (stopped.astype(jnp.int32) if skip else 0),
    )
    return guarded, {"nonfinite_stages": stages, "stopped": stopped}
