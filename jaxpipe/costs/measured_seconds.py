"""Seconds of every operator by real runs on one device."""

import collections
import dataclasses
import datetime
import os
import re
from collections.abc import Iterable, Sequence

import jax

from jaxpipe.array_types import Device, TensorNumber
from jaxpipe.costs.device_rates import rates_of
from jaxpipe.costs.operator_groups import Program, cut_groups, group_programs, group_vjp
from jaxpipe.costs.profile import Measurement, Profile
from jaxpipe.costs.roofline import analytic
from jaxpipe.costs.timing import Timing, on_device, time_program
from jaxpipe.residuals.backward_graph import BackwardGraph
from jaxpipe.text.progress import progress, track


#: Random keys are folded with a hash of the module path, so that equal layers differ in these constants.
_KEY_NUMBER = re.compile(r"(?<=dense<)\d+(?=> : tensor<ui32>)")


@progress("Profiling the operators")
def measure(backward_graph: BackwardGraph, device: Device, *, held: Iterable[TensorNumber] = ()) -> Profile:
    """Compile and run the operators of a program in groups, each group's forward and backward program by itself.

    Groups whose programs are equal are run once. The seconds of a group are those of its program less what it takes to
    start any program; they are given to its operators in proportion to the roofline estimate. Groups with side
    effects are not run, only estimated. No more than the operands of one group are on the device at a time.
    """
    held = tuple(held)
    estimate = analytic(backward_graph, rates_of(device), held=held, device_kind=device.device_kind)
    groups = cut_groups(backward_graph.source, estimate.seconds)
    stopwatch = Stopwatch(device)
    columns: dict[str, list[float]] = collections.defaultdict(list)
    for group in track(groups, "Profiling groups of operators"):
        shares = [times[group.start : group.stop] for times in (estimate.forward_seconds, estimate.backward_seconds)]
        if any(backward_graph.source.operators[k].has_effects for k in group):
            timings = [Timing(sum(share), 0.0) for share in shares]
        else:
            timings = [stopwatch.time(p) for p in group_programs(group_vjp(backward_graph, group, held))]
        timings += [Timing(0.0, 0.0)] * (2 - len(timings))
        for name, share, timing in zip(("forward", "backward"), shares, timings, strict=True):
            columns[f"{name}_seconds"] += _split(timing.median, share)
            columns[f"{name}_spread"] += _split(timing.spread, share)
    measured = {name: tuple(values) for name, values in columns.items()}
    spread = sum(measured["forward_spread"] + measured["backward_spread"])
    whole = sum(measured["forward_seconds"] + measured["backward_seconds"])
    measurement = Measurement(
        time=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
        cores=os.cpu_count() or 1,
        spread=spread / whole if whole else 0.0,
    )
    return dataclasses.replace(estimate, **measured, source="measured", measurement=measurement)


class Stopwatch:
    """Times programs on a device, each text once; less what it takes to start any program."""

    def __init__(self, device: Device):
        self._device = device
        self._seen: dict[str, Timing] = {}
        self._start = 0.0
        self._start = self.time(Program(lambda x: x + 1, (jax.ShapeDtypeStruct((), "float32"),))).median

    def time(self, program: Program) -> Timing:
        """Compile and run a program; what equals one before it is not run again."""
        arguments = on_device(program.arguments, self._device)
        lowered = jax.jit(program.function).lower(*arguments)
        text = _KEY_NUMBER.sub("", lowered.as_text())
        if text not in self._seen:
            median, spread = time_program(lowered, arguments, self._device)
            self._seen[text] = Timing(max(0.0, median - self._start), spread)
        return self._seen[text]


def _split(total: float, proportions: Sequence[float]) -> list[float]:
    """The total in the given proportions; in equal parts if they are all zero."""
    whole = sum(proportions)
    return [total * p / whole if whole else total / len(proportions) for p in proportions]
