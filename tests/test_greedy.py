"""Choices of storage without a solver: against closed forms, and without small items."""

import itertools
from dataclasses import replace

import pytest

from jaxpipe.planning.storage import integer_program
from jaxpipe.planning.storage.fastest_choice import choose
from jaxpipe.planning.storage.greedy import give_up, give_up_all
from jaxpipe.planning.storage.integer_program import solve
from jaxpipe.planning.storage.small_items import without_small_items
from jaxpipe.planning.storage.solving import Solving
from jaxpipe.planning.storage.storage_problem import NOT_STORED, Item, Option, Problem, SolverOptions, outcome_of


LAYERS, INPUT, INNER, SECONDS = 24, 10, 400, 3.0


def equal_layers(capacity):
    """Layers whose inputs are stored and whose larger inner tensors may be computed again from these, last layer first.

    Of ``n`` stored inner tensors all are in memory in the first event, with all inputs. If the first event's own is
    among them, every later event has room to compute its own again in the place of those that were read before.
    """
    items = []
    for layer in range(LAYERS):
        event = LAYERS - 1 - layer
        items.append(Item(f"input {layer}", (Option("keep", INPUT),), (event,), INPUT))
        inner = Item(f"inner {layer}", (Option("keep", INNER),), (event,), INNER, (len(items) - 1,), SECONDS)
        items.append(inner)
    return Problem(tuple(items), (0,) * LAYERS, capacity)


@pytest.mark.parametrize("stored", [1, 2, 7, LAYERS - 1, LAYERS])
@pytest.mark.parametrize("spare", [0, INNER - 1])
def test_equal_layers_store_as_many_as_fit(stored, spare):
    problem = equal_layers(LAYERS * INPUT + stored * INNER + spare)
    outcome = outcome_of(problem, give_up(problem).choice)
    assert outcome.fits()
    assert outcome.seconds == (LAYERS - stored) * SECONDS
    assert len(outcome.computed) == LAYERS - stored


def test_the_lowest_peak_of_equal_layers_is_all_inputs_and_one_inner_tensor():
    least = LAYERS * INPUT + INNER
    assert give_up(equal_layers(least - 1)) is None
    problem = equal_layers(0)
    assert outcome_of(problem, give_up_all(problem).choice).peak_bytes == least


@pytest.mark.parametrize("held", [0, 3])
def test_choices_without_small_items_fit_the_whole_problem(held):
    """Statistics of a thousandth of the bytes are stored, and counted in every event."""
    problem = replace(equal_layers((1 + held) * (LAYERS * INPUT + 9 * INNER)), held=held)
    statistics = tuple(
        Item(f"mean {event}", (Option("keep", 1), Option("packed", 1, 0.1)), (event,), 1, (), 0.5)
        for event in range(LAYERS)
    )
    whole = replace(problem, items=problem.items + statistics)
    reduced = without_small_items(whole)
    assert [len(item.options) for item in reduced.items] == [len(item.options) for item in whole.items]
    small = [k for k, item in enumerate(reduced.items) if whole.items[k].seconds is not None and item.seconds is None]
    assert small and min(small) >= 2 * LAYERS
    answer = solve(reduced, SolverOptions())
    inner, outer = outcome_of(reduced, answer.choice), outcome_of(whole, answer.choice)
    assert outer.fits() and outer.seconds == inner.seconds
    assert all(b <= a for a, b in zip(inner.bytes, outer.bytes, strict=True))
    assert all(answer.choice[k] != NOT_STORED for k in small)


def test_small_items_are_not_swapped():
    """A peer or a host takes no more than it has room for: what is not counted does not go there."""
    keep, host = Option("keep", 4), Option("host", 4, held=1, link_seconds=0.1)
    large = Item("large", (Option("keep", 4000), Option("host", 4000, held=0, link_seconds=1.0)), (1,), 4000)
    small = Item("small", (keep, host), (0,), 4, (), 0.5)
    problem = Problem((large, small), (0, 0), 1e4, most_swapped=4000)
    reduced = without_small_items(problem)
    assert reduced.items[1].options == (replace(keep, bytes=0),)
    assert reduced.items[0] == large


