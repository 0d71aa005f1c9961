"""Schedules as CSV, in the notation of torch's pipelining: a row for each device, ``stage kind micro-batch`` in a cell.

    0F0,0F1,,0B0,,0B1
    ,1F0,1B0,1F1,1B1,

A tick with several actions takes as many columns. Stages may be on any device: the stages of a row are its chunks. Of
torch's DualPipeV a cell ``(0F7;7B3)OVERLAP_F_B`` is read as two, one after the other.
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
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_PARTS = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


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

    The stages of a row are the chunks of a device, in their order. Where some backward passes come in two parts and
    others as a whole, as in torch's zero-bubble and DualPipeV, the whole ones are read as two parts.

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
    cells = [[_work(name, d, part) for cell in row for part in _parts(cell)] for d, row in enumerate(rows)]
    works = [work for row in cells for work in row]
    if not works:
        raise ScheduleError(f"{name}: all cells are empty.")
    stages = tuple(tuple(sorted({work.chunk for work in row})) for row in cells)
    size = 1 + max(work.microbatch for work in works), max(map(len, stages))
    if size[0] * size[1] > len(works):
        raise ScheduleError(
            f"{name}: {len(works)} actions cannot be all work of {size[0]} micro-batches in {size[1]} stages of a "
            "device."
        )
    splits = any(work.kind is Kind.BACKWARD_INPUT for work in works)
    orders = [
        [
            Action(kind, work.microbatch, row.index(work.chunk))
            for work in order
            for kind in (_PARTS if splits and work.kind is Kind.BACKWARD else (work.kind,))
        ]
        for order, row in zip(cells, stages, strict=True)
    ]
    schedule = from_orders(name, orders, *size, stages)
    schedule.validate()
    return schedule


def _parts(cell: str) -> tuple[str, ...]:
    """Return a cell, or the two that overlap in it."""
    match = _OVERLAP.fullmatch(cell)
    return match.groups() if match else (cell,)


def _work(name: str, row: int, cell: str) -> Action:
    """Return the work of a cell, with the stage in place of the chunk."""
    match = _CELL.fullmatch(cell)
    if not match:
        raise ScheduleError(
            f"{name}: row {row} has {cell[:60]!r}; a cell is a stage, one of F, B, I, W, and a micro-batch: 0F0."
        )
    work = Action(Kind(match[2]), int(match[3]), int(match[1]))
    if max(work.chunk, work.microbatch) > LARGEST_NUMBER:
        raise ScheduleError(f"{name}: row {row} has {cell}; numbers are at most {LARGEST_NUMBER}.")
    return work
