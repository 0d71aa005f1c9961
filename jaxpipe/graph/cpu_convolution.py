"""Convolutions in the dimension order that XLA:CPU runs fast.

JAX writes the gradients of a convolution as convolutions with permuted dimension numbers. XLA:CPU brings those to
batch-spatial-feature order by itself, but not inside loops and conditionals, where they run about 100 times slower.
The same convolution between explicit transposes gives the same bits at full speed everywhere.
"""

from jax import lax
from jax.extend.core import ClosedJaxpr

from jaxpipe import _compat
from jaxpipe.array_types import Array, Atom
from jaxpipe.target import platform


def canonical(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a traced program with every convolution in batch-spatial-feature order, or unchanged unless for CPUs."""
    jaxpr, consts = _compat.open_jaxpr(closed)
    convolutions = [e for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    numbers = [e.params["dimension_numbers"] for e in convolutions]
    if platform() != "cpu" or all(n == _in_order(len(n.lhs_spec)) for n in numbers):
        return closed

    def run(*arguments: Array) -> list[Array]:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

        def read(atom: Atom) -> Array:
            return atom.val if _compat.is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "conv_general_dilated":
                results = [_convolve(*(read(a) for a in eqn.invars), **eqn.params)]
            else:
                values = [read(a) for a in eqn.invars if not _compat.is_literal(a)]
                results = _compat.evaluate_equation(eqn, values)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(a) for a in jaxpr.outvars]

    return _compat.trace_without_scope(run, *(v.aval for v in jaxpr.invars))


def _in_order(rank: int) -> lax.ConvDimensionNumbers:
    """Return the dimension numbers of batch-spatial-feature order."""
    maps = (0, rank - 1, *range(1, rank - 1))
    return lax.ConvDimensionNumbers(maps, (rank - 1, rank - 2, *range(rank - 2)), maps)


def _convolve(lhs: Array, rhs: Array, *, dimension_numbers: lax.ConvDimensionNumbers, **params: object) -> Array:
    images, kernels, outputs = dimension_numbers
    numbers = _in_order(len(images))
    result = lax.conv_general_dilated_p.bind(
        lax.transpose(lhs, (images[0], *images[2:], images[1])),
        lax.transpose(rhs, (*kernels[2:], kernels[1], kernels[0])),
        dimension_numbers=numbers,
        **params,
    )
    return lax.transpose(result, [numbers.out_spec[outputs.index(d)] for d in range(len(images))])
