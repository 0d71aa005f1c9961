"""One compiled program for all devices, which walk through a schedule in step (``jaxpipe.runtime.spmd.tick_loop``)."""

# More than 15 of our modules: the parts of this room are put together here.
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
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
from jaxpipe.runtime.spmd.gather_to_host import stage_arrays
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
        self._token = object()

    @property
    def places(self) -> range:
        """Numbers of the devices along the stage axis."""
        return range(self.planned.program.num_devices)

    def devices_of(self, place: int) -> list[Device]:
        """The devices of a place, one for each replica."""
        return stage_devices(self.planned.mesh, self.planned.program.stage_replicas, place)

    def stage_part(self, place: int, arrays: StageArrays) -> Part:
        """Put a place's arrays into rows of the buffers of its devices, by group of buffers, buffer and device."""
        program, update = self.planned.program, self.planned.update
        layouts = program.parameters, program.state, update.layout
        held = arrays.parameters, arrays.variables, arrays.optimizer
        every = self.devices_of(place)
        devices = multihost.mine(every)
        packed = [layout.pack(place, list(map(np.asarray, x))) for layout, x in zip(layouts, held, strict=True)]
        rows = [[[jax.device_put(x[None], d) for d in devices] for x in group] for group in packed]
        if update.exchange is None:
            return [*rows, []]
        layout = update.exchange.residuals
        zeros = [np.zeros((len(every), *aval.shape), aval.dtype) for aval in layout.avals[place]]
        residuals = [np.asarray(x) for x in arrays.residuals] or zeros
        packed = [layout.pack(place, [x[every.index(d)] for x in residuals]) for d in devices]
        columns = zip(*packed, strict=True)
        return [*rows, [[jax.device_put(x[None, None], d) for x, d in zip(c, devices, strict=True)] for c in columns]]

    def assemble(self, parts: Mapping[int, Part], common: CommonArrays) -> TrainState:
        """Return the state of the parts of this process's places."""
        mesh, ordered = self.planned.mesh, [parts[place] for place in sorted(parts)]
        specs = P(STAGE), P(STAGE), P(STAGE), P(STAGE, DATA)
        groups = [_assemble(mesh, spec, [part[k] for part in ordered]) for k, spec in enumerate(specs)]
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
        program, placement = self.planned.program, self.planned.placement
        trained = [t not in program.objective.frozen for t in program.objective.parameters]
        owners = [owner if kept else None for owner, kept in zip(placement.parameters, trained, strict=True)]
        gradients = stage_arrays(self.planned.mesh, program.gradients, owners, buffers, itertools.repeat(None))
        return loss, metrics, gradients

    @progress("Compiling the forward pass")
    def forward(self, name: str, objective: MicrobatchProgram, shapes: PyTree, batching: Batching) -> ForwardPass:
        """Compile a function of state and batch: loss and metrics of ``"evaluate"``, leaves of ``"predict"``."""
        planned = self.planned
        before = planned.program.schedule
        objective, cuts = followed_cuts(planned, objective, name)
        program = dataclasses.replace(
            planned.program,
            objective=objective,
            stages=tuple(cut_stages(objective, cuts, planned.stage_placement)),
            schedule=forward_only(before.num_devices, batching.num_microbatches, before.num_chunks),
            num_microbatches=batching.num_microbatches,
        )
        agreement.agree(f"Pipeline.{name}", lambda: {"its program": program_text(objective.graph, values=True)})
        build = steps.gradient_step if name == "evaluate" else steps.prediction_step
        function = build(planned.mesh, program, batching, self._abstract_state)
        compiled = lower(planned, function, shapes, batching).compile()

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
        program, placement, update = self.planned.program, self.planned.placement, self.planned.update
        gather = functools.partial(stage_arrays, self.planned.mesh, keep=keep)
        residuals = []
        if update.exchange is not None:
            layout = update.exchange.residuals
            residuals = gather(layout, owners=placement.parameters, buffers=state.residual)
        return HostArrays(
            gather(program.parameters, owners=placement.parameters, buffers=state.parameters),
            gather(program.state, owners=placement.state, buffers=state.variables),
            gather(
                update.layout,
                owners=update.by_stage.state_stage,
                buffers=state.optimizer,
                shared=map(on_host, state.shared),
            ),
            residuals,
        )

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
        return abstract_state(self.planned)

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
            function = steps.training_step(planned.mesh, planned.program, planned.update, planned.batching, state)
            return lower(planned, function, planned.batch, planned.batching)

    @cached_property
    @progress("Compiling the gradient")
    def _gradient_step(self) -> Compiled:
        planned = self.planned
        function = steps.gradient_step(planned.mesh, planned.program, planned.batching, self._abstract_state)
        return lower(planned, function, planned.batch, planned.batching).compile()

    def _placed(self, batch: PyTree) -> list[Array]:
        leaves, shapes = jax.tree.leaves(batch), jax.tree.leaves(self.planned.batch)
        return shard_batch.place(self.planned.mesh, leaves, shapes, self.planned.batching)


