"""Bytes of training steps whose shards gather parameters or activations, compiled for devices that are not here.

    JAX_PLATFORMS=cuda,cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m scripts.check_shard_gathers --target H100
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python -m scripts.check_shard_gathers --target v5e

Eight blocks of two matrices, 1,024 to 4,096 and back, with ``gelu`` between them, in a ``jax.shard_map`` over four
devices: parameters in float32, of which each device has a part, products in bfloat16, 16,384 rows. Of each step, plain,
with ``jax.checkpoint`` around each block, decorated as a whole, and decorated within as many bytes as with checkpoints:
bytes of a device, and the products that it runs. Nothing is run.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe.costs.count_products import count_products
from jaxpipe.costs.reserved_bytes import reserved_bytes
from jaxpipe.targets.absent import absent_devices
from jaxpipe.targets.known import target_named
from scripts.measuring import header


WIDTH, BLOCKS, ROWS = 1024, 8, 16384

Block = Callable[[Sequence[jax.Array], jax.Array], jax.Array]


@dataclass(frozen=True)
class Form:
    """A way to divide a step over devices.

    Attributes:
      axes: sizes of the mesh's axes by name.
      up, down: how the two matrices of a block are split.
      rows: how the batch is.
      block: one block, as each shard computes it.
    """

    axes: Mapping[str, int]
    up: P
    down: P
    rows: P
    block: Block


def gathered(x: jax.Array, axis: str, along: int = 0) -> jax.Array:
    """Put the parts of an array together, for a product in bfloat16."""
    return jax.lax.all_gather(x, axis, axis=along, tiled=True).astype(jnp.bfloat16)


def fully_sharded(pair: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Gather all parameters of the block."""
    up, down = (gathered(w, "data") for w in pair)
    return x + jax.nn.gelu(x @ up) @ down


def by_columns(pair: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Gather the block's columns that this shard computes with, and add up over those who have the others."""
    up, down = gathered(pair[0], "data"), gathered(pair[1], "data", 1)
    return x + jax.lax.psum(jax.nn.gelu(x @ up) @ down, "columns")


def in_sequence(pair: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Gather the rows, of which each shard normalizes a part."""
    mean = x.astype(jnp.float32).mean(-1, keepdims=True)
    scale = jax.lax.rsqrt(x.astype(jnp.float32).var(-1, keepdims=True) + 1e-6)
    rows = gathered(((x - mean) * scale).astype(jnp.bfloat16), "columns")
    up, down = (w.astype(jnp.bfloat16) for w in pair)
    return x + jax.lax.psum_scatter(jax.nn.gelu(rows @ up) @ down, "columns", scatter_dimension=0, tiled=True)


FORMS = {
    "fully sharded": Form({"data": 4}, P("data"), P("data"), P("data"), fully_sharded),
    "fully sharded, and by columns": Form(
        {"data": 2, "columns": 2}, P("data", "columns"), P("columns", "data"), P("data"), by_columns
    ),
    "by columns, and in sequence": Form({"columns": 4}, P(None, "columns"), P("columns"), P("columns"), in_sequence),
}


def step_of(form: Form, mesh: Mesh, block: Block, enc: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a step of gradient descent."""

    def shard(pairs: Sequence[Sequence[jax.Array]], x: jax.Array) -> jax.Array:
        for pair in pairs:
            x = block(pair, x)
        split = tuple(name for name in form.axes if name in form.rows)
        return jax.lax.pmean(jnp.square(x.astype(jnp.float32)).mean(), split)

    loss = enc(jax.shard_map(shard, mesh=mesh, in_specs=([[form.up, form.down]] * BLOCKS, form.rows), out_specs=P()))

    def step(pairs: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(pairs, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, pairs, gradients), value

    return step


def rows_of(name: str, form: Form, devices: Sequence[Any]) -> list[dict[str, Any]]:
    """Compile the variants of a form."""
    mesh = Mesh(np.array(devices).reshape(tuple(form.axes.values())), tuple(form.axes))

    def shape(sizes: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    up, down = (
        shape(sizes, jnp.float32, spec)
        for sizes, spec in (((WIDTH, 4 * WIDTH), form.up), ((4 * WIDTH, WIDTH), form.down))
    )
    arguments = [[up, down]] * BLOCKS, shape((ROWS, WIDTH), jnp.bfloat16, form.rows)
    variants = {
        "plain": step_of(form, mesh, form.block, lambda loss: loss),
        "checkpoint": step_of(form, mesh, jax.checkpoint(form.block), lambda loss: loss),
        "decorated": step_of(form, mesh, form.block, jaxpipe.memory_encoded),
    }
    rows: list[dict[str, Any]] = []

    def add(variant: str, traced: Any, compiled: Any) -> int:
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        products = count_products(traced.jaxpr.jaxpr)[0]
        rows.append({"form": name, "variant": variant, "temporaries": temporaries, "products": products})
        print(json.dumps(rows[-1]), flush=True)
        return reserved_bytes(compiled)

    reserved = {}
    for variant, step in variants.items():
        traced = jax.jit(step, donate_argnums=0).trace(*arguments)
        reserved[variant] = add(variant, traced, traced.lower().compile())
    budgeted = jaxpipe.jit(variants["decorated"], memory=reserved["checkpoint"], donate_argnums=0)
    try:
        add("budget", budgeted.trace(*arguments), budgeted.lower(*arguments).compile())
    except jaxpipe.MemoryBudgetError as error:
        rows.append({"form": name, "variant": "budget", "missing": error.smallest - reserved["checkpoint"]})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Compile, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="H100")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    devices = absent_devices(target_named(options.target), 4)
    rows = [row for name, form in FORMS.items() for row in rows_of(name, form, devices)]
    if options.out:
        options.out.write_text(json.dumps({**header(), "target": options.target, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
