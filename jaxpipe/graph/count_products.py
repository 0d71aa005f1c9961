"""The matrix products and convolutions of a traced program: what is computed again shows in them."""

from jax.extend.core import Jaxpr, jaxprs_in_params

from jaxpipe.graph.op_cost import PRODUCTS


def count_products(jaxpr: Jaxpr) -> int:
    """Return how many matrix products and convolutions a traced program runs; those of a scan count for each turn.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> count_products(jax.make_jaxpr(lambda x: x @ x @ x)(jnp.ones((2, 2))).jaxpr)
      2
    """
    count = 0
    for equation in jaxpr.eqns:
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        count += equation.primitive.name in PRODUCTS
        count += turns * sum(map(count_products, jaxprs_in_params(equation.params)))
    return count
