"""Schedules as CSV, in the notation of torch's pipelining: a row for each device, ``stage kind micro-batch`` in a cell.

    0F0,0F1,,0B0,,0B1
    ,1F0,1B0,1F1,1B1,

A tick with several actions takes as many columns.
"""

import csv
import io
import re

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.ordered import from_orders
from jaxpipe.schedules.table import Action, Kind, Schedule


#: Characters of a file that is read, micro-batches in it, and stages: far beyond any real schedule.
LARGEST_TEXT, LARGEST_NUMBER = 16 * 2**20, 2**20


def to_csv(schedule: Schedule) -> str:
    """One action in a cell; a tick with several takes as many columns.

    Example:
      >>> from jaxpipe.schedules import one_f_one_b
      >>> print(to_csv(one_f_one_b(2, 2)), end="")
      0F0,0F1,,0B0,,0B1
      ,1F0,1B0,1F1,1B1,
    """
    p = schedule.num_stages
    rows: list[list[str]] = [[] for _ in range(p)]
    for tick in schedule.ticks:
        width = max(len(actions) for actions in tick)
        for s, actions in enumerate(tick):
            cells = [f"{a.chunk * p + s}{a.kind.value}{a.microbatch}" for a in actions]
            rows[s] += [*cells, *[""] * (width - len(cells))]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def from_csv(text: str, name: str = "csv") -> Schedule:
    """A schedule from the order of the cells in each row; where a row has gaps does not matter.

    Stage ``s`` must be in row ``s`` modulo the number of rows.

    Raises:
      ScheduleError: if a cell cannot be read, or the schedule breaks a rule; with the row and the cell.

    Example:
      >>> from_csv("0F0,0B0").num_microbatches
      1
    """
    if len(text) > LARGEST_TEXT:
        raise ScheduleError(f"{name}: {len(text)} characters; a schedule has at most {LARGEST_TEXT}.")
    try:
        rows = [row for row in csv.reader(io.StringIO(text)) if row]
    except csv.Error as error:
        raise ScheduleError(f"{name}: this is no CSV: {error}.") from error
    if not rows:
        raise ScheduleError(f"{name}: there are no rows; each device has one.")
    orders = [[_action(name, d, len(rows), cell) for cell in row if cell.strip()] for d, row in enumerate(rows)]
    actions = [a for order in orders for a in order]
    if not actions:
        raise ScheduleError(f"{name}: all cells are empty.")
    size = 1 + max(a.microbatch for a in actions), 1 + max(a.chunk for a in actions)
    if size[0] * size[1] > len(actions):
        raise ScheduleError(
            f"{name}: {len(actions)} actions cannot be all work of {size[0]} micro-batches in {size[1]} stages of a "
            "device."
        )
    schedule = from_orders(name, orders, *size)
    schedule.validate()
    return schedule


def _action(name: str, device: int, devices: int, cell: str) -> Action:
    found = re.fullmatch(r"(\d{1,9})([FBIW])(\d{1,9})", cell.strip())
    if not found:
        raise ScheduleError(
            f"{name}: row {device} has {cell.strip()!r}; a cell is a stage, one of F, B, I, W, and a micro-batch: 0F0."
        )
    stage, microbatch = int(found[1]), int(found[3])
    if stage % devices != device or max(stage, microbatch) > LARGEST_NUMBER:
        raise ScheduleError(
            f"{name}: row {device} has {cell.strip()}; with {devices} rows, stage {stage} belongs to row "
            f"{stage % devices}, and numbers are at most {LARGEST_NUMBER}."
        )
    return Action(Kind(found[2]), microbatch, stage // devices)
