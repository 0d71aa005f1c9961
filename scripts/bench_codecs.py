"""Measure how fast a device encodes and decodes what is stored for a backward pass, and what it attains at best.

    python -m scripts.bench_codecs --out out/codecs.json

Gigabytes are those that a kernel has to read and write at least, each operand and each result once. ``x + 1`` shows
what the device's memory gives at best.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxpipe.array_types import PyTree
from jaxpipe.graph.rules.max_pool import Windows, find_maxima, position_bits, scatter_to_maxima
from jaxpipe.residuals.codecs import CSR, Bitmap, bits
from jaxpipe.residuals.codecs.sparse import SparseCodec
from scripts.measuring import header


#: A feature map of 205 MiB in float32.
SHAPE = (32, 112, 112, 134)
REPEATS = 10

#: Of the map's elements that are not zero, with room for so many.
DENSITY = 0.25

#: A function and its operands.
Kernel = tuple[Callable[..., PyTree], Sequence[jax.Array]]

#: What was measured of a kernel, or its error.
Row = Mapping[str, float | str]


def mask_kernels(x: jax.Array, cotangent: jax.Array) -> dict[str, Kernel]:
    """Return kernels of masks: a bit for each positive element, and the cotangent where it is set."""
    packed = jax.jit(lambda x: bits.pack(x > 0, 1))(x)

    def decode(packed: jax.Array, cotangent: jax.Array) -> jax.Array:
        mask = bits.unpack(packed, cotangent.shape, 1, jnp.bool_)
        return jnp.where(mask, cotangent, jnp.zeros((), cotangent.dtype))

    return {"pack mask": (lambda x: bits.pack(x > 0, 1), [x]), "unpack mask, select": (decode, [packed, cotangent])}


def pool_kernels(x: jax.Array, window: int, stride: int) -> dict[str, Kernel]:
    """Return kernels of pools: maxima of windows with packed positions, and cotangents sent back to these."""
    no_padding, ones = ((0, 0),) * 4, (1, 1, 1, 1)
    windows = Windows((1, window, window, 1), (1, stride, stride, 1), no_padding, ones, ones)
    width = position_bits(windows.shape)

    def encode(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        maximum, position, _ = find_maxima(x, windows)
        return maximum, bits.pack(position, width)

    def decode(packed: jax.Array, cotangent: jax.Array) -> jax.Array:
        position = bits.unpack(packed, cotangent.shape, width, jnp.uint8)
        return scatter_to_maxima(cotangent, position, x.shape, windows)

    maximum, packed = jax.jit(encode)(x)
    name = f"{window}x{window}/{stride}"
    return {f"max-pool {name} with positions": (encode, [x]), f"its gradient {name}": (decode, [packed, maximum])}


def sparse_kernels(x: jax.Array) -> dict[str, Kernel]:
    """Return kernels of sparse formats: bitmap and CSR of a map, and back."""
    capacity = int(DENSITY * x.size)
    kernels: dict[str, Kernel] = {}
    for name, codec in (("bitmap", Bitmap(capacity)), ("CSR", CSR(capacity))):

        def decode(*parts: jax.Array, codec: SparseCodec = codec) -> jax.Array:
            return codec.decode(parts, jax.ShapeDtypeStruct(x.shape, x.dtype))

        kernels |= {f"{name} encode": (codec.encode, [x]), f"{name} decode": (decode, list(jax.jit(codec.encode)(x)))}
    return kernels


def time_kernel(function: Callable[..., PyTree], operands: Sequence[jax.Array], repeats: int) -> Row:
    """Return the median seconds of a kernel, and the bytes that it moves at least."""
    compiled = jax.jit(function).lower(*operands).compile()
    results = jax.block_until_ready(compiled(*operands))
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*operands))
        seconds.append(time.perf_counter() - begin)
    moved = sum(a.nbytes for a in jax.tree.leaves((list(operands), results)))
    middle = statistics.median(seconds)
    return {"seconds": middle, "bytes": moved, "gigabytes_per_second": moved / middle / 1e9}


def measure(
    shape: Sequence[int] = SHAPE,
    repeats: int = REPEATS,
    dtypes: Sequence[jax.typing.DTypeLike] = (jnp.float32, jnp.bfloat16),
) -> dict[str, Row]:
    """Measure all kernels, by name and type of the map; one that fails has its error."""
    rows: dict[str, Row] = {}
    for dtype in dtypes:
        x = jax.random.normal(jax.random.key(0), shape, dtype)
        limit = float(jax.scipy.stats.norm.ppf(1 - 0.9 * DENSITY))
        sparse = jnp.where(x > limit, x, jnp.zeros((), dtype))
        kernels: dict[str, Kernel] = {"x + 1": (lambda x: x + 1, [x])}
        kernels |= mask_kernels(x, x) | pool_kernels(x, 2, 2) | pool_kernels(x, 3, 2)
        kernels |= sparse_kernels(sparse)
        for name, (function, operands) in kernels.items():
            try:
                row = time_kernel(function, operands, repeats)
            except jax.errors.JaxRuntimeError as error:
                row = {"error": str(error)}
            rows[f"{name}, {jnp.dtype(dtype).name}"] = row
    return rows


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=4, default=SHAPE)
    parser.add_argument("--out", type=Path, default=Path("out/codecs.json"))
    options = parser.parse_args()
    rows = measure(options.shape)
    for name, row in rows.items():
        print(f"{name}: {row['error'] if 'error' in row else format(row['gigabytes_per_second'], '.1f') + ' GB/s'}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {**header(), "elements": math.prod(options.shape), "kernels": rows}
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
