"""The variables of a Linen module, made by the calls of a loss as plain initialization makes them.

A call at the top level of the loss is initialized with its own arguments, so that initial values may depend on data. In
a call inside ``jit``, ``vmap``, ``scan`` and the like, whose arguments do not leave it, they are zeros of their shapes.
"""

import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError

from jaxpipe import _compat
from jaxpipe.array_types import Array, PyTree
from jaxpipe.errors import ModelError
from jaxpipe.models.call_function import call_function
from jaxpipe.models.check_batch import shape_of
from jaxpipe.models.linen_facade import LinenModel, handed_on, separated, without_sown
from jaxpipe.models.observed_calls import Observed, observed_calls
from jaxpipe.models.purify_nnx import part
from jaxpipe.models.variable_trees import by_path, merged, path_text
from jaxpipe.text.value_text import listed


#: Makes the result and the variables of a call, and what it has sown, from a key and the arrays among its arguments.
_Initialize = Callable[[Array, list[Array]], tuple[PyTree, PyTree, PyTree]]

#: The collection that ``Module.init`` leaves out.
_NOT_INITIALIZED = "intermediates"


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
        makes, so that the model runs once for each call; ``Observed.returned`` then says what is assumed.

    Raises:
      ModelError: if initial values depend on the arguments of a call inside a transformation.
    """
    model = _InitializingLinenModel(module, key, variables, assumed)
    with handed_on():
        call_function(function, model, batch, key)
    return model.made(), model.observed


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
        if not self._number and not self._given:
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
                variables = self._variables if self._given else self._with_initial(key, args, kwargs)
                result, new = self._apply(without_sown(variables, known), key, *args, **kwargs)
            except InvalidRngError as error:
                missing = re.search(r'needs PRNG for "(\w+)"', str(error))
                if missing is None or missing[1] in known.split:
                    raise
                self.observed.split.add(missing[1])
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

    def _check_returned(self, result: PyTree) -> None:
        if self._assumed:
            self.observed.returned.append(self._seen(result))

    def _with_initial(self, key: Array, args: PyTree, kwargs: PyTree) -> PyTree:
        """Return the variables of calls so far, and those that a call needs besides."""
        initialize, arguments = self._initialization(args, kwargs)
        if _compat.current_trace() is self._trace:
            self._output, new, self._sown = initialize(key, arguments)
            self._variables = merged(new, self._variables)
            new.pop(_NOT_INITIALIZED, None)
            self._made.append(lambda _: new)
            return self._variables
        shapes = jax.eval_shape(lambda *given: initialize(*given)[1], key, arguments)
        number, avals = self._number - 1, [shape_of(x) for x in arguments]
        # The key is made outside of the transformation.
        self._made.append(lambda known: _made_inside(initialize, self._key_of(number), avals, known))
        return merged(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), self._variables)

    def _initialization(self, args: PyTree, kwargs: PyTree) -> tuple[_Initialize, list[Array]]:
        """Return how variables are made from a key and the arrays among the arguments, and these."""
        given, fill = part((args, kwargs), lambda x: isinstance(x, jax.Array))
        mutable = self._returns_initial() or nn.DenyList(_NOT_INITIALIZED)

        def initialize(key: Array, arrays: list[Array]) -> tuple[PyTree, PyTree, PyTree]:
            args, kwargs = fill(arrays)
            with observed_calls(self.observed, has_streams=False):
                initial: Any = self.module.init_with_output(self._rngs(key), *args, mutable=mutable, **kwargs)
            sown, variables = separated(initial[1], self.observed.sown)
            return initial[0], variables, sown

        return initialize, [x for _, x in given]


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
            f"{listed(names, 3)} depend on the arguments of that call, "
            "which are known in there only. Call the model outside of it, or pass pipeline.init(key, variables="
            "module.init(key, ...))."
        )
    zeros = [jnp.zeros(x.shape, x.dtype) for x in arguments]
    return jax.tree.unflatten(tree, _compat.evaluate_jaxpr(closed, key, *zeros))
