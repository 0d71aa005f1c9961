"""Cuts for devices that run free: against all cuts, plain ones and bounds, priced by the simulator of schedules."""

import dataclasses
import functools
import itertools
import math
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from jaxpipe import Network, Node, Profile
from jaxpipe.costs.topology import INFINIBAND_HDR, NVLINK_A100, NVLINK_V100
from jaxpipe.planning import partition_layers
from jaxpipe.planning.cuts import choose_plan
from jaxpipe.planning.cuts.cost_models import Timelines, shortest
from jaxpipe.planning.cuts.placed_stages import step_bound
from jaxpipe.planning.dispatch_timeline import Dispatching, dispatched_timeline, host_seconds
from jaxpipe.schedules import gpipe, interleaved, one_f_one_b, simulate, zero_bubble
from jaxpipe.schedules.replicas import StageReplicas
from jaxpipe.schedules.table import without_backward


#: Seconds of a call and of a send, as ``scripts.bench_dispatch`` measures them.
CALL, SEND = 25e-6, 40e-6


@pytest.mark.parametrize("frozen", [False, True])
def test_makespan_of_many_plans_is_the_simulators(frozen):
    r = np.random.default_rng(0)
    for p, m in itertools.product(range(1, 7), (1, 2, 3, 7, 12)):
        forward, backward, ways = r.random((3, p)), 2 * r.random((3, p)), r.random((3, p - 1))
        idle = int(r.integers(0, p)) if frozen else 0
        trained = np.broadcast_to(np.arange(p) >= idle, (3, p))
        seconds = Timelines(forward, backward, ways, trained, np.zeros(3), m).seconds(np.arange(3))
        schedule = without_backward(one_f_one_b(p, m), idle)
        for k in range(3):
            links = [(way, way) for way in ways[k].tolist()]
            work = {"forward": forward[k].tolist(), "backward": backward[k].tolist()}
            assert simulate(schedule, **work, communication=links, lockstep=False).makespan == seconds[k]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("within", [1.0, 1.05, math.inf])
def test_plans_whose_bounds_are_high_are_left_out(frozen, within):
    """No bound is above what its plan takes, and of all plans none within the limit is missing."""
    r = np.random.default_rng(2)
    for m, p in itertools.product((1, 3, 8, 20), (1, 2, 5, 9)):
        parts = []
        for _ in range(2):
            forward, backward, ways = r.random((300, p)), 2 * r.random((300, p)), 0.5 * r.random((300, p - 1))
            trained = np.broadcast_to(np.arange(p) >= r.integers(0, p), (300, p)) if frozen else np.full((300, p), True)
            parts.append(Timelines(forward, backward, ways, trained, r.random(300), m))
        every = [x.seconds(np.arange(300)) for x in parts]
        assert all((x.bounds() <= seconds * (1 + 1e-12)).all() for x, seconds in zip(parts, every, strict=True))
        found, limit = np.concatenate(shortest(parts, within)), within * np.concatenate(every).min()
        known, all_seconds = np.isfinite(found), np.concatenate(every)
        assert (found[known] == all_seconds[known]).all()
        assert known[all_seconds <= limit].all()
        assert known.all() == (within == math.inf)


def test_the_host_makes_all_calls_of_a_step():
    """A table of ``p`` stages and ``m`` micro-batches: two calls, one in the last stage, and two sends between two."""
    for p, m in ((1, 3), (2, 4), (4, 8)):
        alone = StageReplicas((1,) * p)
        seconds = host_seconds(one_f_one_b(p, m), [(0,)] * p, alone)
        assert seconds == pytest.approx(m * ((2 * p - 1) * CALL + 2 * (p - 1) * SEND) - CALL)
        nothing = Dispatching([(0.0, 0.0)] * p, [(0,)] * p, alone)
        assert dispatched_timeline(one_f_one_b(p, m), [[0.0] * p] * 3, nothing).makespan >= seconds
    busiest = host_seconds(zero_bubble(4, 8), [(0,), (0,), (1,), (1,)], StageReplicas((1,) * 4))
    assert busiest == pytest.approx(8 * (6 * CALL + 3 * SEND) - CALL)  # of the first: two stages, three of their sends


table = functools.cache(one_f_one_b)


def free_step(profile, cuts, m, link=0.0):
    """Seconds of a step of 1F1B, one device for each stage, with a call for all work and sends of ``link`` seconds."""
    ends = list(itertools.pairwise((0, *cuts, len(profile.names))))
    forward = [sum(profile.forward_seconds[a:b]) + CALL for a, b in ends]
    backward = [sum(profile.backward_seconds[a:b]) + CALL for a, b in ends]
    backward[-1] -= CALL
    work = {"forward": forward, "backward": backward}
    return simulate(table(len(ends), m), **work, communication=link + SEND, lockstep=False).makespan


