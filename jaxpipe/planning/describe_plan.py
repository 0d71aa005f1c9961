"""Description of a program for its plan: seconds, bytes, and devices."""

# More than 15 of our modules: a plan tells something of every part of a pipeline.
import functools
import hashlib
import itertools
import re
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxpipe.array_types import TensorNumber
from jaxpipe.costs.kernels import operator_seconds
from jaxpipe.costs.profile import Profile
from jaxpipe.costs.roofline import names_and_work
from jaxpipe.graph.op_cost import weight
from jaxpipe.models import check_batch
from jaxpipe.plan import FrozenPlan, Plan, StagePlan, StashPiece
from jaxpipe.planning.check_request import Request
from jaxpipe.planning.cuts.placed_stages import Partition, plan_bound, stage_speeds, stage_work
from jaxpipe.planning.dispatch_timeline import Dispatching, dispatched_timeline, search_arguments
from jaxpipe.planning.exchange_costs import are_linked, planned_exchanges
from jaxpipe.planning.plan_timeline import StageSeconds, seconds_on_devices
from jaxpipe.planning.storage.stage_levels import Fitted
from jaxpipe.planning.trace_request import Traced, rates_in
from jaxpipe.residuals.stored_formats import Derived, stored_bytes
from jaxpipe.residuals.vjp_program import VJPProgram
from jaxpipe.runtime.executable_plan import Update
from jaxpipe.runtime.gradient_precision import sum_dtype
from jaxpipe.runtime.select_runtime import bytes_by_component, lockstep_timeline
from jaxpipe.runtime.stages import Program, Stage
from jaxpipe.runtime.uint32_words import word_count
from jaxpipe.schedules import Schedule, StageReplicas, Timeline, makespan_bound
from jaxpipe.schedules.swap_points import HOST, swap_points
from jaxpipe.schedules.table import StageNumber
from jaxpipe.targets.known import target_of_kind
from jaxpipe.targets.rates import Rates


#: By program and rates; asked again for every candidate that is described.
_weight_shares = weakref.WeakKeyDictionary[VJPProgram, dict[Rates, float]]()


def stage_seconds(
    program: Program, partition: Partition, added: Sequence[float] | None = None, splits: bool | None = None
) -> list[StageSeconds]:
    """Seconds of every stage, with what storage has ``added``.

    ``splits``: the backward work comes in two parts. It adds a stage's gradients to their sums, at the rate of memory.
    """
    splits = program.schedule.splits_backward if splits is None else splits
    profile, rates = partition.profile, rates_in(partition.profile)
    seconds = []
    for s, (stage, placed) in enumerate(zip(program.stages, partition.stages, strict=True)):
        operators = slice(placed.operators.start, placed.operators.stop)
        backward = sum(profile.backward_seconds[operators]) + (0.0 if added is None else added[s])
        if program.num_microbatches > 1:
            backward += _summing_bytes(program, stage) / rates.bytes
        share = _weight_share(stage, rates) if splits else 0.0
        seconds.append(StageSeconds(sum(profile.forward_seconds[operators]), backward, share * backward))
    return seconds


def _summing_bytes(program: Program, stage: Stage) -> int:
    """Bytes read and written to add a micro-batch's gradients in a stage."""
    wrt = set(stage.programs.backward_graph.wrt) - program.objective.frozen
    trained = [t for t in (*stage.parameters, *stage.borrowed) if t in wrt]
    return sum(4 * word_count(a) for a in program.avals(trained)) + 2 * program.sum_bytes(trained)


def program_timeline(
    request: Request, program: Program, partition: Partition, seconds: Sequence[StageSeconds]
) -> Timeline:
    """Return the timeline of a step in the requested runtime."""
    work, rate = seconds_on_devices(seconds, stage_speeds(partition)), rates_in(partition.profile).bytes
    if request.runtime == "spmd":
        return lockstep_timeline(program, work, functools.partial(_slowest_message, partition), rate)
    processes = processes_of(request.mesh, partition, program.schedule)
    dispatching = Dispatching(message_seconds(program, partition), processes, program.stage_replicas)
    return dispatched_timeline(program.schedule, work, dispatching)


