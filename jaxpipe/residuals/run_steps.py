"""The steps of a backward pass, run one after the other in an order that XLA keeps to.

XLA:CPU runs whatever it can as early as it can: there each step's values wait for its cotangent. So they do on a TPU
after the first product; its arrays lie in tiles: there a barrier across kernels, or another shape behind it, is a copy.
Within a budget, in a ``shard_map``, gradients much smaller than their operands are made there before anything else.

A GPU's scheduler puts off what nobody waits for, and whatever writes more than it frees, for as long as that keeps
arrays alive. There

- a product's values wait for its cotangents, and those of all steps up to the next product for its results, which are
  in memory in any case: a barrier amid an elementwise chain would cut its kernel in two;
- the next product waits for gradients of weights, for sums of cotangents, and for the parts of a cotangent that is
  split among several tensors: put off, they would keep all that they follow from;
- in a sharded stage it waits for complete sums only, each of which devices add up at once;
- in a ``shard_map`` it waits for a gradient before devices add it up: a barrier ties what varies over the same axes;
- the gradient of a convolution's kernel comes before the cotangent of its input: what it alone reads is then gone, and
  what the steps behind it read is computed anew from what is stored;
- a gradient much larger than what it follows from comes last. A convolution writes it in a layout of its own first, and
  until then its place serves other arrays.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxpipe import _compat
from jaxpipe.array_types import Array, TensorNumber
from jaxpipe.residuals.backward_graph import BackwardGraph, BackwardOp, divided
from jaxpipe.residuals.rematerialize import Rematerializer, is_heavy


#: By input, what is returned in place of its cotangent: a function of it that is called once it is complete.
Absorb = Mapping[TensorNumber, Callable[[Array], Array]]

#: A gradient comes last if it has more than so many times the bytes of what its product reads. A convolution's takes
#: its bytes twice, for a layout of its own; a matrix product's costs nothing but its place. On a TPU (see
#: ``Walk._is_due``) one is made at once if what its product reads has at least so many times its bytes.
_LATE = {"conv_general_dilated": 1, "dot_general": 8}


@dataclass
class Walk:
    """A backward pass, as far as it has come.

    Attributes:
      backward_graph: the graph of the steps.
      received: cotangents by tensor number; they change.
      rematerializer: gives the forward tensors that steps need.
      keep: tensors whose cotangents stay.
      absorb: what takes the place of some inputs' cotangents.
      weights: tensors that follow from parameters alone.
      waits: whether a step's values wait for its cotangents now; on a TPU they do once a product has run. Nothing is
        before the first that could keep arrays alive, and a barrier there would have the given cotangent written, that
        of the logits, say, which XLA computes within the product.
    """

    backward_graph: BackwardGraph
    received: dict[TensorNumber, Array]
    rematerializer: Rematerializer
    keep: frozenset[TensorNumber]
    absorb: Absorb
    weights: frozenset[TensorNumber]
    waits: bool = True

    def run(self, steps: Sequence[BackwardOp]) -> frozenset[TensorNumber]:
        """Run steps, in reverse order of the program; returns the inputs whose cotangents have been absorbed.

        Each gets some cotangent, of those that are given or of steps before it.
        """
        for step in steps:
            for t, value in zip(step.cotangents_out, self.results(step), strict=True):
                self.receive(t, value)
        return frozenset()

    def results(self, step: BackwardOp) -> list[Array]:
        """Run a step."""
        needs = self.rematerializer.fetch(step, self.awaited_by(step))
        self.waits |= is_heavy(step)
        seeds = self.take(step)
        results = _evaluate(step, needs, seeds)
        return _compat.join(results) if self._is_due(step, results, [*needs, *seeds]) else results

    def _is_due(self, step: BackwardOp, results: Sequence[Array], operands: Sequence[Array]) -> bool:
        """Return whether all results of a product come at once, within a budget and in a ``shard_map`` on a TPU.

        There XLA puts off gradients, to overlap them with what shards send, and keeps operands many times their size.
        """
        if not (self.rematerializer.ordered and step.name == "dot_general" and len(results) > 1):
            return False
        return _LATE[step.name] * min(x.nbytes for x in results) <= sum(x.nbytes for x in operands)

    def awaited_by(self, step: BackwardOp) -> Array | None:
        """Return what a step's values wait for: the first of the cotangents that it reads; None if they do not."""
        return next((self.received[t] for t in step.cotangents_in if t in self.received), None) if self.waits else None

    def take(self, step: BackwardOp) -> list[Array]:
        """Return the cotangents that a step reads, zeros for missing ones; remove those that are not kept."""
        tensors, received = self.backward_graph.source.tensors, self.received
        seeds = [received[t] if t in received else _compat.zeros(tensors[t].aval) for t in step.cotangents_in]
        for t in set(step.cotangents_in) - self.keep:
            received.pop(t, None)
        return seeds

    def receive(self, t: TensorNumber, value: Array) -> None:
        """Add a cotangent of a tensor to those from other readers."""
        self.received[t] = value if t not in self.received else jnp.add(self.received[t], value)


