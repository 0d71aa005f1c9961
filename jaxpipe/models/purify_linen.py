"""Flax Linen modules as pure calls, through Flax's own lifting machinery."""

import contextvars
import functools
import inspect
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
from flax.core import lift
from flax.linen import transforms

from jaxpipe.array_types import Array, PyTree
from jaxpipe.context_values import holding
from jaxpipe.models.decorated_class import twin_class
from jaxpipe.models.purify_nnx import PureCall, check_numeric, part, part_results
from jaxpipe.models.undecorated import unless_disabled


#: ``PureCall -> result``; what a decorator does with the call.
Runner = Callable[[PureCall], PyTree]

_running: contextvars.ContextVar[frozenset[type]] = contextvars.ContextVar("running", default=frozenset())


def transform_class(cls: type[nn.Module], runner: Runner) -> type[nn.Module]:
    """Return a class whose public methods are run by ``runner``, and which else is like ``cls``.

    Only a call from outside is given to ``runner``: what a method then calls on its own module is part of that
    call. Initialization runs as it always did, so parameters and their names stay the same.
    """
    methods = {}
    for base in reversed(cls.__mro__[: cls.__mro__.index(nn.Module)]):
        for name, value in vars(base).items():
            public = name == "__call__" or not name.startswith("_")
            computes = inspect.isfunction(value) and name not in ("setup", "lazy_init") and not hasattr(value, "nowrap")
            if public and computes:
                methods[name] = transform_method(value, runner, owner=cls)
            else:
                methods.pop(name, None)
    return twin_class(cls, methods)


def transform_method(method: Callable[..., PyTree], runner: Runner, owner: type | None = None) -> Callable[..., PyTree]:
    """A Linen method that is run by ``runner`` when its module is bound and not being initialized."""
    lifted = transforms.decorator_lift_transform(functools.partial(_lift, runner=runner), method)

    def call(self: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        running = _running.get()
        if self.scope is None or self.is_initializing() or owner in running:
            return method(self, *args, **kwargs)
        with holding(_running, running if owner is None else running | {owner}):
            return lifted(self, *args, **kwargs)

    return unless_disabled(method, call)


def _lift(method: Callable[..., PyTree], *, runner: Runner) -> Callable[..., PyTree]:
    """A lifted transformation (see ``flax.core.lift``): all variables and keys in, mutable variables out."""

    def inner(
        scope_fn: Callable[..., PyTree],
        repack_fn: Callable[..., PyTree],
        variables: PyTree,
        rngs: PyTree,
        *args: PyTree,
        **kwargs: PyTree,
    ) -> PyTree:
        # Of (variable groups, key groups, args, kwargs), the first two have an owner.
        given, fill = part((variables, rngs, args, kwargs))
        paths, leaves = [path for path, _ in given], tuple(x for _, x in given)
        names = tuple(map(_name, paths))
        check_numeric(names, leaves)
        finish: Callable[[Sequence[Array]], PyTree]

        def pure(*arrays: Array) -> list[Array]:
            nonlocal finish
            groups, keys, new_args, new_kwargs = fill(arrays)
            scopes = scope_fn(groups, keys)
            output = method(scopes, *new_args, **new_kwargs)
            results, finish = part_results((output, repack_fn(scopes)))
            return [x for _, x in results]

        parameters = tuple(path[0].idx == 0 and _keys(path)[:1] == ["params"] for path in paths)
        held = tuple(path[0].idx < 2 for path in paths)
        return runner(PureCall(pure, leaves, names, parameters, held, finish=lambda outputs: finish(outputs)))

    return lift.pack(inner, (True,), (True,), (True,), enable_kwargs=True)


def _keys(path: jax.tree_util.KeyPath) -> list[str]:
    return [str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey)]


def _name(path: jax.tree_util.KeyPath) -> str:
    return "/".join(_keys(path)) if path[0].idx < 2 else jax.tree_util.keystr(tuple(path[1:]))
