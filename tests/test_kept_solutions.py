"""Solutions that the clock cut short are kept: the next process meets the budget that an error has offered."""

import contextlib
import json

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpipe
from jaxpipe.errors import MemoryBudgetError
from jaxpipe.planning.budget_search import BudgetSearch
from jaxpipe.planning.storage import integer_program, kept_solutions
from jaxpipe.planning.storage.storage_problem import NOT_STORED, Item, Option, Problem, Solution, SolverOptions
from jaxpipe.text import kept_files
from tests.support.meshes import mesh_of


#: Two tensors of 8 bytes, each stored or computed again in a second, for one event.
ITEM = Item("x", (Option("keep", 8),), (0,), 8, (), 1.0)
PROBLEM = Problem((ITEM, ITEM), (0,), 100.0, held=1)
STORED, COMPUTED = Solution((0, 0)), Solution((NOT_STORED, NOT_STORED))

SETTINGS = {"solver": "HIGHS", "gap": 0.01}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXPIPE_CACHE_DIR", str(tmp_path))
    return tmp_path / "solutions"


def ask(*answers, seconds=10.0, **settings):
    """Return what is found, and how often the solver was asked for it, which answers in turn."""
    left = list(answers)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(integer_program, "solve", lambda problem, options: left.pop(0))
        options = SolverOptions(time_limit=seconds, **{**SETTINGS, **settings})
        found = kept_solutions.kept_or_solved(PROBLEM, options)
    return found, len(answers) - len(left)


def test_what_the_clock_cut_short_is_found_again():
    assert ask(STORED) == (STORED, 1)
    assert ask(COMPUTED) == (STORED, 0)
    assert ask(seconds=0.0) == (STORED, 0)
    assert ask(COMPUTED, gap=0.5) == (COMPUTED, 1)  # another question


def test_what_is_proven_is_not_kept(folder):
    proven = Solution((0, 0), optimal=True)
    assert ask(proven) == ask(proven) == (proven, 1)
    assert not folder.exists()


def test_no_solver_is_asked_without_time():
    assert ask(STORED, seconds=0.0) == (Solution(), 0)


@pytest.mark.parametrize(("first", "then"), [(STORED, COMPUTED), (COMPUTED, STORED)])
def test_much_more_time_finds_nothing_slower(first, then):
    ask(first)
    assert ask(then, seconds=41.0) == (STORED, 1)
    assert ask(COMPUTED) == (STORED, 0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '[{"choice": [0]}, 9]', '[{"choice": [0, 7]}, 9]'])
def test_damaged_files_are_solved_again(folder, text):
    ask(STORED)
    (file,) = folder.iterdir()
    file.write_text(text)
    assert ask(COMPUTED) == (COMPUTED, 1)
    assert json.loads(file.read_text())[0]["choice"] == [NOT_STORED, NOT_STORED]


def test_few_are_kept_and_a_folder_that_is_none_does_no_harm(folder, monkeypatch):
    monkeypatch.setattr(kept_files, "MOST_KEPT", 2)
    for gap in (0.1, 0.2, 0.3):
        ask(STORED, gap=gap)
    assert len(list(folder.iterdir())) == 2
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    folder.write_text("a file")
    assert ask(STORED) == ask(STORED) == (STORED, 1)


def chain(**options):
    """Plan a chain of products and tanh on one device, by prediction alone."""
    weights = list(jax.random.normal(jax.random.key(0), (6, 32, 32)) / 6)

    def apply(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    return jaxpipe.partition(
        jax.tree_util.Partial(apply, weights),
        mesh_of(1),
        jnp.ones((256, 32)),
        loss=lambda model, x: jnp.square(model(x)).mean(),
        optimizer=optax.sgd(0.1),
        profile="analytic",
        options=jaxpipe.PlanOptions(compile=False),
        **{"num_microbatches": 1, **options},
    )


@pytest.mark.core
def test_the_smallest_budget_is_met_by_a_process_whose_solver_finds_nothing(monkeypatch):
    """The first is stopped by the clock with a good choice, the second, on a busier machine, without any."""
    real = integer_program.solve

    def cut_short(*args, **options):
        solution = real(*args, **options)
        return Solution(solution.choice, bound=0.0)

    monkeypatch.setattr(integer_program, "solve", cut_short)
    with pytest.raises(MemoryBudgetError) as error:
        chain(memory="1000B")
    monkeypatch.setattr(integer_program, "solve", lambda *_, **__: Solution())
    smallest = error.value.smallest
    assert smallest < chain().plan.predicted_bytes
    assert chain(memory=smallest).plan.predicted_bytes <= smallest


@pytest.mark.core
def test_more_microbatches_that_keep_a_budget_are_offered_with_bytes_and_seconds():
    budget = chain(num_microbatches=4).plan.predicted_bytes
    with pytest.raises(MemoryBudgetError) as error:
        chain(memory=budget)
    text, offered = str(error.value), chain(num_microbatches=4, memory=budget).plan
    assert error.value.smallest > budget >= offered.predicted_bytes
    assert "num_microbatches=4 with this budget: " in text and " a step, both as predicted; more stages" in text
    assert text.splitlines()[-2:] == [f"    memory={error.value.smallest}", "    num_microbatches=4"]


def test_nothing_is_offered_where_no_number_of_microbatches_keeps_a_budget():
    with pytest.raises(MemoryBudgetError, match=r"Pass memory=\d+ or more; more micro-batches or") as error:
        chain(memory="1000B")
    assert "num_microbatches=" not in str(error.value)


@pytest.mark.parametrize("worse", ["slower", "refused"])
def test_a_larger_budget_takes_the_plan_of_a_smaller_one(monkeypatch, worse):
    """The search finds a slower plan for the larger budget, or none."""
    with pytest.raises(MemoryBudgetError) as error:
        chain(memory="1000B")
    smallest, default = error.value.smallest, chain().plan
    budget = (smallest + default.predicted_bytes) // 2
    slower = chain(memory=smallest).plan
    plan, shortest = chain(memory=budget).plan, BudgetSearch.shortest

    def search_badly(search, asked):
        if asked == budget:
            return shortest(search, asked)
        return search.candidates[0].default.with_bytes() if worse == "refused" else shortest(search, smallest)

    monkeypatch.setattr(BudgetSearch, "shortest", search_badly)
    larger = chain(memory=budget + 1).plan
    assert larger.step_seconds == plan.step_seconds < slower.step_seconds
    assert larger.predicted_bytes == plan.predicted_bytes and larger.budget == budget + 1
    with pytest.raises(MemoryBudgetError) if worse == "refused" else contextlib.nullcontext():
        chain(memory=plan.predicted_bytes - 1)
