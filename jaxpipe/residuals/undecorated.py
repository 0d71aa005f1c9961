"""``without_encoding``: decorated modules and functions that run as they are written."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import jax


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


def disabled() -> AbstractContextManager[object] | None:
    """Return None where decorated functions run as such, else a context to run one in as it is written."""
    trace: Undecorated | None = undecorated.value
    return None if trace is None else trace.call()
