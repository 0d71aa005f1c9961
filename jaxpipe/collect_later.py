"""Python's garbage collector, which waits while a step is planned.

Traced programs are millions of objects, hardly any of them in cycles, and the collector would look through all of them
again and again. What is not in a cycle is freed at once in any case.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """Let the garbage collector wait; works as a decorator too. Where it is off already, it stays off."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
