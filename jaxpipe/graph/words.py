"""Words that stand for values of this process: in names of jitted functions, and in labels of arrays."""

from collections.abc import Hashable
from typing import Any


def word_for(value: Hashable, word: str) -> str:
    """Return a word, like the one given, by which ``by_word`` finds a value: for equal values the same one.

    Such words pass through JAX's tracing, which values do not.
    """
    while _known.setdefault(word, value) != value:
        word += "_"
    return word


def by_word(word: str) -> Any:
    """Return the value for which ``word_for`` gave a word in this process."""
    return _known[word]


_known: dict[str, Hashable] = {}
