"""A plan as stage programs that the host dispatches."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe import hosts
from jaxpipe.pipeline import checks, compiled
from jaxpipe.pipeline.axes import DATA, STAGE
from jaxpipe.pipeline.objective import Objective
from jaxpipe.pipeline.planned import Planned
from jaxpipe.pipeline.sections import Section, cut_sections
from jaxpipe.pipeline.state import TrainState
from jaxpipe.pipeline.step import Batching
from jaxpipe.progress import progress
from jaxpipe.runtime.interface import Bytes, StepResults
from jaxpipe.runtime.mpmd.calls import CallList, Key
from jaxpipe.runtime.mpmd.dispatch import Dispatch, compile_list
from jaxpipe.runtime.mpmd.estimate import predicted_bytes
from jaxpipe.runtime.mpmd.lists import Layout, evaluation_list, gradient_list, prediction_list, training_list
from jaxpipe.runtime.mpmd.memory import Peak, peak_bytes
from jaxpipe.runtime.mpmd.stage_work import Context, Name, Role
from jaxpipe.runtime.mpmd.training_state import Loader, StateLayout, place_batch
from jaxpipe.runtime.mpmd.update_work import COUNTERS, NONFINITE, STOPPED, Exchange, UpdateContext
from jaxpipe.runtime.spmd import followed_cuts
from jaxpipe.runtime.state_arrays import CommonArrays, HostArrays, StageArrays
from jaxpipe.schedules import Schedule
from jaxpipe.schedules.gpipe import forward_only
from jaxpipe.target import building_for


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled list, and what it needs to be run.

    Attributes:
      layout, dispatch, loader: where stages are, the list, and what it begins with.
      batching: how its batch is cut.
    """

    layout: Layout
    dispatch: Dispatch
    loader: Loader
    batching: Batching


