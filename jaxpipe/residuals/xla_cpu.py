"""A backward pass as XLA:CPU needs it: its steps in groups, each behind a barrier.

XLA:CPU drops all optimization barriers and then orders operators breadth-first, so that everything that follows from
the stash and the parameters alone would run first. A barrier is here a conditional whose predicate is known at run time
only, and not before the barrier before it is passed: what is inside runs neither earlier nor together with what is
outside.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxpipe import _compat
from jaxpipe.array_types import Array, TensorNumber
from jaxpipe.residuals.backward_graph import BackwardOp
from jaxpipe.residuals.rematerialize import is_heavy, parts
from jaxpipe.residuals.run_steps import Walk


#: Arrays by tensor.
_Made = dict[TensorNumber, Array]


@dataclass(eq=False)
class _Group:
    """Steps behind a barrier.

    Attributes:
      steps: in the order in which they run.
      keep: tensors whose cotangents stay: results, and those that later groups read.
      written: of these, the tensors whose cotangents it makes.
      rematerialized: forward tensors that it decodes or computes again, and later groups may read.
      read: forward tensors that it reads.
    """

    steps: Sequence[BackwardOp]
    keep: frozenset[TensorNumber]
    written: set[TensorNumber] = field(default_factory=set)
    rematerialized: set[TensorNumber] = field(default_factory=set)
    read: set[TensorNumber] = field(default_factory=set)


@dataclass
class GroupedWalk(Walk):
    """A backward pass on a CPU, as far as it has come."""

    def run(self, steps: Sequence[BackwardOp]) -> frozenset[TensorNumber]:
        """Run all steps."""
        groups, zero = self._outline(steps), self.rematerializer.zero
        assert zero is not None
        for k, group in enumerate(groups):
            shared = group.rematerialized & set().union(*(later.read for later in groups[k + 1 :]))
            cotangents, values, zero = self._behind_barrier(group, shared, zero)
            self.received.update(cotangents)
            self.rematerializer.values.update(values)
        return frozenset()

    def _behind_barrier(self, group: _Group, shared: Iterable[TensorNumber], zero: Array) -> tuple[_Made, _Made, Array]:
        """Return the cotangents and the ``shared`` forward tensors of a group, and the zero for the next one."""

        def run() -> tuple[_Made, _Made, Array]:
            copied, received = self.rematerializer.copy(), dict(self.received)
            Walk(self.backward_graph, received, copied, group.keep, {}, self.weights, self.waits).run(group.steps)
            return {t: received[t] for t in group.written}, {t: copied.values[t] for t in shared}, zero

        def nothing() -> tuple[_Made, _Made, Array]:
            source, graph = self.backward_graph.source, self.backward_graph.graph
            cotangents = {t: _compat.zeros(source.tensors[t].aval) for t in sorted(group.written)}
            values = {t: _compat.zeros(graph.tensors[t].aval) for t in sorted(shared)}
            return cotangents, values, jnp.ones_like(zero)

        return jax.lax.cond(zero != 0, nothing, run)  # the last branch says which results are of weak type

    def _outline(self, steps: Sequence[BackwardOp]) -> list[_Group]:
        """Return the groups of steps, with what each makes and reads."""
        rematerializer, grouped = self.rematerializer, _grouped(steps)
        known, groups = set(rematerializer.values), list[_Group]()
        for k, members in enumerate(grouped):
            kept = self.keep.union(*(step.cotangents_in for later in grouped[k + 1 :] for step in later))
            group, here = _Group(members, kept), set(known)
            for step in members:
                program, loads = rematerializer.sources(step, here)
                group.read.update(step.needs, *(op.inputs for op in program))
                new = {*loads, *(t for op in program for t in op.outputs)}
                group.rematerialized.update(filter(rematerializer.is_kept, new))
                here |= new
                group.written.update(kept.intersection(step.cotangents_out))
            known |= group.rematerialized
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
