"""Stashes in the host's memory: what is refused, what devices have to show, and plans on paper."""

import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

import jaxpipe
from jaxpipe import HostMemory, MemoryBudgetError, Network, PartitionError, Plan
from jaxpipe.host_memory import HostUse, check_host_memory
from jaxpipe.pipeline import host_probe
from jaxpipe.pipeline.describe import stage_links
from jaxpipe.pipeline.program import PAGE
from jaxpipe.schedules.transport import transport
from jaxpipe.units import bytes_text


@pytest.fixture
def untried():
    """Devices are tried anew, and forgotten again."""
    host_probe._why_not.cache_clear()
    yield
    host_probe._why_not.cache_clear()


def mesh_of(*platforms):
    return SimpleNamespace(devices=np.array([SimpleNamespace(platform=one) for one in platforms]))


@pytest.mark.parametrize(
    ("given", "budget", "error", "message"),
    [
        ("64GiB", None, PartitionError, r"host_memory='64GiB' without memory=.*Pass memory= too"),
        (
            2**36,
            2**30,
            PartitionError,
            rf"host_memory={2**36} with devices of the platform cpu.*HostMemory\({2**36}, on_",
        ),
        ("much", 2**30, MemoryBudgetError, "host_memory='much' is not a size"),
        (0, 2**30, MemoryBudgetError, "host_memory=0 is not a size"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_traced(given, budget, error, message):
    def loss(f, x):
        raise AssertionError("traced")

    mesh = jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
    with pytest.raises(error, match=message):
        jaxpipe.partition(
            lambda v, x: x, mesh, np.ones((4, 3)), loss=loss, optimizer=optax.sgd(1), memory=budget, host_memory=given
        )


@pytest.mark.parametrize(
    ("stages", "options", "asked"),
    [
        (1, {}, r"1 stage\(s\) and the schedule 1f1b was"),
        (2, {"schedule": "zero_bubble"}, r"2 stage\(s\) and the schedule zero-bubble-h1 was"),
        (4, {"replicate": (3, 1)}, r"replicate=\(3, 1\) was"),
    ],
)
def test_stashes_that_cannot_wait_elsewhere_are_named_before_anything_is_traced(stages, options, asked):
    def loss(f, x):
        raise AssertionError("traced")

    mesh = jax.make_mesh((stages,), ("stage",), devices=jax.devices()[:stages])
    model, host = jax.tree_util.Partial(lambda w, x: w * x, np.ones(3)), HostMemory(2**20, on_paper=True)
    options = {**options, "memory": 2**20, "host_memory": host, "num_microbatches": 4}
    with pytest.raises(PartitionError, match=f"host_memory=: .*{asked} asked for"):
        jaxpipe.partition(model, mesh, np.ones((12, 3)), loss=loss, optimizer=optax.sgd(1), **options)


def test_devices_are_tried_once_it_makes_sense(monkeypatch):
    tried = []
    monkeypatch.setattr("jaxpipe.host_memory.why_not", lambda devices: tried.append(len(devices)) or "they say no")
    assert check_host_memory(None, 8, mesh_of("cuda")) is None
    assert check_host_memory(HostMemory(5, on_paper=True), 8, mesh_of("cpu")) == HostUse(5, on_paper=True)
    assert not tried
    refused = check_host_memory("1KiB", 8, mesh_of("cuda", "cuda"))
    assert refused == HostUse(1024, "they say no") and refused.bytes == 0 and tried == [2]
    monkeypatch.setattr("jaxpipe.host_memory.why_not", lambda devices: "")
    assert check_host_memory("1KiB", 8, mesh_of("cuda")).bytes == 1024


@pytest.mark.core
@pytest.mark.parametrize("count", [1, 2])
def test_a_cpu_does_not_place_anything_in_its_memory(untried, count):
    reason = host_probe.why_not(jax.devices()[:count])
    assert reason == "XLA leaves on the device (cpu) what is to go to the host's memory"


@pytest.mark.parametrize(
    ("count", "column", "reason"),
    [
        (1, None, ""),
        (2, None, ""),
        # Two stages and four micro-batches: the second stage's stashes never leave.
        (1, 3, "4 of 4 stashes do not come back from the host's memory (cpu) as they were"),
        (2, 4, "4 of 8 stashes do not come back from the host's memory (cpu) as they were"),
    ],
)
def test_every_stash_is_compared(untried, monkeypatch, count, column, reason):
    """Where it is not asked for placement, a CPU passes; not if slices are written or read a page beside."""
    actual = host_probe.swap_columns

    def beside(*args):
        return [found + (k == column) for k, found in enumerate(actual(*args))]

    monkeypatch.setattr(host_probe, "HOST_SPACE", "")
    monkeypatch.setattr(host_probe, "swap_columns", beside)
    assert host_probe.why_not(jax.devices()[:count]) == reason


def test_a_gpu_is_told_to_keep_the_arena_with_its_host():
    """What XLA is given for a GPU: annotated transfers of portions, and an arena that is no transfer's result."""
    _, swaps = host_probe.probe_swaps(2)
    pages = transport(swaps, (host_probe.STASH_PAGES,) * 2).host
    text = host_probe.trace_probe(jax.devices()[:2]).lower(lowering_platforms=("cuda",)).as_text()
    moves = re.findall(
        r"annotate_device_placement.*?_xla_buffer_placement = \"(\w+)\".*?tensor<(\d+)x(\d+)xui32>", text
    )
    assert {kind for kind, _, _ in moves} == {"pinned_host", "device"}
    assert {int(words) for _, _, words in moves} == {PAGE}
    assert all(int(rows) < pages for _, rows, _ in moves)
    assert re.search(rf"broadcast_in_dim.*tensor<{pages}x{PAGE}xui32>", text)


def test_a_link_to_the_host_is_that_of_the_slowest_replica_and_used_twice_in_a_tick():
    rates, delays = (8e9, 2e9, 4e9, 4e9), (1e-6, 2e-6, 0, 5e-6)
    network = Network.uniform(4, 4096.0)
    network = replace(network, host_bandwidth_bytes_per_second=rates, host_latency_seconds=delays)
    stages = [SimpleNamespace(devices=(0, 1)), SimpleNamespace(devices=(2, 3))]
    links = stage_links(SimpleNamespace(network=network, stages=stages), 5 * 4096 + 1)
    assert links.host_pages == 5 and links.bandwidth[0][1] == 1.0
    # A page there and one back, at 2 GB/s and at 4 GB/s.
    assert links.host_bandwidth == (2e9 / 8192, 4e9 / 8192) and links.host_latency == (4e-6, 1e-5)
    assert links.without_host.host_pages == 0


def layers(weights, x):
    x = x * 2  # so that the first stage stores as much as the others
    for w in weights:
        x = x @ w
    return x


def on_paper(memory, host_memory, network=None):
    """Eight equal layers in four stages, whose stashes take whole pages."""
    m, rows, width = 8, 64, 64
    x = jax.ShapeDtypeStruct((m * rows, width), np.float32)
    model = jax.tree_util.Partial(layers, list(np.ones((8, width, width), np.float32)))
    mesh = jax.make_mesh((4,), ("stage",), devices=jax.devices()[:4])
    options = {"optimizer": optax.sgd(0.1), "num_microbatches": m, "profile": "analytic", "storage": ()}
    options |= {"memory": memory, "host_memory": host_memory, "network": network, "schedule": "one_f_one_b"}
    options["runtime"] = "spmd"
    return jaxpipe.partition(model, mesh, x, loss=lambda f, x: f(x).sum(), **options)


def test_a_plan_on_paper_says_what_is_with_the_host_and_cannot_be_run(tmp_path):
    """With slow links between devices, and a fast one to the host, seven stashes on a device can be two."""
    usual = on_paper(None, None)
    assert usual.plan.host is None
    arena = usual.plan.memory["arena"]
    (stash,) = {stage.stash_bytes for stage in usual.plan.stages}
    assert arena == 7 * stash
    budget = usual.plan.predicted_bytes - arena + 5 * stash // 2  # two, and what has just arrived
    network = Network(np.full((4, 4), 1e3), host_bandwidth_bytes_per_second=(1e15,) * 4)
    pipeline = on_paper(budget, HostMemory("1MiB", on_paper=True), network)
    plan = pipeline.plan
    assert plan.predicted_bytes <= budget and {stage.storage for stage in plan.stages} == {"default"}
    assert plan.memory["arena"] == 2 * stash and [stage.away for stage in plan.stages] == [5, 3, 1, 0]
    first = plan.stages[0]
    assert [(piece.stage, piece.devices, piece.bytes) for piece in first.pieces] == [(-1, first.devices, stash)]
    # Five and the one that leaves before one comes back; a slot to spare. None of it is a device's.
    assert plan.host == jaxpipe.planning.plan.HostPlan(2**20, 7 * stash, "", True)
    assert plan.predicted_bytes == sum(plan.memory.values()) and not any("host" in name for name in plan.memory)
    assert "of 1.00 MiB in the host's memory for each device; on paper only" in " ".join(str(plan).split())
    assert Plan.from_json(plan.to_json()) == plan
    pipeline.report(tmp_path / "report.html", compile=False)
    page = (tmp_path / "report.html").read_text()
    assert f"it keeps {bytes_text(9 * stash)} of stashes at most" in page and "no stash goes to a peer" in page
    with pytest.raises(PartitionError, match="This plan is on paper"):
        pipeline.memory_report()
    state, x = pipeline.init(jax.random.key(0)), np.ones((512, 64), np.float32)
    for run in (pipeline.step, pipeline.value_and_grad):
        with pytest.raises(PartitionError, match="This plan is on paper"):
            run(state, x)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "rate"), [(4096, 1e15), (2**20, 1e3)])
def test_a_host_without_room_or_with_a_slow_link_is_left_alone(size, rate):
    """What is over the budget is computed again then."""
    usual = on_paper(None, None).plan
    budget = usual.predicted_bytes - usual.memory["arena"] * 4 // 7
    network = Network(np.full((4, 4), 1e3), host_bandwidth_bytes_per_second=(rate,) * 4)
    plan = on_paper(budget, HostMemory(size, on_paper=True), network).plan
    assert plan.host.bytes == 0 and any(stage.added_seconds for stage in plan.stages)


def test_devices_that_fail_the_trial_do_without_and_the_plan_says_why(monkeypatch):
    refused = HostUse(2**20, "they say no")
    monkeypatch.setattr(sys.modules["jaxpipe.partition"], "check_host_memory", lambda *_: refused)
    plan = on_paper("1GiB", "1MiB").plan
    assert plan.host.bytes == 0 and "the host's memory is not used: they say no" in " ".join(str(plan).split())
    assert Plan.from_json(plan.to_json()) == plan
    monkeypatch.undo()
    assert replace(plan, host=None) == on_paper("1GiB", None).plan
