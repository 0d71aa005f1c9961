"""The block-sparse gradient exchange of a pipeline: each stage's replicas among themselves.

    gradients + residuals ──conditional over stages──▶ what is sent ──collectives over the replicas──▶ ...
    ... ──conditional over stages──▶ averages, new residuals

Residuals lie in buffers like the gradients', one for each replica.
"""

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.errors import PartitionError
from jaxpipe.gradients.block_exchange import Averaged, exchange, wire_bytes
from jaxpipe.gradients.block_sparse import BlockSparse, Settings
from jaxpipe.gradients.blocks import Blocks
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.runtime.spmd.buffer_layout import Layout, lay_out
from jaxpipe.runtime.stages import Placement
from jaxpipe.sharding.mesh_axes import DATA, STAGE, own_name


@dataclass(frozen=True, eq=False)
class StageExchange:
    """The exchange between the replicas of each stage.

    Attributes:
      settings: of ``block_sparse``.
      plans: by phase of the warm-up and stage, the blocks of each gradient.
      layout: where the averages are, that of the parameters.
      sums: where the replica's own gradients are, in the types in which they were added up.
      residuals: where residuals are, which have at least 32 bits.
      replicas: of each stage.
    """

    settings: Settings
    plans: tuple[tuple[tuple[Blocks, ...], ...], ...]
    layout: Layout
    sums: Layout
    residuals: Layout
    replicas: int

    @property
    def sent_bytes(self) -> int:
        """Return what a device hands to the collectives in a step after the warm-up."""
        return sum(wire_bytes(self.plans[-1], self.settings.rule.mode))

    @property
    def working_bytes(self) -> int:
        """Return the bytes needed besides: the replica's own gradients, averages, new residuals, messages both ways.

        A conditional over stages does not write into what it reads.
        """
        needed = []
        for plans in self.plans:
            gathered, reduced = wire_bytes(plans, self.settings.rule.mode)
            needed.append((1 + self.replicas) * gathered + 2 * reduced)
        residuals = self.residuals.bytes if len(self.layout.avals) > 1 else 0
        return self.sums.bytes + self.layout.bytes + residuals + max(needed)


def stage_exchange(
    transformation: BlockSparse,
    model: BoundModel,
    placement: Placement,
    layout: Layout,
    sums: Layout,
    replicas: int,
) -> StageExchange:
    """The exchange that ``block_sparse(...)`` asks for, cut up for the stages.

    Raises:
      PartitionError: if its arguments do not fit the model's parameters.
    """
    avals = [v.aval for v in model.parameters]
    order = jax.tree.leaves(model.parameter_tree(list(range(len(avals)))))
    phases = []
    for blocks in transformation.settings.plans(model.parameter_tree(avals)):
        by_parameter = dict(zip(order, blocks, strict=True))
        stages = range(len(layout.avals))
        phases.append(tuple(tuple(by_parameter[k] for k in placement.held_by(s)[0]) for s in stages))
    residuals = [
        [jax.ShapeDtypeStruct(a.shape, jnp.promote_types(a.dtype, jnp.float32)) for a in held] for held in layout.avals
    ]
    return StageExchange(transformation.settings, tuple(phases), layout, sums, lay_out(residuals), replicas)


def run_exchange(
    plan: StageExchange, step: Any, gradients: Sequence[Any], residuals: Sequence[Any]
) -> tuple[list[Any], list[Any], Any, Any]:
    """One exchange, inside ``shard_map``.

    Args:
      gradients: buffers with this replica's share of the batch's gradient, times the number of replicas.
      residuals: buffers with what it has not sent.

    Returns:
      Buffers with averages and with new residuals; sums of squares of what this device had, and of what is left.
    """
    layout = plan.layout

    def by_stage(function: Any) -> Any:
        return lax.switch(lax.axis_index(STAGE), [functools.partial(function, s) for s in range(len(layout.avals))])

    def read(s: int) -> list[Any]:
        pairs = zip(plan.sums.read(s, gradients), plan.residuals.read(s, residuals), strict=True)
        return [g.astype(r.dtype) + r for g, r in pairs]

    def write(s: int, averaged: Averaged) -> Any:
        new = layout.write(s, averaged.gradients), plan.residuals.write(s, averaged.residuals)
        return *new, averaged.squares, averaged.unsent

    def phase(plans: Sequence[Sequence[Blocks]]) -> Any:
        return exchange(plans, plan.settings.rule, DATA, by_stage, read, write)

    branches = [functools.partial(phase, plans) for plans in plan.plans]
    return lax.switch(plan.settings.phase(step), branches)


def check_exchange(gradient_exchange: Any, axis_name: str) -> BlockSparse | None:
    """Return the requested block-sparse transformation, or None for a dense exchange.

    Raises:
      PartitionError: if it is neither.
    """
    if isinstance(gradient_exchange, str) and gradient_exchange == "dense":
        return None
    if not isinstance(gradient_exchange, BlockSparse):
        raise PartitionError(
            f"gradient_exchange={gradient_exchange!r}; it must be 'dense' or jaxpipe.gradients.block_sparse(...)."
        )
    if own_name(gradient_exchange.settings.axis_name) not in (None, axis_name):
        raise PartitionError(
            f"gradient_exchange: axis_name={gradient_exchange.settings.axis_name!r}, but replicas are along the mesh "
            f"axis {axis_name!r}. Leave axis_name out."
        )
    return gradient_exchange


def warn_of_adam(optimizer_state: Any) -> None:
    """Warn if an optimizer keeps squares of gradients, by which it divides."""
    names: list[str] = []

    def look(part: Any) -> bool:
        if {"nu", "sum_of_squares", "v_row", "e_g"} & set(getattr(part, "_fields", ())):
            names.append(type(part).__name__)
        return False

    jax.tree.leaves(optimizer_state, is_leaf=look)
    if names:
        warnings.warn(
            f"gradient_exchange=block_sparse(...) with an optimizer that divides by what it has seen of the gradient "
            f"({names[0]}): blocks arrive late and several steps' worth at once, so the update is not what Adam and "
            "its kind would make of the whole gradient, and nothing is known of its convergence. Momentum "
            "(optax.sgd(rate, momentum=0.9)) is what the method was made for.",
            stacklevel=2,
        )
