"""The search for stages that make a step short, as ``jaxpipe.planning.cuts.cost_models.Synchronous`` counts it.

Few plans are all priced. Else devices are given to stages in likely ways: one for each stage, equal numbers, unequal
ones. For each the cuts are balanced, then shifted while the step gets shorter.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from jaxpipe.costs.network import Network
from jaxpipe.planning.cuts import device_orders
from jaxpipe.planning.cuts.balance_chain import Chain
from jaxpipe.planning.cuts.cost_models import Layout, Stages, Synchronous
from jaxpipe.planning.cuts.cut_space import CutSpace
from jaxpipe.planning.cuts.layouts import all_layouts, along, numbers_of_devices
from jaxpipe.planning.cuts.search_cuts import ROUNDING, Found, Limits


#: Up to so many plans are all priced.
MOST_PLANS = 20_000
#: With more stages than this not all plans are listed.
MOST_STAGES = 100
#: How many layouts are priced with balanced cuts, and for how many of the best cuts are searched.
MOST_LAYOUTS, BEST_LAYOUTS = 160, 5
#: By how much stages may take longer than the slowest of balanced ones, if that makes less to send.
LOOSER = (1.0, 1.01, 1.03, 1.1, 1.3)
#: With more devices than this their order is not improved.
MOST_ORDERED = 32
#: How far cuts are shifted, and around how many of the slowest stages.
SHIFTS, SLOWEST = (1, 2, 4), 12

#: Rows of cuts ``[plans, stages + 1]`` with the devices of their stages.
Plans = tuple[np.ndarray, Layout]


def shortest_step(
    space: CutSpace,
    model: Synchronous,
    classes: Sequence[Sequence[int]],
    limits: Limits,
    plans: list[Plans] | None,
    slack: float,
) -> Found | None:
    """Return stages with a short step, of all ``plans`` if these are given; None if none fit.

    Of steps that are longer than the shortest by at most ``slack``, those are taken that need the fewest bytes, or
    about as few: of the fullest device and of all messages. Of these the one is taken that is the shortest with one
    more micro-batch; of equals the one that sends least, on the fewest devices, whose stages have the most equal work.
    """
    if plans is not None:
        return _chosen(space, model, plans, slack, "all placements")
    orders = _orders(model.network, classes)
    most = max(MOST_LAYOUTS // len(orders), 20)
    plans = [plan for order in orders for plan in _balanced(space, model, _likely(space, model, order, limits, most))]
    plans = _fastest(space, model, plans, BEST_LAYOUTS)
    if len(classes) > 1 and plans and sum(map(len, classes)) <= MOST_ORDERED:
        plans = [_reordered(space, model, plans[0][1], classes), *plans]
    searched = [plan for cuts, layout in plans for plan in _searched(space, model, cuts, layout)]
    return _chosen(space, model, [*plans, *searched], slack, "likely placements")


def all_plans(space: CutSpace, classes: Sequence[Sequence[int]], limits: Limits) -> list[Plans] | None:
    """Return every plan; None if there are more than ``MOST_PLANS``."""
    longest = (limits.num_devices or sum(map(len, classes))) // min(limits.group_sizes)
    if min(longest, len(space.crossing) - 1) > MOST_STAGES:
        return None
    layouts = list(itertools.islice(all_layouts(classes, limits, len(space.crossing) - 1), MOST_PLANS))
    widths = [len(layout) for layout in layouts]
    ways, reached = [], np.arange(len(space.crossing)) == len(space.crossing) - 1
    for _ in range(max(widths, default=0)):
        reached = space.nested.astype(float) @ reached
        ways.append(reached[0])
        if sum(ways[n - 1] for n in widths if n <= len(ways)) > MOST_PLANS:
            return None
    chains, cuts = {}, np.zeros((1, 1), int)
    for number in range(1, max(widths, default=0) + 1):
        ends = space.nested[cuts[:, -1], -1]
        chains[number] = np.column_stack([cuts[ends], np.full(ends.sum(), len(space.crossing) - 1)])
        rows, following = np.nonzero(space.nested[cuts[:, -1]])
        cuts = np.column_stack([cuts[rows], following])
    return [(chains[len(layout)], layout) for layout in layouts if len(chains[len(layout)])]


def _chosen(space: CutSpace, model: Synchronous, plans: list[Plans], slack: float, placements: str) -> Found | None:
    prices = model.prices(space, plans)
    best = min((float(price.min()) for price in prices), default=math.inf)
    if best == math.inf:
        return None
    sent = [space.crossing[cuts[:, 1:-1]].sum(1) for cuts, _ in plans]
    sizes = [model.stage_bytes(space, *plan).max(1) + n for plan, n in zip(plans, sent, strict=True)]
    near = [price <= best * (ROUNDING + slack) for price in prices]
    least = min(float(size[alike].min(initial=math.inf)) for size, alike in zip(sizes, near, strict=True))
    near = (
        [alike & (size <= least * (ROUNDING + slack)) for alike, size in zip(near, sizes, strict=True)]
        if slack
        else near
    )
    keys: list[tuple[float, float, int, float, float, Stages]] = []
    for (cuts, layout), price, alike, n in zip(plans, prices, near, sent, strict=True):
        rows = np.flatnonzero(alike)
        load = np.diff(space.seconds[cuts[rows]], axis=1) / model.rates(layout)
        longer, uneven = _rounded(price[rows] + load.max(1)), _rounded((load**2).sum(1))
        for k in np.lexsort((uneven, n[rows], longer))[:1]:
            row = cuts[rows[k]].tolist()
            stages = tuple(zip(row, row[1:], layout, strict=False))
            keys.append((longer[k], n[rows[k]], sum(map(len, layout)), uneven[k], float(price[rows[k]]), stages))
    *_, seconds, stages = min(keys)
    everything = placements == "all placements"
    ties = sum(int((price <= best * ROUNDING).sum()) for price in prices) if everything else 1
    return Found(seconds, stages, best if everything else 0.0, ties, placements)


def _rounded(values: np.ndarray) -> np.ndarray:
    """Return numbers to nine digits: sums of the same numbers in another order are equal."""
    unit = 10.0 ** (np.floor(np.log10(np.maximum(values, 1e-300))) - 8)
    return np.round(values / unit) * unit


def _orders(network: Network, classes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return orders of the devices in which neighboring stages may use them; those of like devices are one."""
    everything = tuple(range(network.num_devices))
    if len(classes) == 1:
        return [everything]
    number = {d: k for k, group in enumerate(classes) for d in group}
    fastest = sorted(everything, key=lambda d: (-network.speed[d], number[d], d))
    orders = [everything, everything[::-1], tuple(fastest), tuple(fastest[::-1]), *device_orders.seeds(network)]
    return list({tuple(number[d] for d in order): order for order in orders}.values())


