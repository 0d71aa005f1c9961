"""Products of traced derivatives in the form that suits the target.

JAX writes the gradients of a convolution as convolutions with permuted dimension numbers. XLA:CPU brings those to
batch-spatial-feature order by itself, but not inside loops and conditionals, where they run about 100 times slower.
The same convolution between explicit transposes gives the same bits at full speed everywhere.

XLA:GPU splits a long contraction with a small result among the processors (split-K), and pads it to a multiple of the
parts, in copies of both operands. The gradient of 2,048 hidden states from the logits of 50,257 words needs 552 MiB for
that. In two products, the first of 50,176 words, it needs 12. The sum is in another order than XLA's own parts.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxpipe import _compat
from jaxpipe.array_types import AnyJaxpr, Array, DType, Equation
from jaxpipe.graph.evaluate_otherwise import evaluate_otherwise, with_programs
from jaxpipe.graph.graph import without_literals
from jaxpipe.graph.primitives import CHECKPOINTS, JITS
from jaxpipe.targets.building import current


#: Of an H100: processors, and the side of a tile of a result, of which each makes one at a time (XLA's estimate).
PROCESSORS, TILE = 132, 212

#: A contraction is cut at a multiple of this, which XLA need not pad.
ALIGNMENT = 128

#: Bytes of which each part of a split contraction has a multiple.
PART_BYTES = 16

#: Bytes of padded copies that are worth another product.
WORTH = 2**25

#: Loops and checkpoints, which run a program on the arrays of their stage.
WITH_PROGRAM = {"scan", *JITS, *CHECKPOINTS}

#: What evaluates an equation in another form, on all its operands.
Form = Callable[..., Sequence[Array]]


def for_target(closed: AnyJaxpr, may_cut: bool) -> AnyJaxpr:
    """Return a traced program with its products in the form that suits the platform it is built for.

    Contractions are cut if they may be: of sharded arrays a part may be on another device.
    """
    jaxpr, _ = _compat.open_jaxpr(closed)
    forms = {id(eqn): form for eqn in jaxpr.eqns if (form := _form(eqn, may_cut)) is not None}
    if not forms:
        return closed

    def apply(eqn: Equation, operands: Sequence[Array]) -> Sequence[Array]:
        return forms[id(eqn)](*operands) if id(eqn) in forms else _as_it_is(eqn, *operands)

    def run(*arguments: Array) -> list[Array]:
        return evaluate_otherwise(closed, arguments, apply)

    return _compat.trace_without_scope(run, *(v.aval for v in jaxpr.invars))


def _form(eqn: Equation, may_cut: bool) -> Form | None:
    """Return another form of an equation; None if it stays as it is."""
    if current().plain_convolutions:
        if eqn.primitive.name != "conv_general_dilated":
            return None
        numbers = eqn.params["dimension_numbers"]
        in_order = numbers == _in_order(len(numbers.lhs_spec))
        return None if in_order else functools.partial(_convolve, **eqn.params)
    if not may_cut:
        return None
    if eqn.primitive.name == "dot_general" and current().pads_contractions and _pads_much(eqn):
        return functools.partial(_in_two, dtype=eqn.outvars[0].aval.dtype, **eqn.params)
    return _with_inner_form(eqn)


def _with_inner_form(eqn: Equation) -> Form | None:
    """Return a loop or a checkpoint with another form of its program, if that has one."""
    if eqn.primitive.name not in WITH_PROGRAM:
        return None
    inner = eqn.params["jaxpr"]
    has_constants = bool(_compat.open_jaxpr(inner)[1])
    other = inner if has_constants else with_programs(inner, functools.partial(for_target, may_cut=True))
    if other is inner:
        return None
    return functools.partial(_as_it_is, eqn.replace(params={**eqn.params, "jaxpr": other}))


def _as_it_is(eqn: Equation, *operands: Array) -> Sequence[Array]:
    return _compat.evaluate_equation(eqn, without_literals(eqn, operands))


def _in_order(rank: int) -> lax.ConvDimensionNumbers:
    """Return the dimension numbers of batch-spatial-feature order."""
    maps = (0, rank - 1, *range(1, rank - 1))
    return lax.ConvDimensionNumbers(maps, (rank - 1, rank - 2, *range(rank - 2)), maps)


def _convolve(
    lhs: Array, rhs: Array, *, dimension_numbers: lax.ConvDimensionNumbers, **params: object
) -> Sequence[Array]:
    images, kernels, outputs = dimension_numbers
    numbers = _in_order(len(images))
    result = lax.conv_general_dilated_p.bind(
        lax.transpose(lhs, (images[0], *images[2:], images[1])),
        lax.transpose(rhs, (*kernels[2:], kernels[1], kernels[0])),
        dimension_numbers=numbers,
        **params,
    )
    return [lax.transpose(result, [numbers.out_spec[outputs.index(d)] for d in range(len(images))])]


def _pads_much(eqn: Equation) -> bool:
    """Return whether XLA would pad copies of a product's operands, of many bytes, to split its contraction."""
    (contracted, batch), operands = eqn.params["dimension_numbers"], [atom.aval for atom in eqn.invars]
    inexact = all(jnp.issubdtype(atom.aval.dtype, jnp.inexact) for atom in (*eqn.invars, *eqn.outvars))
    if not inexact or [len(axes) for axes in (*contracted, *batch)] != [1, 1, 0, 0]:
        return False
    count = operands[0].shape[contracted[0][0]]
    rows, columns = (math.prod(x.shape) // max(1, count) for x in operands)
    tiles = max(1, -(-rows // TILE) * -(-columns // TILE))
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in operands)
    if 2 * tiles > PROCESSORS or count <= ALIGNMENT or size < WORTH:
        return False
    most_parts = 2 ** int(math.log2(PROCESSORS // tiles))  # XLA takes a power of two
    return count % min(ALIGNMENT, most_parts * PART_BYTES // operands[0].dtype.itemsize) > 0


def _in_two(lhs: Array, rhs: Array, dtype: DType, **params: Any) -> Sequence[Array]:
    """Multiply the aligned part of the contracted axis, and the rest; add them up in float32 at least."""
    ((a,), (b,)), _ = params["dimension_numbers"]
    end = lhs.shape[a] // ALIGNMENT * ALIGNMENT
    params["preferred_element_type"] = jnp.promote_types(dtype, jnp.float32)
    halves = [
        lax.dot_general_p.bind(
            lax.slice_in_dim(lhs, start, stop, axis=a), lax.slice_in_dim(rhs, start, stop, axis=b), **params
        )
        for start, stop in ((0, end), (end, lhs.shape[a]))
    ]
    return [lax.convert_element_type(lax.add(*halves), dtype)]
