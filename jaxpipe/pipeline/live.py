"""Updates on the way: what a device holds and does when its weights change after each group of micro-batches.

    in each tick:  weights of some version out of their slot ─▶ forward, backward
                   after the last backward work of a group: newest weights ─▶ optimizer ─▶ another slot

``jaxpipe.schedules.asynchronous`` has the schedules, ``jaxpipe.schedules.weights`` the slots. An update has the
gradient of its group, averaged over the replicas. Nothing is known then of other stages' gradients.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.errors import PartitionError
from jaxpipe.pipeline.layout import Layout
from jaxpipe.pipeline.optimizer import ColoredUpdate
from jaxpipe.pipeline.overwriting import run_update
from jaxpipe.pipeline.precision import round_to
from jaxpipe.pipeline.program import DATA, Program, over_stages
from jaxpipe.schedules.weights import WeightSlots, weight_slots


class Weights(NamedTuple):
    """What changes on the way.

    Attributes:
      parameters: buffers ``[slots, length]``.
      optimizer: buffers of its state.
      shared: optimizer state of which every stage has a copy.
      squares: sum over the updates of the squared norms of this device's gradients.
    """

    parameters: list[Any]
    optimizer: list[Any]
    shared: list[Any]
    squares: Any


class WeightRow(NamedTuple):
    """The slots of a device in a tick (``jaxpipe.schedules.weights.WeightSlots``)."""

    forward: Any
    backward: Any
    newest: Any
    updated: Any


@dataclass(frozen=True, eq=False)
class Live:
    """Updates inside the tick loop.

    Attributes:
      program: what is trained.
      colored, layout: the optimizer, and where its state lives.
      optimizer, shared: its state when the step begins.
    """

    program: Program
    colored: ColoredUpdate
    layout: Layout
    optimizer: Sequence[Any]
    shared: Sequence[Any]

    @functools.cached_property
    def slots(self) -> WeightSlots:
        """Where each version of the weights is."""
        return weight_slots(self.program.schedule)

    def begin(self, parameters: Sequence[Any]) -> Weights:
        """The first version is in the first slot."""
        slots = [jnp.zeros((self.slots.count, *x.shape), x.dtype).at[0].set(x) for x in parameters]
        return Weights(slots, list(self.optimizer), list(self.shared), jnp.float32(0))

    def rows(self) -> WeightRow:
        """``[devices, ticks]``"""
        slots = self.slots
        return WeightRow(
            *(np.asarray(x, np.int32) for x in (slots.forward, slots.backward, slots.newest, slots.updated))
        )

    def end(self, weights: Weights, stage: Any) -> list[Any]:
        """The newest parameters, after the last tick."""
        last = jnp.asarray(self.slots.last, jnp.int32)[stage]
        return version(weights, last)

    def update(
        self, weights: Weights, gradients: Sequence[Any], row: WeightRow, stage: Any
    ) -> tuple[Weights, list[Any]]:
        """The weights after a tick, and what is left of the sums of gradients."""
        program, schedule = self.program, self.program.schedule
        due = row.updated >= 0
        share = schedule.group
        means = list(gradients)
        if program.replicated:
            means, share = lax.psum(means, DATA), share * lax.axis_size(DATA)
        means = round_to([g / jnp.asarray(share, g.dtype) for g in means], program.gradients.buffers)
        newest = version(weights, row.newest)

        new, optimizer, shared = run_update(
            self.colored,
            stage,
            functools.partial(over_stages, program),
            (program.parameters, program.gradients, self.layout),
            (newest, weights.optimizer),
            means,
            weights.shared,
            unless=~due,
            rates=schedule.rates,
        )
        place = jnp.maximum(row.updated, 0)
        slots = [
            lax.dynamic_update_index_in_dim(x, jnp.where(due, value, _slot(x, place)), place, 0)
            for x, value in zip(weights.parameters, new, strict=True)
        ]
        squares = sum((jnp.sum(jnp.square(g.astype(jnp.float32))) for g in means), start=jnp.float32(0))
        total = weights.squares + jnp.where(due, squares, 0)
        left = [jnp.where(due, jnp.zeros_like(g), g) for g in gradients]
        return Weights(slots, optimizer, shared, total), left


def version(weights: Weights, slot: Any) -> list[Any]:
    """The parameters in a slot."""
    return [_slot(x, slot) for x in weights.parameters]


def _slot(x: Any, slot: Any) -> Any:
    return x[0] if x.shape[0] == 1 else lax.dynamic_index_in_dim(x, slot, keepdims=False)


def check_live(program: Program, colored: ColoredUpdate, exchanged: bool) -> None:
    """Raise ``PartitionError`` if weights cannot change on the way."""
    schedule, objective = program.schedule, program.objective
    if schedule.versions is None:
        return
    name = f"schedule={schedule.name}: weights change while micro-batches are on their way"
    if colored.exchanged:
        sizes = sorted({str(colored.graph.tensors[t].shape) for ts in colored.exchanged for t in ts})
        raise PartitionError(
            f"{name}, a late stage before the gradient of an early one exists, but the optimizer combines values of "
            f"several stages (of shape {', '.join(sizes)}), as clipping by the global norm does. Clip each "
            "stage by its own norm, jaxpipe.gradients.per_stage(optax.clip_by_global_norm(...)), or use a schedule "
            "that updates at the end of a step."
        )
    if objective.weighted:
        raise PartitionError(
            f"{name}, so the total weight of a batch is not known when the first gradient of it is applied. Return "
            "a mean, (mean, metrics), instead of (sum, weight, metrics)."
        )
    if program.shared:
        raise PartitionError(
            f"{name}, but {len(program.shared)} parameter(s), the largest of "
            f"{max(a.size for a in program.avals(program.shared))} numbers, are used in several stages, each of which "
            "would update them at another time. Untie them, or use a schedule that updates at the end of a step."
        )
    if exchanged:
        raise PartitionError(
            f"{name}; gradient_exchange=block_sparse(...) exchanges once, at the end of a step. Use 'dense'."
        )
