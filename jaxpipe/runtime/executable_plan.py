"""``ExecutablePlan``: a plan with all that a runtime needs to run it; and the results of that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import Array, ArrayLike, PyTree
from jaxpipe.graph.allowed_codecs import Policy
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.models.variable_shardings import Shardings
from jaxpipe.plan import Plan
from jaxpipe.runtime.mpmd.dispatch import Dispatch
from jaxpipe.runtime.mpmd.step_graph import StepGraph, Traces
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate
from jaxpipe.runtime.replica_exchange import StageExchange, StageOuterLoop
from jaxpipe.runtime.stages import Placement, Program
from jaxpipe.runtime.train_state import TrainState
from jaxpipe.schedules.schedule_makers import ScheduleMaker
from jaxpipe.sharding.mesh_axes import DATA, joined_mesh


#: What to do about a step with a value that is not finite: nothing, raise ``NonFiniteError``, or leave the step out.
OnNonFinite = Literal["raise", "skip"] | None


@dataclass(frozen=True, eq=False)
class Batching:
    """The cut of a batch into micro-batches."""

    shared: tuple[bool, ...]  # by leaf: every micro-batch gets it whole, as it has no axis of examples
    replicas: int
    num_microbatches: int  # of each replica

    def specs(self) -> list[P]:
        """Return how each leaf is sharded."""
        return [P() if shared or self.replicas == 1 else P(DATA) for shared in self.shared]

    def rows(self, leaves: Sequence[Array]) -> list[Array]:
        """A replica's leaves as ``[num_microbatches, ...]``."""
        m = self.num_microbatches
        return [
            jnp.broadcast_to(x, (m, *x.shape)) if shared else x.reshape(m, x.shape[0] // m, *x.shape[1:])
            for x, shared in zip(leaves, self.shared, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Update:
    """The optimizer as the stages run it, and what is done around it."""

    by_stage: PartitionedUpdate
    exchange: StageExchange | None = None  # None: gradients are exchanged whole
    on_nonfinite: OnNonFinite = None
    outer: StageOuterLoop | None = None  # replicas have parameters of their own


@dataclass(frozen=True, eq=False, kw_only=True)
class ExecutablePlan:
    """A plan, and everything that runs it."""

    plan: Plan  # the part that the user sees
    mesh: Mesh  # the first device of each group of ``shardings``, in the order of the stages
    batch: PyTree  # shapes
    program: Program
    update: Update
    batching: Batching
    policy: Policy  # codecs where a module is not decorated
    schedules: tuple[ScheduleMaker, ...]
    shardings: Shardings  # of variables within a stage
    compiled: Dispatch | None = None  # of stage programs, the training step that was compiled while planning
    graph: StepGraph | None = None  # of stage programs, the training step
    traces: Traces = field(default_factory=dict)  # of plans with the same cuts; filled while graphs are written

    @property
    def model(self) -> BoundModel:
        """The model, as it is cut for the stages."""
        return self.program.objective.model

    @property
    def placement(self) -> Placement[int]:
        """The place of each variable, as the runtime has them: its stage, or its device."""
        return self.program.placement if self.plan.runtime == "mpmd" else self.program.on_devices

    @property
    def all_devices(self) -> Mesh:
        """The devices of all groups, in the order of the stages."""
        return joined_mesh(self.mesh, self.shardings.submesh)

    @property
    def everywhere(self) -> dict[str, PyTree]:
        """The shapes of what all devices have of a training state, by field."""
        by_stage = self.update.by_stage
        objective, step = self.program.objective, jax.ShapeDtypeStruct((), jnp.int32)
        shared = tuple(by_stage.state_avals[k] for k in by_stage.leaves_of(None))
        key = objective.graph.tensors[objective.key].aval
        groups = {"shared": shared, "key": key, "step": step, "skipped": step}
        sharding = NamedSharding(self.all_devices, P())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), groups)


@dataclass(frozen=True, eq=False)
class StepResults:
    """A training step's results."""

    state: TrainState
    loss: Array
    counters: dict[str, Array]  # such as ``gradient_norm``; under a guard ``nonfinite_stages`` and ``stopped``
    metrics: Sequence[Array]  # leaves of the user's


#: Bytes on each device, in the order of the mesh: all that is reserved in a step, the temporaries, the host's.
Bytes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

#: Loss, metrics, and the mean gradient of each trained parameter on the host; None of others.
Gradients: TypeAlias = tuple[Array, Sequence[Array], Sequence[ArrayLike | None]]

#: State and batch to loss and metrics, or to leaves of a prediction.
ForwardPass: TypeAlias = Callable[[TrainState, PyTree], PyTree]
