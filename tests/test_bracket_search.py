"""The search for the first of some programs within a budget, of which each has to be compiled to know."""

import itertools

import numpy as np
import pytest

from jaxpipe.planning.bracket_search import LEFT, next_place


def searched(sizes, estimates, budget, first):
    """What the search compiles, from some known places on."""
    known = {place: sizes[place] for place in first}
    while (place := next_place(known, estimates, budget)) is not None:
        assert place not in known and 0 <= place < len(sizes)
        known[place] = sizes[place]
    return known


@pytest.mark.core
@pytest.mark.parametrize("seed", range(50))
def test_the_first_program_within_a_budget_is_found_where_estimates_are_right_but_for_a_scale(seed):
    random = np.random.default_rng(seed)
    sizes = sorted(map(int, random.integers(100, 1000, 18)), reverse=True)
    estimates = [0.4 * size - 30 for size in sizes]
    budget = int(random.integers(min(sizes), 1000))
    known = searched(sizes, estimates, budget, first=(0, 3))
    within = [place for place, size in known.items() if size <= budget]
    best = next(place for place, size in enumerate(sizes) if size <= budget)
    assert within and (min(within) == best or budget - sizes[min(within)] <= LEFT * budget)
    assert len(known) <= 2 + 2


def test_searches_end_whatever_sizes_and_estimates_are():
    random = np.random.default_rng(0)
    for _ in range(200):
        sizes, estimates = map(int, random.integers(1, 100, 12)), random.uniform(0, 100, 12)
        known = searched(list(sizes), sorted(estimates, reverse=True), 50, first=(0,))
        assert len(known) <= 12


def test_nothing_is_compiled_between_neighbors():
    assert next_place({0: 10, 1: 5}, [10, 5], 7) is None
    assert next_place({0: 10, 1: 9}, [10, 5], 7) is None  # all are over it
    assert [next_place({0: 900, 4: size}, [9, 8, 7, 6, 5], 500) for size in (490, 300)] == [None, 3]
    assert next_place({}, [3, 2, 1], 5) == 0


def test_equal_estimates():
    for known in itertools.combinations(range(4), 2):
        assert next_place(dict.fromkeys(known, 9), [1] * 4, 5) in (*range(4), None)
