"""Plain steps: what they return, and the bytes that XLA states for them."""

import jax
import jax.numpy as jnp

import jaxpipe


def reserved(compiled):
    """The bytes that XLA states, with what is donated once."""
    sizes = compiled.memory_analysis()
    kept = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return kept + sizes.temp_size_in_bytes


def plainly(step, *args, **options):
    """The plain step's results and the bytes that it takes."""
    with jaxpipe.without_encoding():
        jitted = jax.jit(step, **options)
        compiled = jitted.lower(*args).compile()
        return jitted(*jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, args)), reserved(compiled)
