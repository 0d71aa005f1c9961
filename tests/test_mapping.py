"""Stages on the devices with which swaps can do most: against linear programs and all permutations."""

import itertools

import numpy as np
import pytest
from scipy.optimize import linprog

from jaxpipe import Network, Profile
from jaxpipe.planning import partition_layers
from jaxpipe.planning.cuts import device_mapping
from jaxpipe.planning.cuts.device_mapping import best_mapping, demand, movable_bytes
from jaxpipe.schedules import interleaved, one_f_one_b, simulate


def achievable(held, movable, away, period, bandwidth, latency, groups):
    """Bytes that stages above the mean can have with those below it, as a linear program."""
    p, mean = len(held), sum(held) / len(held)
    pairs = [(s, t) for s in range(p) for t in range(p) if held[s] > mean > held[t]]
    if not pairs:
        return 0.0
    most = [
        min(bandwidth[a][b] * away[s] * max(period - latency[a][b], 0.0) for a in groups[s] for b in groups[t])
        for s, t in pairs
    ]
    rows = [[float(pair[end] == k) for pair in pairs] for end in (0, 1) for k in range(p)]
    limits = [min(held[k] - mean, movable[k]) if held[k] > mean else mean - held[k] for _ in (0, 1) for k in range(p)]
    optimum = linprog([-1.0] * len(pairs), rows, limits, bounds=[(0, n) for n in most])
    return -optimum.fun


def network_of(rng, count, rates=(1.0, 2.0, 4.0, 16.0), latency=0.0):
    matrix = rng.choice(rates, (count, count))
    return Network(np.triu(matrix, 1) + np.triu(matrix, 1).T, latency)


@pytest.mark.parametrize("seed", range(20))
def test_score_is_the_largest_flow(seed):
    rng = np.random.default_rng(seed)
    p, k = int(rng.integers(3, 7)), int(rng.integers(1, 3))
    m = int(rng.integers(2 * p, 3 * p))
    network = network_of(rng, p * k, latency=0.25)
    stash = rng.integers(0, 9, p)
    schedule = one_f_one_b(p, m)
    mappings = np.array([rng.permutation(p * k).reshape(p, k) for _ in range(5)])
    scores = movable_bytes(demand(schedule, stash, 0.75), network.bandwidth, network.latency, mappings)
    # Closed forms of 1F1B: stage i has p - i stashes in flight, three of which are at home.
    held, away = [(p - i) * int(stash[i]) for i in range(p)], [max(p - i - 3, 0) for i in range(p)]
    movable = [away[i] * int(stash[i]) for i in range(p)]
    for mapping, score in zip(mappings, scores, strict=True):
        links = network.bandwidth_bytes_per_second, network.latency_seconds
        assert score == pytest.approx(achievable(held, movable, away, 0.75, *links, mapping.tolist()), rel=1e-9)


def chain(count, sent):
    profile = [1.0] * count
    return Profile.chain([f"layer {k}" for k in range(count)], profile, profile, [0] * count, [0] * count, sent)


def placed(network, p, m, k=1, sent=2.0):
    options = {"replicate": k, "num_stages": p, "num_microbatches": m * k, "reorder": False}
    return partition_layers(chain(p, [sent] * (p - 1) + [0.0]), network, **options)


def step(network, groups, size, m):
    """Seconds of a step of equal stages: a call of 25 microseconds for all work, a send of 40 besides its way."""
    links = [
        40e-6 + max(network.seconds(a, b, size) for a in first for b in second)
        for first, second in itertools.pairwise(groups)
    ]
    work = [1 + 25e-6] * len(groups)
    communication = [(link, link) for link in links]
    backward = [*work[:-1], 1.0]  # the last stage's is in the same call
    schedule = one_f_one_b(len(groups), m)
    return simulate(schedule, forward=work, backward=backward, communication=communication, lockstep=False).makespan


