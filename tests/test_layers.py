"""Partition and placement against every plan there is, priced by code of its own, and against published optima."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from jaxpipe.errors import MemoryBudgetError, PartitionError
from jaxpipe.network import Network
from jaxpipe.planning import partition_layers
from jaxpipe.profile import Edge, Profile
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

    def teams(self, stages):
        """Disjoint sets of devices, one for each stage."""

        def extend(left, teams):
            if len(teams) == stages:
                yield teams
                return
            for size in range(1, (len(left) if self.replicate else 1) + 1):
                for team in itertools.combinations(sorted(left), size):
                    yield from extend(left - set(team), (*teams, team))

        yield from extend(set(range(self.network.num_devices)), ())

    def crossing(self, before):
        made = {
            (e.source, e.output): e.bytes for e in self.profile.edges if e.source in before and e.target not in before
        }
        return sum(made.values())

    def price(self, model, chain, teams):
        p, net, m = self.profile, self.network, self.m
        stages = [sorted(b - a) for a, b in itertools.pairwise(chain)]
        a = [self.crossing(c) for c in chain]
        speed = [min(net.speed[d] for d in team) for team in teams]
        seconds = [sum(p.seconds[v] for v in stage) / s for stage, s in zip(stages, speed, strict=True)]
        weights = [sum(p.parameter_bytes[v] for v in stage) for stage in stages]
        residuals = [sum(p.residual_bytes[v] for v in stage) for stage in stages]
        k = [len(team) for team in teams]
        last = len(stages) - 1
        for s in range(last + 1):
            y = math.ceil(sum(k[s:]) / k[s])
            held = residuals[s] * y + weights[s]
            if model == "synchronous":
                held = residuals[s] * min(2 * y - 1, m) + 2 * weights[s]
            if self.memory is not None and any(held > self.memory[d] for d in teams[s]):
                return math.inf

        def links(count, left, right):
            worst = [0.0]
            for g, h in itertools.product(left, right):
                bandwidth = net.bandwidth_bytes_per_second[g][h]
                worst.append((net.latency_seconds[g][h] + count / bandwidth if bandwidth else math.inf) if count else 0)
            return max(worst)

        if model in ("pipedream", "throughput"):
            bandwidth = net.bandwidth_bytes_per_second[0][1] if net.num_devices > 1 else math.inf
        prices = []
        if model == "pipedream":
            for s in range(last + 1):
                prices.append((seconds[s] + 4 * (k[s] - 1) * weights[s] / (bandwidth * k[s])) / k[s])
                if s > 0:
                    prices.append(2 * a[s] / (bandwidth * k[s]))
                if 0 < s < last:
                    prices.append(2 * a[s + 1] / (bandwidth * k[s]))
            return max(prices)
        if model == "throughput":
            for s in range(last + 1):
                work = (seconds[s] + 2 * (a[s] + a[s + 1]) / bandwidth) / k[s]
                prices.append(work + 4 * (k[s] - 1) / k[s] * weights[s] / (m * bandwidth))
            return max(prices)
        if model == "min_max":
            prices = [c / n for c, n in zip(seconds, k, strict=True)]
            prices += [2 * links(a[s], teams[s - 1], teams[s]) for s in range(1, last + 1)]
            return max(prices)
        forward, backward = (
            [sum(x[v] for v in stage) / s / n for stage, s, n in zip(stages, speed, k, strict=True)]
            for x in (p.forward_seconds, p.backward_seconds)
        )
        exchange = max((2 * links(max(a), teams[s - 1], teams[s]) for s in range(1, last + 1)), default=0.0)
        reduction = 0.0
        for team, w in zip(teams, weights, strict=True):
            n = len(team)
            if n > 1:
                pairs = list(itertools.combinations(team, 2))
                slowest = min(net.bandwidth_bytes_per_second[g][h] for g, h in pairs)
                latency = max(net.latency_seconds[g][h] for g, h in pairs)
                reduction = max(reduction, 2 * (n - 1) * (w / n / slowest + latency) if slowest else math.inf)
        schedule = one_f_one_b(len(stages), m)
        timeline = simulate(schedule, forward=forward, backward=backward, communication=exchange)
        return timeline.makespan + reduction

    def best(self, model):
        prices = [self.price(model, chain, teams) for chain in self.chains() for teams in self.teams(len(chain) - 1)]
        return min(prices)

    def price_of(self, found):
        """The price of an answer, from its stages alone."""
        chain = [frozenset()]
        for stage in found.stages:
            chain.append(chain[-1] | {found.order[k] for k in stage.operators})
        teams = tuple(stage.devices for stage in found.stages)
        assert sorted(found.order) == list(range(self.count)) and len(chain[-1]) == self.count
        used = [d for team in teams for d in team]
        assert len(used) == len(set(used)) and set(used) <= set(range(self.network.num_devices))
        assert all(set(c) in map(set, self.down_sets()) for c in chain)
        return self.price(found.cost_model, chain, teams)


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
        found = partition_layers(profile, net, **options)
        # Sums of the same numbers in another order; all are below a thousand.
        assert found.bottleneck_seconds == pytest.approx(best, rel=1e-12), (seed, model)
        assert plans.price_of(found) == pytest.approx(best, rel=1e-12), (seed, model)
        assert found.lower_bound_seconds == pytest.approx(best, rel=1e-12), (seed, model)


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