def abstract_state(planned: ExecutablePlan) -> TrainState:
    """Return the shapes of a plan's training state, where its devices have them."""
    count = planned.mesh.shape[STAGE]
    layouts = planned.program.parameters, planned.program.state, planned.update.layout
    shaped = functools.partial(_shaped, planned)
    parameters, variables, optimizer = (
        tuple(shaped((count, length), dtype, P(STAGE)) for length, dtype in layout.buffers) for layout in layouts
    )
    exchange = planned.update.exchange
    held = () if exchange is None else exchange.residuals.buffers
    replicas = planned.batching.replicas
    residual = tuple(shaped((count, replicas, n), dtype, P(STAGE, DATA)) for n, dtype in held)
    key = jax.eval_shape(lambda: jax.random.key(0))
    by_stage = planned.update.by_stage
    owned = zip(by_stage.state_avals, by_stage.state_stage, strict=True)
    shared = tuple(shaped(a.shape, a.dtype, P()) for a, owner in owned if owner is None)
    step = shaped((), np.int32, P())
    key = shaped((), key.dtype, P())
    shapes: tuple[PyTree, ...] = parameters, variables, optimizer, residual, shared, key, step, step
    return TrainState(*shapes, plan=planned.plan.identity)


def lower(planned: ExecutablePlan, function: Wrapped, batch: PyTree, batching: Batching) -> Lowered:
    """Return a function of a plan's state and a batch, lowered for the plan's devices."""
    leaves = [
        _shaped(planned, x.shape, x.dtype, spec)
        for x, spec in zip(jax.tree.leaves(batch), batching.specs(), strict=True)
    ]
    return function.lower(abstract_state(planned), leaves)


def _reserved_bytes(step: Compiled) -> int:
    """Return the bytes of arguments, results and temporaries of a compiled step, less what is donated."""
    sizes = step.memory_analysis()
    assert sizes is not None
    needed = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    return needed - sizes.alias_size_in_bytes


def _shaped(planned: ExecutablePlan, shape: Sequence[int], dtype: DTypeLike, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(planned.mesh, spec))


def _assemble(mesh: Mesh, spec: P, parts: Sequence[Sequence[Sequence[Array]]]) -> tuple[Array, ...]:
    """Global buffers from the rows that this process's devices hold, by place and buffer."""
    buffers = list(zip(*parts, strict=True))
    if not buffers:  # residuals, in a mesh without their axis
        return ()
    sharding = NamedSharding(mesh, spec)
    whole = [mesh.shape.get(axis, 1) for axis in spec]
    return tuple(
        jax.make_array_from_single_device_arrays(
            (*whole, rows[0][0].shape[-1]), sharding, [x for copies in rows for x in copies]
        )
        for rows in buffers
    )
