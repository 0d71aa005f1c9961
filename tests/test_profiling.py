"""Measuring programs in groups of operators, keeping what was measured, and profiling a model without a mesh."""

import dataclasses
import datetime
import functools
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from jaxpipe.costs import measured_seconds, timing
from jaxpipe.costs.equal_operators import equal_operators
from jaxpipe.costs.measured_seconds import cut_groups, group_programs, group_vjp
from jaxpipe.costs.profile import NUMBERS
from jaxpipe.costs.profile_cache import profile_path
from jaxpipe.costs.roofline import analytic
from jaxpipe.costs.timing import time_in_rounds
from jaxpipe.graph.graph import trace
from jaxpipe.models.bind import bind
from jaxpipe.models.microbatch_program import trace_loss
from jaxpipe.residuals.backward_graph import build_backward_graph
from jaxpipe.targets.known import target_of
from jaxpipe.targets.rates import OTHER
from jaxpipe.text.kept_files import kept_path
from tests.support.pipeline_models import CASES, cnn_linen, mlp, transformer


def backward_graph_of(function, *shapes):
    graph = trace(lambda *a: [function(*a)], *(shape(*s) for s in shapes))
    return build_backward_graph(graph, graph.inputs)


def measured(backward_graph):
    device = jax.devices()[0]
    estimate = analytic(backward_graph, target_of(device).rates, device_kind=device.device_kind)
    return measured_seconds.measure(backward_graph, device, estimate)


def shape(*lengths):
    return jax.ShapeDtypeStruct(lengths, jnp.float32)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXPIPE_CACHE_DIR", str(tmp_path))
    return tmp_path / "profiles"


@pytest.fixture
def stopwatch(monkeypatch):
    """Nothing is run: the first program takes no time, the next ones 1, 2, 3 ... seconds, a tenth of it the spread."""
    times = []

    def time_in_rounds(prepared):
        measured = [float(len(times) + k) for k in range(len(prepared))]
        times.extend(measured)
        return np.outer([0.8, 1.1, 1.0, 0.9, 1.2], measured)

    monkeypatch.setattr(timing, "time_in_rounds", time_in_rounds)
    return times


# Groups


@pytest.mark.parametrize("name", ["resnet", "unet", "transformer"])
def test_groups_have_every_operator_once(name):
    backward_graph = linearized_case(CASES[name](4))
    graph = backward_graph.source
    groups = cut_groups(graph, analytic(backward_graph, OTHER).seconds)
    assert list(itertools.chain(*groups)) == list(range(len(graph.operators)))
    assert 1 < len(groups) <= 50


def test_a_group_ends_with_a_product():
    def network(x, a, b):
        return jnp.tanh(jnp.tanh(x @ a) @ b).sum()

    graph = backward_graph_of(network, (2, 4), (4, 4), (4, 3)).source
    assert [op.name for op in graph.operators] == ["dot_general", "tanh", "dot_general", "tanh", "reduce_sum"]
    assert cut_groups(graph, [1, 1, 1, 1, 1]) == [range(1), range(1, 3), range(3, 5)]
    # A product is too short to be timed by itself; so is what is left at the end.
    assert cut_groups(graph, [0.01, 0, 1, 0.01, 0]) == [range(5)]


def test_an_operator_with_side_effects_is_not_run(capfd, stopwatch):
    def network(x, a):
        y = x @ a
        jax.debug.print("here {}", y.sum())
        return (y @ a).sum()

    backward_graph = backward_graph_of(network, (4, 4), (4, 4))
    operators = backward_graph.source.operators
    (position,) = [k for k, op in enumerate(operators) if op.has_effects]
    assert range(position, position + 1) in cut_groups(backward_graph.source, [1.0] * len(operators))
    profile = measured(backward_graph)
    assert profile.forward_seconds[position] < 1e-3 and sum(profile.forward_seconds) >= 1
    jax.effects_barrier()
    assert "here" not in capfd.readouterr().out


