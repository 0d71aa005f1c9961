"""Kinds of devices as data: what plans and programs for a CPU, a GPU or a TPU depend on.

A kind is one ``Target``; ``register`` makes one of your own known.
"""

from jaxpipe.targets.known import register as register
from jaxpipe.targets.known import target_named as target_named
from jaxpipe.targets.rates import Rates as Rates
from jaxpipe.targets.target import Target as Target
