"""Profiles against closed forms, and the plan as JSON."""

import functools
import json

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpipe
from jaxpipe.costs import Rates
from jaxpipe.costs.profile import Profile
from jaxpipe.costs.roofline import analytic
from jaxpipe.graph.graph import trace
from jaxpipe.residuals.backward_graph import build_backward_graph
from jaxpipe.targets.known import target_of
from tests.support.meshes import mesh_of


#: Only arithmetic costs time, or only memory.
ARITHMETIC, MEMORY = Rates(flops=1.0, bytes=1e30), Rates(flops=1e30, bytes=1.0)


def backward_graph_of(function, *shapes):
    graph = trace(lambda *a: [function(*a)], *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    return build_backward_graph(graph, graph.inputs)


def conv(x, kernel, groups=1):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


@pytest.mark.core
def test_one_product():
    n, k, m = 5, 7, 11
    backward_graph = backward_graph_of(lambda x, w: x @ w, (n, k), (k, m))
    flops, numbers = 2 * n * k * m, n * k + k * m + n * m
    profile = analytic(backward_graph, ARITHMETIC)
    # Backward two products of the same size, one for each operand.
    assert (profile.source, profile.forward_seconds, profile.backward_seconds) == ("analytic", (flops,), (2 * flops,))
    profile = analytic(backward_graph, MEMORY)
    assert (profile.forward_seconds, profile.backward_seconds) == ((4 * numbers,), (8 * numbers,))


def test_a_batched_product():
    b, n, k, m = 3, 5, 7, 11
    backward_graph = backward_graph_of(lambda x, w: jnp.einsum("bnk,bkm->bnm", x, w), (b, n, k), (b, k, m))
    profile = analytic(backward_graph, ARITHMETIC)
    assert sum(profile.forward_seconds) == 2 * b * n * k * m


@pytest.mark.core
@pytest.mark.parametrize("groups", [1, 2])
def test_one_convolution(groups):
    n, h, w, c, o, size = 2, 6, 5, 4, 8, 3
    backward_graph = backward_graph_of(lambda x, k: conv(x, k, groups), (n, h, w, c), (size, size, c // groups, o))
    flops = 2 * n * h * w * o * size * size * c // groups
    numbers = n * h * w * (c + o) + size * size * c // groups * o
    assert analytic(backward_graph, ARITHMETIC).forward_seconds == (flops,)
    assert analytic(backward_graph, MEMORY).forward_seconds == (4 * numbers,)
    assert analytic(backward_graph, MEMORY).forward_flops == (flops,)


def test_backward_of_a_convolution():
    # With stride 1 and "SAME" both derivatives are convolutions of as many products as the forward one.
    n, h, w, c, o, size = 2, 6, 5, 4, 8, 3
    profile = analytic(backward_graph_of(conv, (n, h, w, c), (size, size, c, o)), ARITHMETIC)
    assert profile.backward_seconds == (2 * profile.forward_seconds[0],)


def test_what_is_fused_reads_once_and_writes_once_and_views_cost_nothing():
    backward_graph = backward_graph_of(lambda x: (jnp.sin(x) * 2).reshape(6), (2, 3))
    names = [op.name for op in backward_graph.source.operators]
    profile = analytic(backward_graph, MEMORY, held=backward_graph.source.inputs)
    # One kernel: the first operator reads six numbers of four bytes, the second writes them.
    assert dict(zip(names, profile.forward_seconds, strict=True)) == {"sin": 24, "mul": 24, "reshape": 0}


def test_the_inside_of_a_loop_counts_as_often_as_it_runs():
    def loop(x, w):
        return jax.lax.scan(lambda c, _: (c @ w, None), x, length=9)[0]

    (seconds,) = analytic(backward_graph_of(loop, (4, 4), (4, 4)), ARITHMETIC).forward_seconds
    assert seconds == 9 * 2 * 4 * 4 * 4


def test_rates_by_device_kind():
    class Device:
        device_kind = "NVIDIA A100-SXM4-80GB"

    # Of the data sheet, products get seven tenths and memory nine.
    rates = target_of(Device()).rates
    assert (rates.flops, rates.half_flops, rates.bytes) == pytest.approx((0.7 * 156e12, 0.7 * 312e12, 0.9 * 1.9e12))
    Device.device_kind = "NVIDIA L40S"
    assert (target_of(Device()).rates.flops, target_of(Device()).rates.bytes) == pytest.approx(
        (0.7 * 183e12, 0.9 * 0.864e12)
    )
    Device.device_kind = "cpu"
    assert target_of(Device()).rates == Rates(5e10, 1e10)


def timed(forward, backward):
    nothing = [0.0] * len(forward)
    return Profile.chain(list(map(str, range(len(forward)))), forward, backward, nothing, nothing, nothing)


def planned(profile, stages=2, batch=8):
    def two_layers(w, x):
        return jnp.tanh(x @ w[0]) @ w[1]

    model = jax.tree_util.Partial(two_layers, [jnp.ones((3, 4)), jnp.ones((4, 2))])
    mesh = jax.make_mesh((stages,), ("stage",), devices=jax.devices()[:stages])
    return jaxpipe.partition(
        model,
        mesh,
        jnp.ones((batch, 3)),
        loss=lambda f, x: (f(x).sum(), len(x), {}),
        optimizer=optax.sgd(0.1),
        num_microbatches=2,
        schedule="one_f_one_b",
        profile=profile,
    ).plan


@pytest.mark.core
def test_a_given_profile_decides_the_cut():
    # dot, tanh, dot, sum
    plan = planned(timed((1.0, 1.0, 1.0, 5.0), (2.0, 0.0, 3.0, 0.0)))
    # F0 3, then F0 5 on the other stage, B0 5, B1 5; cut after tanh, F0 2, then F0 6, B0 3, F1 6, B1 3, B1 2.
    assert [stage.operators for stage in plan.stages] == [(0, 3), (3, 4)]
    assert [stage.forward_seconds for stage in plan.stages] == [3.0, 5.0]
    # Stage programs also add up gradients, which takes nanoseconds.
    assert [stage.backward_seconds for stage in plan.stages] == pytest.approx([5.0, 0.0], abs=1e-6)
    assert 18 <= plan.step_seconds < 18 + 1e-3  # calls and sends cost something besides
    plan = planned(timed((9.0, 1.0, 1.0, 1.0), (0.0,) * 4))
    assert [stage.operators for stage in plan.stages] == [(0, 1), (1, 4)]


@pytest.mark.parametrize("count", [3, 5])
def test_a_profile_of_another_model(count):
    message = rf"{count} operators, the model has 4\. Profile this very model"
    with pytest.raises(jaxpipe.PartitionError, match=message):
        planned(timed((1.0,) * count, (1.0,) * count))


@pytest.mark.parametrize(("width", "rows"), [(8, 8), (4, 16)])
def test_a_profile_of_other_work(width, rows):
    """As many operators, of other sizes."""

    def profile(width, rows):
        model = jax.tree_util.Partial(lambda w, x: jnp.tanh(x @ w), jnp.ones((3, width)))
        call = {"loss": lambda model, x: model(x).mean(), "num_microbatches": 2, "source": "analytic"}
        return model, jaxpipe.profile_model(model, jnp.ones((rows, 3)), **call)

    model, own = profile(4, 8)
    request = {"loss": lambda model, x: model(x).mean(), "optimizer": optax.sgd(0.1), "num_microbatches": 2}
    partition = functools.partial(jaxpipe.partition, model, mesh_of(2), jnp.ones((8, 3)), **request)
    assert partition(profile=own).plan.notes == partition(profile="analytic").plan.notes
    (note,) = {*partition(profile=profile(width, rows)[1]).plan.notes} - {*partition(profile=own).plan.notes}
    own_work, other = (2 * 3 * size for size in (4 * 4, width * rows // 2))
    assert note.startswith(
        "profile= is of other work, another model or micro-batches of another size: operator 0, dot_general"
    )
    assert f"has {own_work} floating-point operations, and {other} in the profile." in note


@pytest.mark.core
@pytest.mark.parametrize("profile", ["measured", "analytic"])
def test_plan_as_json(profile):
    plan = planned(profile)
    assert plan.profile == profile
    text = plan.to_json()
    again = jaxpipe.Plan.from_json(text)
    assert again == plan and again.identity == plan.identity
    read = json.loads(text)
    assert read["predicted_bytes"] == sum(plan.memory.values()) > 0
    assert [stage["operators"] for stage in read["stages"]] == [list(stage.operators) for stage in plan.stages]
    # 3x4 and 4x2 weights of 4 bytes.
    assert sum(stage["parameter_bytes"] for stage in read["stages"]) == 80
    assert (read["num_microbatches"], read["microbatch_size"], read["replicas"]) == (2, 4, 1)


NODE = "{} -- op -- forward_compute_time=1, backward_compute_time=2, activation_size=8, parameter_size=4"


def test_nodes_of_thousands_of_digits_are_put_in_order(tmp_path):
    """Python does not make numbers of such texts; they are compared as if it did."""
    names = ["node" + "1" * 5000, "node" + "9" * 4999, "node010", "node9"]
    (tmp_path / "graph.txt").write_text("\n".join(map(NODE.format, names)))
    assert Profile.from_pipedream(tmp_path / "graph.txt").names == tuple(f"{name} op" for name in reversed(names))


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_a_graph_that_cannot_be_read_is_named(name, tmp_path):
    with pytest.raises(jaxpipe.errors.PartitionError, match=r"cannot be read: (No such file|Is a directory)"):
        Profile.from_pipedream(tmp_path / name)


LARGE = {
    "a size": (NODE.format("node1").replace("size=8", "size=1e308"), "must be a finite number .* below"),
    "a text": (NODE.format("node1").replace("size=8", "size=" + "x" * 10_000), "no number or"),
    "a file": ("\n" * (16 * 2**20 + 1), "has 16,777,217 characters; at most 16,777,216 are read"),
}


@pytest.mark.parametrize(("text", "message"), LARGE.values(), ids=LARGE)
def test_graphs_beyond_all_limits_are_refused(text, message, tmp_path):
    (tmp_path / "graph.txt").write_text(text)
    with pytest.raises(jaxpipe.errors.PartitionError, match=message) as raised:
        Profile.from_pipedream(tmp_path / "graph.txt")
    assert len(str(raised.value)) < 1000
