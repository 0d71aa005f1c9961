"""Measure how many times as long as tracing it takes to plan a step within a budget.

    python -m scripts.bench_step_planning --out docs/results/step-planning-cpu-jax0.12.json
    JAX_PLATFORMS=cuda,cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m scripts.bench_step_planning --h100

Processor seconds of ``jaxpipe.jit(step, memory=).lower(...)`` without those of XLA's compilations, against those of one
``jax.jit(step).trace(...)`` of the plain step. Each row is a fresh process with an empty cache on disk, where JAX has
traced and compiled another step before; widths are small, as they do not matter here. Planning traces functions for the
first time in its own contexts, so that ``ratio`` is to JAX's first trace; ``trace_again_seconds`` are those of a later
one, which finds the functions of JAX itself traced. ``lower_seconds`` are those in which programs are written down for
XLA. ``--h100`` compiles for a GPU that is not here (``jaxpipe.targets.absent``).
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jaxpipe
from examples import models as zoo
from jaxpipe.array_types import PyTree
from jaxpipe.targets.absent import absent_devices
from jaxpipe.targets.known import target_named
from scripts.measuring import header


#: Shares of the plain step's bytes that are budgets.
SHARES = (0.8, 0.6, 0.45)

#: How often the plain step is traced: once for the first time, and then again, of which the least counts.
TRACES = 3


class EncoderDecoder(nn.Module):
    """A translation model: pre-normalized encoder blocks, and decoder blocks that also attend to them."""

    layers: int = 6
    width: int = 64

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        """Return logits of the next tokens."""
        embed = nn.Embed(512, self.width)
        memory = embed(tokens)
        for _ in range(self.layers):
            memory = EncoderBlock()(memory)
        x = embed(tokens)
        for _ in range(self.layers):
            x = DecoderBlock()(x, nn.LayerNorm()(memory), not train)
        return embed.attend(nn.LayerNorm()(x))


class EncoderBlock(nn.Module):
    """Self-attention and two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return what the next block gets."""
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4)(y, y)
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the encoder, two dense layers and dropout."""

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, deterministic: bool) -> jax.Array:
        """Return what the next block gets."""
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4)(y, y, mask=nn.make_causal_mask(x[..., 0]))
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), memory)
        y = nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))
        return x + nn.Dropout(0.1, deterministic=deterministic)(y)


def language(model: nn.Module) -> tuple[nn.Module, jax.Array]:
    """Return a model and tokens for it."""
    return model, jnp.zeros((8, 64), jnp.int32)


def images(model: nn.Module, size: int) -> tuple[nn.Module, jax.Array]:
    """Return a model and images for it."""
    return model, jnp.zeros((16, size, size, 3))


MODELS: dict[str, Callable[[], tuple[nn.Module, jax.Array]]] = {
    "GPT-2": lambda: language(zoo.GPT2(vocab=512, width=64, num_heads=4, max_length=64)),
    "encoder-decoder": lambda: language(EncoderDecoder()),
    "ResNet50": lambda: images(zoo.ResNet50(), 32),
    "UNet": lambda: images(zoo.UNet(width=16), 64),
    "Mixer": lambda: images(zoo.Mixer(), 32),
    "MLP": lambda: language(Dense()),
}


class Dense(nn.Module):
    """A small model, which is planned before anything is measured."""

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        """Return logits."""
        x = nn.Embed(512, 32)(tokens)
        for _ in range(3):
            x = nn.Dropout(0.1, deterministic=not train)(nn.gelu(nn.Dense(32)(x)))
        return nn.Dense(512)(x)


def step_of(name: str, device: Any, wrap: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[PyTree, ...]]:
    """Return a training step as Flax's examples write it, and shapes of its arguments on a device."""
    model, batch = MODELS[name]()
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), batch, train=False))
    optimizer = optax.adamw(1e-3)

    def start(variables: Any) -> TrainState:
        return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optimizer)

    state = jax.eval_shape(start, variables)
    statistics = {name: value for name, value in variables.items() if name != "params"}
    arguments = state, statistics, batch, jax.eval_shape(lambda: jax.random.key(0))
    place = jax.sharding.SingleDeviceSharding(device)

    def step(state: TrainState, statistics: PyTree, batch: jax.Array, key: jax.Array) -> tuple[TrainState, PyTree]:
        @wrap
        def loss(params: PyTree) -> tuple[jax.Array, PyTree]:
            variables = {"params": params, **statistics}
            options = {"train": True, "rngs": {"dropout": key}, "mutable": list(statistics)}
            logits, new = state.apply_fn(variables, batch, **options)
            return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0]), new

        gradients, new = jax.grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients), new

    return step, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)


