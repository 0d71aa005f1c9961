"""Seconds of every operator by real runs on one device."""

import dataclasses
import datetime
import os
from collections.abc import Iterable

import numpy as np

from jaxpipe.array_types import Device, TensorNumber
from jaxpipe.costs.equal_operators import averaged, equal_operators
from jaxpipe.costs.operator_groups import cut_groups, group_programs, group_vjp
from jaxpipe.costs.profile import Measurement, Profile
from jaxpipe.costs.roofline import analytic
from jaxpipe.costs.timing import TimedProgram, time_programs
from jaxpipe.residuals.backward_graph import BackwardGraph
from jaxpipe.targets.known import target_of
from jaxpipe.text.progress import progress


@progress("Profiling the operators")
def measure(backward_graph: BackwardGraph, device: Device, *, held: Iterable[TensorNumber] = ()) -> Profile:
    """Compile and run the operators of a program in groups, each group's forward and backward program by itself.

    The seconds of a group are those of its program less what it takes to start any program; they are given to its
    operators in proportion to the roofline estimate. Groups with side effects are not run, only estimated.

    Equal operators have the same seconds, whichever groups they are in: the median, over the rounds in which everything
    is measured, of what all of them take on the average.
    """
    held = tuple(held)
    estimate = analytic(backward_graph, target_of(device).rates, held=held, device_kind=device.device_kind)
    estimated = np.array([estimate.forward_seconds, estimate.backward_seconds])
    programs: list[tuple[TimedProgram, Device]] = []
    shares: list[np.ndarray] = []  # of each program by direction and operator
    given = estimated.copy()
    for group in cut_groups(backward_graph.source, estimate.seconds):
        if any(backward_graph.source.operators[k].has_effects for k in group):
            continue
        given[:, group] = 0.0
        for direction, program in enumerate(group_programs(group_vjp(backward_graph, group, held))):
            parts = estimated[direction, group]
            share = np.zeros_like(estimated)
            share[direction, group] = parts / parts.sum() if parts.any() else 1 / len(group)
            programs.append((program, device))
            shares.append(share)
    seconds = given + np.tensordot(time_programs(programs), np.reshape(shares, (-1, *estimated.shape)), axes=1)
    for direction, kinds in enumerate(equal_operators(backward_graph)):
        seconds[:, direction] = averaged(seconds[:, direction], kinds)
    low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75), axis=0)
    spread = (high - low) / 2
    measurement = Measurement(
        time=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
        cores=os.cpu_count() or 1,
        spread=float(spread.sum() / median.sum()) if median.any() else 0.0,
    )
    return dataclasses.replace(
        estimate,
        forward_seconds=tuple(median[0]),
        backward_seconds=tuple(median[1]),
        forward_spread=tuple(spread[0]),
        backward_spread=tuple(spread[1]),
        source="measured",
        measurement=measurement,
    )