def _likely(space: CutSpace, model: Synchronous, order: tuple[int, ...], limits: Limits, most: int) -> list[Layout]:
    """Return the layouts along an order that are worth a price, those with the least estimate; and some plain ones."""
    network, places = model.network, len(space.crossing) - 1
    off = ~np.eye(network.num_devices, dtype=bool)
    rate, latency = network.bandwidth[off].max(initial=1.0), network.latency[off].min(initial=np.inf)
    sent = float(np.quantile(space.crossing[1:-1], 0.25)) if places > 1 else 0.0
    message, total = 2 * (latency + sent / rate), float(space.seconds[-1])
    longest, parameters = float(np.diff(space.seconds).max()), float(space.parameters[-1])
    speeds = np.array(network.speed)[list(order)]
    estimates = []
    for widths in dict.fromkeys(numbers_of_devices(limits, len(order))):
        count, sizes = len(widths), np.array(widths)
        if count > places:
            continue
        starts = np.cumsum(sizes) - sizes
        rates = sizes * np.minimum.reduceat(speeds[: sizes.sum()], starts)
        together = math.lcm(*set(widths))
        rounds = math.ceil(model.m / together)
        slowest = together * max(total / rates.sum(), longest / rates.max())
        seconds = (rounds - 1) * slowest + together * total / rates.max()
        if count > 1:
            seconds += message * (count - 1 + rounds - 1) * together / sizes.max()
        if sizes.max() > 1:
            seconds += 2 * (sizes.max() - 1) * (parameters / count / sizes.max() / rate + latency)
        plain = len(set(widths)) == 1 and (count & (count - 1) == 0 or count == len(order))
        estimates.append((seconds, len(estimates), widths, plain and widths[0] & (widths[0] - 1) == 0))
    estimates.sort()
    chosen = [widths for k, (*_, widths, plain) in enumerate(estimates) if plain or k < most]
    return [along(order, widths) for widths in chosen]


