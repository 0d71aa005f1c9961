"""Late and sparse gradients: the loss of a small language model after equal numbers of tokens.

    python -m scripts.bench_learning --minutes 60      # goes on where the JSON file ends
    python -m scripts.bench_learning --rows 16 --out out/16.json --variants muon "muon outer" "muon outer, half a bit"
    python -m scripts.plot_learning

Bytes of Python's own library (every tenth module is for the test), a GPT of 4 layers of 128, replicas, a cosine
schedule. A seed draws the same initial weights and batches for all variants.

What can be is run on one device, as the mathematics are those of a pipeline, which ``tests/test_bench_learning.py``
checks: with double buffers (2BW) the gradients are those at the weights before the last, and replicas are an axis
of ``jax.vmap``, in which ``block_sparse`` is what runs between devices. A dense exchange is the synchronous run. Local
accumulation (PACI) runs as a pipeline of four stages on simulated devices: weights change between the passes.

Each variant has its own rate: of those of ``--sweep`` the best for the first seed. All are part of the result.
"""

import argparse
import functools
import json
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpipe
from jaxpipe.array_types import Array, PyTree
from jaxpipe.gradients import (
    BlockSparse,
    OuterLoop,
    OuterLoopState,
    block_sparse,
    delay_error_feedback,
    outer_loop,
)
from jaxpipe.schedules import local_accumulation
from scripts.measuring import header


#: The blocks of an embedding are its rows.
BLOCKS = {"*embedding": 0}

#: What differs between replicas in the states of an optimizer and of its outer loop.
APART = 0, OuterLoopState(step=None, outer=0, optimizer=0, pending=0)


@dataclass(frozen=True)
class Size:
    """The model, the batch and the number of steps."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64
    rows: int = 8
    steps: int = 2000


@dataclass(frozen=True)
class Variant:
    """How a run differs from plain training."""

    optimizer: str = "adamw"
    late: bool = False  # gradients at the weights before the last
    corrected: bool = False  # by error feedback
    exchange: Mapping[str, Any] | None = None  # arguments of block_sparse
    outer: Mapping[str, Any] | None = None  # arguments of outer_loop; ``exchange`` is that of its pseudo-gradients
    stages: int = 0  # of a pipeline with local accumulation
    replicas: int = 4
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the optimizer


VARIANTS = {
    "adamw": Variant(),
    "adamw 2bw": Variant(late=True),
    "adamw 2bw corrected": Variant(late=True, corrected=True),
    "muon": Variant("muon"),
    "muon 2bw": Variant("muon", late=True),
    "muon 2bw corrected": Variant("muon", late=True, corrected=True),
    "adamw paci": Variant(stages=4),
    "muon paci": Variant("muon", stages=4),
    # A tenth of the blocks in 2 bits. The residual stands for the first moment, and the optimizer has none; or has one.
    "adamw blocks": Variant(exchange={"k": 0.1, "bits": 2}, arguments={"b1": 0.0}),
    "adamw blocks, first moment": Variant(exchange={"k": 0.1, "bits": 2}),
    "adamw blocks, decay": Variant(exchange={"k": 0.1, "bits": 2, "decay": 0.95}, arguments={"b1": 0.0}),
    # Two replicas apart for 16 steps, which then average what they have learned: all of it, the best blocks, or the
    # largest of each eight elements.
    "muon outer": Variant("muon", outer={"optimizer": optax.sgd(1.0)}, replicas=2),
    "muon outer, 2 bits": Variant(
        "muon",
        outer={"optimizer": optax.sgd(1.0)},
        exchange={"k": 0.22, "bits": 2, "dense_1d": False},
        replicas=2,
    ),
    "muon outer, half a bit": Variant(
        "muon",
        outer={"optimizer": optax.sgd(1.0, momentum=0.3, nesterov=True)},
        exchange={"k": 1.0, "bits": 0.5, "dense_1d": False},
        replicas=2,
    ),
}


class Block(nn.Module):
    """Attention and a gelu MLP, each pre-normalized, without biases."""

    heads: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return ``[batch, length, width]`` for the same."""
        dense = functools.partial(nn.Dense, use_bias=False)
        batch, length, width = x.shape
        qkv = dense(3 * width)(nn.LayerNorm(use_bias=False)(x))
        q, k, v = (y.reshape(batch, length, self.heads, -1) for y in jnp.split(qkv, 3, axis=-1))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + dense(width, kernel_init=nn.initializers.zeros)(y)
        y = nn.gelu(dense(4 * width)(nn.LayerNorm(use_bias=False)(x)))
        return x + dense(width, kernel_init=nn.initializers.zeros)(y)


