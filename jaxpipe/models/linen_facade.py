"""The model that a loss gets for a Linen module, and what it says when it is taken for something else.

A call is ``module.apply``. What ``sow`` collects in it belongs to this call: it can be read from ``model.variables``
until the next one. All other collections but the parameters are state, which the next call gets.
``with_linen_model`` makes the same model for reports of a loss, outside of a pipeline.

``make_variables`` makes the variables as plain initialization makes them, by the calls of a loss. A call at the top
level of the loss is initialized with its own arguments, so that initial values may depend on data. In a call inside
``jit``, ``vmap``, ``scan`` and the like, whose arguments do not leave it, they are zeros of their shapes.
"""

import contextlib
import functools
import inspect
import numbers
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from types import FunctionType, MethodType
from typing import Any, NoReturn

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import unfreeze
from flax.errors import ApplyScopeInvalidVariablesTypeError, InvalidRngError, ScopeCollectionNotFound
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxpipe import _compat
from jaxpipe.array_types import Array, PyTree
from jaxpipe.errors import ModelError
from jaxpipe.models.call_function import RNGS, call_function, takes_rngs
from jaxpipe.models.check_batch import shape_of
from jaxpipe.models.observed_calls import Arguments, Observed, observed_calls
from jaxpipe.models.purify_nnx import part
from jaxpipe.models.variable_trees import Path, by_path, merged, path_text, plain_tree
from jaxpipe.text.value_text import listed


#: Collections that calls do not change: their gradients do.
TRAINED = ("params", OVERWRITE_WITH_GRADIENT)


#: Makes the result and the variables of a call, and what it has sown, from a key and the arrays among its arguments.
_Initialize = Callable[[Array, list[Array]], tuple[PyTree, PyTree, PyTree]]

#: The collection that ``Module.init`` leaves out.
_NOT_INITIALIZED = "intermediates"


class MissingAttributeError(ModelError, AttributeError):
    """An attribute that the model of a loss does not have; ``hasattr`` and ``getattr`` take it as any other."""


class ReturnsOtherError(BaseException):
    """A call does not return what its initialization returned, which it was taken to do.

    That is seen where a call that follows has other arguments than it had when it was initialized.

    It goes through a loss that catches any ``Exception``.
    """