def random_chain(r, count=12):
    names, nothing = [str(k) for k in range(count)], [0.0] * count
    return Profile.chain(names, r.random(count), 2 * r.random(count), nothing, nothing, [1.0] * (count - 1) + [0.0])


def cuts_of(partition):
    return tuple(stage.operators.stop for stage in partition.stages[:-1])


@pytest.mark.core
@pytest.mark.parametrize("listed", [True, False])
def test_cuts_are_as_good_as_the_best_of_all(listed, monkeypatch):
    """No cut is better than one of all that were listed; next to none is where they were searched for."""
    r = np.random.default_rng(1)
    if not listed:
        monkeypatch.setattr(choose_plan, "MOST_PLANS", 0)
    excess = []
    for number in range(200):
        profile, p, m = random_chain(r), 3 + number % 2, int(r.integers(2, 7))
        options = {"replicate": False, "num_stages": p, "num_microbatches": m}
        partition = partition_layers(profile, Network.uniform(p, 1e15), **options)
        best = min(free_step(profile, cuts, m) for cuts in itertools.combinations(range(1, 12), p - 1))
        excess.append(free_step(profile, cuts_of(partition), m) / best - 1)
        assert partition.bottleneck_seconds == pytest.approx(free_step(profile, cuts_of(partition), m), rel=1e-9)
        assert partition.lower_bound_seconds <= best * (1 + 1e-9)
    assert max(excess) <= (1e-9 if listed else 0.02) and np.mean(excess) <= (1e-9 if listed else 0.002)


def test_no_schedule_is_below_the_bound():
    r = np.random.default_rng(2)
    for _ in range(20):
        profile, p, m = random_chain(r), 3, 6
        bound = step_bound(profile, Network.uniform(p, 1e15), m)
        for cuts in itertools.combinations(range(1, 12), p - 1):
            ends = list(itertools.pairwise((0, *cuts, 12)))
            forward, backward = (
                [sum(x[a:b]) for a, b in ends] for x in (profile.forward_seconds, profile.backward_seconds)
            )
            half = [b / 2 for b in backward]
            for schedule in (one_f_one_b(p, m), gpipe(p, m), zero_bubble(p, m)):
                work = {"forward": forward, "backward_input": half, "backward_weight": half}
                assert simulate(schedule, **work, lockstep=False).makespan >= bound * (1 - 1e-9)
        even = list(itertools.pairwise(range(0, 13, 2)))
        forward, backward = (
            [sum(x[a:b]) for a, b in even] for x in (profile.forward_seconds, profile.backward_seconds)
        )
        step = simulate(interleaved(p, m), forward=forward, backward=backward, lockstep=False).makespan
        assert step >= bound * (1 - 1e-9)


def layers(w, x):
    for layer in w:
        x = jnp.tanh(x @ layer)
    return x


def pipeline(**options):
    weights = [jax.random.normal(jax.random.key(k), (32, 32)) for k in range(6)]
    batch = jax.random.normal(jax.random.key(9), (32, 32))
    return jaxpipe.partition(
        jax.tree_util.Partial(layers, weights),
        jax.make_mesh((4,), ("stage",), devices=jax.devices()[:4]),
        batch,
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        **{"num_microbatches": 4, "profile": "analytic", "options": jaxpipe.PlanOptions(compile=False), **options},
    )


@pytest.mark.parametrize("schedule", ["auto", "1f1b", "gpipe", "zero_bubble", "interleaved", "pipedream"])
def test_no_plan_is_below_its_bound(schedule):
    plan = pipeline(schedule=schedule).plan
    assert 0 < plan.lower_bound_seconds <= plan.step_seconds


