"""The graph of a step: each pass alone, on literal little graphs; a pass of one's own; features that can be removed."""

import functools
import gzip
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from jaxpipe.runtime.mpmd.device_bytes import predicted_bytes
from jaxpipe.runtime.mpmd.stage_devices import StageDevices
from jaxpipe.runtime.mpmd.step_graph import Call, Form, Join, Place, Port, Send, Split, StepGraph, Value, trace_task
from jaxpipe.runtime.mpmd.value_liveness import drop_values, infer_donation, remove_unread
from tests.support.meshes import mesh_of


HERE, THERE, WHOLE = Place(0, 0), Place(1, 0), Place(0)
SHAPE = jax.ShapeDtypeStruct((4,), jnp.float32)


def task(function, *groups: str, consumes: bool = False):
    """A task of one array in each of some groups."""
    return traced(function, groups, consumes).task


def traced(function, groups, consumes: bool = False):
    return trace_task("work", function, lambda path: Form("state"), dict.fromkeys(groups, SHAPE), consumes)


def graph(tasks, instructions, inputs, outputs) -> StepGraph:
    numbers = [k for x in instructions for k in (*x.reads, *x.writes)]
    values = tuple(Value(SHAPE, HERE, Form("state")) for _ in range(max(numbers) + 1))
    ports = [{Port(HERE, "state", k): k for k in numbers} for numbers in (inputs, outputs)]
    return StepGraph(values, tuple(tasks), tuple(instructions), *ports)


def layout():
    return SimpleNamespace(planned=SimpleNamespace(traces={}))


def test_a_result_that_is_an_operand_of_the_same_path_or_of_a_micro_batch_is_not_written():
    def function(x):
        return {"parameters": x["parameters"], "stash": x["arriving"], "state": x["parameters"], "sums": x["sums"] + 1}

    work = traced(function, ("parameters", "arriving", "sums", "unread"))
    # Operands are sorted: arriving, parameters, sums, unread. The state is a copy, which outlives the parameters.
    assert work.task.writes == (("state",), ("sums",))
    assert work.task.reads == (("parameters",), ("sums",))
    assert work.sources == (~1, ~0, 0, 1)


def test_what_nobody_reads_is_not_computed():
    forward = task(lambda x: {"kept": x["a"] + 1, "unread": x["b"] * 2}, "a", "b")
    dead = task(lambda x: {"unread": x["a"] * 3}, "a")
    instructions = [
        Call(0, HERE, (0, 1), (2, 3), 0),
        Call(0, HERE, (2, 1), (4, 5), 1),
        Call(1, HERE, (5,), (6,)),
        Send(HERE, THERE, (4, 5), (7, 8)),
    ]
    small = remove_unread(graph([forward, dead], instructions, [0, 1], [7]), layout())
    assert small.instructions == (
        Call(0, HERE, (0,), (2,), 0),
        Call(0, HERE, (2,), (4,), 1),
        Send(HERE, THERE, (4,), (7,)),
    )
    assert small.tasks[0].writes == (("kept",),) and small.tasks[0].reads == (("a",),)
    assert [e.primitive.name for e in small.tasks[0].program.closed.eqns] == ["add"]
    assert list(small.inputs.values()) == [0]


def test_a_result_that_one_call_needs_is_written_by_all():
    double = task(lambda x: {"first": x["a"] * 2, "second": x["a"] * 3}, "a")
    instructions = [Call(0, HERE, (0,), (1, 2), 0), Call(0, HERE, (1,), (3, 4), 1)]
    kept = remove_unread(graph([double], instructions, [0], [4]), layout())
    assert kept.instructions == tuple(instructions)


