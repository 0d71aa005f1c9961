"""One compiled program for all devices, which walk through a schedule in step (``jaxpipe.runtime.spmd.tick_loop``)."""

# More than 15 of our modules: the parts of this room are put together here.
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled, Lowered, Wrapped
from jax.typing import DTypeLike

from jaxpipe import agreement, multihost
from jaxpipe.array_types import Array, Device, PyTree
from jaxpipe.errors import PartitionError
from jaxpipe.graph.program_text import program_text
from jaxpipe.models import check_batch
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.runtime import check_state, shard_batch
from jaxpipe.runtime.executable_plan import Batching, ExecutablePlan, followed_cuts
from jaxpipe.runtime.interface import Bytes, ForwardPass, Gradients, Part, StepResults
from jaxpipe.runtime.spmd import compiled_step as steps
from jaxpipe.runtime.spmd.buffer_layout import Layout, lay_out
from jaxpipe.runtime.spmd.lockstep_program import LockstepProgram
from jaxpipe.runtime.stages import cut_stages
from jaxpipe.runtime.state_arrays import CommonArrays, HostArrays, StageArrays, on_host
from jaxpipe.runtime.train_state import TrainState, made_for
from jaxpipe.runtime.waiting_thread import Awaited, run_together
from jaxpipe.schedules.gpipe import forward_only
from jaxpipe.sharding.mesh_axes import DATA, STAGE, stage_devices
from jaxpipe.target import building_for
from jaxpipe.text.progress import progress, tell
from jaxpipe.text.units import bytes_text


