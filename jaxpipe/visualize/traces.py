"""Timelines as trace files, for the viewers at https://ui.perfetto.dev and chrome://tracing."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import Timeline
from jaxpipe.schedules.table import KIND_NAMES
from jaxpipe.text.value_text import shown


#: Shorter gaps between two actions are rounding, as a share of the step.
_SHORTEST_WAIT = 1e-9


def trace_json(timelines: Timeline | Mapping[str, Timeline]) -> str:
    """Timelines in Chrome's trace event format: a process for each, in it a row for each device.

    Actions are named as in the table of the schedule (``F3``, ``B3``, ``I3``, ``W3``, and ``F3'1`` for chunk 1); where
    a device waits, the row has a slice ``wait``. Times are in microseconds from the start of the step.

    Args:
      timelines: one, or several by the name to show, which stand below each other on one time axis.

    Raises:
      ScheduleError: if they are something else.

    Example:
      >>> from jaxpipe.schedules import one_f_one_b
      >>> timeline = one_f_one_b(2, 2).simulate(forward=1e-3, backward_input=1e-3, backward_weight=1e-3)
      >>> events = json.loads(trace_json({"simulated": timeline}))["traceEvents"]
      >>> [(e["name"], e["ts"]) for e in events if e["ph"] == "X" and e["tid"] == 1]
      [('wait', 0.0), ('F0', 1000.0), ('B0', 2000.0), ('F1', 4000.0), ('B1', 5000.0), ('wait', 7000.0)]
    """
    if isinstance(timelines, Timeline):
        timelines = {"step": timelines}
    if not isinstance(timelines, Mapping) or not all(isinstance(value, Timeline) for value in timelines.values()):
        raise ScheduleError(
            f"timelines is {shown(timelines)}; it must be a timeline, or a dictionary of some by the name to show: "
            "{'predicted': pipeline.timeline()}."
        )
    events: list[dict[str, object]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append(_label("process_name", process, 0, name))
        for device in range(len(timeline.peak_in_flight)):
            events.append(_label("thread_name", process, device, f"device {device}"))
            events += _row(timeline, process, device)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def write_trace(path: str | os.PathLike[str], timelines: Timeline | Mapping[str, Timeline]) -> None:
    """Write ``trace_json(timelines)`` to a file."""
    Path(path).write_text(trace_json(timelines), encoding="utf-8")


def _label(what: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _row(timeline: Timeline, process: int, device: int) -> list[dict[str, object]]:
    """Slices of one device, gaps included."""

    def add(name: str, category: str, start: float, end: float, **args: int) -> None:
        times = {"ts": round(1e6 * start, 3), "dur": round(1e6 * (end - start), 3)}
        events.append({"name": name, "cat": category, "ph": "X", "pid": process, "tid": device, **times, "args": args})

    events: list[dict[str, object]] = []
    now, shortest = 0.0, _SHORTEST_WAIT * timeline.makespan
    for span in sorted((s for s in timeline.spans if s.stage == device), key=lambda span: span.start):
        if span.start - now > shortest:
            add("wait", "wait", now, span.start)
        kind, microbatch, chunk = span.action
        add(str(span.action), KIND_NAMES[kind], span.start, span.end, microbatch=microbatch, chunk=chunk)
        now = span.end
    if timeline.makespan - now > shortest:
        add("wait", "wait", now, timeline.makespan)
    return events
