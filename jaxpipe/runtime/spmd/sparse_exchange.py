"""The block-sparse gradient exchange of all stages at once: conditionals over stages around its collectives.

Residuals lie in buffers like the gradients', one for each replica.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from jax import lax

from jaxpipe.array_types import Array
from jaxpipe.gradients.block_exchange import Averaged, exchange, wire_bytes
from jaxpipe.gradients.blocks import Blocks
from jaxpipe.runtime.replica_exchange import StageExchange
from jaxpipe.runtime.spmd.lockstep_program import LockstepProgram
from jaxpipe.sharding.mesh_axes import DATA, STAGE


T = TypeVar("T")

#: Buffers with averages and with new residuals; sums of squares of what a device had, and of what is left.
Exchanged: TypeAlias = tuple[list[Array], list[Array], Array, Array]


def run_exchange(
    program: LockstepProgram,
    plan: StageExchange,
    step: Array,
    gradients: Sequence[Array],
    residuals: Sequence[Array],
) -> Exchanged:
    """Run an exchange, inside ``shard_map``, of this replica's share of the gradient times the number of replicas."""

    def by_stage(function: Callable[[int], T]) -> T:
        return lax.switch(lax.axis_index(STAGE), [functools.partial(function, s) for s in program.device_numbers])

    def read(s: int) -> list[Array]:
        pairs = zip(program.sums.read(s, gradients), program.residuals.read(s, residuals), strict=True)
        return [g.astype(r.dtype) + r for g, r in pairs]

    def write(s: int, averaged: Averaged) -> Exchanged:
        new = program.gradients.write(s, averaged.gradients), program.residuals.write(s, averaged.residuals)
        return *new, averaged.squares, averaged.unsent

    def phase(plans: Sequence[Sequence[Blocks]]) -> Exchanged:
        return exchange(plans, plan.settings.rule, DATA, by_stage, read, write)

    return lax.switch(plan.settings.phase(step), [functools.partial(phase, plans) for plans in plan.plans])


def exchanging_bytes(program: LockstepProgram, plan: StageExchange) -> int:
    """Return the bytes needed besides: the replica's own gradients, averages, new residuals, messages both ways.

    A conditional over stages does not write into what it reads.
    """
    messages = (wire_bytes(plans, plan.settings.rule.mode) for plans in plan.plans)
    needed = max((1 + plan.replicas) * gathered + 2 * reduced for gathered, reduced in messages)
    residuals = program.residuals.bytes if program.num_devices > 1 else 0
    return program.sums.bytes + program.gradients.bytes + residuals + needed
