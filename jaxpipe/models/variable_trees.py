"""Trees of a model's variables, matched with the model's own by path.

So is the optimizer state of plain training: one of optax, or in a flax ``TrainState`` or an ``nnx.Optimizer``.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta

from jaxpipe.array_types import ArrayLike, PyTree, Shaped
from jaxpipe.errors import ModelError
from jaxpipe.text.value_text import listed


#: Keys from the root of a tree to an array, each as text: ``0`` and ``"0"`` are one key.
Path = tuple[str, ...]

#: How many paths an error lists of each kind.
_LISTED = 5


def is_train_state(x: object) -> bool:
    """Return whether something is a flax ``TrainState``, or a class of one's own with its fields."""
    return not isinstance(x, Mapping | nnx.Pytree) and hasattr(x, "params") and hasattr(x, "opt_state")


def plain_tree(variables: PyTree, collections: Collection[str] = ()) -> PyTree:
    """The variables as a tree: those of an NNX module, of a Linen module with variables, or of a plain training state.

    Args:
      collections: those of a Linen module beside ``params``, which a ``TrainState`` has as fields.
    """
    if isinstance(variables, nnx.Optimizer):
        model = getattr(variables, "model", None)
        if model is None:
            raise ModelError(
                "variables= is an nnx.Optimizer, which does not hold its model. Pass both: init(key, variables=model, "
                "optimizer_state=optimizer)."
            )
        variables = model
    if is_train_state(variables):
        params = variables.params
        if isinstance(params, nnx.State):
            fields = getattr(variables, "__dict__", {}).values()  # in which averages of parameters may be too
            return nnx.merge_state(*(x for x in fields if isinstance(x, nnx.State)), params)
        if not collections or "params" in params:
            return params
        rest = {name: getattr(variables, name) for name in collections if hasattr(variables, name)}
        return {"params": params, **rest}
    if isinstance(variables, nnx.Module):
        return nnx.state(variables)
    return variables.variables if isinstance(variables, nn.Module) and variables.scope is not None else variables


def by_path(tree: PyTree) -> dict[Path, PyTree]:
    """The arrays of a tree by path, in the order of ``jax.tree.leaves``.

    Boxes around arrays (``nnx.Variable``, ``nn.Partitioned``) are no part of a path.
    """
    arrays: dict[Path, PyTree] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(plain_tree(tree), is_leaf=_is_box)[0]:
        keys = tuple(map(key_name, path))
        if _is_box(leaf):
            arrays.update((keys + inner, x) for inner, x in by_path(_unboxed(leaf)).items())
        else:
            arrays[keys] = leaf
    return arrays


def paths_of(tree: PyTree, kinds: type[nnx.Variable] | tuple[type[nnx.Variable], ...]) -> set[Path]:
    """The paths of the arrays in NNX variables of some kinds: random streams, what was sown."""
    flat = jax.tree_util.tree_flatten_with_path(plain_tree(tree), is_leaf=_is_box)[0]
    boxes = [(tuple(map(key_name, path)), leaf) for path, leaf in flat if isinstance(leaf, kinds)]
    return {path + inner for path, box in boxes for inner in by_path(_unboxed(box))}


def key_name(key: object) -> str:
    """One key of a path of ``jax.tree_util``."""
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))


def common_level(paths: Collection[Path]) -> Path:
    """The keys that all paths start with."""
    shared = itertools.takewhile(lambda keys: len(set(keys)) == 1, zip(*paths, strict=False))
    return tuple(keys[0] for keys in shared)


@dataclass(frozen=True)
class Argument:
    """Words for an argument of ``Pipeline.init`` that is a tree of arrays."""

    name: str
    owner: str  # who expects the arrays
    arrays: str
    sources: str


VARIABLES = Argument("variables", "model", "variables", "Pipeline.parameters, Module.init and nnx.state")
OPTIMIZER_STATE = Argument(
    "optimizer_state", "optimizer", "arrays", "Pipeline.optimizer_state and optimizer.init(parameters)"
)


