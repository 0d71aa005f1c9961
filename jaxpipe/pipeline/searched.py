"""Programs whose schedule was searched for with the seconds of their own stages."""

import functools
from collections.abc import Iterator, Sequence

from jaxpipe.pipeline import checks
from jaxpipe.pipeline.assemble import Draft, Traced, draft
from jaxpipe.pipeline.describe import stage_search_arguments
from jaxpipe.progress import tell
from jaxpipe.schedules import Schedule, list_schedule


#: By what share of its seconds a step must be shorter than with a fixed table: profiles are no better than this.
SHORTER = 0.01


def searched_drafts(traced: Traced, drafts: Sequence[Draft]) -> list[Draft]:
    """Return stage programs with searched schedules whose steps are shorter than those of fixed tables.

    Each is shorter than all drafts with as many stages on a device that hold no more stashes on any.

    Args:
      traced: what is planned.
      drafts: stage programs with fixed tables.
    """
    searched: list[Draft] = []
    for chunks in sorted({fixed.schedule.num_chunks for fixed in drafts}):
        alike = sorted((x for x in drafts if x.schedule.num_chunks == chunks), key=lambda x: x.seconds)
        fixed = alike[0]
        size = fixed.schedule.num_stages, fixed.schedule.num_microbatches
        arguments = stage_search_arguments(fixed.program, fixed.found)
        for limits in _limits([x.schedule for x in alike]):
            tell(f"Searching for a schedule of {size[0] * chunks} stages with {list(limits)} stashes in flight")
            arguments["in_flight"] = list(limits)
            maker = functools.partial(list_schedule, **arguments)
            schedule = checks.check_schedule(maker(*size), *size)
            if any(x.schedule.name == schedule.name for x in alike):
                continue
            candidate = draft(
                fixed.request, traced, fixed.found, schedule, fixed.stages, fixed.program.sections, maker=maker
            )
            least = min((x.seconds for x in alike if _keeps(x.schedule, limits)), default=float("inf"))
            if candidate.runtime.name == "mpmd" and candidate.seconds < (1 - SHORTER) * least:
                searched.append(candidate)
    return searched


def _limits(schedules: Sequence[Schedule]) -> Iterator[tuple[int, ...]]:
    """Yield the most stashes of each device: those of the first of some tables, and the fewest of any.

    The fewest are at most as many as there are stages: 1F1B's, or, with several stages on a device, as many bytes.
    """
    rows = [tuple(schedule.in_flight(d) for d in range(schedule.num_stages)) for schedule in schedules]
    fewest = tuple(min(n, schedules[0].total_stages) for n in min(rows, key=sum))
    yield from dict.fromkeys((rows[0], fewest))


def _keeps(schedule: Schedule, limits: Sequence[int]) -> bool:
    """Return whether a table holds at most so many stashes on each device."""
    return all(schedule.in_flight(d) <= limit for d, limit in enumerate(limits))
