"""Description of a program for its plan: seconds, bytes, and devices."""

# More than 15 of our modules: a plan tells something of every part of a pipeline.
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxpipe.array_types import TensorNumber
from jaxpipe.costs import roofline
from jaxpipe.costs.device_rates import Rates, known_rates
from jaxpipe.costs.profile import Profile
from jaxpipe.graph.op_cost import weight
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.plan import FrozenPlan, Plan, StagePlan, StashPiece
from jaxpipe.planning.check_request import Request
from jaxpipe.planning.cuts.cost_models import DeviceGroup, Synchronous
from jaxpipe.planning.cuts.placed_stages import Partition, plan_bound, stage_speeds
from jaxpipe.planning.dispatch_timeline import Dispatching, SearchArguments, dispatched_timeline, search_arguments
from jaxpipe.planning.storage.choose_swaps import Links
from jaxpipe.planning.storage.stage_budget import Fitted
from jaxpipe.residuals.stored_formats import Format, SavedFormat, stored_bytes
from jaxpipe.runtime.gradient_precision import sum_dtype
from jaxpipe.runtime.program import PAGE, Program
from jaxpipe.runtime.spmd.stage_branches import touched
from jaxpipe.runtime.stages import Stage
from jaxpipe.runtime.uint32_words import word_count
from jaxpipe.schedules import Kind, Schedule, Timeline, makespan_bound, simulate
from jaxpipe.schedules.replicas import StageReplicas
from jaxpipe.schedules.swap_points import HOST, swap_points


@dataclass(frozen=True)
class StageSeconds:
    """The work of a stage on one micro-batch, on a device of the profiled kind; ``weight`` only if it waits."""

    forward: float
    backward: float
    weight: float


def rates_in(profile: Profile) -> Rates:
    """The rates of the device that a profile describes."""
    assert profile.rates is not None
    return profile.rates


def stage_seconds(
    program: Program,
    partition: Partition,
    added: Sequence[float] | None = None,
    own_sums: bool = False,
    splits: bool | None = None,
) -> list[StageSeconds]:
    """Seconds of every stage, with what storage has ``added``.

    ``splits``: the backward work comes in two parts. With ``own_sums``, backward work adds a stage's gradients to their
    sums, at the rate of memory; where one program does so for all stages, its timeline counts that by tick.
    """
    splits = program.schedule.splits_backward if splits is None else splits
    profile, rates = partition.profile, rates_in(partition.profile)
    seconds = []
    for s, (stage, placed) in enumerate(zip(program.stages, partition.stages, strict=True)):
        operators = slice(placed.operators.start, placed.operators.stop)
        backward = sum(profile.backward_seconds[operators]) + (0.0 if added is None else added[s])
        if own_sums and program.num_microbatches > 1:
            backward += _summing_bytes(program, stage) / rates.bytes
        share = _weight_share(stage, rates) if splits else 0.0
        seconds.append(StageSeconds(sum(profile.forward_seconds[operators]), backward, share * backward))
    return seconds


def _summing_bytes(program: Program, stage: Stage) -> int:
    """Bytes read and written to add a micro-batch's gradients in a stage."""
    assert stage.vjp is not None
    wrt = set(stage.vjp.backward_graph.wrt) - program.objective.frozen
    trained = [t for t in (*stage.parameters, *stage.borrowed) if t in wrt]
    sums = [sum_dtype(a.dtype, program.gradient_dtype).itemsize * a.size for a in program.avals(trained)]
    return sum(4 * word_count(a) for a in program.avals(trained)) + 2 * sum(sums)


def program_timeline(
    request: Request, program: Program, partition: Partition, seconds: Sequence[StageSeconds]
) -> Timeline:
    """Return the timeline of a step in the requested runtime."""
    if request.runtime == "mpmd":
        processes = processes_of(request.mesh, partition, program.num_devices)
        dispatching = Dispatching(message_seconds(program, partition), processes, program.stage_replicas)
        return dispatched_timeline(program.schedule, *_seconds_on_devices(partition, seconds), dispatching)
    return step_timeline(program, partition, seconds)


def least_seconds(
    schedule: Schedule, partition: Partition, stage_replicas: StageReplicas, lockstep: bool = True
) -> float:
    """Return what a step takes at least with some cuts: its work alone."""
    rates = [speed / stage_replicas.per_device(s) for s, speed in enumerate(stage_speeds(partition))]
    stages = list(zip(partition.stages, rates, strict=True))
    forward, backward = (
        [sum(seconds[stage.operators.start : stage.operators.stop]) / rate for stage, rate in stages]
        for seconds in (partition.profile.forward_seconds, partition.profile.backward_seconds)
    )
    if not schedule.splits_backward:
        return simulate(schedule, forward=forward, backward=backward, lockstep=lockstep).makespan
    # However it is split, no device does more in a step than this.
    return schedule.num_microbatches * max(f + b for f, b in zip(forward, backward, strict=True))


