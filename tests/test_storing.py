"""Storage under a budget: the integer program and the greedy search against all choices there are."""

import heapq
import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.graph.graph import is_differentiable, trace
from jaxpipe.planning.storage.fastest_choice import lowest_peak
from jaxpipe.planning.storage.greedy import give_up
from jaxpipe.planning.storage.integer_program import solve
from jaxpipe.planning.storage.prices import Prices
from jaxpipe.planning.storage.storage_items import stage_items
from jaxpipe.planning.storage.storage_problem import (
    NOT_STORED,
    Item,
    Option,
    Problem,
    SolverOptions,
    outcome_of,
)
from jaxpipe.residuals.vjp_program import build
from jaxpipe.targets.building import building_for
from jaxpipe.targets.rates import OTHER


def all_choices(problem):
    """Every choice with what it leads to."""
    ways = [(NOT_STORED, *range(len(item.options))) for item in problem.items]
    for choice in itertools.product(*ways):
        outcome = outcome_of(problem, choice)
        if outcome is not None:
            yield choice, outcome


def fastest(problem):
    """Seconds of the best choice within the limits; infinite if no choice fits."""
    return min((outcome.seconds for _, outcome in all_choices(problem) if outcome.fits()), default=math.inf)


class AllAtOnce:
    """The outcomes of all choices of a problem, in arrays: written apart from ``outcome_of``, for up to a million.

    A row for each choice; items are looked at from the last to the first, since they are computed from those before.
    """

    def __init__(self, problem):
        counts = [len(item.options) + 1 for item in problem.items]
        chosen = np.indices(counts, np.int8).reshape(len(counts), -1) - 1  # -1: not stored
        rows, events = chosen.shape[1], len(problem.base)
        self.seconds = np.zeros(rows)
        self.possible = np.ones(rows, bool)
        self.stash = np.zeros(rows, np.int64)
        reads = np.zeros((len(counts), events, rows), bool)
        computed = np.zeros((len(counts), rows), bool)  # computed again in an earlier event
        for e in range(events):
            for k in reversed(range(len(counts))):
                item = problem.items[k]
                if e in item.uses:
                    reads[k, e] = True
                fresh = reads[k, e] & (chosen[k] < 0) & ~computed[k]
                computed[k] |= fresh
                if item.seconds is None:
                    self.possible &= ~fresh
                    continue
                self.seconds += fresh * item.seconds
                for source in item.sources:
                    reads[source, e] |= fresh
        self.bytes = np.zeros((events, rows), np.int64) + np.asarray(problem.base)[:, None]
        for k, item in enumerate(problem.items):
            sizes, unpacked, seconds = (
                np.array([*(getattr(option, name) for option in item.options), 0])[chosen[k]]
                for name in ("bytes", "unpacked_bytes", "seconds")
            )
            self.stash += sizes
            self.seconds += seconds
            before = np.zeros(rows, bool)
            for e in range(events):
                after = reads[k, e:].any(0)
                before |= reads[k, e]
                during = before & after
                here = during * np.where(chosen[k] < 0, item.bytes, unpacked)
                self.bytes[e] += here + (after * sizes if problem.frees else 0)
        self.bytes += problem.held * self.stash
        self.peak = self.bytes.max(0)
        self.fits = self.possible & (self.peak <= problem.capacity)

    def fastest(self):
        """Seconds of the best choice within the limits; infinite if no choice fits."""
        return float(self.seconds[self.fits].min(initial=math.inf))

    def lowest_peak(self):
        """The least bytes that any choice needs."""
        return int(self.peak[self.possible].min())


