"""A plan as stage programs that the host dispatches."""

# More than 15 of our modules: the parts of this room are put together here.
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe import multihost
from jaxpipe.array_types import Array, ArrayLike, Device, PyTree, Shaped, is_key
from jaxpipe.errors import PartitionError
from jaxpipe.models.check_batch import shape_key
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.runtime import check_state
from jaxpipe.runtime.executable_plan import Batching, Bytes, ExecutablePlan, ForwardPass, Gradients, StepResults
from jaxpipe.runtime.followed_program import forward_program
from jaxpipe.runtime.mpmd.device_bytes import Peak, device_peaks, predicted_bytes
from jaxpipe.runtime.mpmd.dispatch import Dispatch, compile_graph
from jaxpipe.runtime.mpmd.other_shapes import check_shapes, shaped_for
from jaxpipe.runtime.mpmd.stage_devices import StageDevices
from jaxpipe.runtime.mpmd.stage_layout import StageLayout, StateArray
from jaxpipe.runtime.mpmd.stage_state import LoadedGraph, adopt
from jaxpipe.runtime.mpmd.step_graph import Place, Port, StepGraph
from jaxpipe.runtime.mpmd.training_graph import evaluation_graph, gradient_graph, prediction_graph, training_graph
from jaxpipe.runtime.recent import recent
from jaxpipe.runtime.train_state import StageArrays, TrainState, made_for, on_host
from jaxpipe.runtime.uint32_words import typed
from jaxpipe.sharding.mesh_axes import DATA, STAGE, stage_devices
from jaxpipe.targets.building import building_for
from jaxpipe.text.progress import progress, tell


