"""The min-max dynamic programme against every cut there is."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.errors import PartitionError
from jaxpipe.planning.cut import cut


def cost(seconds, transfer, cuts):
    """The slowest stage, and all that is sent. Integers: exact, so that ties are ties."""
    inner = cuts[1:-1]
    times = [sum(seconds[a:b]) + (transfer[b] if b < len(seconds) else 0) for a, b in itertools.pairwise(cuts)]
    return max(times), sum(transfer[c] for c in inner)


def every_cut(allowed, num_stages):
    count = len(allowed) - 1
    inner = [c for c in range(1, count) if allowed[c]]
    return [(0, *chosen, count) for chosen in itertools.combinations(inner, num_stages - 1)]


@st.composite
def problems(draw):
    count = draw(st.integers(1, 9))
    small = st.integers(0, draw(st.sampled_from([2, 20])))  # of few values many are equal

    def several(values, n):
        return draw(st.lists(values, min_size=n, max_size=n))

    return several(small, count), several(small, count + 1), several(st.booleans(), count + 1), draw(st.integers(1, 4))


@pytest.mark.core
@settings(deadline=None)
@given(problems())
def test_best_of_all_cuts(problem):
    seconds, transfer, allowed, num_stages = problem
    legal = every_cut(allowed, num_stages)
    if not legal:
        with pytest.raises(PartitionError):
            cut(*problem)
        return
    found = cut(*problem)
    assert found in legal
    # Of all cuts with the least bottleneck, the least total transfer.
    assert cost(seconds, transfer, found) == min(cost(seconds, transfer, cuts) for cuts in legal)


def test_of_equal_bottlenecks_the_least_transfer():
    # Both cuts of the last two operators leave stage 0 the slowest, with 10.
    assert cut([10, 1, 1, 1], [0, 0, 5, 2, 0], [True] * 5, 2) == (0, 1, 4)
    assert cut([9, 1, 1, 1, 1], [0, 1, 5, 2, 3, 0], [True] * 6, 3) == (0, 1, 3, 5)


def test_what_crosses_the_cut_is_on_the_bill():
    # Even without transfer; the heavy edge in the middle moves the cut.
    assert cut([1, 1, 1, 1], [0] * 5, [True] * 5, 2) == (0, 2, 4)
    assert cut([1, 1, 1, 1], [0, 0, 9, 0, 0], [True] * 5, 2) in [(0, 1, 4), (0, 3, 4)]


@pytest.mark.core
@pytest.mark.parametrize(
    ("allowed", "num_stages", "message"),
    [
        (
            [True] * 3,
            3,
            "3 stages were asked for, but the model has 2 operators with 1 places where it may be cut, so ",
        ),
        ([True] * 3, 3, "so it makes between 1 and 2 stages"),
        (
            [True, False, False, True, True],
            3,
            "4 operators with 1 places where it may be cut, so it makes between 1 and 2",
        ),
        ([True, False, True], 2, "2 operators with 0 places where it may be cut, so it makes between 1 and 1 stages"),
        ([True] * 3, 0, "0 stages were asked for"),
    ],
)
def test_too_few_places(allowed, num_stages, message):
    count = len(allowed) - 1
    with pytest.raises(PartitionError, match=message):
        cut([1.0] * count, [0.0] * (count + 1), allowed, num_stages)
