"""Ways to store less for the backward pass against plain ``jax.grad``: bytes, build times, step time, gradients.

From the root of the repository, with Flax and jaxpipe's other dependencies installed:

    python -m scripts.bench_encoding
    python -m scripts.bench_encoding --models VGG16 ViT-B --variants fast smallest --seconds 60 --out out/some.json
    python -m scripts.plot_encoding

Variants, all compared with ``plain``:

  encoded       ``memory_encoded(codecs={"mask", "index", "alias"})``: nothing is computed again
  fast          ``memory_encoded``, whose default that is
  smallest      ``memory_encoded(codecs="smallest")`` under ``with_density`` of what ``measure_density`` found
  nothing, dots, dots-no-batch
                ``jax.checkpoint`` of the whole model with the policies ``nothing_saveable``, ``dots_saveable`` and
                ``dots_with_no_batch_dims_saveable``
  blocks        each block of the model under ``nn.remat``, where the model offers it
  blocks-dots, blocks-dots-no-batch
                the same with the policies ``dots_saveable`` and ``dots_with_no_batch_dims_saveable``
  blocks-second, blocks-second-dots, blocks-second-dots-no-batch
                the same for every second block
  fast-step     ``memory_encoded`` of the whole loss; ``dots-step``, ``dots-no-batch-step``: ``jax.checkpoint`` of it
  barrier       plain, with an ``optimization_barrier`` between the passes: how far gradients of one and the same
                program differ as soon as XLA does not fuse the backward pass with the forward pass

A step is one compiled program, ``jit(value_and_grad(loss, has_aux=True))`` of a cross entropy. Everything it works on,
batch and batch statistics included, is an argument; new batch statistics are returned.

What is measured, model by model, in one process:

  stored       ``jaxpipe.residual_report`` of the loss; of variants without jaxpipe, what it says that ``jax.vjp`` saves
  temporaries  ``compiled.memory_analysis().temp_size_in_bytes``
  lower        seconds for ``.lower()``, tracing and planning included: the least over builds of a fresh function, the
               variants in turn, so that JAX's own caches are equally warm for all
  compile      seconds for ``.compile()``, in the same builds
  step         the variants' steps alternate in one loop, forwards and backwards
  time ratio   variant / plain within a round: median and quartiles over rounds
  gradients    L2 norm of the difference over all parameters, relative to the plain gradient's; and the largest
               difference of an entry, in units in the last place of its array's largest entry (of arrays that are not
               rounding errors only, as the gradient of an attention's key bias is)
  peak         ``peak_bytes_in_use`` of the device after one step in a process of its own, where the device tells; it
               includes whatever XLA allocates while it tunes kernels

A checkpoint of the whole model computes again, before the backward pass begins, whatever its policy did not save: less
is stored between the passes, but the temporaries, which are the peak within the step, need not be smaller.

If the cores are shared, quartiles far apart mean that something else was running. The process keeps the memory that it
frees (see ``scripts.measuring``).
"""

import argparse
import contextlib
import functools
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr
from rich.console import Console
from rich.table import Table

import jaxpipe
from jaxpipe.array_types import PyTree
from jaxpipe.costs.count_products import count_products
from jaxpipe.costs.reserved_bytes import reserved_bytes
from scripts.encoding_cases import CASES, SMALL_CASES, Apply, Case, Problem, Wrap
from scripts.measuring import Quartiles, alternate, header, keep_freed_memory, quartiles


#: Arrays of gradients whose entries are this small, relative to the largest entry of all, are rounding errors.
ROUNDING = 1e-7


def identity(target: Callable) -> Callable:
    """Nothing is wrapped."""
    return target


def checkpoint(policy: Callable[..., bool]) -> Wrap:
    """``jax.checkpoint`` with a policy."""
    return functools.partial(jax.checkpoint, policy=policy)


def blocks(policy: Callable[..., bool] | None, every: int = 1) -> Wrap:
    """The blocks of a model under ``nn.remat``, with a policy; or every so manieth."""
    return lambda cls: functools.partial(cls, remat=True, remat_policy=policy, remat_every=every)