class LinenModel:
    """The ``model`` of a loss, for a Linen module: ``model(*args)`` is ``module.apply`` with state threaded.

    Every collection but ``params`` is mutable; call number n > 0 uses ``fold_in(key, n)`` for random numbers, the
    first the micro-batch's key itself. Raises ``ReturnsOtherError`` if calls are others than ``observed`` assumes.
    """

    def __init__(self, module: nn.Module, variables: PyTree, key: Array, observed: Observed | None = None):
        self.module = module
        self._variables = variables
        self._sown: PyTree = {}
        self._key = key
        self.arguments: list[Arguments] = []  # of the calls so far
        self._draws: Counter[str] = Counter()
        self._known = Observed() if observed is None else observed
        self.observed = self._known.copy()
        self._trace = _compat.current_trace()

    @property
    def variables(self) -> PyTree:
        """The variables, with the state that calls so far have left and the values that the last one has sown."""
        if _compat.current_trace() is self._trace:
            _check_within(self._sown, self._trace, "reads", "are sown")
        return merged(self._variables, self._sown)

    @property
    def state(self) -> PyTree:
        """The collections that calls change."""
        return state_of(self._variables)

    def make_rng(self, name: str = "params") -> Array:
        """Return a random key of a stream, another one in each call, made from the micro-batch's key.

        The n-th key of a stream is ``fold_in(fold_in(key, crc32(name)), n)``, with n from 0.
        """
        stream = jax.random.fold_in(self._key, zlib.crc32(name.encode()))
        self._draws[name] += 1
        return jax.random.fold_in(stream, self._draws[name] - 1)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Call ``module.apply``; takes ``method=`` like it, but neither ``rngs=`` nor ``mutable=``: both are given."""
        for name, given in _GIVEN.items():
            if name in kwargs:
                raise ModelError(f"model(..., {name}=) in a loss: {given}. Leave {name}= out.")
        self.arguments.append(_described((args, kwargs)))
        number, assumed = len(self.arguments), self._known.assumed
        if assumed and assumed[:number] != tuple(self.arguments):
            raise ReturnsOtherError
        return self._call(self._key_of(number - 1), *args, **kwargs)

    def check_all_called(self) -> None:
        """Raise ``ReturnsOtherError`` if there were fewer calls than those that are assumed."""
        if len(self.arguments) < len(self._known.assumed):
            raise ReturnsOtherError

    def _key_of(self, call: int) -> Array:
        return jax.random.fold_in(self._key, call) if call else self._key

    def _call(self, key: Array, *args: PyTree, **kwargs: PyTree) -> PyTree:
        try:
            result, new = self._apply(self._variables, key, *args, **kwargs)
        except InvalidRngError:  # of a stream that initialization has not named
            if self._known.assumed:
                raise ReturnsOtherError from None
            raise
        if self._known.assumed and self._known != self.observed:
            raise ReturnsOtherError
        self._keep(new, self._variables)
        return result

    def _apply(self, variables: PyTree, key: Array, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        """Call ``module.apply``: the result, and the new state; keep what is sown."""
        apply = functools.partial(self.module.apply, variables, *args, rngs=self._rngs(key), **kwargs)
        with observed_calls(self.observed):
            try:
                result, new = apply(mutable=nn.DenyList(TRAINED))
            except ScopeCollectionNotFound:  # nn.map_variables(init=True) makes variables where any may change
                if state_of(variables) or any(path[0] != _NOT_INITIALIZED for path in self.observed.sown):
                    raise
                result, new = apply(), {}
        self._sown, new = separated(new, self.observed.sown)
        return result, new

    def _rngs(self, key: Array) -> dict[str, Array]:
        streams = enumerate(sorted(self.observed.split))
        return {"params": key} | {name: jax.random.fold_in(key, n) if n else key for n, name in streams}

    def _keep(self, new: PyTree, before: PyTree) -> None:
        """Keep the state that a call leaves; of one inside a transformation, what it changes, if that can leave it."""
        if _compat.current_trace() is self._trace:
            self._variables = self._variables | new
            return
        old = flatten_dict(before)
        changed = unflatten_dict({path: x for path, x in flatten_dict(new).items() if x is not old.get(path)})
        changed = jax.tree.map(jax.lax.stop_gradient, changed)  # inside grad and jvp, their values alone
        _check_within(changed, self._trace, "changes", "have new values")
        self._variables = merged(self._variables, changed)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise MissingAttributeError(_missing_attribute(self.module, name))

    def _refuse(self, *_: object) -> NoReturn:
        raise ModelError(_NO_VARIABLES)

    __contains__ = __getitem__ = __iter__ = _refuse


#: Arguments of calls that are compared by value, NumPy's scalars among the numbers: methods, types, modes.
_COMPARED = (numbers.Number, np.generic, str, Enum, type, np.dtype, FunctionType, MethodType)


def _described(arguments: PyTree) -> Arguments:
    """Return all of some arguments that the variables of a call may depend on."""

    def described(x: Any) -> object:
        if isinstance(x, _COMPARED):
            return type(x), x
        is_array = hasattr(x, "shape") and hasattr(x, "dtype")
        return (x.shape, x.dtype, getattr(x, "weak_type", False)) if is_array else type(x)

    leaves, tree = jax.tree.flatten(arguments)
    return tree, tuple(map(described, leaves))


def state_of(variables: PyTree) -> PyTree:
    """Return the collections that calls change."""
    return {name: tree for name, tree in variables.items() if name not in TRAINED}


def separated(tree: PyTree, sown: Collection[Path]) -> tuple[PyTree, PyTree]:
    """Split nested dictionaries into what was sown, by path, and the rest."""
    flat = flatten_dict(tree, keep_empty_nodes=True)
    collected = {path: x for path, x in flat.items() if any(path[:n] in sown for n in range(1, len(path) + 1))}
    rest = {path: x for path, x in flat.items() if path not in collected}
    return unflatten_dict(collected), unflatten_dict(rest)


def without_sown(variables: PyTree, observed: Observed) -> PyTree:
    """Return variables without what calls collect."""
    return separated(variables, observed.sown)[1]


def _check_within(tree: PyTree, trace: object, does: str, are: str) -> None:
    """Raise ``ModelError`` if values belong to a transformation inside a loss, which has ended or will."""
    lost = [path_text(path) for path, x in by_path(tree).items() if not _compat.is_within(x, trace)]
    if lost:
        raise ModelError(
            f"The loss calls its model inside jax.jit, jax.checkpoint, jax.vmap, lax.scan, lax.cond or the like, and "
            f"{does} {listed(lost, 3)}, which {are} in there: JAX does not "
            "return them from it. Call the model outside of it, use Flax's own nn.jit, nn.remat, nn.vmap or nn.scan "
            "inside the module, or, if that is meant, call it in a mode that leaves them as they are."
        )


def make_variables(
    module: nn.Module,
    function: Callable[..., PyTree],
    key: Array,
    batch: PyTree,
    variables: PyTree = None,
    assumed: bool = False,
) -> tuple[dict[str, PyTree], Observed]:
    """Return the variables that the calls of ``function(model, batch)`` need, made with ``key``, and what calls do.

    Args:
      variables: values to use instead.
      assumed: whether a call is taken to return what its initialization returns, and to leave the variables that this
        makes, so that the model runs once for each call; ``Observed.assumed`` then says of which calls.

    Raises:
      ModelError: if initial values depend on the arguments of a call inside a transformation.
    """
    model = _InitializingLinenModel(module, key, variables, assumed)
    with handed_on():
        call_function(function, model, batch, key)
    return model.made(), replace(model.observed, assumed=tuple(model.arguments) if assumed else ())


class _InitializingLinenModel(LinenModel):
    """Makes the variables that each call needs and has not found; what calls then leave of them, the loss sees."""

    def __init__(self, module: nn.Module, key: Array, variables: PyTree = None, assumed: bool = False):
        super().__init__(module, variables or {}, key)
        self._given = variables is not None
        self._assumed = assumed
        self._made: list[Callable[[PyTree], PyTree]] = []  # of the variables of the calls before

    @property
    def variables(self) -> PyTree:
        """The variables of calls so far, of which there must be one."""
        if not self.arguments and not self._given:
            raise ModelError(
                "The loss reads model.variables before it calls the model: what variables the model has is known from "
                "its calls. Write model(x) first."
            )
        return super().variables

    def made(self) -> dict[str, PyTree]:
        """Return the variables that the calls have made, of each the value of the first call."""
        variables = self._variables if self._given else {}
        for make in self._made:
            variables = merged(make(variables), variables)
        return dict(without_sown(variables, self.observed))

    def _call(self, key: Array, *args: PyTree, **kwargs: PyTree) -> PyTree:
        while True:
            known = self.observed.copy()
            try:
                variables = self._variables if self._given else self._with_needed(key, args, kwargs)
                result, new = self._apply(without_sown(variables, known), key, *args, **kwargs)
            except InvalidRngError:
                if self.observed == known:  # else there are streams that are known by now
                    raise
            else:
                # Else the variables may hold what calls before have sown.
                if self.observed == known or (self._assumed and self.observed.split == known.split):
                    self._keep(new, variables)
                    return result

    def _apply(self, variables: PyTree, key: Array, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        if self._returns_initial():
            return self._output, self.state
        return super()._apply(variables, key, *args, **kwargs)

    def _returns_initial(self) -> bool:
        return self._assumed and _compat.current_trace() is self._trace

    def _with_needed(self, key: Array, args: PyTree, kwargs: PyTree) -> PyTree:
        """Return the variables that a call needs; a method that reads those of calls before finds none at its own."""
        try:
            return self._with_initial(key, args, kwargs)
        except InvalidRngError:
            raise
        except Exception:
            with contextlib.suppress(Exception):
                known = without_sown(self._variables, self.observed)
                self._output = super()._apply(known, key, *args, **kwargs)[0]
                return self._variables
            raise

    def _with_initial(self, key: Array, args: PyTree, kwargs: PyTree) -> PyTree:
        """Return the variables of calls so far, and those that a call needs besides."""
        given, fill = part((args, kwargs), lambda x: isinstance(x, jax.Array))
        arguments = [x for _, x in given]
        mutable = self._returns_initial() or nn.DenyList(_NOT_INITIALIZED)

        def initialize(key: Array, arrays: list[Array]) -> tuple[PyTree, PyTree, PyTree]:
            args, kwargs = fill(arrays)
            with observed_calls(replace(self.observed, has_streams=False)):
                initial: Any = self.module.init_with_output(self._rngs(key), *args, mutable=mutable, **kwargs)
            sown, variables = separated(initial[1], self.observed.sown)
            return initial[0], variables, sown

        if _compat.current_trace() is self._trace:
            self._output, new, self._sown = initialize(key, arguments)
            self._variables = merged(new, self._variables)
            new.pop(_NOT_INITIALIZED, None)
            self._made.append(lambda _: new)
            return self._variables
        shapes = jax.eval_shape(lambda *given: initialize(*given)[1], key, arguments)
        number, avals = len(self.arguments) - 1, [shape_of(x) for x in arguments]
        # The key is made outside of the transformation.
        self._made.append(lambda known: _made_inside(initialize, self._key_of(number), avals, known))
        return merged(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), self._variables)


def _made_inside(initialize: _Initialize, key: Array, arguments: list[jax.ShapeDtypeStruct], known: PyTree) -> PyTree:
    """Return the variables that a call inside a transformation makes besides those that are known."""
    tree: Any = None

    def leaves_of(key: Array, arguments: list[Array]) -> list[Array]:
        nonlocal tree
        leaves, tree = jax.tree.flatten(initialize(key, arguments)[1])
        return leaves

    closed = _compat.trace_without_scope(leaves_of, shape_of(key), arguments)
    count, before = tree.num_leaves, by_path(known)
    new = {path: k for path, k in by_path(jax.tree.unflatten(tree, range(count))).items() if path not in before}
    reads = {path: _compat.inputs_read(closed, [k == n for n in range(count)])[1:] for path, k in new.items()}
    names = [path_text(path) for path, read in reads.items() if any(read)]
    if names:
        raise ModelError(
            f"The loss calls its model inside jax.jit, jax.vmap, lax.scan or the like, and the initial values of "
            f"{listed(names, 3)} depend on the arguments of that call, which are known in there only. Call the model "
            "outside of it, or pass pipeline.init(key, variables=module.init(key, ...))."
        )
    zeros = [jnp.zeros(x.shape, x.dtype) for x in arguments]
    return jax.tree.unflatten(tree, _compat.evaluate_jaxpr(closed, key, *zeros))


#: Arguments of ``module.apply`` that a loss does not pass.
_GIVEN = {
    "rngs": (
        "every random stream gets a key that is made from the micro-batch's key; a loss gets one of its own from "
        "model.make_rng(name)"
    ),
    "mutable": (
        "the result is the output alone. What the module sows is in model.variables after the call, and gone with the "
        "next one; every other collection but 'params' is state, whose new values are kept"
    ),
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
    if name in ("rng", "rngs"):
        return f"{begin}. A loss draws with model.make_rng(name), which gives a key of the micro-batch."
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


def is_unbound(value: object) -> bool:
    """Return whether a value is a Linen module without variables."""
    return isinstance(value, nn.Module) and value.scope is None


def with_linen_model(
    function: Callable[..., PyTree], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[Callable[..., PyTree], tuple[PyTree, ...]]:
    """Return a loss as a function of variables and a key, if its arguments are a Linen module, variables and a batch.

    ``loss(model, batch)`` then gets the model that it gets in a pipeline. Another function, such as one of ``(module,
    variables, batch)``, is returned as it is.
    """
    if len(args) < 2 or not is_unbound(args[0]) or not _takes(function, (args[0], *args[2:]), kwargs):
        return function, tuple(args)
    module, variables, *rest = args
    tree = unfreeze(plain_tree(variables))
    if isinstance(tree, dict) and "params" not in tree:
        tree = {"params": tree}

    def loss(variables: PyTree, key: Array, *rest: PyTree, **named: PyTree) -> tuple[PyTree, PyTree]:
        @functools.wraps(function)  # whose signature may have rngs
        def call(model: LinenModel, batch: tuple[PyTree, ...], **streams: PyTree) -> PyTree:
            return function(model, *batch, **named, **streams)

        model = LinenModel(module, variables, key)
        with handed_on():
            result = call_function(call, model, rest, key)
        return result, model.state

    return loss, (tree, jax.random.key(0), *rest)


def _takes(function: Callable[..., PyTree], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function takes these arguments, and not any number of them."""
    try:
        signature = inspect.signature(function)
        signature.bind(*args, **kwargs, **({RNGS: None} if takes_rngs(function) and RNGS not in kwargs else {}))
    except (TypeError, ValueError):
        return False
    return all(parameter.kind is not parameter.VAR_POSITIONAL for parameter in signature.parameters.values())
