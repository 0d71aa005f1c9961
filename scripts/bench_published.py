"""Budgets, hand-placed checkpoints and explained measures of published Flax programs, compiled for an H100.

    JAX_PLATFORMS=cuda,cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m scripts.bench_published --sources FOLDER
    ... python -m scripts.bench_published --sources FOLDER --programs lm1b "U-Net" --shares 0.8 0.6 0.45
    JAX_PLATFORMS=cpu python -m scripts.bench_published --sources FOLDER --values

FOLDER has clones of google/flax, jax-ml/bonsai and google-research/big_vision; those of big_vision need einops. The
steps are in ``scripts.published_programs``, in float32. Nothing runs (``jaxpipe.targets.absent``). Of each program:

  budgets   ``jaxpipe.jit`` of the step with a decorated loss; ``memory=`` is a share of the plain step's bytes. After a
            refusal, its ``smallest``
  by hand   ``nn.remat`` or ``nnx.remat`` of every block, or every second one, and ``jax.checkpoint`` of the whole loss,
            each with every policy. What runs no fewer products than any plan is not compiled, nor what saves more than
            a checkpoint that fits no such budget
  measure   the first one that ``jaxpipe.explain`` offers, with the line that it prints written into the program

Bytes are arguments, results and temporaries, what is donated once; products are the matrix products and convolutions
of the traced step. Planning is processor seconds without XLA's, in multiples of one trace of the plain step.
``--values`` compares loss and gradients within budgets with those of the plain step, at tiny sizes, on this machine.

    XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_gpu_autotune_level=0"

shortens compiling and changes no bytes of the plain steps.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import re
import subprocess
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
from flax import nnx

import jaxpipe
from jaxpipe.array_types import Device, PyTree
from jaxpipe.costs.count_products import count_products
from jaxpipe.costs.reserved_bytes import reserved_bytes
from jaxpipe.step import explain, measures
from jaxpipe.targets.absent import absent_devices
from jaxpipe.targets.known import target_named
from scripts.check_target_encoding import on_device
from scripts.measuring import header
from scripts.published_programs import PROGRAMS, Loss, Program, Training
from scripts.published_sources import ABOVE, BELOW, CALL, Edit


SHARES = (0.8, 0.6, 0.45)
WAYS = {"every block": 1, "every second": 2, "whole loss": 0}
POLICIES = {"all": None, "dots-no-batch": "dots_with_no_batch_dims_saveable", "dots": "dots_saveable"}
PARTS = ("budgets", "explain")
MOST_OFF = 0.03
INEXACT = 0.05  # by what share what saves more may need fewer bytes
MIB = 2**20

Row = dict[str, Any]


class CompilerSeconds:
    """Processor seconds that XLA has taken since it was made."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count compilations inside."""
        compile_lowered = jax.stages.Lowered.compile

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return compile_lowered(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        jax.stages.Lowered.compile = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            jax.stages.Lowered.compile = compile_lowered  # type: ignore[method-assign]


class Measured:
    """A program on a device, for which steps are compiled."""

    def __init__(self, program: Program, sources: Path, device: Device):
        self._program, self._sources, self.device = program, sources, device

    def training(self, edits: Sequence[Edit] = ()) -> tuple[Training, PyTree]:
        """Return the step, with lines written into its modules, and its arguments on the device."""
        training = self._program.build(self._program.load(self._sources, edits), False)
        return training, on_device(training.shapes(), self.device)

    def traced(self, edits: Sequence[Edit] = (), wrap: Callable[[Loss], Loss] = lambda loss: loss) -> tuple[Any, int]:
        """Return a traced step and its products."""
        training, args = self.training(edits)
        return trace(training, training.step(wrap), args)

    def plain(self) -> Row:
        """Compile the step as it is; trace it again to know how long that takes."""
        self.traced()
        training, args = self.training()
        start = time.process_time()
        traced, products = trace(training, training.step(), args)
        seconds = time.process_time() - start
        start = time.perf_counter()
        size = reserved_bytes(traced.lower().compile())
        return row_of(size, products) | {"trace_seconds": seconds, "compile_seconds": time.perf_counter() - start}

    def budget(self, memory: int, trace_seconds: float) -> Row:
        """Compile the step within a budget; a row that says so if it is refused."""
        training, args = self.training()
        budgeted = jaxpipe.jit(training.step(jaxpipe.memory_encoded), memory=memory, donate_argnums=training.donated)
        compiler, start = CompilerSeconds(), time.process_time()
        try:
            with compiler.counted():
                lowered = budgeted.lower(*args)
        except jaxpipe.MemoryBudgetError as error:
            row: Row = {"refused": str(error), "smallest": error.smallest}
        else:
            row = asdict(lowered.plan)
            size, products = reserved_bytes(lowered.compile()), count_products(lowered.jaxpr)[0]
            row |= {"kept": size <= memory, "as_stated": (size, products) == (row["needed_bytes"], row["products"])}
        seconds = time.process_time() - start - compiler.seconds
        return {"budget_bytes": memory, **row, "planning": seconds, "planning_traces": seconds / trace_seconds}

    def by_hand(self, may_be_better: Callable[[int, int], bool]) -> Iterator[Row]:
        """Compile checkpoints by hand that may be better, by their products and the bytes of one that saves less."""
        remat = nnx.remat if self.training()[0].is_nnx else jax.checkpoint
        sizes = dict[tuple[str, int], int]()
        for way, every in WAYS.items():
            for number, (name, policy) in enumerate(POLICIES.items()):
                if every and not self._program.blocks:
                    continue
                shown = f"jax.checkpoint_policies.{policy}" if policy else "None"
                saved = getattr(jax.checkpoint_policies, policy) if policy else None
                if every:
                    traced, products = self.traced(self._program.placed(shown, every))
                else:
                    traced, products = self.traced((), partial(remat, policy=saved))
                less = [
                    size for (x, k), size in sizes.items() if k <= number and (x == way or (WAYS[x] == 1 and every))
                ]
                if may_be_better(products, max(less, default=0)):
                    sizes[way, number] = reserved_bytes(traced.lower().compile())
                yield {"variant": f"{way}, {name}", **row_of(sizes.get((way, number)), products)}

    def explained(self) -> Row:
        """Apply the first measure that is offered."""
        training, args = self.training()
        start = time.process_time()
        with without_last_measures():
            explanation = jaxpipe.explain(training.step(), *args, device="H100", donate_argnums=training.donated)
        row = {
            "bytes": explanation.total_bytes,
            "products": explanation.products,
            "seconds": time.process_time() - start,
        }
        row |= {"refused": list(explanation.refused), "measures": [asdict(m) for m in explanation.measures]}
        if not explanation.measures:
            return row
        first = explanation.measures[0]
        above = [m for m in explanation.measures if m.line.startswith("@jaxpipe.memory_encoded")]
        size, products = self._applied(first.line, edits_of(above[0].line) if above else [])
        saved = explanation.total_bytes - size
        off = abs(saved - first.saved_bytes) / first.saved_bytes
        return row | {"applied": {**row_of(size, products), "saved_bytes": saved, "off": off, "line": first.line}}

    def _applied(self, line: str, decorated: list[Edit]) -> tuple[int, int]:
        """Return bytes and products of the step with the line of a measure in it."""
        budget, edits = re.search(r"jaxpipe\.jit\(step, memory=(\d+)\)", line), edits_of(line)
        training, args = self.training(decorated if budget else edits)
        if budget:
            step = jaxpipe.jit(training.step(), memory=int(budget[1]), donate_argnums=training.donated)
            lowered = step.lower(*args)
            return reserved_bytes(lowered.compile()), count_products(lowered.jaxpr)[0]
        if not edits:
            raise ValueError(f"{line!r} is no line that this script can write into a program.")
        traced, products = trace(training, training.step(), args)
        return reserved_bytes(traced.lower().compile()), products


def edits_of(line: str) -> list[Edit]:
    """Return where the line of a measure goes.

    Example:
      >>> edits_of("Block = nn.remat(Block)  # below class Block")
      [Edit(cls='Block', place='below', line='Block = nn.remat(Block)  # below class Block')]
    """
    if line.startswith("@jaxpipe.memory_encoded"):
        return [Edit(cls, ABOVE, "@jaxpipe.memory_encoded") for cls in re.findall(r"class (\w+)", line)]
    if below := re.search(r"# below class (\w+)", line):
        return [Edit(below[1], BELOW, line)]
    call = re.search(r"# above (\w+)\.__call__", line)
    return [Edit(call[1], CALL, line)] if call else []


def trace(training: Training, step: Callable[..., PyTree], args: PyTree) -> tuple[Any, int]:
    """Return a step traced as its own loop would jit it, and its products."""
    jit = nnx.jit if training.is_nnx else jax.jit
    traced: Any = jit(step, donate_argnums=training.donated).trace(*args)
    return traced, count_products(getattr(traced, "traced", traced).jaxpr.jaxpr)[0]


def row_of(size: int | None, products: int) -> Row:
    """Return bytes and products."""
    return {"bytes": size, "products": products}


def measure_budgets(measured: Measured, shares: Sequence[float], save: Callable[[Row], None]) -> Row:
    """Compile a program within budgets and with checkpoints by hand; ``save`` gets what is known so far."""
    row: Row = {"failures": []}
    with attempt(row, "plain"):
        row["plain"] = measured.plain()
    if "plain" not in row:
        return row
    plain, budgets = row["plain"], row.setdefault("budgets", [])
    for share in sorted(shares, reverse=True):
        with attempt(row, f"a budget of {share:.0%}"):
            point = {"share": share, **measured.budget(int(share * plain["bytes"]), plain["trace_seconds"])}
            budgets.append(point)
            if point.get("smallest"):
                same = [
                    x["within_smallest"] for x in budgets if x.get("smallest") == point["smallest"] and x is not point
                ]
                point["within_smallest"] = (same or [measured.budget(point["smallest"], plain["trace_seconds"])])[0]
        save(row)
    variants = row.setdefault("by_hand", [])

    def may_be_better(products: int, least: int) -> bool:
        fewer = [point for point in budgets if products < point.get("products", np.inf)]
        return any(least <= (1 + INEXACT) * point["budget_bytes"] for point in fewer)

    with attempt(row, "checkpoints by hand"):
        for variant in measured.by_hand(may_be_better):
            variants.append(variant)
            save(row)
    row["verdicts"] = verdicts(budgets, variants)
    save(row)
    return row


def measure_explained(measured: Measured, save: Callable[[Row], None]) -> Row:
    """Explain a program and apply the first measure."""
    row: Row = {"failures": []}
    with attempt(row, "explain"):
        row |= measured.explained()
    save(row)
    return row


@contextlib.contextmanager
def without_last_measures() -> Iterator[None]:
    """Leave out the compilations of an explanation that are for no measure, or for one that is never the first."""
    with contextlib.ExitStack() as stack:
        for module, name in (measures, "half_the_batch"), (measures, "shard"), (explain, "largest_batch"):
            stack.enter_context(patch.object(module, name, lambda explained: None))
        yield


@contextlib.contextmanager
def attempt(row: Row, what: str) -> Iterator[None]:
    """Note an error and go on."""
    try:
        yield
    except Exception as error:
        text = "".join(traceback.format_exception(error)[-4:])
        row["failures"].append({"in": what, "error": f"{type(error).__name__}: {error}"[:1000], "traceback": text})


def verdicts(budgets: Sequence[Row], variants: Sequence[Row]) -> Row:
    """Return whether budgets are kept, larger ones never run more, and what runs fewer products within them."""
    plans = sorted((point for point in budgets if "products" in point), key=lambda point: point["budget_bytes"])
    refused = [point for point in budgets if "refused" in point]
    beaten = {
        f"{point['share']:.0%}": [
            v["variant"]
            for v in variants
            if v["bytes"] is not None
            and v["bytes"] <= point["budget_bytes"]
            and v["products"] < point.get("products", np.inf)
        ]
        for point in budgets
    }
    return {
        "kept": all(point["kept"] for point in plans),
        "as_stated": all(point["as_stated"] for point in plans),
        "smallest_kept": all(point.get("within_smallest", {}).get("kept", False) for point in refused),
        "monotone": all(a["products"] >= b["products"] for a, b in itertools.pairwise(plans)),
        "beaten_by": {share: names for share, names in beaten.items() if names},
    }


def compare_values(program: Program, sources: Path, shares: Sequence[float]) -> Iterator[Row]:
    """Compare loss and gradients within budgets with plain ones, at tiny sizes on this machine."""
    training = program.build(program.load(sources), True)
    jit: Any = nnx.jit if training.is_nnx else jax.jit
    plain_step = training.gradients()
    args = on_device(training.shapes(), jax.devices("cpu")[0])
    size = reserved_bytes(jit(plain_step).lower(*args).compile())
    plain = jax.tree.leaves(jit(plain_step)(*training.make()))
    for share in shares:
        memory = f"{int(share * size)}B"
        step = jaxpipe.jit(training.gradients(jaxpipe.memory_encoded), memory=memory)
        try:
            lowered = step.lower(*training.make())
        except jaxpipe.MemoryBudgetError as error:
            assert error.smallest is not None
            step = jaxpipe.jit(training.gradients(jaxpipe.memory_encoded), memory=error.smallest)
            lowered = step.lower(*training.make())
        budgeted = jax.tree.leaves(step(*training.make()))
        pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(plain, budgeted, strict=True)]
        floats = [(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs if np.issubdtype(a.dtype, np.floating)]
        error = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in floats) / sum(np.sum(a**2) for a, b in floats))
        bits = all(a.tobytes() == b.tobytes() for a, b in pairs)
        stored = {
            "share": share,
            "storage": lowered.plan.storage,
            "bytes": lowered.plan.needed_bytes,
            "plain_bytes": size,
        }
        yield stored | {"bits": bits, "relative_error": float(error)}


