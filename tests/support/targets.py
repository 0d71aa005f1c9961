"""Targets for tests."""

import contextlib
from dataclasses import replace

from jaxpipe.targets.cpu import CPU
from jaxpipe.targets.known import register


@contextlib.contextmanager
def planning_as_for_gpus():
    """Plan for CPUs as if XLA ran programs there in the order in which it does on GPUs."""
    register(replace(CPU, order="joined", runs_early=False))
    try:
        yield
    finally:
        register(CPU)