def with_barrier(apply: Apply) -> Apply:
    """Return the function with a barrier between what its forward pass saves and its backward pass."""

    apart = jax.custom_vjp(apply)

    def forward(*arguments: PyTree) -> tuple[tuple[jax.Array, PyTree], Callable[..., tuple[PyTree, ...]]]:
        logits, pullback, state = jax.vjp(apply, *arguments, has_aux=True)
        return (logits, state), jax.lax.optimization_barrier(pullback)

    def backward(
        pullback: Callable[..., tuple[PyTree, ...]], cotangents: tuple[jax.Array, PyTree]
    ) -> tuple[PyTree, ...]:
        return pullback(cotangents[0])

    apart.defvjp(forward, backward)
    return apart


@dataclass(frozen=True)
class Variant:
    """A way to wrap a model, its ``apply`` and its loss; and whether densities are measured before it is traced."""

    wrap: Wrap = identity
    wrap_apply: Wrap = identity
    wrap_loss: Wrap = identity
    measured: bool = False

    def loss(self, problem: Problem) -> Callable[..., tuple[jax.Array, PyTree]]:
        """A fresh loss."""
        return problem.loss(self.wrap, self.wrap_apply, self.wrap_loss)

    def tracing(self, density: jaxpipe.Density | None) -> contextlib.AbstractContextManager[None]:
        """Return a context in which it is traced."""
        return jaxpipe.with_density(density) if self.measured and density else contextlib.nullcontext()


PLAIN = Variant()
SMALLEST = Variant(jaxpipe.memory_encoded(codecs="smallest"), measured=True)
DOTS = jax.checkpoint_policies.dots_saveable
DOTS_NO_BATCH = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
VARIANTS = {
    "encoded": Variant(jaxpipe.memory_encoded(codecs=("mask", "index", "alias"))),
    "fast": Variant(jaxpipe.memory_encoded),
    "fast-step": Variant(wrap_loss=jaxpipe.memory_encoded),
    "smallest": SMALLEST,
    "nothing": Variant(wrap_apply=checkpoint(jax.checkpoint_policies.nothing_saveable)),
    "dots": Variant(wrap_apply=checkpoint(DOTS)),
    "dots-no-batch": Variant(wrap_apply=checkpoint(DOTS_NO_BATCH)),
    "dots-step": Variant(wrap_loss=checkpoint(DOTS)),
    "dots-no-batch-step": Variant(wrap_loss=checkpoint(DOTS_NO_BATCH)),
    "blocks": Variant(blocks(None)),
    "blocks-dots": Variant(blocks(DOTS)),
    "blocks-dots-no-batch": Variant(blocks(DOTS_NO_BATCH)),
    "blocks-second": Variant(blocks(None, 2)),
    "blocks-second-dots": Variant(blocks(DOTS, 2)),
    "blocks-second-dots-no-batch": Variant(blocks(DOTS_NO_BATCH, 2)),
    "barrier": Variant(wrap_apply=with_barrier),
}
#: Those that only some models have.
BLOCKS = tuple(name for name in VARIANTS if name.startswith("blocks"))
DEFAULT = ["fast", "smallest", "nothing", "dots", "dots-no-batch"]


@dataclass(frozen=True)
class Build:
    """A compiled step, the seconds it took to get there, how many products it runs, and their operations."""

    lower: float
    compile: float
    step: jax.stages.Compiled
    products: int
    flops: float


@dataclass(frozen=True)
class Measured:
    """The figures of one program: bytes, seconds, and the distance of its gradients from those of ``plain``."""

    stored: int
    temporaries: int
    lower: float
    compile: float
    step: Quartiles
    time_ratio: Quartiles
    gradient_difference: float
    gradient_difference_ulps: float
    bit_identical: bool
    peak: int | None
    largest_batch: int | None


@dataclass(frozen=True)
class Row:
    """The result for one model, ``plain`` among the variants."""

    name: str
    batch: int
    input: str
    parameters: int
    plain_stored_with_constants: int
    density_seconds: float | None
    rounds: int
    variants: dict[str, Measured]