def budget_lines(name: str, row: Row) -> list[str]:
    """Return the lines of the table for budgets and checkpoints."""
    lines = [f"{name}: {failure['in']}: {failure['error'][:300]}" for failure in row["failures"]]
    if "plain" not in row:
        return lines
    plain = row["plain"]
    lines.append(
        f"{name}: plain {plain['bytes'] / MIB:.0f} MiB, {plain['products']} products, {plain['trace_seconds']:.2f} s"
    )
    for point in row["budgets"]:
        head = f"  {point['share']:.0%} {point['budget_bytes'] / MIB:.0f} MiB: "
        if "refused" in point:
            head += f"refused, smallest {point['smallest'] / MIB:.0f} MiB; "
            point = point["within_smallest"]
        if "products" in point:
            again = point["products"] - plain["products"]
            head += f"{point['needed_bytes'] / MIB:.0f} MiB, {again:+d} products, {point['storage']}, "
            head += f"{point['compilations']} compilations, "
        lines.append(f"{head}planning {point['planning_traces']:.1f} traces")
    for v in row.get("by_hand", []):
        size = (
            "not compiled" if v["bytes"] is None else f"{v['bytes'] / MIB:.0f} MiB = {v['bytes'] / plain['bytes']:.1%}"
        )
        lines.append(f"  {v['variant']}: {size}, {v['products'] - plain['products']:+d} products")
    return [*lines, f"  {row.get('verdicts')}"]


