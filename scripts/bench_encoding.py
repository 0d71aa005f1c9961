"""Plain ``jax.grad`` against ``jaxpipe.memory_encoded``: stored bytes, temporaries, build times, step time, gradients.

From the root of the repository, with Flax installed:

    python -m scripts.bench_encoding
    python -m scripts.bench_encoding --models VGG16 UNet --rounds 30 --seconds 60 --out out/some.json
    python -m scripts.plot_encoding --json out/bench_encoding.json --out docs/results/encoding.png

A step is one compiled program, ``jit(value_and_grad(loss, has_aux=True))`` of a cross entropy. Everything it works on,
batch and batch statistics included, is an argument; new batch statistics are returned.

How it measures, model by model, in one process:

  stored       ``jaxpipe.residual_report`` of the loss as a function of parameters, batch and dropout key
  temporaries  ``compiled.memory_analysis().temp_size_in_bytes``
  lower        seconds for ``.lower()``, tracing included: the median of some builds of a fresh function, plain and
               encoded in turn, so that JAX's own caches are equally warm for both
  compile      seconds for ``.compile()``, in the same builds
  trace+plan   what jaxpipe adds before XLA starts: the difference of the two lowering times
  step         plain and encoded steps alternate in one loop, and so does which of them goes first
  time ratio   encoded / plain within a round: median and quartiles over rounds
  gradients    L2 norm of the difference over all parameters, relative to the plain gradient's
  peak         ``peak_bytes_in_use`` of the device after one step in a process of its own, where the device tells; it
               includes whatever XLA allocates while it tunes kernels

If the cores are shared, quartiles far apart mean that something else was running.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

import jaxpipe
from examples import models


BUILDS = 3  # builds per variant for the lowering and compile times
WARM_UP = 2  # rounds that are not counted
LEAST_ROUNDS = 3  # counted even when the time budget is spent
LEAST_SECONDS = 5.0  # quick models get more rounds than asked for, until this long

Wrap = Callable[[Any], Any]
Apply = Callable[[Any, jax.Array, Any, jax.Array], tuple[jax.Array, Any]]
VARIANTS: dict[str, Wrap] = {"plain": lambda target: target, "encoded": jaxpipe.memory_encoded}


@dataclass(frozen=True)
class Problem:
    """A model and a batch. ``apply(wrap)`` is a fresh function ``(params, x, state, key) -> (logits, new state)``."""

    apply: Callable[[Wrap], Apply]
    params: Any
    x: jax.Array
    state: Any
    labels: jax.Array
    key: jax.Array

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.params, self.x, self.state, self.labels, self.key

    def loss(self, wrap: Wrap) -> Callable[..., tuple[jax.Array, Any]]:
        apply = self.apply(wrap)

        def loss(params: Any, x: jax.Array, state: Any, labels: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
            logits, new_state = apply(params, x, state, key)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
            return -chosen.mean(), new_state

        return loss


@dataclass(frozen=True)
class Case:
    """A model at the size at which it is measured."""

    name: str
    make: Callable[[], Problem]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Build:
    """A compiled step and the seconds it took to get there."""

    lower: float
    compile: float
    step: jax.stages.Compiled


@dataclass(frozen=True)
class Variant:
    """What is measured of one of the two programs: bytes and seconds."""

    stored: int
    temporaries: int
    lower: float
    compile: float
    step: Spread
    peak: int | None


@dataclass(frozen=True)
class Row:
    """The result for one model. The plain program may also store constants."""

    name: str
    plain: Variant
    encoded: Variant
    stored_with_constants: int
    trace_and_plan: float
    time_ratio: Spread
    rounds: int
    gradient_difference: float
    bit_identical: bool


def images(batch: int, side: int = 32, channels: int = 3) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (batch, side, side, channels))


def vectors(batch: int, features: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (batch, features))


def tokens(batch: int, length: int, vocab: int) -> jax.Array:
    return jax.random.randint(jax.random.key(1), (batch, length), 0, vocab)


def labelled(apply: Callable[[Wrap], Apply], params: Any, x: jax.Array, state: Any) -> Problem:
    """A problem with random labels in the shape of the model's logits."""
    key = jax.random.key(3)
    logits, _ = jax.eval_shape(apply(VARIANTS["plain"]), params, x, state, key)
    labels = jax.random.randint(jax.random.key(2), logits.shape[:-1], 0, logits.shape[-1])
    return Problem(apply, params, x, state, labels, key)


def linen(cls: type[nn.Module], x: jax.Array, call: dict[str, Any], **fields: Any) -> Problem:
    state = dict(jax.jit(lambda x: cls(**fields).init(jax.random.key(0), x, **call))(x))
    params = state.pop("params")

    def apply(wrap: Wrap) -> Apply:
        model = wrap(cls)(**fields)

        def run(params: Any, x: jax.Array, state: Any, key: jax.Array) -> tuple[jax.Array, Any]:
            variables = {"params": params, **state}
            return model.apply(variables, x, **call, rngs={"dropout": key}, mutable=list(state))

        return run

    return labelled(apply, params, x, state)


