"""The bytes that a compiled program needs on each device, as XLA states them."""

import jax


def reserved_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the bytes of arguments, results and temporaries of a compiled program, less what is donated.

    Example:
      >>> import jax.numpy as jnp
      >>> compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(jnp.ones(256)).compile()
      >>> reserved_bytes(compiled)
      1024
    """
    sizes = compiled.memory_analysis()
    assert sizes is not None
    needed = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    return needed - sizes.alias_size_in_bytes
