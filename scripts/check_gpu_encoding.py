"""Temporaries and products of training steps that store less, compiled ahead of time for an H100.

    JAX_PLATFORMS=cuda,cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m scripts.check_gpu_encoding
    ... python -m scripts.check_gpu_encoding --models UNet --variants fast --out out/some.json

The models, steps and variants of ``scripts.bench_encoding``, and the same at sizes that keep a GPU busy; see
``jaxpipe.targets.absent`` for the requirements. A product is a matrix product or a convolution of the traced step: what
a variant has more than plain, it computes again. Nothing runs: the workspace of library kernels is known on a GPU only.
"""

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpipe
from jaxpipe.array_types import PyTree
from jaxpipe.targets.absent import absent_devices
from jaxpipe.targets.known import target_named
from scripts.bench_encoding import BLOCKS, PLAIN, SMALLEST, VARIANTS, Variant, build, summary
from scripts.encoding_cases import CASES, GPU_CASES, WITH_BLOCKS, Case, Problem
from scripts.measuring import header


DEFAULT = [name for name in VARIANTS if name not in ("encoded", "smallest", "barrier")]


def compiled(problem: Problem, variant: Variant, density: jaxpipe.Density | None, device: Any) -> dict[str, Any]:
    """Return the figures of a step, built for the mesh of its arguments."""
    return summary(build(replace(problem, arguments=on_device(problem.arguments, device)), variant, density))


def on_device(arguments: PyTree, device: Any) -> PyTree:
    """Return the shapes of arguments on a device, which need not be there."""
    here = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arguments)


def measure(case: Case, names: Sequence[str], device: Any) -> dict[str, Any]:
    """Measure one model; its densities on the CPU."""
    if not case.name.startswith(WITH_BLOCKS):
        names = [name for name in names if name not in BLOCKS]
    with jax.default_device(jax.devices("cpu")[0]):
        problem = case.make(case.batch)
        density = None
        if any(VARIANTS[name].measured for name in names):
            density = jaxpipe.measure_density(SMALLEST.loss(problem), *problem.arguments)
    variants = {"plain": PLAIN, **{name: VARIANTS[name] for name in names}}
    programs = {name: compiled(problem, variant, density, device) for name, variant in variants.items()}
    return {
        "name": case.name,
        "batch": case.batch,
        **{key: {name: row[key] for name, row in programs.items()} for key in ("temporaries", "products", "flops")},
    }


def mean_ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the geometric mean of plain over variant, over the models that have the variant."""
    names = dict.fromkeys(name for row in rows for name in row["temporaries"])
    ratios = {
        name: [row["temporaries"]["plain"] / row["temporaries"][name] for row in rows if name in row["temporaries"]]
        for name in names
    }
    return {name: statistics.geometric_mean(values) for name, values in ratios.items()}


def main() -> None:
    """Compile, print and save."""
    by_name = {case.name: case for case in CASES + GPU_CASES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=by_name, default=list(by_name), metavar="NAME")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=DEFAULT, help="besides plain")
    parser.add_argument("--out", type=Path, default=Path("out/encoding-h100.json"))
    arguments = parser.parse_args()
    device = absent_devices(target_named("H100"), 1)[0]
    rows = []
    for name in arguments.models:
        rows.append(measure(by_name[name], arguments.variants, device))
        sizes, products = rows[-1]["temporaries"], rows[-1]["products"]
        text = {key: f"{value / 2**20:.1f} MiB, {products[key]} products" for key, value in sizes.items()}
        print(name, text, file=sys.stderr, flush=True)
        means = mean_ratios([row for row in rows if row["name"] in {case.name for case in CASES}] or rows)
        result = {**header(), "device": device.device_kind, "plain_over_variant": means, "rows": rows}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        jax.clear_caches()
        gc.collect()
    print("plain over variant, geometric mean:", {key: f"{mean:.2f}" for key, mean in means.items()})


if __name__ == "__main__":
    main()