def instance(seed, count=None, forms=None):
    """A random problem with small numbers, so that ties and zeros are common."""
    r = np.random.default_rng(seed)
    drawn, events = int(r.integers(1, 8)), int(r.integers(1, 7))
    items = []
    for k in range(count or drawn):
        options = [
            Option(f"form{n}", int(r.integers(0, 9)), float(r.integers(0, 4)), int(r.integers(0, 6)) * int(n > 0))
            for n in range(int(r.integers(0, 3)) if forms is None else forms)
        ]
        again = bool(r.random() < 0.8) or not options
        items.append(
            Item(
                f"item{k}",
                tuple(options),
                tuple(sorted({int(e) for e in r.integers(0, events, int(r.integers(0, 3)))})),
                int(r.integers(0, 9)),
                tuple(sorted({int(j) for j in r.integers(0, k, int(r.integers(0, 3)))})) if k and again else (),
                float(r.integers(0, 6)) if again else None,
            )
        )
    base = tuple(int(b) for b in r.integers(0, 5, events))
    return Problem(tuple(items), base, float(r.integers(3, 40)), int(r.integers(0, 3)), bool(r.random() < 0.6))


def check_instance(seed):
    problem = instance(seed)
    best = fastest(problem)
    answer = solve(problem, SolverOptions())
    if best == math.inf:
        assert answer.choice is None and answer.infeasible, seed
    else:
        outcome = outcome_of(problem, answer.choice)
        assert outcome is not None and outcome.fits(), seed
        assert answer.optimal and outcome.seconds == best, seed
    unlimited = Problem(problem.items, problem.base, math.inf, problem.held, problem.frees)
    lowest = min(f.peak_bytes for _, f in all_choices(unlimited) if f.fits())
    least = solve(unlimited, SolverOptions(least_peak=True))
    assert outcome_of(problem, least.choice).peak_bytes == lowest, seed


@pytest.mark.parametrize("first", range(0, 60, 15))
def test_best_of_all_choices(first):
    for seed in range(first, first + 15):
        check_instance(seed)


def test_outcomes_in_arrays_are_those_of_the_simulation():
    for seed in range(40):
        problem, arrays = instance(seed), AllAtOnce(instance(seed))
        outcomes = dict(all_choices(problem))
        ways = itertools.product(*((NOT_STORED, *range(len(item.options))) for item in problem.items))
        for row, choice in enumerate(ways):
            assert arrays.possible[row] == (choice in outcomes), seed
            if choice in outcomes:
                outcome = outcomes[choice]
                assert arrays.seconds[row] == outcome.seconds and arrays.stash[row] == outcome.stash_bytes, seed
                assert arrays.bytes[:, row].tolist() == outcome.bytes.tolist(), seed


def check_large_instance(seed):
    """Ten tensors, each stored in one of three forms or computed again: a million choices."""
    problem = instance(seed, count=10, forms=3)
    arrays, answer = AllAtOnce(problem), solve(problem, SolverOptions())
    if arrays.fastest() == math.inf:
        assert answer.choice is None and answer.infeasible, seed
    else:
        outcome = outcome_of(problem, answer.choice)
        assert outcome is not None and outcome.fits(), seed
        assert answer.optimal and outcome.seconds == arrays.fastest(), seed
    least = solve(problem, SolverOptions(least_peak=True))
    assert outcome_of(problem, least.choice).peak_bytes == arrays.lowest_peak(), seed


@pytest.mark.parametrize("seed", range(5000, 5006))
def test_best_of_a_million_choices(seed):
    check_large_instance(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(6000, 6200, 10))
def test_best_of_a_million_choices_of_many(first):
    for seed in range(first, first + 10):
        check_large_instance(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, 50))
def test_best_of_all_choices_of_many(first):
    for seed in range(first, first + 50):
        check_instance(seed)


@pytest.mark.parametrize("seed", range(60))
def test_a_change_costs_what_the_changed_choice_does(seed):
    """Some items at once, given up or stored again; ``outcome_of``, which walks anew, is compared with arrays above."""
    random, problem = np.random.default_rng(seed), instance(seed)
    walk = outcome_of(problem, [0 if item.options else NOT_STORED for item in problem.items])
    assert walk is not None
    impossible = 0
    for _ in range(20):
        group = random.choice(len(problem.items), random.integers(1, 3))
        option = int(random.integers(NOT_STORED, min(len(problem.items[k].options) for k in group)))
        other = [option if k in group else chosen for k, chosen in enumerate(walk.choice)]
        expected, changed = outcome_of(problem, other), walk.changed(dict.fromkeys(group.tolist(), option))
        assert (expected is None) == (changed is None)
        if changed is None:
            impossible += 1
        else:
            assert changed.choice == tuple(other)
            for name in ("seconds", "stash_bytes", "swapped_bytes", "computed", "last"):
                assert getattr(changed, name) == getattr(expected, name)
            assert changed.bytes.tolist() == expected.bytes.tolist()
            walk = changed
    assert impossible < 20


