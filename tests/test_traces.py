"""Traces against literal timelines."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpipe
from jaxpipe.schedules import Timeline, interleaved, one_f_one_b, zero_bubble
from jaxpipe.visualize.traces import trace_json, write_trace
from tests.support.pipeline_models import cnn_linen


def slices(text, process=0, device=0):
    events = json.loads(text)["traceEvents"]
    selected = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (process, device)]
    return [(e["name"], e["ts"], e["dur"]) for e in selected]


def test_rows_are_devices_and_gaps_are_waits():
    timeline = one_f_one_b(2, 2).simulate(forward=1e-3, backward_input=1e-3, backward_weight=1e-3)
    text = trace_json({"simulated": timeline})
    assert trace_json(timeline) == text.replace("simulated", "step")
    # By hand: F0 F1, one unit for F0 on stage 1, two for its B0; then stage 0 goes back.
    assert slices(text, device=0) == [
        ("F0", 0, 1000),
        ("F1", 1000, 1000),
        ("wait", 2000, 2000),
        ("B0", 4000, 2000),
        ("wait", 6000, 1000),
        ("B1", 7000, 2000),
    ]
    assert slices(text, device=1) == [
        ("wait", 0, 1000),
        ("F0", 1000, 1000),
        ("B0", 2000, 2000),
        ("F1", 4000, 1000),
        ("B1", 5000, 2000),
        ("wait", 7000, 2000),
    ]
    labels = [(e["name"], e["args"]["name"]) for e in json.loads(text)["traceEvents"] if e["ph"] == "M"]
    assert labels == [("process_name", "simulated"), ("thread_name", "device 0"), ("thread_name", "device 1")]


def test_parts_of_the_backward_work_and_chunks_have_their_names():
    split = zero_bubble(2, 4).simulate(forward=1, backward_input=1, backward_weight=1)
    names = {name for name, *_ in slices(trace_json({"split": split}))} - {"wait"}
    assert names == {f"{kind}{j}" for kind in "FIW" for j in range(4)}
    chunked = interleaved(2, 2).simulate(forward=1, backward_input=1, backward_weight=1)
    names = {name for name, *_ in slices(trace_json({"chunks": chunked}))} - {"wait"}
    assert names == {f"{kind}{j}{chunk}" for kind in "FB" for j in range(2) for chunk in ("", "'1")}


def test_several_timelines_stand_below_each_other(tmp_path):
    timeline = one_f_one_b(1, 1).simulate(forward=1, backward_input=1, backward_weight=0)
    write_trace(tmp_path / "trace.json", {"a": timeline, "b": Timeline((), 0.0, (0,))})
    text = (tmp_path / "trace.json").read_text()
    assert slices(text) == [("F0", 0, 1e6), ("B0", 1e6, 1e6)] and slices(text, process=1) == []


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "zero_bubble"])
def test_pipelines_have_a_timeline(schedule):
    case = cnn_linen(16)
    mesh = jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
    options = {"num_microbatches": 2, "schedule": schedule, "profile": "analytic", "runtime": "spmd"}
    pipeline = jaxpipe.partition(case.model, mesh, case.batch, loss=case.loss, optimizer=optax.sgd(0.1), **options)
    timeline = pipeline.timeline()
    assert timeline.makespan == pytest.approx(pipeline.plan.step_seconds, rel=1e-9)  # rounding of sums
    assert timeline.bubble_fraction == pytest.approx(pipeline.plan.bubble_fraction, rel=1e-9)
    if schedule == "interleaved":
        return  # measuring compiles each stage's programs
    measured = pipeline.timeline(measured=True)
    actions = [[(span.stage, span.action) for span in line.spans] for line in (timeline, measured)]
    assert actions[0] == actions[1]
    kinds = "FIW" if schedule == "zero_bubble" else "FB"
    assert {span.action.kind.value for span in measured.spans} == set(kinds)
    assert all(span.end > span.start for span in measured.spans)


def test_stages_that_share_a_parameter_are_measured():
    def tied(table, tokens):
        return jnp.tanh(table[tokens] @ jnp.ones((8, 64))) @ jnp.ones((64, 8)) @ table.T

    model, tokens = jax.tree_util.Partial(tied, jnp.ones((16, 8))), jnp.zeros((8, 4), int)
    mesh = jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
    options = {"optimizer": optax.sgd(0.1), "num_microbatches": 2, "profile": "analytic", "runtime": "spmd"}
    pipeline = jaxpipe.partition(model, mesh, tokens, loss=lambda f, x: (f(x).sum(), 1.0, {}), **options)
    measured = pipeline.timeline(measured=True)
    assert "shared" in pipeline.plan.memory and len(measured.spans) == len(pipeline.timeline().spans)


def test_devices_of_unequal_speed_have_their_own_times():
    case = cnn_linen(16)
    mesh = jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
    network = jaxpipe.Network([[0, 1e9], [1e9, 0]], speed=(1.0, 0.25))
    pipeline = jaxpipe.partition(
        case.model,
        mesh,
        case.batch,
        loss=case.loss,
        optimizer=optax.sgd(0.1),
        num_microbatches=2,
        profile="analytic",
        network=network,
        runtime="spmd",
    )
    timeline, plan = pipeline.timeline(), pipeline.plan
    assert timeline.makespan == pytest.approx(plan.step_seconds, rel=1e-9)  # rounding of sums
    for s, stage in enumerate(plan.stages):
        first = next(span for span in timeline.spans if span.stage == s)
        speed = network.speed[stage.devices[0]]
        assert first.end - first.start == pytest.approx(stage.forward_seconds / speed, rel=1e-6)
