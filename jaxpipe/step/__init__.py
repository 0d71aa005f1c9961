"""One's own training step: what its memory is used for, and what would help.

In: a function that a user compiles with ``jax.jit`` or ``nnx.jit``, its arguments or their shapes, a device.
Out: an ``Explanation``: XLA's buffers at the peak by cause, and measures that were compiled.
"""