def step_seconds(program: Program, partition: Partition, timeline: Timeline) -> float:
    """A step with what devices that share a stage need to add up their gradients."""
    if program.stage_replicas.is_single:
        return timeline.makespan
    model = Synchronous(partition.network, program.num_microbatches)
    weights = np.array([program.sums.bytes], np.float64)
    return timeline.makespan + max(
        float(model.all_reduce_seconds(weights, DeviceGroup(s.devices))[0]) for s in partition.stages
    )


def step_timeline(program: Program, partition: Partition, seconds: Sequence[StageSeconds]) -> Timeline:
    """A step as the executor walks through it, what every tick costs besides its work included."""
    forward, inputs, weights = _seconds_on_devices(partition, seconds)
    each = _exchange_seconds(partition, [4 * n for n in program.message_words])
    each += handled_bytes(program) / rates_in(partition.profile).bytes
    schedule = program.schedule
    return simulate(schedule, forward=forward, backward_input=inputs, backward_weight=weights, communication=each)


def stage_search_arguments(
    program: Program, partition: Partition, added: Sequence[float] | None = None
) -> SearchArguments:
    """Return the arguments of a search for a schedule of stage programs, with what storage has ``added``."""
    seconds = stage_seconds(program, partition, added, own_sums=True, splits=True)
    dispatching = Dispatching(message_seconds(program, partition), (), program.stage_replicas)
    return search_arguments(program.schedule, *_seconds_on_devices(partition, seconds), dispatching)


