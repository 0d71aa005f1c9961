"""Devices that are not here, to compile for. Nothing can be run, so there are no times, and kernels are not tuned."""

import os
from collections.abc import Sequence

from jax.experimental import topologies

from jaxpipe.array_types import Device
from jaxpipe.targets.target import Target


def absent_devices(target: Target, count: int) -> Sequence[Device]:
    """Return at least so many devices of a target in one machine or slice, which need not be here.

    Needs the compiler that ``pip install 'jaxpipe[cuda]'`` or ``'jaxpipe[tpu]'`` brings, and ``target.variables``
    before JAX starts; raises whatever a backend raises that does not start.
    """
    assert target.topology is not None
    for name, value in target.variables.items():  # of those that its compiler reads when it is loaded
        os.environ.setdefault(name, value)
    return topologies.get_topology_desc(**target.topology(count)).devices
