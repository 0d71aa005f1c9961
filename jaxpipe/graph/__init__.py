"""Traced programs as data, and all that can be told or derived from their operators.

In: a function, traced by JAX.
Out: its operators and tensors in order, their VJPs and costs, the bytes that live at once, scans split into layers.
"""

from jaxpipe.graph.derivative_rule import DerivativeRule as DerivativeRule
from jaxpipe.graph.derivative_rule import register_rule as register_rule
from jaxpipe.graph.derivative_rule import unregister_rule as unregister_rule