@pytest.mark.core
def test_the_programs_of_groups_compute_the_gradient():
    """Forward through all groups, and back, by the very programs that are timed."""

    def network(x, a, b):
        return jnp.square(jax.nn.relu(x @ a) @ b).sum()

    backward_graph = backward_graph_of(network, (3, 4), (4, 5), (5, 2))
    values = [jax.random.normal(jax.random.key(k), s) for k, s in enumerate([(3, 4), (4, 5), (5, 2)])]
    graph = backward_graph.source
    env = dict(zip(graph.inputs, values, strict=True))
    ran = []
    for group in cut_groups(graph, [1.0] * len(graph.operators)):
        stage = group_vjp(backward_graph, group)
        forward, backward = group_programs(stage)
        outputs, encoded_values = jax.jit(forward.function)(*(env[t] for t in stage.graph.inputs))
        env.update(zip(stage.graph.outputs, outputs, strict=True))
        ran.append((stage, backward, encoded_values))
    cotangents = {graph.outputs[0]: jnp.ones(())}
    for stage, backward, encoded_values in reversed(ran):
        parameters, stash, seeds = backward.arguments
        boundary, written = {*stage.graph.inputs, *stage.graph.outputs}, iter(encoded_values)
        stored = [(env[t],) if t in boundary else next(written) for t in stage.plan.stored]
        assert jax.tree.map(jnp.shape, stored) == jax.tree.map(jnp.shape, stash) and not [*written]
        assert not parameters and len(seeds) == 1
        (seed,) = (cotangents[t] for t in stage.backward_graph.source.outputs)
        input_cotangents = jax.jit(backward.function)([], stored, [seed])
        for t, value in zip(stage.backward_graph.wrt, input_cotangents, strict=True):
            cotangents[t] = value
    for got, wanted in zip([cotangents[t] for t in graph.inputs], jax.grad(network, (0, 1, 2))(*values), strict=True):
        assert np.array_equal(got, wanted)


# Measuring


def test_rounds_without_warm_up():
    """Two things that take seconds run twice each, which does not count, and then in turns."""
    took = iter([50, 1, 70, 1, 4, 8, 1, 7, 2, 6, 5, 5, 3, 4])
    now, ran = [0.0], []

    def run(name, count):
        ran.append((name, count))
        now[0] += next(took)

    prepared = [lambda name=name: functools.partial(run, name) for name in "ab"]
    assert time_in_rounds(prepared, lambda: now[0]).tolist() == [[4, 8], [1, 7], [2, 6], [5, 5], [3, 4]]
    assert ran == [("a", 1)] * 2 + [("b", 1)] * 2 + [("a", 1), ("b", 1)] * 5


def test_short_programs_run_until_they_last_and_the_fastest_run_counts():
    now, longer = [0.0], itertools.cycle([1, 3, 4, 2, 3])

    def run(count):
        counts.append(count)
        now[0] += count * 0.99e-5 * next(longer)

    counts = []
    seconds = time_in_rounds([lambda: run], lambda: now[0])
    assert seconds.tolist() == [[pytest.approx(0.99e-5)]] * len(seconds) and len(seconds) >= 5
    assert set(counts) == {1, 51} and counts.count(51) >= 4 * len(seconds)


def chain(x, *weights):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x.sum()


def test_equal_groups_are_timed_once(stopwatch):
    backward_graph = backward_graph_of(chain, (2, 4), *[(4, 4)] * 6)
    names = [op.name for op in backward_graph.source.operators]
    profile = measured(backward_graph)
    # What starts a program; then forward and backward of: the first product, a tanh with a product, tanh and the sum.
    assert len(stopwatch) == 1 + 3 * 2
    # Products of the first group and of others have the same seconds, and so have tanh beside products or a sum.
    for name in ("dot_general", "tanh"):
        assert len({t for t, other in zip(profile.forward_seconds, names, strict=True) if other == name}) == 1
        assert len({t for t, other in zip(profile.backward_seconds, names, strict=True) if other == name}) == 1
    # The total of what was measured, groups that are run once counted as often as they are there.
    first, between, last = ((stopwatch[k], stopwatch[k + 1]) for k in (1, 3, 5))
    for direction, column in enumerate((profile.forward_seconds, profile.backward_seconds)):
        assert sum(column) == pytest.approx(first[direction] + 5 * between[direction] + last[direction])


