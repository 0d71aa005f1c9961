"""Measure on one GPU what is only compiled elsewhere: times, peaks, largest batches, codecs, calls, bits.

    python -m scripts.on_gpu                          # an H100 or H200: the first models, nine and a half minutes
    python -m scripts.on_gpu --minutes 25 --out out/h200.json
    python -m scripts.on_gpu --kinds jit stages       # these measurements alone
    python -m scripts.on_gpu --rehearse               # small shapes on a CPU, in less than a minute

Measurements come in waves, the most important first (``waves``). Each is a process of its own: if it fails, or needs
more memory than there is, one row is lost. What the minutes do not suffice for is skipped, and the row says so. After
every row the JSON file is written.

Several processes compile at once and one at a time measures. A step is compiled by one process and run by another,
which finds it in JAX's compilation cache: its ``peak_bytes_in_use`` has none of the arrays with which XLA tunes
kernels. Rows:

  ceilings  bytes and operations per second of plain kernels, and of copies to the host and back
  step      seconds of ``value_and_grad`` (quartiles), peak bytes, compiled temporaries, products and their operations
  budget    the same of a pipeline of one stage with ``memory=`` a share of what the plain step needs; with plain SGD
  jit       the same of a step with plain SGD, its parameters donated, under ``jax.jit`` or ``jaxpipe.jit(memory=)``
  stages    two stages on the device, all forward passes first: with everything kept, within a budget, and with stashes
            in the host's memory; seconds predicted and measured, and how far parameters are from those of plain JAX
  bits      whether gradients of ``memory_encoded`` have every bit of plain ones, under flags of XLA that are named
  codecs    ``scripts.bench_codecs``; calls: ``scripts.bench_dispatch``, whose sends need several devices
  largest   a batch whose step runs in the device's memory: where a line through the bytes of two batches meets it, or
            the first of 15, 14, 12 and 8 sixteenths of it that runs
"""

import argparse
import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jaxpipe
from jaxpipe.array_types import PyTree
from scripts import bench_codecs, bench_dispatch
from scripts.bench_encoding import BLOCKS, PLAIN, VARIANTS, Variant, build, compare, needed, step_summary, summary
from scripts.encoding_cases import CASES, CASES_BY_NAME, GPU_CASES, WITH_BLOCKS, Case, Problem
from scripts.measuring import alternate, header, quartiles
from scripts.one_stage import batch_of, one_stage, stage_summary
from scripts.two_stages import two_stages


SHARES = (0.75, 0.5, 0.35)
POLICIES = ("nothing", "dots", "dots-no-batch")
REMAT = ("blocks", "blocks-dots", "blocks-dots-no-batch")

#: Flags of XLA under which bits are compared.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
FLAGS = ("", DETERMINISTIC, f"{DETERMINISTIC} --xla_gpu_autotune_level=0")

#: Seconds under which no measurement is begun.
LEAST_SECONDS = 20.0

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One measurement.

    Attributes:
      kind: of ``KINDS``.
      case, variant: what is measured.
      memory: the budget in bytes.
      share: the part of the plain step that it is.
      flags: of XLA.
      small: whether it is rehearsed.
    """

    kind: str
    case: str = ""
    variant: str = ""
    memory: int = 0
    share: float = 0.0
    flags: str = ""
    small: bool = False

    @property
    def problem(self) -> Case:
        """The model."""
        return CASES_BY_NAME[self.case]

    @property
    def wrapping(self) -> Variant:
        """The wrapping of the model."""
        return {"plain": PLAIN, **VARIANTS}[self.variant]


Wave = Callable[[Sequence[Row]], list[Job]]


# In a process of its own


@dataclass(frozen=True)
class Device:
    """The device, which several processes compile for, and one at a time measures on.

    Attributes:
      lock: a file.
      seconds, rounds: most of them for one timing.
      compile_only: whether this process fills the compilation cache for another one.
    """

    lock: Path
    seconds: float
    rounds: int
    compile_only: bool

    @contextlib.contextmanager
    def held(self, how: int) -> Iterator[None]:
        """Hold the lock."""
        with self.lock.open("w") as file:
            fcntl.flock(file, how)
            yield

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """Share the device with others that compile, whose tuning runs on it."""
        return self.held(fcntl.LOCK_SH)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Have the device alone."""
        return self.held(fcntl.LOCK_EX)

    def run(self, step: Callable[[], object]) -> Row:
        """Run a step, and measure its time and the peak of this process, from before it was timed."""
        with self.alone():
            jax.block_until_ready(step())
            stats = jax.devices()[0].memory_stats() or {}
            times = alternate({"step": step}, self.rounds, self.seconds)["step"]
        return {"seconds": quartiles(times), "rounds": len(times), "peak_bytes": stats.get("peak_bytes_in_use")}