class SpmdRuntime:
    """A plan as one program; with the methods of ``MpmdRuntime``."""

    def __init__(self, planned: ExecutablePlan):
        self.planned = planned
        self.program = LockstepProgram.of(planned.program)
        self._token = object()

    @property
    def places(self) -> range:
        """Numbers of the devices along the stage axis."""
        return range(self.program.num_devices)

    def devices_of(self, place: int) -> list[Device]:
        """The devices of a place, one for each replica."""
        return stage_devices(self.planned.mesh, self.program.stage_replicas, place)

    @cached_property
    def _layouts(self) -> list[tuple[Layout, P]]:
        """The layouts of parameters, state variables, optimizer and residuals, each with the axes of its buffers."""
        program, exchanges = self.program, self.planned.update.exchange is not None
        residuals = program.residuals if exchanges else lay_out([[]])
        layouts = program.parameters, program.state, program.slots(self.planned.update)
        return [*((layout, P(STAGE)) for layout in layouts), (residuals, P(STAGE, DATA))]

    def stage_part(self, place: int, arrays: StageArrays) -> Part:
        """Return the rows of a place in all buffers, on the host."""
        groups = arrays.parameters, arrays.variables, arrays.optimizer
        *layouts, residuals = (layout for layout, _ in self._layouts)
        rows = [
            layout.write(place, list(map(np.asarray, values)), np)
            for layout, values in zip(layouts, groups, strict=True)
        ]
        if self.planned.update.exchange is None:
            return [*rows, []]
        count = self.planned.batching.replicas
        left = arrays.residuals or [np.zeros((count, *a.shape), a.dtype) for a in residuals.avals[place]]
        copies = [residuals.write(place, [np.asarray(x[r]) for x in left], np) for r in range(count)]
        return [*rows, [np.stack(x) for x in zip(*copies, strict=True)]]

    def assemble(self, parts: Mapping[int, Part], common: CommonArrays) -> TrainState:
        """Return the state of the parts of this process's places."""
        mesh, count = self.planned.mesh, self.program.num_devices

        def buffer(spec: P, rows: Mapping[int, np.ndarray]) -> Array:
            def shard(index: Any) -> np.ndarray:
                return rows[index[0].start or 0][index[1:]][None]

            shape = count, *next(iter(rows.values())).shape
            return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), shard)

        groups = [
            tuple(buffer(spec, {d: part[k][n] for d, part in parts.items()}) for n in range(len(layout.buffers)))
            for k, (layout, spec) in enumerate(self._layouts)
        ]
        everywhere = functools.partial(multihost.place, sharding=NamedSharding(mesh, P()))
        state = TrainState(
            *groups,
            shared=tuple(map(everywhere, common.shared)),
            key=everywhere(common.key),
            step=everywhere(jnp.int32(common.step)),
            skipped=everywhere(jnp.int32(common.skipped)),
            plan=self.planned.plan.identity,
        )
        return made_for(self._token, state)

    def check_batch(self, shapes: PyTree) -> None:
        """Raise ``BatchError`` if a batch has other shapes than were planned for."""
        check_batch.check_same_structure(shapes, self.planned.batch)

    def prepare(self, shapes: PyTree) -> None:
        """Compile the training step."""
        del shapes  # those that were planned for
        self.compiled_step  # noqa: B018

    def step(self, state: TrainState, batch: PyTree, shapes: PyTree) -> StepResults:
        """Run the training step; donates the state."""
        del shapes
        new, *results = self._run("step", self.compiled_step, state, self._placed(batch))
        return StepResults(made_for(self._token, new), *results)

    def gradients(self, state: TrainState, batch: PyTree, shapes: PyTree) -> Gradients:
        """Return loss, metrics and the mean gradient of each trained parameter, None of others."""
        del shapes
        loss, metrics, buffers = self._run("value_and_grad", self._gradient_step, state, self._placed(batch))
        program, placement = self.program, self.planned.placement
        trained = [t not in program.objective.frozen for t in program.objective.parameters]
        owners = [owner if kept else None for owner, kept in zip(placement.parameters, trained, strict=True)]
        held = self._on_hosts(program.gradients, owners, buffers)
        return loss, metrics, [None if owner is None else next(held) for owner in owners]

    @progress("Compiling the forward pass")
    def forward(self, name: str, objective: MicrobatchProgram, shapes: PyTree, batching: Batching) -> ForwardPass:
        """Compile a function of state and batch: loss and metrics of ``"evaluate"``, leaves of ``"predict"``."""
        planned = self.planned
        before = self.program.schedule
        objective, cuts = followed_cuts(planned, objective, name)
        program = dataclasses.replace(
            self.program,
            objective=objective,
            stages=tuple(cut_stages(objective, cuts, planned.stage_placement)),
            schedule=forward_only(before.num_devices, batching.num_microbatches, before.num_chunks),
            num_microbatches=batching.num_microbatches,
        )
        agreement.agree(f"Pipeline.{name}", lambda: {"its program": program_text(objective.graph, values=True)})
        build = steps.gradient_step if name == "evaluate" else steps.prediction_step
        function = build(planned.mesh, program, batching, self._abstract_state)
        compiled = self._lower(function, shapes, batching).compile()

        def run(state: TrainState, batch: PyTree) -> PyTree:
            leaves = shard_batch.place(planned.mesh, jax.tree.leaves(batch), jax.tree.leaves(shapes), batching)
            results = self._run(name, compiled, state, leaves)
            return results[:2] if name == "evaluate" else results

        return run

    def _run(self, name: str, compiled: Compiled, state: TrainState, leaves: PyTree) -> Any:
        others = frozenset(d.process_index for d in self.planned.mesh.devices.flat) - {jax.process_index()}
        return run_together(compiled, Awaited(f"Pipeline.{name}", "its program", others), state, leaves)

    def to_host(self, state: TrainState, keep: bool = True) -> HostArrays:
        """Copy a state to the host of every process that keeps it."""
        program, placement, owners = self.program, self.planned.placement, self.planned.update.by_stage.state_stage
        parameters = self._on_hosts(program.parameters, placement.parameters, state.parameters)
        variables = self._on_hosts(program.state, placement.state, state.variables)
        optimizer = self._on_hosts(self._layouts[2][0], owners, state.optimizer)
        residuals = []
        if self.planned.update.exchange is not None:
            places, count = placement.parameters, self.planned.batching.replicas
            rows = [self._on_hosts(program.residuals, places, state.residual, r) for r in range(count)]
            residuals = [np.stack(copies) for copies in zip(*rows, strict=True)]
        if not keep:
            return HostArrays([], [], [], [])
        shared = map(on_host, state.shared)
        slots = [next(shared if owner is None else optimizer) for owner in owners]
        return HostArrays(list(parameters), list(variables), slots, residuals)

    def _on_hosts(
        self, layout: Layout, owners: Sequence[int | None], buffers: Sequence[Array], replica: int = 0
    ) -> Iterator[np.ndarray]:
        """Return the arrays that have an owner, on the host of every process, in memory of their own."""
        by_place = []
        for place in self.places:
            device = self.devices_of(place)[replica]
            shards = [shard.data for x in buffers for shard in x.addressable_shards if shard.device == device]
            rows: Any = [np.array(x).reshape(-1) for x in shards]
            if jax.process_count() > 1:
                avals = [jax.ShapeDtypeStruct((length,), dtype) for length, dtype in layout.buffers]
                rows = multihost.from_owner(device, rows, avals)
            by_place.append(iter(layout.read(place, rows)))
        return iter([next(by_place[owner]) for owner in owners if owner is not None])

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

    def bytes(self) -> Bytes:
        """Return what XLA reserves for the training step, on every device alike."""
        step, count = self.compiled_step, self.planned.mesh.devices.size
        sizes = step.memory_analysis()
        assert sizes is not None
        each = _reserved_bytes(step), sizes.temp_size_in_bytes, sizes.host_temp_size_in_bytes
        return Bytes(*((size,) * count for size in each))

    @cached_property
    def _abstract_state(self) -> TrainState:
        """The shapes of a training state, where its devices have them."""
        planned, by_stage = self.planned, self.planned.update.by_stage
        shaped = functools.partial(_shaped, planned)
        groups = (
            tuple(shaped((*(planned.mesh.shape[axis] for axis in spec), n), dtype, spec) for n, dtype in layout.buffers)
            for layout, spec in self._layouts
        )
        owned = zip(by_stage.state_avals, by_stage.state_stage, strict=True)
        shared = tuple(shaped(a.shape, a.dtype, P()) for a, owner in owned if owner is None)
        key = shaped((), jax.eval_shape(lambda: jax.random.key(0)).dtype, P())
        step = shaped((), np.int32, P())
        shapes: tuple[PyTree, ...] = *groups, shared, key, step, step
        return TrainState(*shapes, plan=planned.plan.identity)

    def _lower(self, function: Wrapped, batch: PyTree, batching: Batching) -> Lowered:
        """Return a function of a state and a batch, lowered for the plan's devices."""
        leaves = zip(jax.tree.leaves(batch), batching.specs(), strict=True)
        return function.lower(self._abstract_state, [_shaped(self.planned, x.shape, x.dtype, p) for x, p in leaves])

    @cached_property
    @progress("Compiling the training step")
    def compiled_step(self) -> Compiled:
        """The training step."""
        plan = self.planned.plan
        agreement.agree("Pipeline.step", lambda: {"the plan": plan.to_json()})
        tell(f"Compiling the training step, {bytes_text(plan.predicted_bytes)} predicted")
        step = self.lower_step().compile()
        tell(f"XLA reserves {bytes_text(_reserved_bytes(step))} on each device")
        return step

    def lower_step(self) -> Lowered:
        """Return the training step, lowered for the plan's devices."""
        planned, state = self.planned, self._abstract_state
        with building_for(planned.mesh.devices.flat[0].platform):
            function = steps.training_step(planned.mesh, self.program, planned.update, planned.batching, state)
            return self._lower(function, planned.batch, planned.batching)

    @cached_property
    @progress("Compiling the gradient")
    def _gradient_step(self) -> Compiled:
        planned = self.planned
        function = steps.gradient_step(planned.mesh, self.program, planned.batching, self._abstract_state)
        return self._lower(function, planned.batch, planned.batching).compile()

    def _placed(self, batch: PyTree) -> list[Array]:
        leaves, shapes = jax.tree.leaves(batch), jax.tree.leaves(self.planned.batch)
        return shard_batch.place(self.planned.mesh, leaves, shapes, self.planned.batching)


def _reserved_bytes(step: Compiled) -> int:
    """Return the bytes of arguments, results and temporaries of a compiled step, less what is donated."""
    sizes = step.memory_analysis()
    assert sizes is not None
    needed = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    return needed - sizes.alias_size_in_bytes


def _shaped(planned: ExecutablePlan, shape: Sequence[int], dtype: DTypeLike, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(planned.mesh, spec))