def _balanced(space: CutSpace, model: Synchronous, layouts: Sequence[Layout]) -> Iterator[Plans]:
    """Yield balanced cuts for each layout, and those with as many operators in each stage."""
    for layout in layouts:
        chain = Chain(space, model, layout)
        rows = [np.linspace(0, len(space.crossing) - 1, len(layout) + 1).astype(int).tolist()]
        least = chain.least()
        if least < math.inf:
            rows.append(chain.within(least))
        yield np.array(rows), layout


def _fastest(space: CutSpace, model: Synchronous, plans: Sequence[Plans], most: int) -> list[Plans]:
    """Return the plans with the shortest steps, one for each layout, fastest first."""
    prices = model.prices(space, plans)
    ranked = sorted((float(price.min()), k) for k, price in enumerate(prices))
    return [(plans[k][0][[prices[k].argmin()]], plans[k][1]) for price, k in ranked[:most] if price < math.inf]


def _searched(space: CutSpace, model: Synchronous, cuts: np.ndarray, layout: Layout) -> Iterator[Plans]:
    """Yield cuts within limits that make less to send, and the best of all with its cuts shifted."""
    chain = Chain(space, model, layout)
    least = chain.least()
    if least < math.inf:
        rows = [chain.lightest(max(least, 1e-300) * looser) for looser in LOOSER]
        cuts = np.concatenate([cuts, *(np.array([row]) for row in rows if row is not None)])
    yield cuts, layout
    order = model.prices(space, [(cuts, layout)])[0].argsort(kind="stable")
    yield shifted(space, model, cuts[order[:1]], layout), layout


def shifted(space: CutSpace, model: Synchronous, cuts: np.ndarray, layout: Layout) -> np.ndarray:
    """Shift a cut, or some that follow each other, while that makes the step shorter."""
    seconds = float(model.prices(space, [(cuts, layout)])[0][0])
    while len(layout) > 1:
        others = _shifts(space, model, cuts[0], layout)
        prices = model.prices(space, [(others, layout)])[0]
        if not prices.min(initial=math.inf) < seconds / ROUNDING:
            break
        cuts, seconds = others[[prices.argmin()]], float(prices.min())
    return cuts


def _shifts(space: CutSpace, model: Synchronous, cuts: np.ndarray, layout: Layout) -> np.ndarray:
    """Return the cuts with some shifted: around the slowest stages, or between two of these and another stage."""
    load = np.diff(space.seconds[cuts]) / model.rates(layout)
    slowest, least = np.argsort(-load, kind="stable")[:SLOWEST], np.argsort(load, kind="stable")[:SLOWEST]
    last = len(cuts) - 2  # the number of the last inner cut
    runs = {(k, k) for s in slowest for k in (s, s + 1) if 1 <= k <= last}
    runs |= {(min(a, b) + 1, max(a, b)) for a, b in itertools.product(slowest, least) if a != b}
    moved = []
    for (first, end), shift in itertools.product(sorted(runs), (*SHIFTS, *(-n for n in SHIFTS))):
        row = cuts.copy()
        row[first : end + 1] += shift
        if np.all(np.diff(row) > 0):
            moved.append(row)
    return np.array(moved, int).reshape(-1, len(cuts))


def _reordered(space: CutSpace, model: Synchronous, layout: Layout, classes: Sequence[Sequence[int]]) -> Plans:
    """Return a layout with its devices exchanged while that makes the step shorter, and balanced cuts for it."""
    widths = [len(group) for group in layout]
    used = [d for group in layout for d in group]
    order = (*used, *sorted(set(range(model.network.num_devices)).difference(used)))

    def price(order: tuple[int, ...]) -> float:
        return min(float(p.min()) for p in model.prices(space, list(_balanced(space, model, [along(order, widths)]))))

    _, order = device_orders.improve(order, price)
    return _fastest(space, model, list(_balanced(space, model, [along(order, widths)])), 1)[0]


def least_memory(space: CutSpace, model: Synchronous, limits: Limits) -> float:
    """Return the least memory of equal devices for which a layout was found that fits."""
    free = replace(model, memory=())
    layouts = _likely(space, free, tuple(range(model.network.num_devices)), limits, MOST_LAYOUTS)
    return min((Chain(space, free, layout).least_memory() for layout in layouts), default=math.inf)