@dataclass
class JoinedWalk(Walk):
    """A backward pass on a GPU, as far as it has come.

    Attributes:
      awaited: tensors whose cotangents the next barrier joins.
      late: products that come last, each with the values that it reads.
    """

    awaited: list[TensorNumber] = field(default_factory=list)
    late: list[tuple[BackwardOp, list[Array]]] = field(default_factory=list)

    def run(self, steps: Sequence[BackwardOp]) -> frozenset[TensorNumber]:
        """Run all steps."""
        pending = deque(_weights_first(steps, self.weights))
        # By tensor, how many of the steps to come add to its cotangent.
        self._missing = Counter(t for step in pending for t in step.cotangents_out)
        self._of_one_product = {t for t in self.backward_graph.wrt if self._missing[t] == 1}
        absorbed = self.absorb.keys() & self._missing.keys()
        first = list(self.received)
        loaded = self.rematerializer.load(_light(pending), [self.received[t] for t in first])
        self.received.update(zip(first, loaded, strict=True))
        while pending:
            step = self._next(pending)
            if is_heavy(step):
                self._run_product(step, pending)
            else:
                self._run_light(step)
        self._run_late()
        return frozenset(absorbed)

    def _next(self, pending: deque[BackwardOp]) -> BackwardOp:
        """Take the next step, which is not waited for any more."""
        step = pending.popleft()
        self._missing.subtract(step.cotangents_out)
        return step

    def _run_light(self, step: BackwardOp) -> None:
        results = self.results(step)
        for t, value in zip(step.cotangents_out, results, strict=True):
            if t in self.received or t in self.weights or len(results) > 1:
                self.awaited.append(t)
            self.receive(t, value)
        self._absorb_completed(step)

    def _run_product(self, step: BackwardOp, pending: deque[BackwardOp]) -> None:
        present = [t for t in step.cotangents_in if t in self.received]
        loaded = self._load([step], [self.received[t] for t in present])
        self.received.update(zip(present, loaded, strict=True))
        needs = self.rematerializer.fetch(step, self.awaited_by(step))
        values = dict(zip(step.needs, needs, strict=True))
        seeds = dict(zip(step.cotangents_in, self.take(step), strict=True))
        results: list[tuple[TensorNumber, Array]] = []
        for part in self._parts(step, values, seeds):
            if step.name == "conv_general_dilated" and self.weights.isdisjoint(part.cotangents_out):
                self._join_operands(part, values, seeds)
            returned = _evaluate(part, [values[t] for t in part.needs], [seeds[t] for t in part.cotangents_in])
            for t, value in zip(part.cotangents_out, returned, strict=True):
                if t in self.weights:
                    self._receive_gradient(step, t, value)
                else:
                    results.append((t, value))
            self._absorb_completed(part)
            while pending and self._follows_gradient(pending[0]):
                self._run_light(self._next(pending))
        if self.backward_graph.graph.stage_shape:
            self._join_sums(results, pending)
            return
        for (t, _), value in zip(results, self._join([x for _, x in results], _light(pending)), strict=True):
            if t in self.received:
                self.awaited.append(t)
            self.receive(t, value)

    def _join_sums(self, results: Sequence[tuple[TensorNumber, Array]], pending: Sequence[BackwardOp]) -> None:
        """Join cotangents once they are complete: behind a barrier devices would add up each term by itself."""
        for t, value in results:
            self.receive(t, value)
        complete = [t for t, _ in results if not self._missing[t]]
        if complete:
            joined = self._join([self.received[t] for t in complete], _light(pending))
            self.received.update(zip(complete, joined, strict=True))

    def _parts(
        self, step: BackwardOp, values: Mapping[TensorNumber, Array], seeds: Mapping[TensorNumber, Array]
    ) -> list[BackwardOp]:
        """Return a product's parts in the order in which they run now; a part that comes last is put aside."""
        gradient, others = divided(step, self.weights)
        if step.name not in _LATE or gradient is None:
            return [step]
        operands = [values[t] for t in gradient.needs] + [seeds[t] for t in gradient.cotangents_in]
        written = sum(self.backward_graph.source.tensors[t].bytes for t in gradient.cotangents_out)
        alone = self._of_one_product.issuperset(gradient.cotangents_out) and not self.absorb
        if alone and written > _LATE[step.name] * sum(x.nbytes for x in operands):
            self.late.append((gradient, operands))
            return [others] if others else []
        return [gradient, others] if step.name == "conv_general_dilated" and others else [step]

    def _join_operands(
        self, part: BackwardOp, values: dict[TensorNumber, Array], seeds: dict[TensorNumber, Array]
    ) -> None:
        """Let a convolution wait for the gradient before it; its kernel too, or it would be kept in another layout."""
        kernels = [t for t in part.needs if t in self.weights]
        joined = iter(self._join([*seeds.values(), *(values[t] for t in kernels)]))
        seeds.update((t, next(joined)) for t in list(seeds))
        values.update((t, next(joined)) for t in kernels)

    def _join(self, arrays: Sequence[Array], steps: Iterable[BackwardOp] = ()) -> list[Array]:
        """Return arrays unchanged, together with all that is awaited and what some steps load."""
        awaited = [t for t in dict.fromkeys(self.awaited) if t in self.received]
        sums = [self._flat(t) for t in awaited]
        operands = [x for _, read in self.late for x in read]
        joined = iter(self._load(steps, [*arrays, *sums, *operands], always=bool(awaited)))
        unchanged = [next(joined) for _ in arrays]
        self.received.update((t, next(joined).reshape(self.received[t].shape)) for t in awaited)
        self.late = [(part, [next(joined) for _ in read]) for part, read in self.late]
        self.awaited = []
        return unchanged

    def _follows_gradient(self, step: BackwardOp) -> bool:
        """Return whether a step works on gradients of weights alone, which vary over the same mesh axes behind it.

        What devices add up in a ``shard_map`` does not, and can be joined with a product's results only before.
        """
        tensors = self.backward_graph.source.tensors
        axes = {_compat.manual_axes(tensors[t].aval) for t in (*step.cotangents_in, *step.cotangents_out)}
        return self.weights.issuperset(step.cotangents_in) and not is_heavy(step) and len(axes) == 1

    def _load(self, steps: Iterable[BackwardOp], arrays: Sequence[Array], always: bool = False) -> Sequence[Array]:
        """Return arrays unchanged, together with what some steps load.

        In a ``shard_map`` what varies over other mesh axes than these waits for another cotangent that does.
        """
        known = {_compat.manual_axes(x) for x in arrays}
        last = {_compat.manual_axes(x): t for t, x in self.received.items()}
        others = [t for axes, t in last.items() if axes not in known]
        loaded = self.rematerializer.load(steps, [*arrays, *(self.received[t] for t in others)], always=always)
        self.received.update(zip(others, loaded[len(arrays) :], strict=True))
        return loaded[: len(arrays)]

    def _run_late(self) -> None:
        """Run the products that were put off one after the other, those first that need a layout of their own."""
        tensors = self.backward_graph.source.tensors
        late = sorted(
            self.late,
            key=lambda pair: (pair[0].name == "dot_general", sum(tensors[t].bytes for t in pair[0].cotangents_out)),
        )
        self.late = []
        for part, operands in late:
            read = self._join(operands)
            for t, value in zip(part.cotangents_out, _evaluate(part, read, []), strict=True):
                self._receive_gradient(part, t, value)

    def _receive_gradient(self, step: BackwardOp, t: TensorNumber, value: Array) -> None:
        if step.name == "conv_general_dilated" and not self.backward_graph.graph.stage_shape:
            # It is turned out of the convolution's own layout first, to be added to its sum in place.
            value = _compat.barrier(value.reshape(-1)).reshape(value.shape)
        self.receive(t, value)
        self.awaited.append(t)

    def _absorb_completed(self, step: BackwardOp) -> None:
        completed = [t for t in dict.fromkeys(step.cotangents_out) if t in self.absorb and not self._missing[t]]
        self.received.update((t, self.absorb[t](self.received[t])) for t in completed)
        self.awaited += completed

    def _flat(self, t: TensorNumber) -> Array:
        """Return a cotangent; that of a weight in one dimension, whose layout XLA can not change behind a barrier.

        Where a stage is sharded it stays as it is: devices would gather a dimension that is split.
        """
        value = self.received[t]
        return value.reshape(-1) if t in self.weights and not self.backward_graph.graph.stage_shape else value


def _weights_first(steps: Iterable[BackwardOp], weights: frozenset[TensorNumber]) -> list[BackwardOp]:
    """Move what follows from gradients of weights alone to the products that make them; sums keep their order."""
    moved: list[BackwardOp] = []
    for step in steps:
        place = len(moved)
        if weights.issuperset(step.cotangents_in) and not is_heavy(step):
            touched = {*step.cotangents_in, *step.cotangents_out}
            while place and touched.isdisjoint(moved[place - 1].cotangents_out):
                place -= 1
        moved.insert(place or len(moved), step)
    return moved


def _evaluate(step: BackwardOp, needs: Sequence[Array], seeds: Sequence[Array]) -> list[Array]:
    with jax.named_scope(step.path or step.name):
        return step.program.evaluate([*needs, *seeds])


def _light(steps: Iterable[BackwardOp]) -> Iterable[BackwardOp]:
    """The steps before the first product."""
    return itertools.takewhile(lambda step: not is_heavy(step), steps)