@pytest.mark.parametrize(("p", "k"), [(4, 1), (5, 1), pytest.param(6, 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_all_mappings_that_are_no_slower(p, k, seed):
    rng = np.random.default_rng(seed)
    network, m = network_of(rng, p * k), 2 * p
    partition = placed(network, p, m, k)
    stash, period = [8.0] * p, [0.6, 40.0, 3.0][seed]
    best = best_mapping(partition, one_f_one_b(p, m), stash, period)
    held, away = [(p - i) * 8.0 for i in range(p)], [max(p - i - 3, 0) for i in range(p)]
    movable = [8.0 * n for n in away]
    latency = network.latency_seconds

    def score(groups, period):
        return achievable(held, movable, away, period, network.bandwidth_bytes_per_second, latency, groups)

    devices = [stage.devices for stage in partition.stages]
    limit = 1.01 * step(network, devices, 2.0, m)
    groups = {
        tuple(tuple(sorted(order[i * k : i * k + k])) for i in range(p))
        for order in itertools.permutations(range(p * k))
    }
    # Stages are alike and have no parameters, so only the links between neighbors decide how long a step is.
    groups = [group for group in groups if step(network, group, 2.0, m) <= limit]
    chosen = tuple(stage.devices for stage in best.stages)
    assert chosen in groups
    everything = sum(max(min(n - sum(held) / p, most), 0.0) for n, most in zip(held, movable, strict=True))
    assert everything > 0
    while groups:
        scores = [score(group, period) for group in groups]
        assert score(chosen, period) == pytest.approx(max(scores), rel=1e-8)
        if max(scores) < everything * (1 - 1e-8):
            break
        groups = [group for group, value in zip(groups, scores, strict=True) if value >= max(scores) * (1 - 1e-8)]
        period /= 2
    assert [stage.operators for stage in best.stages] == [stage.operators for stage in partition.stages]
    assert best.bottleneck_seconds == pytest.approx(step(network, chosen, 2.0, m), rel=1e-12)


def test_a_fast_link_is_for_the_stage_that_lends_most():
    """A ring of equal links and one fast chord: the ends of the pipeline are put on it."""
    matrix = np.ones((4, 4))
    matrix[1, 3] = matrix[3, 1] = 100.0
    partition = placed(Network(matrix), 4, 16, sent=0.0)  # so that any mapping is as fast
    best = best_mapping(partition, one_f_one_b(4, 16), [10.0] * 4, 1.0)
    assert {best.stages[0].devices[0], best.stages[3].devices[0]} == {1, 3}
    assert "all mappings for swaps" in best.searched and "all mappings for swaps" in str(best)
    assert type(best).from_json(best.to_json()) == best


def test_memory_of_devices_is_kept():
    """The device at the other end of the fast link is too small for a stage's parameters."""
    matrix = np.ones((3, 3))
    matrix[0, 2] = matrix[2, 0] = 100.0
    profile = Profile.chain("abc", [1.0] * 3, [1.0] * 3, [1.0, 1.0, 0.0], [0.0, 10.0, 10.0], [2.0, 2.0, 0.0])
    options = {"replicate": False, "num_stages": 3, "num_microbatches": 6, "reorder": False}
    stash = [30.0, 10.0, 10.0]
    small = partition_layers(profile, Network(matrix, memory_bytes=(100, 100, 8)), **options)
    best = best_mapping(small, one_f_one_b(3, 6), stash, 1.0)
    assert all(stage.memory_bytes <= (100, 100, 8)[stage.devices[0]] for stage in best.stages)
    assert best.stages[0].devices == (2,)


def test_many_devices_are_exchanged_in_pairs(monkeypatch):
    monkeypatch.setattr(device_mapping, "MOST_DEVICES", 4)
    network = network_of(np.random.default_rng(0), 6, rates=tuple(range(1, 30)))
    partition = placed(network, 6, 12, sent=0.0)  # so that any mapping is as fast
    schedule, stash = one_f_one_b(6, 12), [300.0] * 6
    best = best_mapping(partition, schedule, stash, 1.0)
    assert "exchanges of two devices for swaps" in best.searched
    wanted = demand(schedule, stash, 1.0)
    before, after = (
        movable_bytes(wanted, network.bandwidth, network.latency, np.array([[s.devices for s in mapped.stages]]))[0]
        for mapped in (partition, best)
    )
    assert after > before
    assert sorted(d for stage in best.stages for d in stage.devices) == list(range(6))


@pytest.mark.parametrize(("seed", "sent"), [(0, 0.05), (17, 0.1)])
def test_many_exchanges_together_make_a_step_about_no_slower(seed, sent, monkeypatch):
    monkeypatch.setattr(device_mapping, "MOST_DEVICES", 4)
    network = network_of(np.random.default_rng(seed), 7, rates=tuple(range(1, 30)))
    partition = placed(network, 7, 14, sent=sent)
    best = best_mapping(partition, one_f_one_b(7, 14), [300.0] * 7, 1.0)
    before, after = (step(network, [s.devices for s in x.stages], sent, 14) for x in (partition, best))
    assert best.stages != partition.stages and after <= 1.01 * before


def test_where_nothing_can_be_gained_all_stays():
    """Links that are all alike, and a schedule with several stages on a device."""
    partition = placed(Network.uniform(4, 1e9), 4, 8)
    assert best_mapping(partition, one_f_one_b(4, 8), [1.0] * 4, 1.0).stages == partition.stages
    other = placed(network_of(np.random.default_rng(0), 4), 4, 8)
    assert best_mapping(other, interleaved(4, 8), [1.0] * 4, 1.0) is other
