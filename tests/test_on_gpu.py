"""The command that measures on a GPU, rehearsed on a CPU; and the front of bytes and operations, of a small model."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from scripts import bench_memory_front, on_gpu, plot_memory_front


ROOT = Path(__file__).parents[1]
TINY = bench_memory_front.CASES_BY_NAME["GPT-2 tiny"]


def runner(folder, seconds):
    deadline = time.monotonic() + seconds
    return on_gpu.Runner(folder=folder, deadline=deadline, seconds=0.1, rounds=3, small=True)


@pytest.mark.slow
def test_a_rehearsal_measures_all_kinds(tmp_path):
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "scripts.on_gpu", "--rehearse", "--out", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert {row["kind"] for row in rows} == set(on_gpu.KINDS)
    assert not [row for row in rows if {"error", "skipped"} & row.keys()]
    steps = {row["variant"]: row for row in rows if row["kind"] == "step"}
    assert all(row["seconds"][0] <= row["seconds"][1] <= row["seconds"][2] for row in steps.values())
    assert steps["plain"]["products"] == 5 + 4 + 5  # forward, by activations, by weights
    (budget,) = (row for row in rows if row["kind"] == "budget")
    assert budget["memory"] == int(1.5 * steps["plain"]["bytes"]) >= budget["bytes"]
    assert budget["seconds"][1] > 0 and budget["products"] == steps["plain"]["products"]
    assert all(row["variant"] in done.stdout for row in rows)


def test_kinds_of_measurements_run(tmp_path):
    """The kinds that plan or compile a step, in this process; the rehearsal runs all, each in its own."""
    device = on_gpu.Device(tmp_path / "lock", seconds=0.01, rounds=1, compile_only=False)
    rows = {}
    for kind, variant, share in (
        ("step", "plain", 0),
        ("budget", "150%", 1.5),
        ("jit", "99%", 0.99),
        ("stages", "default", 0),
    ):
        memory = int(share * rows["step"]["bytes"]) if share else 0
        rows[kind] = on_gpu.KINDS[kind](on_gpu.Job(kind, "MLP", variant, memory, share, small=True), device)
        assert rows[kind]["seconds"][1] > 0
    assert rows["step"]["products"] == rows["budget"]["products"] == 5 + 4 + 5
    assert rows["budget"]["bytes"] <= int(1.5 * rows["step"]["bytes"])
    assert json.dumps(rows)


def test_a_failure_loses_one_row(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    row = runner(tmp_path, 600).run(on_gpu.Job("step", "no such model", "plain", small=True))
    assert row["error"].endswith("KeyError: 'no such model'")
    assert (row["kind"], row["case"]) == ("step", "no such model")


def test_what_there_is_no_time_for_is_skipped(tmp_path):
    assert runner(tmp_path, 1).run(on_gpu.Job("codecs", small=True))["skipped"] == "no time was left"
    unknown = runner(tmp_path, 600).run(on_gpu.Job("budget", TINY.name, "75%", small=True))
    assert unknown["skipped"] == "the plain step was not compiled"


def test_waves_come_in_order_of_importance():
    waves = [wave([]) for wave in on_gpu.waves(False)]
    assert [wave[0].kind for wave in waves[:4]] == ["ceilings", "step", "bits", "codecs"]
    cases = {job.case for wave in waves for job in wave if job.kind == "step" and job.variant == "fast"}
    assert len(cases) == 19
    for job in (job for wave in waves for job in wave if job.case):
        assert job.problem.name == job.case


@pytest.mark.slow
def test_budgets_stand_beside_checkpoints():
    families, device = bench_memory_front.FAMILIES, jax.devices()[0]
    rows = list(bench_memory_front.points(TINY, list(families), (0.95, 0.01), device, timed=True, rounds=3))
    assert len({(row["family"], row["variant"]) for row in rows}) == len(rows) == 1 + 3 + 6 + 2 + 2 + 2
    by_name = {row["variant"]: row for row in rows if row["family"] != "jit"}
    plain, blocks, second = (by_name[name] for name in ("plain", "blocks", "blocks-second"))
    # The forward pass of both blocks again, and of the first alone.
    assert blocks["products"] - plain["products"] == 2 * (second["products"] - plain["products"]) > 0
    assert plain["flops"] < second["flops"] < blocks["flops"]
    assert by_name["1%"]["smallest"] > 0 and "refused" in by_name["1%"]
    assert all(row["time_ratio"] > 0 for row in rows if "bytes" in row)


def test_the_front_is_drawn():
    names = {"plain": "plain", "dots": "whole", "blocks": "blocks", "fast": "jaxpipe", "50%": "jaxpipe"}
    rows = [
        {"family": family, "variant": name, "bytes": 2**30 / (k + 1), "flops": 1.0 + k / 8, "time_ratio": 1 + k / 9}
        for k, (name, family) in enumerate(names.items())
    ]
    rows.append({"family": "jaxpipe", "variant": "1%", "refused": "no plan", "smallest": 1, "time_ratio": None})
    result = {"versions": {"jax": jax.__version__}, "device": "some", "models": {"a": rows, "b": rows}}
    figure = plot_memory_front.draw(result)
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["operations of products run again, % of plain"] * 2 + ["step time, of plain"] * 2
    assert plot_memory_front.front([(3, 2), (1, 5), (4, 2), (2, 6)]) == [(1, 5), (3, 2)]