@dataclass(frozen=True)
class Options:
    """The seconds to measure for, and the bytes that limit the largest batch."""

    rounds: int
    seconds: float
    builds: int
    cap: int | None


def summary(made: Build) -> dict[str, Any]:
    """Return what is known of a step before it is run: its bytes with arguments and results, products, operations."""
    return {**compiled_bytes(made.step), "products": made.products, "flops": made.flops}


def step_summary(step: jax.stages.Compiled, jaxpr: Jaxpr) -> dict[str, Any]:
    """Return the same of a compiled step and its traced program."""
    return {**compiled_bytes(step), **dict(zip(("products", "flops"), count_products(jaxpr), strict=True))}


def compiled_bytes(step: jax.stages.Compiled) -> dict[str, int]:
    """Return the bytes of a compiled step, with arguments and results, and of its temporaries."""
    memory = step.memory_analysis()
    return {"bytes": reserved_bytes(step), "temporaries": memory.temp_size_in_bytes}


def build(problem: Problem, variant: Variant, density: jaxpipe.Density | None) -> Build:
    """Trace, lower and compile a step."""
    step = jax.jit(jax.value_and_grad(variant.loss(problem), has_aux=True))
    start = time.perf_counter()
    with variant.tracing(density):
        traced = step.trace(*problem.arguments)
        lowered = traced.lower()
    middle = time.perf_counter()
    compiled = lowered.compile()
    return Build(middle - start, time.perf_counter() - middle, compiled, *count_products(traced.jaxpr))


def build_all(
    problem: Problem, chosen: Mapping[str, Variant], density: jaxpipe.Density | None, builds: int
) -> dict[str, Build]:
    """The last build of each variant, with the least times of all: whatever else runs only adds to them."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    last: dict[str, Build] = {}
    for _ in range(builds):
        for name, variant in chosen.items():
            last[name] = build(problem, variant, density)
            times[name].append((last[name].lower, last[name].compile))
    lower = {name: min(seconds for seconds, _ in pairs) for name, pairs in times.items()}
    compiling = {name: min(seconds for _, seconds in pairs) for name, pairs in times.items()}
    return {name: replace(built, lower=lower[name], compile=compiling[name]) for name, built in last.items()}


def report_of(problem: Problem, variant: Variant, density: jaxpipe.Density | None) -> tuple[int, int]:
    """Bytes stored by a variant, and by plain ``jax.vjp`` of it with constants."""
    loss = variant.loss(problem)
    with variant.tracing(density):
        report = jaxpipe.residual_report(lambda *args: loss(*args)[0], *problem.arguments)
    undecorated = variant.wrap is identity and variant.wrap_loss is not jaxpipe.memory_encoded
    return report.plain_bytes if undecorated else report.total_bytes, report.plain_bytes_raw


def compare(plain: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> tuple[float, float, bool]:
    """Relative L2 norm of the difference, its largest entry in ulps of an array's largest, whether all bits agree."""
    squares = scale = ulps = 0.0
    floor = ROUNDING * max(np.max(np.abs(a), initial=0) for a in plain)
    for a, b in zip(plain, other, strict=True):
        difference = a.astype(np.float64) - b
        squares += float(np.vdot(difference, difference))
        scale += float(np.square(a, dtype=np.float64).sum())
        size = np.max(np.abs(a), initial=0)
        if size > floor:
            ulps = max(ulps, float(np.max(np.abs(difference)) / np.spacing(size)))
    return (squares / scale) ** 0.5, ulps, all(a.tobytes() == b.tobytes() for a, b in zip(plain, other, strict=True))


def peak_of(case: Case, variant: Variant) -> int | None:
    """Peak device memory of this process after one step; None where the device does not tell.

    Densities are left to be assumed, as measuring them takes memory of its own.
    """
    device = jax.devices()[0]
    if not device.memory_stats():
        return None
    problem = case.make(case.batch)
    jax.block_until_ready(build(problem, variant, None).step(*problem.arguments))
    return device.memory_stats().get("peak_bytes_in_use")


