"""``Planned``: a plan with everything that runs it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Mesh

from jaxpipe.costs.profile import Profile
from jaxpipe.graph.codec_policy import Policy
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.models.microbatch_program import Objective
from jaxpipe.models.variable_shardings import Shardings
from jaxpipe.pipeline.program import Program
from jaxpipe.pipeline.sections import Placement
from jaxpipe.pipeline.step import Batching, Update
from jaxpipe.planning.placed import Partition
from jaxpipe.planning.plan import Plan
from jaxpipe.schedules.candidates import ScheduleMaker


@dataclass(frozen=True, eq=False)
class Compiled:
    """A training step, and the bytes that XLA reserves for it on the fullest device."""

    step: Any
    reserved_bytes: int


@dataclass(frozen=True, eq=False)
class Budget:
    """Other plans, for a plan that must keep a budget.

    Attributes:
      refit: makes the plan for another number of predicted bytes with the same cuts; the smallest with these cuts, if
        that needs more.
      smallest: makes the smallest plan, whatever its cuts and schedule; it is the same for every budget.
      default: predicted bytes of the fastest plan with default storage, by component.
      may_raise: whether the budget may be raised if no plan keeps it.
    """

    refit: Callable[[int], "Planned"]
    smallest: Callable[[], "Planned"]
    default: dict[str, int]
    may_raise: bool


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan, and everything that runs it.

    Attributes:
      plan: what the user sees.
      profile: what its seconds were summed from.
      partition: the cuts and devices in it, with all that they were chosen from.
      mesh: the first device of each group of ``shardings``, in the order in which the stages use them.
      batch: shapes of the batch that it was made for.
      microbatch: shapes of one micro-batch.
      stages, placement: the stage and the device of every variable.
      model, program, update, batching: see their types.
      policy: the codecs that may be used where a module is not decorated.
      schedules: makers of the schedules that were asked for.
      retrace: traces the loss for the shapes of one micro-batch.
      shardings: how variables are split within a stage.
      budget: what else could be planned; None if there is no budget.
      compiled: with stage programs, the training step once it has been compiled for a budget.
      calls: with stage programs, the list of the training step (``jaxpipe.runtime.mpmd.calls``), traced.
      shardings: how variables are split within a stage.
      traces: work of stages that was traced for plans with the same cuts; filled while lists are written.
    """

    plan: Plan
    profile: Profile
    partition: Partition
    mesh: Mesh
    batch: Any
    microbatch: Any
    model: BoundModel
    program: Program
    stages: Placement
    placement: Placement
    update: Update
    batching: Batching
    policy: Policy
    schedules: tuple[ScheduleMaker, ...]
    retrace: Callable[[Any], Objective]
    shardings: Shardings
    budget: Budget | None = None
    compiled: Compiled | None = None
    calls: Any = None
    traces: dict[Any, Any] = field(default_factory=dict)