def test_no_solver_is_asked_where_no_more_than_the_slack_can_be_won(monkeypatch):
    """One of the layers is computed again; storing all of them would take no time."""

    def never(*args, **options):
        raise AssertionError("a solver was called")

    monkeypatch.setattr(integer_program, "solve", never)
    problem = equal_layers(LAYERS * INPUT + (LAYERS - 1) * INNER)
    answer = choose(problem, SolverOptions(slack=SECONDS))
    assert (answer.status, answer.outcome.seconds, answer.bound) == ("gap", SECONDS, 0.0)
    with pytest.raises(AssertionError, match="a solver was called"):
        choose(problem, SolverOptions(slack=0.9 * SECONDS))
    assert (
        choose(replace(problem, base=(problem.capacity + 1,) * LAYERS), SolverOptions()) is None
    )  # whatever is chosen


def test_a_solver_stops_within_the_slack():
    problem = equal_layers(LAYERS * INPUT + 7 * INNER)
    best = (LAYERS - 7) * SECONDS
    solution = solve(problem, SolverOptions(slack=4 * SECONDS))
    assert best <= outcome_of(problem, solution.choice).seconds <= best + 4 * SECONDS
    assert best - 4 * SECONDS <= solution.bound <= best + 1e-3  # of equals the smallest stash


def test_equal_stages_are_solved_once():
    """Names do not count; what is the fastest within more bytes is so within fewer, if it still fits."""
    solving = Solving("HIGHS", 60.0)
    problem = equal_layers(LAYERS * INPUT + 7 * INNER + INNER // 2)
    named = replace(problem, items=tuple(replace(item, name=f"other {item.name}") for item in problem.items))
    answer, _ = solving.fastest(problem, 0.0)
    assert answer.outcome.seconds == (LAYERS - 7) * SECONDS
    assert solving.fastest(replace(named, capacity=LAYERS * INPUT + 7 * INNER), 0.0) == (answer, 0.0)
    less, _ = solving.fastest(replace(named, capacity=LAYERS * INPUT + 6 * INNER), 0.0)
    assert less.outcome.seconds == (LAYERS - 6) * SECONDS


def test_nothing_is_stored_that_nobody_reads():
    """The product is stored again before what is computed from it is, and has no reader then."""
    keep, swap = Option("keep", 10), Option("swap keep", 10, held=0, link_seconds=1.0)
    product = Item("product", (keep, swap), (), 10, (), 10.0)
    activation = Item("tanh", (keep, swap), (0,), 10, (0,), 1.0)
    problem = Problem((product, activation), (0,), 25, held=3, frees=False, overlap=5.0)
    answer = choose(problem, SolverOptions())
    assert answer.choice == (NOT_STORED, 1)
    assert (answer.status, answer.outcome.swapped_bytes, answer.outcome.seconds) == ("optimal", 10, 0.0)


@pytest.mark.parametrize("capacity", [40, 30, 20])
def test_a_sum_is_stored_if_only_a_view_of_it_is_read(capacity):
    """Each sum follows from the one before it and a term that cannot be computed again; a view of a sum costs nothing.

    Stored sums cost nothing but their bytes; from stored terms, all sums before would be computed again.
    """
    items: list[Item] = []
    for layer in range(4):
        before = (len(items) - 2,) if items else ()
        items.append(Item(f"term {layer}", (Option("keep", 10),), (), 10))
        items.append(Item(f"sum {layer}", (Option("keep", 10),), (), 10, (*before, len(items) - 1), 1.0))
        items.append(Item(f"view {layer}", (Option("keep", 10),), (3 - layer,), 10, (len(items) - 1,), 0.0))
    # The sum before is two items ahead of a layer's term.
    problem = Problem(tuple(items), (0,) * 4, capacity)
    outcomes = (outcome_of(problem, choice) for choice in itertools.product((0, NOT_STORED), repeat=len(items)))
    fitting = [outcome.seconds for outcome in outcomes if outcome is not None and outcome.fits()]
    given = give_up(problem)
    assert (None if given is None else given.seconds) == min(fitting, default=None)