def nnx_digits(x: jax.Array, **fields: Any) -> Problem:
    _, params, state = nnx.split(models.NNXDigitsCNN(nnx.Rngs(0), **fields), nnx.Param, ...)

    def apply(wrap: Wrap) -> Apply:
        definition = nnx.graphdef(wrap(models.NNXDigitsCNN)(nnx.Rngs(0), **fields))

        def run(params: Any, x: jax.Array, state: Any, key: jax.Array) -> tuple[jax.Array, Any]:
            model = nnx.merge(definition, params, state)
            logits = model(x)
            return logits, nnx.state(model, nnx.Not(nnx.Param))

        return run

    return labelled(apply, params, x, state)


def mlp(x: jax.Array, sizes: Sequence[int]) -> Problem:
    def apply(wrap: Wrap) -> Apply:
        function = wrap(models.mlp)
        return lambda params, x, state, key: (function(params, x), state)

    return labelled(apply, models.init_mlp(jax.random.key(0), sizes), x, {})


TRAIN = {"train": True}
LANGUAGE = {"vocab": 256, "num_layers": 4, "width": 128, "num_heads": 4, "max_length": 64}
CASES = (
    Case("VGG16", lambda: linen(models.VGG16, images(64), {})),
    Case("ResNet18", lambda: linen(models.ResNet18, images(32), TRAIN)),
    Case("UNet", lambda: linen(models.UNet, images(8, 64), {}, width=32, depth=3)),
    Case("Inception", lambda: linen(models.Inception, images(16), {}, width=32)),
    Case("Transformer", lambda: linen(models.Transformer, tokens(8, 64, 256), TRAIN, **LANGUAGE)),
    Case("DigitsCNN (Linen)", lambda: linen(models.LinenDigitsCNN, images(128, 8, 1), TRAIN)),
    Case("DigitsCNN (NNX)", lambda: nnx_digits(images(128, 8, 1))),
    Case("MLP", lambda: mlp(vectors(256, 1024), [1024] * 5 + [10])),
    Case("ScannedMLP", lambda: linen(models.ScannedMLP, vectors(64, 256), {}, num_layers=12, width=256)),
    Case("RematCNN", lambda: linen(models.RematCNN, images(16), {}, width=32)),
    Case("SoftplusMLP", lambda: linen(models.SoftplusMLP, vectors(1024, 512), {}, width=512)),
)


def build(problem: Problem, wrap: Wrap) -> Build:
    step = jax.jit(jax.value_and_grad(problem.loss(wrap), has_aux=True))
    start = time.perf_counter()
    lowered = step.lower(*problem.arguments)
    middle = time.perf_counter()
    compiled = lowered.compile()
    return Build(middle - start, time.perf_counter() - middle, compiled)


