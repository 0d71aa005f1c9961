"""One's own training step, with one's own loop: within a memory budget, and explained.

In: a function that a user would compile with ``jax.jit`` or ``nnx.jit``, and its arguments or their shapes.
Out: the same function within a budget (``budgeted_jit``); its memory by cause, and measures that were compiled
(``explain``).
"""