def measure_step(job: Job, device: Device) -> Row:
    """Measure the step of a variant."""
    with device.compiling():
        problem = job.problem.make(job.problem.batch)
        built = build(problem, job.wrapping, None)
    row = summary(built) | {"compile_seconds": built.compile}
    return row if device.compile_only else row | device.run(lambda: built.step(*problem.arguments))


def measure_budget(job: Job, device: Device) -> Row:
    """Measure a pipeline of one stage within a budget."""
    with device.compiling():
        problem = job.problem.make(job.problem.batch)
        try:
            pipeline = one_stage(problem, jax.devices()[0], job.memory)
        except jaxpipe.MemoryBudgetError as error:
            return {"refused": str(error), "smallest": error.smallest}
        row = stage_summary(pipeline)
    if device.compile_only:
        return row
    _, x, _, labels, _ = problem.arguments
    batch, states = batch_of(x, labels), [pipeline.init(jax.random.key(0))]
    del problem, x, labels  # its parameters are no part of what the pipeline needs

    def step() -> object:
        states[0], metrics = pipeline.step(states[0], batch)
        return states[0], metrics

    return row | device.run(step)


def measure_jit(job: Job, device: Device) -> Row:
    """Measure a step with plain SGD, within a budget if there is one."""
    with device.compiling():
        problem = job.problem.make(job.problem.batch)
        step = sgd_step(problem, VARIANTS["fast-step"] if job.memory else job.wrapping)
        jitted = (
            jaxpipe.jit(step, memory=job.memory, donate_argnums=0) if job.memory else jax.jit(step, donate_argnums=0)
        )
        begin = time.perf_counter()
        try:
            lowered = jitted.lower(*problem.arguments)
        except jaxpipe.MemoryBudgetError as error:
            return {"refused": str(error), "smallest": error.smallest}
        compiled = lowered.compile()
        row = {"compile_seconds": time.perf_counter() - begin}
        if job.memory:
            row |= {"plan": asdict(lowered.plan)}
        jaxpr = lowered.jaxpr if job.memory else jitted.trace(*problem.arguments).jaxpr
        row |= step_summary(compiled, jaxpr)
    if device.compile_only:
        return row
    params, rest = [problem.arguments[0]], problem.arguments[1:]
    del problem

    def run() -> object:
        params[0], *others = compiled(params[0], *rest)
        return params[0], others

    return row | device.run(run)


def sgd_step(problem: Problem, variant: Variant) -> Callable[..., Any]:
    """Return a training step: new parameters, loss and state."""
    value_and_grad = jax.value_and_grad(variant.loss(problem), has_aux=True)

    def step(params: PyTree, *rest: PyTree) -> tuple[PyTree, jax.Array, PyTree]:
        (loss, state), gradients = value_and_grad(params, *rest)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, params, gradients), loss, state

    return step


def measure_stages(job: Job, device: Device) -> Row:
    """Measure a chain of layers in two stages on one device, and compare its parameters with plain JAX's."""
    with device.compiling():
        row, step = two_stages(jax.devices()[0], job.share, job.variant == "host", job.small)
    return row | device.run(step)


def compare_bits(job: Job, device: Device) -> Row:
    """Compare gradients with plain ones, and plain ones of two runs."""
    with device.compiling():
        problem = job.problem.make(job.problem.batch)
        plain, other = (build(problem, variant, None).step for variant in (PLAIN, job.wrapping))
    with device.alone():
        first, second, encoded = (
            jax.tree.leaves(jax.device_get(step(*problem.arguments)[1])) for step in (plain, plain, other)
        )
    difference, ulps, same = compare(first, encoded)
    plain_difference, _, repeated = compare(first, second)
    row = {"identical": same, "difference": difference, "ulps": ulps}
    return row | {"plain_repeats": repeated, "plain_difference": plain_difference}


def measure_codecs(job: Job, device: Device) -> Row:
    """Measure the kernels of codecs."""
    with device.alone():
        if job.small:
            return {"kernels": bench_codecs.measure((2, 16, 16, 16), 3, (jnp.float32,))}
        return {"kernels": bench_codecs.measure()}


