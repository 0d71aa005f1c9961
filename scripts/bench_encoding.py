"""Plain ``jax.grad`` against ``jaxpipe.memory_encoded``: stored bytes, temporaries, build times, step time, gradients.

From the root of the repository, with Flax and jaxpipe's other dependencies installed:

    python -m scripts.bench_encoding
    python -m scripts.bench_encoding --models VGG16 UNet --rounds 30 --seconds 60 --out out/some.json
    python -m scripts.plot_encoding

A step is one compiled program, ``jit(value_and_grad(loss, has_aux=True))`` of a cross entropy. Everything it works on,
batch and batch statistics included, is an argument; new batch statistics are returned.

What is measured, model by model, in one process:

  stored       ``jaxpipe.residual_report`` of the loss
  temporaries  ``compiled.memory_analysis().temp_size_in_bytes``
  lower        seconds for ``.lower()``, tracing included: the median over builds of a fresh function, plain and
               encoded in turn, so that JAX's own caches are equally warm for both
  compile      seconds for ``.compile()``, in the same builds
  trace+plan   what jaxpipe adds before XLA starts: the difference of the two lowering times
  step         plain and encoded steps alternate in one loop, and so does which of them goes first
  time ratio   encoded / plain within a round: median and quartiles over rounds
  gradients    L2 norm of the difference over all parameters, relative to the plain gradient's
  peak         ``peak_bytes_in_use`` of the device after one step in a process of its own, where the device tells; it
               includes whatever XLA allocates while it tunes kernels

If the cores are shared, quartiles far apart mean that something else was running. The process keeps the memory that it
frees (see ``scripts.measuring``).
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

import jaxpipe
from examples import models
from scripts.measuring import Quartiles, alternate, header, keep_freed_memory, quartiles


BUILDS = 3  # builds per variant for the lowering and compile times

Wrap = Callable[[Any], Any]
Apply = Callable[[Any, jax.Array, Any, jax.Array], tuple[jax.Array, Any]]  # params, x, state, key: logits, new state
VARIANTS: dict[str, Wrap] = {"plain": lambda target: target, "encoded": jaxpipe.memory_encoded}


@dataclass(frozen=True)
class Problem:
    """A model, for which ``apply(wrap)`` makes a fresh function, and the arguments of its loss."""

    apply: Callable[[Wrap], Apply]
    arguments: tuple[Any, ...]

    def loss(self, wrap: Wrap) -> Callable[..., tuple[jax.Array, Any]]:
        """A fresh loss of the wrapped model."""
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
class Build:
    """A compiled step, and the seconds it took to get there."""

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
    step: Quartiles
    peak: int | None


@dataclass(frozen=True)
class Row:
    """The result for one model."""

    name: str
    plain: Variant
    encoded: Variant
    plain_stored_with_constants: int
    trace_and_plan: float
    time_ratio: Quartiles
    rounds: int
    gradient_difference: float
    bit_identical: bool


def normal(*shape: int) -> jax.Array:
    """A batch of noise."""
    return jax.random.normal(jax.random.key(1), shape)


def problem(apply: Callable[[Wrap], Apply], params: Any, x: jax.Array, state: Any) -> Problem:
    """With random labels in the shape of the model's logits."""
    key = jax.random.key(2)
    logits, _ = jax.eval_shape(apply(VARIANTS["plain"]), params, x, state, key)
    labels = jax.random.randint(jax.random.key(3), logits.shape[:-1], 0, logits.shape[-1])
    return Problem(apply, (params, x, state, labels, key))


def linen(cls: type[nn.Module], x: jax.Array, call: dict[str, Any], **fields: Any) -> Problem:
    """``cls(**fields)(x, **call)``."""
    state = dict(jax.jit(lambda x: cls(**fields).init(jax.random.key(0), x, **call))(x))
    params = state.pop("params")

    def apply(wrap: Wrap) -> Apply:
        model = wrap(cls)(**fields)

        def run(params: Any, x: jax.Array, state: Any, key: jax.Array) -> tuple[jax.Array, Any]:
            variables = {"params": params, **state}
            return model.apply(variables, x, **call, rngs={"dropout": key}, mutable=list(state))

        return run

    return problem(apply, params, x, state)


