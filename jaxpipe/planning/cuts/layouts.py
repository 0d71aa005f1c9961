"""Layouts: the devices of each stage, first to last."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.costs.network import Network
from jaxpipe.planning.cuts.cost_models import Layout


#: With more devices than this not all numbers of devices of the stages are looked at, ...
MOST_UNEQUAL = 8
#: ... and with more than this only equal ones.
MOST_IN_TWO_PARTS = 128


@dataclass(frozen=True)
class Limits:
    """The limits of a search: sizes of groups, and the numbers of devices in all.

    ``widths`` are the numbers of devices of the stages, first to last, if they are given.
    """

    group_sizes: tuple[int, ...]
    totals: Sequence[int]
    widths: tuple[int, ...] | None = None

    def sizes(self, count: int) -> tuple[int, ...]:
        """Return how many devices a stage may have, if it and all stages behind it have ``count``."""
        if self.widths is None:
            return self.group_sizes
        return tuple(width for k, width in enumerate(self.widths) if sum(self.widths[k:]) == count)


def device_classes(network: Network, memory: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """Devices that may be exchanged for one another without changing any cost, together."""
    links = np.stack([network.bandwidth, network.latency])

    def alike(a: int, b: int) -> bool:
        differs = (links[:, a] != links[:, b]).any(0)
        differs[[a, b]] = False
        return network.speed[a] == network.speed[b] and memory[a] == memory[b] and not differs.any()

    classes: dict[int, list[int]] = {}
    for device in range(network.num_devices):
        first = next((other for other in classes if alike(other, device)), device)
        classes.setdefault(first, []).append(device)
    return tuple(map(tuple, classes.values()))


def all_layouts(classes: Sequence[Sequence[int]], limits: Limits, most_stages: int) -> Iterator[Layout]:
    """Yield every layout of so many stages at most, those that differ in exchanges of like devices once."""

    def extend(layout: Layout, taken: tuple[int, ...]) -> Iterator[Layout]:
        used, widths = sum(taken), limits.widths
        if used in limits.totals:
            yield layout
        if len(layout) == (most_stages if widths is None else len(widths)):
            return
        left = [len(group) - n for group, n in zip(classes, taken, strict=True)]
        for size in limits.group_sizes if widths is None else widths[len(layout) : len(layout) + 1]:
            for counts in _parts(left, size) if used + size <= limits.totals[-1] else ():
                after = tuple(n + k for n, k in zip(taken, counts, strict=True))
                parts = (group[n:k] for group, n, k in zip(classes, taken, after, strict=True))
                yield from extend((*layout, tuple(sorted(d for part in parts for d in part))), after)

    return extend((), (0,) * len(classes))


def _parts(left: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of devices of each class that are ``size`` in all."""
    if len(left) == 1:
        if size <= left[0]:
            yield (size,)
        return
    for first in range(min(left[0], size), -1, -1):
        for rest in _parts(left[1:], size - first):
            yield (first, *rest)


def numbers_of_devices(limits: Limits) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of devices of the stages: equal ones, some in two equal parts, and all where few are possible.

    Unequal ones have rounds of as many micro-batches as the largest.
    """
    if limits.widths is not None:
        yield limits.widths
        return
    count = limits.totals[-1]
    for size in limits.group_sizes:
        yield from ((size,) * (number // size) for number in limits.totals if number % size == 0)
    if len(limits.group_sizes) == 1:
        return
    if count <= MOST_UNEQUAL:
        every = sorted((tuple(map(len, layout)) for layout in all_layouts([range(count)], limits, count)), key=sum)
        yield from (widths for widths in every if len(set(widths)) > 1)
    elif count <= MOST_IN_TWO_PARTS:
        for small in limits.group_sizes:
            for large in range(2 * small, count, small):
                for number in range(1, (count - 1) // large + 1):
                    parts = (large,) * number, (small,) * ((count - number * large) // small)
                    if sum(map(sum, parts)) == count:
                        yield from (parts[0] + parts[1], parts[1] + parts[0])


def along(order: Sequence[int], widths: Sequence[int]) -> Layout:
    """Return the layout whose stages take the next devices of an order."""
    ends = np.cumsum(widths).tolist()
    return tuple(tuple(sorted(order[end - n : end])) for n, end in zip(widths, ends, strict=True))
