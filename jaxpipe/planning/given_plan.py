"""Plans that callers give to be run as they are, checked against what else they give."""

import itertools
import json
from collections.abc import Mapping

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


def check_same(planned: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Raise ``PartitionError`` with the name of the first thing in which a plan and what was given differ."""
    for name, value in planned.items():
        if given.get(name) != value:
            raise PartitionError(
                f"plan= and {name} differ: the plan says {value}, given is {given.get(name, 'nothing')}. A plan is run "
                "as it is, for the model, the mesh and the shapes that it was made for; leave out plan= to plan again."
            )
    more = [name for name in given if name not in planned]
    if more:
        raise PartitionError(f"plan= and {more[0]} differ: the plan says nothing, given is {given[more[0]]}.")


def plan_profile(plan: Plan, graph: Graph, mesh: Mesh) -> Profile:
    """Return a profile with the seconds of a plan's stages, spread evenly over their operators."""
    count = len(graph.operators)
    seconds = [[0.0] * count, [0.0] * count]
    for stage, which in itertools.product(plan.stages, (0, 1)):
        here = range(*stage.operators)[:count]
        for k in here:
            seconds[which][k] = (stage.forward_seconds, stage.backward_seconds)[which] / len(here)
    return Profile(
        tuple(f"{op.path} {op.label}".strip() for op in graph.operators),
        *map(tuple, seconds),
        parameter_bytes=(0.0,) * count,
        residual_bytes=(0.0,) * count,
        source=plan.profile,
        device_kind=mesh.devices.flat[0].device_kind,
        rates=target_of(mesh.devices.flat[0]).rates,
    )
