"""Two stages on two cores: jaxpipe, torch.distributed.pipelining and torchgpipe, each against its own single device.

    python -m scripts.compare_peers --torch TORCH_ENVIRONMENT/bin/python
    python -m scripts.compare_peers --quick

The same two models everywhere, in float32 with SGD, the same micro-batches, cut in the middle. The two stages are two
processes, each pinned to a core of its own and connected by Gloo over loopback; torchgpipe knows one process only,
whose two threads have both cores. ``single`` is gradient accumulation of the same micro-batches on one core: the
fastest plain loop of the framework (``jax.grad`` compiled, ``backward`` in PyTorch). The processes of a pipeline run it
in turns with the pipeline's steps, each on its own core, since the speed of a shared machine changes within minutes.

  of ideal   single (M + S - 1) / (S M) / pipeline, the median over the rounds: 1 where nothing but the bubble of 1F1B
             is lost; a schedule with a smaller bubble may exceed it
  bytes      the most memory a process has while it trains alone, less what it had before the model was made

Without ``--torch`` only jaxpipe is measured. How much memory activations take against ``jax.checkpoint`` is measured by
``scripts.bench_encoding``.
"""

import argparse
import ctypes
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import jaxpipe
from jaxpipe.array_types import ArrayLike, PyTree
from scripts.measuring import MALLOC, Quartiles, alternate, header, quartiles


STAGES, LAYERS, CHANNELS, SIDE, CLASSES = 2, 8, 32, 16, 10
OPTIMIZER = optax.sgd(1e-3)


@dataclass(frozen=True)
class Size:
    """Width of the MLP, rows of a micro-batch, number of micro-batches."""

    width: int
    rows: int
    microbatches: int


#: Steps after which the most memory is read.
MEMORY_ROUNDS = 5

#: By model.
SIZES = {"mlp": Size(768, 256, 8), "cnn": Size(0, 32, 8)}
QUICK = {"mlp": Size(128, 32, 4), "cnn": Size(0, 4, 4)}


@dataclass(frozen=True)
class Row:
    """A tool on a model: seconds of a step, quartiles; bytes of the process that has most."""

    model: str
    tool: str
    single: Quartiles
    pipeline: Quartiles
    of_ideal: float
    single_bytes: int
    pipeline_bytes: int


#: The kernel and the bias of a layer.
Layer = dict[str, np.ndarray]


def init(model: str, width: int) -> list[Layer]:
    """Kernels and biases of each layer."""
    rng = np.random.default_rng(0)

    def made(*shape: int) -> Layer:
        scale = (2 / np.prod(shape[:-1])) ** 0.5
        return {
            "kernel": (scale * rng.standard_normal(shape)).astype(np.float32),
            "bias": np.zeros(shape[-1], np.float32),
        }

    if model == "mlp":
        return [made(width, width) for _ in range(LAYERS)]
    return [*(made(3, 3, 3 if k == 0 else CHANNELS, CHANNELS) for k in range(LAYERS - 1)), made(CHANNELS, CLASSES)]


def apply(params: Sequence[Mapping[str, jax.Array]], x: jax.Array) -> jax.Array:
    """Dense layers; or convolutions, a mean over the image, and a dense layer."""
    for layer in params:
        if layer["kernel"].ndim == 4:
            dimensions = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(x, layer["kernel"], (1, 1), "SAME", dimension_numbers=dimensions)
            x = jax.nn.relu(x + layer["bias"])
        elif x.ndim == 4:
            x = x.mean((1, 2)) @ layer["kernel"] + layer["bias"]
        else:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x


def loss(model: Callable[[ArrayLike], jax.Array], batch: tuple[ArrayLike, ArrayLike]) -> jax.Array:
    """Mean square error."""
    return jnp.square(model(batch[0]) - batch[1]).mean()


