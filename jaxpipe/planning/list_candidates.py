"""The candidates of a plan: for each schedule that may be the fastest, cuts, devices and a program."""

# More than 15 of our modules: cuts, devices and schedules of a traced program come together here.
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpipe.collect_later import collecting_later
from jaxpipe.costs.assumed_links import slowest_used
from jaxpipe.costs.network import Network
from jaxpipe.costs.profile import Profile
from jaxpipe.costs.sharded_profile import groups_of
from jaxpipe.errors import JaxpipeError, PartitionError, ScheduleError
from jaxpipe.graph.operator_order import allowed_cuts
from jaxpipe.graph.primitives import CHECKPOINTS
from jaxpipe.plan import idle_stages
from jaxpipe.planning.candidate import Candidate, Cut, build_candidate
from jaxpipe.planning.cuts.balance_chain import balanced
from jaxpipe.planning.cuts.partition_layers import partition_layers
from jaxpipe.planning.cuts.placed_stages import Partition, on_devices, plan_bound, stage_work
from jaxpipe.planning.cuts.shortest_step import cut_within
from jaxpipe.planning.describe_plan import least_seconds, stage_search_arguments
from jaxpipe.planning.dispatch_timeline import Dispatching, dispatched_timeline, host_seconds
from jaxpipe.planning.trace_request import Traced
from jaxpipe.runtime.stages import variable_spans
from jaxpipe.schedules import Schedule, StageReplicas, list_schedule, makespan_bound, schedule_makers
from jaxpipe.schedules.table import without_backward
from jaxpipe.sharding.mesh_axes import STAGE, Submesh, stage_places
from jaxpipe.text.progress import phase, tell
from jaxpipe.text.short_names import number_ranges


#: How much longer a step may be if stashes take less, or devices are left out: profiles are no better than this.
ALIKE = 0.02

#: How much longer a step may be than the shortest, if that makes less to send: profiles are no better than this.
CUT_SLACK = 0.02

#: Bytes per second from a device to itself.
NO_LINK = 1e12

#: By what share a step must be shorter with a second answer, or than with a fixed table.
SHORTER = 0.01

#: The share of the slowest stage's work under which a stage has next to none.
LITTLE = 0.005


def price(candidate: Candidate, seconds: float | None = None) -> float:
    """Return the seconds of a step, by which candidates are compared; less than they are where devices are left out."""
    request, asked = candidate.traced.request, candidate.traced.asked[0]
    seconds = candidate.seconds if seconds is None else seconds
    return seconds / (1 + ALIKE) if request.mesh.devices.size < asked.mesh.devices.size else seconds


def leanest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the fastest candidate, or of stage programs one that is about as fast and keeps fewer bytes of stashes."""
    fastest = min(candidates, key=price)
    if fastest.traced.request.runtime == "spmd":
        return fastest
    alike = [x for x in candidates if x.traced is fastest.traced and x.seconds <= (1 + ALIKE) * fastest.seconds]
    return min(alike, key=lambda candidate: candidate.waiting_bytes)


@phase("candidates")
@collecting_later()
def list_candidates(traced: Traced) -> list[Candidate]:
    """Return a program for each schedule that may be the fastest, fastest first.

    Stages are on one device each or, if asked, several.
    """
    request = traced.request
    ways = (request.devices_per_stage,) if request.devices_per_stage is not True else (False, True)
    candidates: list[Candidate] = []
    errors: list[PartitionError | ScheduleError] = []
    for replicate in ways:
        operators, devices = len(traced.objective.graph.operators), request.mesh.devices.size
        tell(f"Cutting {operators} operators into stages, on {devices} devices")
        try:
            candidates += _candidates(traced, replicate)
        except (PartitionError, ScheduleError) as error:  # another way will do
            errors.append(error)
    if not candidates:
        raise errors[0]
    return sorted(candidates, key=lambda candidate: candidate.seconds)


def on_fewer_devices(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates for the devices that have work in the best of some others; none if all have, or must stay.

    A stage of operators in no module and without parameters, of the loss as a rule, may have some work, and any stage
    next to none (``LITTLE``): a plan without their devices has to show that they are worth nothing.

    Every process has to take part in a pipeline, so several processes keep their devices.
    """
    best = leanest(candidates)
    traced, plan, count = best.traced, best.default.plan, best.program.num_devices
    named = any(stage.modules for stage in plan.stages)
    loose = {s for s, stage in enumerate(plan.stages) if named and not stage.parameter_bytes and not stage.modules}
    seconds = [stage.forward_seconds + stage.backward_seconds for stage in plan.stages]
    loose |= {s for s, work in enumerate(seconds) if work < LITTLE * max(seconds)}
    idle = loose.union(idle_stages(plan.stages))
    busy = sorted({best.program.device(s) for s in best.program.stage_numbers if s not in idle})
    if len(busy) in (0, count) or not plan.stage_replicas.is_single or jax.process_count() > 1:
        return []
    request, given = traced.request, best.mesh
    taken, order = np.take(given.devices, busy, given.axis_names.index(STAGE)), request.mesh.devices.flatten().tolist()
    devices = np.array(sorted(taken.flat, key=order.index)).reshape(taken.shape)  # numbers in plans are ranks
    mesh = Mesh(devices, given.axis_names, axis_types=given.axis_types)
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


