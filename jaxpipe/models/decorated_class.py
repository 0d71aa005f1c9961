"""A class that is another one in everything but some of its methods.

It is a subclass, so ``super()`` in methods works and instances are instances of both, of the same name in the same
module, so pickle finds it where the decorated class is bound. The statements that make subclasses what they are run
once, for the original: ``__init_subclass__``, and with it the transformation of a Linen class into a dataclass, which
would write another ``__init__`` over one that a decorator has wrapped.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from flax import nnx

from jaxpipe import _compat


T = TypeVar("T", bound=type)

#: What a class has of its own, and a subclass would not inherit.
_OWN = (
    "__module__",
    "__qualname__",
    "__doc__",
    "__orig_bases__",
    "__type_params__",
    "__static_attributes__",
    "__firstlineno__",
)

#: Copied, as decorators and Flax's dataclasses change those of the class that they are given.
_COPIED = ("__annotations__", "__dataclass_fields__")

#: Which Python calls for each new subclass.
_HOOK = "__init_subclass__"

_lock = threading.RLock()


def twin_class(original: T, methods: Mapping[str, object]) -> T:
    """A subclass that has other methods, and else is what ``original`` is.

    Example:
      >>> class Point:
      ...     def __init__(self, x): self.x = x
      >>> twin = twin_class(Point, {"double": lambda self: 2 * self.x})
      >>> twin.__name__, twin(3).double(), isinstance(twin(3), Point)
      ('Point', 6, True)
    """
    held = vars(original)
    body = {name: held[name] for name in _OWN if name in held}
    body |= {name: dict(held[name]) for name in _COPIED if name in held}
    # Fields that a dataclass decorator has yet to take out of the class.
    body |= {name: value for name, value in held.items() if isinstance(value, dataclasses.Field)}
    metaclass: Any = type(original)
    with replaced(original, _HOOK, classmethod(lambda cls, **kwargs: None)):
        twin: Any = metaclass(original.__name__, (original,), {**body, **methods})
    if issubclass(original, nnx.Module):
        _compat.register_nnx_class(twin, like=original)
    return twin


@contextlib.contextmanager
def replaced(cls: type, name: str, value: object) -> Iterator[None]:
    """Meanwhile a class has another attribute; other threads wait to replace theirs."""
    with _lock:
        before = vars(cls).get(name)
        type.__setattr__(cls, name, value)
        try:
            yield
        finally:
            if before is None:
                type.__delattr__(cls, name)
            else:
                type.__setattr__(cls, name, before)
