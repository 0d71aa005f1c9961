"""Calls of Flax that a micro-batch gives another meaning, as ``sow``, whose values it drops, or that it cannot follow.

Flax has no hook for them: its functions are replaced while a user's function is traced, and do what they always did for
other threads.
"""

import contextlib
import contextvars
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import flax.linen as nn
from flax import nnx
from flax.core import lift

from jaxpipe.array_types import PyTree, PyTreeDef
from jaxpipe.models.variable_trees import Path


@dataclass
class Observed:
    """Facts about the calls of some traces.

    Attributes:
      sown: of Linen, collection and path of every value that ``sow`` has collected.
      split: of Linen, the streams beside "params" that a lifted transformation names, to split them or not.
      sown_variables: of NNX, type and name of every variable that ``sow`` has made or changed.
      returned: of Linen, what the code behind each call can see of it, if that is taken to be what its initialization
        returns and leaves.
      writes_parameters: of NNX, whether a parameter was given a value.
    """

    sown: set[Path] = field(default_factory=set)
    split: set[str] = field(default_factory=set)
    sown_variables: set[tuple[type[nnx.Variable], str]] = field(default_factory=set)
    returned: list[tuple[PyTreeDef, dict[Path, object]]] = field(default_factory=list, compare=False)
    writes_parameters: bool = False

    def copy(self) -> "Observed":
        """Return the same facts, but for what is returned, to which others may be added."""
        return Observed(set(self.sown), set(self.split), set(self.sown_variables))


#: The facts, and whether ``has_rng`` is true for every stream, as it would be if ``rngs=`` named all of them.
_here: contextvars.ContextVar[tuple[Observed | None, bool]] = contextvars.ContextVar("here", default=(None, False))
_lock = threading.Lock()
_users = 0

_sow, _has_rng, _pack, _nnx_sow = nn.Module.sow, nn.Module.has_rng, lift.pack, nnx.Module.sow
_set_value, _update = nnx.Variable.set_value, nnx.update


@functools.wraps(_sow)
def _observed_sow(self: nn.Module, col: str, name: str, *args: PyTree, **kwargs: PyTree) -> bool:
    observed, _ = _here.get()
    if observed is not None and self.scope is not None:
        observed.sown.add((col, *self.scope.path, name))
    return _sow(self, col, name, *args, **kwargs)


@functools.wraps(_has_rng)
def _observed_has_rng(self: nn.Module, name: str) -> bool:
    # A stream that was not given is made of "params", as make_rng does.
    others = _here.get()[1] and self.scope is not None and self.scope.has_rng("params")
    return others or _has_rng(self, name)


@functools.wraps(_pack)
def _observed_pack(
    fn: Callable[..., PyTree],
    inputs: PyTree,
    outputs: PyTree,
    streams: Sequence[PyTree],
    *args: PyTree,
    **kwargs: PyTree,
) -> Callable[..., PyTree]:
    observed, _ = _here.get()
    if observed is not None:
        lists = [
            (x,) if isinstance(x, str) else x for x in streams if isinstance(x, str | list | tuple | set | frozenset)
        ]
        observed.split.update(name for names in lists for name in names if name != "params")
    return _pack(fn, inputs, outputs, streams, *args, **kwargs)


@functools.wraps(_nnx_sow)
def _observed_nnx_sow(self: nnx.Module, variable_type: PyTree, name: str, *args: PyTree, **kwargs: PyTree) -> bool:
    observed, _ = _here.get()
    if observed is None:
        return _nnx_sow(self, variable_type, name, *args, **kwargs)
    with warnings.catch_warnings():  # the deprecation of sow outside of nnx.capture would be told of this line
        warnings.simplefilter("ignore", DeprecationWarning)
        stored = _nnx_sow(self, variable_type, name, *args, **kwargs)
    variable = getattr(self, name, None)
    if isinstance(variable, nnx.Variable):
        observed.sown_variables.add((type(variable), name))
    return stored


@functools.wraps(_set_value)
def _observed_set_value(self: nnx.Variable, *args: PyTree, **kwargs: PyTree) -> None:
    observed, _ = _here.get()
    if observed is not None and isinstance(self, nnx.Param):
        observed.writes_parameters = True
    _set_value(self, *args, **kwargs)


@functools.wraps(_update)
def _observed_update(node: PyTree, *args: PyTree, **kwargs: PyTree) -> None:
    observed, _ = _here.get()
    before = [] if observed is None else [(x, x.get_raw_value()) for x in parameters_in(node).values()]
    _update(node, *args, **kwargs)
    if observed is not None and any(x.get_raw_value() is not value for x, value in before):
        observed.writes_parameters = True


_REPLACED: list[tuple[object, str, Callable[..., PyTree], Callable[..., PyTree]]] = [
    (nn.Module, "sow", _observed_sow, _sow),
    (nn.Module, "has_rng", _observed_has_rng, _has_rng),
    (lift, "pack", _observed_pack, _pack),
    (nnx.Module, "sow", _observed_nnx_sow, _nnx_sow),
    (nnx.Variable, "set_value", _observed_set_value, _set_value),
    (nnx, "update", _observed_update, _update),
]


def parameters_in(node: PyTree) -> dict[Path, nnx.Param]:
    """Return the parameters of a module, the variables themselves."""
    return {tuple(map(str, path)): x for path, x in nnx.iter_graph(node) if isinstance(x, nnx.Param)}


@contextlib.contextmanager
def observed_calls(observed: Observed, has_streams: bool = True) -> Iterator[None]:
    """Add the calls of Flax in a context to what is known of others."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            for owner, name, replacement, _ in _REPLACED:
                setattr(owner, name, replacement)
    token = _here.set((observed, has_streams))
    try:
        yield
    finally:
        _here.reset(token)
        with _lock:
            _users -= 1
            if not _users:
                for owner, name, _, original in _REPLACED:
                    setattr(owner, name, original)
