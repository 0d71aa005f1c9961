"""Temporaries and products of training steps that store less, compiled ahead of time for a GPU or a TPU.

    JAX_PLATFORMS=cuda,cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m scripts.check_target_encoding
    ... python -m scripts.check_target_encoding --models UNet --variants fast --out out/some.json
    JAX_PLATFORMS=cpu python -m scripts.check_target_encoding --target v5e --models GPT-2 UNet --shares 0.6

The models, steps and variants of ``scripts.bench_encoding``, and the same at sizes that keep a device busy; see
``jaxpipe.targets.absent`` for the requirements. A product is a matrix product or a convolution of the traced step: what
a variant has more than plain, it computes again. ``--shares`` adds ``jaxpipe.jit`` of the step with a decorated loss
within shares of the plain step's bytes; a budget that is refused is null. ``--bfloat16`` casts parameters, inputs and
state. Rows are added to those that are in ``--out``, and figures to those of their rows. Nothing runs: the workspace of
library kernels is known on a GPU only, and a TPU's temporaries are those that XLA does not keep on the chip.
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
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpipe
from jaxpipe.array_types import PyTree
from jaxpipe.costs.count_products import count_products
from jaxpipe.costs.reserved_bytes import reserved_bytes
from jaxpipe.targets.absent import absent_devices
from jaxpipe.targets.known import known_targets, target_named
from scripts.bench_encoding import BLOCKS, PLAIN, SMALLEST, VARIANTS, Variant, build, identity, summary
from scripts.encoding_cases import CASES, GPU_CASES, WITH_BLOCKS, Case, Problem
from scripts.measuring import header


FIGURES = ("temporaries", "products", "flops")
DEFAULT = [name for name in VARIANTS if name not in ("encoded", "smallest", "barrier")]


def compiled(problem: Problem, variant: Variant, density: jaxpipe.Density | None, device: Any) -> dict[str, Any]:
    """Return the figures of a step, built for the mesh of its arguments."""
    return summary(build(replace(problem, arguments=on_device(problem.arguments, device)), variant, density))


def on_device(arguments: PyTree, device: Any) -> PyTree:
    """Return the shapes of arguments on a device, which need not be there."""
    here = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arguments)


def in_bfloat16(problem: Problem) -> Problem:
    """Return a problem whose floating arguments are bfloat16."""

    def cast(x: jax.Array) -> jax.Array:
        return x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x

    return replace(problem, arguments=jax.tree.map(cast, problem.arguments))


def within(problem: Problem, device: Any, share: float) -> dict[str, Any] | None:
    """Return the figures of the step within a share of the plain step's bytes; None if that is refused."""
    loss = problem.loss(identity, identity, jaxpipe.memory_encoded)
    arguments = on_device(problem.arguments, device)
    plain = jax.jit(jax.value_and_grad(PLAIN.loss(problem), has_aux=True)).lower(*arguments).compile()
    step = jaxpipe.jit(jax.value_and_grad(loss, has_aux=True), memory=int(share * reserved_bytes(plain)))
    try:
        lowered = step.lower(*arguments)
    except jaxpipe.MemoryBudgetError:
        return None
    products, flops = count_products(lowered.jaxpr)
    size = lowered.compile().memory_analysis().temp_size_in_bytes
    return {"temporaries": size, "products": products, "flops": flops}


def measure(case: Case, names: Sequence[str], shares: Sequence[float], device: Any, bfloat16: bool) -> dict[str, Any]:
    """Measure one model; its densities on the CPU."""
    if not case.name.startswith(WITH_BLOCKS):
        names = [name for name in names if name not in BLOCKS]
    with jax.default_device(jax.devices("cpu")[0]):
        problem = in_bfloat16(case.make(case.batch)) if bfloat16 else case.make(case.batch)
        density = None
        if any(VARIANTS[name].measured for name in names):
            density = jaxpipe.measure_density(SMALLEST.loss(problem), *problem.arguments)
    variants = {"plain": PLAIN, **{name: VARIANTS[name] for name in names}}
    programs: dict[str, Any] = {}
    for name, variant in variants.items():
        programs[name] = compiled(problem, variant, density, device)
    programs |= {f"{share:.0%}": within(problem, device, share) for share in shares}
    return {
        "name": case.name + " bfloat16" * bfloat16,
        "batch": case.batch,
        **{key: {name: row and row[key] for name, row in programs.items()} for key in FIGURES},
    }


def mean_ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the geometric mean of plain over variant, over the models that have the variant."""
    names = dict.fromkeys(name for row in rows for name in row["temporaries"])
    ratios = {
        name: [row["temporaries"]["plain"] / row["temporaries"][name] for row in rows if row["temporaries"].get(name)]
        for name in names
    }
    return {name: statistics.geometric_mean(values) for name, values in ratios.items() if values}


def main() -> None:
    """Compile, print and save."""
    by_name = {case.name: case for case in CASES + GPU_CASES}
    targets = [target.name for target in known_targets() if target.topology is not None]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=targets, default="H100")
    parser.add_argument("--models", nargs="+", choices=by_name, default=list(by_name), metavar="NAME")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=DEFAULT, help="besides plain")
    parser.add_argument("--shares", nargs="+", type=float, default=[])
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    out = arguments.out or Path(f"out/encoding-{arguments.target.lower()}.json")
    device = absent_devices(target_named(arguments.target), 1)[0]
    known = {row["name"]: row for row in json.loads(out.read_text())["rows"]} if out.exists() else {}
    for name in arguments.models:
        row = measure(by_name[name], arguments.variants, arguments.shares, device, arguments.bfloat16)
        before = known.get(row["name"], {})
        row |= {key: before.get(key, {}) | row[key] for key in FIGURES}
        known[row["name"]] = row
        sizes, products = row["temporaries"], row["products"]
        text = {key: value and f"{value / 2**20:.1f} MiB, {products[key]} products" for key, value in sizes.items()}
        print(row["name"], text, file=sys.stderr, flush=True)
        rows = list(known.values())
        means = mean_ratios([row for row in rows if row["name"] in {case.name for case in CASES}] or rows)
        result = {**header(), "device": device.device_kind, "plain_over_variant": means, "rows": rows}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
        jax.clear_caches()
        gc.collect()
    print("plain over variant, geometric mean:", {key: f"{mean:.2f}" for key, mean in means.items()})


if __name__ == "__main__":
    main()
