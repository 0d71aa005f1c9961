"""The modules that a step calls while it is traced, and the same step with them wrapped.

A user's classes cannot be decorated from outside, but their calls can be run as if they were: Linen's through its
interceptors, those of NNX through private copies of other classes.
"""

import contextlib
import contextvars
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from jaxpipe.array_types import PyTree
from jaxpipe.context_values import holding
from jaxpipe.graph.allowed_codecs import FAST
from jaxpipe.models import purify_linen
from jaxpipe.models.decorated_class import twin_class
from jaxpipe.models.observed_calls import Observed, observed_calls
from jaxpipe.models.purify_nnx import is_array, is_module, part
from jaxpipe.residuals.memory_encoded import memory_encoded, run_encoded
from jaxpipe.step.step_arguments import changed


# JAX's tracing caches know of it: a step that is jitted already is traced anew for each.
_wrapping = jax.make_user_context(default_value=None)

#: Whether the call of a module is running.
_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside", default=False)
_inside_call = functools.partial(holding, _inside, True)


@dataclass
class CalledModules:
    """The module classes that a step calls.

    Attributes:
      outermost: those that no other module calls.
      inner: by class, the paths of its modules.
      static_arguments: by class, positions or names of the arguments of its calls that are no arrays, itself at 0.
      keywords: by class, names of the keyword arguments of its calls.
    """

    outermost: dict[type, None] = field(default_factory=dict)
    inner: dict[type, set[tuple[str, ...]]] = field(default_factory=lambda: defaultdict(set))
    static_arguments: dict[type, set[int | str]] = field(default_factory=lambda: defaultdict(set))
    keywords: dict[type, set[str]] = field(default_factory=lambda: defaultdict(set))

    def blocks(self) -> type | None:
        """Return the user's own class with most modules in one other, of those that are in no such modules."""
        users = {cls: modules for cls, modules in self.inner.items() if not cls.__module__.startswith("flax.")}
        siblings = {cls: max(Counter(path[:-1] for path in modules).values()) for cls, modules in users.items()}
        several = {cls: users[cls] for cls, count in siblings.items() if count > 1}
        outer = [cls for cls in several if not any(_are_within(several[cls], several[x]) for x in several if x != cls)]
        return max(outer, key=siblings.__getitem__, default=None)


def _are_within(modules: set[tuple[str, ...]], others: set[tuple[str, ...]]) -> bool:
    """Return whether some modules are below others, by their paths."""
    return any(path[:depth] in others for path in modules for depth in range(1, len(path)))


def _computes(m: nn.Module, name: str) -> bool:
    """Return whether a call is one of a bound module's own methods; Flax runs functions that are none on it, too."""
    return name not in ("setup", "init") and hasattr(type(m), name) and m.scope is not None and not m.is_initializing()