def measure_calls(job: Job, device: Device) -> Row:
    """Measure calls and, of several devices, sends."""
    if job.small:
        jax.config.update("jax_num_cpu_devices", bench_dispatch.STAGES)
    with device.alone():
        devices = jax.devices()
        count = bench_dispatch.STAGES if len(devices) >= bench_dispatch.STAGES else 1
        return bench_dispatch.measure(devices[:count], 3 if job.small else 30)


def find_largest(job: Job, device: Device) -> Row:
    """Find the largest batch that runs: where a line through two compiled sizes ends, or somewhat below."""
    case, variant = job.problem, job.wrapping
    limit = job.memory or (jax.devices()[0].memory_stats() or {})["bytes_limit"]
    with device.alone():
        single, double = (needed(case, n, variant, None) for n in (case.batch, 2 * case.batch))
        more = (limit - single) * case.batch / max(1.0, double - single)
        for sixteenths in (16, 15, 14, 12, 8):
            batch = case.batch + int(more * sixteenths / 16)
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                problem = case.make(batch)
                step = build(problem, variant, None).step
                begin = time.perf_counter()
                jax.block_until_ready(step(*problem.arguments))
                return {"batch": batch, "limit": limit, "seconds": time.perf_counter() - begin}
    return {"batch": 0, "limit": limit}


def measure_ceilings(job: Job, device: Device) -> Row:
    """Measure what the device attains with plain kernels."""
    size = 256 if job.small else 8192
    row: Row = {"kind_of_device": jax.devices()[0].device_kind, "stats": jax.devices()[0].memory_stats()}

    def rate(amount: float, function: Callable[..., Any], *operands: Any) -> float:
        run = jax.jit(function)
        times = alternate({"run": lambda: run(*operands)}, device.rounds, device.seconds)["run"]
        return amount / quartiles(times)[1]

    with device.alone():
        x = jax.random.normal(jax.random.key(0), (size, size))
        row["bytes_per_second"] = rate(2 * x.nbytes, lambda x: x + 1, x)
        products = {"default": x, "bfloat16": x.astype(jnp.bfloat16)}
        row["flops"] = {name: rate(2 * size**3, jnp.dot, a, a) for name, a in products.items()}
        row["flops"]["float32"] = rate(2 * size**3, lambda a: jnp.dot(a, a, precision="highest"), x)
        kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
        if "pinned_host" in kinds:
            host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
            held = jax.device_put(x, host)
            for name, value, to in (("to_host", x, host), ("from_host", held, x.sharding)):
                times = alternate({"put": lambda v=value, to=to: jax.device_put(v, to)}, 10, device.seconds)["put"]
                row[f"{name}_bytes_per_second"] = x.nbytes / quartiles(times)[1]
    return row


KINDS = {
    "ceilings": measure_ceilings,
    "step": measure_step,
    "budget": measure_budget,
    "jit": measure_jit,
    "stages": measure_stages,
    "bits": compare_bits,
    "codecs": measure_codecs,
    "calls": measure_calls,
    "largest": find_largest,
}
#: Those whose peak matters: compiled by another process before.
COMPILED_BEFORE = ("step", "budget", "jit")


# In the process that starts them


def steps(cases: Sequence[Case], variants: Sequence[str], small: bool = False, kind: str = "step") -> Wave:
    """Return the wave of variants of some models."""
    return lambda _: [
        Job(kind, case.name, variant, small=small)
        for case in cases
        for variant in variants
        if variant not in BLOCKS or case.name.startswith(WITH_BLOCKS)
    ]


def plain_rows(rows: Sequence[Row], kind: str = "step") -> dict[str, Row]:
    """By model, the row of the plain step."""
    return {row["case"]: row for row in rows if row["kind"] == kind and row["variant"] == "plain"}


def budgets(cases: Sequence[Case], shares: Sequence[float], small: bool = False, kind: str = "budget") -> Wave:
    """Return the wave of budgets: shares of the bytes of plain steps that were compiled."""

    def wave(rows: Sequence[Row]) -> list[Job]:
        plain = plain_rows(rows, "step" if kind == "budget" else kind)
        return [
            Job(
                kind,
                case.name,
                f"{share:.0%}",
                int(share * plain.get(case.name, {}).get("bytes", 0)),
                share,
                small=small,
            )
            for case in cases
            for share in shares
        ]

    return wave


def listed(*jobs: Job) -> Wave:
    """Return the wave of some measurements."""
    return lambda _: list(jobs)


