"""A plan's stages on their devices, and the arrays that the work of each has: shapes, purposes, shardings."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import Array, TensorNumber
from jaxpipe.gradients.squared_norm import norm_dtype
from jaxpipe.residuals.codecs.keep import KEEP
from jaxpipe.runtime.executable_plan import ExecutablePlan
from jaxpipe.runtime.gradient_precision import sum_dtype
from jaxpipe.runtime.mpmd.stage_devices import StageDevices
from jaxpipe.runtime.mpmd.step_graph import OF_MICROBATCH, Arrays, Form, Path, Place, Port, shape_of
from jaxpipe.runtime.stages import Stage
from jaxpipe.runtime.train_state import TrainState
from jaxpipe.schedules.table import StageNumber
from jaxpipe.sharding.mesh_axes import DATA, axis_names


#: By group of arrays, the component of memory that they are counted in; ``"state"`` for the others.
_PURPOSE = {
    "parameters": "parameters",
    "optimizer": "optimizer",
    "shared": "optimizer",
    "residual": "residual",
    "batch": "batch",
    **dict.fromkeys(("sums", "mean"), "gradients"),
    **dict.fromkeys(("stash", "saved"), "stash"),
    **dict.fromkeys(("leaving", "returning", "results", "exchanged", "averages", "messages"), "messages"),
}

#: Groups of arrays that are split as their tensors are.
_OF_TENSORS = {"parameters", "state", "sums", "mean", "leaving", "returning", "saved"}


@dataclass(frozen=True, eq=False)
class GradientSum:
    """An array in which the gradients of a parameter are added up, or those of several vectors side by side.

    A call takes 0.7 us for each array that it writes over.
    """

    aval: jax.ShapeDtypeStruct
    tensors: tuple[TensorNumber, ...]  # the parameters, in order; the first stands for all
    sizes: tuple[int, ...]  # elements of each

    @property
    def is_alone(self) -> bool:
        """Return whether it is of one parameter."""
        return len(self.tensors) == 1

    def part(self, array: Array, t: TensorNumber) -> Array:
        """Return the sum of one parameter's gradients; if others lie beside it, flat."""
        if self.is_alone:
            return array
        k = self.tensors.index(t)
        begin = sum(self.sizes[:k])
        return array[..., begin : begin + self.sizes[k]]


class StateArray(NamedTuple):
    """An array of a training state that belongs to a stage."""

    port: Port  # of a step's graph
    aval: jax.ShapeDtypeStruct  # with its sharding
    name: str