def test_operators_are_equal_if_their_work_is(stopwatch):
    """The first product has no derivative by its input; another shape and another precision are other work."""

    def network(x, a, b, c, d):
        y = jnp.dot(x @ a @ b, c, precision="highest")
        return (y @ d).sum()

    graph = trace(lambda *v: [network(*v)], *[shape(4, 4)] * 4, shape(4, 8))
    backward_graph = build_backward_graph(graph.with_parameters([False, *[True] * 4]), graph.inputs[1:])
    assert [op.name for op in graph.operators] == ["dot_general"] * 4 + ["reduce_sum"]
    assert equal_operators(backward_graph) == ([[0, 1], [2], [3], [4]], [[0], [1], [2], [3], [4]])


class BusyMachine:
    """A machine whose clock stands still but for runs, which take longer while other programs work.

    They begin to, and end, at times that a generator of random numbers draws.
    """

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        self.now, lengths = 0.0, random.exponential([2.0, 0.5], (1000, 2))
        self._changes = lengths.reshape(-1).cumsum()
        self._slower = random.uniform(2, 6, 1000)

    def perf_counter(self):
        return self.now

    def ready_to_run(self, compiled, arguments, device):
        bytes_read = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(arguments))

        def run(count):
            interval = int(np.searchsorted(self._changes, self.now))
            busy = self._slower[interval // 2] if interval % 2 else 1.0
            self.now += count * busy * (1e-3 + 1e-6 * bytes_read)

        return run


class NotCompiled:
    """A program that is not compiled: its text is its function and the shapes of its operands."""

    def __init__(self, function):
        self._text = function.__qualname__

    def lower(self, *arguments):
        self._text += str(arguments)
        return self

    def as_text(self):
        return self._text

    def compile(self):
        return None


def blocks(x, *weights):
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = x + jnp.tanh(x @ up) @ down
    return x


def test_equal_blocks_are_equal_stages_while_bursts_of_load_come_and_go(monkeypatch):
    """Eight blocks of a product up and a product down, on four devices, measured twenty times."""
    backward_graph = backward_graph_of(lambda x, *w: blocks(x, *w).sum(), (4, 8), *[(8, 32), (32, 8)] * 8)
    programs = functools.cache(lambda start, stop: [*group_programs(group_vjp(backward_graph, range(start, stop)))])
    monkeypatch.setattr(measured_seconds, "group_vjp", lambda _, group, held: group)
    monkeypatch.setattr(measured_seconds, "group_programs", lambda group: programs(group.start, group.stop))
    monkeypatch.setattr(timing.jax, "jit", NotCompiled)
    network, cuts = jaxpipe.Network.uniform(4, 1e9), set()
    for seed in range(20):
        machine = BusyMachine(seed)
        monkeypatch.setattr(timing, "ready_to_run", machine.ready_to_run)
        monkeypatch.setattr(timing.time, "perf_counter", machine.perf_counter)
        profile = measured(backward_graph)
        products = [k for k, name in enumerate(profile.names) if name.endswith("dot_general")]
        for column in (profile.forward_seconds, profile.backward_seconds):
            assert len({column[k] for k in products[2::2]}) == len({column[k] for k in products[3::2]}) == 1
        placed = jaxpipe.planning.partition_layers(
            profile, network, num_stages=4, replicate=False, num_microbatches=8, reorder=False
        )
        cuts.add(tuple(sum(k in stage.operators for k in products) for stage in placed.stages))
    assert cuts == {(4, 4, 4, 4)}


def test_layers_that_draw_other_random_numbers_are_equal(stopwatch):
    measured(linearized_case(transformer(4)))
    once = len(stopwatch)
    case = CASES["transformer"](4)
    deeper = type(case)(**{**vars(case), "model": case.model.clone(num_layers=4)})
    stopwatch.clear()
    measured(linearized_case(deeper))
    assert len(stopwatch) <= once + 2


def test_operators_share_the_seconds_of_their_group(stopwatch):
    def network(x, a, b):
        return jnp.sin(jnp.tanh(x @ a) @ b).sum()

    backward_graph = backward_graph_of(network, (8, 16), (16, 8), (8, 4))
    profile = measured(backward_graph)
    total = sum(stopwatch)
    assert sum(profile.seconds) == pytest.approx(total)
    assert sum(profile.forward_spread) + sum(profile.backward_spread) == pytest.approx(total / 10)
    groups = cut_groups(backward_graph.source, profile.seconds)
    for k, group in enumerate(groups):
        forward, backward = (
            column[group.start : group.stop]
            for column in (
                profile.forward_seconds,
                profile.backward_seconds,
            )
        )
        assert (sum(forward), sum(backward)) == (pytest.approx(2 * k + 1), pytest.approx(2 * k + 2))


@pytest.mark.core
def test_measured():
    backward_graph = backward_graph_of(lambda x, w: jnp.tanh(x @ w).reshape(-1).sum(), (64, 64), (64, 64))
    profile = measured(backward_graph)
    assert (profile.source, profile.device_kind) == ("measured", "cpu")
    assert profile.names == ("dot_general", "tanh", "reshape", "reduce_sum")
    assert sum(profile.forward_seconds) > 0 and sum(profile.backward_seconds) > 0
    assert profile.forward_seconds[2] == 0  # a view
    assert len(profile.forward_spread) == len(profile.backward_spread) == 4
    assert profile.forward_flops[0] == 2 * 64**3


# Residuals


def partitioned(case, stages=1, m=2, **options):
    mesh = jax.sharding.Mesh(jax.devices()[:stages], ("stage",))
    options = {"optimizer": optax.sgd(0.1), "num_microbatches": m, "profile": "analytic", **options}
    return jaxpipe.partition(case.model, mesh, case.batch, loss=case.loss, **options)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in ("cnn-linen", "resnet") else ()) for n in CASES]
)
def test_residuals_are_the_stash_of_one_stage(name):
    pipeline = partitioned(CASES[name](8))
    program = pipeline._planned.program
    stashed = program.stages[0].stash_avals
    assert sum(pipeline.profile.residual_bytes) == sum(a.size * a.dtype.itemsize for a in stashed) > 0


