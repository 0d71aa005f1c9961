"""One compiled program for all devices, which walk through a schedule in step (``jaxpipe.runtime.spmd.tick_loop``)."""

# More than 15 of our modules: the parts of this room are put together here.
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled, Lowered, Wrapped

from jaxpipe import agreement, multihost
from jaxpipe.array_types import Array, Device, PyTree, Shaped
from jaxpipe.costs.reserved_bytes import reserved_bytes
from jaxpipe.errors import PartitionError
from jaxpipe.graph.program_text import program_text
from jaxpipe.models import check_batch
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.runtime import check_state, shard_batch
from jaxpipe.runtime.executable_plan import Batching, ExecutablePlan, followed_cuts
from jaxpipe.runtime.interface import Bytes, ForwardPass, Gradients, Part, StepResults
from jaxpipe.runtime.spmd.buffer_layout import Layout
from jaxpipe.runtime.spmd.compiled_step import gradient_step, prediction_step, training_step
from jaxpipe.runtime.spmd.lockstep_program import LockstepProgram
from jaxpipe.runtime.stages import cut_stages
from jaxpipe.runtime.state_arrays import CommonArrays, HostArrays, StageArrays, on_host
from jaxpipe.runtime.train_state import TrainState, made_for
from jaxpipe.runtime.waiting_thread import Awaited, run_together
from jaxpipe.schedules.gpipe import forward_only
from jaxpipe.sharding.mesh_axes import DATA, STAGE, stage_devices
from jaxpipe.targets.building import building_for
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
    def _layouts(self) -> dict[str, tuple[Layout, P]]:
        """The layout of each part of a state, and where its buffers are: one after the other, each on its device."""
        program, update = self.program, self.planned.update
        layouts = {
            "parameters": (program.parameters, P(STAGE)),
            "variables": (program.variables, P(STAGE)),
            "optimizer": (program.optimizer(update), P(STAGE)),
        }
        return layouts if update.exchange is None else {**layouts, "residual": (program.residuals, P((STAGE, DATA)))}

    @cached_property
    def _abstract_state(self) -> TrainState:
        """The shapes of a training state, where its devices have them."""
        by_stage, groups = self.planned.update.by_stage, dict[str, PyTree](residual=())
        for field, (layout, spec) in self._layouts.items():
            count = math.prod(self.planned.mesh.shape[axis] for axis in np.ravel(spec[0]))
            groups[field] = tuple(self._shaped((count * x.size,), x, spec) for x in layout.buffers)
        owned = zip(by_stage.state_avals, by_stage.state_stage, strict=True)
        groups["shared"] = tuple(self._shaped(a.shape, a, P()) for a, owner in owned if owner is None)
        key, step = jax.eval_shape(lambda: (jax.random.key(0), jnp.int32(0)))
        groups |= {"key": self._shaped((), key, P()), "step": self._shaped((), step, P())}
        return TrainState(**groups, skipped=groups["step"], plan=self.planned.plan.identity)

    def _shaped(self, shape: Sequence[int], x: Shaped, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype, sharding=NamedSharding(self.planned.mesh, spec))

    def stage_part(self, place: int, arrays: StageArrays) -> Part:
        """Return the buffers of a place's devices, on these."""
        count = 0 if self.planned.update.exchange is None else self.planned.batching.replicas
        avals = self.program.residuals.avals[place] if count else []
        left = arrays.residuals or [np.zeros((count, *a.shape), a.dtype) for a in avals]
        part = {}
        for r, device in enumerate(self.devices_of(place)):
            if device.process_index == jax.process_index():
                groups = (arrays.parameters, arrays.variables, arrays.optimizer, [x[r] for x in left])
                rows = (
                    layout.write(place, list(map(np.asarray, values)), np)
                    for (layout, _), values in zip(self._layouts.values(), groups, strict=False)
                )
                part[device] = [jax.device_put(row, device) for row in rows]
        return part

    def assemble(self, parts: Mapping[int, Part], common: CommonArrays) -> TrainState:
        """Return the state of the parts of this process's places."""
        abstract, held = self._abstract_state, [buffers for part in parts.values() for buffers in part.values()]
        groups = {
            field: tuple(
                jax.make_array_from_single_device_arrays(aval.shape, aval.sharding, [x[k][n] for x in held])
                for n, aval in enumerate(getattr(abstract, field))
            )
            for k, field in enumerate(self._layouts)
        }
        everywhere = functools.partial(multihost.place, sharding=NamedSharding(self.planned.mesh, P()))
        state = dataclasses.replace(
            abstract,
            **groups,
            shared=tuple(map(everywhere, common.shared)),
            key=everywhere(common.key),
            step=everywhere(jnp.int32(common.step)),
            skipped=everywhere(jnp.int32(common.skipped)),
        )
        return made_for(self._token, state)

    def to_host(self, state: TrainState, keep: bool = True) -> HostArrays:
        """Copy a state to the host of every process that keeps it."""
        placement, owners = self.planned.placement, self.planned.update.by_stage.state_stage
        parameters = self._on_hosts(self.program.parameters, placement.parameters, state.parameters)
        variables = self._on_hosts(self.program.variables, placement.state, state.variables)
        optimizer = self._on_hosts(self._layouts["optimizer"][0], owners, state.optimizer)
        replicas = range(0 if self.planned.update.exchange is None else self.planned.batching.replicas)
        rows = [self._on_hosts(self.program.residuals, placement.parameters, state.residual, r) for r in replicas]
        if not keep:
            return HostArrays([], [], [], [])
        shared = map(on_host, state.shared)
        slots = [next(shared if owner is None else optimizer) for owner in owners]
        return HostArrays(list(parameters), list(variables), slots, [np.stack(x) for x in zip(*rows, strict=True)])

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
                rows = multihost.from_owner(device, rows, layout.buffers)
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

    def check_batch(self, shapes: PyTree) -> None:
        """Raise ``BatchError`` if a batch has other shapes than were planned for."""
        check_batch.check_same_structure(shapes, self.planned.batch)

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
        objective, placement = self.program.objective, self.planned.placement
        pairs = zip(objective.parameters, placement.parameters, strict=True)
        owners = [None if t in objective.frozen else owner for t, owner in pairs]
        held = self._on_hosts(self.program.gradients, owners, buffers)
        return loss, metrics, [None if owner is None else next(held) for owner in owners]

    @progress("Compiling the forward pass")
    def forward(self, name: str, objective: MicrobatchProgram, shapes: PyTree, batching: Batching) -> ForwardPass:
        """Compile a function of state and batch: loss and metrics of ``"evaluate"``, leaves of ``"predict"``."""
        before = self.program.schedule
        objective, cuts = followed_cuts(self.planned, objective, name)
        program = dataclasses.replace(
            self.program,
            objective=objective,
            stages=tuple(cut_stages(objective, cuts, self.planned.stage_placement)),
            schedule=forward_only(before.num_devices, batching.num_microbatches, before.num_chunks),
            num_microbatches=batching.num_microbatches,
        )
        agreement.agree(f"Pipeline.{name}", lambda: {"its program": program_text(objective.graph, values=True)})
        build = gradient_step if name == "evaluate" else prediction_step
        compiled = self._lower(build, program, shapes, batching).compile()

        def run(state: TrainState, batch: PyTree) -> PyTree:
            results = self._run(name, compiled, state, batch, shapes, batching)
            return results[:2] if name == "evaluate" else results

        return run

    def _run(
        self, name: str, compiled: Compiled, state: TrainState, batch: PyTree, shapes: PyTree, batching: Batching
    ) -> Any:
        leaves = shard_batch.place(self.planned.mesh, jax.tree.leaves(batch), jax.tree.leaves(shapes), batching)
        others = frozenset(d.process_index for d in self.planned.mesh.devices.flat) - {jax.process_index()}
        return run_together(compiled, Awaited(f"Pipeline.{name}", "its program", others), state, leaves)

    def bytes(self) -> Bytes:
        """Return what XLA reserves for the training step, on every device alike."""
        step, count = self.compiled_step, self.planned.mesh.devices.size
        sizes = step.memory_analysis()
        assert sizes is not None
        each = reserved_bytes(step), sizes.temp_size_in_bytes, sizes.host_temp_size_in_bytes
        return Bytes(*((size,) * count for size in each))

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
        build = functools.partial(training_step, update=self.planned.update)
        with building_for(self.planned.mesh.devices.flat[0]):
            return self._lower(build, self.program, self.planned.batch, self.planned.batching)

    @cached_property
    @progress("Compiling the gradient")
    def _gradient_step(self) -> Compiled:
        return self._lower(gradient_step, self.program, self.planned.batch, self.planned.batching).compile()

    def _lower(
        self, build: Callable[..., Wrapped], program: LockstepProgram, batch: PyTree, batching: Batching
    ) -> Lowered:
        """Return a function of a state and a batch, lowered for the plan's devices."""
        function = build(self.planned.mesh, program, batching, self._abstract_state)
        leaves = zip(jax.tree.leaves(batch), batching.specs(), strict=True)
        return function.lower(self._abstract_state, [self._shaped(x.shape, x, spec) for x, spec in leaves])