def cut_for_memory(candidate: Candidate, ways: Sequence[Sequence[tuple[float, float]]], budget: float) -> Cut:
    """Return other cuts of a candidate with which its step is short within a budget, by what storage makes of it."""
    traced, program = candidate.traced, candidate.program
    copies = sum(candidate.held_bytes) / max(1.0, sum(traced.profile.parameter_bytes))
    in_flight = [program.in_flight(s) for s in program.stage_numbers]
    partitions = cut_within(candidate.cut.partition, in_flight, copies, ways, budget)
    return Cut(traced, partitions[best_placed(candidate.schedule, partitions)])


def _candidates(traced: Traced, replicate: bool | tuple[int, ...]) -> list[Candidate]:
    """Return candidates with stages on one device each or on several."""
    request, m = traced.request, traced.batching.num_microbatches

    @functools.cache
    def cuts(num_chunks: int) -> tuple[Cut, ...]:
        straight = cuts(1)[0].partition if num_chunks > 1 and not traced.cuts else None
        partitions = place_stages(traced, traced.profile, replicate, num_chunks, straight)
        return tuple(Cut(traced, partition) for partition in partitions)

    def cut(schedule: Schedule) -> Cut:
        ways = cuts(schedule.num_chunks)
        return ways[best_placed(schedule, [way.partition for way in ways])]

    tried: list[Schedule] = []
    if not replicate:
        schedules = schedule_makers.make_schedules(request.schedules, request.num_devices, m)
    elif cuts(1)[0].replicas.is_single:
        return []
    else:
        schedules = schedule_makers.make_replicated_schedules(request.schedules, cuts(1)[0].replicas, m)
    candidates = _of_schedules(traced, schedules, cut, tried)
    if request.schedules is not schedule_makers.AUTO or request.num_devices == 1 or replicate:
        return candidates
    sources = list(candidates)
    # A table of several stages on each device may lose where an order of the seconds of its stages does not.
    maps = {candidate.schedule.stage_of for candidate in candidates}
    more = [schedule for schedule in tried if schedule.stage_of not in maps]
    with contextlib.suppress(PartitionError):  # too few operators for so many stages
        sources += _of_schedules(traced, [x for x in more if not _is_longer(traced, x, candidates)], cut, [])
    return candidates + searched_candidates(candidates, sources)


def _is_longer(traced: Traced, schedule: Schedule, candidates: Sequence[Candidate]) -> bool:
    """Return whether no order with the stages and calls of a schedule is shorter than some candidate, however cut."""
    if traced.request.runtime == "spmd" or traced.objective.frozen or not candidates:
        return False
    partition, stage_replicas = candidates[0].partition, candidates[0].cut.replicas
    least = max(plan_bound(partition), _host_seconds(traced.request.mesh, schedule, stage_replicas))
    return least >= (1 - SHORTER) * min(candidate.seconds for candidate in candidates)


def _host_seconds(mesh: Mesh, schedule: Schedule, stage_replicas: StageReplicas) -> float:
    """Return how long the calls of a step take where one process makes all of them; 0 where several share them."""
    if len({device.process_index for device in mesh.devices.flat}) > 1:
        return 0.0
    return host_seconds(schedule, [(0,)] * schedule.num_devices, stage_replicas)


