"""The timeline of stage programs that the host dispatches: no device waits for others but for what it reads.

device   [ call + work ][ call + work ]      a message leaves when its work is done, and overlaps with what follows
host     c s c s c c s c ...                 one after the other; no work begins before it has been called
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpipe.schedules import Kind, Schedule, Timeline, simulate
from jaxpipe.schedules.joined import program_kinds
from jaxpipe.schedules.teams import Teams


#: Seconds of the host for a call of a compiled program with about 40 arrays, and for a send to another device of its
#: process. ``scripts.bench_dispatch`` measures 46 to 48 and 33 to 38 us on simulated CPU devices, which do the work of
#: small programs in the thread that calls them.
CALL_SECONDS, SEND_SECONDS = 25e-6, 40e-6


@dataclass(frozen=True)
class Dispatching:
    """Messages and hosts: what a step needs besides the work of the stages.

    Attributes:
      messages: by stage, seconds until what it sends on has arrived, and the cotangents that it sends back.
      processes: by stage of the first chunk, the process of each of its devices.
      teams: the devices of each stage, which share its micro-batches; an entry of the table is a deal of these.
    """

    messages: Sequence[tuple[float, float]]
    processes: Sequence[Sequence[int]]
    teams: Teams


def call_seconds(schedule: Schedule) -> float:
    """Return what the host needs for a micro-batch of a stage: its calls, and its sends to both sides, at the most."""
    sends = 0 if schedule.num_stages == 1 else min(2, schedule.total_stages - 1)
    calls = max(len(program_kinds(schedule, s)) for s in range(schedule.total_stages))
    return calls * CALL_SECONDS + sends * SEND_SECONDS


def dispatched_timeline(
    schedule: Schedule,
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
    dispatching: Dispatching,
) -> Timeline:
    """Return who computes what when in a step.

    Every call takes ``CALL_SECONDS`` of its device, every message to another device ``SEND_SECONDS`` besides its way.
    The host of a process does all of these in the order of the table; what it has not come to yet cannot begin. A
    forward and a backward pass that are one program are one call.

    Args:
      schedule: the table.
      forward, backward_input, backward_weight: seconds of a micro-batch, by stage.
      dispatching: messages and processes.
    """
    p, count = schedule.num_stages, schedule.total_stages
    first = {s: {kinds[0] for kinds in program_kinds(schedule, s)} for s in range(count)}
    whole = Kind.BACKWARD_INPUT if schedule.splits_backward else Kind.BACKWARD

    teams = dispatching.teams

    def called(kind: Kind, seconds: Sequence[float]) -> list[float]:
        return [teams.turns(s % p) * (n + CALL_SECONDS * (kind in first[s])) for s, n in enumerate(seconds)]

    def arrives(seconds: float) -> float:
        return teams.most_turns * (seconds + SEND_SECONDS) if p > 1 else 0.0

    ahead = [arrives(dispatching.messages[s][0]) for s in range(count - 1)]
    back = [arrives(dispatching.messages[s + 1][1]) for s in range(count - 1)]
    return simulate(
        schedule,
        forward=called(Kind.FORWARD, forward),
        backward_input=called(whole, backward_input),
        backward_weight=called(Kind.BACKWARD_WEIGHT, backward_weight),
        communication=list(zip(ahead, back, strict=True)),
        begins=_begins(schedule, first, dispatching),
        lockstep=False,
    )


def _begins(
    schedule: Schedule, first: dict[int, set[Kind]], dispatching: Dispatching
) -> dict[tuple[Kind, int, int], float]:
    """Return when the host has called each action; what goes on in a program that was called before is left out."""
    p, count = schedule.num_stages, schedule.total_stages
    processes, deal = dispatching.processes, dispatching.teams.deal
    now = {process: 0.0 for row in processes for process in row}
    called: dict[tuple[Kind, int, int], float] = {}
    for tick in schedule.ticks:
        for device, actions in enumerate(tick):
            for action in actions:
                s = action.chunk * p + device
                sends = p > 1 and (s + 1 < count if action.kind is Kind.FORWARD else s > 0)
                sends = sends and action.kind is not Kind.BACKWARD_WEIGHT
                before = [now[process] for process in processes[device]]
                for process in processes[device]:
                    now[process] += deal * (CALL_SECONDS * (action.kind in first[s]) + SEND_SECONDS * sends)
                if action.kind in first[s]:
                    called[action.kind, s, action.microbatch] = max(before)
    return called
