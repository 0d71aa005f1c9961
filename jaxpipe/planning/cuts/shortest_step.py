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
from jaxpipe.planning.cuts.balance_chain import PRECISION, Chain
from jaxpipe.planning.cuts.choose_plan import Found, chosen
from jaxpipe.planning.cuts.cost_models import CostModel, Layout, Plans, Stored, Synchronous, Way
from jaxpipe.planning.cuts.cut_space import CutSpace, cut_space
from jaxpipe.planning.cuts.layouts import Limits, along, numbers_of_devices
from jaxpipe.planning.cuts.placed_stages import Partition, cut_at, model_of


#: How many layouts are priced with balanced cuts, and for how many of the best cuts are searched.
MOST_LAYOUTS, BEST_LAYOUTS = 160, 5
#: Cuts of layouts whose steps take more than this times the shortest are not searched.
MUCH = 1.5
#: By how much stages may take longer than the slowest of balanced ones, if that makes less to send.
LOOSER = (1.0, 1.01, 1.03, 1.1, 1.3)
#: With more devices than this their order is not improved.
MOST_ORDERED = 32
#: Of how many cuts with the same devices some are shifted, how far, and around how many of the slowest stages.
STARTS, SHIFTS, SLOWEST = 2, (1, 2, 4), 12
#: Up to so many stages two cuts are shifted at once.
MOST_PAIRS = 8
#: How many shifted cuts are priced, those with the least bounds, and by what share a step must get shorter to go on.
MOST_SHIFTED, SHORTER = 100, 1e-4


