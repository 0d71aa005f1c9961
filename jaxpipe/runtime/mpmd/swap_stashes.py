"""Moves stashes to other memory between the forward and the backward pass.

    forward pass ─▶ arrays ─▶ slices ──one send to each target──▶ a peer's memory, the host's
    backward pass ◀─ arrays ◀─ slices ◀──one send from each──────┘

Slices follow each other in the order of the arrays; an array in which one ends is cut along its first axis.

Memory is reserved when the host asks for a program or a copy, but what was copied is free only when the copy has ended.
So the host waits for a copy before it asks for the action after the one that it overlaps with.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.mpmd.device_bytes import HOST_PURPOSE, PEER_PURPOSE, array_bytes
from jaxpipe.runtime.mpmd.graph_writer import GraphWriter
from jaxpipe.runtime.mpmd.stage_layout import StageLayout
from jaxpipe.runtime.mpmd.step_graph import Arrays, Call, Form, Instruction, Place, Send, StepGraph, Value, Wait
from jaxpipe.runtime.stages import StashSwap, SwapTarget
from jaxpipe.schedules.swap_points import HOST, swap_points
from jaxpipe.schedules.table import StageNumber


@dataclass(frozen=True)
class Piece:
    """Rows of an array that go to one target."""

    target: int  # position among the stage's targets
    begin: int = 0  # rows along the first axis; 0 to 0 of an array that is not cut
    end: int = 0


#: By array, its pieces; one of an array that is not cut.
Cut: TypeAlias = Sequence[Sequence[Piece]]


def cut_arrays(avals: Sequence[jax.ShapeDtypeStruct], targets: Sequence[SwapTarget]) -> list[list[Piece]]:
    """Return the pieces of each array, so that each target gets its share of all bytes, to a row."""
    total, shares = sum(map(array_bytes, avals)), [target.share for target in targets]
    ends = [total * part / sum(shares) for part in itertools.accumulate(shares)]
    pieces, start = [], 0.0
    for aval in avals:
        size = array_bytes(aval)
        rows = aval.shape[0] if aval.shape and size else 1
        bounds = [0, *(min(rows, max(0, round((end - start) * rows / max(1, size)))) for end in ends[:-1]), rows]
        parts = [Piece(k, *ends) for k, ends in enumerate(itertools.pairwise(bounds)) if ends[1] > ends[0]]
        pieces.append(parts if len(parts) > 1 else [Piece(parts[0].target)])
        start += size
    return pieces


def swap_stashes(graph: StepGraph, layout: StageLayout) -> StepGraph:
    """Return a graph in which stages with a ``StashSwap`` send stashes away and, in time, back."""
    swapped = [s for s in layout.stages if layout.stage(s).swap is not None]
    if not swapped or not layout.schedule.has_backward:
        return graph
    mover = _Mover(graph, layout)
    for s in swapped:
        mover.swap(s)
    return mover.graph()


class _Mover(GraphWriter):
    """A graph into which swaps are written."""

    def __init__(self, graph: StepGraph, layout: StageLayout):
        super().__init__(layout)
        self._graph = graph
        self.values += graph.values
        self.tasks |= {task: k for k, task in enumerate(graph.tasks)}
        self._calls: dict[tuple[Place, int], list[int]] = defaultdict(list)  # by place and micro-batch, positions
        for k, x in enumerate(graph.instructions):
            if isinstance(x, Call) and x.microbatch >= 0:
                self._calls[x.place, x.microbatch].append(k)
        self._waits: dict[int, list[Instruction]] = defaultdict(list)
        self._before: dict[int, list[Instruction]] = defaultdict(list)
        self._after: dict[int, list[Instruction]] = defaultdict(list)
        self._returned: dict[int, dict[int, int]] = defaultdict(dict)  # by position of a call, what it reads instead

    def graph(self) -> StepGraph:
        """Return the graph with what was written."""
        instructions: list[Instruction] = []
        for k, x in enumerate(self._graph.instructions):
            if k in self._returned:
                assert isinstance(x, Call)
                x = replace(x, reads=tuple(self._returned[k].get(number, number) for number in x.reads))
            instructions += [*self._waits[k], *self._before[k], x, *self._after[k]]
        new = {"values": tuple(self.values), "tasks": tuple(self.tasks), "instructions": tuple(instructions)}
        return replace(self._graph, **new)

    def swap(self, s: StageNumber) -> None:
        """Swap the stashes of a stage that are away for long enough."""
        layout, graph = self.layout, self._graph
        swap, schedule = layout.stage(s).swap, layout.schedule
        assert swap is not None
        points, pieces = swap_points(schedule, s), None
        actions = [
            (x.action, k)
            for k, x in enumerate(graph.instructions)
            if isinstance(x, Call) and x.action >= 0 and schedule.device(x.place.stage) == schedule.device(s)
        ]
        for j, r in itertools.product(points.leaves, layout.replicas):
            place = layout.devices.place(s, r)
            first, *later = self._calls[place, j]
            read = {number for k in later for number in graph.instructions[k].reads}
            touched = dict.fromkeys((*graph.instructions[first].reads, *graph.instructions[first].writes))
            kept = [k for t in swap.tensors for k in touched if k in read and graph.values[k].form.tensor == t]
            pieces = pieces or cut_arrays([self.values[k].aval for k in kept], swap.targets)
            gone, back = (
                next(k for action, k in actions if action >= position)
                for position in (points.missing(j).start, points.returns[j])
            )
            returned = self._send_away(pieces, swap, kept, place, (first, gone, back, later[0]))
            for k in later:
                self._returned[k] |= returned

    def _send_away(
        self, pieces: Cut, swap: StashSwap, kept: Sequence[int], place: Place, when: tuple[int, int, int, int]
    ) -> dict[int, int]:
        """Write a swap; return what is home then, by what has left.

        Args:
          when: the instructions after which it leaves, before which it has left, begins to return and has returned.
        """
        first, gone, back, read = when
        parts = [piece for row in pieces for piece in row]
        forms = [Form("stash", is_free=self.layout.specs.submesh.size > 1)] * len(parts)
        leaving = self._write(self._after[first], place, "slices of a stash", _slices, pieces, kept, forms)
        home: dict[int, int] = {}
        for k, target in enumerate(swap.targets):
            reads = tuple(number for number, piece in zip(leaving, parts, strict=True) if piece.target == k)
            if not reads:
                continue
            to_host = target.stage == HOST
            holder = place if to_host else self.devices.place(target.stage, place.replica)
            away = tuple(self._moved(number, holder, HOST_PURPOSE if to_host else PEER_PURPOSE) for number in reads)
            writes = tuple(self._moved(number, place, "stash") for number in reads)
            self._after[first].append(Send(place, holder, reads, away, to_host))
            self._waits[gone].append(Wait(place, (*reads, *away)))
            self._before[back].append(Send(holder, place, away, writes))
            self._waits[read].append(Wait(holder, (*away, *writes)))
            home |= zip(reads, writes, strict=True)
        arrays, forms = [home[number] for number in leaving], [self.values[number].form for number in kept]
        whole = self._write(self._before[back], place, "stash of its slices", _joined, pieces, arrays, forms)
        return dict(zip(kept, whole, strict=True))

    def _write(
        self,
        to: list[Instruction],
        place: Place,
        what: str,
        work: Callable[[Cut, Arrays], Arrays],
        pieces: Cut,
        arrays: Sequence[int],
        forms: Sequence[Form],
    ) -> list[int]:
        """Write a call that cuts or joins those arrays that are in pieces; return its results, of some forms."""
        label, operands, key = f"stage {place.stage}: {what}", {"stash": list(arrays)}, tuple(map(tuple, pieces))
        results = self.run(place, label, functools.partial(work, pieces), operands, key)
        to += self.instructions
        self.instructions.clear()
        for number, form in zip(results["arrays"], forms, strict=True):
            if number not in arrays:
                self.values[number] = self.values[number]._replace(form=form)
        return results["arrays"]

    def _moved(self, number: int, place: Place, purpose: str) -> int:
        aval, _, form = self.values[number]
        return self.value(Value(aval, place, form._replace(purpose=purpose)))


def _slices(cut: Cut, arrays: Arrays) -> Arrays:
    """Cut arrays into pieces."""
    pairs = ((x, piece, parts) for x, parts in zip(arrays["stash"], cut, strict=True) for piece in parts)
    return {"arrays": [x if len(parts) == 1 else lax.slice_in_dim(x, p.begin, p.end) for x, p, parts in pairs]}


def _joined(cut: Cut, arrays: Arrays) -> Arrays:
    """Put pieces together again."""
    remaining = iter(arrays["stash"])
    rows = ([next(remaining) for _ in parts] for parts in cut)
    return {"arrays": [row[0] if len(row) == 1 else jnp.concatenate(row) for row in rows]}
