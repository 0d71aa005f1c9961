"""Programs whose schedule was searched for with the seconds of their own stages."""

import functools
from collections.abc import Iterator, Sequence

from jaxpipe.planning.assemble_plan import Candidate, Traced, build_candidate
from jaxpipe.planning.describe_plan import stage_search_arguments
from jaxpipe.schedules import Schedule, list_schedule, schedule_makers
from jaxpipe.text.progress import tell


#: By what share of its seconds a step must be shorter than with a fixed table: profiles are no better than this.
SHORTER = 0.01


def searched_candidates(
    traced: Traced, candidates: Sequence[Candidate], sources: Sequence[Candidate]
) -> list[Candidate]:
    """Return stage programs with searched schedules that are shorter than others, or hold fewer bytes of stashes.

    Args:
      sources: these and others, of which the fastest for each number of stages on a device gives cuts and seconds.
    """
    best = list(candidates)
    for chunks in sorted({source.schedule.num_chunks for source in sources}):
        alike = sorted((x for x in sources if x.schedule.num_chunks == chunks), key=lambda x: x.seconds)
        fixed = alike[0]
        size = fixed.schedule.num_stages, fixed.schedule.num_microbatches
        arguments = stage_search_arguments(fixed.program, fixed.partition)
        for limits in _limits([x.schedule for x in alike]):
            tell(f"Searching for a schedule of {size[0] * chunks} stages with {list(limits)} stashes in flight")
            arguments["in_flight"] = list(limits)
            maker = functools.partial(list_schedule, **arguments)
            schedule = schedule_makers.check_schedule(maker(*size), *size)
            candidate = build_candidate(
                fixed.request,
                traced,
                fixed.partition,
                schedule,
                fixed.stage_placement,
                fixed.program.stages,
                maker=maker,
            )
            if candidate.runtime.name == "mpmd" and not any(_dominates(other, candidate) for other in best):
                best.append(candidate)
    return best[len(candidates) :]


def _dominates(other: Candidate, candidate: Candidate) -> bool:
    """Return whether another candidate is shorter or about as short, and holds no more bytes of stashes."""
    about = (1 - SHORTER) * other.seconds
    return about <= candidate.seconds and other.waiting_bytes <= candidate.waiting_bytes


def _limits(schedules: Sequence[Schedule]) -> Iterator[tuple[int, ...]]:
    """Yield the most stashes of each device: those of the first of some tables, and the fewest of any.

    With several stages on a device it is a stash of each for as many micro-batches as there are devices: as many bytes
    as zero-bubble holds with one.
    """
    first, *_ = schedules
    if first.num_chunks > 1:
        yield (first.total_stages,) * first.num_stages
        return
    rows = [tuple(schedule.in_flight(d) for d in range(schedule.num_stages)) for schedule in schedules]
    yield from dict.fromkeys((rows[0], min(rows, key=sum)))
