"""The rate of convolutions by their number of channels: what ``jaxpipe.graph.op_cost.product_work`` rests on.

python -m scripts.bench_convolutions
"""

import functools

import jax

from scripts.measuring import alternate, keep_freed_memory


SHAPES = ((3, 1, 16), (3, 3, 8), (3, 3, 16), (3, 3, 32), (3, 3, 64), (3, 8, 16), (3, 16, 16), (3, 64, 64))


def main() -> None:
    """Print the time of a pixel and the rate; of the best of many runs, as other programs only add to the time."""
    keep_freed_memory()
    convolve = jax.jit(
        lambda x, kernel: jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    )
    steps, products = {}, {}
    for size, channels, filters in SHAPES:
        name = f"{size}x{size}, {channels:2} -> {filters}"
        kernel = jax.random.normal(jax.random.key(0), (size, size, channels, filters))
        x = jax.random.normal(jax.random.key(1), (16, 32, 32, channels))
        steps[name] = functools.partial(convolve, x, kernel)
        products[name] = kernel.size
    for name, seconds in alternate(steps, rounds=300, seconds=20).items():
        nanoseconds = 1e9 * min(seconds) / (16 * 32 * 32)
        print(f"{name}: {nanoseconds:5.0f} ns for a pixel, {products[name] / nanoseconds:5.1f} multiplications in a ns")


if __name__ == "__main__":
    main()