def test_greedy_keeps_the_limits():
    """It may fail where there is an answer, and be slower than the best, but never lie."""
    solved, ratios = 0, []
    for seed in range(200):
        problem = instance(seed)
        best, answer = fastest(problem), give_up(problem)
        if best == math.inf:
            assert answer is None, seed
        elif answer is not None:
            outcome = outcome_of(problem, answer.choice)
            assert outcome.fits() and outcome.seconds >= best, seed
            solved += 1
            ratios.append((outcome.seconds + 1) / (best + 1))
    possible = sum(fastest(instance(seed)) < math.inf for seed in range(200))
    # It solves 146 of 148, in 1.003 times the best time in the mean: room for other rules, not for a broken one.
    assert solved >= 0.8 * possible
    assert np.mean(ratios) < 1.05


def test_the_lowest_peak_with_and_without_a_solver():
    """Without time the greedy rule goes on to its end: it may stop early, but what it returns can be run."""
    met = 0
    for seed in range(60):
        problem = replace(instance(seed), capacity=math.inf)
        least = AllAtOnce(problem).lowest_peak()
        solved, greedy = (lowest_peak(problem, SolverOptions(time_limit=t)) for t in (10.0, 0.0))
        assert solved.outcome.peak_bytes == least, seed
        assert outcome_of(problem, greedy.choice).peak_bytes == greedy.outcome.peak_bytes >= least, seed
        met += greedy.outcome.peak_bytes == least
    assert met >= 0.8 * 60


def test_bounds_hold_where_a_solver_stops_early():
    """A solver that may stop 30 % from the best proves less than the value of its answer."""
    for seed in range(5000, 5012):
        problem = replace(instance(seed, count=10, forms=3), capacity=math.inf)
        arrays = AllAtOnce(problem)
        # Seconds and bytes are whole numbers here. Of equals the smallest stash: that and rounding are thousandths.
        assert solve(problem, SolverOptions(gap=0.3)).bound <= arrays.fastest() + 1e-3, seed
        assert solve(problem, SolverOptions(gap=0.3, least_peak=True)).bound <= arrays.lowest_peak() + 1e-3, seed


def chain(layers, budget):
    """Unit forward operators, a loss, unit backward operators; gradients count in memory, the loss as one of them."""
    items = tuple(
        Item(f"f{k}", (Option("keep", 1),), (layers - 1 - k,), 1, (k - 1,) if k else (), 1.0) for k in range(layers)
    )
    return Problem(items, (2,) * layers, budget)


def executions_with_any_recomputation(layers, budget):
    """The fewest executions of any schedule of the chain, by Dijkstra over what is in memory."""
    count = 2 * layers + 1
    reads = [{v - 1} if v else set() for v in range(count)]
    for k in range(layers):
        reads[2 * layers - k].add(k)
    queue, seen = [(0, (), ())], set()
    queue = [(0, 0, frozenset())]
    while queue:
        cost, done, memory = heapq.heappop(queue)
        if done == count:
            return cost
        if (done, memory) in seen:
            continue
        seen.add((done, memory))
        for v in memory:
            heapq.heappush(queue, (cost, done, memory - {v}))
        for v in range(count):
            if v not in memory and reads[v] <= memory and len(memory) < budget and v <= done:
                heapq.heappush(queue, (cost + 1, max(done, v + 1), memory | {v}))
    return math.inf


@pytest.mark.parametrize(
    ("layers", "budget", "executions"),
    [(4, 5, 10), (4, 7, 9), (6, 5, 16), (6, 7, 14), (8, 5, 22), (8, 7, 20)],
)
def test_known_optima_of_chains(layers, budget, executions):
    answer = solve(chain(layers, budget), SolverOptions())
    assert answer.optimal
    outcome = outcome_of(chain(layers, budget), answer.choice)
    assert outcome.peak_bytes <= budget
    assert 2 * layers + 1 + outcome.seconds == executions