def test_operands_that_nobody_reads_afterwards_are_donated():
    add = task(lambda x: {"sum": x["a"] + x["b"]}, "a", "b")

    def donated(instructions, inputs, outputs, of=add):
        return infer_donation(graph([of], instructions, inputs, outputs), layout()).donated[0]

    copies = Send(THERE, HERE, (0, 1), (2, 3))
    assert donated([copies, Call(0, HERE, (2, 3), (4,))], [0, 1], [4]) == {0, 1}
    assert donated([copies, Call(0, HERE, (2, 3), (4,))], [0, 1], [4, 2]) == {1}  # it is there after the step
    assert donated([Call(0, HERE, (0, 1), (4,))], [0, 1], [4]) == set()  # they are there before it
    again = [copies, Call(0, HERE, (2, 3), (4,)), Call(0, HERE, (4, 3), (5,))]
    assert donated(again, [0, 1], [5]) == {0}  # the first call's second operand is read by the second
    assert donated([copies, Call(0, HERE, (2, 2), (4,))], [0, 1], [4]) == set()
    parts = [copies, Split(WHOLE, (2,), (5, 6)), Call(0, HERE, (5, 3), (4,))]
    assert donated(parts, [0, 1], [4]) == {1}  # a part shares its memory
    joined = [*parts[:2], Join(WHOLE, (5, 6), (7,), True), Call(0, HERE, (7, 3), (4,))]
    assert donated(joined, [0, 1], [4]) == {1}
    whole = [copies, Split(WHOLE, (2,), (5, 6)), Call(0, HERE, (2, 3), (4,)), Send(HERE, THERE, (5,), (8,))]
    assert donated(whole, [0, 1], [4, 8]) == {1}  # a part is read afterwards


def test_what_is_there_before_a_step_is_written_over_by_its_new_value_alone():
    update = task(lambda x: {"w": x["w"] - x["g"]}, "g", "w", consumes=True)
    instructions = [Call(0, HERE, (0, 1), (2,))]
    assert infer_donation(graph([update], instructions, [0, 1], [2]), layout()).donated[0] == {1}


def test_a_value_is_dropped_after_the_last_instruction_that_reads_it():
    add = task(lambda x: {"sum": x["a"] + 1, "other": x["a"] + 2}, "a")
    instructions = [Call(0, HERE, (0,), (1, 2)), Send(HERE, THERE, (1,), (3,)), Call(0, THERE, (3,), (4, 5))]
    drops = drop_values(graph([add], instructions, [0], [4]), layout()).drops
    assert [set(x) for x in drops] == [{0, 2}, {1}, {3, 5}]


def test_an_array_takes_memory_until_nobody_reads_a_part_of_it():
    double, other = task(lambda x: {"double": x["a"] * 2}, "a"), Place(0, 1)
    values = tuple(Value(SHAPE, place, Form("state")) for place in (WHOLE, HERE, other, HERE))
    instructions = (Split(WHOLE, (0,), (1, 2)), Call(0, HERE, (1,), (3,)))
    step = StepGraph(values, (double,), instructions, {Port(WHOLE, "state", 0): 0}, {Port(HERE, "state", 3): 3})
    step = drop_values(infer_donation(step, layout()), layout())
    first, *more = jax.devices()[:2]
    peaks = predicted_bytes(step, StageDevices(((first, *more),), 2))
    assert peaks[first].components["state"] == 2 * 16  # the part that the call reads, and its result


def link_bytes(graph: StepGraph) -> Counter:
    """Return the bytes that each link carries in a step, by the places at its ends."""
    carried = Counter()
    for instruction in graph.instructions:
        if isinstance(instruction, Send):
            for k, target in zip(instruction.reads, instruction.targets, strict=True):
                source = instruction.target if target == instruction.source else instruction.source
                carried[source.stage, target.stage] += graph.avals[k].size * graph.avals[k].dtype.itemsize
    return carried


def pipeline_of(stages: int, m: int, **options) -> jaxpipe.Pipeline:
    weights = [jnp.eye(8) for _ in range(6)]
    model = jax.tree_util.Partial(lambda ws, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x), weights)
    return jaxpipe.partition(
        model, mesh_of(stages, None), jnp.ones((16, 8)), loss=lambda f, x: f(x).mean(), optimizer=optax.sgd(0.1),
        num_microbatches=m, profile="analytic", **options,
    )  # fmt: skip


def test_the_bytes_of_each_link_can_be_counted():
    carried = link_bytes(pipeline_of(3, 4)._runtime.graph)
    # Forward and back over each cut, 16 rows of 8 numbers; a stage's share of the gradient's squared norm.
    rows, norm = 16 * 8 * 4, 4
    assert carried == {(0, 1): rows, (1, 2): rows + norm, (2, 1): rows, (1, 0): rows, (0, 2): norm}


