"""A plan as stage programs that the host dispatches."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe import multihost
from jaxpipe.errors import BatchError, PartitionError
from jaxpipe.models.check_batch import shape_key
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.runtime import check_state
from jaxpipe.runtime.executable_plan import Batching, ExecutablePlan, followed_cuts
from jaxpipe.runtime.interface import Bytes, StepResults
from jaxpipe.runtime.mpmd.adopt_state import adopt
from jaxpipe.runtime.mpmd.call_list import CallList
from jaxpipe.runtime.mpmd.device_bytes import Peak, peak_bytes
from jaxpipe.runtime.mpmd.dispatch import Dispatch, compile_list
from jaxpipe.runtime.mpmd.estimated_bytes import predicted_bytes
from jaxpipe.runtime.mpmd.instructions import Key, Place
from jaxpipe.runtime.mpmd.other_shapes import Shaped, as_planned, check_shapes, shaped_for
from jaxpipe.runtime.mpmd.report_work import COUNTERS
from jaxpipe.runtime.mpmd.schedule_to_calls import evaluation_list, gradient_list, prediction_list, training_list
from jaxpipe.runtime.mpmd.stage_devices import StageDevices
from jaxpipe.runtime.mpmd.stage_placement import Layout
from jaxpipe.runtime.mpmd.stage_state import Loader, StateLayout
from jaxpipe.runtime.mpmd.stage_work import Context, Name, Role
from jaxpipe.runtime.mpmd.update_work import NONFINITE, STOPPED, Exchange, UpdateContext
from jaxpipe.runtime.stages import Stage, cut_stages
from jaxpipe.runtime.state_arrays import CommonArrays, HostArrays, StageArrays
from jaxpipe.runtime.train_state import TrainState
from jaxpipe.schedules import Schedule
from jaxpipe.schedules.gpipe import forward_only
from jaxpipe.sharding.mesh_axes import DATA, STAGE
from jaxpipe.target import building_for
from jaxpipe.text.progress import progress, tell


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled list, and what it needs to be run.

    Attributes:
      layout, dispatch, loader: where stages are, the list, and what it begins with.
    """

    layout: Layout
    dispatch: Dispatch
    loader: Loader


