"""The block-sparse gradient exchange of a pipeline: each stage's replicas among themselves.

gradients + residuals ──▶ the blocks that are sent ──collectives over the replicas──▶ averages, new residuals
"""

import functools
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe import _compat
from jaxpipe.array_types import Array, Shaped
from jaxpipe.errors import PartitionError
from jaxpipe.gradients.block_exchange import Messages, averages, leave, message_shapes, send, wire_bytes
from jaxpipe.gradients.block_sparse import BlockSparse, Settings
from jaxpipe.gradients.blocks import Blocks
from jaxpipe.gradients.outer_loop import OuterLoop
from jaxpipe.graph.graph import Operator
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate
from jaxpipe.runtime.stages import Placement
from jaxpipe.runtime.uint32_words import pack_words, unpack_words, word_count
from jaxpipe.sharding.mesh_axes import DATA, own_name


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class StageExchange:
    """The exchange between the replicas of each stage."""

    settings: Settings
    plans: tuple[tuple[tuple[Blocks, ...], ...], ...]  # by phase of the warm-up and stage, the blocks of each gradient
    replicas: int

    @property
    def traffic(self) -> list[tuple[int, int]]:
        """Return by phase of the warm-up the bytes that a device hands to gathers and to reductions in a step."""
        return [wire_bytes(stages, self.settings.rule.mode) for stages in self.plans]

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that a device passes to the collectives in a step after the warm-up."""
        return sum(self.traffic[-1])

    def messages(self, s: int) -> Messages:
        """Return the shapes of what arrives in a stage: as long as the longest phase of the warm-up needs."""
        return message_shapes([phases[s] for phases in self.plans], self.settings.rule, self.replicas)

    def send(
        self, s: int, step: Array, gradients: Sequence[Array]
    ) -> tuple[Messages, tuple[list[Array], Array, Array]]:
        """Send the best blocks of a stage's gradients, residuals added; returns what arrives and what is left."""
        shapes = self.messages(s)

        def phase(plan: Sequence[Blocks]) -> tuple[Messages, tuple[list[Array], Array, Array]]:
            chosen, arrived = send([plan], self.settings.rule, DATA, lambda f: f(0), lambda _: gradients)
            return jax.tree.map(_fill, arrived, shapes), leave(plan, gradients, chosen, self.settings.rule.decay)

        return self._by_phase(s, step, phase)

    def averages(self, s: int, step: Array, messages: Messages) -> list[Array]:
        """Return the averages of a stage's gradients over the replicas, of the messages of ``send``."""
        return self._by_phase(s, step, lambda plan: averages(plan, messages, self.replicas))

    def _by_phase(self, s: int, step: Array, function: Callable[[Sequence[Blocks]], T]) -> T:
        branches = [functools.partial(function, phases[s]) for phases in self.plans]
        return lax.switch(self.settings.phase(step), branches)


def sums_in_order(
    values: Sequence[Array], axes: str | tuple[str, ...], groups: list[list[int]] | None = None
) -> list[Array]:
    """The sums of small values over devices, with the same bits whatever connects them: ``psum`` has no fixed order.

    They cross the network in one message, of which the time is latency.
    """
    rows = lax.all_gather(pack_words(values, sum(map(word_count, values))), axes, axis_index_groups=groups)
    parts = [unpack_words(row, values) for row in rows]
    return [functools.reduce(operator.add, column) for column in zip(*parts, strict=True)]


def _fill(x: Array, shape: Shaped) -> Array:
    """Return an array with zeros after its last axis."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, shape.shape[-1] - x.shape[-1])])


def stage_exchange(
    transformation: BlockSparse, model: BoundModel, placement: Placement[int], num_places: int, replicas: int
) -> StageExchange:
    """The exchange that ``block_sparse(...)`` asks for, cut up for the stages."""
    avals = [v.aval for v in model.parameters]
    order = jax.tree.leaves(model.parameter_tree(list(range(len(avals)))))
    phases = []
    for blocks in transformation.settings.plans(model.parameter_tree(avals)):
        by_parameter = dict(zip(order, blocks, strict=True))
        phases.append(tuple(tuple(by_parameter[k] for k in placement.held_by(s)[0]) for s in range(num_places)))
    return StageExchange(transformation.settings, tuple(phases), replicas)


def check_exchange(gradient_exchange: object, axis_name: str) -> BlockSparse | OuterLoop | None:
    """Return the requested transformation, or None for a dense exchange."""
    if isinstance(gradient_exchange, str) and gradient_exchange == "dense":
        return None
    if not isinstance(gradient_exchange, BlockSparse | OuterLoop):
        raise PartitionError(
            f"gradient_exchange={gradient_exchange!r}; it must be 'dense', jaxpipe.gradients.block_sparse(...) or "
            "jaxpipe.gradients.outer_loop(...)."
        )
    if own_name(gradient_exchange.settings.axis_name) not in (None, axis_name):
        raise PartitionError(
            f"gradient_exchange: axis_name={gradient_exchange.settings.axis_name!r}, but replicas are along the mesh "
            f"axis {axis_name!r}. Leave axis_name out."
        )
    return gradient_exchange


def warn_of_first_moment(by_stage: PartitionedUpdate) -> None:
    """Warn if an optimizer of Adam's kind has a first moment of its own beside the residuals."""
    names = by_stage.state_names
    pairs = {name: name.replace(".mu", ".nu") for name in names if ".mu" in name}  # as optax calls both moments
    moments = {t: name for t, name in zip(by_stage.state, names, strict=True) if pairs.get(name) in names}
    readers = [op for op in by_stage.graph.operators if moments.keys() & set(op.inputs) and not _is_zero(op)]
    if readers:
        name = next(moments[t] for t in readers[0].inputs if t in moments)
        warnings.warn(
            f"gradient_exchange=block_sparse(...) with an optimizer that has a first moment ({name}): blocks arrive "
            "late and several steps' worth at once, so that residuals are one already, and both together train worse. "
            "Take it away, optax.adamw(rate, b1=0.0).",
            stacklevel=2,
        )


def _is_zero(op: Operator) -> bool:
    """Return whether an operator multiplies by the number 0."""
    literals = (a.val for a in op.equation.invars if _compat.is_literal(a)) if op.name == "mul" else ()
    return any(np.all(np.asarray(x) == 0) for x in literals)
