"""The HTML page: complete, by itself, and safe whatever a model's modules are called."""

import base64
import dataclasses
import json
import re
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpipe
from jaxpipe import PartitionError
from jaxpipe.visualize.html_report import page, plain_stash_bytes
from tests.support.pipeline_models import cnn_linen


class Outline(HTMLParser):
    """Return what a browser would see: elements with their attributes, and texts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.open = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))


@pytest.fixture(scope="module")
def pipeline():
    case = cnn_linen(16)
    mesh = jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
    options = {"num_microbatches": 2, "profile": "analytic"}
    return jaxpipe.partition(case.model, mesh, case.batch, loss=case.loss, optimizer=optax.sgd(0.1), **options)


def test_report_is_complete_and_stands_alone(pipeline, tmp_path):
    pipeline.report(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    outline = Outline(text)
    assert outline.open == []
    images = [attributes for tag, attributes in outline.elements if tag == "img"]
    assert [image["alt"].split(",")[0] for image in images] == [
        "compute and communication of each stage",
        "timeline",
        "bytes by component",
    ]
    for image in images:
        kind, data = image["src"].split(",")
        assert kind == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("svg")
    # Nothing is loaded from anywhere, and nothing runs.
    assert not re.search(r"""(src|href)=["'](?!data:)""", text)
    assert [attributes["type"] for tag, attributes in outline.elements if tag == "script"] == ["application/json"]
    (data,) = [data for tag, data in outline.texts if tag == "script"]
    assert jaxpipe.Plan.from_json(data) == pipeline.plan
    paragraphs = [data for tag, data in outline.texts if tag == "p"]
    compiled = max(pipeline.memory_report().compiled_bytes)
    assert any(f"{compiled / 1024:.2f} KiB on the fullest device (predicted" in text for text in paragraphs)
    # One table says what the stages do: no second one has other numbers for the same plan.
    heads = re.findall(r"<thead>(.*?)</thead>", text)
    assert sum("<th>devices</th>" in head for head in heads) == 1 and text.count('class="wide"><table') == 4
    # Phones show it at its own width; what is wider scrolls.
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in outline.elements
    assert len(re.findall(r'<div class="wide"><img ', text)) == len(images)


@pytest.mark.parametrize("decorate", [lambda f: f, jaxpipe.memory_encoded])
def test_plain_bytes_are_those_of_jax_grad(decorate):
    call = decorate(lambda variables, x: jax.nn.relu(x @ variables["w"]))
    variables, batch = {"w": jnp.ones((8, 8))}, jnp.ones((4, 8))

    def loss(model, batch):
        return (model(batch) ** 2).mean()

    mesh = jax.make_mesh((1,), ("stage",), devices=jax.devices()[:1])
    options = {"num_microbatches": 1, "profile": "analytic", "optimizer": optax.sgd(0.1)}
    pipeline = jaxpipe.partition(jax.tree_util.Partial(call, variables), mesh, batch, loss=loss, **options)
    # ReLU keeps a byte for each of 4 x 8 elements, the square its operand in float32; the batch is stored anyway.
    assert plain_stash_bytes(pipeline._planned.program) == (4 * 8 + 4 * 8 * 4,)


def test_names_cannot_break_out(pipeline):
    hostile = '</script><script>alert(1)</script>$x_{<img src=x onerror=alert(1)>&"'
    stages = tuple(dataclasses.replace(stage, modules=(hostile,)) for stage in pipeline.plan.stages)
    plan = dataclasses.replace(pipeline.plan, stages=stages, schedule=hostile)
    text = page(plan, pipeline.partition, pipeline._planned.program, {hostile: pipeline.timeline()})
    outline = Outline(text)
    assert outline.open == []
    assert [attributes for tag, attributes in outline.elements if tag == "script"] == [
        {"id": "plan", "type": "application/json"}
    ]
    assert all(attributes["src"].startswith("data:") for tag, attributes in outline.elements if tag == "img")
    (data,) = [data for tag, data in outline.texts if tag == "script"]
    assert json.loads(data)["stages"][0]["modules"] == [hostile]


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("no/such/x.html", FileNotFoundError, r"path='no/such/x\.html': there is no folder 'no/such'"),
        (".", IsADirectoryError, r"path='\.' is a folder.*'report\.html'"),
        ("r.pdf", PartitionError, r"report writes HTML, and path='r\.pdf' ends with '\.pdf'. Use '\.html'"),
    ],
)
def test_a_path_for_no_page_is_refused_before_anything_is_drawn(path, error, message, pipeline, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(type(pipeline), "timeline", None)
    with pytest.raises(error, match=message):
        pipeline.report(path)
    assert not list(tmp_path.iterdir())


def test_missing_matplotlib_is_named_before_anything_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    mesh = jax.make_mesh((1,), ("stage",), devices=jax.devices()[:1])
    model = jax.tree_util.Partial(lambda w, x: x @ w, jnp.ones((3, 1)))
    options = {"loss": lambda f, x: f(x).mean(), "optimizer": optax.sgd(0.5), "profile": "analytic"}
    pipeline = jaxpipe.partition(model, mesh, jnp.ones((4, 3)), **options, runtime="mpmd")
    with pytest.raises(ImportError, match=r"Pipeline\.report draws with matplotlib.*pip install matplotlib"):
        pipeline.report(tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists() and not pipeline._runtime._compiled_steps


def test_notebooks_show_the_plan(pipeline):
    shown = Outline(pipeline._repr_html_())
    assert [tag for tag, _ in shown.elements].count("table") == 2 and not shown.open
    texts = [text for _, text in shown.texts]
    assert "stage" in texts and any("micro-batches" in text for text in texts)
    assert pipeline.plan._repr_html_() == pipeline._repr_html_()
    schedule = Outline(pipeline.schedule._repr_html_())
    cells = [text for tag, text in schedule.texts if tag in ("th", "td")]
    assert not schedule.open and cells[:2] == ["tick", "0"] and "device 1" in cells and "F0" in cells