def data(model: str, size: Size) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a batch."""
    rows, rng = size.rows * size.microbatches, np.random.default_rng(1)
    shapes = ((rows, size.width),) * 2 if model == "mlp" else ((rows, SIDE, SIDE, 3), (rows, CLASSES))
    x, y = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return x, y


def single(model: str, size: Size) -> Callable[[], object]:
    """A compiled gradient for each micro-batch, added up, and a compiled update."""
    params = jax.tree.map(jnp.asarray, init(model, size.width))
    gradient = jax.jit(jax.value_and_grad(lambda params, batch: loss(jax.tree_util.Partial(apply, params), batch)))
    add = jax.jit(lambda total, new: jax.tree.map(jnp.add, total, new), donate_argnums=0)

    def update(total: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = OPTIMIZER.update(jax.tree.map(lambda g: g / size.microbatches, total), state, params)
        return optax.apply_updates(params, updates), state

    change = jax.jit(update, donate_argnums=(1, 2))
    pieces = list(zip(*(map(jnp.asarray, np.split(x, size.microbatches)) for x in data(model, size)), strict=True))
    now = [params, OPTIMIZER.init(params)]

    def step() -> object:
        total = gradient(now[0], pieces[0])
        for piece in pieces[1:]:
            total = add(total, gradient(now[0], piece))
        now[:] = change(total[1], now[1], now[0])
        return now[0], total[0]

    return step


def pipeline(model: str, size: Size) -> Callable[[], object]:
    """A step of two stages, on all devices that there are."""
    mesh = Mesh(np.array(jax.devices()), ("stage",))
    arrays = data(model, size)
    trained = jaxpipe.partition(
        apply,
        mesh,
        loss=loss,
        optimizer=OPTIMIZER,
        num_microbatches=size.microbatches,
    )
    whole = NamedSharding(mesh, P())
    batch = tuple(jax.make_array_from_callback(x.shape, whole, lambda k, x=x: x[k]) for x in arrays)
    # Values are handed over at init, so that no process keeps those of the other's stage.
    state = [trained.init(jax.random.key(0), batch, variables=init(model, size.width))]

    def step() -> object:
        state[0], metrics = trained.step(state[0], batch)
        return metrics["loss"], state[0].parameters

    if not jax.process_index():
        print(f"{model}: {trained.plan.schedule}, {trained.plan.runtime}", file=sys.stderr)
    return step


def resident(field: str) -> int:
    """Bytes of this process in memory: ``VmRSS`` now, ``VmHWM`` at the most."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))


def forget_peak() -> None:
    """Give free memory back, and let ``VmHWM`` begin at what is in memory then."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def run(tool: str, model: str, size: Size, rounds: int) -> None:
    """One process of JAX: pinned, measuring; each prints what it saw."""
    number = int(os.environ.get("JAX_PROCESS_ID", "0"))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    jax.config.update("jax_num_cpu_devices", 1)
    jaxpipe.initialize_distributed()
    jax.devices()
    before = resident("VmRSS")
    step = (single if tool == "single" else pipeline)(model, size)
    jax.block_until_ready(step())
    forget_peak()  # what it took to compile
    alternate({"step": step}, MEMORY_ROUNDS, float("inf"))
    result = {"rank": number, "bytes": resident("VmHWM") - before, "header": header()}
    if tool != "single":
        meet = functools.partial(multihost_utils.sync_global_devices, "round")
        seconds = alternate({"single": single(model, size), "pipeline": step}, rounds, float("inf"), meet=meet)
        result |= {"seconds": seconds["pipeline"], "single": seconds["single"]}
    print(json.dumps(result), flush=True)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def workers(commands: list[list[str]], environments: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Run processes at the same time; returns what they print, by rank."""
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **MALLOC, **more})
        for command, more in zip(commands, environments, strict=True)
    ]
    outputs = []
    for process in started:
        text = process.communicate()[0]
        if process.returncode:
            raise SystemExit(f"{' '.join(process.args)} ended with {process.returncode}")  # type: ignore[arg-type]
        outputs.append(json.loads(next(line for line in text.splitlines() if line.startswith('{"rank"'))))
    return sorted(outputs, key=lambda one: one["rank"])


