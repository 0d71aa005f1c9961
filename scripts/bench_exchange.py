"""The block-sparse gradient exchange: accuracy against bytes on digits, and what choosing blocks costs by size.

    python -m scripts.bench_exchange
    python -m scripts.bench_exchange --seeds 2 --blocks 1 4 --sizes 16 20 --out out/some.json
    python -m scripts.plot_exchange

Frontier: the network of ``examples/train_digits_sparse.py`` on four replicas, densely and with the ``k`` best blocks of
each layer; mean test accuracy over the seeds, and how many times fewer bytes a replica hands to the collectives. (A
ring carries what is gathered P - 1 times and what is reduced 2 (P - 1) / P times.)

Cost: one dense kernel ``[n, n]`` on four replicas, ``k = 1``, in one compiled program each: a dense all-reduce,
``own``, ``consensus``, and, on one device, ``choosing`` (scores, choice, residual: all but the collectives). Simulated
devices share the memory of one machine, so an all-reduce costs no more here than copies do; of a network it tells
nothing.
What a network must not exceed for choosing to pay off follows from bytes and time:

  break-even   (2 (P - 1) / P x dense bytes - what arrives of blocks) / seconds of choosing, in bytes per second: the
               bandwidth of a ring's link above which a dense all-reduce is over before the blocks are chosen
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from examples import train_digits_sparse as example
from jaxpipe.array_types import PyTree
from jaxpipe.gradients import block_sparse, state_specs
from scripts.measuring import Quartiles, alternate, header, keep_freed_memory, quartiles


REPLICAS = 4


@dataclass(frozen=True)
class Point:
    """A setting on the frontier."""

    setting: str
    mode: str
    accuracies: tuple[float, ...]
    ratio: float

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.mean(self.accuracies)


@dataclass(frozen=True)
class Cost:
    """Times for one kernel of ``elements``."""

    elements: int
    dense_bytes: int
    sent_bytes: dict[str, int]
    seconds: dict[str, Quartiles]
    break_even: dict[str, float]


def frontier(blocks: Sequence[int], modes: Sequence[str], seeds: int, epochs: int) -> list[Point]:
    """Train with every setting and seed; a setting is compiled once."""
    points = []
    for mode, k in [("dense", None), *((mode, k) for mode in modes for k in blocks)]:
        options = example.Options(epochs=epochs, mode="own" if mode == "dense" else mode)
        pipeline = example.plan(options, k)
        setting = "dense" if k is None else f"k = {k}"
        runs = [example.train(pipeline, setting, options, seed) for seed in range(seeds)]
        points.append(Point(setting, mode, tuple(r.accuracy for r in runs), runs[0].ratio))
        print(f"{mode} {setting}: {points[-1].mean:.4f}, {points[-1].ratio:.0f}x", file=sys.stderr, flush=True)
    return points


def cost(width: int, rounds: int, seconds: float) -> Cost:
    """The programs for a kernel ``[width, width]``."""
    mesh = jax.sharding.Mesh(jax.devices()[:REPLICAS], ("data",))
    shape = {"kernel": jax.ShapeDtypeStruct((width, width), jnp.float32)}
    gradient = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(REPLICAS * width, width)), jnp.float32)}
    exchanges = {mode: block_sparse("data", k=1, mode=mode) for mode in ("own", "consensus")}
    transformations = {"dense": optax.stateless(lambda g, _: jax.lax.pmean(g, "data")), **exchanges}
    steps: dict[str, Callable[[], object]] = {}
    for name, transformation in transformations.items():
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
        specs = state_specs(jax.eval_shape(transformation.init, start), "data")
        init = jax.shard_map(transformation.init, mesh=mesh, in_specs=P(), out_specs=specs)
        update = jax.shard_map(transformation.update, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs))
        steps[name] = _repeated(jax.jit(update, donate_argnums=1), gradient, jax.jit(init)(start))
    alone = block_sparse(k=1)
    local_gradient = jax.tree.map(lambda x: jax.device_put(x[:width], jax.devices()[0]), gradient)
    steps["choosing"] = _repeated(jax.jit(alone.update, donate_argnums=1), local_gradient, alone.init(local_gradient))
    times = {name: quartiles(samples) for name, samples in alternate(steps, rounds, seconds).items()}
    dense_bytes = 4 * width * width
    sent = {mode: exchange.traffic(shape).bytes for mode, exchange in exchanges.items()}
    ring = 2 * (REPLICAS - 1) / REPLICAS
    arriving = {"own": (REPLICAS - 1) * sent["own"], "consensus": ring * sent["consensus"]}
    even = {mode: (ring * dense_bytes - n) / times["choosing"][1] for mode, n in arriving.items()}
    return Cost(width * width, dense_bytes, sent, times, even)


def _repeated(
    step: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], gradient: PyTree, state: PyTree
) -> Callable[[], object]:
    """A call without arguments; each takes the state that the last one gave."""

    def call() -> object:
        nonlocal state
        updates, state = step(gradient, state)
        return updates, state

    return call


def tables(points: Sequence[Point], costs: Sequence[Cost]) -> list[Table]:
    """The results to read."""
    first = Table(title="Digits, four replicas", title_justify="left")
    for column in ("mode", "setting", "mean accuracy", "worst", "fewer bytes"):
        first.add_column(column, justify="right")
    for p in points:
        first.add_row(p.mode, p.setting, f"{p.mean:.2%}", f"{min(p.accuracies):.2%}", f"{p.ratio:.0f}x")
    second = Table(title="One kernel, k = 1, times in ms", title_justify="left")
    for column in ("elements", "dense", "own", "consensus", "choosing", "break-even, GB/s"):
        second.add_column(column, justify="right")
    for c in costs:
        times = [f"{1e3 * c.seconds[name][1]:.2f}" for name in ("dense", "own", "consensus", "choosing")]
        second.add_row(f"{c.elements:,}", *times, f"{c.break_even['own'] / 1e9:.2f}")
    return [first, second]


def main() -> None:
    """Measure, write the JSON file and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--blocks", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--modes", nargs="+", choices=("own", "consensus"), default=["own", "consensus"])
    parser.add_argument("--sizes", type=int, nargs="*", default=[16, 18, 20, 22, 24], help="powers of two, even")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--out", type=Path, default=Path("out/bench_exchange.json"))
    arguments = parser.parse_args()
    keep_freed_memory()
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    costs = [cost(2 ** (size // 2), arguments.rounds, arguments.seconds) for size in arguments.sizes]
    points = frontier(arguments.blocks, arguments.modes, arguments.seeds, arguments.epochs) if arguments.seeds else []
    rows = [{**asdict(p), "mean": p.mean} for p in points]
    result = {**header(), "replicas": REPLICAS, "frontier": rows, "costs": [asdict(c) for c in costs]}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for table in tables(points, costs):
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
