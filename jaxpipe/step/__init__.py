"""A training step that is the user's own, with its own loop: within a budget, and explained.

In: a function with decorated functions in it, and its arguments, as arrays or shapes.
Out: the same function compiled within a budget (``budgeted_jit``).
"""