class StageLayout:
    """The stages of a plan, their schedule, their optimizer and their devices.

    Where a stage has several members, a sum of gradients of each has an axis of length 1 in front.

    Attributes:
      planned, devices: the plan, and the devices of its stages.
      collects: results are kept by micro-batch, not added up.
      objective, schedule: the program of a micro-batch, and the order of the work.
      stages, replicas: numbers of the stages, and of the replicas.
      num_microbatches: of a replica.
      update: the optimizer, and what is done around it.
      is_guarded: a step that is not finite changes nothing.
      specs: partition specs over the axes of a member's devices.
      home: first member of the last stage, which computes loss and metrics.
      norm_dtype: the type of the norm of all gradients.
    """

    def __init__(self, planned: ExecutablePlan, devices: StageDevices, collects: bool = False):
        self.planned, self.devices, self.collects = planned, devices, collects
        self.objective, self.schedule = planned.program.objective, planned.program.schedule
        self.stages, self.replicas = planned.program.stage_numbers, range(devices.replicas)
        self.num_microbatches = planned.batching.num_microbatches
        self.update = planned.update
        self.is_guarded = planned.update.on_nonfinite is not None
        self.specs = planned.shardings.specs(self.objective)
        self.home = Place(self.stages[-1], 0)
        self.norm_dtype = norm_dtype(self.aval(t).dtype for t in self.objective.parameters)

    def stage(self, s: StageNumber) -> Stage:
        """Return the work of a stage on a micro-batch."""
        return self.planned.program.stages[s]

    def members(self, s: StageNumber) -> int:
        """Return how many members a stage has."""
        return len(self.devices.rows[s])

    @cached_property
    def batch(self) -> list[jax.ShapeDtypeStruct]:
        """The shape of a replica's part of each leaf of the batch."""
        return [
            x if shared else jax.ShapeDtypeStruct((x.shape[0] // self.devices.replicas, *x.shape[1:]), x.dtype)
            for x, shared in zip(jax.tree.leaves(self.planned.batch), self.planned.batching.shared, strict=True)
        ]

    def dealt(self, k: int) -> range:
        """The micro-batches of an entry of the table: one, or a round where members of a stage share them."""
        count = self.planned.program.stage_replicas.round_size
        return range(k * count, min((k + 1) * count, self.num_microbatches))

    @property
    def rows_cross(self) -> bool:
        """Return whether the stages of any replica belong to several processes."""
        return any(len({d.process_index for d in self.devices.of_replicas([r])}) > 1 for r in self.replicas)

    def aval(self, t: TensorNumber) -> jax.ShapeDtypeStruct:
        """The shape of a tensor."""
        return shape_of(self.objective.graph.tensors[t])

    def form(self, s: StageNumber, path: Path) -> Form:
        """Return the purpose of an array in a stage's trees, and its sharding within a member of the stage."""
        group, t = path[0], path[1] if len(path) > 1 else 0
        purpose = _PURPOSE.get(str(group), "state")
        if group == "optimizer":
            return Form(purpose, self.specs.of_leaf(cast(int, t)))
        if group == "residual":
            return Form(purpose, P(DATA))
        if group not in _OF_TENSORS and group != "stash":
            return Form(purpose)
        tensor = TensorNumber(cast(int, t))
        spec, lead = self.specs.of_tensor(tensor), self.lead(s) if group == "sums" else ()
        if group == "stash" and not self._is_kept(s, tensor):  # of other dimensions than its tensor, in as many parts
            axes = tuple(axis for axes in spec for axis in axis_names(axes))
            return Form(purpose, P(axes) if axes else P(), self.specs.submesh.size > 1, tensor)
        stays = group == "saved" or (group in ("leaving", "stash") and tensor not in self._sent)
        is_free = stays and self.specs.submesh.size > 1
        return Form(purpose, P(*(None for _ in lead), *spec), is_free, tensor if group in OF_MICROBATCH else None)

    def _is_kept(self, s: StageNumber, t: TensorNumber) -> bool:
        """Return whether a tensor of a stash is kept as it is."""
        vjp = self.stage(s).vjp
        return vjp is not None and vjp.plan.formats[t] == KEEP

    @cached_property
    def _sent(self) -> frozenset[TensorNumber]:
        return frozenset(t for stage in self.planned.program.stages for t in (*stage.arriving, *stage.leaving))

    def lead(self, s: StageNumber) -> tuple[int, ...]:
        """The axes in front of a sum of gradients in a stage."""
        return (1,) if self.members(s) > 1 else ()

    def sum_aval(self, s: StageNumber, t: TensorNumber) -> jax.ShapeDtypeStruct:
        """The shape of the sum of a parameter's gradients in a stage."""
        aval = self.aval(t)
        dtype = sum_dtype(aval.dtype, self.planned.program.gradient_dtype)
        return jax.ShapeDtypeStruct((*self.lead(s), *aval.shape), dtype)

    @cached_property
    def sums(self) -> tuple[dict[TensorNumber, GradientSum], ...]:
        """By stage and parameter that receives a gradient there, the array in which this is added up."""
        return tuple(_sums(self, s) for s in self.stages)

    def totals(self, s: StageNumber) -> Arrays:
        """The totals that a stage adds up, and the count of sparse tensors that did not fit, as shapes."""
        stage = self.stage(s)
        results = () if self.collects else stage.results
        totals = {k: self.aval(self.objective.results[k]) for k in results}
        uncertain = self.schedule.has_backward and stage.vjp is not None and stage.vjp.plan.uncertain
        return {"totals": totals, "overflows": {0: jax.ShapeDtypeStruct((), jnp.int32)} if uncertain else {}}

    def given(self, s: StageNumber, field: str, number: int) -> tuple[jax.ShapeDtypeStruct, Form]:
        """Return the shape and the form of an array that a stage has at the beginning of a step.

        Args:
          field: of ``TrainState``; or the batch, a position in it, its weight.
          number: of the tensor, or the position of the leaf.
        """
        tensor = TensorNumber(number)
        if field in ("parameters", "variables"):
            return self.aval(tensor), self.form(s, ({"variables": "state"}.get(field, field), number))
        if field == "residual":  # one of each replica, of at least 32 bits
            aval = self.aval(tensor)
            dtype = jnp.promote_types(aval.dtype, jnp.float32)
            return jax.ShapeDtypeStruct((self.members(s), *aval.shape), dtype), self.form(s, (field, number))
        if field in ("optimizer", "shared"):
            return shape_of(self.update.by_stage.state_avals[number]), self.form(s, (field, number))
        if field == "batch":
            return self.batch[number], self.form(s, (field,))
        if field == "key":
            return jax.eval_shape(jax.random.key_data, self.aval(self.objective.key)), Form("state")
        if field == "weight":  # the sum of the weights of all micro-batches
            return jax.ShapeDtypeStruct((), self.aval(self.objective.results[1]).dtype), Form("state")
        return jax.ShapeDtypeStruct((2,) if field == "index" else (), jnp.int32), Form("state")

    def trained(self, s: StageNumber) -> list[TensorNumber]:
        """The parameters that receive a gradient in a stage, borrowed ones included."""
        stage = self.stage(s)
        if stage.vjp is None:
            return []
        wrt = set(stage.vjp.backward_graph.wrt) - self.objective.frozen
        return [t for t in (*stage.parameters, *stage.borrowed) if t in wrt]

    def held(self, s: StageNumber) -> list[TensorNumber]:
        """The parameters of a stage whose gradient the optimizer takes."""
        return [t for t in self.stage(s).parameters if t not in self.objective.frozen]

    def renewed_state(self, s: StageNumber) -> list[TensorNumber]:
        """The state variables of a stage that a step changes."""
        stage = self.stage(s)
        if stage.fold is not None:
            return list(stage.fold.state)
        return [t for t, new in zip(stage.state, stage.new_state, strict=True) if t != new]

    def lenders(self, t: TensorNumber) -> list[StageNumber]:
        """The stages that compute gradients of a parameter which another one has."""
        return [k for k in self.stages if t in self.stage(k).borrowed and t in self.trained(k)]

    def state_paths(self, s: StageNumber) -> dict[TensorNumber, Path]:
        """By tensor number in the optimizer, the state of a stage and that which every stage has."""
        by_stage, groups = self.update.by_stage, {s: "optimizer", None: "shared"}
        owned = enumerate(zip(by_stage.state, by_stage.state_stage, strict=True))
        return {t: (groups[owner], k) for k, (t, owner) in owned if owner in groups}

    @cached_property
    def state_arrays(self) -> dict[str, list[StateArray]]:
        """The arrays of a training state that belong to a stage, by field of ``TrainState``."""
        objective, by_stage = self.objective, self.update.by_stage
        home = self.planned.program.placement.home(objective)
        held = {t: (t, home[t], name) for t, name in objective.names.items()}
        owned = enumerate(zip(by_stage.state_stage, by_stage.state_names, strict=True))
        exchanged = objective.parameters if self.update.exchange else ()
        rows = {
            "parameters": [held[t] for t in objective.parameters],
            "variables": [held[t] for t in objective.state],
            "optimizer": [(k, s, name) for k, (s, name) in owned if s is not None],
            "residual": [held[t] for t in exchanged if t not in objective.frozen],
        }
        return {field: [self._state_array(field, *row) for row in group] for field, group in rows.items()}

    def _state_array(self, field: str, number: int, s: int, name: str) -> StateArray:
        aval, form = self.given(self.stages[s], field, number)
        place = self.devices.place(self.stages[s])
        sharding = NamedSharding(self.devices.mesh(place), form.spec)
        port = Port(place, field, number)
        return StateArray(port, jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding), name)

    @cached_property
    def abstract_state(self) -> TrainState:
        """Return the shapes of a training state, where its devices have them."""
        groups = {field: tuple(x.aval for x in arrays) for field, arrays in self.state_arrays.items()}
        return TrainState(**groups, **self.planned.everywhere, plan=self.planned.plan.identity)

    @property
    def state_names(self) -> dict[str, list[str]]:
        """The names of the arrays of a training state, by field."""
        by_stage = self.update.by_stage
        names = {field: [x.name for x in arrays] for field, arrays in self.state_arrays.items()}
        return names | {"shared": [by_stage.state_names[k] for k in by_stage.leaves_of(None)]}


#: Vectors, such as biases and scales, of at most so many bytes have their sums side by side.
_PACKED_BYTES = 1 << 16


def _sums(layout: StageLayout, s: StageNumber) -> dict[TensorNumber, GradientSum]:
    """By parameter of a stage, the array of its sum; vectors that no other stage uses and that add up share some."""
    apart = {t for stage in layout.planned.program.stages for t in stage.borrowed} | layout.objective.overwritten
    groups: dict[Hashable, list[TensorNumber]] = {}
    for t in layout.trained(s):
        aval = layout.sum_aval(s, t)
        is_vector = len(layout.aval(t).shape) < 2 and layout.specs.of_tensor(t) == P()
        shares = is_vector and t not in apart and 0 < aval.size * aval.dtype.itemsize <= _PACKED_BYTES
        groups.setdefault((aval.dtype, t in layout.stage(s).programs.input_part) if shares else t, []).append(t)
    sums: dict[TensorNumber, GradientSum] = {}
    for tensors in groups.values():
        avals = [layout.sum_aval(s, t) for t in tensors]
        packed = jax.ShapeDtypeStruct((*layout.lead(s), sum(a.size for a in avals)), avals[0].dtype)
        total = GradientSum(avals[0] if len(tensors) == 1 else packed, tuple(tensors), tuple(a.size for a in avals))
        sums |= dict.fromkeys(tensors, total)
    return sums