def peaks(cases: Sequence[Case], variants: Sequence[str]) -> dict[str, int]:
    """Peaks by ``model:variant``. To be called before this process takes hold of the device."""
    peaks_by_label: dict[str, int] = {}
    for label in (f"{case.name}:{variant}" for case in cases for variant in variants):
        command = [sys.executable, "-m", "scripts.bench_encoding", "--peak-of", label]
        peak = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        if peak is None:
            break
        peaks_by_label[label] = peak
    return peaks_by_label


def needed(case: Case, batch: int, variant: Variant, density: jaxpipe.Density | None) -> float:
    """Bytes of a compiled step with its arguments and results; infinite if it does not fit the device."""
    try:
        return summary(build(case.make(batch), variant, density))["bytes"]
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return float("inf")


def largest_batch(case: Case, variant: Variant, density: jaxpipe.Density | None, cap: int) -> int:
    """The largest batch whose step needs at most ``cap`` bytes, to one part in sixteen; 0 if no batch fits."""
    fits, fails = 0, case.batch
    while needed(case, fails, variant, density) <= cap:
        fits, fails = fails, 2 * fails
    while fails - fits > max(1, fits // 16):
        middle = (fits + fails) // 2
        if needed(case, middle, variant, density) <= cap:
            fits = middle
        else:
            fails = middle
    return fits


def measure(case: Case, chosen: Mapping[str, Variant], peak: Mapping[str, int], options: Options) -> Row:
    """Everything about one model; ``chosen`` begins with ``plain``, ``peak`` is what ``peaks`` found."""
    problem = case.make(case.batch)
    density, density_seconds = None, None
    if any(variant.measured for variant in chosen.values()):
        start = time.perf_counter()
        density = jaxpipe.measure_density(SMALLEST.loss(problem), *problem.arguments)
        density_seconds = time.perf_counter() - start
    reports = {name: report_of(problem, variant, density) for name, variant in chosen.items()}
    built = build_all(problem, chosen, density, options.builds)
    steps = {name: functools.partial(each.step, *problem.arguments) for name, each in built.items()}
    times = alternate(steps, options.rounds, options.seconds)
    gradients = jax.tree.leaves(jax.device_get(steps["plain"]()[1]))
    measured = {}
    for name, each in built.items():
        difference, ulps, same = compare(gradients, jax.tree.leaves(jax.device_get(steps[name]()[1])))
        measured[name] = Measured(
            stored=reports[name][0],
            temporaries=each.step.memory_analysis().temp_size_in_bytes,
            lower=each.lower,
            compile=each.compile,
            step=quartiles(times[name]),
            time_ratio=quartiles([b / a for a, b in zip(times["plain"], times[name], strict=True)]),
            gradient_difference=difference,
            gradient_difference_ulps=ulps,
            bit_identical=same,
            peak=peak.get(f"{case.name}:{name}"),
            largest_batch=largest_batch(case, chosen[name], density, options.cap) if options.cap else None,
        )
    return Row(
        name=case.name,
        batch=case.batch,
        input=str(jax.typeof(problem.arguments[1])),
        parameters=sum(leaf.size for leaf in jax.tree.leaves(problem.arguments[0])),
        plain_stored_with_constants=reports["plain"][1],
        density_seconds=density_seconds,
        rounds=len(times["plain"]),
        variants=measured,
    )


def geometric_means(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Means over the models of what each variant stores, its temporaries and its time, relative to plain."""

    def mean(name: str, ratio: Callable[[Measured, Measured], float]) -> float:
        return statistics.geometric_mean(ratio(row.variants[name], row.variants["plain"]) for row in rows)

    return {
        name: {
            "stored": mean(name, lambda a, b: a.stored / b.stored),
            "temporaries": mean(name, lambda a, b: a.temporaries / b.temporaries),
            "time": mean(name, lambda a, _: a.time_ratio[1]),
        }
        for name in rows[0].variants
    }


def table(rows: Sequence[Row], means: Mapping[str, Mapping[str, float]]) -> Table:
    """The results to read."""
    result = Table(title="Relative to plain jax.grad", title_justify="left", caption="In brackets: quartiles.")
    searched = any(figures.largest_batch is not None for row in rows for figures in row.variants.values())
    for column in ("model", "variant"):
        result.add_column(column)
    columns = ["stored MiB", "temp. MiB", "peak", "lower s", "compile s", "step ms", "time", "gradients: L2, ulps"]
    for column in columns + ["batch"] * searched:
        result.add_column(column, justify="right")
    for row in rows:
        plain = row.variants["plain"]
        for name, figures in row.variants.items():
            low, median, high = figures.time_ratio
            result.add_row(
                row.name if name == "plain" else "",
                name,
                f"{figures.stored / 2**20:.1f} = {figures.stored / plain.stored:.3f}",
                f"{figures.temporaries / 2**20:.1f} = {figures.temporaries / plain.temporaries:.3f}",
                f"{figures.peak / plain.peak:.3f}" if figures.peak and plain.peak else "",
                f"{figures.lower:.2f}",
                f"{figures.compile:.2f}",
                f"{1e3 * figures.step[1]:.1f}",
                "" if name == "plain" else f"{median:.3f} ({low:.3f}-{high:.3f})",
                "identical"
                if figures.bit_identical
                else f"{figures.gradient_difference:.1e}, {figures.gradient_difference_ulps:.1f}",
                *[str(figures.largest_batch)] * searched,
            )
        result.add_section()
    for name, mean in means.items():
        ratios = (f"{mean[key]:.3f}" for key in ("stored", "temporaries"))
        title = "geometric mean" if name == "plain" else ""
        result.add_row(title, name, *ratios, "", "", "", "", f"{mean['time']:.3f}")
    return result


def save(path: Path, rows: Sequence[Row]) -> None:
    """Write the JSON file."""
    result = {**header(), "geometric_means": geometric_means(rows), "rows": [asdict(row) for row in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Measure, write the JSON file after each model, and print the table."""
    by_name = {case.name: case for case in CASES + SMALL_CASES}
    default = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=by_name, default=default, metavar="NAME", help=f"of {', '.join(by_name)}"
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=DEFAULT, help="besides plain")
    parser.add_argument("--rounds", type=int, default=300, help="most rounds per model (default 300)")
    parser.add_argument("--seconds", type=float, default=120, help="most seconds of rounds per model (default 120)")
    parser.add_argument("--builds", type=int, default=3, help="builds per variant, for the least times (default 3)")
    parser.add_argument("--batch-search", type=float, metavar="GIB", help="find the largest batch for this much memory")
    parser.add_argument("--out", type=Path, default=Path("out/bench_encoding.json"))
    parser.add_argument("--peak-of", metavar="NAME:VARIANT", help="print the peak memory of one program, nothing else")
    arguments = parser.parse_args()
    variants = {"plain": PLAIN, **VARIANTS}
    if arguments.peak_of:
        name, variant = arguments.peak_of.split(":")
        print(json.dumps(peak_of(by_name[name], variants[variant])))
        return
    keep_freed_memory()
    chosen = {name: variant for name, variant in variants.items() if name in ("plain", *arguments.variants)}
    cases = [by_name[name] for name in arguments.models]
    peak = peaks(cases, list(chosen))
    cap = int(arguments.batch_search * 2**30) if arguments.batch_search else None
    if cap and jax.default_backend() == "cpu":
        print("--batch-search is skipped: a CPU has no memory of its own to fill.", file=sys.stderr)
        cap = None
    options = Options(arguments.rounds, arguments.seconds, arguments.builds, cap)
    rows = []
    for case in cases:
        rows.append(measure(case, chosen, peak, options))
        save(arguments.out, rows)
        ratios = ", ".join(f"{name} {figures.time_ratio[1]:.3f}" for name, figures in rows[-1].variants.items())
        print(f"{case.name}: time ratios {ratios}", file=sys.stderr, flush=True)
        jax.clear_caches()
        gc.collect()
    Console(width=180).print(table(rows, geometric_means(rows)))


if __name__ == "__main__":
    main()