def nnx_module(cls: type[nnx.Module], x: jax.Array, **fields: Any) -> Problem:
    """``cls(rngs, **fields)(x)``."""
    _, params, state = nnx.split(cls(nnx.Rngs(0), **fields), nnx.Param, ...)

    def apply(wrap: Wrap) -> Apply:
        definition = nnx.graphdef(wrap(cls)(nnx.Rngs(0), **fields))

        def run(params: Any, x: jax.Array, state: Any, _: jax.Array) -> tuple[jax.Array, Any]:
            model = nnx.merge(definition, params, state, copy=True)
            return model(x), nnx.state(model, nnx.Not(nnx.Param))

        return run

    return problem(apply, params, x, state)


def mlp(x: jax.Array, sizes: Sequence[int]) -> Problem:
    """The plain function ``mlp(params, x)``."""

    def apply(wrap: Wrap) -> Apply:
        function = wrap(models.mlp)
        return lambda params, x, state, _: (function(params, x), state)

    return problem(apply, models.init_mlp(jax.random.key(0), sizes), x, {})


def transformer(batch: int, length: int, vocab: int, **fields: Any) -> Problem:
    """A language model on random tokens."""
    tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, vocab)
    return linen(models.Transformer, tokens, {"train": True}, vocab=vocab, max_length=length, **fields)


CASES = (
    Case("VGG16", lambda: linen(models.VGG16, normal(64, 32, 32, 3), {})),
    Case("ResNet18", lambda: linen(models.ResNet18, normal(32, 32, 32, 3), {"train": True})),
    Case("UNet", lambda: linen(models.UNet, normal(8, 64, 64, 3), {}, width=32, depth=3)),
    Case("Inception", lambda: linen(models.Inception, normal(16, 32, 32, 3), {}, width=32)),
    Case("Transformer", lambda: transformer(8, 64, 256, num_layers=4, width=128, num_heads=4)),
    Case("DigitsCNN-Linen", lambda: linen(models.LinenDigitsCNN, normal(128, 8, 8, 1), {"train": True}, width=64)),
    Case("DigitsCNN-NNX", lambda: nnx_module(models.NNXDigitsCNN, normal(128, 8, 8, 1), width=64)),
    Case("MLP", lambda: mlp(normal(256, 1024), [1024] * 5 + [10])),
    Case("ScannedMLP", lambda: linen(models.ScannedMLP, normal(256, 256), {}, num_layers=12, width=256)),
    Case("RematCNN", lambda: linen(models.RematCNN, normal(16, 32, 32, 3), {}, width=32)),
    Case("SoftplusMLP", lambda: linen(models.SoftplusMLP, normal(1024, 512), {}, width=512)),
)


def build(problem: Problem, wrap: Wrap) -> Build:
    """Trace, lower and compile a step."""
    step = jax.jit(jax.value_and_grad(problem.loss(wrap), has_aux=True))
    start = time.perf_counter()
    lowered = step.lower(*problem.arguments)
    middle = time.perf_counter()
    compiled = lowered.compile()
    return Build(middle - start, time.perf_counter() - middle, compiled)


def compare(plain: Any, encoded: Any) -> tuple[float, bool]:
    """Relative L2 norm of the difference between two trees, and whether they agree bit by bit."""
    pairs = list(zip(jax.tree.leaves(jax.device_get(plain)), jax.tree.leaves(jax.device_get(encoded)), strict=True))
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


def peaks(cases: Sequence[Case]) -> dict[str, int]:
    """Peaks by ``model:variant``. To be called before this process takes hold of the device."""
    found: dict[str, int] = {}
    for label in (f"{case.name}:{variant}" for case in cases for variant in VARIANTS):
        command = [sys.executable, "-m", "scripts.bench_encoding", "--peak-of", label]
        peak = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        if peak is None:
            break
        found[label] = peak
    return found


