"""A backward pass as XLA:CPU needs it: its steps in groups, each behind a barrier.

XLA:CPU drops all optimization barriers and then orders operators breadth-first, so that everything that follows from
the stash and the parameters alone would run first. A barrier is here a conditional whose predicate is known at run time
only, and not before the barrier before it is passed: what is inside runs neither earlier nor together with what is
outside.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxpipe import _compat
from jaxpipe.array_types import Array, PyTree, TensorNumber
from jaxpipe.residuals.backward_graph import BackwardOp
from jaxpipe.residuals.rematerialize import is_heavy, parts
from jaxpipe.residuals.run_steps import Walk


T = TypeVar("T")


@dataclass(eq=False)
class _Group:
    """Steps behind a barrier.

    Attributes:
      steps: in the order in which they run.
      keep: tensors whose cotangents stay.
      written, consumed: tensors whose cotangents it makes, and whose it reads last.
      rematerialized: forward tensors that it decodes or computes again, and later groups may read.
      read: forward tensors that it reads.
    """

    steps: Sequence[BackwardOp]
    keep: frozenset[TensorNumber]
    written: set[TensorNumber] = field(default_factory=set)
    consumed: set[TensorNumber] = field(default_factory=set)
    rematerialized: set[TensorNumber] = field(default_factory=set)
    read: set[TensorNumber] = field(default_factory=set)


def run_behind_barriers(walk: Walk, steps: Sequence[BackwardOp]) -> frozenset[TensorNumber]:
    """Run backward steps as ``walk.run`` does, but in groups, each behind a barrier."""
    graph, received, rematerializer = walk.backward_graph, walk.received, walk.rematerializer
    tensors, zero = (graph.source.tensors, graph.graph.tensors), rematerializer.zero
    assert zero is not None
    groups = _outline(walk, steps)
    for k, group in enumerate(groups):
        shared = group.rematerialized & set().union(*(later.read for later in groups[k + 1 :]))
        results = sorted(group.written), sorted(shared)
        avals = [[of[t].aval for t in ts] for of, ts in zip(tensors, results, strict=True)]
        (cotangents, values), zero = _barrier(functools.partial(_run_group, walk, group, *results), avals, zero)
        for t in group.consumed:
            received.pop(t, None)
        received.update(zip(results[0], cotangents, strict=True))
        rematerializer.values.update(zip(results[1], values, strict=True))
    return frozenset()


def _run_group(
    walk: Walk, group: _Group, written: Sequence[TensorNumber], shared: Sequence[TensorNumber]
) -> tuple[list[Array], list[Array]]:
    """Return cotangents and forward tensors that a group makes; ``walk`` stays as it is."""
    rematerializer, received = walk.rematerializer.copy(), dict(walk.received)
    replace(walk, received=received, rematerializer=rematerializer, keep=group.keep).run(group.steps)
    return [received[t] for t in written], [rematerializer.values[t] for t in shared]


def _barrier(function: Callable[[], T], avals: PyTree, zero: Array) -> tuple[T, Array]:
    """Return the results of a function, arrays like ``avals``, behind a barrier, and the zero for the next one."""

    def nothing() -> tuple[PyTree, Array]:
        return jax.tree.map(_compat.zeros, tuple(avals)), jnp.ones_like(zero)

    return jax.lax.cond(zero == 0, lambda: (function(), zero), nothing)


def _outline(walk: Walk, steps: Sequence[BackwardOp]) -> list[_Group]:
    """Return the groups in which some step has a cotangent."""
    rematerializer, received = walk.rematerializer, set(walk.received)
    grouped, known, groups = _grouped(steps), set(rematerializer.values), []
    for k, members in enumerate(grouped):
        kept = walk.keep.union(*(step.cotangents_in for later in grouped[k + 1 :] for step in later))
        group, here = _Group(members, kept), set(known)
        for step in members:
            present = received.intersection(step.cotangents_in)
            if not present:
                continue
            program, loads = rematerializer.sources(step, here)
            group.read.update(step.needs, *(op.inputs for op in program))
            new = {*loads, *(t for op in program for t in op.outputs)}
            group.rematerialized.update(filter(rematerializer.is_kept, new))
            here |= new
            received.difference_update(present - kept)
            received.update(step.cotangents_out)
            group.written = (group.written - (present - kept)) | set(step.cotangents_out)
            group.consumed |= present - kept
        known |= group.rematerialized
        if group.written:  # some step has a cotangent
            groups.append(group)
    return groups


def _grouped(steps: Iterable[BackwardOp]) -> list[list[BackwardOp]]:
    """Return steps in groups that run behind a barrier each.

    The cotangents of a product's operands have a barrier each, so that what one of them needs is gone before the other
    is written; that of the second operand, which mostly is the weights, comes first.
    """
    grouped: list[list[BackwardOp]] = [[]]
    for step in steps:
        if is_heavy(step):
            grouped += [[part] for part in parts(step)]
        else:
            grouped[-1].append(step)
    return [group for group in grouped if group]
