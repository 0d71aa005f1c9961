"""Instructions that move stashes to other memory and back.

    forward pass ─▶ arrays ─▶ slices ──one send to each target──▶ a peer's memory, the host's
    backward pass ◀─ arrays ◀─ slices ◀──one send from each──────┘

Slices follow each other in the order of the arrays; an array in which one ends is cut along its first axis.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.runtime.mpmd.call_list import ListBuilder
from jaxpipe.runtime.mpmd.compile_work import trace_work
from jaxpipe.runtime.mpmd.device_bytes import array_bytes
from jaxpipe.runtime.mpmd.instructions import Key, Place
from jaxpipe.runtime.mpmd.stage_placement import Layout
from jaxpipe.runtime.mpmd.stage_work import Name, Role, Work, stash_names
from jaxpipe.runtime.stash_swap import SwapTarget
from jaxpipe.schedules.swap_points import HOST, swap_points


@dataclass(frozen=True)
class Piece:
    """Rows of an array that go to one target.

    Attributes:
      target: position among the stage's targets.
      begin, end: rows along the first axis; of an array that is not cut, both are 0.
    """

    target: int
    begin: int = 0
    end: int = 0


def cut_arrays(avals: Sequence[Any], targets: Sequence[SwapTarget]) -> list[list[Piece]]:
    """Return the pieces of each array, so that each target gets its share of all bytes, to a row.

    Args:
      targets: their shares are compared with each other.
    """
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
        self._leaving: set[tuple[int, int]] = set()
        self._returning: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._away: dict[tuple[Place, int], list[tuple[Key, int, int]]] = {}
        self._programs: dict[tuple[int, bool], int] = {}
        self._pieces: dict[int, dict[Name, list[Piece]]] = {}
        for s, stage in enumerate(layout.context.stages):
            if stage.swap is None or not layout.context.trains:
                continue
            points = swap_points(layout.schedule, s)
            self._leaving |= {(s, j) for j in points.leaves}
            for j, position in points.returns.items():
                self._returning.setdefault((s % layout.schedule.num_stages, position), []).append((s, j))

    def begin_returns(self, device: int, position: int) -> None:
        """Send back the stashes whose return begins before an action of a device."""
        for s, j in self._returning.get((device, position), ()):
            for r in self._layout.replicas:
                self._return(self._builder.place(s, r), j)

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
            avals = [builder.avals[builder.now[builder.key(place, name, j)]] for name in names]
            self._pieces[s] = dict(zip(names, cut_arrays(avals, swap.targets), strict=True))
            cut = {name: parts for name, parts in self._pieces[s].items() if len(parts) > 1}
            if cut:
                shapes = [builder.avals[builder.now[builder.key(place, name, j)]] for name in cut]
                for joins, work in enumerate(_cutting(s, cut, shapes)):
                    self._programs[s, bool(joins)] = builder.program(trace_work(work))
        if (s, False) in self._programs:
            builder.call(self._programs[s, False], s, place.replica, j)
        held = []
        for k, target in enumerate(swap.targets):
            keys = [
                builder.key(place, _piece_name(name, parts, n), j)
                for name, parts in self._pieces[s].items()
                for n, piece in enumerate(parts)
                if piece.target == k
            ]
            registers = builder.move(place, self._place(place, target), [builder.now[key] for key in keys])
            held += [(key, register, k) for key, register in zip(keys, registers, strict=True)]
        self._away[place, j] = held

    def _place(self, place: Place, target: SwapTarget) -> Place | None:
        """The place of a target; None for the host's memory."""
        return None if target.stage == HOST else self._builder.place(target.stage, place.replica)

    def _return(self, place: Place, j: int) -> None:
        s, builder = place.stage, self._builder
        swap = self._layout.context.stages[s].swap
        assert swap is not None
        held = self._away.pop((place, j))
        for k, target in enumerate(swap.targets):
            here = [(key, register) for key, register, piece in held if piece == k]
            returned = builder.move_back(self._place(place, target), place, [register for _, register in here])
            builder.now |= {key: register for (key, _), register in zip(here, returned, strict=True)}
        if (s, True) in self._programs:
            builder.call(self._programs[s, True], s, place.replica, j)


def _piece_name(name: Name, parts: Sequence[Piece], n: int) -> Name:
    """The name of a piece of an array; of one that is not cut, its own."""
    return name if len(parts) == 1 else Name(Role.PIECE, _number(name), n)


def _number(name: Name) -> int:
    """A number for an array of a stash, by tensor and part."""
    return (name.number << 8) + (name.part << 1) + (name.role is Role.STASH)


def _cutting(s: int, cut: dict[Name, list[Piece]], avals: Sequence[Any]) -> tuple[Work, Work]:
    """The work that cuts arrays into pieces, and that which puts them together again."""
    names = tuple(cut)
    pieces = tuple(_piece_name(name, parts, n) for name, parts in cut.items() for n in range(len(parts)))
    shapes = tuple(
        jax.ShapeDtypeStruct((piece.end - piece.begin, *aval.shape[1:]), aval.dtype)
        for parts, aval in zip(cut.values(), avals, strict=True)
        for piece in parts
    )

    def slices(operands: Sequence[Any]) -> list[Any]:
        pairs = zip(operands, cut.values(), strict=True)
        return [lax.slice_in_dim(x, piece.begin, piece.end) for x, parts in pairs for piece in parts]

    def join(operands: Sequence[Any]) -> list[Any]:
        remaining = iter(operands)
        return [jnp.concatenate([next(remaining) for _ in parts]) for parts in cut.values()]

    return (
        Work(f"stage {s}: slices of a stash", names, tuple(avals), pieces, slices),
        Work(f"stage {s}: stash of its slices", pieces, shapes, names, join),
    )