class GPT(nn.Module):
    """A decoder of bytes."""

    size: Size

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        """Return logits, ``[batch, length, 256]``, for ``int32[batch, length]``."""
        size = self.size
        positions = nn.Embed(size.context, size.width, name="positions")(jnp.arange(tokens.shape[1]))
        x = nn.Embed(256, size.width, name="tokens")(tokens) + positions
        for k in range(size.layers):
            x = Block(size.heads, name=f"block_{k}")(x)
        return nn.Dense(256, use_bias=False, name="head")(nn.LayerNorm(use_bias=False)(x))


def loss(model: Callable[[Array], Array], text: Array) -> Array:
    """Mean cross entropy of each next byte, in nats."""
    logits = model(text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def library() -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the modules and packages of Python's library, those of every tenth one apart."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    packages = ("asyncio", "concurrent", "ctypes", "email", "html", "http", "importlib", "json", "logging")
    packages += ("multiprocessing", "sqlite3", "tkinter", "unittest", "urllib", "wsgiref", "xml")
    paths = [*folder.glob("*.py"), *(path for name in packages for path in (folder / name).rglob("*.py"))]
    texts = [path.read_bytes() for path in sorted(paths)]
    train, test = (b"".join(t for k, t in enumerate(texts) if (k % 10 == 9) == apart) for apart in (False, True))
    return np.frombuffer(train, np.uint8), np.frombuffer(test, np.uint8)


def examples(text: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    """``int32[rows, context + 1]``, one example from each start."""
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def make_optimizer(variant: Variant, rate: float, steps: int) -> optax.GradientTransformation:
    """The variant's optimizer, without its exchange: 10 % warm-up, then a cosine to a tenth of the rate."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps, rate / 10)
    if variant.optimizer == "muon":
        # What is no matrix, and the embeddings by their own rate, are left to Adam.
        adam = optax.warmup_cosine_decay_schedule(0.0, rate / 10, steps // 10, steps, rate / 100)
        optimizer = optax.contrib.muon(schedule, adam_learning_rate=adam, **variant.arguments)
    else:
        optimizer = optax.adamw(schedule, **{"b2": 0.99, **variant.arguments})
    return optax.chain(optimizer, delay_error_feedback()) if variant.corrected else optimizer


def start(variant: Variant, optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Weights, those before the last, the state of the optimizer and that of each replica's exchange."""
    if variant.outer is not None:
        params = jax.tree.map(lambda x: jnp.stack([x] * variant.replicas), params)
        whole = optax.chain(optimizer, _outer(variant))
        return params, (), jax.vmap(whole.init, out_axes=APART)(params), ()
    exchange = () if variant.exchange is None else _exchange(variant).init
    residuals = jax.vmap(exchange, in_axes=None, axis_size=variant.replicas)(params) if exchange else ()
    return params, jax.tree.map(jnp.copy, params) if variant.late else (), optimizer.init(params), residuals


def advance(
    variant: Variant, optimizer: optax.GradientTransformation, gradient: Callable, carry: PyTree, batch: Array
) -> tuple[PyTree, Array]:
    """One step: ``gradient(params, rows)`` gives loss and gradient; the batch is that of all replicas."""
    params, before, state, residuals = carry
    point = before if variant.late else params
    rows = batch.reshape(variant.replicas, -1, *batch.shape[1:])
    if variant.outer is not None:
        values, grads = jax.vmap(gradient)(params, rows)
        update = jax.vmap(optax.chain(optimizer, _outer(variant)).update, (0, APART, 0), (0, APART), axis_name="data")
        updates, state = update(grads, state, params)
        return (optax.apply_updates(params, updates), (), state, ()), values.mean()
    if variant.exchange is None:
        value, grads = gradient(point, batch)
    else:
        values, grads = jax.vmap(gradient, (None, 0))(point, rows)
        averages, residuals = jax.vmap(_exchange(variant).update, axis_name="data")(grads, residuals)
        value, grads = values.mean(), jax.tree.map(lambda x: x[0], averages)
    updates, state = optimizer.update(grads, state, params)
    return (optax.apply_updates(params, updates), params if variant.late else (), state, residuals), value


def _exchange(variant: Variant) -> BlockSparse:
    return block_sparse(None if variant.outer is not None else "data", blocks=BLOCKS, **(variant.exchange or {}))


def _outer(variant: Variant) -> OuterLoop:
    exchange = "dense" if variant.exchange is None else _exchange(variant)
    return outer_loop("data", exchange=exchange, **(variant.outer or {}))


def train(variant: Variant, rate: float, seed: int, size: Size, texts: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
    """Train and test once."""
    model = GPT(size)
    params = model.init(jax.random.key(seed), jnp.zeros((1, size.context), jnp.int32))
    optimizer = make_optimizer(variant, rate, size.steps)

    def value(params: PyTree, text: Array) -> Array:
        return loss(lambda tokens: jnp.asarray(model.apply(params, tokens)), text)

    if variant.stages:
        return train_in_stages(variant, model, params, optimizer, value, rate, seed, texts)
    step = jax.jit(functools.partial(advance, variant, optimizer, jax.value_and_grad(value)), donate_argnums=0)
    sent = dense = 0
    if variant.outer is not None:
        dense = size.steps * sum(part.dense_bytes for part in _outer(variant).traffic(params))
        sent = round(size.steps * _outer(variant).bytes_per_step(params))
    elif variant.exchange is not None:
        traffic = [_exchange(variant).traffic(params, k) for k in range(size.steps)]
        sent, dense = sum(t.bytes for t in traffic), sum(t.dense_bytes for t in traffic)
    carry, rng, curve = start(variant, optimizer, params), np.random.default_rng(seed), []
    begin = time.perf_counter()
    for _ in range(size.steps):
        starts = rng.integers(0, len(texts[0]) - size.context - 1, size.rows)
        carry, told = step(carry, examples(texts[0], starts, size.context))
        curve.append(told)
    seconds, weights = time.perf_counter() - begin, carry[0]
    if variant.outer is not None:
        weights = jax.tree.map(lambda x: x[0], carry[2][1].outer)
    test = test_loss(value, weights, size, texts[1])
    every = max(1, size.steps // 30)
    smooth = np.asarray(curve)[: len(curve) // every * every].reshape(-1, every).mean(1).round(4).tolist()
    bytes_sent = {"sent_bytes": sent, "dense_bytes": dense} if dense else {}
    return {"seed": seed, "rate": rate, "test_loss": test, "curve": smooth, "seconds": round(seconds), **bytes_sent}


def test_loss(value: Callable[[PyTree, Array], Array], params: PyTree, size: Size, text: np.ndarray) -> float:
    """The mean loss of 1,024 examples of a text."""
    starts = np.linspace(0, len(text) - size.context - 2, 1024).astype(int)
    parts = np.split(examples(text, starts, size.context), 16)
    return float(np.mean([jax.jit(value)(params, part) for part in parts]))


def train_in_stages(
    variant: Variant,
    model: GPT,
    params: PyTree,
    optimizer: optax.GradientTransformation,
    value: Callable[[PyTree, Array], Array],
    rate: float,
    seed: int,
    texts: tuple[np.ndarray, np.ndarray],
) -> dict[str, Any]:
    """Train in a pipeline whose stages update after every batch of theirs, which is four micro-batches."""
    size, rng, curve = model.size, np.random.default_rng(seed), []
    updates = next(n for n in (25, 20, 10, 5, 4, 2, 1) if size.steps % n == 0)  # of a call of step
    shape = jax.ShapeDtypeStruct((updates * size.rows, size.context + 1), jnp.int32)
    pipeline = jaxpipe.partition(
        model,
        jax.make_mesh((variant.stages,), ("stage",), devices=jax.devices()[: variant.stages]),
        shape,
        loss=loss,
        optimizer=optimizer,
        num_microbatches=4 * updates,
        schedule=functools.partial(local_accumulation, group=4),
        profile="analytic",
    )
    state, begin = pipeline.init(jax.random.key(seed), variables=params), time.perf_counter()
    for _ in range(size.steps // updates):
        rows = [rng.integers(0, len(texts[0]) - size.context - 1, size.rows) for _ in range(updates)]
        state, metrics = pipeline.step(state, examples(texts[0], np.concatenate(rows), size.context))
        curve.append(round(float(metrics["loss"]), 4))
    seconds, test = time.perf_counter() - begin, test_loss(value, pipeline.parameters(state), size, texts[1])
    return {"seed": seed, "rate": rate, "test_loss": test, "curve": curve, "seconds": round(seconds)}


def losses(result: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each variant, one for each seed, at the rate that is best for the first one."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in result["runs"]:
        runs.setdefault(run["variant"], []).append(run)
    for name, tried in runs.items():
        best = min((run for run in tried if run["seed"] == 0), key=lambda run: run["test_loss"])["rate"]
        runs[name] = [run for run in tried if run["rate"] == best]
    return runs


class Results:
    """The JSON file, written after each run."""

    def __init__(self, path: Path, size: Size):
        """Read what there is; it must be of the same size."""
        self.path, settings = path, {"size": asdict(size)}
        self.data = json.loads(path.read_text()) if path.exists() else {**header(), **settings, "runs": []}
        if {k: self.data[k] for k in settings} != settings:
            sys.exit(f"{path} is of {self.data['size']}, not of {settings['size']}: pass another --out.")

    def find(self, name: str, seed: int, rate: float) -> dict[str, Any] | None:
        """Return a run that was made."""
        keys = {"variant": name, "seed": seed, "rate": rate}
        return next((r for r in self.data["runs"] if keys.items() <= r.items()), None)

    def add(self, run: dict[str, Any]) -> None:
        """Append a run to what the file has by now."""
        self.data = json.loads(self.path.read_text()) if self.path.exists() else self.data
        self.data["runs"].append(run)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")


def main() -> None:
    """Make the runs that the file lacks, seed by seed, until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench_learning.json"))
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=Size.steps)
    parser.add_argument("--rows", type=int, default=Size.rows, help="of a batch, of all replicas together")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument(
        "--sweep", type=float, nargs="*", default=[2e-3, 3e-3, 4e-3], help="AdamW's rates; Muon's: four times"
    )
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)
    size = Size(steps=options.steps, rows=options.rows)
    results, texts, end = Results(options.out, size), library(), time.monotonic() + 60 * options.minutes

    def run(name: str, seed: int, rate: float) -> float:
        result = results.find(name, seed, rate)
        if result is None:
            if time.monotonic() > end:
                sys.exit("The time is over; start it again to go on.")
            result = {"variant": name, **train(VARIANTS[name], rate, seed, size, texts)}
            results.add(result)
            print(f"{name}, seed {seed}, rate {rate}: {result['test_loss']:.4f}, {result['seconds']} s", flush=True)
        return result["test_loss"]

    factors = {"adamw": 1, "muon": 4}
    for seed in range(options.seeds):
        for name in options.variants:
            rates = [factors[VARIANTS[name].optimizer] * rate for rate in options.sweep]
            best = min(rates, key=lambda rate, name=name: run(name, 0, rate))
            run(name, seed, best)


if __name__ == "__main__":
    main()
