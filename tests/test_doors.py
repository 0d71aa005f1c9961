"""Functions and objects of the caller's own: seconds of operators, and a solver of storage."""

import cvxpy
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from jaxpipe import PlanOptions, Work
from jaxpipe.errors import PartitionError
from jaxpipe.graph.graph import trace
from jaxpipe.planning import plan_storage
from tests.support.meshes import mesh_of


WEIGHTS = [jnp.ones((8, 8)) / 8, jnp.ones((8, 64)) / 8, jnp.ones((64, 8)) / 8]


def layers(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def made(**options):
    model, batch = jax.tree_util.Partial(layers, WEIGHTS), jnp.ones((8, 8))
    options = {"loss": lambda f, x: (f(x) ** 2).mean(), "optimizer": optax.sgd(0.1), "num_microbatches": 4, **options}
    return jaxpipe.partition(model, mesh_of(2), batch, **options)


def only_the_first(work: Work) -> tuple[float, float]:
    """Half of the time is that of the first product."""
    first = work.primitive == "dot_general" and work.operands[1].shape == (8, 8)
    return (1.0, 2.0) if first else (0.2, 0.4)


def test_a_function_gives_the_seconds():
    pipeline = made(profile=only_the_first)
    profile = pipeline.profile
    first = profile.names.index("dot_general")
    assert profile.seconds[first] == 3.0
    assert sum(profile.forward_seconds) == pytest.approx(1.0 + 0.2 * (len(profile.names) - 1))
    assert profile.source == pipeline.plan.profile == "given"
    sizes = [stage.operators[1] - stage.operators[0] for stage in pipeline.plan.stages]
    assert sizes[0] < sizes[1]


def test_a_function_sees_each_operator():
    seen: list[Work] = []

    def seconds(work):
        seen.append(work)
        return work.estimate

    pipeline = made(profile=seconds)
    products = [work for work in seen if work.primitive == "dot_general"]
    assert [work.flops for work in products] == [2 * 2 * 8 * 8, 2 * 2 * 8 * 64, 2 * 2 * 8 * 64]
    assert [[x.shape for x in work.operands] for work in products] == [
        [(2, 8), (8, 8)],
        [(2, 8), (8, 64)],
        [(2, 64), (64, 8)],
    ]
    assert [work.results[0].dtype for work in products] == [np.float32] * 3
    assert made(profile="analytic").profile.seconds == pipeline.profile.seconds


@pytest.mark.parametrize(("seconds", "said"), [(lambda _: 1.0, "two numbers"), (lambda _: (1.0, -1.0), "not negative")])
def test_wrong_seconds_are_refused(seconds, said):
    with pytest.raises(PartitionError, match=said):
        made(profile=seconds)


class Counting:
    """A solver that counts its problems, and asks HiGHS."""

    def __init__(self):
        self.problems = 0

    def solve(self, problem, *, time_limit, gap):
        assert isinstance(problem, cvxpy.Problem) and time_limit > 0 and 0 <= gap < 1
        self.problems += 1
        problem.solve(solver="HIGHS", time_limit=time_limit, mip_rel_gap=gap)


def test_an_object_solves_the_integer_program():
    weights = [jnp.ones((8, 64)), *[jnp.ones((64, 64))] * 3, jnp.ones((64, 8))]

    def loss(x, *weights):
        for w in weights:
            x = 2 * jax.nn.silu(x @ w)
        return x.sum()

    graph, solver = trace(loss, jnp.ones((64, 8)), *weights), Counting()
    budget = int(0.7 * plan_storage(graph, "1GiB", in_flight=4).peak_bytes)
    ours, usual = (plan_storage(graph, budget, in_flight=4, solver=each) for each in (solver, "HIGHS"))
    assert solver.problems
    assert (ours.peak_bytes, ours.added_seconds, ours.status) == (usual.peak_bytes, usual.added_seconds, usual.status)
    pipeline = made(profile="analytic", memory="1MiB", options=PlanOptions(solver=Counting()))
    assert pipeline.plan.budget == 2**20


@pytest.mark.parametrize("solver", [3, object(), "NONE"])
def test_what_is_no_solver_is_refused(solver):
    with pytest.raises(PartitionError, match=r"solver=.* or an object with a method solve\(problem"):
        made(options=PlanOptions(solver=solver))
