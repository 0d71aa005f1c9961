"""The outer loop of a pipeline: each stage's replicas among themselves, a fragment of the parameters at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpipe.array_types import Array, ArrayLike, Shaped
from jaxpipe.errors import PartitionError
from jaxpipe.gradients.block_exchange import wire_bytes
from jaxpipe.gradients.blocks import Blocks
from jaxpipe.gradients.outer_loop import OuterLoop, OuterSettings, wide_dtype
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate
from jaxpipe.runtime.stages import Placement
from jaxpipe.sharding.mesh_axes import DATA


@dataclass(frozen=True, eq=False)
class StageOuterLoop:
    """The outer loop as the stages run it; by fragment and stage the numbers of parameters, and their blocks."""

    settings: OuterSettings
    parameters: tuple[tuple[tuple[int, ...], ...], ...]
    plans: tuple[tuple[tuple[Blocks, ...], ...], ...]
    replicas: int

    @cached_property
    def sends_blocks(self) -> bool:
        """Return whether anything is not sent whole."""
        return not all(b.is_whole for stages in self.plans for plan in stages for b in plan)

    @cached_property
    def traffic(self) -> list[tuple[int, int]]:
        """Return by fragment the bytes that a device hands to gathers and to reductions when it has its turn."""
        return [wire_bytes(stages, self.settings.exchange.rule.mode) for stages in self.plans]

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
    order, tree = jax.tree.flatten(model.parameter_tree(list(range(len(avals)))))
    shapes = jax.tree.unflatten(tree, [avals[k] for k in order])
    parts = transformation.settings.leaves(jax.tree.leaves(shapes))
    held = [placement.held_by(s)[0] for s in range(num_places)]
    parameters, plans = [], []
    for numbers, blocks in zip(parts, transformation.settings.plans(shapes), strict=True):
        by_parameter = {order[n]: b for n, b in zip(numbers, blocks, strict=True)}
        parameters.append(tuple(tuple(k for k in row if k in by_parameter) for row in held))
        plans.append(tuple(tuple(by_parameter[k] for k in row if k in by_parameter) for row in held))
    return StageOuterLoop(transformation.settings, tuple(parameters), tuple(plans), replicas)


def sites_of(mesh: Mesh) -> list[list[int]] | None:
    """Return the replicas of each site, which processes connect; None if there is one site, or if sizes differ."""
    rows = mesh.devices.swapaxes(0, mesh.axis_names.index(DATA)).reshape(mesh.shape[DATA], -1)
    sites: list[tuple[set[int], list[int]]] = []
    for r, row in enumerate(rows):
        processes, members = {device.process_index for device in row}, [r]
        for site in [site for site in sites if site[0] & processes]:
            sites.remove(site)
            processes, members = processes | site[0], sorted([*site[1], *members])
        sites.append((processes, members))
    groups: Sequence[list[int]] = sorted(members for _, members in sites)
    return list(groups) if len(groups) > 1 and len(set(map(len, groups))) == 1 else None