def waves(small: bool) -> list[Wave]:
    """Return all measurements, in order of importance."""
    if small:
        mlp = [CASES_BY_NAME["MLP"]]
        return [
            listed(Job("ceilings", small=True), Job("codecs", small=True), Job("calls", small=True)),
            steps(mlp, ("plain", "dots"), small=True),
            listed(
                Job("bits", "MLP", "fast", flags=DETERMINISTIC, small=True),
                Job("largest", "MLP", "fast", memory=2**28, small=True),
            ),
            budgets(mlp, (1.5,), small=True),  # most of its bytes are parameters, which a budget leaves alone
            steps(mlp, ("plain",), small=True, kind="jit"),
            budgets(mlp, (0.99,), small=True, kind="jit"),
            listed(Job("stages", "", "default", small=True), Job("stages", "", "host", share=0.9, small=True)),
        ]
    best = [case.name for case in GPU_CASES if case.name.startswith(("GPT-2", "ResNet50", "ViT-B"))]
    own = [CASES_BY_NAME[name] for name in ("ViT-B 16x224", "ResNet50 32x224", "Llama bf16 8x512", "Mixer 32x224")]
    return [
        listed(Job("ceilings")),
        steps(GPU_CASES, ("plain", "fast", "fast-step")),
        listed(*(Job("bits", name, "fast", flags=flags) for flags in FLAGS for name in best)),
        listed(Job("codecs"), Job("calls")),
        steps(GPU_CASES, REMAT),
        budgets(GPU_CASES, SHARES),
        listed(
            Job("stages", "", "default", flags=DETERMINISTIC),
            *(Job("stages", "", where, share=0.8, flags=DETERMINISTIC) for where in ("host", "device")),
        ),
        steps(own, ("plain", "blocks", "blocks-dots-no-batch"), kind="jit"),
        budgets(own, SHARES[:2], kind="jit"),
        steps(GPU_CASES, POLICIES),
        steps(CASES, ("plain", "fast")),
        listed(*(Job("largest", name, variant) for name in best for variant in ("plain", "blocks", "fast"))),
        budgets(CASES, SHARES),
        steps(CASES, (*REMAT, *POLICIES)),
    ]


