"""One compiled program for all devices, which walk through a schedule in step (``jaxpipe.runtime.spmd.tick_loop``)."""

# More than 15 of our modules: the parts of this room are put together here.
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled, Lowered

from jaxpipe import agreement, multihost
from jaxpipe.array_types import Array, ArrayLike, Device, PyTree, Shaped, TensorNumber
from jaxpipe.costs.reserved_bytes import reserved_bytes
from jaxpipe.errors import PartitionError
from jaxpipe.graph.program_text import program_text
from jaxpipe.models import check_batch
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.runtime import check_state, shard_batch
from jaxpipe.runtime.executable_plan import Batching, Bytes, ExecutablePlan, ForwardPass, Gradients, StepResults
from jaxpipe.runtime.followed_program import forward_program
from jaxpipe.runtime.replica_exchange import sites_of
from jaxpipe.runtime.spmd.buffer_layout import BufferLayout
from jaxpipe.runtime.spmd.compiled_step import evaluation_step, gradient_step, prediction_step, training_step
from jaxpipe.runtime.spmd.lockstep_program import LockstepProgram
from jaxpipe.runtime.train_state import StageArrays, TrainState, made_for, mean_of_replicas, on_host
from jaxpipe.runtime.waiting_thread import Awaited, run_together
from jaxpipe.sharding.mesh_axes import DATA, STAGE, stage_devices
from jaxpipe.targets.building import building_for
from jaxpipe.text.progress import progress, tell
from jaxpipe.text.units import bytes_text


