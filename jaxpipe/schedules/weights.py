"""Where versions of the weights are kept, in a schedule that updates them on the way."""

from dataclasses import dataclass

from jaxpipe.schedules.places import Stay, addresses
from jaxpipe.schedules.table import Kind, Schedule


@dataclass(frozen=True)
class WeightSlots:
    """Slots for versions of the weights, by device and tick.

    Attributes:
      count: slots of every device.
      forward, backward: the slot that the tick's work reads; 0 if there is none.
      newest: the slot of the version that an update at the tick's end starts from.
      updated: the slot that it writes; -1 if there is no update.
      last: by device, the slot with the weights after the last tick.
    """

    count: int
    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]
    newest: tuple[tuple[int, ...], ...]
    updated: tuple[tuple[int, ...], ...]
    last: tuple[int, ...]


def weight_slots(schedule: Schedule) -> WeightSlots:
    """A slot for every version, from the update that makes it to the last work that uses it or the next update.

    Example:
      >>> from jaxpipe.schedules import pipedream
      >>> weight_slots(pipedream(4, 8)).count
      4
    """
    assert schedule.versions is not None
    ticks, last_tick = len(schedule.ticks), len(schedule.ticks)
    rows: list[list[list[int]]] = [[], [], [], []]
    last, count = [], 1
    for s, versions in enumerate(schedule.versions):
        forward, backward = (schedule.when(s, kind) for kind in (Kind.FORWARD, Kind.BACKWARD))
        updates = [tick for j, tick in sorted(backward.items()) if (j + 1) % schedule.group == 0]
        made = [-1, *updates]
        until = [*updates, last_tick]
        for j, version in enumerate(versions):
            until[version] = max(until[version], backward[j])
        # What is made at the end of a tick may take the place of what is used in it for the last time.
        slots = addresses([Stay(first + 1, until[v]) for v, first in enumerate(made)])
        found = [[empty] * ticks for empty in (0, 0, 0, -1)]
        for j, version in enumerate(versions):
            found[0][forward[j]] = found[1][backward[j]] = slots[version]
        for number, tick in enumerate(updates):
            found[2][tick], found[3][tick] = slots[number], slots[number + 1]
        for row, values in zip(rows, found, strict=True):
            row.append(values)
        last.append(slots[-1])
        count = max(count, 1 + max(slots))
    forward, backward, newest, updated = (tuple(map(tuple, row)) for row in rows)
    return WeightSlots(count, forward, backward, newest, updated, tuple(last))
