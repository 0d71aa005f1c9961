"""Values of context variables inside ``with``."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TypeVar


T = TypeVar("T")


@contextlib.contextmanager
def holding(variable: ContextVar[Any], value: T) -> Iterator[T]:
    """Let a context variable hold a value inside ``with``, then what it held before; works as a decorator too.

    Example:
      >>> depth = ContextVar("depth", default=0)
      >>> with holding(depth, 1):
      ...     print(depth.get())
      1
      >>> depth.get()
      0
    """
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
