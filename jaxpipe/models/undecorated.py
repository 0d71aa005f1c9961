"""``without_encoding``: decorated modules and functions that run as they are written."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax

from jaxpipe.array_types import PyTree


@dataclass(eq=False)
class Undecorated:
    """A trace in which decorated functions run as they are written, as the value of JAX's context in it.

    What such a function calls under ``jit`` (most of ``jax.numpy``) is traced once for a context. So its program is
    traced in the same one later, unless decorated functions are in it: there, these are marked.

    Attributes:
      depth: of decorated functions, each called by another, at present.
      nested: whether one was called by another.
    """

    depth: int = 0
    nested: bool = False

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Run a decorated function in it."""
        self.nested |= self.depth > 0
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


#: The trace that runs here, in which decorated functions run as they are written; None where they are encoded. JAX's
#: tracing caches know of it.
undecorated = jax.make_user_context(default_value=None)

_BY_USERS = Undecorated()


@contextlib.contextmanager
def without_encoding() -> Iterator[None]:
    """Run decorated modules and functions as if they were not decorated."""
    with undecorated(_BY_USERS):
        yield


def unless_disabled(function: Callable[..., PyTree], encoded: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return what runs as ``encoded`` where decorated functions run as such, else as ``function`` is written."""

    @functools.wraps(function)
    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        trace: Undecorated | None = undecorated.value
        if trace is None:
            return encoded(*args, **kwargs)
        with trace.call():
            return function(*args, **kwargs)

    return call
