"""Kinds of work: an operator is a view, cheap arithmetic, or something worth keeping the result of."""

import math

from jaxpipe import _compat
from jaxpipe.array_types import Equation
from jaxpipe.graph.graph import Operator, read_graph
from jaxpipe.graph.primitives import ARITHMETIC, LOOKUPS, PRODUCTS, SHARD_GATHERS, TRANSCENDENTAL, VIEWS


#: What several read is written if to compute it again reads more than this many times its own bytes.
COMPUTE_AGAIN = 1.5


def weight(op: Operator) -> int | None:
    """Relative work for one element: 0 for a view, 1 for arithmetic, 4 for a transcendental function.

    None for everything else: products, reductions, gathers, random numbers, control flow, opaque derivatives.
    """
    if op.has_effects:
        return None
    if op.name in VIEWS or op.equation is None:
        return 0
    if op.name in ARITHMETIC:
        return 1
    if op.name in TRANSCENDENTAL:
        return 4
    if op.name == "custom_jvp_call":
        weights = [weight(part) for part in read_graph(op.params["call_jaxpr"], boundaries=False).operators]
        return None if None in weights else sum(w for w in weights if w is not None)
    return None


def rerun_work(op: Operator) -> int | None:
    """Work to run an operator again, in elements read or written; None for what is never run again by default.

    Besides views and arithmetic these are lookups, small windows, and products with so short a contraction that they
    cost no more than the arithmetic around them: the convolution of an image with three channels, attention scores
    from queries and keys of one head. ``PRODUCTS_PER_ELEMENT`` multiplications count as one
    element. Random numbers are never drawn again: a dropout mask takes 1 bit for each element, to draw it from its key
    takes about a hundred operations.

    What shards gather is gathered again, parameters (S. Rajbhandari et al., "ZeRO: Memory optimizations toward training
    trillion parameter models", SC 2020) and activations (V. Korthikanti et al., "Reducing activation recomputation in
    large transformer models", MLSys 2023): each stores its own part.
    """
    cost = weight(op)
    if op.equation is None or cost == 0:
        return 0
    arrays = [math.prod(a.aval.shape) for a in (*op.equation.invars, *op.equation.outvars) if not _compat.is_literal(a)]
    if cost is not None:
        return cost * max(arrays, default=0)
    written = sum(math.prod(v.aval.shape) for v in op.equation.outvars)
    if op.name in LOOKUPS | SHARD_GATHERS:
        return (_LOOKUP if op.name in LOOKUPS else COLLECTIVE) * written
    if op.name == "reduce_window_sum":
        return math.prod(op.params["window_dimensions"]) * written
    return sum(arrays) + multiplications(op) // PRODUCTS_PER_ELEMENT if is_product(op) else None


def is_product(op: Operator) -> bool:
    """Return whether an operator is a matrix product or a convolution."""
    return op.name in PRODUCTS


def multiplications(op: Operator) -> int:
    """Return how many numbers a matrix product or a convolution multiplies."""
    return math.prod(op.equation.outvars[0].aval.shape) * contraction(op.equation)


def product_work(op: Operator) -> int:
    """The time that a matrix product or a convolution takes, in multiplications of a wide one.

    A convolution with few channels does not get down to the time of its multiplications: from 3 channels to 16 it takes
    as long as from 16 to 16 (``scripts/bench_convolutions.py``).
    """
    if op.name != "conv_general_dilated":
        return multiplications(op)
    (result,) = op.equation.outvars
    channels = result.aval.shape[op.params["dimension_numbers"].out_spec[1]]
    pixels = math.prod(result.aval.shape) // max(1, channels)
    return max(multiplications(op), _PIXEL * pixels)


def gpu_product_work(op: Operator) -> int:
    """The time that a product takes on a GPU, in multiplications: those it does, or what it reads and writes.

    A GPU multiplies and adds some 230 pairs of numbers in the time in which it moves one to or from memory: an H100
    those of float32 on its tensor cores, and twice as many of half the bytes. Attention's products are far below that.
    """
    arrays = [math.prod(atom.aval.shape) for atom in (*op.equation.invars, *op.equation.outvars)]
    return max(multiplications(op), GPU_PRODUCTS_PER_ELEMENT * sum(arrays))


#: See ``gpu_product_work``; ``jaxpipe.targets`` has the numbers.
GPU_PRODUCTS_PER_ELEMENT = 230

#: A convolution takes at least the time of this many multiplications for each pixel that it makes.
_PIXEL = 2000

#: Pairs multiplied and added in the time in which one element is moved to or from memory. A careful guess, on which the
#: step times of ``scripts/bench_encoding.py`` do not suffer; a processor's peak rates would allow more.
PRODUCTS_PER_ELEMENT = 4

#: Elements moved in the time in which one is looked up; a guess, too.
_LOOKUP = 4

#: Elements moved to or from memory in the time in which one comes from another shard: 7 on an H100 (450 GB/s by NVLink
#: of 3,350), 8 on a v5e (two of its four links, of 50 GB/s each, of 819).
COLLECTIVE = 8


def contraction(equation: Equation) -> int:
    """Return how many products are added up for each element of a matrix product or a convolution."""
    params, factor = equation.params, equation.invars[1].aval.shape
    if equation.primitive.name == "dot_general":
        (_, contracted), _ = params["dimension_numbers"]
        return math.prod(factor[d] for d in contracted)
    return math.prod(factor) // max(1, factor[params["dimension_numbers"].rhs_spec[0]])
