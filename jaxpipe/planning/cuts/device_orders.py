"""Orders of devices, where a network has too many different ones for every set of them to be looked at.

The seed is the method's own: links sorted by bandwidth, fastest first, make a chain of devices (early layers send
much, late ones little). Sorting alone is up to several times off the best, so both directions are tried, and devices
are then exchanged as long as that helps.
"""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from jaxpipe.costs.network import Network


#: How many orders are priced at most.
MOST_ORDERS = 60


def chain_of_links(network: Network) -> tuple[int, ...]:
    """Devices joined by the fastest links first, each to at most two others; the end with the faster link is first.

    Example:
      >>> chain_of_links(Network([[0, 1, 5], [1, 0, 4], [5, 4, 0]]))
      (0, 2, 1)
    """
    count = network.num_devices
    pairs = sorted(
        itertools.combinations(range(count), 2), key=lambda p: (-network.bandwidth[p], network.latency[p], p)
    )
    chains: dict[int, list[int]] = {d: [d] for d in range(count)}
    for a, b in pairs:
        left, right = chains[a], chains[b]
        if left is right or a not in (left[0], left[-1]) or b not in (right[0], right[-1]):
            continue
        joined = (left if left[-1] == a else left[::-1]) + (right if right[0] == b else right[::-1])
        for d in joined:
            chains[d] = joined
    chain = chains[0]
    if count > 2 and network.bandwidth[chain[0], chain[1]] < network.bandwidth[chain[-2], chain[-1]]:
        chain = chain[::-1]
    return tuple(chain)


def seeds(network: Network) -> Iterator[tuple[int, ...]]:
    """Orders to begin with: the chain of links in both directions, and devices by speed and bandwidth."""
    chain = chain_of_links(network)
    yield chain
    yield chain[::-1]
    total = np.where(np.isfinite(network.bandwidth), network.bandwidth, 0.0).sum(1)
    yield tuple(sorted(range(network.num_devices), key=lambda d: (-network.speed[d], -total[d], d)))


def improve(order: tuple[int, ...], price: Callable[[tuple[int, ...]], float]) -> tuple[int, ...]:
    """Reverse a stretch of an order or exchange two devices, as long as that lowers its price.

    At most ``MOST_ORDERS`` orders are priced, neighboring exchanges first.
    """
    best = price(order)
    spent, improved = 1, True
    pairs = sorted(itertools.combinations(range(len(order)), 2), key=lambda p: (p[1] - p[0], p))
    while improved:
        improved = False
        for a, b in pairs:
            swapped = list(order)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            for other in dict.fromkeys((tuple(swapped), (*order[:a], *order[a : b + 1][::-1], *order[b + 1 :]))):
                if spent >= MOST_ORDERS:
                    return order
                spent += 1
                cost = price(other)
                if cost < best:
                    best, order, improved = cost, other, True
    return order