class MpmdRuntime:
    """A plan as stage programs; with the methods of ``SpmdRuntime``.

    Attributes:
      planned: the plan.
      places: numbers of the stages.
    """

    def __init__(self, planned: ExecutablePlan):
        self.planned, self.places = planned, planned.program.stage_numbers
        self._token = object()
        self._compiled_steps: dict[Hashable, LoadedGraph] = {}

    @cached_property
    def devices(self) -> StageDevices:
        """The devices of every stage."""
        mesh, program = self.planned.mesh, self.planned.program
        rows = [tuple(stage_devices(mesh, program.stage_replicas, program.device(s))) for s in self.places]
        return StageDevices(tuple(rows), mesh.shape.get(DATA, 1), self.planned.shardings.submesh)

    def devices_of(self, place: int) -> list[Device]:
        """The devices of a stage."""
        return list(self.devices.of(Place(self.places[place])))

    def stage_part(self, place: int, arrays: StageArrays) -> dict[Port, Array]:
        """Put a stage's arrays onto its devices."""
        every = self._layout.state_arrays.items()
        held = {field: [x for x in rows if x.port.place.stage == place] for field, rows in every}
        avals = [x.aval for x in held["residual"]]
        residuals = arrays.residuals or [np.zeros(aval.shape, aval.dtype) for aval in avals]
        residuals = [np.asarray(x, aval.dtype) for x, aval in zip(residuals, avals, strict=True)]
        values = itertools.chain(arrays.parameters, arrays.variables, arrays.optimizer, residuals)
        pairs = zip(itertools.chain.from_iterable(held.values()), values, strict=True)
        return {x.port: multihost.place(value, x.aval.sharding) for x, value in pairs}

    def assemble(self, parts: Mapping[Port, Array], everywhere: dict[str, PyTree]) -> TrainState:
        """Return the state of the arrays of this process's stages, and of what all devices have."""
        groups: dict[str, PyTree] = {
            field: tuple(parts[x.port] if x.port in parts else _elsewhere(x.aval) for x in arrays)
            for field, arrays in self._layout.state_arrays.items()
        }
        return made_for(self._token, TrainState(**groups, **everywhere, plan=self.planned.plan.identity))

    def check_batch(self, shapes: PyTree) -> None:
        """Raise ``BatchError`` if a batch differs from what was planned for in more than its sizes."""
        check_shapes(shapes, self.planned.batch)

    def prepare(self, shapes: PyTree) -> None:
        """Compile the training step for batches of some shapes."""
        self._compiled_for(shapes)

    def step(self, state: TrainState, batch: PyTree, shapes: PyTree) -> StepResults:
        """Run a training step; donates the state."""
        compiled = self._compiled_for(shapes)
        outputs, loss, metrics = compiled.run(state, batch)
        new = made_for(self._token, compiled.state_of(state, outputs))
        return StepResults(new, loss, compiled.reports(outputs, "counters"), metrics)

    def gradients(self, state: TrainState, batch: PyTree, shapes: PyTree) -> Gradients:
        """Return loss, metrics and the mean gradient of each trained parameter, None of others."""
        compiled = self._compiled_for(shapes, gradient_graph)
        outputs, loss, metrics = compiled.run(state, batch)
        frozen, parameters = compiled.layout.objective.frozen, compiled.layout.state_arrays["parameters"]
        held = [x for x in parameters if x.port.number not in frozen]
        values = iter(self._on_hosts(held, [outputs[x.port._replace(field="gradients")] for x in held]))
        return loss, metrics, [None if x.port.number in frozen else next(values) for x in parameters]

    @progress("Compiling the forward pass")
    def forward(self, name: str, objective: MicrobatchProgram, shapes: PyTree, batching: Batching) -> ForwardPass:
        """Compile a function of state and batch: loss and metrics of ``"evaluate"``, leaves of ``"predict"``."""
        program = forward_program(self.planned, objective, name, batching.num_microbatches)
        with self._building():
            shaped = dataclasses.replace(self.planned, batch=shapes, batching=batching, program=program, traces={})
            layout = StageLayout(shaped, self.devices, collects=name == "predict")
            graph = evaluation_graph(layout) if name == "evaluate" else prediction_graph(layout)
            compiled = LoadedGraph(layout, compile_graph(graph, self.devices, f"Pipeline.{name}"))

        def run(state: TrainState, batch: PyTree) -> PyTree:
            if name == "evaluate":
                return compiled.run(state, batch)[1:]
            outputs = compiled.dispatch.run(compiled.given(state, batch))
            leaves = range(len(program.objective.results))
            parts = [[x for p, x in outputs.items() if (p.field, p.number) == ("predictions", k)] for k in leaves]
            return [self._by_replica_rows(layout, rows) for rows in parts]

        return run

    def to_host(self, state: TrainState, apart: bool = False) -> StageArrays:
        """Copy a state to the host of every process; replicas have nothing else ``apart``."""
        del apart
        layout, fields = self._layout, ("parameters", "variables", "optimizer")
        copies = {field: self._on_hosts(layout.state_arrays[field], getattr(state, field)) for field in fields}
        rows = [self._residual_rows(state, r) for r in range(self.devices.replicas)]
        residuals = [np.concatenate(parts) for parts in zip(*rows, strict=True)]
        owned, shared = iter(copies["optimizer"]), map(_on_host, state.shared)
        slots = [next(shared if owner is None else owned) for owner in layout.update.by_stage.state_stage]
        return StageArrays(copies["parameters"], copies["variables"], slots, residuals)

    def _residual_rows(self, state: TrainState, r: int) -> list[ArrayLike]:
        """Copy the residuals of a replica to the host of every process."""
        rows, held = [], []
        for x, residual in zip(self._layout.state_arrays["residual"], state.residual, strict=True):
            shards = {shard.device: shard.data for shard in residual.addressable_shards}
            rows.append(shards.get(self.devices.rows[x.port.place.stage][r]))
            held.append(x._replace(aval=jax.ShapeDtypeStruct((1, *residual.shape[1:]), residual.dtype)))
        return self._on_hosts(held, rows, r)

    def _on_hosts(
        self, every: Sequence[StateArray], arrays: Sequence[Array | None], r: int | None = None
    ) -> list[ArrayLike]:
        """Copy arrays, of all replicas or of one, to the host of every process, stage by stage."""
        results: dict[int, ArrayLike] = {}
        for s in self.places:
            held = [k for k, x in enumerate(every) if x.port.place.stage == s]
            devices = self.devices_of(s) if r is None else self.devices_of(s)[r : r + 1]
            local = [x for k in held if (x := arrays[k]) is not None]
            if {device.process_index for device in devices} == self.devices.processes:
                copies = [_on_host(x) for x in local]
            else:
                copies = _from_owner(devices[0], local, [every[k].aval for k in held])
            results |= zip(held, copies, strict=True)
        return [results[k] for k in range(len(arrays))]

    def adopt(self, state: TrainState) -> TrainState:
        """Copy a state of another pipeline to the devices of this one."""
        if jax.process_count() > 1:
            raise PartitionError(
                f"adopt moves arrays between devices of one process, and there are {jax.process_count()} processes. "
                "Save the state with the other pipeline, and restore it with this one."
            )
        return made_for(self._token, adopt(self._layout, state))

    def fitted(self, state: TrainState) -> TrainState:
        """Return a state with its arrays as this runtime's programs take them; raise ``ModelError`` if none can be."""
        if state.fits is self._token:
            return state
        return made_for(self._token, check_state.fitted(state, self._layout.abstract_state, self._layout.state_names))

    def bytes(self) -> Bytes:
        """Return the most bytes that each device needs at once in a step."""
        peaks = self.in_mesh_order(device_peaks(self.compiled_step, self.devices)).values()
        reserved, temporary, host = zip(*((peak.total, peak.temporary, peak.host) for peak in peaks), strict=True)
        return reserved, temporary, host

    @cached_property
    def _layout(self) -> StageLayout:
        return StageLayout(self.planned, self.devices)

    @cached_property
    def graph(self) -> StepGraph:
        """The graph of a training step; traced once, as a rule while the plan was made."""
        return self.planned.graph or training_graph(self._layout)

    @cached_property
    @progress("Compiling the training step")
    def compiled_step(self) -> Dispatch:
        """The compiled graph of a training step."""
        return self.build() if self.planned.compiled is None else self.planned.compiled

    def build(self) -> Dispatch:
        """Compile the graph of a training step as it is planned."""
        with self._building():
            return compile_graph(self.graph, self.devices, "Pipeline.step")

    @property
    def predicted(self) -> dict[Device, Peak]:
        """The most bytes that each device needs in a step, in the order of the mesh, before anything is compiled."""
        return self.in_mesh_order(predicted_bytes(self.graph, self.devices))

    def in_mesh_order(self, peaks: Mapping[Device, Peak]) -> dict[Device, Peak]:
        """Return the bytes of devices in the order of the mesh."""
        return {d: peaks[d] for d in self.planned.all_devices.devices.flat}

    def _compiled_for(self, shapes: PyTree, make: Callable[[StageLayout], StepGraph] = training_graph) -> LoadedGraph:
        key, trains = (make, shape_key(shapes)), make is training_graph

        def compiled() -> LoadedGraph:
            is_planned = key[1] == shape_key(self.planned.batch)
            if is_planned and trains:
                return LoadedGraph(self._layout, self.compiled_step)
            with progress(f"Compiling the {'training step' if trains else 'gradient'}"), self._building():
                layout = self._layout if is_planned else self._layout_for(shapes)
                call = f"Pipeline.{'step' if trains else 'value_and_grad'}"
                return LoadedGraph(layout, compile_graph(make(layout), self.devices, call))

        return recent(self._compiled_steps, key, compiled)

    def planned_for(self, shapes: PyTree) -> ExecutablePlan:
        """Return the plan for batches of some shapes."""
        same = shape_key(shapes) == shape_key(self.planned.batch)
        return self.planned if same else shaped_for(self.planned, shapes)

    def _layout_for(self, shapes: PyTree) -> StageLayout:
        sizes = ", ".join(str(list(x.shape)) for x in jax.tree.leaves(shapes))
        tell(f"A batch of other shapes than were planned for: {sizes}")
        multihost.meet(f"a first batch of shapes {sizes}")
        return StageLayout(shaped_for(self.planned, shapes), self.devices)

    def _building(self) -> AbstractContextManager[None]:
        return building_for(self.planned.mesh.devices.flat[0])

    def _by_replica_rows(self, layout: StageLayout, parts: Sequence[Array | None]) -> Array | None:
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


