"""Devices that a plan leaves without work."""

from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpipe.costs.sharded_profile import groups_of
from jaxpipe.plan import idle_stages
from jaxpipe.planning.check_request import Request
from jaxpipe.planning.planned_step import PlannedStep
from jaxpipe.sharding.mesh_axes import STAGE
from jaxpipe.sharding.submesh import Submesh
from jaxpipe.text.short_names import number_ranges


def without_idle(request: Request, planned: PlannedStep) -> Request | None:
    """Return a request for the devices that have work in a plan; None if all have, or if the plan must stay on all.

    A stage of operators in no module and without parameters, of the loss as a rule, may have some work: a plan without
    its device has to show that it is worth nothing.

    Every process has to take part in a pipeline, so several processes keep their devices.
    """
    stages, count = planned.plan.stages, planned.program.num_devices
    named = any(stage.modules for stage in stages)
    loose = {s for s, stage in enumerate(stages) if named and not stage.parameter_bytes and not stage.modules}
    busy = sorted({s % count for s in range(len(stages)) if s not in loose.union(idle_stages(stages))})
    given_links = request.network is not None and request.submesh.size > 1
    if len(busy) in (0, count) or not planned.plan.stage_replicas.is_single or given_links or jax.process_count() > 1:
        return None
    given = planned.mesh
    devices = np.take(given.devices, busy, given.axis_names.index(STAGE))
    mesh = Mesh(devices, given.axis_names, axis_types=given.axis_types)
    links = None if request.network is None else groups_of(request.network, request.mesh, mesh, Submesh())[0]
    number = planned.plan.num_microbatches
    return replace(request, mesh=mesh, network=links, num_stages=len(busy), num_microbatches=number)


def noted(fewer: PlannedStep, planned: PlannedStep) -> PlannedStep:
    """Return a plan that says which devices it leaves out of those of another, and what that had to say."""
    used, every = ({d for stage in plan.plan.stages for d in stage.device_ids} for plan in (fewer, planned))
    note = (
        f"devices {number_ranges(every - used)} of {len(every)} are left out: there is no work for them, and a step "
        "takes no longer without them"
    )
    notes = dict.fromkeys((note, *fewer.plan.notes, *planned.plan.notes))
    return replace(fewer, plan=replace(fewer.plan, notes=tuple(notes)))
