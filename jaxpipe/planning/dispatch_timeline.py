"""The timeline of stage programs that the host dispatches: no device waits for others but for what it reads.

device   [ call + work ][ call + work ]      a message leaves when its work is done, and overlaps with what follows
host     c s c s c c s c ...                 one after the other; no work begins before it has been called
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpipe.schedules import Kind, Schedule, StageReplicas, Timeline
from jaxpipe.schedules.table import KINDS


#: Seconds of the host for a call of a compiled program with about 40 arrays, and for a send to another device of its
#: process. ``scripts.bench_dispatch`` measures 16 to 23 and 32 to 36 us on simulated CPU devices, which do the work of
#: small programs in the thread that calls them.
CALL_SECONDS, SEND_SECONDS = 25e-6, 40e-6


@dataclass(frozen=True)
class Dispatching:
    """Messages and hosts: seconds of messages ahead and back by stage, processes of devices by stage of a chunk."""

    messages: Sequence[tuple[float, float]]
    processes: Sequence[Sequence[int]]
    stage_replicas: StageReplicas


def dispatched_timeline(schedule: Schedule, work: Sequence[Sequence[float]], dispatching: Dispatching) -> Timeline:
    """Return who computes what when in a step, by the work of each stage: forward, backward for inputs, for weights.

    Every call takes ``CALL_SECONDS`` of its device, every message to another device ``SEND_SECONDS`` besides its way.
    The host of a process does all of these in the order of the table; what it has not come to yet cannot begin. A
    forward and a backward pass that are one program are one call.
    """
    count = schedule.total_stages
    forward, backward_input, backward_weight = work
    first = _first_kinds(schedule)
    stage_replicas = dispatching.stage_replicas

    def called(kind: Kind, seconds: Sequence[float]) -> list[float]:
        calls = [seconds[s] + CALL_SECONDS * (kind in first[s]) for s in range(count)]
        return [stage_replicas.per_device(schedule.device(s)) * n for s, n in enumerate(calls)]

    return schedule.simulate(
        forward=called(Kind.FORWARD, forward),
        backward_input=called(schedule.backward_kind, backward_input),
        backward_weight=called(Kind.BACKWARD_WEIGHT, backward_weight),
        communication=_links(schedule, dispatching),
        begins=_calls(schedule, dispatching.processes, stage_replicas.round_size),
        lockstep=False,
    )


def _first_kinds(schedule: Schedule) -> list[set[Kind]]:
    """Return by stage the kinds of work with which its programs begin."""
    return [{kinds[0] for kinds in programs} for programs in schedule.program_kinds]


def _links(schedule: Schedule, dispatching: Dispatching) -> list[tuple[float, float]]:
    """Return the seconds of the messages between each stage and the next, forward and back."""
    messages, replicas = dispatching.messages, dispatching.stage_replicas
    rounds = replicas.round_size // min(replicas.per_stage)  # micro-batches of a round on a device, at most
    sends = list(enumerate(rounds * apart for apart in schedule.apart))
    ahead = [n * (messages[s][0] + SEND_SECONDS) for s, n in sends]
    back = [n * (messages[s + 1][1] + SEND_SECONDS) * (s >= schedule.frozen) for s, n in sends]
    return list(zip(ahead, back, strict=True))


def search_arguments(schedule: Schedule, work: Sequence[Sequence[float]], dispatching: Dispatching) -> dict[str, Any]:
    """Return the arguments of ``list_schedule`` for other orders of the same work, with a table's stashes in flight.

    The last stage is charged one call for its forward and backward work, as if it did both at once. So no order has a
    shorter timeline than the bound for these arguments.
    """
    forward, backward_input, backward_weight = work
    stages = range(schedule.total_stages)
    turns = [dispatching.stage_replicas.per_device(schedule.device(s)) for s in stages]
    trained = [n * (s >= schedule.frozen) for s, n in enumerate(turns)]
    call = [CALL_SECONDS * trained[s] * (s + 1 < len(stages)) for s in stages]
    most = schedule.num_microbatches * schedule.num_chunks
    return {
        "forward": [n * (seconds + CALL_SECONDS) for n, seconds in zip(turns, forward, strict=True)],
        "backward_input": [seconds * trained[s] + call[s] for s, seconds in enumerate(backward_input)],
        "backward_weight": [(seconds + CALL_SECONDS) * trained[s] for s, seconds in enumerate(backward_weight)],
        "backward": [(backward_input[s] + backward_weight[s]) * trained[s] + call[s] for s in stages],
        "communication": _links(schedule, dispatching),
        "in_flight": [most if schedule.frozen else schedule.in_flight(d) for d in range(schedule.num_devices)],
        "num_chunks": schedule.num_chunks,
        "stage_of": schedule.stage_of,
    }


def host_seconds(schedule: Schedule, processes: Sequence[Sequence[int]], stage_replicas: StageReplicas) -> float:
    """Return when the last call of a step begins if no host ever waits; no step is shorter."""
    return max(_calls(schedule, processes, stage_replicas.round_size).values())


def _calls(schedule: Schedule, processes: Sequence[Sequence[int]], round_size: int) -> dict[int, float]:
    """Return when the host calls each action, by its result's number.

    What goes on in a program that was called before is left out.
    """
    first, m = _first_kinds(schedule), schedule.num_microbatches
    apart = (*schedule.apart, False)  # behind the last stage, and before the first
    now = {process: 0.0 for row in processes for process in row}
    called: dict[int, float] = {}
    for tick in schedule.ticks:
        for device, actions in enumerate(tick):
            here = processes[device]
            for kind, j, chunk in actions:
                s = schedule.stage(device, chunk)
                seconds = 0.0
                if kind in first[s]:
                    called[(len(KINDS) * s + KINDS.index(kind)) * m + j] = max([now[process] for process in here])
                    seconds = CALL_SECONDS
                if kind is not Kind.BACKWARD_WEIGHT and apart[s if kind is Kind.FORWARD else s - 1]:
                    seconds += SEND_SECONDS
                for process in here:
                    now[process] += round_size * seconds
    return called