def measure_jax(tool: str, model: str, size: Size, rounds: int) -> list[dict[str, Any]]:
    """A tool of this file, in one process or in two."""
    numbers = map(str, (size.width, size.rows, size.microbatches, rounds))
    command = [sys.executable, "-m", "scripts.compare_peers", "--run", tool, model, *numbers]
    count = 1 if tool == "single" else STAGES
    address = f"127.0.0.1:{free_port()}"
    settings: list[dict[str, str]] = [{}]
    if count > 1:
        settings = [
            {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(k)}
            for k in range(count)
        ]
    return workers([command] * count, [{**variables, "JAX_PLATFORMS": "cpu"} for variables in settings])


def measure_torch(python: str, tool: str, model: str, size: Size, rounds: int) -> list[dict[str, Any]]:
    """A tool of ``scripts/peers_torch.py``, in one process or in two."""
    numbers = map(str, (size.width, size.rows, size.microbatches, rounds))
    command = [python, "scripts/peers_torch.py", tool, model, *numbers]
    count = STAGES if tool == "pipelining" else 1
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    settings["OMP_NUM_THREADS"] = "1"
    return workers([command] * count, [{**settings, "RANK": str(k)} for k in range(count)])


def row(model: str, tool: str, size: Size, alone: list[dict[str, Any]], both: list[dict[str, Any]]) -> Row:
    """A tool against its own single device; a step takes as long as its slowest process."""
    steps = np.array([worker["seconds"] for worker in both]).max(axis=0)
    singles = np.array([worker["single"] for worker in both]).mean(axis=0)
    ideal = singles * (size.microbatches + STAGES - 1) / (STAGES * size.microbatches)
    most = [max(worker["bytes"] for worker in workers) for workers in (alone, both)]
    return Row(model, tool, quartiles(singles), quartiles(steps), float(np.median(ideal / steps)), *most)


def table(rows: list[Row]) -> Table:
    """The results to read."""
    result = Table(title="two stages on two cores; ms of a step", title_justify="left")
    for name in ("model", "tool"):
        result.add_column(name)
    for name in ("single", "pipeline", "times faster", "of ideal", "single MiB", "pipeline MiB"):
        result.add_column(name, justify="right")
    for r in rows:
        figures = (1e3 * r.single[1], 1e3 * r.pipeline[1])
        mebibytes = (f"{n / 2**20:.0f}" for n in (r.single_bytes, r.pipeline_bytes))
        faster = f"{r.single[1] / r.pipeline[1]:.2f}"
        result.add_row(r.model, r.tool, *(f"{n:.1f}" for n in figures), faster, f"{r.of_ideal:.2f}", *mebibytes)
    return result


def main() -> None:
    """Measure, write the JSON file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="a Python that has torch and torchgpipe")
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--quick", action="store_true", help="small shapes, three rounds: whether it works")
    parser.add_argument("--rounds", type=int, default=20, help="per tool and model (default 20)")
    parser.add_argument("--out", type=Path, default=Path("out/bench_peers.json"))
    parser.add_argument("--run", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        tool, model, *numbers = options.run
        width, rows, microbatches, rounds = map(int, numbers)
        run(tool, model, Size(width, rows, microbatches), rounds)
        return
    if len(os.sched_getaffinity(0)) < STAGES:
        sys.exit(f"this needs {STAGES} cores, one for each stage")
    rounds = 3 if options.quick else options.rounds
    measured: list[Row] = []
    result: dict[str, Any] = {}
    for model in options.models:
        size = (QUICK if options.quick else SIZES)[model]
        alone, both = (measure_jax(tool, model, size, rounds) for tool in ("single", "pipeline"))
        result |= alone[0]["header"]
        measured.append(row(model, "jaxpipe", size, alone, both))
        if options.torch:
            alone = measure_torch(options.torch, "single", model, size, rounds)
            result["versions"] |= {"torch": alone[0]["torch"]}
            for tool, name in (("pipelining", "torch.distributed.pipelining"), ("gpipe", "torchgpipe")):
                both = measure_torch(options.torch, tool, model, size, rounds)
                measured.append(row(model, name, size, alone, both))
    result |= {"command": sys.orig_argv[1:], "stages": STAGES, "layers": LAYERS}
    result |= {"sizes": {model: asdict(size) for model, size in SIZES.items()}, "rows": [asdict(r) for r in measured]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=140).print(table(measured))


if __name__ == "__main__":
    main()
