"""One set of numbers: what the page, pictures, timelines and partitions of a plan say is in its JSON."""

import html
import json
import re
import runpy
from pathlib import Path

import jax
import optax
import pytest

import jaxpipe
from jaxpipe.text.units import bytes_text, seconds_text
from jaxpipe.visualize.pictures import draw_memory, draw_stages, draw_timeline
from tests.support.pipeline_models import cnn_linen


EXAMPLES = Path(__file__).parents[1] / "examples"
TRAINED = [path.stem for path in sorted(EXAMPLES.glob("train_*.py"))]
OPTIONS = {"train_language": {"stages": 2, "layers": 2}, "train_unet": {"stages": 2}, "train_resnet": {"stages": 2}}


class PlannedError(Exception):
    """An example has planned, and does nothing else."""


def planned_by(example, monkeypatch, folder):
    """Return the pipeline that an example trains."""
    planned = []

    def partition(*arguments, **options):
        planned.append(usual(*arguments, **{**options, "profile": "analytic"}))
        raise PlannedError

    usual = jaxpipe.partition
    monkeypatch.setattr(jaxpipe, "partition", partition)
    module = runpy.run_path(str(EXAMPLES / f"{example}.py"))
    fields = module["Options"].__dataclass_fields__
    folders = {name: folder for name in ("out", "checkpoints") if name in fields}
    with pytest.raises(PlannedError):
        module["main"](module["Options"](**OPTIONS.get(example, {}), **folders))
    return planned[0]


def rows_of(page):
    """Return the rows of each table of a page, by the header of a column."""
    tables = []
    for text in re.findall(r"<table>(.*?)</table>", page, re.DOTALL):
        head, *rows = [
            [html.unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
            for row in re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)
        ]
        tables.append([dict(zip(head, row, strict=True)) for row in rows])
    return tables


def check_numbers(pipeline, folder):
    pipeline.report(folder / "page.html", compile=False)
    text = (folder / "page.html").read_text()
    plan = json.loads(re.search(r'<script id="plan".*?>(.*?)</script>', text, re.DOTALL)[1])
    step, bound = plan["step_seconds"], plan["lower_bound_seconds"]
    assert plan == json.loads(pipeline.plan.to_json())
    tables = rows_of(text)
    (work,) = [rows for rows in tables if "sends on" in rows[0]]
    (kept,) = [rows for rows in tables if "plain jax.grad" in rows[0]]
    (methods,) = [rows for rows in tables if "method" in rows[0]]
    for row, other, stage in zip(work, kept, plan["stages"], strict=True):
        assert row["forward"] == seconds_text(stage["forward_seconds"])
        assert row["backward"] == seconds_text(stage["backward_seconds"])
        stash = f"{stage['in_flight']} x {bytes_text(stage['stash_bytes'])}" if stage["stash_bytes"] else "-"
        assert row["stash"].split(",")[0] == stash
        assert (other["kept"], other["in flight"]) == (bytes_text(stage["stash_bytes"]), str(stage["in_flight"]))
        assert other["time added"] == (seconds_text(stage["added_seconds"]) if stage["added_seconds"] else "")
    (placement,) = [row["what it does here"] for row in methods if row["method"] == "placement"]
    said = f"a step of {seconds_text(step)}, {step / bound:.3f} of the lower bound {seconds_text(bound)}, on links"
    assert placement.startswith(said) and f"step {seconds_text(step)} (" in html.unescape(text)
    # Pictures.
    timeline = draw_timeline(pipeline.plan, pipeline.schedule, pipeline.timeline()).get_suptitle()
    assert timeline.startswith(f"One step: {1e3 * step:.1f} ms, bubble {plan['bubble_fraction']:.1%} (")
    stages = draw_stages(pipeline.partition)
    assert stages.get_suptitle().endswith(f"a step take {seconds_text(step)}, at least {seconds_text(bound)}")
    predicted = plan["predicted_bytes"]
    assert f": {bytes_text(predicted)} predicted" in draw_memory(pipeline.plan, pipeline.schedule).get_suptitle()
    # The partition, and the timeline, but for what devices of a stage exchange at its end.
    partition = json.loads(pipeline.partition.to_json())
    assert (partition["bottleneck_seconds"], partition["lower_bound_seconds"]) == (step, bound)
    for placed, stage in zip(partition["stages"], plan["stages"], strict=True):
        for field, name in (
            ("in_flight", "in_flight"),
            ("residual_bytes", "stash_bytes"),
            ("sent_bytes", "sent_bytes"),
            ("parameter_bytes", "parameter_bytes"),
            ("operators", "operators"),
            ("devices", "devices"),
        ):
            assert placed[field] == stage[name]
    assert f"step {seconds_text(step)}, " in str(pipeline.partition)
    if all(len(stage["devices"]) == plan["replicas"] for stage in plan["stages"]):
        assert pipeline.timeline().makespan == pytest.approx(step, rel=1e-9)  # rounding of sums
    else:
        assert pipeline.timeline().makespan < step


@pytest.mark.parametrize(
    "example", [pytest.param(n, marks=() if n == "train_hosts" else pytest.mark.slow) for n in TRAINED]
)
def test_the_page_of_an_example_says_what_its_plan_says(example, monkeypatch, tmp_path):
    check_numbers(planned_by(example, monkeypatch, tmp_path), tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "one_f_one_b"},
        {"schedule": "interleaved"},
        {"schedule": "zero_bubble"},
        {"schedule": "one_f_one_b", "runtime": "spmd"},
        {"options": jaxpipe.PlanOptions(devices_per_stage=(3, 1))},
    ],
    ids=str,
)
def test_the_page_says_what_its_plan_says(options, tmp_path):
    case = cnn_linen(24)
    mesh = jax.make_mesh((4,), ("stage",), devices=jax.devices()[:4])
    if options.get("schedule") == "interleaved":
        mesh = jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
    arguments = {"optimizer": optax.sgd(0.1), "num_microbatches": 6, "profile": "analytic", **options}
    check_numbers(jaxpipe.partition(case.model, mesh, case.batch, loss=case.loss, **arguments), tmp_path)
