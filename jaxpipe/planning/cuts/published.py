"""The published cost models' search: the least cost of the costliest stage or link."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxpipe.costs.network import Network
from jaxpipe.planning.cuts import device_orders
from jaxpipe.planning.cuts.cost_models import CostModel
from jaxpipe.planning.cuts.cut_space import CutSpace
from jaxpipe.planning.cuts.search_cuts import Found, Limits, Search, in_order, is_small


#: Cuts that are looked at to compare orders of devices.
CUTS_FOR_ORDERS = 48


def cheapest_bottleneck(
    space: CutSpace, model: CostModel, classes: Sequence[Sequence[int]], limits: Limits, slack: float
) -> Found | None:
    """Return stages none of which costs more than the least by more than ``slack``, and that send the fewest bytes."""
    exact = is_small(classes, space, limits)
    if not exact:
        classes = (_best_order(space, model, limits),)
    search = Search(space, model, classes, limits)
    least = search.least()
    if least == math.inf:
        return None
    stages = search.lightest(least * (1 + slack)) or ()
    seconds = model.objective(space, stages)
    if exact:
        return Found(seconds, in_order(stages, classes), least, search.ties(least), "all placements")
    return Found(seconds, stages, _relaxed(space, model, limits), search.ties(least), "some orders of the devices")


def _best_order(space: CutSpace, model: CostModel, limits: Limits) -> tuple[int, ...]:
    """An order of the devices, the first stages first, that makes the costliest stage or link cheap."""
    few = space.thinned(CUTS_FOR_ORDERS)

    def price(order: tuple[int, ...]) -> float:
        return Search(few, model, (order,), limits).least()

    start = min(device_orders.seeds(model.network), key=price)
    return device_orders.improve(start, price)[1]


def _relaxed(space: CutSpace, model: CostModel, limits: Limits) -> float:
    """A bound: the same devices, as if each were the best of them and all links the best link."""
    network = model.network
    off = ~np.eye(network.num_devices, dtype=bool)
    best = Network.uniform(network.num_devices, float(network.bandwidth[off].max()), float(network.latency[off].min()))
    best = replace(best, speed=(max(network.speed),) * network.num_devices)
    kinder = replace(limits, memory=(max(limits.memory),) * network.num_devices)
    return Search(space, replace(model, network=best), (tuple(range(network.num_devices)),), kinder).least()