def test_a_chain_that_needs_a_tensor_three_times():
    """Six layers in four units of memory: 18 executions do it, but not with one decision for each tensor."""
    assert executions_with_any_recomputation(6, 4) == 18
    assert executions_with_any_recomputation(6, 5) == 16
    assert all(not outcome.fits() for _, outcome in all_choices(chain(6, 4)))
    assert solve(chain(6, 4), SolverOptions()).infeasible
    assert solve(chain(6, 4), SolverOptions(least_peak=True)).choice is not None


ROWS, WIDTH, CLASSES = 64, 16, 1000


def events_of(platform):
    """Base bytes of the events of a cross entropy behind two products, and the item of its logits."""

    def loss(x, first, second, labels):
        picked = jnp.take_along_axis(jax.nn.log_softmax(x @ first @ second), labels[:, None], axis=-1)
        return -picked.mean()

    weights = jnp.ones((WIDTH, WIDTH)), jnp.ones((WIDTH, CLASSES))
    with building_for(platform):
        graph = trace(loss, jnp.ones((ROWS, WIDTH)), *weights, jnp.zeros(ROWS, jnp.int32))
        stage = build(graph, [t for t in graph.inputs if is_differentiable(graph.tensors[t].aval)], held=graph.inputs)
        problem = stage_items(stage, Prices(OTHER), graph.inputs).problem
    return problem.base, max(problem.items, key=lambda item: item.bytes)


def test_a_gpu_writes_the_gradient_of_a_loss_over_its_logits():
    logits = 4 * ROWS * CLASSES
    base, item = events_of("gpu")
    assert item.bytes == logits
    assert item.uses == (0,)
    assert base[0] < 0.01 * logits
    gradients = 4 * WIDTH * (ROWS + CLASSES)  # of the second product's operands, beside the logits' cotangent
    assert base[1:] == (logits + gradients,)


def test_a_cpu_writes_the_cotangents_of_each_step():
    base, item = events_of("cpu")
    assert len(base) > 2
    assert max(base) >= 2 * item.bytes


def convolution_events(platform):
    """Events of two convolutions with ReLUs, whose feature maps have 1 and 2 KiB, and the items."""

    def loss(x, first, second):
        for kernel in (first, second):
            x = jax.nn.relu(jax.lax.conv(x, kernel, (1, 1), "SAME"))
        return x.sum()

    arguments = jnp.ones((1, 4, 8, 8)), jnp.ones((4, 4, 1, 1)), jnp.ones((8, 4, 1, 1))
    with building_for(platform):
        graph = trace(loss, *arguments).with_parameters([False, True, True])
        stage = build(graph, graph.inputs[1:], held=graph.inputs)
        return stage_items(stage, Prices(OTHER), graph.inputs, released=graph.inputs[1:]).problem


def test_on_a_gpu_a_convolution_frees_what_its_kernels_gradient_reads_before_its_inputs_cotangent():
    """And nothing is written over its result: not the ReLU's cotangent, which comes next."""
    problem = convolution_events("gpu")
    small, large = 4 * 4 * 64, 4 * 8 * 64
    last_relu, gradient, cotangent, first_relu = problem.base
    assert last_relu == large
    assert gradient == large + 4 * 8 * 4
    assert cotangent == large + small + 4 * 8 * 4  # the kernel turned around
    assert first_relu == 2 * small  # the gradient of the first kernel reads less, and nothing that is stored
    (inner,) = (item for item in problem.items if item.name.endswith("relu f32[1,4,8,8]"))
    assert inner.uses == (1,)


def test_items_are_what_follows_from_a_product_and_masks_by_themselves():
    """A start from the ReLU's result needs no memory for the convolution's own."""
    names = [item.name.split("/")[-1] for item in convolution_events("gpu").items]
    assert names == ["relu f32[1,4,8,8]", "relu bool[1,4,8,8]", "relu f32[1,8,8,8]", "relu bool[1,8,8,8]"]