def run_rounds(
    steps: dict[str, jax.stages.Compiled], arguments: Sequence[Any], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Seconds of each step in each counted round."""
    order = list(steps)
    times: dict[str, list[float]] = {name: [] for name in steps}
    start = time.perf_counter()
    for k in range(sys.maxsize):
        counted, elapsed = k - WARM_UP, time.perf_counter() - start
        if counted >= LEAST_ROUNDS and (elapsed > seconds or (counted >= rounds and elapsed > LEAST_SECONDS)):
            break
        for name in order if k % 2 else order[::-1]:
            begin = time.perf_counter()
            jax.block_until_ready(steps[name](*arguments))
            times[name].append(time.perf_counter() - begin)
    return {name: values[WARM_UP:] for name, values in times.items()}


def spread(values: Sequence[float]) -> Spread:
    return Spread(*(float(q) for q in np.quantile(values, (0.25, 0.5, 0.75))))


def compare(plain: Any, encoded: Any) -> tuple[float, bool]:
    """Relative L2 norm of the difference between two trees, and whether they agree bit by bit."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(encoded), strict=True)]
    difference = sum(np.sum(np.square(a.astype(np.float64) - b)) for a, b in pairs)
    scale = sum(np.sum(np.square(a.astype(np.float64))) for a, _ in pairs)
    return float(np.sqrt(difference / scale)), all(a.tobytes() == b.tobytes() for a, b in pairs)


def peak_of(case: Case, wrap: Wrap) -> int | None:
    """Peak device memory of this process after one step; None where the device does not tell."""
    device = jax.devices()[0]
    if not device.memory_stats():
        return None
    problem = case.make()
    jax.block_until_ready(build(problem, wrap).step(*problem.arguments))
    return device.memory_stats().get("peak_bytes_in_use")


def peaks(cases: Sequence[Case]) -> dict[str, int | None]:
    """Peaks by ``model:variant``. To be called before this process takes hold of the device."""
    found: dict[str, int | None] = {}
    for label in (f"{case.name}:{variant}" for case in cases for variant in VARIANTS):
        command = [sys.executable, "-m", "scripts.bench_encoding", "--peak-of", label]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found[label] = json.loads(output)
        if found[label] is None:
            return {}
    return found


def measure(case: Case, peak: dict[str, int | None], rounds: int, seconds: float) -> Row:
    problem = case.make()
    *batch, labels, key = problem.arguments
    params, x, state = batch
    report = jaxpipe.residual_report(
        lambda params, x, key: problem.loss(jaxpipe.memory_encoded)(params, x, state, labels, key)[0], params, x, key
    )
    stored = {"plain": report.plain_bytes, "encoded": report.total_bytes}
    builds: dict[str, list[Build]] = {name: [] for name in VARIANTS}
    for _ in range(BUILDS):
        for name, wrap in VARIANTS.items():
            builds[name].append(build(problem, wrap))
    steps = {name: made[-1].step for name, made in builds.items()}
    times = run_rounds(steps, problem.arguments, rounds, seconds)
    variants = {
        name: Variant(
            stored=stored[name],
            temporaries=steps[name].memory_analysis().temp_size_in_bytes,
            lower=statistics.median(b.lower for b in builds[name]),
            compile=statistics.median(b.compile for b in builds[name]),
            step=spread(times[name]),
            peak=peak.get(f"{case.name}:{name}"),
        )
        for name in VARIANTS
    }
    gradients = {name: step(*problem.arguments)[1] for name, step in steps.items()}
    difference, identical = compare(**gradients)
    return Row(
        name=case.name,
        **variants,
        stored_with_constants=report.plain_bytes_raw,
        trace_and_plan=variants["encoded"].lower - variants["plain"].lower,
        time_ratio=spread([b / a for a, b in zip(times["plain"], times["encoded"], strict=True)]),
        rounds=len(times["plain"]),
        gradient_difference=difference,
        bit_identical=identical,
    )


def table(rows: Sequence[Row], mean: float) -> Table:
    result = Table(title="memory_encoded against plain jax.grad", title_justify="left")
    result.add_column("model")
    for column in ("stored MiB", "ratio", "temp. MiB", "ratio", "compile s", "ratio", "trace+plan s", "step ms",
                   "time ratio (quartiles)", "rounds", "gradients"):  # fmt: skip
        result.add_column(column, justify="right")
    for row in rows:
        a, b, q = row.plain, row.encoded, row.time_ratio
        cells = []
        for old, new, scale, digits in (
            (a.stored, b.stored, 2**20, 2), (a.temporaries, b.temporaries, 2**20, 1), (a.compile, b.compile, 1, 2),
        ):  # fmt: skip
            cells += [f"{old / scale:.{digits}f} > {new / scale:.{digits}f}", f"{new / old:.3f}"]
        cells += [
            f"{row.trace_and_plan:.2f}",
            f"{1e3 * a.step.median:.1f} > {1e3 * b.step.median:.1f}",
            f"{q.median:.3f} ({q.low:.3f}-{q.high:.3f})",
            str(row.rounds),
            "identical" if row.bit_identical else f"{row.gradient_difference:.1e}",
        ]
        if a.peak and b.peak:
            cells[3] += f", peak {b.peak / a.peak:.3f}"
        result.add_row(row.name, *cells)
    result.caption = f"Geometric mean of the time ratios: {mean:.4f}"
    return result


def header() -> dict[str, Any]:
    versions = {"python": platform.python_version(), "jax": jax.__version__, "jaxlib": jaxlib.__version__}
    versions |= {"flax": flax.__version__, "jaxpipe": jaxpipe.__version__}
    machine = {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count()}
    machine |= {"device": jax.devices()[0].device_kind, "backend": jax.default_backend()}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"versions": versions, "machine": machine, "date": date, "command": sys.orig_argv}


def main() -> None:
    by_name = {case.name: case for case in CASES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=by_name, default=list(by_name), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=15, help="rounds per model (default 15)")
    parser.add_argument("--seconds", type=float, default=120, help="most seconds of rounds per model (default 120)")
    parser.add_argument("--out", type=Path, default=Path("out/bench_encoding.json"))
    parser.add_argument("--peak-of", metavar="MODEL:VARIANT", help="print the peak memory of one program, and nothing else")
    options = parser.parse_args()
    if options.peak_of:
        name, variant = options.peak_of.rsplit(":", 1)
        print(json.dumps(peak_of(by_name[name], VARIANTS[variant])))
        return
    cases = [by_name[name] for name in options.models]
    peak = peaks(cases)
    rows = []
    for case in cases:
        rows.append(measure(case, peak, options.rounds, options.seconds))
        print(f"{case.name}: time ratio {rows[-1].time_ratio.median:.3f}", file=sys.stderr, flush=True)
    mean = statistics.geometric_mean(row.time_ratio.median for row in rows)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {**header(), "geometric_mean_time_ratio": mean, "rows": [asdict(row) for row in rows]}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=200).print(table(rows, mean))


if __name__ == "__main__":
    main()
