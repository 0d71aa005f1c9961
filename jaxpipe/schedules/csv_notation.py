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


#: Characters of a file that is read, devices in it, micro-batches, and stages: far beyond any real schedule.
LARGEST_TEXT, LARGEST_DEVICES, LARGEST_NUMBER = 2**20, 2**12, 2**20

_CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_KINDS = {kind.value: kind for kind in Kind}


def to_csv(schedule: Schedule) -> str:
    """One action in a cell; a tick with several takes as many columns.

    Example:
      >>> from jaxpipe.schedules import one_f_one_b
      >>> print(to_csv(one_f_one_b(2, 2)), end="")
      0F0,0F1,,0B0,,0B1
      ,1F0,1B0,1F1,1B1,
    """
    rows: list[list[str]] = [[] for _ in schedule.stage_of]
    for tick in schedule.ticks:
        width = max(len(actions) for actions in tick)
        for s, actions in enumerate(tick):
            cells = [f"{schedule.stage(s, a.chunk)}{a.kind.value}{a.microbatch}" for a in actions]
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
    if not isinstance(text, str):
        raise ScheduleError(f"{name}: text is of type {type(text).__name__}; pass the text of the file, a str.")
    if len(text) > LARGEST_TEXT:
        raise ScheduleError(f"{name}: {len(text)} characters; a schedule has at most {LARGEST_TEXT}.")
    rows: list[list[str]] = []
    try:
        for row in filter(None, csv.reader(io.StringIO(text))):
            rows.append([stripped for cell in row if (stripped := cell.strip())])
            if len(rows) > LARGEST_DEVICES:
                raise ScheduleError(f"{name}: there are more than {LARGEST_DEVICES} rows; each device has one.")
    except csv.Error as error:
        raise ScheduleError(f"{name}: this is no CSV: {error}.") from error
    if not rows:
        raise ScheduleError(f"{name}: there are no rows; each device has one.")
    orders = [[_action(name, d, len(rows), cell) for cell in row] for d, row in enumerate(rows)]
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
    match = _CELL.fullmatch(cell)
    if not match:
        raise ScheduleError(
            f"{name}: row {device} has {cell[:60]!r}; a cell is a stage, one of F, B, I, W, and a micro-batch: 0F0."
        )
    stage, microbatch = int(match[1]), int(match[3])
    if stage % devices != device or max(stage, microbatch) > LARGEST_NUMBER:
        raise ScheduleError(
            f"{name}: row {device} has {cell}; with {devices} rows, stage {stage} belongs to row {stage % devices}, "
            f"and numbers are at most {LARGEST_NUMBER}."
        )
    return Action(_KINDS[match[2]], microbatch, stage // devices)