def least_seconds(schedule: Schedule, partition: Partition, stage_replicas: StageReplicas) -> float:
    """Return the seconds that a step takes at least with some cuts: of its work alone, on devices that run free."""
    work = stage_work(partition)
    forward, backward = ([stage_replicas.per_device(s) * x for s, x in enumerate(part)] for part in work)
    if not schedule.splits_backward:
        return schedule.simulate(forward=forward, backward=backward).makespan
    # However it is split, no device does more in a step than this.
    busy = (sum(forward[s] + backward[s] for s in stages) for stages in schedule.stage_of)
    return schedule.num_microbatches * max(busy)


def step_seconds(program: Program, partition: Partition, timeline: Timeline) -> float:
    """A step with what devices that share a stage need to add up their gradients."""
    if program.stage_replicas.is_single:
        return timeline.makespan
    sizes = [program.sum_bytes(program.trained(d)) for d in program.device_numbers]
    return timeline.makespan + max(
        partition.network.slowest_link(stage.devices).all_reduce_seconds(size, len(stage.devices))
        for size, stage in zip(sizes, partition.stages, strict=True)
    )


def stage_search_arguments(
    program: Program, partition: Partition, added: Sequence[float] | None = None
) -> dict[str, Any]:
    """Return the arguments of a search for a schedule of stage programs, with what storage has ``added``."""
    seconds = stage_seconds(program, partition, added, splits=True)
    dispatching = Dispatching(message_seconds(program, partition), (), program.stage_replicas)
    return search_arguments(program.schedule, seconds_on_devices(seconds, stage_speeds(partition)), dispatching)


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


def processes_of(mesh: Mesh, partition: Partition, schedule: Schedule) -> list[tuple[int, ...]]:
    """The process of each replica, by device along the stage axis."""
    devices = mesh.devices.flatten().tolist()
    placed = (partition.stages[row[0]] for row in schedule.stage_of)
    return [tuple(devices[d].process_index for d in stage.devices) for stage in placed]


def describe(traced: Traced, program: Program, partition: Partition, update: Update, fitted: Sequence[Fitted]) -> Plan:
    """Return the plan of a program; its budget and its search are those of whoever chose it."""
    request, runtime, shape = traced.request, traced.request.runtime, traced.request.submesh.shape
    added = [fit.added_seconds for fit in fitted]
    seconds = stage_seconds(program, partition, added)
    messages = message_seconds(program, partition) if runtime == "mpmd" else [(0.0, 0.0)] * len(seconds)
    timeline = program_timeline(request, program, partition, seconds)
    bound = 0.0  # that no order of the stages' work with as many stashes stays below
    if runtime == "mpmd":
        arguments = stage_search_arguments(program, partition, added)
        bound = makespan_bound(program.schedule.num_devices, program.schedule.num_microbatches, **arguments)
    sent, exchanges = update.exchange or update.outer, ()
    rings = [stage.devices for stage in partition.stages]
    if request.network is not None and request.replicas > 1 and are_linked(request.network, rings):
        dense = max(program.sum_bytes(program.trained(d)) for d in program.device_numbers)
        exchanges = planned_exchanges(update, dense, request.network, rings, timeline.makespan)
    described = f"{program.objective.text}{program.on_devices}"
    annotations = program.objective.annotations.notes((*request.mesh.axis_names, *shape), shape)
    return Plan(
        stages=tuple(
            _describe_stage(request, program, partition, s, fitted[s], seconds[s], messages[s])
            for s in program.stage_numbers
        ),
        replicas=request.replicas,
        num_microbatches=program.num_microbatches,
        microbatch_size=check_batch.batch_size(traced.objective.microbatch),
        schedule=program.schedule.name,
        profile=partition.profile.source,
        measured="" if partition.profile.measurement is None else str(partition.profile.measurement),
        rates=_whose_rates(request, partition.profile),
        step_seconds=step_seconds(program, partition, timeline),
        bubble_fraction=_idle_share(timeline, program.stage_replicas.per_stage),
        lower_bound_seconds=plan_bound(partition),
        schedule_bound_seconds=bound,
        budget=None,
        memory=bytes_by_component(runtime, program, update, traced.local),
        host=request.host,
        staleness=program.schedule.staleness if program.schedule.versions is not None else (),
        notes=(*annotations, *_sum_notes(program), *_cut_notes(traced, program), *_work_notes(traced), *traced.notes),
        fingerprint=hashlib.sha256(described.encode()).hexdigest()[:16],
        runtime=runtime,
        axes=dict(shape),
        per_stage=update.by_stage.per_stage,
        frozen=_describe_frozen(program),
        exchange_bytes=None if sent is None else sent.sent_bytes,
        inner_steps=0 if update.outer is None else update.outer.settings.inner_steps,
        exchanges=exchanges,
    )


