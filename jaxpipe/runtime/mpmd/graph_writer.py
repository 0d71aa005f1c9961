"""Writes a step's graph: functions of value numbers, which return value numbers."""

import functools
from collections.abc import Hashable, Sequence
from typing import TypeVar

import jax

from jaxpipe.array_types import Device, PyTree
from jaxpipe.models.check_batch import shape_key
from jaxpipe.runtime.mpmd import step_graph
from jaxpipe.runtime.mpmd.stage_layout import StageLayout
from jaxpipe.runtime.mpmd.step_graph import Arrays, Instruction, Place, Port, StepGraph, Task, Traced, Value, Work
from jaxpipe.schedules.table import StageNumber
from jaxpipe.sharding.mesh_axes import DATA, side_by_side


#: A tree of value numbers.
Tree = TypeVar("Tree", bound=PyTree)


class GraphWriter:
    """A graph that is being written, for a layout."""

    def __init__(self, layout: StageLayout):
        """Begin without a value."""
        self.layout, self.devices = layout, layout.devices
        self.values: list[Value] = []
        self.instructions: list[Instruction] = []
        self.inputs: dict[Port, int] = {}
        self.tasks: dict[Task, int] = {}
        self._copies: dict[tuple[int, Place], int] = {}
        self._shares: dict[int, tuple[int, ...]] = {}  # by array of a whole stage, each member's
        self._joined: dict[tuple[tuple[int, ...], bool], int] = {}

    def value(self, value: Value) -> int:
        """Return the number of a new value."""
        self.values.append(value)
        return len(self.values) - 1

    def given(self, place: Place, field: str, number: int = 0) -> int:
        """Return an array that exists at the beginning (``StageLayout.given``)."""
        port = Port(place, field, number)
        if port not in self.inputs:
            aval, form = self.layout.given(place.stage, field, number)
            self.inputs[port] = self.value(Value(aval, place, form))
        return self.inputs[port]

    def avals(self, tree: Tree) -> Tree:
        """Return the shapes of some values."""
        return jax.tree.map(lambda number: self.values[number].aval, tree)

    def run(
        self,
        place: Place,
        label: str,
        work: Work,
        operands: Arrays,
        key: Hashable = None,
        consumes: bool = False,
        microbatch: int = -1,
        action: int = -1,
    ) -> Arrays:
        """Run work of a stage at a place, on values from anywhere.

        It is traced once for each label and operands of other shapes, among all plans with the same cuts; ``key`` is
        what else decides it, such as what the stage stores.
        """
        traces, layout, operands = self.layout.planned.traces, self.layout, self.at(place, operands)
        avals, leaves = self.avals(operands), jax.tree.leaves(operands)
        key = layout.objective, place.stage, label, key, shape_key(avals)
        if key not in traces:
            form = functools.partial(layout.form, place.stage)
            traces[key] = step_graph.trace_task(label, work, form, avals, consumes)
        traced: Traced = traces[key]
        task = traced.task
        pairs = zip(task.written_avals, task.forms, strict=True)
        writes = [self.value(Value(aval, place, form)) for aval, form in pairs]
        if writes:
            number = self.tasks.setdefault(task, len(self.tasks))
            reads = tuple(leaves[k] for k in traced.reads)
            self.instructions.append(step_graph.Call(number, place, reads, tuple(writes), microbatch, action))
        return traced.tree.unflatten([writes[k] if k >= 0 else leaves[~k] for k in traced.sources])

    def at(self, place: Place, tree: Tree) -> Tree:
        """Return values as they are at a place: copies of those that are on other devices, each made once.

        Of what a whole stage has, a member has its share: its part, or all of an array that is the same everywhere. A
        whole stage gets the same from elsewhere on each of its members.
        """
        numbers, structure = jax.tree.flatten(tree)
        elsewhere: dict[tuple[Device, ...], list[int]] = {}
        for number in dict.fromkeys(numbers):
            source = self.values[number].place
            if source != place and (number, place) not in self._copies:
                elsewhere.setdefault(self.devices.firsts(source), []).append(number)
        for group in elsewhere.values():
            copies = self._copied(self.values[group[0]].place, place, group)
            self._copies |= {(number, place): copy for number, copy in zip(group, copies, strict=True)}
        return structure.unflatten([self._copies.get((number, place), number) for number in numbers])

    def _copied(self, source: Place, target: Place, numbers: Sequence[int]) -> Sequence[int]:
        """Return values of a place as they are at another one."""
        if self.devices.firsts(source) == self.devices.firsts(target):
            return numbers
        if target.replica < 0:
            return self.join(target.stage, [numbers for _ in self.devices.members(target.stage)], own=False)
        if source.replica < 0:
            shares = [self._split(number) for number in numbers]
            return self.at(target, [parts[target.replica % len(parts)] for parts in shares])
        writes = tuple(self.value(self.values[k]._replace(place=target)) for k in numbers)
        self.instructions.append(step_graph.Send(source, target, tuple(numbers), writes))
        return writes

    def spread(self, source: Place, replicas: Sequence[int], tree: Tree) -> Tree:
        """Copy values to the devices of all stages of some replicas, as arrays that these have in common."""
        reads, structure = jax.tree.flatten(tree)
        writes = tuple(self.value(self.values[k]) for k in reads)
        self.instructions.append(step_graph.Spread(source, tuple(replicas), tuple(reads), writes))
        return structure.unflatten(writes)

    def _split(self, whole: int) -> tuple[int, ...]:
        """Return each member's share of an array of a whole stage."""
        if whole not in self._shares:
            value = self.values[whole]
            members = self.devices.members(value.place.stage)
            self._shares[whole] = parts = tuple(self.value(value._replace(place=place)) for place in members)
            self.instructions.append(step_graph.Split(value.place, (whole,), parts))
        return self._shares[whole]

    def join(self, stage: StageNumber, trees: Sequence[Tree], own: bool) -> Tree:
        """Put arrays of a stage's members together: side by side if each has its ``own``; else they are equal."""
        trees = [self.at(place, tree) for place, tree in zip(self.devices.members(stage), trees, strict=True)]
        if len(trees) == 1:
            return trees[0]
        rows = [jax.tree.leaves(tree) for tree in trees]
        joined = [self._join(Place(stage), parts, own) for parts in zip(*rows, strict=True)]
        return jax.tree.structure(trees[0]).unflatten(joined)

    def _join(self, place: Place, parts: tuple[int, ...], own: bool) -> int:
        if (parts, own) in self._joined:
            return self._joined[parts, own]
        aval, _, form = self.values[parts[0]]
        if own:
            rows = (len(parts) * (aval.shape or (1,))[0], *aval.shape[1:])
            aval, form = jax.ShapeDtypeStruct(rows, aval.dtype), form._replace(spec=side_by_side(form.spec, DATA))
        self._joined[parts, own] = whole = self.value(Value(aval, place, form))
        self.instructions.append(step_graph.Join(place, parts, (whole,), own))
        return whole

    def finish(self, outputs: dict[Port, int]) -> StepGraph:
        """Return the graph that ends with some arrays."""
        return StepGraph(tuple(self.values), tuple(self.tasks), tuple(self.instructions), self.inputs, outputs)
