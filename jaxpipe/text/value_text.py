"""Values and trees as short texts, for messages."""

import inspect
from collections.abc import Sequence

import jax

from jaxpipe.array_types import PyTree


#: The longest text of a value that a message quotes.
_LONGEST = 60


def shown(value: object) -> str:
    """Return a short text for a value in a message: the value with its type, or the type alone if it is long.

    Example:
      >>> shown("4"), shown(len), shown([0] * 100), shown(None)
      ("'4' (str)", "the function 'len'", 'a value of type list', 'None')
    """
    if value is None:
        return "None"
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__name__', type(value).__name__)!r}"
    text = repr(value)
    if len(text) > _LONGEST or "\n" in text or " at 0x" in text:
        return f"a value of type {type(value).__name__}"
    return f"{text} ({type(value).__name__})"


def structure_difference(given: PyTree, expected: PyTree) -> str:
    """Return the paths in which two trees differ, as a text for a message; empty if they have one structure."""
    if jax.tree.structure(given) == jax.tree.structure(expected):
        return ""
    paths = [
        {jax.tree_util.keystr(path) or "(the array itself)" for path, _ in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (given, expected)
    ]
    more, less = (listed(sorted(paths[k] - paths[1 - k])) for k in (0, 1))
    parts = [f"{what} {names}" for what, names in (("it has", more), ("it lacks", less)) if names]
    return "; ".join(parts) or "its containers are of other types, or have other static fields"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return the first of some names, and how many more there are.

    Example:
      >>> listed(["a", "b", "c"], most=2)
      'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