def _of_schedules(
    traced: Traced, schedules: Iterable[Schedule], cut: Callable[[Schedule], Cut], tried: list[Schedule]
) -> list[Candidate]:
    """Return a program for each schedule that may be faster than those before it; ``tried`` gets what it looks at."""
    candidates: list[Candidate] = []
    errors: list[PartitionError] = []
    for schedule in schedules:
        tried.append(schedule)
        if _is_longer(traced, schedule, candidates):
            continue
        least = 0.0
        try:
            chosen = cut(schedule)
            if candidates:
                trimmed = without_backward(schedule, chosen.num_frozen)
                least = least_seconds(trimmed, chosen.on_devices(schedule), chosen.replicas)
        except PartitionError as error:  # too few operators for so many stages, or too many given cuts; others will do
            errors.append(error)
            continue
        if not candidates or least < min(earlier.seconds for earlier in candidates):
            tell(f"{schedule.name}: {schedule.total_stages} stages with default storage")
            candidates.append(build_candidate(chosen, schedule))
        first = candidates[0].schedule
        if first.num_chunks == 1 and not first.splits_backward and _is_longer(traced, first, candidates):
            break  # no table has fewer calls
    if errors and not candidates:
        raise errors[0]
    return candidates


def searched_candidates(candidates: Sequence[Candidate], sources: Sequence[Candidate]) -> list[Candidate]:
    """Return stage programs with searched schedules that are shorter than others, or hold fewer bytes of stashes.

    Of ``sources`` the fastest for each map from devices to stages gives cuts and seconds.
    """
    best = list(candidates)

    def needless(seconds: float, waiting: int) -> bool:
        """Return whether a candidate is about as short as such a one or shorter, and holds no more bytes of stashes."""
        return any((1 - SHORTER) * x.seconds <= seconds and x.waiting_bytes <= waiting for x in best)

    for stages in sorted({source.schedule.stage_of for source in sources}, key=lambda stages: (len(stages[0]), stages)):
        alike = sorted((x for x in sources if x.schedule.stage_of == stages), key=lambda x: x.seconds)
        fixed = alike[0]
        size = fixed.schedule.num_devices, fixed.schedule.num_microbatches
        arguments = stage_search_arguments(fixed.program, fixed.partition)
        calls = min(_host_seconds(x.traced.request.mesh, x.schedule, x.program.stage_replicas) for x in alike)
        for limits, waiting in _limits(alike):
            arguments["in_flight"] = list(limits)
            least = max(calls, makespan_bound(*size, **arguments))
            too_long = least > (1 + ALIKE) * min(x.seconds for x in best)
            if (too_long and fixed.traced.request.budget is None) or needless(least, waiting):
                continue
            count = fixed.schedule.total_stages
            tell(f"Searching for a schedule of {count} stages with {list(limits)} stashes in flight")
            maker = functools.partial(list_schedule, **arguments)
            candidate = build_candidate(fixed.cut, schedule_makers.check_schedule(maker(*size), *size), maker)
            if not needless(candidate.seconds, candidate.waiting_bytes):
                best.append(candidate)
    return best[len(candidates) :]


