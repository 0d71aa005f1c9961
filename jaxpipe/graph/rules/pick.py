"""Picking one element of each row (``jnp.take_along_axis`` of labels): its derivative is a comparison.

JAX writes zeros over the whole map and then scatters one cotangent into each row: on a GPU two kernels, and an array
that nothing can be fused with. Comparing every position of a row with the row's index gives the same elements, and
fuses with whatever reads it: the gradient of a cross entropy is then written over the logits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.array_types import Array, Equation
from jaxpipe.graph.derivative_rule import DerivativeRule
from jaxpipe.graph.graph import Operator
from jaxpipe.targets.building import current


def applies(op: Operator) -> bool:
    """Return whether ``op`` picks at most one element of each row: a gather with a batch of rows and one index each.

    JAX treats dimensions of size 1, a batch of one text say, not as rows but as windows.
    """
    if op.name != "gather" or len(op.inputs) != 2:
        return False
    operand, indices = (atom.aval for atom in op.equation.invars)
    numbers = op.params["dimension_numbers"]
    rest = [n for d, n in enumerate(indices.shape) if d not in numbers.start_indices_batching_dims]
    taken = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = [n for d, n in enumerate(operand.shape) if d not in taken]
    return (
        op.params["mode"] in (lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
        and len(numbers.start_index_map) == 1
        and numbers.collapsed_slice_dims == numbers.start_index_map
        and all(n == 1 for n in (*rest, *windows, *op.params["slice_sizes"]))
    )


def run(op: Operator, operand: Array, indices: Array) -> Array:
    """Run a pick on some of its rows; its VJP compares positions."""

    @jax.custom_vjp
    def picked(operand: Array, indices: Array) -> Array:
        return op.evaluate(operand, indices)[0]

    shape = operand.shape
    picked.defvjp(
        lambda operand, indices: (picked(operand, indices), indices),
        lambda indices, cotangent: (_comparison(op.equation, shape)(indices, cotangent), None),
    )
    return picked(operand, indices)


def _comparison(equation: Equation, shape: tuple[int, ...]) -> Callable[[Array, Array], Array]:
    """Return the backward program of a pick from an operand of some shape, given indices and a cotangent."""
    numbers = equation.params["dimension_numbers"]
    (axis,) = numbers.start_index_map
    # Dimensions of the indices and of the result that stand for the operand's rows, in the operand's order.
    pairs = sorted(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    rows = tuple(d for d, _ in pairs)
    order = [d for _, d in pairs]

    def spread(x: Array) -> Array:
        x = lax.transpose(x, [*order, *(d for d in range(x.ndim) if d not in order)])
        x = lax.reshape(x, [shape[d] for d in rows])
        return lax.broadcast_in_dim(x, shape, rows)

    def backward(index: Array, cotangent: Array) -> Array:
        # Positions of a long axis need more than the 8 or 16 bits in which indices may come.
        index = lax.convert_element_type(index, index.dtype if index.dtype.itemsize >= 4 else jnp.int32)
        position = lax.broadcasted_iota(index.dtype, shape, axis)
        # Scattering adds to a zero, which never gives -0.0.
        cotangents = spread(lax.squeeze(cotangent, numbers.offset_dims)) + jnp.zeros((), cotangent.dtype)
        return lax.select(position == spread(index), cotangents, jnp.zeros(shape, cotangent.dtype))

    return backward


def _backward(equation: Equation, kept: Sequence[Array], cotangents: Sequence[Any]) -> list[Array | None]:
    return [_comparison(equation, equation.invars[0].aval.shape)(*kept, *cotangents), None]


#: On GPUs the indices. XLA:CPU adds up the rows of what is fused with a comparison in another order.
RULE = DerivativeRule(
    lambda equation, operands, results: [operands[1]], _backward, lambda op: applies(op) and not current().runs_early
)
