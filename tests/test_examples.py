import json
import runpy
from pathlib import Path

import pytest


EXAMPLES = Path(__file__).parents[1] / "examples"


def test_train_digits_learns(capsys, tmp_path):
    example = runpy.run_path(str(EXAMPLES / "train_digits.py"))
    accuracy = example["main"](example["Options"](stages=2, epochs=4, num_microbatches=4, out=tmp_path))
    printed = capsys.readouterr().out
    assert accuracy > 0.85
    assert "2 stages" in printed and "plain jax.grad keeps" in printed and "bubble" in printed
    written = ["memory.png", "metrics.jsonl", "report.html", "timeline.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == written
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == list(range(4 * (1437 // 96))) and steps[-1]["loss"] < steps[0]["loss"]


@pytest.mark.slow
def test_weights_that_change_on_the_way_learn_as_well(tmp_path):
    example = runpy.run_path(str(EXAMPLES / "train_digits.py"))
    usual, delayed = (
        example["main"](example["Options"](schedule=name, out=tmp_path)) for name in ("one_f_one_b", "pipedream")
    )
    assert usual > 0.97 and delayed > usual - 0.01


def test_plan_cluster_answers_on_paper(capsys, tmp_path):
    example = runpy.run_path(str(EXAMPLES / "plan_cluster.py"))
    best = example["main"](example["Options"](out=tmp_path))
    printed = capsys.readouterr().out
    assert "of 16 devices, synchronous" in printed and "new 0/0" in printed
    assert best.lower_bound_seconds <= best.bottleneck_seconds
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.png", "partition.json", "stages.png"]


@pytest.mark.slow
def test_train_digits_sparse_compares_exchanges(capsys, tmp_path):
    example = runpy.run_path(str(EXAMPLES / "train_digits_sparse.py"))
    dense, sparse = example["main"](example["Options"](blocks=(2,), epochs=8, learning_rate=0.05, out=tmp_path))
    assert dense.accuracy > 0.85 and sparse.accuracy > 0.75
    assert dense.ratio == 1 and 50 < sparse.ratio < 60
    assert "4 replicas, 8 epochs, own" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["sparse.png"]


def test_train_resumable_goes_on_in_fewer_stages(capsys, tmp_path):
    example = runpy.run_path(str(EXAMPLES / "train_resumable.py"))

    def run(**options):
        accuracy = example["main"](example["Options"](checkpoints=tmp_path, every=20, **options))
        return accuracy, capsys.readouterr().out

    first, printed = run(stages=4, steps=50)
    assert "goes on" not in printed and "checkpoint of step 50" in printed
    second, printed = run(stages=2, steps=130)
    assert "goes on from step 50" in printed and "step 120: loss" in printed and "checkpoint of step 130" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["120", "130"]
    assert first < second and second > 0.9


def test_train_hosts_runs_alone(capsys, tmp_path):
    example = runpy.run_path(str(EXAMPLES / "train_hosts.py"))
    accuracy = example["main"](example["Options"](stages=2, replicas=2, steps=120, checkpoints=tmp_path))
    printed = capsys.readouterr().out
    assert accuracy > 0.9 and "1 processes, 4 devices" in printed and "step 100: loss" in printed