@pytest.mark.core
def test_residuals_belong_to_the_operator_that_makes_them():
    def network(x, a, b):
        return (jax.nn.relu(x @ a) @ b).sum()

    graph = trace(lambda *v: [network(*v)], shape(16, 4), shape(4, 8), shape(8, 2))
    backward_graph = build_backward_graph(graph.with_parameters([False, True, True]), graph.inputs[1:])
    profile = analytic(backward_graph, OTHER, held=graph.inputs[:1])
    assert profile.names == ("dot_general", "relu", "dot_general", "reduce_sum")
    # What the relu writes tells its own derivative too, 16x8 floats; the network's input is kept anyway.
    assert profile.residual_bytes == (0, 16 * 8 * 4, 0, 0)
    profile = analytic(backward_graph, OTHER)
    # Otherwise the first product needs it, 16x4 floats.
    assert profile.residual_bytes == (16 * 4 * 4, 16 * 8 * 4, 0, 0)


# Profiles of models


def linearized_case(case):
    objective = trace_loss(bind(case.model, case.loss, case.batch), case.loss, case.batch)
    return build_backward_graph(objective.graph, objective.parameters, seeds=objective.results[:1])


def profile_of(case, **options):
    options = {"source": "analytic", **options}
    return jaxpipe.profile_model(case.model, case.batch, loss=case.loss, **options)


@pytest.mark.core
def test_the_profile_is_that_of_the_program_that_is_cut():
    case = cnn_linen(8)
    pipeline = partitioned(case, stages=2, m=4)
    profile = profile_of(case, num_microbatches=4)
    assert pipeline.profile == profile
    assert sum(stage.forward_seconds for stage in pipeline.plan.stages) == pytest.approx(sum(profile.forward_seconds))
    assert profile_of(case).seconds != profile.seconds  # of other shapes


@pytest.mark.core
def test_an_edited_profile_decides_the_cut(stopwatch):
    case = mlp(8)
    profile = profile_of(case, source="measured", num_microbatches=2, cache=False)
    text = profile.to_json()
    assert jaxpipe.Profile.from_json(text) == profile
    last = len(profile.names) - 1
    lines = [k for k, line in enumerate(text.splitlines()) if '"names"' in line]
    line = text.splitlines()[lines[last]]
    others = sum(profile.forward_seconds[:last]) + sum(profile.backward_seconds[:last])
    edited = line.replace(f'"forward_seconds": {profile.forward_seconds[last]}', f'"forward_seconds": {others}')
    assert edited != line
    profile = jaxpipe.Profile.from_json(text.replace(line, edited))
    pipeline = partitioned(case, stages=2, profile=profile, schedule="1f1b")
    assert pipeline.profile == profile and pipeline.plan.profile == "measured"
    start, end = pipeline.plan.stages[1].operators
    beside = sum(profile.forward_seconds[start:last]) + sum(profile.backward_seconds[start:last])
    assert end == last + 1 and beside <= 0.02 * others  # of steps about as short that which sends and keeps least


