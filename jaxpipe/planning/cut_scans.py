"""Scans over layers that no stage could share, cut into groups of layers.

A scan is one operator. Where it holds so much of the work that its stage would be the longest by far, its layers are
cut apart where stages of equal work begin, by estimate, and each of these parts into a few groups, which remain scans:
programs stay short, and the planner still has places to choose from when it knows more than the estimate.

    embed | scan of 48 layers | head          one stage has nearly all of the work
    embed, 0..12 | 12..25 | 25..38 | 38..48, head          the same, cut for four stages
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.array_types import PyTree
from jaxpipe.costs.profile import Profile
from jaxpipe.costs.profile_model import profile_objective
from jaxpipe.graph.split_scan import WholeStackError
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.models.microbatch_program import MicrobatchProgram, trace_loss
from jaxpipe.models.traced_update import TracedUpdate, trace_update
from jaxpipe.models.unroll_layers import Groups, groups_of, scans_over_variables, unroll
from jaxpipe.models.variable_shardings import variable_specs
from jaxpipe.planning.check_request import Request
from jaxpipe.planning.cuts.balance_chain import least_number
from jaxpipe.planning.given_cuts import layers_of
from jaxpipe.planning.given_plan import recipe_in
from jaxpipe.runtime.stages import places_to_cut


#: By what share the longest stage may be longer than with scans cut between all layers before they are cut at all.
SLACK = 0.05

#: Groups of layers in the work of one stage, as many as stages on a device by interleaved schedules.
GROUPS_PER_STAGE = 2

#: How many times as many with a budget: what storage adds is known only later.
BUDGET_GROUPS = 2


@dataclass(frozen=True, eq=False)
class TracedLayers:
    """A model traced for one micro-batch, its loss and its update; what the plan says of scans over its layers."""

    objective: MicrobatchProgram
    update: TracedUpdate
    notes: tuple[str, ...] = ()

    @property
    def model(self) -> BoundModel:
        """The model, with its scans cut."""
        return self.objective.model


def trace_layers(request: Request, model: BoundModel, microbatch: PyTree) -> TracedLayers:
    """Trace a model with its scans cut as requested; by default, where a stage would else be much longer than others.

    Raises:
      PartitionError: if scans are to be cut, by request, that cannot be.
    """
    objective = trace_loss(model, request.loss, microbatch)
    if request.plan is not None:
        groups = recipe_in(request.plan).scan_groups
        if groups:
            objective = trace_loss(unroll(objective, groups), request.loss, microbatch)
        return TracedLayers(objective, trace_update(request.optimizer, objective.model))
    given = request.profile.scan_groups if isinstance(request.profile, Profile) else None
    unrolling = given if given and request.unroll_scans == "auto" else request.unroll_scans
    if unrolling and unrolling != "auto":
        return _cut(request, unroll(objective, groups_of(objective, unrolling)), objective)
    groups, reason = _as_given(request, objective, _balanced(request, objective)), ""
    if not (groups and unrolling):
        reason = "unroll_scans=False"
    elif given is not None:
        reason = "profile= has it as one operator"
    elif request.exchange is not None and request.replicas > 1:
        reason = "block_sparse sends the best blocks of whole parameters"
    else:
        try:
            cut = unroll(objective, groups, partly=False)
            variable_specs(cut, request.submesh, request.options)  # layers may be split within a stage
            layers = _cut(request, cut, objective)
            if sum(places_to_cut(layers.objective)) >= min(sum(places_to_cut(objective)), request.num_devices + 1):
                return layers
            reason = "they share variables, each of which lives in one stage"
        except WholeStackError as error:
            reason = error.reason
    notes = tuple(f"{scan}, which are all in one stage: {reason}" for scan in _scans(objective, groups))
    return TracedLayers(objective, trace_update(request.optimizer, model), notes)


def _cut(request: Request, model: BoundModel, whole: MicrobatchProgram) -> TracedLayers:
    """Trace a model whose scans are cut, of which ``whole`` has them as they are."""
    objective, update = trace_loss(model, request.loss, whole.microbatch), trace_update(request.optimizer, model)
    notes = []
    for scan, bounds in _scans(whole, model.scan_groups).items():
        sizes = sorted({b - a for a, b in itertools.pairwise(bounds)})
        layers = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"
        notes.append(f"{scan}, cut into {len(bounds) - 1} groups of {layers}")
    return TracedLayers(objective, update, tuple(notes))


def _balanced(request: Request, objective: MicrobatchProgram) -> Groups:
    """Return where to cut the scans of a loss so that stages may take equally long; nowhere if they may as it is."""
    scans = {scan.operator: scan.length for scan in scans_over_variables(objective)}
    widths = request.devices_per_stage
    if not scans or request.num_devices == 1 or (isinstance(widths, tuple) and len(widths) == 1):
        return ()
    seconds = profile_objective(objective, "analytic", request.mesh.devices.flat[0]).seconds
    if sum(places_to_cut(objective)[1:-1]) + 1 < request.num_devices:  # too few places, whatever takes how long
        seconds = [float(k in scans) for k in range(len(seconds))]
    speeds = (1.0,) if request.network is None else request.network.speed
    per_stage = GROUPS_PER_STAGE * max(speeds) / min(speeds) * (1 if request.budget is None else BUDGET_GROUPS)
    return balanced_groups(seconds, scans, request.num_devices, math.ceil(per_stage))


def _as_given(request: Request, objective: MicrobatchProgram, groups: Groups) -> Groups:
    """Return groups of layers with those added that begin where stages are to begin by ``cuts=``."""
    firsts = {bounds[-1]: set(bounds) for bounds in groups}
    for scan in scans_over_variables(objective):
        layers = layers_of(request.cuts, objective.graph.operators[scan.operator].path)
        if inner := [k for k in layers if 0 < k < scan.length]:
            firsts.setdefault(scan.length, {0, scan.length}).update(inner)
    return tuple(tuple(sorted(firsts[length])) for length in sorted(firsts))


def balanced_groups(
    seconds: Sequence[float], scans: Mapping[int, int], num_stages: int, per_stage: int = GROUPS_PER_STAGE
) -> Groups:
    """Return where to cut scans so that the longest stage is about as long as if each layer were an operator.

    Args:
      seconds: of the operators, in their order.
      scans: the numbers of layers, by position of the operator.
      num_stages: how many stages there are.
      per_stage: into how many groups to cut the layers of a scan that are in one stage.

    Example: the fourth stage has the head, so it has fewer layers.
      >>> balanced_groups([0.0, 48.0, 1.5], {1: 48}, 4, per_stage=1)
      ((0, 13, 26, 39, 48),)
      >>> balanced_groups([5.0, 0.4, 5.0], {1: 48}, 2)
      ()
    """
    layers = [scans.get(k, 1) for k in range(len(seconds))]
    shares = [s / n for s, n in zip(seconds, layers, strict=True) for _ in range(n)]
    least, starts = _balance(shares, num_stages)
    longest, _ = _balance(seconds, num_stages)
    if longest <= (1 + SLACK) * least:
        return ()
    firsts: dict[int, set[int]] = {}
    offsets = [0, *itertools.accumulate(layers)]
    for k, length in scans.items():
        if inner := [start - offsets[k] for start in starts if offsets[k] < start < offsets[k + 1]]:
            for a, b in itertools.pairwise((0, *inner, length)):
                count = min(per_stage, b - a)
                firsts.setdefault(length, {length}).update(a + (b - a) * i // count for i in range(count))
    return tuple(tuple(sorted(firsts[length])) for length in sorted(firsts))


def _balance(seconds: Sequence[float], num_stages: int) -> tuple[float, list[int]]:
    """Return the seconds of the longest of some stages if that is as short as it can be, and where stages begin."""
    ends = np.concatenate(([0.0], np.cumsum(seconds)))

    def starts(limit: float) -> list[int]:
        first = [0]
        for _ in range(num_stages):
            first.append(int(np.searchsorted(ends, ends[first[-1]] + limit, "right")) - 1)
        return first

    total = float(ends[-1])
    least = least_number(total / num_stages, total, lambda x: starts(x)[-1] == len(seconds)) * (1 + 1e-9)
    return least, [first for first in starts(least)[1:-1] if first < len(seconds)]


def _scans(objective: MicrobatchProgram, groups: Groups) -> dict[str, tuple[int, ...]]:
    """Return the beginning of a sentence on each scan that is cut into some groups, and these."""
    operators, by_length = objective.graph.operators, {bounds[-1]: bounds for bounds in groups}
    return {
        f"{operators[scan.operator].path or 'the loss'} is a scan of {scan.length} layers": by_length[scan.length]
        for scan in scans_over_variables(objective)
        if scan.length in by_length
    }
