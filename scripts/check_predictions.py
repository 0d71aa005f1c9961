"""Bytes that a plan tells before and after it is compiled, beside those that XLA reserves, for five models.

    JAX_PLATFORMS=cuda,cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m scripts.check_predictions

Compiled for an H100 that is not here: one stage, one micro-batch, plain SGD. No model of the list is in the tests of
estimates. Of each model, without a budget and with one of a share of the bytes that XLA then reserves:

  before     ``plan.predicted_bytes``, from the operators alone
  shown      what ``print(plan)`` tells: the bytes of the compiled step, since ``partition`` compiles for GPUs
  compiled   ``memory_report().compiled_bytes``
"""

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxpipe
from examples import models
from jaxpipe.targets.absent import absent_devices
from jaxpipe.targets.known import target_named
from scripts.encoding_cases import TRAIN, Problem, language, linen, normal
from scripts.measuring import header
from scripts.one_stage import one_stage


MIB = 2**20
SHARE = 0.8


class NormalizedConvs(nn.Module):
    """Eight convolutions, each with LayerNorm and gelu."""

    width: int = 128

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits of images."""
        for _ in range(8):
            x = nn.gelu(nn.LayerNorm()(nn.Conv(self.width, (3, 3))(x)))
        return nn.Dense(10)(x.mean(axis=(1, 2)))


class GroupNormUNet(nn.Module):
    """A U-Net of four levels with group normalization and silu."""

    width: int = 64

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits of every pixel."""
        skips = []
        for level in range(4):
            x = self.block(x, self.width << level)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2)) if level < 3 else x
        for level in (2, 1, 0):
            x = nn.ConvTranspose(self.width << level, (2, 2), (2, 2))(x)
            x = self.block(jnp.concatenate([skips[level], x], axis=-1), self.width << level)
        return nn.Conv(4, (1, 1))(x)

    def block(self, x: jax.Array, width: int) -> jax.Array:
        """Two convolutions."""
        for _ in range(2):
            x = nn.silu(nn.GroupNorm(num_groups=16)(nn.Conv(width, (3, 3))(x)))
        return x


MODELS: dict[str, Callable[[], Problem]] = {
    "convolutions, LayerNorm": lambda: linen(NormalizedConvs, normal(64, 24, 24, 3), {}),
    "U-Net, GroupNorm": lambda: linen(GroupNormUNet, normal(8, 64, 64, 3), {}),
    "Llama": lambda: language(models.Llama, 8, 512, 32000, num_layers=4),
    "BERT": lambda: language(models.Bert, 8, 512, 30522, num_layers=4),
    "MLP-Mixer": lambda: linen(models.Mixer, normal(32, 224, 224, 3), TRAIN, num_layers=4),
}


def bytes_of(problem: Problem, device: Any, memory: int | None) -> dict[str, Any]:
    """Plan and compile a step; returns what is said of it and what XLA reserves."""
    try:
        pipeline = one_stage(problem, device, memory)
    except jaxpipe.MemoryBudgetError as error:
        return {"budget": memory, "refused": error.smallest}
    plan, report = pipeline.plan, pipeline.memory_report()
    return {
        "budget": memory,
        "before": plan.predicted_bytes,
        "shown": plan.predicted_bytes if plan.compiled_bytes is None else plan.compiled_bytes,
        "compiled": max(report.compiled_bytes),
        "temporaries": max(report.temporary_bytes),
    }


def text_of(name: str, row: dict[str, Any]) -> str:
    """A line to read."""
    label = "without a budget" if row["budget"] is None else f"within {row['budget'] / MIB:.1f} MiB"
    if "refused" in row:
        return f"{name}, {label}: refused, smallest {row['refused'] / MIB:.1f} MiB"
    before, shown = (row[key] / row["compiled"] - 1 for key in ("before", "shown"))
    return f"{name}, {label}: {row['compiled'] / MIB:.1f} MiB compiled, {before:+.1%} before it is, {shown:+.1%} shown"


def main() -> None:
    """Compile, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="NAME", default=list(MODELS))
    parser.add_argument("--share", type=float, default=SHARE, help=f"the budget (default {SHARE})")
    parser.add_argument("--out", type=Path, default=Path("out/predictions.json"))
    options = parser.parse_args()
    device = absent_devices(target_named("H100"), 1)[0]
    results: dict[str, list[dict[str, Any]]] = {}
    for name in options.models:
        with jax.default_device(jax.devices("cpu")[0]):
            problem = MODELS[name]()
        default = bytes_of(problem, device, None)
        memory = int(options.share * default["compiled"])
        results[name] = [default, bytes_of(problem, device, memory)]
        for row in results[name]:
            print(text_of(name, row), flush=True)
        result = {**header(), "device": device.device_kind, "share": options.share, "models": results}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        jax.clear_caches()
        gc.collect()


if __name__ == "__main__":
    main()
