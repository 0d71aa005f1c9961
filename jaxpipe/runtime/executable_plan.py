"""``ExecutablePlan``: a plan with all that a runtime needs to run it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.graph.codec_policy import Policy
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.models.variable_shardings import Shardings
from jaxpipe.plan import Plan
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate
from jaxpipe.runtime.program import Program
from jaxpipe.runtime.replica_exchange import StageExchange
from jaxpipe.runtime.spmd.buffer_layout import Layout
from jaxpipe.runtime.spmd.nonfinite_guard import OnNonFinite
from jaxpipe.runtime.stages import Placement, follow
from jaxpipe.schedules.schedule_makers import ScheduleMaker
from jaxpipe.sharding.mesh_axes import DATA


@dataclass(frozen=True, eq=False)
class Batching:
    """The cut of a batch into micro-batches.

    Attributes:
      shared: by leaf, whether every micro-batch gets it whole (it has no axis of examples).
      replicas: ways the batch is split over the data axis.
      num_microbatches: micro-batches of each replica.
    """

    shared: tuple[bool, ...]
    replicas: int
    num_microbatches: int

    def specs(self) -> list[P]:
        """Return how each leaf is sharded."""
        return [P() if shared or self.replicas == 1 else P(DATA) for shared in self.shared]

    def rows(self, leaves: Sequence[Any]) -> list[Any]:
        """A replica's leaves as ``[num_microbatches, ...]``."""
        m = self.num_microbatches
        return [
            jnp.broadcast_to(x, (m, *x.shape)) if shared else x.reshape(m, x.shape[0] // m, *x.shape[1:])
            for x, shared in zip(leaves, self.shared, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Update:
    """The optimizer as the stages run it, and where its state lives.

    Attributes:
      by_stage: the optimizer.
      layout: of its state.
      exchange: how replicas exchange gradients; None if whole.
      on_nonfinite: what to do about a loss or a gradient that is not finite.
    """

    by_stage: PartitionedUpdate
    layout: Layout
    exchange: StageExchange | None = None
    on_nonfinite: OnNonFinite = None


@dataclass(frozen=True, eq=False)
class Compiled:
    """A training step, and the bytes that XLA reserves for it on the fullest device."""

    step: Any
    reserved_bytes: int


@dataclass(frozen=True, eq=False, kw_only=True)
class ExecutablePlan:
    """A plan, and everything that runs it.

    Attributes:
      plan: the part that the user sees.
      mesh: the first device of each group of ``shardings``, in the order in which the stages use them.
      batch: shapes of the batch that it was made for.
      microbatch: shapes of one micro-batch.
      stage_placement, placement: the stage and the device of every variable.
      model, program, update, batching: see their types.
      policy: the codecs that may be used where a module is not decorated.
      schedules: makers of the requested schedules.
      retrace: traces the loss for the shapes of one micro-batch.
      shardings: how variables are split within a stage.
      compiled: with stage programs, the training step once it has been compiled for a budget.
      calls: with stage programs, the list of the training step (``jaxpipe.runtime.mpmd.call_list``), traced.
      traces: work of stages that was traced for plans with the same cuts; filled while lists are written.
    """

    plan: Plan
    mesh: Mesh
    batch: Any
    microbatch: Any
    model: BoundModel
    program: Program
    stage_placement: Placement
    placement: Placement
    update: Update
    batching: Batching
    policy: Policy
    schedules: tuple[ScheduleMaker, ...]
    retrace: Callable[[Any], MicrobatchProgram]
    shardings: Shardings
    compiled: Compiled | None = None
    calls: Any = None
    traces: dict[Any, Any] = field(default_factory=dict)


def followed_cuts(planned: ExecutablePlan, objective: MicrobatchProgram, name: str) -> list[int]:
    """Return the cuts of another program over the same variables, each of which stays in its stage."""
    names = [v.name for v in (*planned.model.parameters, *planned.model.state)]
    borrowed = {t for stage in planned.program.stages for t in stage.borrowed}
    lent = [k for k, t in enumerate(planned.program.objective.parameters) if t in borrowed]
    return follow(objective, planned.stage_placement, planned.program.schedule.total_stages, names, name, lent)