@dataclass
class Record:
    """The rows so far, in a file.

    Attributes:
      path: of the file.
      heading: where and when this runs.
      rows: one for each measurement.
    """

    path: Path
    heading: Row
    rows: list[Row] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, row: Row) -> None:
        """Add a row, and write the file."""
        with self._lock:
            self.rows.append(row)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({**self.heading, "rows": self.rows}, indent=1) + "\n")
        outcome = next((f"{key}: {row[key]}" for key in ("skipped", "error", "refused") if key in row), "measured")
        print(f"{row['kind']} {row['case']} {row['variant']}: {outcome[:160]}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Runner:
    """Starts a process for each measurement.

    Attributes:
      folder: for the lock and the compilation cache.
      deadline: in seconds of ``time.monotonic``.
      seconds, rounds: most of them for one timing.
      small: whether this is a rehearsal, on a CPU.
    """

    folder: Path
    deadline: float
    seconds: float
    rounds: int
    small: bool

    def run(self, job: Job) -> Row:
        """Measure; returns what was found, or why nothing was."""
        if (job.kind == "budget" or (job.kind == "jit" and job.share)) and not job.memory:
            return asdict(job) | {"skipped": "the plain step was not compiled"}
        if self.deadline - time.monotonic() < LEAST_SECONDS:
            return asdict(job) | {"skipped": "no time was left"}
        row = self._start(job, compile_only=True) if job.kind in COMPILED_BEFORE and not self.small else {}
        if not row.keys() & {"error", "refused", "skipped"}:
            compiling = {key: value for key, value in row.items() if key == "compile_seconds"}
            row |= self._start(job) | compiling  # the second process has it from the cache
        return asdict(job) | row

    def _start(self, job: Job, compile_only: bool = False) -> Row:
        command = [sys.executable, "-m", "scripts.on_gpu", "--job", json.dumps(asdict(job))]
        command += ["--lock", str(self.folder / "lock"), "--seconds", str(self.seconds), "--rounds", str(self.rounds)]
        command += ["--compile-only"] * compile_only
        left = max(1.0, self.deadline - time.monotonic())
        try:
            done = subprocess.run(command, env=self._environment(job), capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            return {"skipped": "no time was left to finish"}
        if done.returncode or not done.stdout:
            return {"error": "\n".join([f"exit status {done.returncode}", *done.stderr.strip().splitlines()[-3:]])}
        return json.loads(done.stdout.splitlines()[-1])

    def _environment(self, job: Job) -> dict[str, str]:
        added = {
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # several processes are on the device
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {job.flags}".strip(),
        }
        return os.environ | added | ({"JAX_PLATFORMS": "cpu"} if self.small else {})


def table(rows: Sequence[Row]) -> Table:
    """Steps and budgets to read, each beside the plain step."""
    result = Table(title="Steps", title_justify="left")
    for column in ("model", "variant"):
        result.add_column(column)
    for column in ("step ms", "of plain", "peak MiB", "of plain", "temporaries MiB", "products", "operations of plain"):
        result.add_column(column, justify="right")
    plain_of = {kind: plain_rows(rows, "jit" if kind == "jit" else "step") for kind in COMPILED_BEFORE}
    steps_and_budgets = (row for row in rows if row["kind"] in COMPILED_BEFORE)
    for row in sorted(steps_and_budgets, key=lambda row: (row["kind"] == "jit", row["case"])):
        if "seconds" not in row:
            why = next(row[key] for key in ("refused", "skipped", "error") if key in row)
            result.add_row(row["case"], row["variant"], why.splitlines()[-1][:60])
            continue
        first = plain_of[row["kind"]].get(row["case"], {})
        result.add_row(
            row["case"],
            row["variant"],
            f"{1e3 * row['seconds'][1]:.2f}",
            f"{row['seconds'][1] / first['seconds'][1]:.3f}" if "seconds" in first else "",
            f"{row['peak_bytes'] / 2**20:.1f}" if row["peak_bytes"] else "",
            f"{row['peak_bytes'] / first['peak_bytes']:.3f}" if row["peak_bytes"] and first.get("peak_bytes") else "",
            f"{row['temporaries'] / 2**20:.1f}",
            str(row["products"]),
            f"{row['flops'] / first['flops']:.3f}" if first.get("flops") else "",
        )
    return result


def others(rows: Sequence[Row]) -> Iterator[str]:
    """Everything else, a line each."""
    for row in rows:
        head = " ".join(str(part) for part in (row["kind"], row["case"], row["variant"], row["flags"]) if part)
        if row["kind"] == "codecs" and "kernels" in row:
            for name, kernel in row["kernels"].items():
                rate = kernel.get("gigabytes_per_second")
                yield f"{head}: {name}: {kernel['error'] if rate is None else f'{rate:.1f} GB/s'}"
        elif row["kind"] not in COMPILED_BEFORE:
            results = {k: v for k, v in row.items() if k not in Job.__dataclass_fields__ and k != "plan"}
            yield f"{head}: {json.dumps(results)}"


def measure_all(options: argparse.Namespace) -> list[Row]:
    """Run all waves; returns the rows, which are in the file as well."""
    jax.config.update("jax_platforms", "cpu")  # the device is for the others
    begin = time.monotonic()
    record = Record(options.out, {**header(), "minutes": options.minutes})
    with tempfile.TemporaryDirectory() as folder:
        quick = {"seconds": 0.2, "rounds": 3} if options.rehearse else {"seconds": options.seconds, "rounds": 100}
        deadline = begin + 60 * options.minutes
        runner = Runner(folder=Path(folder), deadline=deadline, small=options.rehearse, **quick)
        for wave in waves(options.rehearse):
            with ThreadPoolExecutor(options.workers) as pool:
                jobs = [job for job in wave(record.rows) if not options.kinds or job.kind in options.kinds]
                for _ in pool.map(lambda job: record.add(runner.run(job)), jobs):
                    pass
    return record.rows


def main() -> None:
    """Measure, print and save; or measure one thing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.5, help="for everything (default 9.5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="most seconds of one timing (default 2)")
    parser.add_argument("--workers", type=int, default=max(2, min(6, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--kinds", nargs="*", choices=KINDS, help="these alone")
    parser.add_argument("--rehearse", action="store_true", help="small shapes on a CPU")
    parser.add_argument("--out", type=Path, default=Path("out/on-gpu.json"))
    for name, kind in (("--job", str), ("--lock", Path), ("--rounds", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job = Job(**json.loads(options.job))
        device = Device(options.lock, options.seconds, options.rounds, options.compile_only)
        print(json.dumps(KINDS[job.kind](job, device)))
        return
    rows = measure_all(options)
    console = Console(width=160)
    console.print(table(rows))
    for line in others(rows):
        console.print(line, markup=False, highlight=False)


if __name__ == "__main__":
    main()
