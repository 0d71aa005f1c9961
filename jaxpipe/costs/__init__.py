"""Costs of operators and links: measured on devices, or estimated from their rates.

In: a traced program, a device or its rates; the links of a cluster.
Out: a ``Profile`` with seconds and bytes of every operator, a ``Network`` with the bandwidth of every link.
"""

from jaxpipe.costs import topology as topology
from jaxpipe.targets.rates import Rates as Rates