def select(
    arrays: Mapping[Path, PyTree],
    expected: Mapping[Path, Shaped],
    levels: Sequence[Path] = (),
    argument: Argument = VARIABLES,
) -> list[ArrayLike]:
    """Return the arrays of a tree that are expected, in the order in which they are.

    Args:
      arrays: of the tree (``by_path``).
      expected: by path, the shape and dtype of each.
      levels: successive keys that the tree may lack, or have where they are not expected.

    Raises:
      ModelError: if an array is missing, unexpected, or of another shape or dtype; it lists their paths.
    """
    ways = [arrays, *(_renamed(arrays, expected, level) for level in levels)]
    given = max(ways, key=lambda way: len(way.keys() & expected.keys()))  # of equal ones the first
    given = {path: _as_array(x, expected.get(path)) for path, x in given.items()}
    owner, extra = argument.owner, given.keys() - expected.keys()
    missing = [f"{path_text(path)} ({_text(aval)})" for path, aval in expected.items() if path not in given]
    unexpected = [f"{path_text(path)} ({_text(x)})" for path, x in given.items() if path in extra]
    wrong = [
        f"{path_text(path)} is {_text(given[path])}, the {owner}'s is {_text(aval)}"
        for path, aval in expected.items()
        if path in given and _text(given[path]) != _text(aval)
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape or dtype": wrong}
    if any(kinds.values()):
        parts = ". ".join(f"{kind.capitalize()}: {listed(items, _LISTED)}" for kind, items in kinds.items() if items)
        raise ModelError(
            f"{argument.name}= does not fit the {owner}'s {len(expected)} {argument.arrays}. {parts}. Pass a tree "
            f"with these paths, as {argument.sources} give it."
        )
    return [given[path] for path in expected]


def holds_optimizer(given: PyTree) -> bool:
    """Return whether something has an optimizer state beside its steps: a ``TrainState``, an NNX optimizer."""
    return isinstance(given, nnx.Optimizer) or is_train_state(given)


def steps_taken(*given: PyTree) -> int:
    """Return how many steps the first that counts them has taken; 0 if only optax does."""
    holder = next(filter(holds_optimizer, given), None)
    step = getattr(holder, "step", 0)
    steps = np.asarray(step.get_value() if isinstance(step, nnx.Variable) else step)
    if steps.ndim or not np.issubdtype(steps.dtype, np.integer) or not 0 <= steps < 2**31:
        raise ModelError(
            f"The {type(holder).__name__} has step={step!r}; it must be the number of steps taken. Pass a replicated "
            "state as flax.jax_utils.unreplicate(train_state)."
        )
    return int(steps)


def optimizer_leaves(given: PyTree, state_shape: PyTree, parameters: PyTree) -> list[ArrayLike]:
    """Return the leaves of an optimizer state in the order of optax, from any tree with their paths.

    Args:
      given: a state of optax, its containers or dictionaries in their place, or what holds one.
      state_shape: what ``optimizer.init`` makes of the tree of the model's ``parameters``.

    Raises:
      ModelError: if a leaf is missing, unexpected, or of another shape or dtype; it lists their paths.
    """
    expected = by_path(state_shape)
    arrays = by_path(given.opt_state if holds_optimizer(given) else given)
    # Plain training may have the parameters with or without the outermost level that the model has them in.
    return select(arrays, expected, [("params",), common_level(by_path(parameters))], argument=OPTIMIZER_STATE)


def _renamed(arrays: Mapping[Path, PyTree], expected: Mapping[Path, Shaped], level: Path) -> dict[Path, PyTree]:
    """Return arrays with the expected paths that are theirs but for a level."""
    path_of = {_without(path, level): path for path in expected}
    return {path_of.get(_without(path, level), path): x for path, x in arrays.items()}


def _without(path: Path, level: Path) -> Path:
    n = len(level)
    start = next((k for k in range(len(path) - n + 1) if path[k : k + n] == level), None)
    return path if start is None else path[:start] + path[start + n :]


def _is_box(x: object) -> bool:
    return isinstance(x, (nnx.Variable, meta.AxisMetadata))


def _unboxed(box: nnx.Variable | meta.AxisMetadata) -> PyTree:
    """The value in a box, without hooks; that of a Linen box as it is, on whatever devices it may be wanted later."""
    return jax.tree.leaves(box, is_leaf=lambda x: x is not box)[0]


def path_text(path: Path) -> str:
    """A path as errors name it."""
    return "/".join(path) or "the tree itself"


def merged(new: PyTree, old: PyTree) -> PyTree:
    """Return nested dictionaries with the entries of both, the old ones where both have one."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return old
    return {**new, **{k: merged(new[k], v) if k in new else v for k, v in old.items()}}


def _as_array(x: PyTree, aval: Shaped | None) -> PyTree:
    """Python's number as the array that JAX makes of it: a counter that a module begins with, a rate that was set."""
    kinds = {bool: jnp.bool_, int: jnp.number, float: jnp.inexact}
    if type(x) not in kinds or aval is None or aval.shape or not jnp.issubdtype(aval.dtype, kinds[type(x)]):
        return x
    return np.asarray(x, aval.dtype)


def _text(x: PyTree) -> str:
    """Dtype and shape, with the dtype that JAX gives the array."""
    if not hasattr(x, "dtype"):
        return f"{x!r} ({type(x).__name__}), which is no array"
    return f"{jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)}{list(np.shape(x))}"
