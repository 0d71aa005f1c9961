"""Exchanges of a pipeline: each stage's replicas among themselves.

block-sparse   gradients + residuals ──▶ the blocks that are sent ──collectives──▶ averages, new residuals; each step
outer loop     a fragment of the parameters at a time, between inner steps
"""

import functools
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxpipe import _compat
from jaxpipe.array_types import Array, ArrayLike, Shaped
from jaxpipe.errors import PartitionError
from jaxpipe.gradients.block_exchange import Messages, Rule, averages, leave, message_shapes, send, wire_bytes
from jaxpipe.gradients.block_sparse import BlockSparse, Settings
from jaxpipe.gradients.blocks import Blocks
from jaxpipe.gradients.outer_loop import OuterLoop, OuterSettings, wide_dtype
from jaxpipe.graph.graph import Operator
from jaxpipe.graph.reverse_walk import closure
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate
from jaxpipe.runtime.stages import Placement
from jaxpipe.runtime.uint32_words import pack_words, unpack_words
from jaxpipe.sharding.mesh_axes import DATA, own_name


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class StageBlocks:
    """The blocks of what the replicas of each stage exchange, by turn: a phase of the warm-up, or a fragment."""

    plans: tuple[tuple[tuple[Blocks, ...], ...], ...]  # by turn and stage, the blocks of each gradient
    replicas: int
    rule: Rule

    @cached_property
    def traffic(self) -> list[tuple[int, int]]:
        """Return by turn the bytes that a device hands to gathers and to reductions in a step."""
        return [wire_bytes(stages, self.rule.mode) for stages in self.plans]


@dataclass(frozen=True, eq=False)
class StageExchange(StageBlocks):
    """The exchange between the replicas of each stage."""

    settings: Settings

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that a device passes to the collectives in a step after the warm-up."""
        return sum(self.traffic[-1])

    def messages(self, s: int) -> Messages:
        """Return the shapes of what arrives in a stage: as long as the longest phase of the warm-up needs."""
        return message_shapes([phases[s] for phases in self.plans], self.rule, self.replicas)

    def send(
        self, s: int, step: Array, gradients: Sequence[Array]
    ) -> tuple[Messages, tuple[list[Array], Array, Array]]:
        """Send the best blocks of a stage's gradients, residuals added; returns what arrives and what is left."""
        shapes = self.messages(s)

        def phase(plan: Sequence[Blocks]) -> tuple[Messages, tuple[list[Array], Array, Array]]:
            chosen, arrived = send([plan], self.rule, DATA, lambda f: f(0), lambda _: gradients)
            return jax.tree.map(_fill, arrived, shapes), leave(plan, gradients, chosen, self.rule.decay)

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
    rows = lax.all_gather(pack_words(values), axes, axis_index_groups=groups)
    return functools.reduce(functools.partial(jax.tree.map, operator.add), [unpack_words(row, values) for row in rows])


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
    return StageExchange(tuple(phases), replicas, transformation.settings.rule, transformation.settings)


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


@dataclass(frozen=True, eq=False)
class StageOuterLoop(StageBlocks):
    """The outer loop as the stages run it; by fragment and stage the numbers of parameters, and their blocks."""

    settings: OuterSettings
    parameters: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that a device hands to the collectives in a step, on average over a round, rounded up."""
        return -(-sum(map(sum, self.traffic)) // self.settings.inner_steps)

    def first(self, parameter: ArrayLike) -> list[Array]:
        """Return the first outer parameter that stands for a parameter, and the first state of its optimizer."""
        outer = jnp.asarray(parameter).astype(wide_dtype(parameter))
        return [outer, *jax.tree.leaves(self.settings.optimizer.init(outer))]

    def avals(self, parameter: Shaped) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of these."""
        return jax.eval_shape(self.first, jax.ShapeDtypeStruct(parameter.shape, parameter.dtype))

    def advance(self, average: Array, held: Sequence[Array]) -> list[Array]:
        """Return an outer parameter and the state of its optimizer after an update with an average."""
        outer, *leaves = held
        tree = jax.tree.structure(jax.eval_shape(self.settings.optimizer.init, outer))
        return jax.tree.leaves(self.settings.advance(average, outer, jax.tree.unflatten(tree, leaves)))


def stage_outer_loop(
    transformation: OuterLoop,
    model: BoundModel,
    placement: Placement[int],
    num_places: int,
    replicas: int,
    by_stage: PartitionedUpdate,
) -> StageOuterLoop:
    """Return the outer loop that ``outer_loop(...)`` asks for, cut up for the stages.

    Raises:
      PartitionError: if the inner optimizer has a state that all stages share, and that depends on gradients.
    """
    shared = zip(by_stage.new_state, by_stage.state_stage, by_stage.state_names, strict=True)
    names = [name for t, owner, name in shared if owner is None and by_stage.round[t]]
    if names:
        raise PartitionError(
            f"gradient_exchange=outer_loop(...) with the optimizer state {names[0]}, which all stages share and which "
            "depends on gradients: it would differ from replica to replica. Use an optimizer without it."
        )
    avals = [v.aval for v in model.parameters]
    order = jax.tree.leaves(model.parameter_tree(list(range(len(avals)))))
    settings, shapes = transformation.settings, model.parameter_tree(avals)
    held = [placement.held_by(s)[0] for s in range(num_places)]
    parameters, plans = [], []
    for numbers, blocks in zip(settings.leaves(jax.tree.leaves(shapes)), settings.plans(shapes), strict=True):
        by_parameter = {order[n]: b for n, b in zip(numbers, blocks, strict=True)}
        parameters.append(tuple(tuple(k for k in row if k in by_parameter) for row in held))
        plans.append(tuple(tuple(by_parameter[k] for k in row if k in by_parameter) for row in held))
    return StageOuterLoop(tuple(plans), replicas, settings.exchange.rule, settings, tuple(parameters))


def sites_of(mesh: Mesh) -> list[list[int]] | None:
    """Return the replicas of each site, which processes connect; None if there is one site, or if sizes differ."""
    rows = mesh.devices.swapaxes(0, mesh.axis_names.index(DATA)).reshape(mesh.shape[DATA], -1)
    processes = [{device.process_index for device in row} for row in rows]
    sites: list[list[int]] = []
    for r in range(len(rows)):
        if not any(r in site for site in sites):
            sites.append(sorted(closure([r], lambda r: (k for k, p in enumerate(processes) if p & processes[r]))))
    return sites if len(sites) > 1 and len(set(map(len, sites))) == 1 else None
