"""Collectives and bytes of stages that are sharded over further mesh axes, compiled for H100s that are not here.

    JAX_PLATFORMS=cuda,cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m scripts.check_sharded_stages

A Llama-like decoder of 12 layers x 768 and 32,000 words on 8 devices, as 2 stages x 2 replicas x model 2, with and
without optimizer state split over the replicas. Its kernels are split by ``PlanOptions(shardings=...)``, as the model
has no annotations. Nothing is run. Of each program: its devices, its collectives and their bytes on a device. Of each
stage: predicted and compiled bytes of a device.
"""

import argparse
import collections
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxpipe
from examples import models
from jaxpipe.runtime.mpmd.device_bytes import device_peaks
from jaxpipe.runtime.mpmd.mpmd_runtime import MpmdRuntime
from jaxpipe.targets.absent import absent_devices
from jaxpipe.targets.known import target_named
from scripts.measuring import header


SHAPE = {"stage": 2, "data": 2, "model": 2}
ROWS, LENGTH, MICROBATCHES = 4, 512, 8

#: Heads and hidden units by column, what reads them by row, the vocabulary by column.
SHARDINGS = {
    **{f"*/{name}/kernel": P(None, "model") for name in ("q", "k", "v", "gate", "up")},
    **{f"*/{name}/kernel": P("model") for name in ("out", "down")},
    "Dense_0/kernel": P(None, "model"),
}

#: The line of a program's text that has the result of a collective, and each array in it.
_COLLECTIVE = re.compile(
    r"= (?P<result>\(?\w+\[.*?) "
    r"(?P<name>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-done)?\("
)
_ARRAY = re.compile(r"(?P<type>\w+)\[(?P<shape>[\d,]*)\]")

#: Bytes of an element, of types that do not take 4.
_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "u64": 8}


def pipeline_of(devices: Any, zero: int) -> jaxpipe.Pipeline:
    """Plan the decoder."""
    batch = jax.ShapeDtypeStruct((ROWS * MICROBATCHES * SHAPE["data"], LENGTH), jnp.int32)

    def loss(model: Any, tokens: Any) -> Any:
        logits = model(tokens, train=True)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    grid = np.asarray(devices[: math.prod(SHAPE.values())]).reshape(tuple(SHAPE.values()))
    return jaxpipe.partition(
        models.Llama(),
        jax.sharding.Mesh(grid, tuple(SHAPE)),
        batch,
        loss=loss,
        optimizer=optax.adam(1e-3),
        num_microbatches=MICROBATCHES,
        schedule="1f1b",
        profile="analytic",
        options=jaxpipe.PlanOptions(shardings=SHARDINGS, zero=zero, compile=False),
    )


def collectives(text: str) -> dict[str, dict[str, int]]:
    """Return the count and the bytes of each kind of collective in a compiled program's text."""
    kinds: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"count": 0, "bytes": 0})
    for line in text.splitlines():
        match = _COLLECTIVE.search(line)
        if match:
            kinds[match["name"]]["count"] += 1
            for array in _ARRAY.finditer(match["result"]):
                size = math.prod(int(n) for n in array["shape"].split(",") if n)
                kinds[match["name"]]["bytes"] += _WIDTHS.get(array["type"], 4) * size
    return dict(kinds)


def measure(pipeline: jaxpipe.Pipeline) -> dict[str, Any]:
    """Compile the programs of a pipeline; what they exchange, and the bytes of a device of each stage."""
    runtime = MpmdRuntime(pipeline._runtime.planned)
    dispatch = runtime.compiled_step
    peaks = device_peaks(dispatch, runtime.devices)
    programs = {}
    for (task, place), run in dispatch.calls.items():
        if place.replica in (-1, 0) and isinstance(run, jax.stages.Compiled):
            needs = dispatch.needs[task, place]
            programs[needs.label] = {
                "devices": len(runtime.devices.of(place)),
                "temporaries": needs.temporary_bytes,
                "collectives": collectives(run.as_text()),
            }
    free = [value for value in dispatch.graph.values if value.form.is_free]
    stash = [(str(x.aval.shape), str(x.form.spec)) for x in free if x.aval.size > 2**16]
    split = sum("model" in spec for _, spec in stash)
    stages = [
        {"predicted": sum(memory.values()), "compiled": peaks[row[0]].total, "split": peaks[row[0]].components}
        for memory, row in zip(pipeline.plan.stage_memory, runtime.devices.rows, strict=True)
    ]
    return {"stages": stages, "programs": programs, "stash": {"arrays": len(stash), "split": split}}


def main() -> None:
    """Compile, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/sharded-stages.json"))
    options = parser.parse_args()
    devices = absent_devices(target_named("H100"), math.prod(SHAPE.values()))
    results = {}
    for zero in (0, 1):
        pipeline = pipeline_of(devices, zero)
        print(pipeline.plan, flush=True)
        results[f"zero={zero}"] = result = measure(pipeline)
        for label, program in result["programs"].items():
            shown = ", ".join(
                f"{n['count']} {name} ({n['bytes'] / 2**20:.1f} MiB)" for name, n in program["collectives"].items()
            )
            print(f"{label} on {program['devices']} devices: {shown or 'no collective'}")
        for s, row in enumerate(result["stages"]):
            off = row["predicted"] / row["compiled"] - 1
            print(f"stage {s}: {row['compiled'] / 2**20:.0f} MiB, predicted {off:+.1%}: {row['split']}")
        print(f"stash: {result['stash']}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    saved = {**header(), "device": devices[0].device_kind, "mesh": SHAPE, "llama": results}
    options.out.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
