"""Calls of Flax that a micro-batch gives another meaning, as ``sow``, whose values it drops, or that it cannot follow.

Flax has no hook for them: its functions are replaced while a user's function is traced, and do what they always did for
other threads.
"""

import contextlib
import contextvars
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import flax.linen as nn
from flax import nnx
from flax.core import lift

from jaxpipe.array_types import PyTree, PyTreeDef
from jaxpipe.context_values import holding
from jaxpipe.models.variable_trees import Path


#: Arguments of a call: their structure; of arrays shape and type, of numbers and texts themselves, of others the class.
Arguments: TypeAlias = tuple[PyTreeDef, tuple[object, ...]]


@dataclass
class Observed:
    """Facts about the calls of some traces.

    Attributes:
      sown: of Linen, collection and path of every value that ``sow`` or ``perturb`` has collected.
      split: of Linen, the streams beside "params" that a lifted transformation names, to split them or not.
      sown_variables: of NNX, type and name of every variable that ``sow`` has made or changed.
      assumed: of Linen, the arguments of each call, if it is taken to return what its initialization returns.
      writes_parameters: of NNX, whether a parameter was given a value.
      has_streams: whether ``has_rng`` is true for every stream, as it would be if ``rngs=`` named all of them.
      merged: of NNX, a function of each tree that ``merge`` makes of a graph and its state; it gives what is returned.
    """

    sown: set[Path] = field(default_factory=set)
    split: set[str] = field(default_factory=set)
    sown_variables: set[tuple[type[nnx.Variable], str]] = field(default_factory=set)
    assumed: tuple[Arguments, ...] = field(default=(), compare=False)
    writes_parameters: bool = field(default=False, compare=False)
    has_streams: bool = field(default=True, compare=False)
    merged: Callable[[PyTree], PyTree] = field(default=lambda tree: tree, compare=False)

    def copy(self) -> "Observed":
        """Return the same facts, but for what is assumed, to which others may be added."""
        return Observed(set(self.sown), set(self.split), set(self.sown_variables))


#: A function of Flax.
_Flax: TypeAlias = Callable[..., Any]

_here: contextvars.ContextVar[Observed | None] = contextvars.ContextVar("here", default=None)
_lock = threading.Lock()
_users = 0

#: Functions of Flax by owner and name, each with what stands in its place while any thread observes calls.
_replaced: list[tuple[object, str, _Flax, _Flax]] = []


def _replaces(owner: object, name: str) -> Callable[[_Flax], _Flax]:
    """Let a function run in place of one of Flax where calls are observed; it gets that one and the facts first."""
    original = getattr(owner, name)

    def decorate(observer: _Flax) -> _Flax:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            observed = _here.get()
            return original(*args, **kwargs) if observed is None else observer(original, observed, *args, **kwargs)

        _replaced.append((owner, name, original, replacement))
        return observer

    return decorate


@_replaces(nn.Module, "sow")
def _sow(sow: _Flax, observed: Observed, self: nn.Module, col: str, name: str, *args: Any, **kwargs: Any) -> bool:
    if self.scope is not None:
        observed.sown.add((col, *self.scope.path, name))
    return sow(self, col, name, *args, **kwargs)


@_replaces(nn.Module, "perturb")
def _perturb(
    perturb: _Flax, observed: Observed, self: nn.Module, name: str, value: PyTree, collection: str = "perturbations"
) -> PyTree:
    # Zeros whose gradient is that of a value inside: nothing that a step keeps.
    if self.scope is not None:
        observed.sown.add((collection, *self.scope.path, name))
    return perturb(self, name, value, collection)


@_replaces(nn.Module, "has_rng")
def _has_rng(has_rng: _Flax, observed: Observed, self: nn.Module, name: str) -> bool:
    # A stream that was not given is made of "params", as make_rng does.
    others = observed.has_streams and self.scope is not None and self.scope.has_rng("params")
    return others or has_rng(self, name)


@_replaces(lift, "pack")
def _pack(pack: _Flax, observed: Observed, fn: Any, ins: Any, outs: Any, streams: Any, *args: Any, **kw: Any) -> _Flax:
    lists = [(x,) if isinstance(x, str) else x for x in streams if isinstance(x, str | list | tuple | set | frozenset)]
    observed.split.update(name for names in lists for name in names if name != "params")
    return pack(fn, ins, outs, streams, *args, **kw)


@_replaces(nnx.Module, "sow")
def _nnx_sow(sow: _Flax, observed: Observed, self: Any, kind: Any, name: str, *args: Any, **kwargs: Any) -> bool:
    with warnings.catch_warnings():  # the deprecation of sow outside of nnx.capture would be told of this line
        warnings.simplefilter("ignore", DeprecationWarning)
        stored = sow(self, kind, name, *args, **kwargs)
    variable = getattr(self, name, None)
    if isinstance(variable, nnx.Variable):
        observed.sown_variables.add((type(variable), name))
    return stored


@_replaces(nnx.Variable, "set_value")
def _set_value(set_value: _Flax, observed: Observed, self: nnx.Variable, *args: Any, **kwargs: Any) -> None:
    observed.writes_parameters |= isinstance(self, nnx.Param)
    set_value(self, *args, **kwargs)


@_replaces(nnx, "update")
def _update(update: _Flax, observed: Observed, node: PyTree, *args: Any, **kwargs: Any) -> None:
    before = [(x, x.get_raw_value()) for x in parameters_in(node).values()]
    update(node, *args, **kwargs)
    observed.writes_parameters |= any(x.get_raw_value() is not value for x, value in before)


@_replaces(nnx, "merge")
@_replaces(nnx.graphlib, "merge")  # as GraphDef.apply calls it
def _merge(merge: _Flax, observed: Observed, *args: Any, **kwargs: Any) -> PyTree:
    return observed.merged(merge(*args, **kwargs))


def parameters_in(node: PyTree) -> dict[Path, nnx.Param]:
    """Return the parameters of a module, the variables themselves."""
    return {tuple(map(str, path)): x for path, x in nnx.iter_graph(node, graph=True) if isinstance(x, nnx.Param)}


@contextlib.contextmanager
def observed_calls(observed: Observed) -> Iterator[None]:
    """Add the calls of Flax in a context to what is known of others."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            for owner, name, _, replacement in _replaced:
                setattr(owner, name, replacement)
    try:
        with holding(_here, observed):
            yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                for owner, name, original, _ in _replaced:
                    setattr(owner, name, original)
