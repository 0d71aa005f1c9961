"""The code of README and docs runs and prints what they show; the links, tests and scripts that they name exist."""

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

from jaxpipe.planning.dispatch_timeline import CALL_SECONDS, SEND_SECONDS
from scripts.bench_learning import losses


ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Times that depend on the machine; bytes that XLA reserves are those of the newest JAX.
MEASURED = re.compile(r"\d[\d.]* (us|ms|s)\b" if jax.__version_info__ >= (0, 12) else r"\d[\d.]* (us|ms|s|MiB)\b")
#: Pages whose code runs without ``docs/example.py``, each block or all of them in a process of its own.
ALONE = ("README.md", "index.md", "tutorial.md")


@dataclass(frozen=True)
class Block:
    """A Python block of a page, and the text block behind it, whose lines it must print; ``...`` stands for others."""

    code: str
    printed: str | None


def blocks_of(page: Path) -> list[Block]:
    fences = FENCE.findall(page.read_text())
    followers = [*fences[1:], ("", "")]
    return [
        Block(code, text if kind == "text" else None)
        for (language, code), (kind, text) in zip(fences, followers, strict=bool(fences))
        if language == "python"
    ]


def check_printed(block: Block, printed: str) -> None:
    if block.printed is not None:
        lines = [MEASURED.sub("*", line.rstrip()) for line in printed.splitlines()]
        expected = [MEASURED.sub("*", line) for line in block.printed.splitlines() if line.strip() != "..."]
        assert [line for line in expected if line not in lines] == []