@contextlib.contextmanager
def observed_modules(args: PyTree) -> Iterator[tuple[CalledModules, PyTree]]:
    """Note the modules that are called while a step is traced, and those of NNX among its arguments.

    Gives also the arguments to trace it with: their NNX modules name what they compute, as Linen's do by themselves.
    """
    called = CalledModules()

    def note(run: Callable[..., PyTree], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> PyTree:
        module, cls = context.module, type(context.module)
        if not _computes(module, context.method_name):
            return run(*args, **kwargs)
        if _inside.get():
            called.inner[cls].add(tuple(map(str, module.path)))
        else:
            called.outermost[cls] = None
        if context.method_name == "__call__":  # others have other arguments
            given = [*enumerate(args, 1), *kwargs.items()]
            called.static_arguments[cls] |= {k for k, x in given if not all(map(is_array, jax.tree.leaves(x)))}
            called.keywords[cls] |= set(kwargs)
        with _inside_call():
            return run(*args, **kwargs)

    name = functools.partial(_name_modules, called)
    # Each time another context: for one that it knows JAX returns the trace that it has, and calls no module.
    with _wrapping(object()), nn.intercept_methods(note), _changed_modules(args, name) as copies:
        yield called, copies


@contextlib.contextmanager
def wrapped_modules(args: PyTree, blocks: type | None = None) -> Iterator[PyTree]:
    """Run modules otherwise while a step is traced; gives the arguments to trace it with.

    Args:
      args: the arguments of the step.
      blocks: the class of blocks that repeat, each of which runs under ``remat``. Left out: the outermost modules run
        as if they were decorated.
    """

    def wrap(run: Callable[..., PyTree], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> PyTree:
        module = context.module
        if _inside.get() or blocks not in (None, type(module)) or not _computes(module, context.method_name):
            return run(*args, **kwargs)
        method = getattr(type(module), context.method_name)
        with _inside_call():
            if blocks is not None:
                return _run_remat(module, nn.remat, method, *args, **kwargs)
            return purify_linen.transform_method(method, _run_encoded)(module, *args, **kwargs)

    def change(root: Any) -> None:
        if blocks is None:
            object.__setattr__(root, "__class__", _encoded_class(type(root)))
            return
        for path, module in list(nnx.iter_modules(root, graph=True)):
            if path and type(module) is blocks:
                object.__setattr__(module, "__class__", _remat_class(blocks))

    with _wrapping(("wrapped", blocks)), nn.intercept_methods(wrap), _changed_modules(args, change) as copies:
        yield copies


@contextlib.contextmanager
def _changed_modules(args: PyTree, change: Callable[[Any], None]) -> Iterator[PyTree]:
    """Change the outermost NNX modules of a step: those in copies of its arguments, and those that it merges itself."""
    known = set[type]()  # a module that is changed may be split and merged again

    def change_all(tree: PyTree) -> PyTree:
        for root in () if _inside.get() else _modules(tree):
            cls = type(root)
            if cls not in known:
                change(root)
                known.update({type(root)} - {cls})
        return tree

    copies = change_all(changed(args, lambda x: x))
    with observed_calls(Observed(has_streams=False, merged=change_all)):
        yield copies


def _run_remat(module: Any, remat: Any, method: Callable[..., PyTree], /, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Run a method under Linen's or NNX's remat; what is no array stays outside, as under ``static_argnums``."""
    given, fill = part((args, kwargs))

    def run(module: Any, *arrays: jax.Array) -> PyTree:
        new_args, new_kwargs = fill(arrays)
        return method(module, *new_args, **new_kwargs)

    return remat(run)(module, *(x for _, x in given))


def _modules(args: PyTree) -> list[Any]:
    """Return the outermost NNX modules of a tree that compute something; optimizers do not."""
    outermost = list[Any]()
    for root in filter(is_module, jax.tree.leaves(args, is_leaf=is_module)):
        named = _callable_modules(root)
        outermost += (x for path, x in named.items() if not any(path[:k] in named for k in range(len(path))))
    return outermost


def _callable_modules(root: Any) -> dict[tuple[Any, ...], Any]:
    return {path: module for path, module in nnx.iter_modules(root, graph=True) if callable(module)}


def _name_modules(called: CalledModules, root: Any) -> None:
    """Let every module of a tree name what it computes by its path below the module around it, and note its class."""
    named = _callable_modules(root)
    called.outermost[type(root)] = None
    for path, module in named.items():
        if path:
            called.inner[type(module)].add(tuple(map(str, path)))
        above = max((len(other) for other in named if other == path[: len(other)] and other != path), default=0)
        scope = "/".join(map(str, path[above:])) or type(module).__name__
        object.__setattr__(module, "__class__", _named_class(type(module), scope))


@functools.cache
def _named_class(cls: type, scope: str) -> type:
    return twin_class(cls, {"__call__": jax.named_scope(scope)(_inside_call()(cls.__call__))})


_run_encoded = functools.partial(run_encoded, policy=FAST)
_encoded_class = functools.cache(memory_encoded)


@functools.cache
def _remat_class(cls: type) -> type:
    return twin_class(cls, {"__call__": functools.partialmethod(_run_remat, nnx.remat, cls.__call__)})
