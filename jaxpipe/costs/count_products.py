"""Matrix products and convolutions of a traced program: what rematerialization runs again, whatever the device."""

from jax.extend.core import jaxprs_in_params

from jaxpipe import _compat
from jaxpipe.array_types import AnyJaxpr
from jaxpipe.costs.kernels import product_flops
from jaxpipe.graph.primitives import PRODUCTS


def count_products(program: AnyJaxpr) -> tuple[int, float]:
    """Return how many matrix products and convolutions a traced program runs, and their floating-point operations.

    Those of a loop count once for each turn.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> count_products(jax.make_jaxpr(lambda x: x @ x @ x)(jnp.ones((4, 4))))
      (2, 256.0)
    """
    count, flops = 0, 0.0
    for equation in _compat.open_jaxpr(program)[0].eqns:
        if equation.primitive.name in PRODUCTS:
            count, flops = count + 1, flops + product_flops(equation)
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in map(count_products, jaxprs_in_params(equation.params)):
            count, flops = count + turns * inner[0], flops + turns * inner[1]
    return count, flops