def measure(case: Case, peak: dict[str, int], rounds: int, limit: float) -> Row:
    """Everything about one model; ``peak`` is what ``peaks`` found, ``limit`` the seconds for all rounds."""
    problem = case.make()
    encoded_loss = problem.loss(jaxpipe.memory_encoded)
    report = jaxpipe.residual_report(lambda *args: encoded_loss(*args)[0], *problem.arguments)
    stored = {"plain": report.plain_bytes, "encoded": report.total_bytes}
    made = [{name: build(problem, wrap) for name, wrap in VARIANTS.items()} for _ in range(BUILDS)]
    last = made[-1]
    steps = {name: functools.partial(made.step, *problem.arguments) for name, made in last.items()}
    times = alternate(steps, rounds, limit)
    variants = {
        name: Variant(
            stored=stored[name],
            temporaries=last[name].step.memory_analysis().temp_size_in_bytes,
            lower=statistics.median(builds[name].lower for builds in made),
            compile=statistics.median(builds[name].compile for builds in made),
            step=quartiles(times[name]),
            peak=peak.get(f"{case.name}:{name}"),
        )
        for name in VARIANTS
    }
    difference, identical = compare(*(last[name].step(*problem.arguments)[1] for name in VARIANTS))
    return Row(
        name=case.name,
        **variants,
        plain_stored_with_constants=report.plain_bytes_raw,
        trace_and_plan=variants["encoded"].lower - variants["plain"].lower,
        time_ratio=quartiles([b / a for a, b in zip(*times.values(), strict=True)]),
        rounds=len(times["plain"]),
        gradient_difference=difference,
        bit_identical=identical,
    )


def table(rows: Sequence[Row], mean: float) -> Table:
    """The results to read."""
    result = Table(title="memory_encoded / plain jax.grad", title_justify="left")
    result.caption = f"Geometric mean of the time ratios: {mean:.4f}. In brackets: quartiles."
    result.add_column("model")
    for column in ("stored MiB", "temp. MiB", "peak", "compile s", "trace+plan s", "step ms", "time", "gradients"):
        result.add_column(column, justify="right")
    for row in rows:
        a, b, (low, median, high) = row.plain, row.encoded, row.time_ratio
        result.add_row(
            row.name,
            f"{b.stored / 2**20:.2f} / {a.stored / 2**20:.2f} = {b.stored / a.stored:.3f}",
            f"{b.temporaries / 2**20:.1f} / {a.temporaries / 2**20:.1f} = {b.temporaries / a.temporaries:.3f}",
            f"{b.peak / a.peak:.3f}" if a.peak and b.peak else "",
            f"{b.compile:.2f} / {a.compile:.2f} = {b.compile / a.compile:.2f}",
            f"{row.trace_and_plan:.2f}",
            f"{1e3 * b.step[1]:.1f} / {1e3 * a.step[1]:.1f}",
            f"{median:.3f} ({low:.3f}-{high:.3f})",
            "identical" if row.bit_identical else f"{row.gradient_difference:.1e}",
        )
    return result


def main() -> None:
    """Measure, write the JSON file and print the table."""
    by_name = {case.name: case for case in CASES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=by_name, default=list(by_name), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=300, help="most rounds per model (default 300)")
    parser.add_argument("--seconds", type=float, default=30, help="most seconds of rounds per model (default 30)")
    parser.add_argument("--out", type=Path, default=Path("out/bench_encoding.json"))
    parser.add_argument("--peak-of", metavar="NAME:VARIANT", help="print the peak memory of one program, nothing else")
    options = parser.parse_args()
    if options.peak_of:
        name, variant = options.peak_of.split(":")
        print(json.dumps(peak_of(by_name[name], VARIANTS[variant])))
        return
    keep_freed_memory()
    cases = [by_name[name] for name in options.models]
    peak = peaks(cases)
    rows = []
    for case in cases:
        rows.append(measure(case, peak, options.rounds, options.seconds))
        print(f"{case.name}: time ratio {rows[-1].time_ratio[1]:.3f}", file=sys.stderr, flush=True)
    mean = statistics.geometric_mean(row.time_ratio[1] for row in rows)
    result = {**header(), "geometric_mean_time_ratio": mean, "rows": [asdict(row) for row in rows]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=180).print(table(rows, mean))


if __name__ == "__main__":
    main()
