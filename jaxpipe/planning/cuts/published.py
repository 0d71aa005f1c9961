"""The search for the published cost models: the least cost of the costliest stage or link.

A dynamic program along an order of the devices, of which each stage takes the next ones. From the last stage to the
first, the best way to run all that lies behind a cut is kept for each number of devices that it uses, and of its first
stage.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxpipe.costs.network import Network
from jaxpipe.planning.cuts.choose_plan import ROUNDING, Found
from jaxpipe.planning.cuts.cost_models import Stages
from jaxpipe.planning.cuts.cut_space import CutSpace
from jaxpipe.planning.cuts.device_orders import improve, seeds
from jaxpipe.planning.cuts.layouts import Limits
from jaxpipe.planning.cuts.published_models import Bottleneck


#: Cuts that are looked at to compare orders of devices.
CUTS_FOR_ORDERS = 48


def cheapest_bottleneck(
    space: CutSpace, model: Bottleneck, classes: Sequence[Sequence[int]], limits: Limits, slack: float
) -> Found | None:
    """Return stages none of which costs more than the least by more than ``slack``, and that send the fewest bytes."""
    order, alike = tuple(range(model.network.num_devices)), len(classes) == 1
    if not alike:
        order = _best_order(space, model, limits)
    least, _ = along_order(space, model, order, limits)
    if least == math.inf:
        return None
    _, stages = along_order(space, model, order, limits, least * (ROUNDING + slack))
    bound = least if alike else _relaxed(space, model, limits)
    placements = "all placements" if alike else "some orders of the devices"
    return Found(model.objective(space, stages), stages, bound, 1, placements)


def along_order(
    space: CutSpace, model: Bottleneck, order: Sequence[int], limits: Limits, limit: float | None = None
) -> tuple[float, Stages]:
    """Return the least cost of the costliest stage or link; or, within a limit, the least bytes sent in all.

    With the stages, if there are any.
    """
    count, most = len(space.crossing), limits.num_devices or len(order)
    end = np.full(count, np.inf)
    end[-1] = 0.0
    # By devices that are used, and those of the first stage: values, ends of that stage, numbers of the next one's.
    best: dict[int, dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]] = {0: {0: (end, end, end)}}
    for used in range(1, most + 1):
        best[used] = {}
        for taken in limits.sizes(used):
            rest, first = used - taken, len(order) - used
            if not best.get(rest):
                continue
            group = order[first : first + taken]
            cost = model.possible_seconds(space, group, rest)
            ways = []
            for following, (values, *_) in best[rest].items():
                after = order[first + taken : first + taken + following]
                links = model.link_seconds(space.crossing, group, after) if following else np.zeros(count)
                behind = (
                    np.where(links <= limit, values + space.crossing, np.inf) if limit else np.maximum(values, links)
                )
                ways.append(behind)
            chosen = np.argmin(ways, axis=0)
            behind = np.min(ways, axis=0)
            total = np.where(cost <= limit, behind, np.inf) if limit else np.maximum(cost, behind)
            ended = count - 1 - total[:, ::-1].argmin(1)  # of equals the last: the earlier stage is then the fuller one
            best[used][taken] = total[np.arange(count), ended], ended, np.array(list(best[rest]))[chosen]
    numbers = range(1, most + 1) if limits.num_devices is None else (most,)
    answers = [(float(values[0]), used, taken) for used in numbers for taken, (values, *_) in best[used].items()]
    value, used, taken = min(answers, default=(math.inf, 0, 0))
    stages, cut = [], 0
    while used and value < math.inf:
        _, ended, following = best[used][taken]
        first, last = len(order) - used, int(ended[cut])
        stages.append((cut, last, tuple(sorted(order[first : first + taken]))))
        used, taken, cut = used - taken, int(following[last]), last
    return value, tuple(stages)


def _best_order(space: CutSpace, model: Bottleneck, limits: Limits) -> tuple[int, ...]:
    """An order of the devices, the first stages first, that makes the costliest stage or link cheap."""
    few = space.thinned(CUTS_FOR_ORDERS)

    def price(order: tuple[int, ...]) -> float:
        return along_order(few, model, order, limits)[0]

    return improve(min(seeds(model.network), key=price), price)


def _relaxed(space: CutSpace, model: Bottleneck, limits: Limits) -> float:
    """A bound: the same devices, as if each were the best of them and all links the best link."""
    network = model.network
    off, count = ~np.eye(network.num_devices, dtype=bool), network.num_devices
    best = Network.uniform(count, float(network.bandwidth[off].max()), float(network.latency[off].min()))
    best = replace(best, speed=(max(network.speed),) * count)
    kinder = replace(model, network=best, memory=(max(model.memory),) * count if model.memory else ())
    return along_order(space, kinder, range(count), limits)[0]
