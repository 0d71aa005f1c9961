"""Instructions that move stashes to other memory and back.

    forward pass ─▶ arrays ─▶ slices ──one send to each target──▶ a peer's memory, the host's
    backward pass ◀─ arrays ◀─ slices ◀──one send from each──────┘

Slices follow each other in the order of the arrays; an array in which one ends is cut along its first axis.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.mpmd.call_list import ListBuilder
from jaxpipe.runtime.mpmd.compile_work import trace_work
from jaxpipe.runtime.mpmd.device_bytes import array_bytes
from jaxpipe.runtime.mpmd.instructions import Key, Place
from jaxpipe.runtime.mpmd.stage_placement import Layout
from jaxpipe.runtime.mpmd.stage_work import Arrays, Name, Role, Work, stash_names
from jaxpipe.runtime.stash_swap import SwapTarget
from jaxpipe.schedules.swap_points import HOST, swap_points
from jaxpipe.schedules.table import DeviceNumber, StageNumber


@dataclass(frozen=True)
class Piece:
    """Rows of an array that go to one target."""

    target: int  # position among the stage's targets
    begin: int = 0  # rows along the first axis; 0 to 0 of an array that is not cut
    end: int = 0


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


class StashMover:
    """Writes the swaps of all stages into a list."""

    def __init__(self, builder: ListBuilder, layout: Layout):
        """Find out what leaves and returns when."""
        self._builder, self._layout = builder, layout
        self._leaving: set[tuple[StageNumber, int]] = set()
        self._returning: dict[tuple[DeviceNumber, int], list[tuple[StageNumber, int]]] = {}
        self._away: dict[tuple[Place, int], list[tuple[Place, dict[Key, int]]]] = {}
        self._programs: dict[tuple[StageNumber, bool], int] = {}
        self._pieces: dict[StageNumber, dict[Name, list[Piece]]] = {}
        for s, stage in zip(layout.stages, layout.context.stages, strict=True):
            if stage.swap is None or not layout.context.trains:
                continue
            points = swap_points(layout.schedule, s)
            self._leaving |= {(s, j) for j in points.leaves}
            for j, position in points.returns.items():
                self._returning.setdefault((layout.schedule.device(s), position), []).append((s, j))

    def begin_returns(self, device: DeviceNumber, position: int) -> None:
        """Send back the stashes whose return begins before an action of a device."""
        for s, j in self._returning.get((device, position), ()):
            for r in self._layout.replicas:
                self._return(self._layout.devices.place(s, r), j)

    def leave(self, place: Place, j: int) -> None:
        """Send the stash of a micro-batch away, if it leaves."""
        s, builder = place.stage, self._builder
        if (s, j) not in self._leaving:
            return
        swap, stage = self._layout.context.stages[s].swap, self._layout.context.stages[s]
        assert swap is not None
        names = [name for t in swap.tensors for name in stash_names(stage, t)]
        names = [name for name in names if builder.has(place, name, j)]
        if s not in self._pieces:
            avals = {name: builder.avals[builder.now[builder.key(place, name, j)]] for name in names}
            self._pieces[s] = dict(zip(names, cut_arrays(list(avals.values()), swap.targets), strict=True))
            cut = {name: parts for name, parts in self._pieces[s].items() if len(parts) > 1}
            if cut:
                for joins, work in enumerate(_cutting(s, cut, [avals[name] for name in cut])):
                    self._programs[s, bool(joins)] = builder.program(trace_work(work))
        if (s, False) in self._programs:
            builder.call(self._programs[s, False], s, place.replica, j)
        self._away[place, j] = []
        for k, target in enumerate(swap.targets):
            keys = [
                builder.key(place, _piece_name(name, parts, n), j)
                for name, parts in self._pieces[s].items()
                for n, piece in enumerate(parts)
                if piece.target == k
            ]
            to_host = target.stage == HOST
            holder = place if to_host else self._layout.devices.place(target.stage, place.replica)
            registers = builder.copy(place, holder, [builder.now[key] for key in keys], to_host)
            (builder.hosted if to_host else builder.away).update(registers)
            self._away[place, j].append((holder, dict(zip(keys, registers, strict=True))))

    def _return(self, place: Place, j: int) -> None:
        s, builder = place.stage, self._builder
        for holder, registers in self._away.pop((place, j)):
            builder.now |= zip(registers, builder.copy(holder, place, list(registers.values())), strict=True)
        if (s, True) in self._programs:
            builder.call(self._programs[s, True], s, place.replica, j)


def _piece_name(name: Name, parts: Sequence[Piece], n: int) -> Name:
    """The name of a piece of an array; of one that is not cut, its own."""
    return name if len(parts) == 1 else Name(Role.PIECE, _number(name), n)


def _number(name: Name) -> int:
    """A number for an array of a stash, by tensor and part."""
    return (name.number << 8) + (name.part << 1) + (name.role is Role.STASH)


def _cutting(s: StageNumber, cut: dict[Name, list[Piece]], avals: Sequence[jax.ShapeDtypeStruct]) -> tuple[Work, Work]:
    """The work that cuts arrays into pieces, and that which puts them together again."""
    pieces = tuple(_piece_name(name, parts, n) for name, parts in cut.items() for n in range(len(parts)))
    shapes = tuple(
        jax.ShapeDtypeStruct((piece.end - piece.begin, *aval.shape[1:]), aval.dtype)
        for parts, aval in zip(cut.values(), avals, strict=True)
        for piece in parts
    )

    def slices(values: Arrays) -> Arrays:
        arrays = (lax.slice_in_dim(values[name], x.begin, x.end) for name, parts in cut.items() for x in parts)
        return dict(zip(pieces, arrays, strict=True))

    def join(values: Arrays) -> Arrays:
        remaining = iter(values.values())
        return {name: jnp.concatenate([next(remaining) for _ in parts]) for name, parts in cut.items()}

    return (
        Work(f"stage {s}: slices of a stash", dict(zip(cut, avals, strict=True)), slices),
        Work(f"stage {s}: stash of its slices", dict(zip(pieces, shapes, strict=True)), join),
    )
