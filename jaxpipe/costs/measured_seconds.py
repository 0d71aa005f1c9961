"""Seconds of every operator by real runs on one device, in groups that are large enough to time.

One operator alone is not what XLA runs: it fuses cheap arithmetic with what is before and after it. A group ends with
a product or a loop, whose operand is in memory anyway; what leads from the one before it to this operand (a
normalization, an activation) is in the same group, where its backward pass recomputes it.
"""

import dataclasses
import datetime
import itertools
import os
from collections.abc import Iterator, Sequence

import numpy as np

from jaxpipe import _compat
from jaxpipe.array_types import Array, Device, TensorNumber
from jaxpipe.costs.equal_operators import averaged, equal_operators
from jaxpipe.costs.profile import Measurement, Profile
from jaxpipe.costs.timing import TimedProgram, time_programs
from jaxpipe.graph.graph import Graph
from jaxpipe.graph.op_cost import is_product, weight
from jaxpipe.residuals import vjp_program
from jaxpipe.residuals.backward_graph import BackwardGraph
from jaxpipe.residuals.codecs.keep import KEEP
from jaxpipe.residuals.vjp_program import VJPProgram
from jaxpipe.text.progress import progress


#: A group takes at least this share of the estimated time, so that there are not more than about as many.
SMALLEST_SHARE = 1 / 48


@progress("Profiling the operators")
def measure(
    backward_graph: BackwardGraph, device: Device, estimate: Profile, held: Sequence[TensorNumber] = ()
) -> Profile:
    """Compile and run the operators of a program in groups, each group's forward and backward program by itself.

    The seconds of a group are those of its program less what it takes to start any program; they are given to its
    operators in proportion to an ``estimate``. Groups with side effects are not run, only estimated.

    Equal operators have the same seconds, whichever groups they are in: the median, over the rounds in which everything
    is measured, of what all of them take on the average.
    """
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


def cut_groups(graph: Graph, estimates: Sequence[float]) -> list[range]:
    """Ranges of operators, each operator in exactly one; of the estimated seconds only the proportions count."""
    least = SMALLEST_SHARE * sum(estimates)
    groups, start, spent = [], 0, 0.0
    for k, op in enumerate(graph.operators):
        if op.has_effects and start < k:
            groups.append(range(start, k))
            start = k
        spent += estimates[k]
        ends = is_product(op) or (weight(op) is None and bool(_compat.inner_programs(op.equation)))
        if op.has_effects or (ends and spent >= least):
            groups.append(range(start, k + 1))
            start, spent = k + 1, 0.0
    if start < len(graph.operators):
        if groups and spent < least and not graph.operators[start - 1].has_effects:
            start = groups.pop().start
        groups.append(range(start, len(graph.operators)))
    return groups


def group_vjp(backward_graph: BackwardGraph, operators: range, held: Sequence[TensorNumber] = ()) -> VJPProgram:
    """Return the forward and the backward program of a group; ``held`` inputs are kept alive anyway."""
    part = backward_graph.source.section(operators.start, operators.stop, passing=False)
    with_cotangent = {t for step in backward_graph.steps for t in (*step.cotangents_in, *step.cotangents_out)}
    # An input of the group is stored once, whoever needs it; often it is the result of the product before it.
    return vjp_program.build(
        part,
        [t for t in part.inputs if t in with_cotangent],
        held=[*held, *part.inputs],
        seeds=[t for t in part.outputs if t in with_cotangent],
    )


def group_programs(vjp: VJPProgram) -> Iterator[TimedProgram]:
    """The forward program, and the backward program if there is one.

    What is stored as it is, and is an operand or a result of the vjp anyway, is not written a second time.
    """
    graph, source, stored = vjp.graph, vjp.backward_graph.source, vjp.plan.stored
    boundary = {*graph.inputs, *graph.outputs}
    written = [t not in boundary or vjp.plan.formats[t] != KEEP for t in stored]

    def forward(*inputs: Array) -> tuple[list[Array], list[tuple[Array, ...]]]:
        outputs, stash = vjp_program.forward(vjp, inputs)
        return outputs, list(itertools.compress(stash, written))

    yield TimedProgram(forward, tuple(graph.tensors[t].aval for t in graph.inputs))
    if not vjp.backward_graph.steps:
        return
    received = {t for step in vjp.backward_graph.steps for t in step.cotangents_in}
    seeds = [k for k, t in enumerate(source.outputs) if t in received]

    def backward(
        parameters: Sequence[Array], stash: Sequence[tuple[Array, ...]], cotangents: Sequence[Array]
    ) -> list[Array | None]:
        given: list[Array | None] = [None] * len(source.outputs)
        for k, cotangent in zip(seeds, cotangents, strict=True):
            given[k] = cotangent
        return vjp_program.backward(vjp, parameters, stash, given, barriers=True)

    yield TimedProgram(
        backward,
        (
            [graph.tensors[t].aval for t in vjp.parameters],
            list(vjp.stash_avals),
            [source.tensors[source.outputs[k]].aval.to_tangent_aval() for k in seeds],
        ),
    )