def explained_lines(name: str, row: Row) -> list[str]:
    """Return the lines of the table for what is explained."""
    lines = [f"{name}: {failure['in']}: {failure['error'][:300]}" for failure in row["failures"]]
    if "applied" in row:
        first, applied = row["measures"][0], row["applied"]
        sizes = f"{first['saved_bytes'] / MIB:.1f} MiB, applied {applied['saved_bytes'] / MIB:.1f}"
        verdict = "" if applied["off"] <= MOST_OFF else ": too much"
        lines.append(f"{name}: {first['line']}: {sizes}, {applied['off']:.2%} off{verdict}")
    return lines + [f"  not possible: {text}" for text in row.get("refused", [])]


def commits(sources: Path) -> dict[str, str]:
    """Return the commits of the clones."""
    names = dict.fromkeys(program.clone for program in PROGRAMS.values() if program.clone)
    get = ("rev-parse", "HEAD")
    return {
        x: subprocess.run(["git", "-C", sources / x, *get], capture_output=True, text=True).stdout.strip()
        for x in names
    }


def save(path: Path, sources: Path, name: str, part: str, row: Any) -> None:
    """Write what is known of a program into the JSON file; other programs stay."""
    known = json.loads(path.read_text()) if path.exists() else {}
    rows = known.get("programs", {})
    rows[name] = rows.get(name, {}) | {part: row}
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {**header(), "xla_flags": os.environ.get("XLA_FLAGS", ""), "sources": commits(sources), "programs": rows}
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Compile, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True, help="a folder with the clones")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="budgets, of the plain step's bytes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is compiled (default: both)")
    parser.add_argument("--values", action="store_true", help="compare values at tiny sizes on this machine")
    parser.add_argument("--out", type=Path, default=Path("out/published-steps.json"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*donated.*")
    for name in options.programs:
        keep = partial(save, options.out, options.sources, name)
        with tempfile.TemporaryDirectory() as folder:
            os.environ["JAXPIPE_CACHE_DIR"] = folder  # what an earlier run found would leave out its compilations
            if options.values:
                rows = list(compare_values(PROGRAMS[name], options.sources, options.shares))
                keep("values", rows)
                print(name, *rows, sep="\n  ", flush=True)
            else:
                measured = Measured(PROGRAMS[name], options.sources, absent_devices(target_named("H100"), 1)[0])
                if "budgets" in options.parts:
                    row = measure_budgets(measured, options.shares, partial(keep, "compiled"))
                    print(*budget_lines(name, row), sep="\n", flush=True)
                if "explain" in options.parts:
                    row = measure_explained(measured, partial(keep, "explained"))
                    print(*explained_lines(name, row), sep="\n", flush=True)
        jax.clear_caches()
        gc.collect()


if __name__ == "__main__":
    main()
