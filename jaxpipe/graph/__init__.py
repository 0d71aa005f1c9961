"""Traced programs as data, and all that can be told or derived from their operators.

In: a function, traced by JAX.
Out: its operators and tensors in order, their VJPs and costs, the bytes that live at once, scans split into layers.
"""