class SpmdRuntime:
    """A plan as one program; with the methods of ``MpmdRuntime``.

    Attributes:
      planned, program: the plan, and its program with what one for all devices needs.
      places: numbers of the devices along the stage axis.
    """

    def __init__(self, planned: ExecutablePlan):
        self.planned, self._token, self._loop = planned, object(), planned.update.outer
        sites = None if self._loop is None else sites_of(planned.mesh)
        self.program = LockstepProgram.of(planned.program, update=planned.update, sites=sites)
        self.places = range(self.program.num_devices)

    def devices_of(self, place: int) -> list[Device]:
        """The devices of a place, one for each replica."""
        return stage_devices(self.planned.mesh, self.program.stage_replicas, place)

    @cached_property
    def _abstract_state(self) -> TrainState:
        """The shapes of a training state, where its devices have them: of buffers, one after the other."""
        mesh, groups = self.planned.mesh, self.planned.everywhere
        for field, layout in self.program.state.items():
            apart = field == "residual" or (self._loop is not None and field != "outer")
            count, spec = (mesh.size, P((STAGE, DATA))) if apart else (mesh.shape[STAGE], P(STAGE))
            groups[field] = tuple(self._shaped((count * x.size,), x, spec) for x in layout.buffers)
        return TrainState(**groups, plan=self.planned.plan.identity)

    def _shaped(self, shape: Sequence[int], x: Shaped, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype, sharding=NamedSharding(self.planned.mesh, spec))

    def stage_part(self, place: int, arrays: StageArrays) -> dict[Device, dict[str, PyTree]]:
        """Return the buffers of a place's devices, on these."""
        part = dict[Device, dict[str, PyTree]]()
        outer = arrays.outer if self._loop is None else arrays.outer or [*map(self._loop.first, arrays.parameters)]
        for r, device in enumerate(self.devices_of(place)):
            if multihost.mine([device]):
                source = arrays.replicas[r] if arrays.replicas else arrays
                left = [x[r] for x in arrays.residuals]  # that are not given are zero
                groups = source.parameters, source.variables, source.optimizer, left, [x for row in outer for x in row]
                buffers = {
                    field: tuple(layout.write(place, dict(zip(layout.places[place], values, strict=bool(values))), np))
                    for (field, layout), values in zip(self.program.state.items(), groups, strict=True)
                }
                part[device] = jax.device_put(buffers, device)
        return part

    def assemble(self, parts: Mapping[Device, dict[str, PyTree]], everywhere: dict[str, PyTree]) -> TrainState:
        """Return the state of the buffers of this process's devices, and of what all have."""

        def whole(x: jax.ShapeDtypeStruct, *rows: Array) -> Array:
            return jax.make_array_from_single_device_arrays(x.shape, x.sharding, list(rows))

        abstract = {field: getattr(self._abstract_state, field) for field in self.program.state}
        groups = jax.tree.map(whole, abstract, *parts.values())
        return made_for(self._token, dataclasses.replace(self._abstract_state, **groups, **everywhere))

    def to_host(self, state: TrainState, apart: bool = False) -> StageArrays:
        """Copy a state to the host of every process; ``apart``: what each replica has of its own, too.

        In an outer loop parameters are the outer ones, and variables the means over the replicas.
        """
        objective, layouts = self.program.objective, self.program.state
        held = {field: self._on_hosts(layout, getattr(state, field)) for field, layout in layouts.items()}
        replicas = range(self.planned.batching.replicas)
        left = [self._on_hosts(layouts["residual"], state.residual, r) for r in replicas]
        rows, each = dict[TensorNumber, list[ArrayLike]](), []
        for (t, _), x in held["outer"].items():
            rows.setdefault(t, []).append(x)
        if self._loop is not None:
            fields = ("parameters", "variables", "optimizer") if apart else ("variables",)
            each = [{k: self._on_hosts(layouts[k], getattr(state, k), r) for k in fields} for r in replicas]
            held["parameters"] = self.program.outer_parameters(held["outer"])
            held["variables"] = {t: mean_of_replicas([x["variables"][t] for x in each]) for t in held["variables"]}
        shared = list(map(on_host, state.shared))

        def arrays(held: Mapping[str, Mapping[TensorNumber, Any]]) -> StageArrays:
            optimizer, common = held["optimizer"], iter(shared)
            slots = [optimizer[t] if t in optimizer else next(common) for t in self.planned.update.by_stage.state]
            parameters = [held["parameters"][t] for t in objective.parameters]
            return StageArrays(parameters, [held["variables"][t] for t in objective.state], slots)

        return dataclasses.replace(
            arrays(held),
            residuals=[np.stack([x[t] for x in left]) for t in objective.parameters if t in left[0]],
            outer=[rows[t] for t in objective.parameters if t in rows],
            replicas=[arrays(x) for x in each] if apart else [],
        )

    def _on_hosts(self, layout: BufferLayout, buffers: Sequence[Array], replica: int = 0) -> dict[Any, Any]:
        """Copy the arrays of all places to the host of every process, into memory of their each."""
        held = {}
        for place in self.places:
            device = self.devices_of(place)[replica]
            shards = [shard.data for x in buffers for shard in x.addressable_shards if shard.device == device]
            rows: Any = [np.array(x) for x in shards]
            if jax.process_count() > 1 and layout.buffers:
                rows = multihost.from_owner(device, rows, layout.buffers)
            held |= layout.read(place, rows)
        return held

    def adopt(self, state: TrainState) -> TrainState:
        """Raise ``PartitionError``: buffers that all devices share are laid out for one plan."""
        raise PartitionError(
            'adopt needs runtime="mpmd" in both pipelines; this one has runtime="spmd". Go on with '
            f"{check_state.GO_ON}, or save and restore the state."
        )

    def fitted(self, state: TrainState) -> TrainState:
        """Return a state with its arrays as this runtime's programs take them; raise ``ModelError`` if none can be."""
        if state.fits is self._token:
            return state
        return made_for(self._token, check_state.fitted(state, self._abstract_state, {}))

    def check_batch(self, shapes: PyTree) -> None:
        """Raise ``BatchError`` if a batch has other shapes than were planned for."""
        check_batch.check_same_structure(shapes, self.planned.batch)

    def planned_for(self, shapes: PyTree) -> ExecutablePlan:
        """Return the plan for batches of some shapes: those of all batches."""
        del shapes
        return self.planned

    def prepare(self, shapes: PyTree) -> None:
        """Compile the training step."""
        del shapes  # those that were planned for
        self.compiled_step  # noqa: B018

    def step(self, state: TrainState, batch: PyTree, shapes: PyTree) -> StepResults:
        """Run the training step; donates the state."""
        new, *results = self._run("step", self.compiled_step, state, batch, shapes, self.planned.batching)
        return StepResults(made_for(self._token, new), *results)

    def gradients(self, state: TrainState, batch: PyTree, shapes: PyTree) -> Gradients:
        """Return loss, metrics and the mean gradient of each trained parameter, None of others."""
        compiled, batching = self._gradient_step, self.planned.batching
        loss, metrics, buffers = self._run("value_and_grad", compiled, state, batch, shapes, batching)
        held = self._on_hosts(self.program.gradients, buffers)
        return loss, metrics, [held.get(t) for t in self.program.objective.parameters]

    @progress("Compiling the forward pass")
    def forward(self, name: str, objective: MicrobatchProgram, shapes: PyTree, batching: Batching) -> ForwardPass:
        """Compile a function of state and batch: loss and metrics of ``"evaluate"``, leaves of ``"predict"``."""
        planned = forward_program(self.planned, objective, name, batching.num_microbatches)
        program = LockstepProgram.of(planned, update=self.planned.update)
        graph = program.objective.graph
        agreement.agree(f"Pipeline.{name}", lambda: {"its program": program_text(graph, values=True)})
        step, outputs = (evaluation_step, P()) if name == "evaluate" else (prediction_step, P(*program.replica_axes))
        compiled = self._lower(step, outputs, program, shapes, batching).compile()
        return lambda state, batch: self._run(name, compiled, state, batch, shapes, batching)

    def _run(
        self, name: str, compiled: Compiled, state: TrainState, batch: PyTree, shapes: PyTree, batching: Batching
    ) -> Any:
        leaves = shard_batch.place_batch(self.planned.mesh, jax.tree.leaves(batch), jax.tree.leaves(shapes), batching)
        others = frozenset(d.process_index for d in self.planned.mesh.devices.flat) - {jax.process_index()}
        return run_together(compiled, Awaited(f"Pipeline.{name}", "its program", others), state, leaves)

    def bytes(self) -> Bytes:
        """Return the bytes that XLA reserves for the training step, on every device alike."""
        step, count = self.compiled_step, self.planned.mesh.devices.size
        sizes = step.memory_analysis()
        assert sizes is not None
        temporary, host = (sizes.temp_size_in_bytes,) * count, (sizes.host_temp_size_in_bytes,) * count
        return (reserved_bytes(step),) * count, temporary, host

    @cached_property
    @progress("Compiling the training step")
    def compiled_step(self) -> Compiled:
        """The training step."""
        plan = self.planned.plan
        agreement.agree("Pipeline.step", lambda: {"the plan": plan.to_json()})
        tell(f"Compiling the training step, {bytes_text(plan.predicted_bytes)} predicted")
        step = self.lower_step().compile()
        tell(f"XLA reserves {bytes_text(reserved_bytes(step))} on each device")
        return step

    def lower_step(self) -> Lowered:
        """Return the training step, lowered for the plan's devices."""
        return self._lower(training_step, None, self.program, self.planned.batch, self.planned.batching)

    @cached_property
    @progress("Compiling the gradient")
    def _gradient_step(self) -> Compiled:
        outputs, planned = (P(), P(), P(STAGE)), self.planned
        return self._lower(gradient_step, outputs, self.program, planned.batch, planned.batching).compile()

    def _lower(
        self, step: Callable[..., PyTree], outputs: PyTree, program: LockstepProgram, batch: PyTree, batching: Batching
    ) -> Lowered:
        """Return the program of every device for a state and a batch, lowered; without ``outputs``, the training step.

        That returns a new state first, in the place of the old one.
        """

        def device_step(state: TrainState, batch: Sequence[Array]) -> PyTree:
            return step(program, state, batching.rows(batch))

        mesh, abstract, specs = self.planned.mesh, self._abstract_state, batching.specs()
        inputs = jax.tree.map(lambda x: x.sharding.spec, abstract), specs
        outputs, donated = ((inputs[0], P(), P(), P()), 0) if outputs is None else (outputs, ())
        mapped = jax.shard_map(device_step, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        leaves = [self._shaped(x.shape, x, spec) for x, spec in zip(jax.tree.leaves(batch), specs, strict=True)]
        with building_for(mesh.devices.flat[0]):
            return jax.jit(mapped, donate_argnums=donated).lower(abstract, leaves)
