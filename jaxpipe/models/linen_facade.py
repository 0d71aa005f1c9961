"""The model that a loss gets for a Linen module, and what it says when it is taken for something else."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import NoReturn

import flax.linen as nn
import jax
from flax.errors import ApplyScopeInvalidVariablesTypeError

from jaxpipe.array_types import Array, PyTree
from jaxpipe.errors import ModelError


class _MissingAttributeError(ModelError, AttributeError):
    """An attribute that the model of a loss does not have; ``hasattr`` and ``getattr`` take it as any other."""


class LinenModel:
    """The ``model`` of a loss, for a Linen module: ``model(*args)`` is ``module.apply`` with state threaded.

    Every collection but ``params`` is mutable; call number n > 0 uses ``fold_in(key, n)`` for random numbers, the
    first the micro-batch's key itself.
    """

    def __init__(self, module: nn.Module, variables: PyTree, key: Array):
        self.module = module
        self._variables = variables
        self._key = key
        self._calls = 0

    @property
    def variables(self) -> PyTree:
        """The variables, with the state that calls so far have left."""
        return self._variables

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Call ``module.apply``; takes ``method=`` like it, but neither ``rngs=`` nor ``mutable=``: both are given."""
        for name, given in _GIVEN.items():
            if name in kwargs:
                raise ModelError(f"model(..., {name}=) in a loss: {given}. Leave {name}= out.")
        result, new = self._call(self._next_key(), *args, **kwargs)
        self._variables = {**self._variables, **new}
        return result

    def _next_key(self) -> Array:
        key = self._key if self._calls == 0 else jax.random.fold_in(self._key, self._calls)
        self._calls += 1
        return key

    def _call(self, key: Array, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        mutable = nn.DenyList("params")
        return self.module.apply(self._variables, *args, rngs={"params": key}, mutable=mutable, **kwargs)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise _MissingAttributeError(_missing_attribute(self.module, name))

    def _refuse(self, *_: object) -> NoReturn:
        raise ModelError(_NO_VARIABLES)

    __contains__ = __getitem__ = __iter__ = _refuse


#: Arguments of ``module.apply`` that a loss does not pass.
_GIVEN = {
    "rngs": "every random stream gets a key that is made from the micro-batch's key",
    "mutable": "every collection but 'params' is mutable, its new values are kept, and the result is the output alone",
}

_NO_VARIABLES = (
    "The loss uses its first argument as a tree of variables, but it gets the model, which has them: write "
    "loss(model, batch) with model(x) where plain Flax has module.apply(params, x)."
)


def _missing_attribute(module: nn.Module, name: str) -> str:
    """Say how a loss writes what it looked for in its model."""
    begin = f"The model that a loss gets has no attribute {name!r}"
    if name == "apply":
        return f"{begin}: it has its variables already. Write model(x) where plain Flax has model.apply(variables, x)."
    if name == "params":
        return f"{begin}. After a call, model.variables has the variables: model.variables['params']."
    if name in ("init", "init_with_output", "lazy_init", "bind", "unbind"):
        return f"{begin}: pipeline.init makes the variables. Write model(x)."
    if name in ("train", "eval"):
        return f"{begin}. A Linen module gets its mode as an argument, such as model(x, train=False)."
    if inspect.isroutine(getattr(type(module), name, None)):
        return f"{begin}. Methods of {type(module).__name__} are called as model(..., method={name!r})."
    if name in getattr(module, "__dataclass_fields__", ()):
        return f"{begin}. The settings of {type(module).__name__} are in its module: model.module.{name}."
    return f"{begin}, and {type(module).__name__} has none either. Call it, as model(x)."


@contextlib.contextmanager
def handed_on() -> Iterator[None]:
    """Say what is wrong with a loss that hands its model to ``module.apply`` or to ``jax.jit`` as if it were arrays."""
    try:
        yield
    except ApplyScopeInvalidVariablesTypeError as error:
        raise ModelError(_NO_VARIABLES) from error
    except TypeError as error:
        if LinenModel.__name__ not in str(error):
            raise
        raise ModelError(
            "The loss hands its model to jax.jit, jax.grad or another function of arrays, and the model is none. Leave "
            "them out: a step is compiled and differentiated as a whole. Or use the model inside without passing it."
        ) from error


def initialized_variables(
    module: nn.Module, function: Callable[..., PyTree], key: Array, batch: PyTree
) -> dict[str, PyTree]:
    """Return the variables that the calls of ``function(model, batch)`` need, made with ``key``."""
    model = _InitializingLinenModel(module, {}, key)
    with handed_on():
        function(model, batch)
    return dict(model._variables)


class _InitializingLinenModel(LinenModel):
    """Makes the variables that each call needs and has not found."""

    @property
    def variables(self) -> PyTree:
        """The variables of calls so far, of which there must be one."""
        if not self._calls:
            raise ModelError(
                "The loss reads model.variables before it calls the model: what variables the model has is known from "
                "its calls. Write model(x) first."
            )
        return self._variables

    def _call(self, key: Array, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        result, variables = self.module.init_with_output(key, *args, **kwargs)
        return result, _merge(variables, self._variables)


def _merge(new: PyTree, old: PyTree) -> PyTree:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return old
    return {**new, **{k: _merge(new[k], v) if k in new else v for k, v in old.items()}}
