"""The search for the first of some programs within a budget, of which each has to be compiled to know."""

import itertools

import numpy as np
import pytest

from jaxpipe.planning.bracket_search import LEFT, next_place, straight_lines


def searched(sizes, estimates, budget, first):
    """What the search compiles, from some known places on."""
    known = {place: sizes[place] for place in first}

    def next_one():
        predicted = straight_lines((estimates[place], size) for place, size in known.items())
        return next_place(known, lambda place: predicted(estimates[place]), len(sizes), budget)

    while (place := next_one()) is not None:
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
    assert next_place({0: 10, 1: 5}, [10, 5].__getitem__, 2, 7) is None
    assert next_place({0: 10, 1: 9}, [10, 5].__getitem__, 2, 7) is None  # all are over it
    assert next_place({0: 900, 4: 490}, [900, 800, 700, 600, 490].__getitem__, 5, 500) is None  # 2 % are left
    assert next_place({}, [3, 2, 1].__getitem__, 3, 5) == 0


def test_bytes_follow_lines_between_known_programs_and_fall_as_these_beyond():
    predicted = straight_lines([(9, 900), (5, 300)])
    assert next_place({0: 900, 4: 300}, lambda place: predicted(9 - place), 5, 500) == 3
    assert [predicted(x) for x in (10, 9, 7, 5, 4)] == pytest.approx([1050, 900, 600, 300, 150], rel=1e-12)
    assert [straight_lines(known)(60) for known in ([(100, 900)], [(100, 900), (50, 950)], [])] == [860, 940, 60]


def test_equal_estimates():
    for known in itertools.combinations(range(4), 2):
        assert next_place(dict.fromkeys(known, 9), lambda _: 1, 4, 5) in (*range(4), None)
