"""The reverse walk over a program: what some values depend on."""

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import TypeVar


#: An operator, an equation, a step of a backward pass.
Item = TypeVar("Item")

#: A value that items make and read.
Value = TypeVar("Value", bound=Hashable)


def needed(
    items: Sequence[Item],
    wanted: Iterable[Value],
    ends: Callable[[Item], tuple[Iterable[Value], Iterable[Value]]],
    known: Container[Value] = (),
    always: Callable[[Item], bool] = lambda item: False,
) -> tuple[tuple[Item, ...], set[Value]]:
    """Return the items on which values depend, in their order, and all values that are needed.

    Args:
      items: each behind those that make what it reads.
      wanted: the values.
      ends: by item, the values that it makes and those that it reads.
      known: values that nobody has to make.
      always: whether an item is needed anyway.

    Example:
      >>> programs = {"double": "xy", "square": "xz", "sum": "yw"}
      >>> needed(list(programs), ["w"], lambda name: (programs[name][1], programs[name][0]))[0]
      ('double', 'sum')
    """
    values, kept = {v for v in wanted if v not in known}, []
    for item in reversed(items):
        makes, reads = ends(item)
        if not values.isdisjoint(makes) or always(item):
            values.update(v for v in reads if v not in known)
            kept.append(item)
    return tuple(reversed(kept)), values


def closure(values: Iterable[Value], following: Callable[[Value], Iterable[Value]]) -> dict[Value, None]:
    """Return values and all that follow from them, each once.

    Example:
      >>> list(closure([6], lambda n: [n // 2] if n % 2 == 0 else []))
      [6, 3]
    """
    reached, pending = dict[Value, None](), list(values)
    while pending:
        value = pending.pop()
        if value not in reached:
            reached[value] = None
            pending.extend(following(value))
    return reached
