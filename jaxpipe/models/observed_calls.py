"""Calls of Flax that a micro-batch gives another meaning: ``sow`` begins empty, and every random stream is there.

Flax has no place to be told so: its methods are replaced while a user's function is traced, and do what they always did
for other threads.
"""

import contextlib
import contextvars
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import flax.linen as nn
from flax import nnx

from jaxpipe.array_types import PyTree


@dataclass
class Observed:
    """The calls of one trace.

    Attributes:
      sown: of Linen, collection and name of every value that ``sow`` has collected.
      has_streams: whether ``has_rng`` is true for every stream, as it would be if ``rngs=`` named all of them.
      begun: of NNX, modules and names that have been sown to.
    """

    sown: set[tuple[str, str]] = field(default_factory=set)
    has_streams: bool = True
    begun: dict[tuple[int, str], nnx.Module] = field(default_factory=dict)


_observed: contextvars.ContextVar[Observed | None] = contextvars.ContextVar("observed", default=None)
_lock = threading.Lock()
_users = 0

_sow, _has_rng, _nnx_sow = nn.Module.sow, nn.Module.has_rng, nnx.Module.sow


@functools.wraps(_sow)
def _observed_sow(self: nn.Module, col: str, name: str, *args: PyTree, **kwargs: PyTree) -> bool:
    observed = _observed.get()
    if observed is not None:
        observed.sown.add((col, name))
    return _sow(self, col, name, *args, **kwargs)


@functools.wraps(_has_rng)
def _observed_has_rng(self: nn.Module, name: str) -> bool:
    observed = _observed.get()
    # A stream that was not given is made of "params", as make_rng does.
    others = observed is not None and observed.has_streams and self.scope is not None and self.scope.has_rng("params")
    return others or _has_rng(self, name)


@functools.wraps(_nnx_sow)
def _observed_nnx_sow(self: nnx.Module, variable_type: PyTree, name: str, *args: PyTree, **kwargs: PyTree) -> bool:
    observed = _observed.get()
    if observed is None:
        return _nnx_sow(self, variable_type, name, *args, **kwargs)
    if (id(self), name) not in observed.begun:
        observed.begun[id(self), name] = self  # kept, so that no other module gets its number
        if isinstance(getattr(self, name, None), nnx.Variable):
            delattr(self, name)
    with warnings.catch_warnings():  # the deprecation of sow outside of nnx.capture would be told of this line
        warnings.simplefilter("ignore", DeprecationWarning)
        return _nnx_sow(self, variable_type, name, *args, **kwargs)


_REPLACED: list[tuple[type, str, Callable[..., PyTree], Callable[..., PyTree]]] = [
    (nn.Module, "sow", _observed_sow, _sow),
    (nn.Module, "has_rng", _observed_has_rng, _has_rng),
    (nnx.Module, "sow", _observed_nnx_sow, _nnx_sow),
]


@contextlib.contextmanager
def observed_calls(has_streams: bool = True) -> Iterator[Observed]:
    """Observe the calls of Flax in a context."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            for cls, name, replacement, _ in _REPLACED:
                setattr(cls, name, replacement)
    observed = Observed(has_streams=has_streams)
    token = _observed.set(observed)
    try:
        yield observed
    finally:
        _observed.reset(token)
        with _lock:
            _users -= 1
            if not _users:
                for cls, name, _, original in _REPLACED:
                    setattr(cls, name, original)