def _seconds_on_devices(
    partition: Partition, seconds: Sequence[StageSeconds]
) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of each stage on its own devices: forward, backward for inputs, and for weights."""
    pairs = list(zip(seconds, stage_speeds(partition), strict=True))
    return (
        [stage.forward / s for stage, s in pairs],
        [(stage.backward - stage.weight) / s for stage, s in pairs],
        [stage.weight / s for stage, s in pairs],
    )


def message_seconds(program: Program, partition: Partition) -> list[tuple[float, float]]:
    """By stage, until what it sends on is with the next, and its cotangents with the one before; the slowest replica's.

    What waits for a backward pass elsewhere, sums of gradients or copies of parameters go at other times.
    """
    groups = [stage.devices for stage in partition.stages]

    def seconds(size: int, s: int, other: int) -> float:
        pairs = _pairs(groups[s], groups[other]) if 0 <= other < len(groups) and size else ()
        return max((partition.network.seconds(a, b, size) for a, b in pairs if a != b), default=0.0)

    sizes = [(program.bytes_of(stage.leaving), program.bytes_of(stage.returning)) for stage in program.stages]
    return [(seconds(ahead, s, s + 1), seconds(back, s, s - 1)) for s, (ahead, back) in enumerate(sizes)]


def _pairs(source: Sequence[int], target: Sequence[int]) -> Iterable[tuple[int, int]]:
    """The devices between which messages go: those of a replica, or all of two stages that share micro-batches."""
    return zip(source, target, strict=True) if len(source) == len(target) else itertools.product(source, target)


def processes_of(mesh: Mesh, partition: Partition, num_devices: int) -> list[tuple[int, ...]]:
    """The process of each replica, by device along the stage axis."""
    devices = mesh.devices.flatten().tolist()
    return [tuple(devices[d].process_index for d in stage.devices) for stage in partition.stages[:num_devices]]


def handled_bytes(program: Program) -> int:
    """Bytes that every device reads and writes for each micro-batch of a tick, whether it has work or not.

    A stash and what waits with it go into the arena where something was, and are copied out of it; gradients are
    added up.
    """
    if program.alone:
        return 0
    schedule, page = program.schedule, 4 * PAGE
    steps, sums = ([a.size * a.dtype.itemsize for a in avals] for avals in (program.gradient_avals, program.sum_avals))
    total = (3 + 2) * page * max(program.stash_pages)
    kinds = [schedule.backward_kind]
    if schedule.splits_backward:
        total += 2 * page * max(program.stash_pages) + (3 + 2) * page * max(program.saved_pages)
        kinds.append(Kind.BACKWARD_WEIGHT)
    return total + sum(steps[k] + 2 * sums[k] for kind in kinds for k in touched(program, kind))


def describe(
    request: Request,
    program: Program,
    partition: Partition,
    memory: dict[str, int],
    microbatch_size: int,
    fitted: Sequence[Fitted],
    budget: int | None,
) -> Plan:
    """The plan of a program."""
    graph, runtime, shape = program.objective.graph, request.runtime, request.submesh.shape
    seconds = stage_seconds(program, partition, [fit.added_seconds for fit in fitted], own_sums=runtime == "mpmd")
    messages = message_seconds(program, partition) if runtime == "mpmd" else [(0.0, 0.0)] * len(seconds)
    stages = []
    for s, stage in zip(program.stage_numbers, program.stages, strict=True):
        placed = partition.stages[s]
        operators = slice(placed.operators.start, placed.operators.stop)
        stages.append(
            StagePlan(
                operators=(placed.operators.start, placed.operators.stop),
                devices=placed.devices,
                device_ids=_device_ids(request, placed.devices),
                modules=_modules(op.path for op in graph.operators[operators]),
                forward_seconds=seconds[s].forward,
                backward_seconds=seconds[s].backward,
                weight_seconds=seconds[s].weight,
                added_seconds=fitted[s].added_seconds,
                storage=fitted[s].status,
                storage_gap=fitted[s].gap,
                solve_seconds=fitted[s].solve_seconds,
                stored=_stored_bytes(stage, lambda t, fmt: fmt.format.value),
                stored_modules=_stored_bytes(stage, _makers(stage)),
                recomputed=_recomputed(stage),
                slices=stage.slices,
                parameter_bytes=program.bytes_of(stage.parameters),
                stash_bytes=program.stash_bytes(stage),
                in_flight=program.in_flight(program.device(s), s // program.num_devices),
                **_away(program, partition, s),
                sent_bytes=program.bytes_of(stage.leaving),
                message_seconds=messages[s],
            )
        )
    timeline = program_timeline(request, program, partition, seconds)
    bound = 0.0  # that no order of the stages' work with as many stashes stays below
    if runtime == "mpmd":
        arguments = stage_search_arguments(program, partition, [fit.added_seconds for fit in fitted])
        bound = makespan_bound(program.schedule.num_devices, program.schedule.num_microbatches, **arguments)
    described = re.sub(r"0x[0-9a-f]+", "", f"{graph}{program.parameters.buffers}{program.state.buffers}")
    return Plan(
        stages=tuple(stages),
        replicas=request.replicas,
        num_microbatches=program.num_microbatches,
        microbatch_size=microbatch_size,
        schedule=program.schedule.name,
        profile=partition.profile.source,
        measured="" if partition.profile.measurement is None else str(partition.profile.measurement),
        rates=_whose_rates(request, partition.profile),
        step_seconds=step_seconds(program, partition, timeline),
        bubble_fraction=_idle_share(timeline, program.stage_replicas.per_stage),
        lower_bound_seconds=plan_bound(partition),
        schedule_bound_seconds=bound,
        budget=budget,
        memory=memory,
        host=request.host,
        staleness=program.schedule.staleness if program.schedule.versions is not None else (),
        notes=(*program.objective.annotations.notes((*request.mesh.axis_names, *shape), shape), *_sum_notes(program)),
        fingerprint=hashlib.sha256(described.encode()).hexdigest()[:16],
        runtime=runtime,
        axes=dict(shape),
    )


def _sum_notes(program: Program) -> list[str]:
    """Return a sentence for each type of parameters whose gradients are added up in a wider one."""
    pairs = zip(program.gradients.buffers, program.sums.buffers, strict=True)
    types = dict.fromkeys((narrow.name, wide.name) for (_, narrow), (_, wide) in pairs if narrow != wide)
    return [f"gradients of {narrow} parameters are added up in {wide}" for narrow, wide in types]


def _whose_rates(request: Request, profile: Profile) -> str:
    """Return the owner of the rates that are charged besides profiled operators; empty for the mesh's devices."""
    kind = request.mesh.devices.flat[0].device_kind
    if isinstance(request.profile, Profile) and request.profile.rates is None:
        known = known_rates(profile.device_kind)
        return f"{profile.device_kind}" if known else f"{kind}, the mesh's, for the profile has none"
    if profile.device_kind == kind:
        return ""
    return profile.device_kind or "the profile's device"


def describe_frozen(program: Program, model: BoundModel) -> FrozenPlan | None:
    """Describe the parameters that are not trained; None if all are."""
    objective, count = program.objective, program.schedule.frozen
    pairs = list(zip(model.parameters, objective.parameters, strict=True))
    frozen = [v for v, t in pairs if t in objective.frozen]
    if not frozen:
        return None
    return FrozenPlan(
        parameters=tuple(v.name for v in frozen),
        trained=len(pairs) - len(frozen),
        bytes=sum(4 * word_count(v.aval) for v in frozen),
        gradient_bytes=program.summed(program.parameters).bytes - program.sums.bytes,
        stages=tuple(range(count)),
    )


def _idle_share(timeline: Timeline, widths: Sequence[int]) -> float:
    """The share of all devices' time in which they do not compute."""
    if len(set(widths)) == 1:
        return timeline.bubble_fraction
    busy = sum(widths[span.stage] * (span.end - span.start) for span in timeline.spans)
    return 1 - busy / (timeline.makespan * sum(widths)) if timeline.makespan else 0.0


