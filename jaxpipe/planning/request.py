"""The checked arguments of ``partition``."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import optax
from jax.sharding import Mesh

from jaxpipe.costs.network import Network
from jaxpipe.costs.profile import Profile
from jaxpipe.costs.profile_model import Source
from jaxpipe.gradients.block_sparse import BlockSparse
from jaxpipe.graph.codec_policy import Policy
from jaxpipe.models.bound_model import UserFunction
from jaxpipe.options import PlanOptions
from jaxpipe.plan import HostPlan
from jaxpipe.schedules.schedule_makers import ScheduleMaker
from jaxpipe.sharding.submesh import Submesh


@dataclass(frozen=True, eq=False)
class Request:
    """The checked arguments of ``partition``; of several ``schedules``, the fastest is wanted.

    ``mesh`` has the axes ``stage`` and perhaps ``data``, and the first device of each group of ``submesh``.
    ``num_stages`` is what the mesh has along its stage axis. ``devices_per_stage`` is how many of these devices each
    stage has, or whether that may be chosen. ``host`` is what becomes of ``PlanOptions.host_memory``.
    ``several_sizes``: batches of several sizes are listed.
    """

    model: Any
    mesh: Mesh
    loss: UserFunction
    optimizer: optax.GradientTransformation
    budget: int | None
    num_microbatches: int | None
    schedules: tuple[ScheduleMaker, ...]
    profile: Source | Profile
    network: Network | None
    policy: Policy
    exchange: BlockSparse | None
    unroll_scans: int
    num_stages: int
    replicas: int
    devices_per_stage: bool | tuple[int, ...]
    host: HostPlan | None = None
    gradient_dtype: np.dtype[Any] | None = None
    runtime: Literal["auto", "mpmd", "spmd"] = "auto"
    several_sizes: bool = False
    submesh: Submesh = field(default_factory=Submesh)
    options: PlanOptions = field(default_factory=PlanOptions)
