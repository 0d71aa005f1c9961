"""Swaps in pages: how large the slices are, where in the arenas they lie, and which of them are exchanged together.

Every device runs the same collectives, so slices go in rounds: in a round each device has at most one partner, and all
partners exchange messages of one size. The rounds of a tick do not depend on each other. The last of them is that of
the slices in the host's memory, if there are any.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpipe.schedules.swaps import HOST, Swaps, slice_pages


#: Sums of the same seconds in another order differ by less than this.
ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Round:
    """Slices that one exchange between pairs of devices carries, there and back.

    Attributes:
      pages: of every message, those of the largest slice.
      pieces: stage and position of each slice.
      pairs: ``(source, target)``, both ways; none if it is with the host.
    """

    pages: int
    pieces: tuple[tuple[int, int], ...]
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Row:
    """One message: in a tick, a round of it, from pages of one device's arena to pages of another's, or the host's."""

    tick: int
    round: int
    source: int
    target: int
    source_page: int
    target_page: int
    pages: int


@dataclass(frozen=True)
class Transport:
    """What an executor needs to run swaps.

    Attributes:
      pages: by stage, of each of its slices.
      rounds: exchanged after every tick.
      rows: in the order of ticks.
      home: by device, the page at which its own stage's slots begin.
      arena: pages of every device's arena, if stashes are read and written through a window of the largest.
      seconds: what the exchange after a tick takes, all its rounds at once and each over the slowest of its links.
      host: pages in the host's memory, for each device: its slots are as large as the round's messages, and behind
        them is a spare one for what nobody wants.
    """

    pages: tuple[tuple[int, ...], ...]
    rounds: tuple[Round, ...]
    rows: tuple[Row, ...]
    home: tuple[int, ...]
    arena: int
    seconds: float
    host: int = 0


def transport(swaps: Swaps, sizes: Sequence[int]) -> Transport:
    """The rows of some swaps.

    Args:
      swaps: where stashes are.
      sizes: by stage, pages of one stash.

    Example:
      >>> from jaxpipe.schedules import one_f_one_b
      >>> from jaxpipe.schedules.swaps import Slice, swap_table
      >>> swaps = swap_table(one_f_one_b(3, 6), (2, 0, 0), ([Slice(1, 1.0), Slice(2, 2.0)], [], []))
      >>> found = transport(swaps, (9, 9, 9))
      >>> found.pages[0], [one.pages for one in found.rounds], found.seconds
      ((3, 6), [6, 3], 3.0)
    """
    pages = tuple(slice_pages(size, slices) if slices else () for size, slices in zip(sizes, swaps.slices, strict=True))
    rounds = _rounds(swaps, pages)
    message = {piece: one.pages for one in rounds for piece in one.pieces}
    first, arena = [], 0
    for device in range(len(sizes)):
        places, end = _areas(swaps, sizes, pages, message, device)
        first.append(places)
        arena = max(arena, end)
    number = {piece: k for k, one in enumerate(rounds) for piece in one.pieces}
    rows = []
    for m in swaps.moves:
        size, before = pages[m.stage][m.piece], sum(pages[m.stage][: m.piece])
        if size:
            away = m.target if m.source == m.stage else m.source
            slots = (m.source_slot, m.target_slot) if m.source == m.stage else (m.target_slot, m.source_slot)
            home = first[m.stage][None] + slots[0] * sizes[m.stage] + before
            if away == HOST:
                there = slots[1] * message[m.stage, m.piece]
            else:
                there = first[away][m.stage, m.piece] + slots[1] * size
            ends = (home, there) if m.source == m.stage else (there, home)
            rows.append(Row(m.tick, number[m.stage, m.piece], m.source, m.target, *ends, size))
    took = [swaps.slices[s][k].seconds(one.pages) for one in rounds for s, k in one.pieces]
    home = tuple(places[None] for places in first)
    last = rounds[-1] if rounds and not rounds[-1].pairs else None
    host = 0 if last is None else last.pages * (1 + max(swaps.hosted[s] for s, _ in last.pieces))
    return Transport(pages, rounds, tuple(rows), home, arena, max(took, default=0.0), host)


def _rounds(swaps: Swaps, pages: Sequence[Sequence[int]]) -> tuple[Round, ...]:
    """The largest slices first, each in the first round in which both devices are free.

    A slice goes with larger ones only if its link is done with so large a message before the slowest link is with
    its own slice.
    """
    slices = {(s, k): one for s, parts in enumerate(swaps.slices) for k, one in enumerate(parts) if pages[s][k]}
    hosted = tuple(piece for piece, one in slices.items() if one.target == HOST)
    order = sorted(slices.keys() - set(hosted), key=lambda piece: (-pages[piece[0]][piece[1]], piece))
    slowest = max((one.seconds(pages[s][k]) for (s, k), one in slices.items()), default=0.0)
    found: list[tuple[int, list[tuple[int, int]], set[int]]] = []
    for s, k in order:
        one = slices[s, k]
        for size, pieces, busy in found:
            if busy.isdisjoint((s, one.target)) and one.seconds(size) <= slowest * ROUNDING:
                pieces.append((s, k))
                busy.update((s, one.target))
                break
        else:
            found.append((pages[s][k], [(s, k)], {s, one.target}))
    rounds = []
    for size, pieces, _ in found:
        ends = [(s, slices[s, k].target) for s, k in pieces]
        rounds.append(Round(size, tuple(pieces), tuple(pair for a, b in ends for pair in ((a, b), (b, a)))))
    if hosted:
        rounds.append(Round(max(pages[s][k] for s, k in hosted), hosted, ()))
    return tuple(rounds)


def _areas(
    swaps: Swaps,
    sizes: Sequence[int],
    pages: Sequence[Sequence[int]],
    message: dict[tuple[int, int], int],
    device: int,
) -> tuple[dict[tuple[int, int] | None, int], int]:
    """The first page of a device's own slots (``None``) and of those for each guest, and the page behind them all.

    Messages and stashes are read and written through windows that may be larger than they; what is read through the
    window that sticks out least is last.
    """
    own = max(sizes)
    for k, size in enumerate(pages[device]):
        if size:
            own = max(own, sum(pages[device][:k]) + message[device, k])
    areas: list[tuple[tuple[int, int] | None, int, int, int]] = [(None, swaps.own[device], sizes[device], own)]
    for s, parts in enumerate(swaps.slices):
        for k, one in enumerate(parts):
            if one.target == device and pages[s][k]:
                areas.append(((s, k), swaps.guests[s], pages[s][k], message[s, k]))
    areas.sort(key=lambda area: area[2] - area[3])
    places: dict[tuple[int, int] | None, int] = {}
    start = end = 0
    for name, count, size, window in areas:
        places[name] = start
        if count:
            end = max(end, start + (count - 1) * size + window)
        start += count * size
    return places, max(start, end)