def _weight_share(stage: Stage, rates: Rates) -> float:
    """The part for weights of a stage's backward work, by estimate."""
    assert stage.vjp is not None
    parts = stage.vjp.input_steps, stage.vjp.weight_steps
    first, second = (
        sum(roofline.seconds(step.program.operators, step.program, rates) for step in steps) for steps in parts
    )
    return second / (first + second) if second else 0.0


def _device_ids(request: Request, devices: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers that JAX has for the devices of a stage, those of further mesh axes included."""
    firsts = (request.mesh.devices.flat[d] for d in devices)
    return tuple(device.id for first in firsts for device in request.submesh.group(first))


def _stored_bytes(stage: Stage, label: Callable[[TensorNumber, SavedFormat], str]) -> dict[str, int]:
    """Return bytes of one micro-batch's stash by label."""
    assert stage.vjp is not None
    graph, formats = stage.vjp.graph, stage.vjp.plan.formats
    bytes_of: Counter[str] = Counter()
    for t in stage.stashed:
        bytes_of[label(t, formats[t])] += stored_bytes(graph.tensors[t], formats[t])
    return dict(bytes_of)


def _makers(stage: Stage) -> Callable[[TensorNumber, SavedFormat], str]:
    """Return a function that gives the module by which a stored tensor is made."""
    makers = {t: op.path or "the loss" for op in stage.graph.operators for t in op.outputs}
    return lambda t, fmt: makers.get(t, "what the stage receives")


def _recomputed(stage: Stage) -> tuple[str, ...]:
    """The operators of more than cheap arithmetic that the backward pass runs again."""
    assert stage.vjp is not None
    graph, formats = stage.vjp.graph, stage.vjp.plan.formats
    again = {t for t, fmt in formats.items() if fmt.format is Format.RECOMPUTE}
    return tuple(
        f"{op.path} {op.label}".strip()
        for op in graph.operators
        if weight(op) is None and not again.isdisjoint(op.outputs)
    )


def _away(program: Program, partition: Partition, s: int) -> dict[str, Any]:
    """Return what the plan says of a stage's stashes that are away."""
    stage = program.stages[s]
    if stage.swap is None:
        return {}
    points = swap_points(program.schedule, s)
    sizes = dict(zip(stage.vjp.plan.stored, stage.vjp.stash_avals, strict=True)) if stage.vjp else {}
    size = sum(4 * word_count(aval) for t in stage.swap.tensors for aval in sizes.get(t, ()))
    pieces = tuple(
        StashPiece(target.stage, partition.stages[s if target.stage == HOST else target.stage].devices, n)
        for target in stage.swap.targets
        if (n := round(size * target.share))
    )
    gone = max(points.returns[j] - points.leaves[j] - 1 for j in points.leaves)
    return {"away": points.away, "away_ticks": gone, "pieces": pieces}


def stage_links(partition: Partition, host_bytes: int = 0) -> Links:
    """The direct links between the devices of two stages, and to their host's memory; of all replicas the slowest."""
    network = partition.network
    places = [np.ix_(source.devices, target.devices) for source in partition.stages for target in partition.stages]
    shape = len(partition.stages), len(partition.stages)
    bandwidth = np.array([network.bandwidth[place].min() for place in places]).reshape(shape)
    latency = np.array([network.latency[place].max() for place in places]).reshape(shape)
    return Links(
        tuple(map(tuple, bandwidth.tolist())),
        tuple(map(tuple, latency.tolist())),
        host_bytes,
        tuple(min(network.host_bandwidth_bytes_per_second[d] for d in stage.devices) for stage in partition.stages),
        tuple(max(network.host_latency_seconds[d] for d in stage.devices) for stage in partition.stages),
    )


def _exchange_seconds(partition: Partition, messages: Sequence[float]) -> float:
    """Return what sending a message forward and one back takes over the slowest link between neighbors."""
    stages = itertools.pairwise(partition.stages)
    links = [link for first, second in stages for link in itertools.product(first.devices, second.devices)]
    return sum(max((partition.network.seconds(*link, size) for link in links), default=0.0) for size in messages)


def _modules(paths: Iterable[str]) -> tuple[str, ...]:
    """Module paths in order of appearance, without those that only contain others; iterations of a scan joined."""
    rows: dict[str, list[int]] = {}
    for path in paths:
        module, *cut = re.split(r"\[(\d+):(\d+)\]", path, maxsplit=1)
        rows.setdefault(module, []).extend(map(int, cut[:2]))
    seen = {p: f"[{min(cut)}:{max(cut)}]" if cut else "" for p, cut in rows.items() if p}
    return tuple(p + cut for p, cut in seen.items() if not any(q.startswith(p + "/") for q in seen))
