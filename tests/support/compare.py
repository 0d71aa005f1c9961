"""Comparisons of trees of arrays: bit for bit, and by global L2."""

import jax
import numpy as np

from jaxpipe.array_types import ArrayLike, PyTree


#: How far results of two programs may be apart that XLA fuses in different ways: what is decorated, cut into stages or
#: computed again. Sums of reductions (BatchNorm, softmax, gelu) are then contracted or ordered differently, which moves
#: the last bit of single sums. One unit in the last place of float32 is 1.2e-7; the networks have up to 20 layers.
FUSION = 1e-6


def arrays(tree: PyTree) -> list[ArrayLike]:
    """Return the leaves without random streams, which a pipeline does not keep."""
    return [x for x in jax.tree.leaves(tree) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)]


def raw(x) -> np.ndarray:
    """The array's bits; random keys by their key data."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    if x.dtype.kind == "c":
        x = np.stack([x.real, x.imag])
    return x.view(f"u{x.dtype.itemsize}") if x.dtype.kind in "fV" else x


def assert_same_bits(actual, expected) -> None:
    """Equal in structure, shape, dtype and every bit, signs of zero and NaN included."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), (_, b) in zip(*map(jax.tree_util.tree_leaves_with_path, (actual, expected)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), jax.tree_util.keystr(path)
        differing = int((raw(a) != raw(b)).sum())
        assert differing == 0, f"{differing} of {a.size} elements differ at {jax.tree_util.keystr(path)}"


def relative_l2(actual, expected) -> float:
    """``|actual - expected| / |expected|`` over all leaves together, in float64."""
    leaves = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
    pairs = [(wide(a), wide(b)) for a, b in leaves]
    error = np.sqrt(sum(np.sum(np.abs(a - b) ** 2) for a, b in pairs))
    return float(error / np.sqrt(sum(np.sum(np.abs(b) ** 2) for _, b in pairs)))


def wide(x) -> np.ndarray:
    """In double precision."""
    x = np.asarray(x)
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
