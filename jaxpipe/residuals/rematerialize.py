"""Values of forward tensors during a backward pass: decoded or recomputed when first needed, then kept.

XLA must neither decode nor recompute before the backward pass has come that far, else a stash saves nothing. So what
is loaded from the stash is tied to the cotangents of the step that needs it. XLA:CPU drops such barriers; there steps
may run behind barriers (``jaxpipe.residuals.xla_cpu``).
"""

import copy
import itertools
import math
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jaxpipe import _compat
from jaxpipe.array_types import Array, TensorNumber
from jaxpipe.graph.graph import Graph, Operator, run
from jaxpipe.graph.op_cost import is_product, weight
from jaxpipe.graph.primitives import COSTLY, ELEMENTWISE, LOOPS, PRODUCTS
from jaxpipe.residuals.backward_graph import BackwardOp, restricted
from jaxpipe.residuals.choose_formats import ResidualPlan, fallback, recomputation, sums_of_branches
from jaxpipe.residuals.codecs.keep import KEEP
from jaxpipe.residuals.stored_formats import decode, has_overflowed
from jaxpipe.targets.building import current


#: Operators whose backward program takes its operands as whole arrays.
_UNFUSED = LOOPS | {"dot_general"}

#: A barrier begins with each of these: cotangents that one of them reads are written to memory anyway.
_HEAVY = _UNFUSED | PRODUCTS