def _elsewhere(aval: jax.ShapeDtypeStruct) -> Array:
    """Return an array of which this process has no part."""
    assert isinstance(aval.sharding, NamedSharding)
    return jax.make_array_from_single_device_arrays(aval.shape, aval.sharding, [], dtype=aval.dtype)


def _on_host(x: Array) -> ArrayLike:
    """Return a copy on the host."""
    return on_host(x if x.is_fully_addressable else _whole(x))


def _whole(x: Array) -> Array:
    """Return an array of a stage with all of it on each device; called by all processes that have a part."""
    if x.is_fully_replicated:
        return x
    assert isinstance(x.sharding, NamedSharding)
    return jax.jit(lambda x: x, out_shardings=NamedSharding(x.sharding.mesh, P()))(x)


def _from_owner(device: Device, arrays: Sequence[Array], avals: Sequence[Shaped]) -> list[ArrayLike]:
    """Copy arrays of a stage, of which one device is, to the host of every process; of random keys, the keys."""
    data = [jax.eval_shape(jax.random.key_data, aval) if is_key(aval) else aval for aval in avals]
    local = [_whole(x).addressable_data(0) for x in arrays if x.addressable_shards]
    copies = multihost.from_owner(device, [jax.random.key_data(x) if is_key(x) else x for x in local], data)
    return [typed(x, aval.dtype) for x, aval in zip(copies, avals, strict=True)]
