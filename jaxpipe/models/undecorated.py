"""``without_encoding``: decorated modules and functions that run as they are written."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import jax

from jaxpipe.array_types import PyTree


#: True where decorated functions run as they are written. JAX's tracing caches know of it.
undecorated = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def without_encoding() -> Iterator[None]:
    """Run decorated modules and functions as if they were not decorated."""
    with undecorated(True):
        yield


def unless_disabled(function: Callable[..., PyTree], encoded: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return what runs as ``encoded`` where decorated functions run as such, else as ``function`` is written."""

    @functools.wraps(function)
    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return (function if undecorated.value else encoded)(*args, **kwargs)

    return call