def shortest_step(
    space: CutSpace, model: Synchronous, classes: Sequence[Sequence[int]], limits: Limits, slack: float
) -> Found | None:
    """Return stages with a short step; None if none fit."""
    orders = _orders(model.network, classes)
    most = max(MOST_LAYOUTS // len(orders), 20)
    plans = [plan for order in orders for plan in _balanced(space, model, _likely(space, model, order, limits, most))]
    plans = _fastest(space, model, plans, BEST_LAYOUTS)
    if len(classes) > 1 and plans and sum(map(len, classes)) <= MOST_ORDERED:
        plans = [_reordered(space, model, plans[0][1], classes), *plans]
    searched = [plan for cuts, layout in plans for plan in _searched(space, model, cuts, layout)]
    return chosen(space, model, [*plans, *searched], slack, "likely placements")


def _orders(network: Network, classes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return orders of the devices in which neighboring stages may use them; those of like devices are one."""
    everything = tuple(range(network.num_devices))
    if len(classes) == 1:
        return [everything]
    number = {d: k for k, group in enumerate(classes) for d in group}
    fastest = sorted(everything, key=lambda d: (-network.speed[d], number[d], d))
    orders = [everything, everything[::-1], tuple(fastest), tuple(fastest[::-1]), *device_orders.seeds(network)]
    return list({tuple(number[d] for d in order): order for order in orders}.values())


def _likely(space: CutSpace, model: CostModel, order: tuple[int, ...], limits: Limits, most: int) -> list[Layout]:
    """Return the layouts along an order that are worth a price, those with the least estimate; and some plain ones."""
    network, places = model.network, len(space.crossing) - 1
    off = ~np.eye(network.num_devices, dtype=bool)
    rate, latency = network.bandwidth[off].max(initial=1.0), network.latency[off].min(initial=np.inf)
    sent = float(np.quantile(space.crossing[1:-1], 0.25)) if places > 1 else 0.0
    message, total = 2 * (latency + sent / rate), float(space.seconds[-1])
    longest, parameters = float(np.diff(space.seconds).max()), float(space.parameters[-1])
    speeds = np.array(network.speed)[list(order)]
    estimates = []
    for widths in dict.fromkeys(numbers_of_devices(limits)):
        count, sizes = len(widths), np.array(widths)
        if count > places:
            continue
        rates = sizes * np.minimum.reduceat(speeds[: sizes.sum()], np.cumsum(sizes) - sizes)
        together = math.lcm(*set(widths))
        rounds = math.ceil((model.num_microbatches or 1) / together)
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
        rows.append(chain.within(chain.least()) or rows[0])
        yield _possible(space, np.array(rows)), layout


def _possible(space: CutSpace, cuts: np.ndarray) -> np.ndarray:
    """Return the rows of cuts between which there are stages."""
    return cuts[space.is_stage(cuts[:, :-1], cuts[:, 1:]).all(1)]


def _fastest(space: CutSpace, model: Synchronous, plans: Sequence[Plans], most: int) -> list[Plans]:
    """Return the plans with the shortest steps, one for each layout, fastest first."""
    plans = [plan for plan in plans if len(plan[0])]
    prices = model.prices(space, plans, MUCH)
    ranked = sorted((float(price.min()), k) for k, price in enumerate(prices))
    return [(plans[k][0][[prices[k].argmin()]], plans[k][1]) for price, k in ranked[:most] if price < math.inf]


def _searched(space: CutSpace, model: Synchronous, cuts: np.ndarray, layout: Layout) -> Iterator[Plans]:
    """Yield cuts within limits that make less to send, and the best of all with its cuts shifted."""
    chain = Chain(space, model, layout)
    least = max(chain.least(), 1e-300)
    rows = [chain.lightest(least * looser) for looser in LOOSER]
    cuts = np.concatenate([cuts, *(np.array([row]) for row in rows if row is not None)])
    yield cuts, layout
    rows = _distinct(cuts)
    order = model.prices(space, [(rows, layout)])[0].argsort(kind="stable")
    yield np.concatenate([shifted(space, model, rows[[k]], layout) for k in order[:STARTS]]), layout


def shifted(space: CutSpace, model: Synchronous, cuts: np.ndarray, layout: Layout) -> np.ndarray:
    """Shift a cut, or some that follow each other, while that makes the step shorter."""
    seconds = float(model.prices(space, [(cuts, layout)])[0][0])
    while len(layout) > 1:
        others = model.likely(space, _shifts(space, model, cuts[0], layout), layout, MOST_SHIFTED)
        prices = model.prices(space, [(others, layout)], within=1)[0]
        if not prices.min(initial=math.inf) < (1 - SHORTER) * seconds:
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
    steps = list(itertools.product(sorted(runs), (*SHIFTS, *(-n for n in SHIFTS))))
    moved = np.tile(cuts, (len(steps), 1))
    for row, ((first, end), shift) in zip(moved, steps, strict=True):
        row[first : end + 1] += shift
    if len(layout) <= MOST_PAIRS:
        first, second = np.triu_indices(len(moved))
        moved = np.concatenate([moved, moved[first] + moved[second] - cuts])
    inside = (np.diff(moved, axis=1) > 0).all(1)
    return _distinct(_possible(space, moved[inside]))


def _distinct(cuts: np.ndarray) -> np.ndarray:
    """Return the rows of cuts once each, in order, as ``np.unique`` does along an axis in many times as long."""
    cuts = cuts[np.lexsort(cuts.T[::-1])]
    return cuts[np.append(True, (cuts[1:] != cuts[:-1]).any(1))[: len(cuts)]]


def _reordered(space: CutSpace, model: Synchronous, layout: Layout, classes: Sequence[Sequence[int]]) -> Plans:
    """Return a layout with its devices exchanged while that makes the step shorter, and balanced cuts for it."""
    widths = [len(group) for group in layout]
    used = [d for group in layout for d in group]
    order = (*used, *sorted(set(range(model.network.num_devices)).difference(used)))

    def price(order: tuple[int, ...]) -> float:
        plans = list(_balanced(space, model, [along(order, widths)]))
        return min(float(p.min(initial=math.inf)) for p in model.prices(space, plans))

    order = device_orders.improve(order, price)
    return _fastest(space, model, list(_balanced(space, model, [along(order, widths)])), 1)[0]


def least_memory(space: CutSpace, model: CostModel, limits: Limits) -> float:
    """Return the least memory of equal devices for which a layout was found that fits."""
    layouts = _likely(space, model, tuple(range(model.network.num_devices)), limits, MOST_LAYOUTS)
    return min((Chain(space, model, layout).least_memory() for layout in layouts), default=math.inf)


def cut_within(
    partition: Partition,
    in_flight: Sequence[int],
    copies: float,
    ways: Sequence[Sequence[tuple[float, float]]],
    memory: float,
) -> list[Partition]:
    """Return the same operators in the same order on the same devices, cut so that the step is short within a memory.

    The second answer is balanced whatever the step's beginning and end take.

    Each stage stores in one of some ways, so that no device needs more than the memory, or about as little as can be
    where that is too little. Operators need their residuals and parameters, and take their seconds, in proportion to
    what the stage that has them now needs and takes in all.

    Args:
      partition: some cuts, with devices.
      in_flight: by stage, the micro-batches whose residuals it keeps.
      copies: how many times the bytes of its parameters it keeps.
      ways: for each way to store the bytes that the devices of each stage need, and the seconds that are added.
      memory: the bytes of each device.
    """
    model, space = model_of(partition), cut_space(partition.profile, reorder=False, starts=partition.starts)
    layout = tuple(stage.devices for stage in partition.stages)
    rows = [np.diff(n * space.residuals + copies * space.parameters) for n in in_flight]
    cuts, work = np.array([0, *(space.first[cut - 1] for cut in partition.cuts)]), np.diff(space.seconds)
    seconds = np.add.reduceat(work, cuts[:-1])
    sizes = [row[a:b].sum() for row, (a, b) in zip(rows, itertools.pairwise(cuts), strict=True)]
    known: list[Way] = []
    for way in ways:
        bytes_of, added = (np.repeat(x, np.diff(cuts)) for x in np.array(way).T / np.maximum([sizes, seconds], 1e-300))
        known.append((_sums(added * work), [_sums(bytes_of * row) for row in rows]))
    stored = Stored(model.network, model.num_microbatches, frozen=model.frozen, known=known)
    least = Chain(space, stored, layout).least_memory() * (1 + PRECISION)
    rooms = model.memory or (math.inf,) * model.network.num_devices
    stored = replace(stored, memory=tuple(min(max(least, memory), room) for room in rooms))
    best = chosen(space, stored, list(_searched(space, stored, cuts[None], layout)), 0.0, "given devices")
    chain = Chain(space, stored, layout)
    rows = [best and best.cuts, chain.lightest(chain.least() * LOOSER[1])]
    model = replace(model, memory=())
    return [cut_at(partition, model, space, np.array(row), layout) for row in rows if row is not None] or [partition]


def _sums(values: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(values)])
