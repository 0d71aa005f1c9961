"""Plans that callers give to be run as they are, checked against what else they give."""

import json
from collections.abc import Mapping

import numpy as np
from jax.sharding import Mesh

from jaxpipe import _compat
from jaxpipe._version import __version__
from jaxpipe.costs.profile import Profile
from jaxpipe.errors import PartitionError
from jaxpipe.graph.graph import Graph
from jaxpipe.plan import Plan
from jaxpipe.recipe import Recipe
from jaxpipe.targets.known import target_of


def made_with(mesh: Mesh) -> str:
    """Return the versions and the kind of device, on which compiled programs depend besides their text."""
    jax_version, jaxlib_version = _compat.versions()
    kind = mesh.devices.flat[0].device_kind
    return f"jax {jax_version}, jaxlib {jaxlib_version}, jaxpipe {__version__}, for {kind}"


def read_plan(plan: object) -> Plan | None:
    """Return the plan of ``plan=``: a ``Plan``, or its JSON as text or as ``json.loads`` has read it."""
    if plan is None:
        return None
    if isinstance(plan, str | Mapping):
        plan = Plan.from_json(plan if isinstance(plan, str) else json.dumps(plan))
    if not isinstance(plan, Plan):
        raise PartitionError(
            f"plan= is {type(plan).__name__}; pass a jaxpipe.Plan (pipeline.plan), or the text or the dictionary of "
            "its JSON."
        )
    if plan.recipe is None:
        raise PartitionError(
            "plan= has no recipe: it was written by an earlier version, without the schedule's table and the storage "
            "of each tensor. Plan once more, and save pipeline.plan.to_json()."
        )
    return plan


def recipe_in(plan: Plan) -> Recipe:
    """Return the recipe of a plan that ``read_plan`` has returned."""
    assert plan.recipe is not None
    return plan.recipe


def check_same(name: str, planned: object, given: object) -> None:
    """Raise ``PartitionError`` if something of a name is not in a plan as it was given."""
    if planned != given:
        raise PartitionError(
            f"plan= and {name} differ: the plan says {planned}, given is {given}. A plan is run as it is, for the "
            "model, the mesh and the shapes that it was made for; leave out plan= to plan again."
        )


def check_all_same(planned: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Raise ``PartitionError`` with the first name that a plan and what was given do not have in common."""
    for name in (*planned, *given):
        check_same(name, planned.get(name, "nothing"), given.get(name, "nothing"))


def plan_profile(plan: Plan, graph: Graph, mesh: Mesh) -> Profile:
    """Return a profile with the seconds of a plan's stages, spread evenly over their operators."""
    forward, backward, nothing = np.zeros((3, len(graph.operators)))
    for stage in plan.stages:
        first, last = stage.operators
        forward[first:last] = stage.forward_seconds / max(1, last - first)
        backward[first:last] = stage.backward_seconds / max(1, last - first)
    return Profile(
        tuple(f"{op.path} {op.label}".strip() for op in graph.operators),
        *map(tuple, (forward, backward, nothing, nothing)),
        source=plan.profile,
        device_kind=mesh.devices.flat[0].device_kind,
        rates=target_of(mesh.devices.flat[0]).rates,
    )