class MpmdRuntime:
    """A plan as stage programs; see ``jaxpipe.runtime.interface.Runtime``."""

    def __init__(self, planned: ExecutablePlan):
        self.planned = planned
        self._compiled_steps: dict[Any, Compiled] = {}

    @property
    def places(self) -> range:
        """Numbers of the stages."""
        return range(len(self.planned.program.stages))

    @cached_property
    def devices(self) -> StageDevices:
        """The devices of every stage."""
        mesh, groups = self.planned.mesh, self.planned.program.stage_replicas.groups
        grid = mesh.devices[..., None] if DATA not in mesh.axis_names else mesh.devices
        grid = np.moveaxis(grid, mesh.axis_names.index(STAGE), 0).reshape(sum(map(len, groups)), -1)
        rows = [tuple(grid[list(groups[s % len(groups)])].T.flat) for s in self.places]
        return StageDevices(tuple(rows), grid.shape[1], self.planned.shardings.submesh)

    def devices_of(self, place: int) -> list[Any]:
        """The devices of a stage."""
        return list(self.devices.of(Place(place)))

    def stage_part(self, place: int, arrays: StageArrays) -> StageArrays:
        """Put a stage's arrays onto its devices."""
        where, avals = self._where, self._update.residual_avals(place) if self._residuals else []
        count = len(self.devices.members(place))
        residuals = list(arrays.residuals) or [np.zeros((count, *a.shape[1:]), a.dtype) for a in avals]
        residuals = [np.asarray(x, a.dtype) for x, a in zip(residuals, avals, strict=True)]
        groups = arrays.parameters, arrays.variables, arrays.optimizer, residuals
        return StageArrays(
            *(
                [multihost.place(x, where.sharding(key)) for x, key in zip(group, keys, strict=True)]
                for group, keys in zip(groups, where.held_by(place), strict=True)
            )
        )

    def assemble(self, parts: Mapping[int, StageArrays], common: CommonArrays) -> TrainState:
        """Return the state of the parts of this process's stages."""
        planned, where = self.planned, self._where
        model, by_stage = planned.model, planned.update.by_stage

        def gathered(field: str, keys: Iterable[Key], avals: Iterable[Any]) -> tuple[Any, ...]:
            taken = {place: iter(getattr(part, field)) for place, part in parts.items()}
            return tuple(
                next(taken[key.place.stage]) if key.place.stage in taken else _elsewhere(aval, where.sharding(key))
                for key, aval in zip(keys, avals, strict=True)
            )

        spread = where.everywhere
        return TrainState(
            gathered(
                "parameters", map(where.parameter, range(len(model.parameters))), [v.aval for v in model.parameters]
            ),
            gathered("variables", map(where.variable, range(len(model.state))), [v.aval for v in model.state]),
            gathered("optimizer", map(where.optimizer, where.owned), [by_stage.state_avals[k] for k in where.owned]),
            gathered("residuals", map(where.residual, where.residuals), self._residual_avals),
            shared=tuple(multihost.place(x, spread) for x in common.shared),
            key=multihost.place(common.key, spread),
            step=multihost.place(jnp.int32(common.step), spread),
            skipped=multihost.place(jnp.int32(common.skipped), spread),
            plan=planned.plan.identity,
        )

    def check_batch(self, shapes: Any) -> None:
        """Raise ``BatchError`` if a batch differs from what was planned for in more than its sizes."""
        check_shapes(shapes, self.planned.batch)

    def prepare(self, shapes: Any) -> None:
        """Compile the training step for batches of some shapes."""
        self._training(shapes)

    def step(self, state: TrainState, batch: Any, shapes: Any) -> StepResults:
        """Run a training step; donates the state."""
        compiled = self._training(shapes)
        outputs = self._run(compiled, state, batch)
        new = self._where.state_of(state, outputs)
        reports = self._reports(compiled, outputs)
        count = len(compiled.layout.context.objective.results) - 1
        loss, *metrics = [reports[Name(Role.REPORT, k)] for k in range(count)]
        counters = {name: reports.get(Name(Role.REPORT, -1 - k)) for k, name in enumerate(COUNTERS)}
        if self._update.guarded:
            counters |= {"nonfinite_stages": reports[NONFINITE], "stopped": reports[STOPPED]}
        return StepResults(new, loss, {k: x for k, x in counters.items() if x is not None}, metrics)

    def gradients(self, state: TrainState, batch: Any, shapes: Any) -> tuple[Any, Sequence[Any], list[Any]]:
        """Return loss, metrics and the mean gradient of each trained parameter, None of others."""
        compiled = self._for_shapes(shapes, gradient_list, "Compiling the gradient")
        outputs = self._run(compiled, state, batch)
        reports = self._reports(compiled, outputs)
        objective = compiled.layout.context.objective
        loss, *metrics = [reports[Name(Role.REPORT, k)] for k in range(len(objective.results) - 1)]
        trained = [k for k, t in enumerate(objective.parameters) if t not in objective.frozen]
        owners = [self.planned.stage_placement.parameters[k] for k in trained]
        names = [Name(Role.MEAN, objective.parameters[k]) for k in trained]
        arrays = [outputs[Key(self._where.place(s), name)] for s, name in zip(owners, names, strict=True)]
        avals = [self.planned.model.parameters[k].aval for k in trained]
        gradients: list[Any] = [None] * len(objective.parameters)
        for k, x in zip(trained, self._on_hosts(owners, arrays, avals), strict=True):
            gradients[k] = x
        return loss, metrics, gradients

    @progress("Compiling the forward pass")
    def forward(
        self, name: str, objective: MicrobatchProgram, shapes: Any, batching: Batching
    ) -> Callable[[Any, Any], Any]:
        """Compile a function of state and batch: loss and metrics of ``"evaluate"``, leaves of ``"predict"``."""
        planned = self.planned
        before = planned.program.schedule
        stages = cut_stages(objective, followed_cuts(planned, objective, name), planned.stage_placement)
        rounds = planned.program.stage_replicas.rounds(batching.num_microbatches)
        schedule = forward_only(before.num_stages, rounds, before.num_chunks)
        with self._building():
            layout = self._layout_of(objective, stages, schedule, shapes, batching, name == "predict")
            calls = evaluation_list(layout) if name == "evaluate" else prediction_list(layout)
            compiled = self._compile(layout, calls)

        def run(state: TrainState, batch: Any) -> Any:
            outputs = self._run(compiled, state, batch)
            results = range(len(objective.results))
            if name == "evaluate":
                reports = self._reports(compiled, outputs)
                loss, *metrics = [reports[Name(Role.REPORT, k)] for k in results[:-1]]
                return loss, metrics
            parts = [[x for key, x in outputs.items() if key.name == Name(Role.REPORT, k)] for k in results]
            return [self._by_replica_rows(layout, rows) for rows in parts]

        return run

    def to_host(self, state: TrainState, keep: bool = True) -> HostArrays:
        """Copy a state to the host of every process that keeps it."""
        planned, where = self.planned, self._where
        by_stage, model = planned.update.by_stage, planned.model
        slots: list[Any] = [None] * len(by_stage.state)
        owners = [by_stage.state_stage[k] or 0 for k in where.owned]
        owned = self._on_hosts(owners, state.optimizer, [by_stage.state_avals[k] for k in where.owned])
        for k, x in zip((*where.owned, *where.shared), (*owned, *map(_on_host, state.shared)), strict=True):
            slots[k] = x
        parameters = self._on_hosts(
            planned.stage_placement.parameters, state.parameters, [v.aval for v in model.parameters]
        )
        variables = self._on_hosts(planned.stage_placement.state, state.variables, [v.aval for v in model.state])
        rows = [self._residual_rows(state, r) for r in range(self.devices.replicas)]
        residuals = [np.concatenate(parts) for parts in zip(*rows, strict=True)]
        return HostArrays(parameters, variables, slots, residuals) if keep else HostArrays([], [], [], [])

    def _residual_rows(self, state: TrainState, r: int) -> list[Any]:
        """Copy the residuals of a replica to the host of every process."""
        owners = [self.planned.stage_placement.parameters[k] for k in self._residuals]
        avals = [jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in state.residual]
        rows = []
        for s, x in zip(owners, state.residual, strict=True):
            shards = {shard.device: shard.data for shard in x.addressable_shards}
            rows.append(shards.get(self.devices.rows[s][r]))
        return self._on_hosts(owners, rows, avals, r)

    def _on_hosts(
        self, owners: Sequence[int], arrays: Sequence[Any], avals: Sequence[Any], r: int | None = None
    ) -> list[Any]:
        """Copy arrays to the host of every process, stage by stage.

        Args:
          owners: by array, its stage.
          r: the replica that has them; None for all.
        """
        every = self.devices.processes
        results: list[Any] = [None] * len(arrays)
        for s in self.places:
            held = [k for k, owner in enumerate(owners) if owner == s]
            devices = self.devices_of(s) if r is None else self.devices_of(s)[r : r + 1]
            if {device.process_index for device in devices} == every:
                copies = [_on_host(arrays[k]) for k in held]
            else:
                copies = _from_owner(devices[0], [arrays[k] for k in held], [avals[k] for k in held])
            for k, x in zip(held, copies, strict=True):
                results[k] = x
        return results

    def adopt(self, state: TrainState) -> TrainState:
        """Copy a state of another pipeline to the devices of this one."""
        if jax.process_count() > 1:
            raise PartitionError(
                f"adopt moves arrays between devices of one process, and there are {jax.process_count()} processes. "
                "Save the state with the other pipeline, and restore it with this one."
            )
        return adopt(self.planned, self._where, state)

    def check_state(self, state: TrainState) -> None:
        """Raise ``ModelError`` if a state has residuals of other replicas."""
        expected = [x.shape for x in self._residual_avals]
        check_state.check_residual([x.shape for x in state.residual], expected)

    def bytes(self) -> Bytes:
        """Return the most bytes that each device needs at once in a step."""
        peaks = peak_bytes(self.compiled_step, self.devices)
        each = [peaks[d] for d in self._where.all_devices.devices.flat]
        return Bytes(
            tuple(peak.total for peak in each),
            tuple(peak.temporary for peak in each),
            tuple(peak.host for peak in each),
        )

    @cached_property
    def _layout(self) -> Layout:
        return dataclasses.replace(self._shaped_layout(as_planned(self.planned)), traces=self.planned.traces)

    def _shaped_layout(self, shaped: Shaped) -> Layout:
        return self._layout_of(shaped.objective, shaped.stages, shaped.schedule, shaped.batch, shaped.batching)

    def _layout_of(
        self,
        objective: MicrobatchProgram,
        stages: tuple[Stage, ...],
        schedule: Schedule,
        batch: Any,
        batching: Batching,
        collects: bool = False,
    ) -> Layout:
        replicas = self.devices.replicas
        local = [
            x if shared else jax.ShapeDtypeStruct((x.shape[0] // replicas, *x.shape[1:]), x.dtype)
            for x, shared in zip(jax.tree.leaves(batch), batching.shared, strict=True)
        ]
        context = Context(
            objective=objective,
            stages=stages,
            batch=tuple(local),
            shared=batching.shared,
            num_microbatches=batching.num_microbatches,
            key=jax.eval_shape(lambda: jax.random.key(0)),
            gradient_dtype=self.planned.program.gradient_dtype,
            trains=schedule.has_backward,
            collects=collects,
            members=tuple(len(self.devices.rows[s]) for s in range(len(stages))),
            specs=self.planned.shardings.specs(objective),
        )
        homes = dict(zip(objective.parameters, self.planned.stage_placement.parameters, strict=True))
        return Layout(context, schedule, self.devices, homes)

    @property
    def _residual_avals(self) -> list[Any]:
        """Shapes of the residuals of a block-sparse exchange, of all replicas."""
        owners = [self.planned.stage_placement.parameters[k] for k in self._residuals]
        avals = {s: iter(self._update.residual_avals(s)) for s in set(owners)}
        return [self._layout.context.together(s, next(avals[s])) for s in owners]

    @cached_property
    def _residuals(self) -> tuple[int, ...]:
        """The parameters with residuals of a block-sparse exchange."""
        objective = self.planned.program.objective
        if self.planned.update.exchange is None:
            return ()
        return tuple(k for k, t in enumerate(objective.parameters) if t not in objective.frozen)

    @cached_property
    def _update(self) -> UpdateContext:
        update = self.planned.update
        exchange = update.exchange
        plans = None
        if exchange is not None:
            by_stage = tuple(tuple(phase[s] for phase in exchange.plans) for s in self.places)
            plans = Exchange(exchange.settings, by_stage)
        return UpdateContext(
            self._layout.context,
            update.by_stage,
            self.devices.replicas,
            plans,
            guarded=update.on_nonfinite is not None,
            skips=update.on_nonfinite == "skip",
        )

    @cached_property
    def _where(self) -> StateLayout:
        planned = self.planned
        return StateLayout(
            self._layout, planned.stage_placement, planned.update.by_stage, planned.mesh, self._residuals
        )

    def _training(self, shapes: Any) -> Compiled:
        return self._for_shapes(shapes, training_list, "Compiling the training step")

    @cached_property
    def calls(self) -> CallList:
        """The list of a training step; traced once, as a rule while the plan was made."""
        return self.planned.calls or training_list(self._layout, self._update)

    @cached_property
    @progress("Compiling the training step")
    def compiled_step(self) -> Dispatch:
        """The compiled list of a training step."""
        return self.build() if self.planned.compiled is None else self.planned.compiled.step

    def build(self) -> Dispatch:
        """Compile the list of a training step as it is planned."""
        with self._building():
            return compile_list(self.calls, self.devices)

    @property
    def predicted(self) -> dict[Any, Peak]:
        """The most bytes that each device needs in a step, in the order of the mesh, before anything is compiled."""
        peaks = predicted_bytes(self.calls, self.devices)
        return {d: peaks[d] for d in self._where.all_devices.devices.flat}

    def _for_shapes(self, shapes: Any, make: Callable[[Layout, UpdateContext], CallList], text: str) -> Compiled:
        key = make, shape_key(shapes)
        if key not in self._compiled_steps:
            planned = key[1] == shape_key(self.planned.batch)
            if planned and make is training_list:
                dispatch = self.compiled_step
                step = Compiled(self._layout, dispatch, Loader(self._where, dispatch.calls))
            else:
                with progress(text), self._building():
                    step = self._compile_shapes(shapes, make, planned)
            self._compiled_steps[key] = step
        return self._compiled_steps[key]

    def _compile_shapes(
        self, shapes: Any, make: Callable[[Layout, UpdateContext], CallList], planned: bool
    ) -> Compiled:
        shaped, layout, update = as_planned(self.planned), self._layout, self._update
        if not planned:
            sizes = ", ".join(str(list(x.shape)) for x in jax.tree.leaves(shapes))
            tell(f"A batch of other shapes than were planned for: {sizes}")
            if not multihost.meet(f"shapes {sizes}"):
                raise BatchError(
                    f"This process has a batch of shapes {sizes}, and within {multihost.MEETING_SECONDS:.0f} s not all "
                    "other processes had one, too. In a step all processes pass batches of the same sizes: give each "
                    "of them as many examples, or leave out what one of them has left over."
                )
            shaped = shaped_for(self.planned, shapes, self.planned.retrace)
            layout = self._shaped_layout(shaped)
            update = dataclasses.replace(self._update, pipeline=layout.context)
        return self._compile(layout, make(layout, update))

    def _building(self) -> Any:
        return building_for(self.planned.mesh.devices.flat[0].platform)

    def _compile(self, layout: Layout, calls: CallList) -> Compiled:
        where = dataclasses.replace(self._where, layout=layout)
        return Compiled(layout, compile_list(calls, self.devices), Loader(where, calls))

    def _run(self, compiled: Compiled, state: TrainState, batch: Any) -> dict[Key, Any]:
        batch = compiled.loader.place_batch(jax.tree.leaves(batch))
        return compiled.dispatch.run(compiled.loader.load(state) | batch)

    def _reports(self, compiled: Compiled, outputs: dict[Key, Any]) -> dict[Name, Any]:
        """Return the reports of a step, on the device that computes them."""
        home = compiled.layout.home
        return {key.name: x for key, x in outputs.items() if key.place == home}

    def _by_replica_rows(self, layout: Layout, parts: Sequence[Any]) -> Any:
        """Put the rows of all replicas together, on the last stage or where they have been spread."""
        if len(parts) == 1:
            return parts[0]
        local = [x for x in parts if x is not None]
        shape = (len(parts) * local[0].shape[0], *local[0].shape[1:])
        mesh = layout.devices.mesh(Place(layout.home.stage))
        if layout.rows_cross:
            columns = [layout.devices.of_replicas([r]) for r in range(len(parts))]
            mesh = Mesh(np.array(columns).T, (STAGE, DATA))
        shards = [shard.data for x in local for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, P(DATA)), shards)


def _elsewhere(aval: Any, sharding: NamedSharding) -> Any:
    """Return an array of which this process has no part."""
    return jax.make_array_from_single_device_arrays(aval.shape, sharding, [], dtype=aval.dtype)


def _on_host(x: Any) -> Any:
    """A copy on the host; of a random key, the key."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return np.array(x if x.is_fully_addressable else _whole(x).addressable_data(0))


def _whole(x: Any) -> Any:
    """Return an array of a stage with all of it on each device; called by all processes that have a part."""
    if x.is_fully_replicated:
        return x
    return jax.jit(lambda x: x, out_shardings=NamedSharding(x.sharding.mesh, P()))(x)


def _from_owner(device: Any, arrays: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Copy arrays of a stage, of which one device is, to the host of every process; of random keys, the keys."""
    keys = [jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key) for aval in avals]
    data = [jax.eval_shape(jax.random.key_data, a) if is_key else a for a, is_key in zip(avals, keys, strict=True)]
    held: list[Any] = []
    here = [_whole(x) for x in arrays if x is not None and x.addressable_shards]
    if multihost.mine([device]):
        local = [x.addressable_data(0) for x in here]
        held = [jax.random.key_data(x) if is_key else x for x, is_key in zip(local, keys, strict=True)]
    copies = multihost.from_owner(device, held, data)
    return [
        jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(jnp.empty((), aval.dtype))) if is_key else x
        for x, aval, is_key in zip(copies, avals, keys, strict=True)
    ]