def test_an_estimate_needs_no_device(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("looked for devices"))
    model = jax.tree_util.Partial(lambda w, x: w * x, jnp.ones(()))
    batch, options = jax.ShapeDtypeStruct((2**10, 2**18), jnp.float32), {"loss": lambda f, x: f(x).sum()}
    for kind, rate in (("H100", 3.35e12), ("V100", 0.9e12)):
        profile = jaxpipe.profile_model(model, batch, source="analytic", device=kind, **options)
        assert (profile.device_kind, profile.source) == (kind, "analytic")
        # It reads 1 GiB, at nine tenths of the data sheet's rate; to start kernels takes some microseconds.
        assert 0 < sum(profile.forward_seconds) - 2**30 / (0.9 * rate) < 1e-5


def test_wrong_requests():
    case = mlp(8)
    with pytest.raises(jaxpipe.PartitionError, match=r"source='fast'; it must be 'measured', 'analytic' or a function"):
        profile_of(case, source="fast")
    with pytest.raises(jaxpipe.PartitionError, match=r"device='H100' is the name of a kind .* source='analytic'"):
        profile_of(case, source="measured", device="H100")
    with pytest.raises(jaxpipe.PartitionError, match=r"device='abacus': its peak rates are not known, only .*H100"):
        profile_of(case, device="abacus")
    with pytest.raises(jaxpipe.BatchError, match="num_microbatches=3"):
        profile_of(case, num_microbatches=3)


# The cache


@pytest.mark.core
def test_a_program_is_measured_once(own_cache, stopwatch):
    first = profile_of(mlp(8), source="measured")
    timed = len(stopwatch)
    (file,) = own_cache.iterdir()
    assert jaxpipe.Profile.from_json(file.read_text()) == first
    assert profile_of(mlp(8), source="measured") == first and len(stopwatch) == timed
    assert profile_of(mlp(4), source="measured") != first and len(stopwatch) > timed
    assert len(list(own_cache.iterdir())) == 2


def test_measured_plans_repeat(own_cache):
    plans = [partitioned(mlp(8), stages=2, profile="measured").plan for _ in range(2)]
    assert plans[0] == plans[1]
    assert profile_of(mlp(8), source="measured", num_microbatches=2).source == "measured"
    assert len(list(own_cache.iterdir())) == 1


def test_a_plan_says_when_its_profile_was_measured(own_cache, stopwatch):
    before = datetime.datetime.now(datetime.UTC)
    first, again = (partitioned(mlp(8), stages=2, profile="measured").plan for _ in range(2))
    fresh = partitioned(mlp(8), stages=2, profile="measured", options=jaxpipe.PlanOptions(fresh_profile=True)).plan
    after = datetime.datetime.now(datetime.UTC)
    times = {f"{time:%Y-%m-%d %H:%M}" for time in (before, after)}
    assert first.measured in times and fresh.measured.split(",")[0] in times  # the stopwatch begins elsewhere then
    assert again.measured == f"{first.measured}, kept"
    assert f"(measured {first.measured}, kept)" in str(again)
    assert jaxpipe.Plan.from_json(again.to_json()).measured == again.measured