def _describe_stage(
    request: Request,
    program: Program,
    partition: Partition,
    s: StageNumber,
    fit: Fitted,
    seconds: StageSeconds,
    messages: tuple[float, float],
) -> StagePlan:
    stage, placed = program.stages[s], partition.stages[s]
    operators = placed.operators.start, placed.operators.stop
    return StagePlan(
        operators=operators,
        devices=placed.devices,
        device_ids=_device_ids(request, placed.devices),
        modules=_modules(op.path for op in program.objective.graph.operators[slice(*operators)]),
        **vars(seconds),
        **vars(fit),
        **_stored_bytes(stage),
        recomputed=_recomputed(stage),
        slices=stage.slices,
        parameter_bytes=program.bytes_of(stage.parameters),
        stash_bytes=program.stash_bytes(stage),
        in_flight=program.in_flight(s),
        **_away(program, partition, s),
        sent_bytes=program.bytes_of(stage.leaving),
        message_seconds=messages,
    )


def _sum_notes(program: Program) -> list[str]:
    """Return a sentence for each type of parameters whose gradients are added up in a wider one."""
    trained = (t for d in program.device_numbers for t in program.trained(d))
    types = dict.fromkeys(program.objective.graph.tensors[t].dtype for t in trained)
    pairs = ((narrow, sum_dtype(narrow, program.gradient_dtype)) for narrow in types)
    return [f"gradients of {a.name} parameters are added up in {b.name}" for a, b in pairs if a != b]


def _work_notes(traced: Traced) -> list[str]:
    """Return a sentence if a profile that was passed says how much its operators do, and is of other work."""
    given = traced.asked[0].profile
    if not isinstance(given, Profile) or not given.forward_flops:
        return []
    work, (names, wanted) = given.forward_flops, names_and_work(traced.objective.graph, rates_in(traced.profile))
    k = next((k for k, (flops, expected) in enumerate(zip(work, wanted, strict=True)) if flops != expected), None)
    if k is None:
        return []
    return [
        f"profile= is of other work, another model or micro-batches of another size: operator {k}, {names[k]}, has "
        f"{wanted[k]:.6g} floating-point operations, and {work[k]:.6g} in the profile. Its seconds count as they are."
    ]


def _cut_notes(traced: Traced, program: Program) -> list[str]:
    """Return a sentence on the stages whose beginnings the caller has given."""
    if not traced.cuts:
        return []
    rest = len(program.stages) - 1 - len(traced.cuts)
    searched = f"; {rest} other cut(s) were searched for" if rest else ""
    return [f"cuts= was given: stages begin at {', '.join(traced.cuts)}{searched}"]


def _whose_rates(request: Request, profile: Profile) -> str:
    """Return the owner of the rates that are charged besides profiled operators; empty for the mesh's devices."""
    kind = request.mesh.devices.flat[0].device_kind
    if isinstance(request.profile, Profile) and request.profile.rates is None:
        is_known = target_of_kind(profile.device_kind) is not None
        return profile.device_kind if is_known else f"{kind}, the mesh's, for the profile has none"
    return "" if profile.device_kind == kind else profile.device_kind or "the profile's device"