#: Trains in a process of its own.
TRAINS = """
import functools, jax, jax.numpy as jnp, numpy as np, optax, pathlib, sys
import jaxpipe
from jaxpipe.runtime.mpmd import passes
weights = [jax.random.normal(jax.random.key(k), (64, 64)) / 8 for k in range(16)]
model = jax.tree_util.Partial(lambda ws, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x), weights)
mesh = jax.make_mesh((4,), ("stage",), devices=jax.devices()[:4])
batch = jax.random.normal(jax.random.key(99), (16 * 64, 64))
def make(**options):
    return jaxpipe.partition(
        model, mesh, batch, loss=lambda f, x: jnp.square(f(x)).mean(), optimizer=optax.sgd(0.1),
        num_microbatches=16, profile="analytic", schedule="1f1b", **options)
options = jaxpipe.PlanOptions(host_memory="1GiB", compile=False)
kept = pathlib.Path(sys.argv[1])  # all runs have the plan of the first: what a solver finds depends on its seconds
if not kept.exists():
    plan = make().plan
    memory = plan.predicted_bytes - plan.stages[0].stash_bytes
    kept.write_text(make(memory=memory, options=options).plan.to_json())
pipeline = make(plan=kept.read_text(), options=options)
assert pipeline.plan.stages[0].pieces
leaves = jax.tree.leaves(pipeline.value_and_grad(pipeline.init(jax.random.key(0)), batch))
hosted = sum(getattr(x, "to_host", False) for x in pipeline._runtime.graph.instructions)
print(len(passes.PASSES), hosted, *(np.asarray(x).tobytes().hex()[:4096] for x in leaves))
"""


def test_a_feature_is_removed_with_its_file_and_its_line_in_the_list_of_passes(tmp_path):
    source = Path(jaxpipe.__file__).parent

    def trained(*removed: str) -> list[str]:
        root = tmp_path / ("without-" + "-".join(removed))
        package = shutil.copytree(source, root / "jaxpipe", ignore=shutil.ignore_patterns("__pycache__"))
        listed = package / "runtime" / "mpmd" / "passes.py"
        for name in removed:
            (package / "runtime" / "mpmd" / f"{name}.py").unlink()
            lines = listed.read_text().splitlines(keepends=True)
            listed.write_text("".join(line for line in lines if name not in line))
        environment = {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "PATH": "", "HOME": str(tmp_path)}
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
        command = [sys.executable, "-c", TRAINS, str(tmp_path / "plan.json")]
        run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr[-2000:]
        return run.stdout.split()

    (count, hosted, *numbers) = trained()
    assert int(hosted) > 0
    for name, sends in (("swap_stashes", False), ("combine_sends", True)):
        (fewer, left, *same) = trained(name)
        assert int(fewer) == int(count) - 1 and (int(left) > 0) == sends
        assert np.array_equal(same, numbers)


@pytest.mark.versions
def test_traces_name_steps_and_what_is_started_in_them(tmp_path):
    pipeline = pipeline_of(2, 4, schedule="1f1b")
    state, batch = pipeline.init(jax.random.key(0)), jnp.ones((16, 8))
    state, _ = pipeline.step(state, batch)
    with jax.profiler.trace(tmp_path, create_perfetto_trace=True):
        for _ in range(2):
            state, _ = pipeline.step(state, batch)
        jax.block_until_ready(state)
    (path,) = tmp_path.rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    counts = Counter(event.get("name") for event in events)
    assert counts["Pipeline.step"] == 2
    assert {event["args"]["step_num"] for event in events if event.get("name") == "Pipeline.step"} == {"2", "3"}
    for j in range(4):
        for name in ("stage 0: forward", "stage 1: forward and backward", "stage 0: backward"):
            assert counts[f"{name}, micro-batch {j}"] == 2
    assert counts["stage 0: update"] == counts["stage 1: update"] == 2
    assert counts["send from stage 0 to stage 1"] >= 8
    modules = {event.get("args", {}).get("hlo_module") for event in events}  # of what runs on the devices
    assert modules >= {"jit_forward", "jit_forward_and_backward", "jit_backward", "jit_update"}
