"""Minimum cuts against scipy's maximum flow, and by themselves."""

import random

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from jaxpipe.residuals.minimum_cut import minimum_cut


def largest_flow(price, sources, needs):
    """By a theorem the price of a cheapest cut."""
    count, unlimited = len(price), sum(price.values()) + 1
    edges = {(2 * t, 2 * t + 1): price[t] for t in price}
    edges |= {(2 * u + 1, 2 * t): unlimited for t, before in sources.items() for u in before}
    edges |= {(2 * count, 2 * t): unlimited for t in price if t not in sources}
    edges |= {(2 * t + 1, 2 * count + 1): unlimited for t in needs}
    rows, columns = np.array(list(edges), np.int32).T
    capacity = csr_array((np.array(list(edges.values()), np.int32), (rows, columns)), shape=(2 * count + 2,) * 2)
    return maximum_flow(capacity, 2 * count, 2 * count + 1).flow_value


def follows(t, cut, sources):
    return t in cut or (t in sources and all(follows(u, cut, sources) for u in sources[t]))


@pytest.mark.core
@pytest.mark.parametrize("seed", range(50))
def test_random_programs_are_cut_where_it_is_cheapest(seed):
    rng = random.Random(seed)
    count = rng.randint(1, 40)
    price = {t: rng.choice([0, 1, 2, 3, 4, 8]) for t in range(count)}
    derived = [t for t in range(1, count) if rng.random() < 0.8]
    sources = {t: rng.sample(range(t), min(t, rng.randint(1, 3))) for t in derived}
    needs = [t for t in range(count) if rng.random() < 0.3]
    cut = minimum_cut(price, sources, needs)
    assert all(follows(t, cut, sources) for t in needs)
    assert sum(price[t] for t in cut) == largest_flow(price, sources, needs)


def test_of_equal_cuts_it_is_the_last():
    assert minimum_cut({0: 1, 1: 1, 2: 1}, {1: [0], 2: [1]}, [2]) == {2}


def test_prices_may_be_larger_than_words():
    assert minimum_cut({0: 2**60, 1: 2**60 + 1}, {1: [0]}, [1]) == {0}


def test_long_chains_take_no_recursion():
    count = 20_000
    price = {t: 2 + (t != 777) for t in range(count)}
    assert minimum_cut(price, {t: [t - 1] for t in range(1, count)}, [count - 1]) == {777}


def test_nothing_is_needed_of_nothing():
    assert minimum_cut({}, {}, []) == set() == minimum_cut({0: 1}, {}, [])