def _describe_frozen(program: Program) -> FrozenPlan | None:
    """Describe the parameters that are not trained; None if all are."""
    objective, count, devices = program.objective, program.schedule.frozen, program.device_numbers

    def largest(tensors: Iterable[Sequence[TensorNumber]]) -> int:
        return max(map(program.sum_bytes, tensors))

    frozen = [t for t in objective.parameters if t in objective.frozen]
    if not frozen:
        return None
    return FrozenPlan(
        parameters=tuple(objective.names[t] for t in frozen),
        trained=len(objective.parameters) - len(frozen),
        bytes=4 * word_count(program.avals(frozen)),
        gradient_bytes=largest([program.held(d)[0] for d in devices]) - largest(map(program.trained, devices)),
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
    shares = _weight_shares.setdefault(stage.programs, {})
    if rates not in shares:
        first, second = (
            sum(operator_seconds(op, step.program.tensors, rates) for step in steps for op in step.program.operators)
            for steps in (stage.programs.input_steps, stage.programs.weight_steps)
        )
        shares[rates] = second / (first + second) if second else 0.0
    return shares[rates]


def _device_ids(request: Request, devices: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers that JAX has for the devices of a stage, those of further mesh axes included."""
    firsts = (request.mesh.devices.flat[d] for d in devices)
    return tuple(device.id for first in firsts for device in request.submesh.group(first))


def _stored_bytes(stage: Stage) -> dict[str, dict[str, int]]:
    """Return bytes of one micro-batch's stash by kind of storage, and by the module that makes what is stored."""
    graph, codecs = stage.programs.graph, stage.programs.plan.codecs
    makers = {t: op.path or "the loss" for op in stage.graph.operators for t in op.outputs}
    by_kind, by_module = Counter[str](), Counter[str]()
    for t in stage.stashed:
        size = stored_bytes(graph.tensors[t], codecs[t])
        by_kind[codecs[t].name] += size
        by_module[makers.get(t, "what the stage receives")] += size
    return {"stored": dict(by_kind), "stored_modules": dict(by_module)}


def _recomputed(stage: Stage) -> tuple[str, ...]:
    """The operators of more than cheap arithmetic that the backward pass runs again."""
    again = {t for t, fmt in stage.programs.plan.formats.items() if fmt is Derived.RECOMPUTE}
    rerun = (op for op in stage.programs.graph.operators if weight(op) is None and not again.isdisjoint(op.outputs))
    return tuple(f"{op.path} {op.label}".strip() for op in rerun)


def _away(program: Program, partition: Partition, s: StageNumber) -> dict[str, Any]:
    """Return the plan's fields for a stage's stashes that are away."""
    stage = program.stages[s]
    if stage.swap is None:
        return {}
    points = swap_points(program.schedule, s)
    size = sum(4 * word_count(aval) for t in stage.swap.tensors for aval in stage.stashed.get(t, ()))
    pieces = tuple(
        StashPiece(target.stage, partition.stages[s if target.stage == HOST else target.stage].devices, n)
        for target in stage.swap.targets
        if (n := round(size * target.share))
    )
    gone = max((len(points.elsewhere(j)) for j in points.leaves), default=0)
    return {"away": points.away, "away_ticks": gone, "pieces": pieces}


def _slowest_message(partition: Partition, size: int) -> float:
    """Return the seconds of a message over the slowest link between neighbors."""
    stages = itertools.pairwise(partition.stages)
    links = (link for first, second in stages for link in itertools.product(first.devices, second.devices))
    return max((partition.network.seconds(*link, size) for link in links), default=0.0)


def _modules(paths: Iterable[str]) -> tuple[str, ...]:
    """Module paths in order of appearance, without those that only contain others; iterations of a scan joined."""
    rows: dict[str, list[int]] = {}
    for path in paths:
        module, *cut = re.split(r"\[(\d+):(\d+)\]", path, maxsplit=1)
        rows.setdefault(module, []).extend(map(int, cut[:2]))
    seen = {p: f"[{min(cut)}:{max(cut)}]" if cut else "" for p, cut in rows.items() if p}
    return tuple(p + cut for p, cut in seen.items() if not any(q.startswith(p + "/") for q in seen))