def test_a_kept_profile_has_the_load_of_the_machine(own_cache, stopwatch, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (3.25, 1.0, 1.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    profile_of(mlp(8), source="measured")
    measurement = profile_of(mlp(8), source="measured").measurement
    assert (measurement.load, measurement.cores, measurement.kept) == (3.25, 2, True)
    assert measurement.spread == pytest.approx(0.1, rel=1e-6)  # that of every program; times are sums of shares


def test_a_profile_without_its_time_is_measured_again(own_cache, stopwatch):
    """Older versions wrote such files."""
    first = profile_of(mlp(8), source="measured")
    (file,) = own_cache.iterdir()
    file.write_text(dataclasses.replace(first, measurement=None).to_json())
    timed = len(stopwatch)
    assert not profile_of(mlp(8), source="measured").measurement.kept and len(stopwatch) > timed


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name")
def test_a_pipe_in_the_place_of_a_kept_profile_is_passed_over(own_cache, stopwatch):
    first = profile_of(mlp(8), source="measured")
    (file,) = own_cache.iterdir()
    file.unlink()
    os.mkfifo(file)
    with pytest.warns(UserWarning, match="no regular file.* measuring again"):
        assert profile_of(mlp(8), source="measured").names == first.names
    assert file.is_file()


def test_without_a_cache_it_is_measured_again(own_cache, stopwatch):
    for _ in range(2):
        profile_of(mlp(8), source="measured", cache=False)
    assert len(set(stopwatch)) == len(stopwatch) and not own_cache.exists()


@pytest.mark.parametrize("text", ["", "{}", '{"operators": [], "edges": []}', "\x00"])
def test_a_damaged_file_is_measured_again(own_cache, stopwatch, text):
    profile_of(mlp(8), source="measured")
    (file,) = own_cache.iterdir()
    file.write_text(text)
    timed = len(stopwatch)
    with pytest.warns(UserWarning, match="cannot be used .* measuring again"):
        again = profile_of(mlp(8), source="measured")
    assert len(stopwatch) > timed
    assert jaxpipe.Profile.from_json(file.read_text()) == again


def _one_more(profile):
    return dataclasses.replace(
        profile, **{name: (*getattr(profile, name), getattr(profile, name)[-1]) for name in COLUMNS}, edges=()
    )


def _one_less(profile):
    columns = {name: getattr(profile, name)[:-1] for name in COLUMNS}
    return dataclasses.replace(profile, **columns, edges=profile.edges[:1], together=())


COLUMNS = ("names", *NUMBERS)

OTHERS = {
    "one operator more": (_one_more, "its names are those of another program"),
    "one operator less": (_one_less, "its names are those of another program"),
    "other edges": (lambda p: dataclasses.replace(p, edges=p.edges[:-1]), "its edges are those of another program"),
    "other parameters": (
        lambda p: dataclasses.replace(p, parameter_bytes=[2 * size for size in p.parameter_bytes]),
        "its parameter_bytes are those of another program",
    ),
    "another device": (lambda p: dataclasses.replace(p, device_kind="H100"), "its device_kind are those of another"),
    "years": (
        lambda p: dataclasses.replace(p, forward_seconds=[1e18] * len(p.names)),
        r"an operator takes 1e\+18 s in it",
    ),
}


@pytest.mark.parametrize(("change", "message"), OTHERS.values(), ids=OTHERS)
def test_a_kept_profile_of_another_program_is_measured_again(change, message, own_cache, stopwatch):
    profile_of(mlp(8), source="measured")
    (file,) = own_cache.iterdir()
    file.write_text(change(jaxpipe.Profile.from_json(file.read_text())).to_json())
    with pytest.warns(UserWarning, match=f"cannot be used .*{message}.* measuring again"):
        again = profile_of(mlp(8), source="measured")
    assert profile_of(mlp(8), source="measured") == again


def test_a_kept_profile_of_numbers_too_large_is_measured_again(own_cache, stopwatch):
    profile_of(mlp(8), source="measured")
    (file,) = own_cache.iterdir()
    file.write_text(re.sub(r'(_(seconds|bytes)": )[-0-9.e]+', r"\g<1>1e308", file.read_text()))
    with pytest.warns(UserWarning, match="cannot be used .* is 1e\\+308; it must be .* below .* measuring again"):
        profile_of(mlp(8), source="measured")


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, stopwatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXPIPE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="JAXPIPE_CACHE_DIR"):
        profile_of(mlp(8), source="measured")


def test_the_folder_is_the_users_unless_told(monkeypatch):
    monkeypatch.delenv("JAXPIPE_CACHE_DIR")
    assert kept_path("profiles", "a program").parts[-3:-1] == ("jaxpipe", "profiles") or os.name == "nt"


@pytest.mark.slow
def test_the_file_is_the_same_in_every_process():
    """No address and no order of a set is in it."""
    code = (
        "import jax; from tests.support.pipeline_models import cnn_linen\n"
        "from jaxpipe.costs.profile_cache import profile_path; from tests.test_profiling import linearized_case\n"
        "print(profile_path(linearized_case(cnn_linen(4)), jax.devices('cpu')[0]))"
    )
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    process = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert process.stdout.strip() == profile_path(linearized_case(cnn_linen(4)), jax.devices("cpu")[0])
