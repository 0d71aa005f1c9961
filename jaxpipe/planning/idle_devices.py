"""Devices that a plan leaves without work."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpipe.costs.sharded_profile import groups_of
from jaxpipe.errors import JaxpipeError
from jaxpipe.plan import idle_stages
from jaxpipe.planning.candidate import Candidate
from jaxpipe.planning.list_candidates import leanest, list_candidates
from jaxpipe.sharding.mesh_axes import STAGE
from jaxpipe.sharding.submesh import Submesh
from jaxpipe.text.short_names import number_ranges


def on_fewer_devices(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates for the devices that have work in the best of some others; none if all have, or must stay.

    A stage of operators in no module and without parameters, of the loss as a rule, may have some work: a plan without
    its device has to show that it is worth nothing.

    Every process has to take part in a pipeline, so several processes keep their devices.
    """
    best = leanest(candidates)
    traced, plan, count = best.traced, best.described.plan, best.program.num_devices
    named = any(stage.modules for stage in plan.stages)
    loose = {s for s, stage in enumerate(plan.stages) if named and not stage.parameter_bytes and not stage.modules}
    busy = sorted({s % count for s in range(len(plan.stages)) if s not in loose.union(idle_stages(plan.stages))})
    if len(busy) in (0, count) or not plan.stage_replicas.is_single or jax.process_count() > 1:
        return []
    request, given = traced.request, best.mesh
    mesh = Mesh(
        np.take(given.devices, busy, given.axis_names.index(STAGE)), given.axis_names, axis_types=given.axis_types
    )
    links = groups_of(traced.links, request.mesh, mesh, Submesh())[0]
    network = None if request.network is None else groups_of(request.network, request.mesh, mesh, Submesh())[0]
    used, every = ({d.id for x in m.devices.flat for d in request.submesh.group(x)} for m in (mesh, given))
    note = (
        f"devices {number_ranges(every - used)} of {len(every)} are left out: there is no work for them, and a step "
        "takes no longer without them"
    )
    notes = tuple(dict.fromkeys((note, *plan.notes)))
    request = replace(request, mesh=mesh, network=network)
    with contextlib.suppress(JaxpipeError):  # a schedule for more stages
        return list_candidates(replace(traced, request=request, links=links, notes=notes))
    return []