@pytest.mark.core
def test_a_long_chain_takes_memory_in_proportion():
    """A row of all operators for each of 8,000 places would be 61 MiB."""
    count = 8000
    seconds, nothing = [1e-3] * count, [0.0] * count
    profile = Profile.chain([str(k) for k in range(count)], seconds, seconds, nothing, nothing, [1e3] * count)
    tracemalloc.start()
    partition = partition_layers(profile, Network.uniform(4, 1e9), replicate=False, reorder=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [stage.operators.stop for stage in partition.stages] == [2000, 4000, 6000, 8000]
    assert peak < 2**24


@pytest.mark.core
def test_groups_of_an_edited_profile_stay_together():
    usual = pipeline()
    first, last = usual.plan.stages[0].operators[1] - 1, usual.plan.stages[1].operators[0]
    edited = dataclasses.replace(usual.profile, together=((first, last),))
    kept = pipeline(profile=edited)
    assert any(a <= first and last < b for a, b in (stage.operators for stage in kept.plan.stages))
    assert not any(a <= first and last < b for a, b in (stage.operators for stage in usual.plan.stages))


# Wide networks.


def wide_chain(count):
    r = np.random.default_rng(0)
    forward, sizes = r.uniform(1e-3, 3e-3, count), [2.0**25] * (count - 1) + [0.0]
    names = [str(k) for k in range(count)]
    return Profile.chain(names, forward, 2 * forward, [2.0**23] * count, [2.0**26] * count, sizes)


def networks(devices):
    node = Node(devices=8, bandwidth_bytes_per_second=NVLINK_A100)
    return {
        "uniform": Network.uniform(devices, INFINIBAND_HDR),
        "nodes": Network.from_nodes([node] * (devices // 8), INFINIBAND_HDR, 5e-6),
    }


def equal_stages(profile, network, stages, copies, m):
    """A step of stages of as many operators and devices each; device numbers as they come."""
    ends = np.linspace(0, len(profile.names), stages + 1).astype(int).tolist()
    rounds = math.ceil(m / copies)
    forward, backward = (
        [sum(x[a:b]) + CALL for a, b in itertools.pairwise(ends)]
        for x in (profile.forward_seconds, profile.backward_seconds)
    )
    backward[-1] -= CALL
    groups = [range(k * copies, (k + 1) * copies) for k in range(stages)]
    links = [
        SEND + max(network.seconds(a, b, 2.0**25) for a in first for b in second)
        for first, second in itertools.pairwise(groups)
    ]
    work = (np.array([x]) for x in (forward, backward, links, [True] * len(forward), 0.0))
    step = Timelines(*work, rounds).seconds(np.arange(1))[0]
    parameters = 2.0**23 * max(b - a for a, b in itertools.pairwise(ends))
    inside = max((network.seconds(0, b, parameters / copies) for b in groups[0] if b), default=0.0)
    return step + 2 * (copies - 1) * inside


def check_wide(operators, devices, name, replicate, seconds, fewer):
    profile, network, m = wide_chain(operators), networks(devices)[name], 64
    begun = time.process_time()
    partition = partition_layers(profile, network, replicate=replicate, num_microbatches=m)
    assert time.process_time() - begun <= seconds
    assert partition.lower_bound_seconds <= partition.bottleneck_seconds
    step = partition.bottleneck_seconds * (1 - 1e-9)
    sizes = [2**k for k in range(devices.bit_length()) if 2**k <= operators]
    for stages, copies in itertools.product(sizes, sizes if replicate else [1]):
        if stages * copies <= devices:
            assert step <= equal_stages(profile, network, stages, copies, m), (stages, copies)
    for count in fewer:
        few = networks(count)[name]
        assert step <= partition_layers(profile, few, replicate=replicate, num_microbatches=m).bottleneck_seconds
    return partition


@pytest.mark.parametrize("name", ["uniform", "nodes"])
@pytest.mark.parametrize("replicate", [False, True])
def test_many_devices(name, replicate):
    partition = check_wide(200, 64, name, replicate, 10, fewer=(8, 32, 56))
    # One device for each of 64 stages takes 3.07 s.
    assert partition.bottleneck_seconds < 3.07


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uniform", "nodes"])
@pytest.mark.parametrize("replicate", [False, True])
def test_very_many_devices(name, replicate):
    check_wide(1000, 1024, name, replicate, 120, fewer=(256, 1016))


@pytest.mark.parametrize("slow_first", [False, True])
def test_devices_of_two_kinds_all_have_work(slow_first):
    fast = Node(devices=4, bandwidth_bytes_per_second=NVLINK_A100, speed=2.5)
    slow = Node(devices=4, bandwidth_bytes_per_second=NVLINK_V100)
    nodes = [slow, fast] if slow_first else [fast, slow]
    partition = partition_layers(wide_chain(200), Network.from_nodes(nodes, INFINIBAND_HDR, 5e-6), num_microbatches=64)
    assert sorted(d for stage in partition.stages for d in stage.devices) == list(range(8))
    # All devices busy all the time, and a fifth more.
    assert partition.bottleneck_seconds <= 1.2 * 64 * sum(wide_chain(200).seconds) / (4 * 2.5 + 4)