class MpmdRuntime:
    """A plan as stage programs; see ``jaxpipe.runtime.interface.Runtime``."""

    def __init__(self, planned: Planned):
        self.planned = planned
        self._forward: dict[Any, Compiled] = {}

    @property
    def places(self) -> range:
        """Numbers of the stages."""
        return range(len(self.planned.program.sections))

    @cached_property
    def devices(self) -> np.ndarray:
        """Devices by stage and replica."""
        mesh, count = self.planned.mesh, self.planned.program.schedule.num_stages
        grid = mesh.devices[..., None] if DATA not in mesh.axis_names else mesh.devices
        grid = np.moveaxis(grid, mesh.axis_names.index(STAGE), 0).reshape(count, -1)
        return grid[[s % count for s in self.places]]

    def devices_of(self, place: int) -> list[Any]:
        """The devices of a stage, one for each replica."""
        return self.devices[place].tolist()

    def stage_part(self, place: int, arrays: StageArrays) -> StageArrays:
        """Put a stage's arrays onto its devices."""
        sharding = self._where.sharding(place)

        def everywhere(x: Any) -> Any:
            return hosts.replicate(x, sharding)

        residuals: list[Any] = []
        if self._residuals:
            avals = self._update.residual_avals(place)
            count = len(self.devices_of(place))
            held = list(arrays.residuals) or [np.zeros((count, *a.shape[1:]), a.dtype) for a in avals]
            residuals = [self._by_replica(place, np.asarray(x, a.dtype)) for x, a in zip(held, avals, strict=True)]
        groups = arrays.parameters, arrays.variables, arrays.optimizer
        return StageArrays(*([everywhere(x) for x in group] for group in groups), residuals)

    def assemble(self, parts: Mapping[int, StageArrays], common: CommonArrays) -> TrainState:
        """Return the state of the parts of this process's stages."""
        planned, where = self.planned, self._where
        model, coloured = planned.model, planned.update.coloured

        def gathered(field: str, owners: Sequence[int], avals: Sequence[Any]) -> tuple[Any, ...]:
            taken = {place: iter(getattr(part, field)) for place, part in parts.items()}
            return tuple(
                next(taken[s]) if s in taken else _elsewhere(aval, where.sharding(s))
                for s, aval in zip(owners, avals, strict=True)
            )

        owned = where.owned
        slots = gathered(
            "optimizer",
            [coloured.state_stage[k] or 0 for k in owned],
            [coloured.state_avals[k] for k in owned],
        )
        residuals = ()
        if self._residuals:
            owners = [planned.stages.parameters[k] for k in self._residuals]
            avals = {s: iter(self._update.residual_avals(s)) for s in self.places}
            count = len(self.devices_of(0))
            shapes = [next(avals[s]) for s in owners]
            stacked = [jax.ShapeDtypeStruct((count, *a.shape[1:]), a.dtype) for a in shapes]
            residuals = gathered("residuals", owners, stacked)
        spread = NamedSharding(planned.mesh, P())
        return TrainState(
            gathered("parameters", planned.stages.parameters, [v.aval for v in model.parameters]),
            gathered("variables", planned.stages.state, [v.aval for v in model.state]),
            slots,
            residuals,
            shared=tuple(hosts.replicate(x, spread) for x in common.shared),
            key=hosts.replicate(common.key, spread),
            step=hosts.replicate(jnp.int32(common.step), spread),
            skipped=hosts.replicate(jnp.int32(common.skipped), spread),
            plan=planned.plan.identity,
        )

    def prepare(self, batch: Any) -> None:
        """Compile the training step."""
        del batch
        self._training  # noqa: B018

    def step(self, state: TrainState, batch: Any) -> StepResults:
        """Run a training step; donates the state."""
        compiled = self._training
        made = self._run(compiled, state, batch)
        new = self._where.state_of(state, made)
        reports = self._reports(compiled, made)
        count = len(compiled.layout.context.objective.results) - 1
        loss, *metrics = [reports[Name(Role.REPORT, k)] for k in range(count)]
        counters = {name: reports.get(Name(Role.REPORT, -1 - k)) for k, name in enumerate(COUNTERS)}
        if self._update.guarded:
            counters |= {"nonfinite_stages": reports[NONFINITE], "stopped": reports[STOPPED]}
        return StepResults(new, loss, {k: x for k, x in counters.items() if x is not None}, metrics)

    def gradients(self, state: TrainState, batch: Any) -> tuple[Any, Sequence[Any], list[Any]]:
        """Return loss, metrics and the mean gradient of each trained parameter, None of others."""
        compiled = self._gradient
        made = self._run(compiled, state, batch)
        reports = self._reports(compiled, made)
        objective = compiled.layout.context.objective
        loss, *metrics = [reports[Name(Role.REPORT, k)] for k in range(len(objective.results) - 1)]
        gradients: list[Any] = []
        for k, t in enumerate(objective.parameters):
            place = self._where.place(self.planned.stages.parameters[k])
            x = made.get(Key(place, Name(Role.MEAN, t)))
            gradients.append(None if t in objective.frozen else np.array(x))
        return loss, metrics, gradients

    def forward(self, name: str, objective: Objective, shapes: Any, batching: Batching, state: Any, batch: Any) -> Any:
        """Run a forward pass: loss and metrics of ``"evaluate"``, leaves of ``"predict"``."""
        key = name, str(jax.tree.structure(shapes)), tuple((x.shape, x.dtype) for x in jax.tree.leaves(shapes))
        if key not in self._forward:
            self._forward[key] = self._build_forward(name, objective, shapes, batching)
        compiled = self._forward[key]
        made = self._run(compiled, state, batch)
        if name == "evaluate":
            reports = self._reports(compiled, made)
            loss, *metrics = [reports[Name(Role.REPORT, k)] for k in range(len(objective.results) - 1)]
            return loss, metrics
        last, predictions = compiled.layout.home.stage, []
        for k in range(len(objective.results)):
            parts = [x for key, x in made.items() if key.name == Name(Role.REPORT, k)]
            predictions.append(parts[0] if len(parts) == 1 else self._by_replica_rows(last, parts))
        return predictions

    def to_host(self, state: TrainState, keep: bool = True) -> HostArrays:
        """Copy a state to the host of every process that keeps it."""
        coloured, where = self.planned.update.coloured, self._where
        slots: list[Any] = [None] * len(coloured.state)
        for k, x in zip((*where.owned, *where.shared), (*state.optimizer, *state.shared), strict=True):
            slots[k] = _on_host(x)
        return HostArrays(
            [_on_host(x) for x in state.parameters],
            [_on_host(x) for x in state.variables],
            slots,
            [_on_host(x) for x in state.residual],
        )

    def check_state(self, state: TrainState) -> None:
        """Raise ``StateError`` if a state has residuals of other replicas."""
        count = len(self.devices_of(0))
        avals = {s: iter(self._update.residual_avals(s)) for s in self.places} if self._residuals else {}
        owners = [self.planned.stages.parameters[k] for k in self._residuals]
        expected = [(count, *next(avals[s]).shape[1:]) for s in owners]
        checks.check_residual([x.shape for x in state.residual], expected)

    def bytes(self) -> Bytes:
        """Return the most bytes that each device needs at once in a step."""
        found = peak_bytes(self.compiled_step, self.devices)
        order = self.planned.mesh.devices.flatten().tolist()
        return Bytes(tuple(found[d].total for d in order), tuple(found[d].temporary for d in order), (0,) * len(order))

    @cached_property
    def _layout(self) -> Layout:
        planned = self.planned
        program = planned.program
        found = self._layout_of(program.objective, program.sections, program.schedule, planned.batch, planned.batching)
        return dataclasses.replace(found, traces=planned.traces)

    def _layout_of(
        self,
        objective: Objective,
        sections: tuple[Section, ...],
        schedule: Schedule,
        batch: Any,
        batching: Batching,
        collects: bool = False,
    ) -> Layout:
        replicas = self.devices.shape[1]
        local = [
            x if shared else jax.ShapeDtypeStruct((x.shape[0] // replicas, *x.shape[1:]), x.dtype)
            for x, shared in zip(jax.tree.leaves(batch), batching.shared, strict=True)
        ]
        context = Context(
            objective=objective,
            sections=sections,
            batch=tuple(local),
            shared=batching.shared,
            num_microbatches=batching.num_microbatches,
            key=jax.eval_shape(lambda: jax.random.key(0)),
            gradient_dtype=self.planned.program.gradient_dtype,
            trains=schedule.has_backward,
            collects=collects,
            lead=(1,) if replicas > 1 else (),
        )
        homes = dict(zip(objective.parameters, self.planned.stages.parameters, strict=True))
        return Layout(context, schedule, self.devices, homes)

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
            update.coloured,
            self.devices.shape[1],
            plans,
            guarded=update.on_nonfinite is not None,
            skips=update.on_nonfinite == "skip",
        )

    @cached_property
    def _where(self) -> StateLayout:
        planned = self.planned
        return StateLayout(self._layout, planned.stages, planned.update.coloured, planned.mesh, self._residuals)

    @cached_property
    def _training(self) -> Compiled:
        checks.check_runs(self.planned.plan)
        dispatch = self.compiled_step
        return Compiled(self._layout, dispatch, Loader(self._where, self.calls), self.planned.batching)

    @cached_property
    def calls(self) -> CallList:
        """The list of a training step; traced once, as a rule while the plan was made."""
        return self.planned.calls or training_list(self._layout, self._update)

    @cached_property
    @progress("Compiling the training step")
    def compiled_step(self) -> Dispatch:
        """The compiled list of a training step, within the budget if there is one."""
        if self.planned.budget is not None and self.planned.compiled is None:
            self.planned = compiled.within_budget(self.planned)
            for name in ("_layout", "_update", "_where", "calls"):  # of the same state with other storage
                self.__dict__.pop(name, None)
        return self.build() if self.planned.compiled is None else self.planned.compiled.step

    def build(self) -> Dispatch:
        """Compile the list of a training step as it is planned."""
        with self._building():
            return compile_list(self.calls, self.devices)

    @property
    def predicted(self) -> list[Peak]:
        """The most bytes that each device needs in a step, in the order of the mesh, before anything is compiled."""
        found = predicted_bytes(self.calls, self.devices)
        return [found[d] for d in self.planned.mesh.devices.flat]

    @cached_property
    @progress("Compiling the gradient")
    def _gradient(self) -> Compiled:
        checks.check_runs(self.planned.plan)
        with self._building():
            return self._compiled(self._layout, gradient_list(self._layout, self._update), self.planned.batching)

    @progress("Compiling the forward pass")
    def _build_forward(self, name: str, objective: Objective, shapes: Any, batching: Batching) -> Compiled:
        planned = self.planned
        before = planned.program.schedule
        sections = cut_sections(objective, followed_cuts(planned, objective, name), planned.stages)
        schedule = forward_only(before.num_stages, batching.num_microbatches, before.num_chunks)
        with self._building():
            layout = self._layout_of(objective, sections, schedule, shapes, batching, name == "predict")
            calls = evaluation_list(layout) if name == "evaluate" else prediction_list(layout)
            return self._compiled(layout, calls, batching)

    def _building(self) -> Any:
        return building_for(self.planned.mesh.devices.flat[0].platform)

    def _compiled(self, layout: Layout, calls: CallList, batching: Batching) -> Compiled:
        where = dataclasses.replace(self._where, layout=layout)
        return Compiled(layout, compile_list(calls, self.devices), Loader(where, calls), batching)

    def _run(self, compiled: Compiled, state: TrainState, batch: Any) -> dict[Key, Any]:
        leaves = jax.tree.leaves(batch)
        given = compiled.loader.load(state) | place_batch(
            compiled.loader, leaves, compiled.batching.shared, compiled.layout
        )
        return compiled.dispatch.run(given)

    def _reports(self, compiled: Compiled, made: dict[Key, Any]) -> dict[Name, Any]:
        """What a step reports, on the device where it is made."""
        home = compiled.layout.home
        return {key.name: x for key, x in made.items() if key.place == home}

    def _by_replica(self, stage: int, x: np.ndarray) -> Any:
        sharding = self._where.sharding(stage, sharded=True)
        rows = {d: x[r : r + 1] for r, d in enumerate(self.devices_of(stage))}
        own = [jax.device_put(rows[d], d) for d in hosts.mine(self.devices_of(stage))]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, own)

    def _by_replica_rows(self, stage: int, parts: Sequence[Any]) -> Any:
        shape = (len(parts) * parts[0].shape[0], *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._where.sharding(stage, sharded=True), list(parts))


def _elsewhere(aval: Any, sharding: NamedSharding) -> Any:
    """An array of which this process has no part."""
    return jax.make_array_from_single_device_arrays(aval.shape, sharding, [], dtype=aval.dtype)


def _on_host(x: Any) -> Any:
    """A copy on the host; of a random key, the key."""
    return x if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else np.array(x)