def _limits(sources: Sequence[Candidate]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the most stashes of each device, and their bytes: those of the first table, and the fewest of any.

    With several stages on a device it is a stash of each for as many micro-batches as there are devices: as many bytes
    as zero-bubble holds with one.
    """
    first, schedule = sources[0], sources[0].schedule
    if schedule.num_chunks > 1:
        yield (schedule.total_stages,) * schedule.num_devices, first.waiting_bytes
        return
    fewest = min(sources, key=lambda source: sum(source.schedule.most_in_flight))
    for source in dict.fromkeys((first, fewest)):
        yield source.schedule.most_in_flight, source.waiting_bytes


@phase("cut")
def place_stages(
    traced: Traced,
    profile: Profile,
    replicate: bool | tuple[int, ...],
    num_chunks: int = 1,
    straight: Partition | None = None,
) -> tuple[Partition, ...]:
    """Return stages, ``num_chunks`` on each device in turn, and their devices: several if ``replicate`` says so.

    With one device for each stage there may be a second answer, balanced whatever the step's beginning and end take.
    For one program, whose devices walk in step, it is the only one. Several stages on a device follow the devices of
    ``straight``, the answer for one stage on each, which is searched for if it is left out.
    """
    request, objective = traced.request, traced.objective
    network = request.network or slowest_used(traced.links, request.mesh)
    spans = tuple(itertools.chain.from_iterable(variable_spans(objective).values()))
    profile = replace(profile, together=tuple(dict.fromkeys((*profile.together, *spans))))
    places = sum(allowed_cuts(objective.graph, spans)[1:-1])
    stages = len(replicate) if isinstance(replicate, tuple) else 1 if replicate else request.num_devices * num_chunks
    if stages > places + 1:
        raise PartitionError(
            f"The plan needs {stages} stages, but the model has {len(profile.names)} "
            f"operators with {places} places where it may be cut, so it makes between 1 and {places + 1} stages. "
            f"{_obstacle(traced)}".rstrip()
        )
    asked = {
        "num_microbatches": traced.batching.num_microbatches * request.replicas,
        "reorder": False,
        "slack": CUT_SLACK,
        "starts": tuple(traced.cuts.values()),
    }
    if stages <= len(traced.cuts) and replicate is not True:
        chunks = -(-(len(traced.cuts) + 1) * num_chunks // stages)
        more = "" if replicate else f", or use a schedule with more stages on a device, such as 'interleaved {chunks}'"
        raise PartitionError(
            f"cuts= has {len(traced.cuts)} names, which make at least {len(traced.cuts) + 1} stages, and there are "
            f"{stages}: {num_chunks} on each of {stages // num_chunks} devices, or groups of devices. Leave out "
            f"{len(traced.cuts) + 1 - stages} of the names{more}."
        )
    if replicate:
        return (partition_layers(profile, network, replicate=replicate, idle=False, **asked),)
    asked["replicate"] = request.replicas
    if straight is None:
        free = {} if num_chunks == 1 else {"starts": ()}
        straight = partition_layers(profile, network, num_stages=request.num_devices, **{**asked, **free})
        if request.network is None:
            straight = on_devices(straight, stage_places(request.mesh), traced.links)  # all are alike: each stays
    if num_chunks > 1:
        # Cuts are those for devices that are all alike, as every device has stages from each part of the program.
        groups = num_chunks * [stage.devices for stage in straight.stages]
        bandwidth = straight.network.bandwidth
        rates = bandwidth[np.isfinite(bandwidth) & (bandwidth > 0)]
        copies = Network.uniform(len(groups) * len(groups[0]), float(rates.min()) if rates.size else NO_LINK)
        chunks = partition_layers(straight.profile, copies, num_stages=len(groups), **asked)
        return (on_devices(chunks, groups, straight.network),)
    even = balanced(straight)
    return (even,) if request.runtime == "spmd" else tuple(dict.fromkeys((straight, even)))


def best_placed(schedule: Schedule, partitions: Sequence[Partition]) -> int:
    """Return the number of the partition with the shortest step of a schedule, half of backward work for weights."""
    if len(partitions) == 1:
        return 0

    def seconds(partition: Partition) -> float:
        forward, backward = stage_work(partition)
        half = [b / 2 for b in backward]
        sends = [stage.communication_seconds / 2 for stage in partition.stages]
        devices = range(schedule.num_devices)
        dispatching = Dispatching([(s, s) for s in sends], [(0,) for _ in devices], StageReplicas((1,) * len(devices)))
        return dispatched_timeline(schedule, (forward, half, half), dispatching).makespan

    first, second = map(seconds, partitions)
    return int(second < (1 - SHORTER) * first)


def _obstacle(traced: Traced) -> str:
    """Return why layers are one operator, or which variable keeps most operators in one stage."""
    objective = traced.objective
    if traced.notes and not objective.model.cuts:
        return f"{'; '.join(traced.notes)}."
    spans = [(high - low, t, low, high) for t, groups in variable_spans(objective).items() for low, high in groups]
    length, t, low, high = max(spans, default=(0, None, 0, 0))
    if t is None or length < 2:
        whole = any(op.name in CHECKPOINTS for op in objective.graph.operators)
        return "What is under a jax.checkpoint is one operator: put it around parts of the model." if whole else ""
    path = objective.graph.operators[low].path, objective.graph.operators[high].path
    return (
        f"Variable {objective.names[t]} is used from operator {low} ({path[0]}) to operator {high} ({path[1]}), and a "
        "variable lives in one stage, with all that is between its uses. Untie it, or use fewer stages."
    )
