"""Partition and placement against every plan there is, priced by code of its own, and against published optima."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from jaxpipe.costs.network import Network
from jaxpipe.costs.profile import Edge, Profile
from jaxpipe.errors import MemoryBudgetError, PartitionError
from jaxpipe.planning import Partition, partition_layers
from jaxpipe.schedules import one_f_one_b, simulate


DATA = Path(__file__).parent / "data" / "pipedream"
MODELS = ("pipedream", "min_max", "throughput", "synchronous")


class Plans:
    """Every plan of a small instance, with its price by the formulas of the issue, written out."""

    def __init__(self, profile, network, memory=None, replicate=True, num_microbatches=8):
        self.profile, self.network, self.m = profile, network, num_microbatches
        self.memory, self.replicate = memory, replicate
        self.count = len(profile.names)

    def down_sets(self):
        needs = [{e.source for e in self.profile.edges if e.target == v} for v in range(self.count)]
        for size in range(self.count + 1):
            for chosen in map(set, itertools.combinations(range(self.count), size)):
                if all(needs[v] <= chosen for v in chosen):
                    yield frozenset(chosen)

    def chains(self):
        """Nested down-sets from nothing to everything."""
        sets = list(self.down_sets())

        def extend(chain):
            if len(chain[-1]) == self.count:
                yield chain
            for larger in sets:
                if chain[-1] < larger:
                    yield from extend((*chain, larger))

        for chain in extend((frozenset(),)):
            if len(chain) - 1 <= self.network.num_devices:
                yield chain

    def groups(self, stages):
        """Disjoint sets of devices, one for each stage."""

        def extend(left, groups):
            if len(groups) == stages:
                yield groups
                return
            for size in range(1, (len(left) if self.replicate else 1) + 1):
                for group in itertools.combinations(sorted(left), size):
                    yield from extend(left - set(group), (*groups, group))

        yield from extend(set(range(self.network.num_devices)), ())

    def crossing(self, before):
        sent = {
            (e.source, e.output): e.bytes for e in self.profile.edges if e.source in before and e.target not in before
        }
        return sum(sent.values())

    def price(self, model, chain, groups):
        plan = Priced(self, chain, groups)
        return getattr(plan, model)() if plan.fits(model) else math.inf

    def best(self, model):
        prices = [self.price(model, chain, groups) for chain in self.chains() for groups in self.groups(len(chain) - 1)]
        return min(prices)

    def price_of(self, found):
        """The price of an answer, from its stages alone."""
        chain = [frozenset()]
        for stage in found.stages:
            chain.append(chain[-1] | {found.order[k] for k in stage.operators})
        groups = tuple(stage.devices for stage in found.stages)
        assert sorted(found.order) == list(range(self.count)) and len(chain[-1]) == self.count
        used = [d for group in groups for d in group]
        assert len(used) == len(set(used)) and set(used) <= set(range(self.network.num_devices))
        assert all(set(c) in map(set, self.down_sets()) for c in chain)
        return self.price(found.cost_model, chain, groups)


class Priced:
    """A chain on groups: its cost by each model."""

    def __init__(self, plans, chain, groups):
        self.profile, self.network, self.m, self.memory = plans.profile, plans.network, plans.m, plans.memory
        p, net = self.profile, self.network
        self.groups, self.k = groups, [len(group) for group in groups]
        self.stages = [sorted(b - a) for a, b in itertools.pairwise(chain)]
        self.last = len(self.stages) - 1
        self.sent = [plans.crossing(c) for c in chain]
        self.speed = [min(net.speed[d] for d in group) for group in groups]
        self.seconds = [sum(p.seconds[v] for v in stage) / s for stage, s in zip(self.stages, self.speed, strict=True)]
        self.weights = [sum(p.parameter_bytes[v] for v in stage) for stage in self.stages]

    @property
    def bandwidth(self):
        return self.network.bandwidth_bytes_per_second[0][1] if self.network.num_devices > 1 else math.inf

    def fits(self, model):
        for s, stage in enumerate(self.stages):
            residuals, y = sum(self.profile.residual_bytes[v] for v in stage), math.ceil(sum(self.k[s:]) / self.k[s])
            held = residuals * y + self.weights[s]
            if model == "synchronous":
                held = residuals * min(y, math.ceil(self.m / self.k[s])) + 2 * self.weights[s]
            if self.memory is not None and any(held > self.memory[d] for d in self.groups[s]):
                return False
        return True

    def link(self, count, s):
        """Return the seconds of the slowest link between a stage and the one before."""
        worst = [0.0]
        for g, h in itertools.product(self.groups[s - 1], self.groups[s]):
            bandwidth = self.network.bandwidth_bytes_per_second[g][h]
            seconds = self.network.latency_seconds[g][h] + count / bandwidth if bandwidth else math.inf
            worst.append(seconds if count else 0)
        return max(worst)

    def pipedream(self):
        prices = []
        for s, n in enumerate(self.k):
            prices.append((self.seconds[s] + 4 * (n - 1) * self.weights[s] / (self.bandwidth * n)) / n)
            if s > 0:
                prices.append(2 * self.sent[s] / (self.bandwidth * n))
            if 0 < s < self.last:
                prices.append(2 * self.sent[s + 1] / (self.bandwidth * n))
        return max(prices)

    def throughput(self):
        prices = []
        for s, n in enumerate(self.k):
            work = (self.seconds[s] + 2 * (self.sent[s] + self.sent[s + 1]) / self.bandwidth) / n
            prices.append(work + 4 * (n - 1) / n * self.weights[s] / (self.m * self.bandwidth))
        return max(prices)

    def min_max(self):
        prices = [c / n for c, n in zip(self.seconds, self.k, strict=True)]
        return max(prices + [2 * self.link(self.sent[s], s) for s in range(1, self.last + 1)])

    def synchronous(self):
        """Return the makespan: as many micro-batches are dealt out at a time as every group can share evenly.

        A call takes its device 25 microseconds, a message 40 besides its way; the last stage has one call for both.
        """
        p, k = self.profile, self.k
        deal = math.lcm(*k)
        forward, backward = (
            [
                (sum(x[v] for v in stage) / s + call) * (deal / n)
                for stage, s, n, call in zip(self.stages, self.speed, k, calls, strict=True)
            ]
            for x, calls in (
                (p.forward_seconds, [25e-6] * len(k)),
                (p.backward_seconds, [25e-6] * self.last + [0.0]),
            )
        )
        ways = [(self.link(self.sent[s], s) + 40e-6) * deal / min(k[s - 1], k[s]) for s in range(1, self.last + 1)]
        timeline = simulate(
            one_f_one_b(len(k), math.ceil(self.m / deal)),
            forward=forward,
            backward=backward,
            communication=[(way, way) for way in ways],
            lockstep=False,
        )
        return timeline.makespan + max(map(self.reduction, self.groups, self.weights))

    def reduction(self, group, weights):
        n = len(group)
        if n == 1:
            return 0.0
        pairs = list(itertools.combinations(group, 2))
        slowest = min(self.network.bandwidth_bytes_per_second[g][h] for g, h in pairs)
        latency = max(self.network.latency_seconds[g][h] for g, h in pairs)
        return 2 * (n - 1) * (weights / n / slowest + latency) if slowest else math.inf


def instance(seed):
    """A random program and network; small numbers, so that ties and zeros are common."""
    r = np.random.default_rng(seed)
    branching = r.random() < 0.4
    count, devices = int(r.integers(1, 6 if branching else 10)), int(r.integers(1, 5))
    if count > 7:
        devices = min(devices, 3)

    def numbers(most):
        return tuple(float(x) for x in r.integers(0, most, count))

    edges = [Edge(k, k + 1, float(r.integers(0, 9))) for k in range(count - 1)]
    if branching:
        edges = [
            Edge(a, b, float(1 + a), int(r.integers(0, 2)))
            for b in range(1, count)
            for a in sorted({int(x) for x in r.integers(0, b, 2)})
        ]
    profile = Profile(
        tuple(f"op{k}" for k in range(count)),
        numbers(6),
        numbers(9),
        numbers(5),
        numbers(5),
        edges=tuple(edges),
    )
    matrix = r.integers(1, 5, (devices, devices)) * (r.random((devices, devices)) < 0.9)
    matrix = np.triu(matrix, 1) + np.triu(matrix, 1).T
    for d in range(devices):
        if devices > 1 and not matrix[d].any():
            matrix[d, (d + 1) % devices] = matrix[(d + 1) % devices, d] = 1
    speed = tuple(float(x) for x in r.choice([0.5, 1.0, 2.0], devices)) if r.random() < 0.5 else ()
    network = Network(matrix, float(r.choice([0.0, 0.5])), speed=speed)
    memory = tuple(float(x) for x in r.integers(8, 60, devices)) if r.random() < 0.5 else None
    return profile, network, memory, bool(r.random() < 0.6), int(r.integers(1, 7))


def check_instance(seed):
    profile, network, memory, replicate, m = instance(seed)
    for model in MODELS:
        net, cap = network, memory
        if model in ("pipedream", "throughput"):
            net = Network.uniform(network.num_devices, 2.0)
        if model == "pipedream":
            cap = None
        plans = Plans(profile, net, cap, replicate, m)
        best = plans.best(model)
        options = {"cost_model": model, "memory": cap, "replicate": replicate, "num_microbatches": m}
        if best == math.inf:
            with pytest.raises((MemoryBudgetError, PartitionError)) as error:
                partition_layers(profile, net, **options)
            if error.type is MemoryBudgetError:
                budget = int(str(error.value).split("there is a plan is ")[1].split(" bytes")[0])
                fits = Plans(profile, net, (budget,) * net.num_devices, replicate, m)
                assert fits.best(model) < math.inf
                if budget > 1:
                    fits.memory = (budget - 1,) * net.num_devices
                    assert fits.best(model) == math.inf
            continue
        partition = partition_layers(profile, net, **options)
        # Sums of the same numbers in another order; all are below a thousand.
        assert partition.bottleneck_seconds == pytest.approx(best, rel=1e-12), (seed, model)
        assert plans.price_of(partition) == pytest.approx(best, rel=1e-12), (seed, model)
        assert partition.lower_bound_seconds == pytest.approx(best, rel=1e-12), (seed, model)


@pytest.mark.core
@pytest.mark.parametrize("first", range(0, 50, 10))
def test_best_of_all_plans(first):
    for seed in range(first, first + 10):
        check_instance(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1500, 25))
def test_best_of_all_plans_of_many(first):
    for seed in range(first, first + 25):
        check_instance(seed)


# Published profiles, and what the published program makes of them (times; splits are not unique).


@pytest.mark.core
@pytest.mark.parametrize(
    ("network", "devices", "seconds", "sizes"),
    [
        ("vgg16", 2, 0.411041792, None),
        ("vgg16", 4, 0.205520896, [3, 1]),
        ("vgg16", 8, 0.103833170, [7, 1]),
        ("alexnet", 4, 0.034217141, None),
    ],
)
def test_published_optima(network, devices, seconds, sizes):
    profile = Profile.from_pipedream(DATA / network / "graph.txt")
    partition = partition_layers(profile, Network.uniform(devices, 1e9), cost_model="pipedream")
    assert partition.bottleneck_seconds == pytest.approx(seconds, abs=5e-10)
    if sizes:
        assert [len(stage.devices) for stage in partition.stages] == sizes


def test_published_straight_pipeline():
    profile = Profile.from_pipedream(DATA / "vgg16" / "graph.txt")
    partition = partition_layers(profile, Network.uniform(4, 1e9), cost_model="pipedream", replicate=False)
    assert partition.bottleneck_seconds == pytest.approx(0.411041792, abs=5e-10)


def test_residual_network_keeps_only_what_is_read_again():
    # The published program charges 0.1675 s, as it keeps a block's input alive after its last reader.
    profile = Profile.from_pipedream(DATA / "resnet50" / "graph.txt")
    partition = partition_layers(profile, Network.uniform(4, 1e9), cost_model="pipedream")
    assert partition.bottleneck_seconds <= 0.162880924 + 5e-10
    assert partition.ratio == 1.0


# What must hold for any instance.


def random_chain(r, count=12):
    return Profile.chain(
        [f"op{k}" for k in range(count)],
        r.random(count),
        2 * r.random(count),
        5 * r.random(count),
        5 * r.random(count),
        r.random(count),
    )


def random_matrix(r, devices):
    matrix = np.triu(r.choice([0.5, 1.0, 4.0], (devices, devices)), 1)
    return matrix + matrix.T


@pytest.mark.parametrize("cost_model", ["min_max", "synchronous"])
@pytest.mark.parametrize("replicate", [False, True])
def test_names_of_devices_do_not_matter(cost_model, replicate):
    r = np.random.default_rng(7)
    for _ in range(3):
        profile, matrix = random_chain(r, 7), random_matrix(r, 5)
        speed = r.choice([1.0, 2.0], 5)
        shuffled = r.permutation(5)
        first = Network(matrix, 0.01, speed=tuple(speed))
        second = Network(matrix[np.ix_(shuffled, shuffled)], 0.01, speed=tuple(speed[shuffled]))
        prices = [
            partition_layers(profile, net, cost_model=cost_model, replicate=replicate).bottleneck_seconds
            for net in (first, second)
        ]
        # The same sums in another order.
        assert prices[0] == pytest.approx(prices[1], rel=1e-12)


@pytest.mark.parametrize("cost_model", MODELS)
def test_more_never_hurts(cost_model):
    r = np.random.default_rng(11)
    uniform = cost_model in ("pipedream", "throughput")
    for _ in range(3):
        profile, matrix = random_chain(r, 9), random_matrix(r, 4)
        if uniform:
            matrix = np.ones((4, 4))
        cap = None if cost_model == "pipedream" else 60.0

        def price(matrix, cap=cap, profile=profile):
            return partition_layers(
                profile, Network(matrix), cost_model=cost_model, memory=cap, num_microbatches=6
            ).bottleneck_seconds

        base = price(matrix)
        assert price(matrix[:3, :3]) >= base * (1 - 1e-12)
        assert price(2 * matrix) <= base * (1 + 1e-12)
        if cap is not None:
            assert price(matrix, cap=90.0) <= base * (1 + 1e-12)


def test_every_result_is_sent_once_and_over_every_boundary_on_its_way():
    # Operator 0 makes two results of 3 and 5 bytes; both are read by the last operator, the first also in between.
    edges = (Edge(0, 1, 3, 0), Edge(0, 3, 3, 0), Edge(0, 3, 5, 1), Edge(1, 2, 1), Edge(2, 3, 1))
    ones = (1.0,) * 4
    profile = Profile(tuple("abcd"), ones, ones, ones, ones, edges=edges)
    partition = partition_layers(
        profile, Network.uniform(4, 1e9), cost_model="min_max", replicate=False, num_stages=4, reorder=False
    )
    assert [stage.sent_bytes for stage in partition.stages] == [8, 9, 9, 0]


def test_operators_that_share_a_parameter_stay_together():
    ones = [1.0] * 6
    profile = Profile.chain(list("abcdef"), ones, ones, ones, ones, ones)
    tied = Profile.from_json(profile.to_json().replace('"together": []', '"together": [[1, 4]]'))
    assert tied.together == ((1, 4),)
    network = Network.uniform(3, 1e9)
    free = partition_layers(profile, network, cost_model="min_max", replicate=False)
    held = partition_layers(tied, network, cost_model="min_max", replicate=False)
    assert free.bottleneck_seconds == 4.0 and held.bottleneck_seconds == 8.0
    assert [stage.operators for stage in held.stages] == [range(1), range(1, 5), range(5, 6)]


# Searches that cannot look at everything.


def test_many_different_devices(monkeypatch):
    """An order of the devices is searched for; it finds what looking at all of them finds, or says how far it is."""
    r = np.random.default_rng(3)
    for replicate in (False, True):
        profile, matrix = random_chain(r, 10), random_matrix(r, 5)
        network = Network(matrix, speed=tuple(r.choice([1.0, 2.0], 5)))
        exact = partition_layers(profile, network, cost_model="min_max", replicate=replicate)
        with monkeypatch.context() as patch:
            patch.setattr("jaxpipe.planning.cuts.choose_plan.MOST_PLANS", 0)
            partition = partition_layers(profile, network, cost_model="min_max", replicate=replicate)
        assert "some orders of the devices" in partition.searched and "all placements" in exact.searched
        price = Plans(profile, network).price_of(partition)
        assert price == pytest.approx(partition.bottleneck_seconds, rel=1e-12)
        assert partition.lower_bound_seconds <= exact.bottleneck_seconds <= partition.bottleneck_seconds <= 1.5 * price


def test_too_many_cuts(monkeypatch):
    """Eight independent operators between two others: 256 cuts; along one order 10, then single operators move."""
    middle = range(1, 9)
    edges = [*(Edge(0, k, 1, k) for k in middle), *(Edge(k, 9, 1) for k in middle)]
    seconds = (1.0, 2.0, 2.0, 2.0, 2.0, 7.0, 2.0, 2.0, 2.0, 1.0)
    nothing = (0.0,) * 10
    profile = Profile(tuple(map(str, range(10))), seconds, nothing, nothing, nothing, edges=tuple(edges))
    options = {"cost_model": "min_max", "replicate": False}
    exact = partition_layers(profile, Network.uniform(2, 1e9), **options)
    assert (exact.bottleneck_seconds, exact.searched) == (12.0, "all cuts, all placements")
    monkeypatch.setattr("jaxpipe.planning.cuts.cut_space.MOST_DOWN_SETS", 100)
    partition = partition_layers(profile, Network.uniform(2, 1e9), **options)
    assert partition.searched == "one order's cuts, all placements"
    plans = Plans(profile, Network.uniform(2, 1e9))
    assert plans.price_of(partition) == pytest.approx(partition.bottleneck_seconds, rel=1e-12)
    assert 11.5 == partition.lower_bound_seconds <= partition.bottleneck_seconds <= 12.0
    kept = partition_layers(profile, Network.uniform(2, 1e9), reorder=False, **options)
    assert kept.order == tuple(range(10)) and kept.bottleneck_seconds == 14.0


# The answer, and errors.


def test_answer_as_json_and_as_a_table():
    profile = Profile.from_pipedream(DATA / "alexnet" / "graph.txt")
    partition = partition_layers(profile, Network.uniform(4, 1e9), cost_model="pipedream")
    assert Partition.from_json(partition.to_json()) == partition
    text = str(partition)
    assert "2 stages on 4 of 4 devices, pipedream" in text and "34.2 ms" in text
    assert "4 answers as good" in text and "searched: all cuts, all placements" in text


def tiny():
    return Profile.chain("abc", [1, 1, 1], [1, 1, 1], [4, 4, 4], [2, 2, 2], [8, 8, 8])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost_model": "fast"}, r"cost_model='fast'; it must be one of 'pipedream', 'min_max', "),
        ({"cost_model": "pipedream", "memory": 100}, r"'pipedream' knows no memory cap, but memory= "),
        ({"cost_model": "throughput"}, r"'throughput' spreads the all-reduce over .* pass num_microbatches="),
        ({"num_microbatches": 0}, "num_microbatches=0; it must be at least 1"),
        ({"num_stages": 2}, "num_stages=2 needs to know how many devices each stage has"),
        ({"num_stages": 2, "replicate": 2}, r"2 stage\(s\) of 2 device\(s\) each, but the network has 3 devices"),
        ({"replicate": 4}, r"1 stage\(s\) of 4 device\(s\) each, but the network has 3 devices"),
        ({"memory": (1, 2)}, "memory has 2 entries, the network has 3 devices"),
        ({"memory": "much"}, "memory='much' is not a size"),
        ({"memory": 5, "replicate": False, "cost_model": "min_max"}, "memory=5 B: no stages fit. .* is 10 bytes"),
    ],
)
def test_bad_requests(options, message):
    with pytest.raises((PartitionError, MemoryBudgetError), match=message):
        partition_layers(tiny(), Network.uniform(3, 1e9), **options)


@pytest.mark.parametrize("cost_model", ["pipedream", "throughput"])
def test_models_that_know_one_bandwidth(cost_model):
    matrix = [[0, 1, 2], [1, 0, 1], [2, 1, 0]]
    with pytest.raises(PartitionError, match=f"cost_model='{cost_model}' knows one bandwidth .* has several"):
        partition_layers(tiny(), Network(matrix), cost_model=cost_model, num_microbatches=4)
    with pytest.raises(PartitionError, match=r"knows no latency, but network= has 0\.5 s"):
        partition_layers(tiny(), Network.uniform(3, 1.0, 0.5), cost_model=cost_model, num_microbatches=4)


def test_more_stages_than_places_to_cut():
    message = "No 4 stages were found: the profile has 2 places to cut, .* Use fewer stages"
    with pytest.raises(PartitionError, match=message):
        partition_layers(tiny(), Network.uniform(4, 1e9), replicate=False, num_stages=4)


def test_groups_without_a_link():
    """Two islands of two: a pair across them has no link, and that is not a matter of memory."""
    matrix = [[0, 1e9, 0, 0], [1e9, 0, 0, 0], [0, 0, 0, 1e9], [0, 0, 1e9, 0]]
    with pytest.raises(PartitionError, match=r"need a link .* fewer devices in each"):
        partition_layers(tiny(), Network(matrix), replicate=3)


def test_too_few_links_are_named_where_there_are_too_many_plans_to_list():
    """Four pairs of devices, and three stages: no device has a link to two others."""
    ones = [1.0] * 80
    profile = Profile.chain([f"layer {k}" for k in range(80)], ones, ones, ones, ones, ones)
    pairs = np.kron(np.eye(4), 1 - np.eye(2))
    with pytest.raises(PartitionError, match=r"No 3 stages were found: .* 79 places to cut, .* need a link"):
        partition_layers(profile, Network(pairs), replicate=False, num_stages=3)