@contextlib.contextmanager
def timed(owner: Any, method: str, seconds: list[float]) -> Iterator[None]:
    """Note the processor seconds of the calls of a method meanwhile."""
    original = getattr(owner, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        try:
            return original(*args, **kwargs)
        finally:
            seconds.append(time.process_time() - begin)

    setattr(owner, method, call)
    try:
        yield
    finally:
        setattr(owner, method, original)


def trace_seconds(name: str, device: Any) -> tuple[float, float]:
    """Return the processor seconds in which JAX traces the plain step for the first time, and again."""
    times = []
    for _ in range(TRACES):
        step, arguments = step_of(name, device, lambda loss: loss)
        begin = time.process_time()
        jax.jit(step, donate_argnums=0).trace(*arguments)
        times.append(time.process_time() - begin)
    return times[0], min(times[1:])


def plain_bytes(name: str, device: Any) -> int:
    """Return the bytes that XLA reserves for the plain step."""
    step, arguments = step_of(name, device, lambda loss: loss)
    sizes: Any = jax.jit(step, donate_argnums=0).lower(*arguments).compile().memory_analysis()
    kept = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return kept + sizes.temp_size_in_bytes


def plan(name: str, device: Any, memory: int) -> dict[str, Any]:
    """Return what a step within a budget is, and the processor seconds until that was known."""
    step, arguments = step_of(name, device, jaxpipe.memory_encoded)
    compiling, lowering = list[float](), list[float]()
    with (
        timed(jax.stages.Lowered, "compile", compiling),
        timed(jax.stages.Traced, "lower", lowering),
    ):
        begin = time.process_time()
        try:
            outcome: Any = jaxpipe.jit(step, memory=memory, donate_argnums=0).lower(*arguments).plan
        except jaxpipe.MemoryBudgetError as error:
            outcome = error
        seconds = time.process_time() - begin
    row = {
        "plan_seconds": round(seconds - sum(compiling), 3),
        "lower_seconds": round(sum(lowering), 3),
        "compile_seconds": round(sum(compiling), 3),
        "lowerings": len(lowering),
        "compilations": len(compiling),
    }
    if isinstance(outcome, jaxpipe.MemoryBudgetError):
        return row | {"refused": outcome.smallest}
    return row | {
        "storage": outcome.storage,
        "needed_bytes": outcome.needed_bytes,
        "products": outcome.products,
        "plain_products": outcome.plain_products,
    }


def measure(name: str, share: float, on_h100: bool) -> dict[str, Any]:
    """Return the row of one model, in this process."""
    device = absent_devices(target_named("H100"), 1)[0] if on_h100 else jax.devices("cpu")[0]
    plan("MLP", device, int(0.8 * plain_bytes("MLP", device)))
    (traced, again), plain = trace_seconds(name, device), plain_bytes(name, device)
    row = plan(name, device, int(share * plain))
    ratio = row["plan_seconds"] / traced
    head = {"model": name, "share": share, "plain_bytes": plain, "trace_seconds": round(traced, 3)}
    return {**head, "trace_again_seconds": round(again, 3), **row, "ratio": round(ratio, 2)}


def in_a_process(name: str, share: float, on_h100: bool) -> dict[str, Any]:
    """Return a row that was measured in a fresh process."""
    command = [
        sys.executable,
        "-m",
        "scripts.bench_step_planning",
        "--row",
        json.dumps([name, share, on_h100]),
    ]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "JAXPIPE_CACHE_DIR": f"{folder}/profiles"}
        output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=[name for name in MODELS if name != "MLP"])
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="budgets, of the plain step's bytes")
    parser.add_argument("--h100", action="store_true", help="compile for an H100 that is not here")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.row:
        print(json.dumps(measure(*json.loads(options.row))))
        return []
    rows = []
    for name in options.models:
        for share in options.shares:
            row = in_a_process(name, share, options.h100)
            rows.append(row)
            again = row.get("products", 0) - row.get("plain_products", 0)
            print(
                f"{name:16s} {share:4.0%}: traced in {row['trace_seconds']:5.2f} s, planned in "
                f"{row['plan_seconds']:6.2f} s ({row['lower_seconds']:5.2f} lowering), "
                f"{row['ratio']:.1f} times as long; "
                f"{row['compilations']} compilations, {row.get('storage', 'refused')}, {again} run again",
                flush=True,
            )
    if options.out:
        device = "H100 (absent)" if options.h100 else jax.devices("cpu")[0].device_kind
        options.out.write_text(json.dumps({**header(), "device": device, "rows": rows}, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