class Rematerializer:
    """The values that steps need, from the parameters and the stash of a stage.

    Args:
      graph, plan: the stage's operators and what is stored.
      parameters: values by tensor number.
      stash: the parts of each stored tensor.
      barriers: steps run behind barriers, where XLA needs them.
    """

    def __init__(
        self,
        graph: Graph,
        plan: ResidualPlan,
        parameters: dict[TensorNumber, Array],
        stash: dict[TensorNumber, Sequence[Array]],
        barriers: bool,
    ):
        # Where shards gather parameters, these are loaded when they are needed, as what is stored is: else XLA would
        # gather them once, and keep that.
        loaded = parameters if any(op.is_collective for op in graph.operators) else {}
        self._graph, self._stash = graph, {**stash, **{t: (value,) for t, value in loaded.items()}}
        self._plan = ResidualPlan({**plan.formats, **dict.fromkeys(loaded, KEEP)})
        self._given = {**graph.constants, **({} if loaded else parameters)}
        self._loaded: dict[TensorNumber, Array] = {}
        self._rerun: set[TensorNumber] = set()
        self.values = dict(self._given)
        #: Whether a budget asks for an order that XLA keeps to, although shards could send and compute at once.
        self.ordered = barriers and current().order == "stepwise" and _compat.is_in_shard_map()
        #: A zero that XLA does not know, if steps run behind barriers.
        self.zero = None
        if barriers and current().order == "grouped":
            self.zero = _compat.hidden_zero([*parameters.values(), *itertools.chain.from_iterable(stash.values())])

    def copy(self) -> "Rematerializer":
        """Return the same, for steps behind a barrier: what they rematerialize is lost outside."""
        other = copy.copy(self)
        other.values, other._loaded = dict(self.values), {}
        return other

    def sources(self, step: BackwardOp, known: Iterable[TensorNumber]) -> tuple[list[Operator], list[TensorNumber]]:
        """Return the operators to run and the tensors to load before a step."""
        return recomputation(self._graph, step.needs, self._plan, known)

    def is_kept(self, t: TensorNumber) -> bool:
        """Return whether a rematerialized tensor is passed to steps behind later barriers.

        A tensor that XLA would compute again for each reader is rematerialized again; a plain one needs no copy.
        """
        if t in self._plan.codecs:
            return not self._plan.codecs[t].fuses
        producer = self._graph.producers.get(t)
        return producer is not None and (producer.name in COSTLY or producer.name not in ELEMENTWISE)

    def fetch(self, step: BackwardOp, after: Array | None) -> list[Array]:
        """Values of the tensors that a backward step needs, not before the cotangent ``after``, if it waits for one."""
        after = after if self.zero is None else None
        missing = [t for t in step.needs if t not in self.values]
        program: list[Operator] = []
        if missing:
            program, loads = self.sources(step, self.values)
            parts = {t: list(self._stash[t]) for t in loads}
            if after is not None:
                tied = iter(_compat.join([part for t in loads for part in parts[t]], after))
                parts = {t: [next(tied) for _ in parts[t]] for t in loads}
            for t in loads:
                hidden = parts[t] if after is None else [_compat.disguise(part, after) for part in parts[t]]
                self.values[t] = self._restore(t, hidden)
                if self._plan.formats[t] == KEEP:
                    (self._loaded[t],) = parts[t]
            run(program, self.values)
        # What does not fuse with its operands would have to copy a disguised one.
        first = self._loaded if step.name in _UNFUSED else {}
        needs = [first.get(t, self.values[t]) for t in step.needs]
        if current().order == "joined":
            self._forget(step, program)
        return needs

    def load(
        self, steps: Iterable[BackwardOp], cotangents: Sequence[Array], *, always: bool = False
    ) -> Sequence[Array]:
        """Load from the stash what some steps need, together with cotangents that are written to memory anyway.

        Args:
          steps: that follow.
          cotangents: that are waited for.
          always: they wait for each other also if the steps need nothing.

        Returns:
          The cotangents. Whoever reads them makes XLA keep to the order: it drops what nobody reads from a barrier.
        """
        known = set(self.values)
        loads, again = dict[TensorNumber, None](), dict[TensorNumber, None]()
        for step in steps:
            program, read = self.sources(step, known)
            loads.update(dict.fromkeys(read))
            inputs = (*step.needs, *(t for op in program for t in op.inputs))
            again.update(dict.fromkeys(t for t in inputs if t in self._rerun))
            known |= {*read, *(t for op in program for t in op.outputs)}
        if not loads and not again:
            return _compat.join(cotangents) if always else cotangents
        named = [(t, part) for t in loads for part in self._stash[t]] + [(t, self.values[t]) for t in again]
        parts = [part for _, part in named]
        flat = [jax.lax.reshape(part, self._as_written(t, part)) for t, part in named]
        tied = _compat.join([*flat, *cotangents])
        restored = iter([jax.lax.reshape(x, part.shape) for x, part in zip(tied, parts, strict=False)])
        for t in loads:
            self.values[t] = self._restore(t, [next(restored) for _ in self._stash[t]])
        for t, value in zip(again, restored, strict=True):
            self.values[t] = value
            self._loaded.pop(t, None)
        return tied[len(parts) :]

    def _forget(self, step: BackwardOp, program: Sequence[Operator]) -> None:
        """Forget what follows element by element from products that were run again, and keep their results.

        Each product's steps compute it from these anew; kept, it would be in memory until the last of them. The same
        holds for what a convolution reads and follows from stored tensors: parts of an activation, which its derivative
        reads as well, would be written and wait for the cotangent of the convolution's input.
        """
        convolves = step.name == "conv_general_dilated"
        # Attention scores by themselves: XLA keeps less if both of their readers share the softmax. Sharded products:
        # devices would add some up twice.
        if self._graph.stage_shape or (not convolves and sum(is_product(op) for op in program) < 2):
            return
        kept = sums_of_branches(self._graph, self._graph.derived_from_parameters)
        if convolves:
            kept |= set(step.needs)  # nothing fuses with it: its operands are written to memory
        for op in program:
            for t in op.outputs:
                if weight(op) is not None and t not in kept:
                    del self.values[t]
                elif jax.dtypes.issubdtype(jax.typeof(self.values[t]).dtype, np.inexact):
                    self._rerun.add(t)
            if convolves:
                self._rerun.update(t for t in op.inputs if self._is_whole(t, op))

    def _is_whole(self, t: TensorNumber, op: Operator) -> bool:
        """Return whether a tensor is stored as it is, and not broadcast by an operator that reads it."""
        tensors = self._graph.tensors
        return self._plan.formats.get(t) == KEEP and tensors[t].size >= max(tensors[u].size for u in op.outputs)

    def _as_written(self, t: TensorNumber, part: Array) -> Sequence[int]:
        """Return the shape in which a GPU's matrix product writes a part of a stored tensor.

        XLA multiplies matrices, and takes any other shape for another name of the matrix. Behind a barrier it would not
        write over such a name what is computed from it element by element. Where a stage is sharded the shape stays: to
        merge a dimension that is split, devices would have to gather the array.
        """
        if self._graph.stage_shape:
            return part.shape
        producer = self._graph.producers.get(t)
        whole = part.shape == self._graph.tensors[t].shape and not any(_compat.split_dimensions(jax.typeof(part)))
        if not whole or producer is None or producer.name != "dot_general":
            return part.shape
        lhs = producer.equation.invars[0].aval
        (contracted, _), (batch, _) = producer.params["dimension_numbers"]
        first, second = len(batch), lhs.ndim - len(contracted)
        sides = part.shape[:first], part.shape[first:second], part.shape[second:]
        return [math.prod(side) for side in sides[0 if first else 1 :]]

    def _restore(self, t: TensorNumber, parts: Sequence[Array]) -> Array:
        """A stored tensor from its parts; one that did not fit, from tensors that are stored whole."""
        form, codec = self._graph.tensors[t].shape_and_type, self._plan.codecs[t]
        if not codec.may_overflow:
            return decode(parts, form, codec)

        def again() -> Array:
            program, leaves = fallback(self._graph, t, self._plan, self._given)
            values = dict(self._given)
            values.update((u, self._restore(u, self._stash[u])) for u in leaves)
            run(program, values)
            return values[t]

        return jax.lax.cond(has_overflowed(parts, codec), again, lambda: decode(parts, form, codec))


def is_heavy(step: BackwardOp | Operator) -> bool:
    """Return whether what a step or an operator reads is written to memory first, and nothing runs together with it."""
    return step.name in _HEAVY


def parts(step: BackwardOp) -> list[BackwardOp]:
    """A step in parts that run one after the other."""
    count = len(step.cotangents_out)
    if step.name not in PRODUCTS or len(set(step.cotangents_out)) < count:
        return [step]
    return [restricted(step, [k]) for k in range(count)]