def run_alone(code: str, folder: Path) -> str:
    (folder / "program.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "program.py"]
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.core
@pytest.mark.parametrize("k", range(2))
def test_programs_of_the_readme_run_when_pasted(k, tmp_path):
    blocks = blocks_of(ROOT / "README.md")
    assert len(blocks) == 2 and all(block.printed for block in blocks)
    check_printed(blocks[k], run_alone(blocks[k].code, tmp_path))


@pytest.mark.slow  # 20 s, most of them compilation
def test_tutorial_runs(tmp_path):
    blocks = blocks_of(DOCS / "tutorial.md")
    assert len(blocks) == 8
    printed = run_alone("\n".join(block.code for block in blocks), tmp_path)
    assert "zero_bubble 27.0" in printed  # (p, m) = (4, 8): m (F + I + W) + p - 1, by hand
    assert "2 stages, " in printed and "smallest budget" in printed
    assert {"report.html", "trace.json", "run"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow  # 5 to 20 s a page
@pytest.mark.parametrize("page", [page.name for page in PAGES if page.name not in ALONE and blocks_of(page)])
def test_pages_run_after_the_example(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "example"}
    exec((DOCS / "example.py").read_text(), names)
    for block in blocks_of(DOCS / page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.code, page, "exec"), names)
        check_printed(block, printed.getvalue())


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="needs pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    example = (DOCS / "example.py").read_text().splitlines()[0]
    assert example.strip('"') in (tmp_path / "index.html").read_text()
    returns = re.findall(r"Returns:.*?</table>", (tmp_path / "reference.html").read_text(), re.DOTALL)
    # What is returned is one value: its lines are not values of types that their first words name.
    assert returns and all(table.count('class="doc-section-item"') == 1 for table in returns)


@pytest.mark.core
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist(page):
    text = page.read_text()
    targets = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text)
    targets += [(target, "") for target in re.findall(r'(?:src|href)="(?!https?:)([^"]+)"', text)]
    for target, heading in targets:
        path = page.parent / target if target else page
        assert path.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}, heading
    assert page.name in ("README.md", "index.md") or f": {page.name}" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.core
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_scripts_and_results_that_pages_name_exist(page):
    text = page.read_text()
    for file, name in re.findall(r"(tests/\w+\.py)::(\w+)", text):
        nodes = ast.parse((ROOT / file).read_text()).body
        assert name in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"
    for module in re.findall(r"python -m ((?:scripts|examples)\.\w+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    for path in re.findall(r"\b((?:examples|scripts|docs/results)/[\w.-]*\w)", text):
        assert any(ROOT.glob(path)), path


def results(name: str) -> dict:
    return json.loads((DOCS / "results" / f"{name}.json").read_text())


def table_rows(page: Path) -> dict[str, list[str]]:
    """The cells of each row of a page's tables by its first cell."""
    rows = [line.strip("|").split("|") for line in page.read_text().splitlines() if line.startswith("|")]
    return {first.strip(): [cell.strip() for cell in cells] for first, *cells in rows}


def test_bytes_of_large_models_are_the_measured_ones():
    readme, benchmarks = table_rows(ROOT / "README.md"), table_rows(DOCS / "benchmarks.md")
    titles = {
        "GPT-2 8x512": "GPT-2 small, 8 x 512",
        "Llama 8x512": "Llama-like, 8 x 512",
        "BERT 8x512": "BERT-like, 8 x 512",
    }
    titles |= {"Mixer 32x224": "MLP-Mixer, 32 x 224", "ViT-B 16x224": "ViT-B, 16 x 224"}
    titles |= {"ResNet50 32x224": "ResNet-50, 32 x 224"}
    for row in results("encoding-gpu-sizes-h100-jax0.12")["rows"]:
        measured, products = row["temporaries"], row["products"]
        best = min((name for name in measured if "dots" in name), key=measured.__getitem__)
        shown = benchmarks[titles[row["name"]]]
        for name, cell in zip(("plain", "fast", "fast-step", best, "blocks"), shown, strict=True):
            expected = f"{measured[name] / 2**20:,.0f} / {products[name]}" if name in measured else ""
            assert cell == expected, (row["name"], name)
        if titles[row["name"]] in readme:
            names = ("plain", best, "blocks", "fast")
            expected = [f"{measured[name] / 2**20:,.0f} / {products[name]}" for name in names]
            assert readme[titles[row["name"]]][:4] == expected


def test_bytes_on_a_tpu_are_the_measured_ones():
    shown = table_rows(DOCS / "devices.md")
    titles = {
        "GPT-2 8x512": "GPT-2 small, 8 x 512",
        "GPT-2 8x512 bfloat16": "GPT-2 small, 8 x 512, in bfloat16",
        "GPT-2 bfloat16": "GPT-2 in bfloat16",
        "UNet": "U-Net",
        "ViT-B 16x224": "ViT-B, 16 x 224",
        "ViT-B 16x224 bfloat16": "ViT-B, 16 x 224, in bfloat16",
        "ResNet50 32x224": "ResNet-50, 32 x 224",
        "ResNet50 32x224 bfloat16": "ResNet-50, 32 x 224, in bfloat16",
        "Llama 8x512 bfloat16": "Llama-like, 8 x 512, in bfloat16",
        "BERT 8x512 bfloat16": "BERT, 8 x 512, in bfloat16",
        "Mixer 32x224 bfloat16": "Mixer, 32 x 224, in bfloat16",
        "UNet bfloat16": "U-Net in bfloat16",
    }
    titles |= {
        f"{name} bfloat16": f"{name} in bfloat16" for name in ("AlexNet", "VGG16", "NiN", "OverFeat", "GoogLeNet")
    }
    first_page = table_rows(DOCS.parent / "README.md")
    short = {
        "GPT-2 8x512 bfloat16": "GPT-2 small",
        "ViT-B 16x224 bfloat16": "ViT-B",
        "ResNet50 32x224 bfloat16": "ResNet-50",
    }
    rows = results("encoding-v5e-jax0.12")["rows"]
    for row in rows:
        sizes, products = row["temporaries"], row["products"]
        assert sizes["fast"] <= sizes["plain"], row["name"]
        budgets = [name for name in sizes if name.endswith("%") and sizes[name] is not None]
        cells = [
            f"{sizes[name] / 2**20:,.1f} / {products[name]}" if sizes.get(name) else "-"
            for name in ("plain", "fast", "dots-no-batch", "blocks", *budgets[:1])
        ]
        assert shown[titles.get(row["name"], row["name"])] == [*cells, "-"][:5], row["name"]
        if row["name"] in short:
            names = ("plain", "dots-no-batch", "blocks", "fast", "60%")
            rounded = [f"{sizes[name] / 2**20:,.0f} / {products[name]}" for name in names]
            assert first_page[f"{short[row['name']]} on a v5e"] == rounded
    llama = next(row for row in rows if row["name"] == "Llama 8x512 bfloat16")
    size, count = llama["temporaries"]["86%"] / 2**20, llama["products"]["86%"]
    text = " ".join((DOCS / "devices.md").read_text().split())
    assert f"Within 86 %, the Llama-like model takes {size:,.1f} MiB and {count} products" in text
    assert size * 2**20 < llama["temporaries"]["dots-no-batch"] and count < llama["products"]["dots-no-batch"]
    shares = {"GPT-2 8x512": 60, "BERT 8x512": 60, "ResNet50 32x224": 50, "Llama 8x512": 45, "ViT-B 16x224": 40}
    for name, share in shares.items():
        row = next(row for row in rows if row["name"] == f"{name} bfloat16")
        size, count = row["temporaries"][f"{share}%"], row["products"][f"{share}%"]
        assert size < row["temporaries"]["blocks"] and count <= row["products"]["blocks"]
        assert share == 60 or f"{share} % ({size / 2**20:,.1f} / {count})" in text


def test_bytes_of_shards_that_gather_are_the_compiled_ones():
    shown = table_rows(DOCS / "benchmarks.md")
    for target in ("H100", "v5e"):
        rows = {
            (row["form"], row["variant"]): row for row in results(f"shard-gathers-{target.lower()}-jax0.12")["rows"]
        }
        forms = dict.fromkeys(form for form, _ in rows)
        assert len(forms) == 3
        for form in forms:
            variants = [rows[form, name] for name in ("plain", "checkpoint", "decorated", "budget")]
            cells = [f"{row['temporaries'] / 2**20:,.0f} / {row['products']}" for row in variants]
            assert shown[f"{target}, {form}"] == cells, form
            plain, written, decorated, budget = variants
            assert decorated["temporaries"] < plain["temporaries"]
            assert budget["temporaries"] <= written["temporaries"] and budget["products"] <= written["products"]


def test_seconds_on_a_tpu_are_the_estimated_ones():
    shown, rows = table_rows(DOCS / "devices.md"), results("seconds-v5e-jax0.12")["rows"]
    titles = {"GPT-2 8x512": "GPT-2 small, 8 x 512", "ResNet50": "ResNet-50"}
    for row in rows:
        name = row["name"].removesuffix(" bfloat16")
        kind = "bfloat16" if row["name"].endswith("bfloat16") else "float32"
        cells = [f"{1e3 * row['seconds'][key]:.1f}" for key in ("jaxpipe", "xla", "products_at_peak")]
        assert shown[f"{titles.get(name, name)}, {kind}"] == cells, row["name"]
    assert len(rows) == 6


def test_budgets_of_one_device_are_the_measured_ones():
    models = results("memory-front-h100-jax0.12")["models"]
    shown, readme = table_rows(DOCS / "benchmarks.md"), table_rows(ROOT / "README.md")
    labels = {
        "plain": "plain",
        "blocks-dots": "`dots_saveable` in blocks",
        "blocks-dots-no-batch": "`dots_with_no_batch_dims_saveable` in blocks",
        "blocks": "`nn.remat` around blocks",
    }
    for column, (name, title) in enumerate(
        {"GPT-2 8x512": "GPT-2 small, 8 x 512", "ViT-B 16x224": "ViT-B, 16 x 224"}.items()
    ):
        rows = {row["variant"]: row for row in models[name]}  # of a budget, the last number of micro-batches
        plain = rows["plain"]
        for variant, row in rows.items():
            if variant not in labels and "share" not in row:
                continue
            several = f" in {row['microbatches']} micro-batches" if row.get("microbatches", 1) > 1 else ""
            label = labels.get(variant) or f"budget of {variant[:-1]} %"
            expected = [cell(row) + several, f"{100 * (row['flops'] / plain['flops'] - 1):.1f} %"]
            assert shown[label][2 * column : 2 * column + 2] == expected, (name, variant)
        row = rows["31.4%"]
        assert readme[title][4] == cell(row)
        if name == "GPT-2 8x512":
            temporaries, products = cell(row).split(" / ")
            budget = f"within {row['memory'] / 2**30:.2f} GiB, parameters and gradients included"
            text = f"{budget}: it takes {temporaries} MiB of temporaries and {products} matrix products."
            assert text in (ROOT / "README.md").read_text()


def test_seconds_of_the_planner_are_the_measured_ones():
    rows = {(row["case"], row["cost_model"]): row for row in results("planner-cpu")["cases"]}
    text = " ".join((DOCS / "benchmarks.md").read_text().split())
    names = "ResNet-101 size, 16 devices", "1000 operators, 64 devices", "1000 operators, 8 nodes of 8"
    free = [rows[name, "synchronous"] for name in names]
    (a, x), (b, y), (c, z) = ((f"{row['seconds']:.1f} s", f"{row['ratio_to_bound']:.2f} times") for row in free)
    assert f"takes {a} for the operators of a ResNet-101 on 16 devices ({x} the bound), {b} for 1,000 operators" in text
    assert f"on 64 ({y}) and {c} on 8 nodes of 8 ({z})." in text
    published = [
        [rows[name, model]["seconds"] for model in ("pipedream", "min_max", "throughput")] for name in names[:2]
    ]
    (small, large), (least, most) = ((min(seconds), max(seconds)) for seconds in published)
    nodes = rows[names[2], "min_max"]["seconds"]
    assert f"take {small:.1f} to {large:.1f} s, {least:.0f} to {most:.0f} s and, on the nodes, {nodes:.0f} s." in text


def test_the_budget_of_a_large_network_of_convolutions_is_the_measured_one():
    rows = {row["variant"]: row for row in results("memory-front-resnet50-h100-jax0.12")["models"]["ResNet50 32x224"]}
    plain, blocks, kept, small = (cell(rows[variant]) for variant in ("plain", "blocks", "40%", "31.4%"))
    assert table_rows(ROOT / "README.md")["ResNet-50, 32 x 224"][4] == kept
    text = " ".join((DOCS / "benchmarks.md").read_text().split())
    wide = plain.replace(" / ", " MiB of temporaries and ")
    assert (
        f"takes {wide} products, with `nn.remat` around blocks {blocks}, and within 40 % {kept}. Within 31.4 % it"
        in text
    )
    assert f"takes two micro-batches, {small}." in text and rows["31.4%"]["microbatches"] == 2


def test_budgets_of_the_nine_networks_are_the_measured_ones():
    shown = table_rows(DOCS / "benchmarks.md")
    for name, rows in results("memory-front-nine-h100-jax0.12")["models"].items():
        plain, kept = rows[0], []
        for variant in ("75%", "50%", "35%"):
            row = [row for row in rows if row["variant"] == variant][-1]
            count = row["microbatches"]
            several = f", {count} micro-batches" if count > 1 else ""
            again = row.get("products", 0) - count * plain["products"]
            kept.append(f"{row['bytes'] / 2**20:,.1f} / {again}{several}" if "bytes" in row else "refused")
        title = {"VGG16": "VGG-16", "UNet": "U-Net", "ResNet50": "ResNet-50"}.get(name, name)
        (cells,) = (cells for first, cells in shown.items() if first.startswith(f"{title} (") and len(cells) == 4)
        assert cells == [f"{plain['bytes'] / 2**20:,.1f}", *kept], name


def cell(row):
    """Temporaries and products of a row, as tables show them."""
    return f"{row['temporaries'] / 2**20:,.0f} / {row['products']}"


def test_budgets_of_own_steps_are_the_measured_ones():
    shown = table_rows(DOCS / "benchmarks.md")
    columns = [("plain", "plain"), *(("jit", f"{share}%") for share in (80, 60, 45))]
    columns += [("blocks", "blocks"), ("blocks", "blocks-dots-no-batch")]
    files = (f"{name}-budgets-h100-jax0.12" for name in ("step", "scan", "recurrence"))
    models = {name: rows for file in files for name, rows in results(file)["models"].items()}
    for name, rows in models.items():
        known = {(row["family"], row["variant"]): row for row in rows}
        assert shown[f"`jit`: {name}"] == [total(known[column]) if column in known else "-" for column in columns]
        budgets = [row for row in rows if row["family"] == "jit" and "refused" not in row]
        assert all(row["bytes"] <= row["memory"] for row in budgets)
        for row in budgets:
            placed = [other for other in rows if other["family"] == "blocks" and other["bytes"] <= row["memory"]]
            assert all(row["products"] <= other["products"] for other in placed)
    by_variant = {row["variant"]: total(row).split(" / ") for row in models["Scanned GPT-2 8x512"]}
    (size, products), (encoded, others) = by_variant["30%"], by_variant["fast-step"]
    told = f"30 % of its step is {size} MiB and {products} products"
    told += f", and `memory_encoded` of its loss alone {encoded} MiB and {others}"
    assert told in " ".join((DOCS / "benchmarks.md").read_text().split())


def test_what_explain_says_is_what_its_first_measure_saves():
    rows = [row["explained"] for row in results("explained-h100-jax0.12")["programs"].values()]
    off = max(abs(row["applied"]["bytes"] / row["measures"][0]["bytes"] - 1) for row in rows)
    text = " ".join((DOCS / "benchmarks.md").read_text().split())
    assert off <= 1e-4 and not any(row["failures"] for row in rows)
    assert f"applied to {len(rows)} public programs, its line needs the bytes that were told to within 0.01 %" in text


def test_steps_on_an_h200_are_the_measured_ones():
    shown = table_rows(DOCS / "benchmarks.md")
    names = {"ViT-B 16x224": "ViT-B, 16 x 224", "ResNet50 32x224": "ResNet-50, 32 x 224"}
    names |= {"Llama bf16 8x512": "Llama-like in bfloat16, 8 x 512", "Mixer 32x224": "MLP-Mixer, 32 x 224"}
    rows = {(row["case"], row["variant"]): row for row in results("own-steps-h200-jax0.11")["rows"]}
    assert {case for case, _ in rows} == set(names)
    for case, name in names.items():
        plain = rows[case, "plain"]["seconds"][1]
        parts = [rows[case, variant] for variant in ("blocks", "blocks-dots-no-batch", "75%", "50%")]
        peaks = [f"{row['peak_bytes'] / 2**20:,.0f} / {row['seconds'][1] / plain:.2f}" for row in parts]
        first = f"{rows[case, 'plain']['peak_bytes'] / 2**20:,.0f} / {1e3 * plain:.1f} ms"
        assert shown[f"own step: {name}"] == [first, *peaks]
        assert all(row["bytes"] <= row["memory"] for row in parts if row["memory"])
    own_weights = 8 * 8192**2 * 4
    for row in results("swaps-h200-jax0.11")["rows"]:
        assert row["identical"] and abs(row["peak_bytes"] - row["bytes"] - own_weights) < 5000
        assert not row["memory"] or row["bytes"] <= row["memory"]


def total(row):
    """All bytes and products of a row, as tables show them."""
    return "refused" if "refused" in row else f"{row['bytes'] / 2**20:,.0f} / {row['products']}"


def test_figures_that_the_readme_begins_with_are_the_measured_ones():
    text = (ROOT / "README.md").read_text()
    models = results("stage-programs-h100-jax0.12")["models"]
    shown, gpt2 = table_rows(DOCS / "benchmarks.md"), models["gpt2"]
    titles = {"gpt2": "GPT-2 small", "vit-b": "ViT-B", "resnet50": "ResNet-50", "unet": "U-Net", "mlp": "MLP"}
    for name, title in titles.items():
        assert shown[title] == [f"{device['compiled'] / 2**20:,.0f}" for device in models[name]["devices"]]
    assert f"at most {max(device['compiled'] for device in gpt2['devices']) / 2**20:,.0f} MiB" in text
    assert f"{gpt2['one_program']['compiled'] / 2**20:,.0f} MiB of each" in text
    rows = results("peers-cpu-jax0.12")["rows"]
    shares = {
        tool: sorted(f"{row['of_ideal'] + 1e-9:.2f}" for row in rows if row["tool"] == tool)
        for tool in ("jaxpipe", "torch.distributed.pipelining")
    }
    assert "{} to {} of the ideal rate".format(*shares["jaxpipe"]) in text
    assert "`torch.distributed.pipelining` {} to {}".format(*shares["torch.distributed.pipelining"]) in text


#: Of ``scripts.bench_learning``, by its names.
LEARNING = {
    "adamw": "AdamW",
    "adamw 2bw": "AdamW, 2BW",
    "adamw 2bw corrected": "AdamW, 2BW, error feedback",
    "muon": "Muon",
    "muon 2bw": "Muon, 2BW",
    "muon 2bw corrected": "Muon, 2BW, error feedback",
    "adamw paci": "AdamW, local accumulation (PACI)",
    "muon paci": "Muon, local accumulation (PACI)",
    "adamw blocks": "AdamW without first moment, 10 % of the blocks in 2 bits",
    "adamw blocks, first moment": "AdamW, 10 % of the blocks in 2 bits",
    "adamw blocks, decay": "AdamW without first moment, the same, residuals times 0.95",
    "muon outer": "Muon, outer loop of 16 steps, two replicas",
    "muon outer, 2 bits": "Muon, the same, 22 % of the blocks in 2 bits",
}

#: The same with batches of 16 rows.
LEARNING_OF_16 = {
    "muon": "Muon, 1,024 tokens a step",
    "muon outer": "Muon, 1,024 tokens a step, outer loop of 16 steps",
    "muon outer, half a bit": "Muon, the same, Nesterov, one of eight elements in 4 bits",
}


def learning_rows(file: str, names: dict[str, str]) -> dict[str, list[str]]:
    """Seeds, mean loss, how far it is above that of the synchronous runs with the same seeds, times fewer bytes."""
    variants = losses(results(file))
    rows = {}
    for name, runs in variants.items():
        base = synchronous(variants, name)
        mean = sum(run["test_loss"] for run in runs) / len(runs)
        above = 100 * (mean / (sum(base[run["seed"]] for run in runs) / len(runs)) - 1)
        ratio = runs[0]["dense_bytes"] / runs[0]["sent_bytes"] if "sent_bytes" in runs[0] else 1
        far = "" if name in ("adamw", "muon") else f"{above:+.1f} %"
        rows[names[name]] = [str(len(runs)), f"{mean:.3f}", far, f"{ratio:.0f}" if ratio > 1 else ""]
    return rows


def synchronous(variants: dict[str, list[dict]], name: str) -> dict[int, float]:
    """By seed, the loss of the synchronous runs of a variant's optimizer."""
    return {run["seed"]: run["test_loss"] for run in variants[name.split()[0]]}


def shares_by_seed(name: str, file: str = "learning-cpu-jax0.12") -> str:
    variants = losses(results(file))
    base = synchronous(variants, name)
    return ", ".join(f"{100 * (run['test_loss'] / base[run['seed']] - 1):+.1f}" for run in variants[name]) + " %"


def test_losses_of_late_and_sparse_gradients_are_the_measured_ones():
    shown, rows = table_rows(DOCS / "benchmarks.md"), learning_rows("learning-cpu-jax0.12", LEARNING)
    of_16 = learning_rows("learning-rows16-cpu-jax0.12", LEARNING_OF_16)
    assert of_16 and {name: shown[name] for name in of_16} == of_16
    assert rows and {name: shown[name] for name in rows} == rows
    said = (DOCS / "benchmarks.md").read_text()
    for title, name in {
        "2BW with error feedback": "muon 2bw corrected",
        "local accumulation": "muon paci",
        "a tenth of the blocks": "adamw blocks",
    }.items():
        assert f"{title} {shares_by_seed(name)}" in said
    half = shares_by_seed("muon outer, half a bit", "learning-rows16-cpu-jax0.12")
    assert f"outer loops with one of eight elements {half}" in said
    columns = (" 2bw", " 2bw corrected", " paci", " blocks", " outer")
    for kind, title in {"adamw": "AdamW", "muon": "Muon"}.items():
        cells = [rows[LEARNING[kind]][1], *(rows.get(LEARNING.get(kind + x, ""), [""] * 3)[2] for x in columns)]
        assert table_rows(ROOT / "README.md")[title] == cells
    assert [rows[LEARNING[name]][3] for name in ("adamw blocks", "muon outer")] == ["118", "16"]
    chosen = table_rows(DOCS / "choosing.md")
    cell = {name: rows[title][2] for name, title in LEARNING.items() if title in rows}
    late, sparse, sites = (chosen[x] for x in ("the same, AdamW", "slow links, Adam's kind", "links between sites"))
    assert chosen["bubbles that you cannot fill, Muon"][-1] == cell["muon 2bw corrected"]
    assert chosen["the same without a copy of the parameters for it"][-1] == cell["muon 2bw"]
    assert late[-1] == f"{cell['adamw 2bw corrected']}, {cell['adamw 2bw']} without"
    assert chosen["the same, and weights are large, Muon"][-1] == cell["muon paci"]
    assert sparse[-1] == f"{cell['adamw blocks']}, {cell['adamw blocks, first moment']} with one"
    dense, half_a_bit = (of_16[LEARNING_OF_16[name]][2] for name in ("muon outer", "muon outer, half a bit"))
    assert sites[-1] == f"{dense}, {half_a_bit} in half a bit"
    text, ratio = (DOCS / "sparse-gradients.md").read_text(), rows[LEARNING["adamw blocks"]][3]
    assert f"{ratio} times fewer bytes, at a loss {cell['adamw blocks']} from" in text
    assert f"in place of {cell['adamw blocks, first moment']} with" in text


def test_planning_takes_the_multiples_of_tracing_that_were_measured():
    rows = results("planning-cpu-jax0.12")["rows"]
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    ratios: dict[tuple[int, bool], list[float]] = {}
    for row in rows:
        ratios.setdefault((row["layers"], row["budget_share"] > 0), []).append(row["ratio"])
    (plain,), (within,) = ratios[12, False], ratios[12, True]
    assert f"takes {plain:.1f} times as long as JAX traces loss and gradient of a transformer of 12 layers" in text
    assert f"and {within:.1f} times for 12 layers within 70 % of the bytes" in text
    for layers in (24, 48, 96):
        assert f"{min(ratios[layers, False]):.1f} to {max(ratios[layers, False]):.1f} times for {layers}" in text


@pytest.mark.core
def test_seconds_of_calls_are_those_of_the_timeline():
    call, send = (f"{1e6 * seconds:.0f}" for seconds in (CALL_SECONDS, SEND_SECONDS))
    assert f"each program in about {call} us and each send in {send}" in (DOCS / "slow.md").read_text()
