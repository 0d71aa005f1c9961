"""Blocks that a model has several of: equal ones under one name, as ``4 x Net/blocks/*``, and all of a family."""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar


T = TypeVar("T")

#: A module's number, at the end of a part of a path: the 3 of ``blocks/3``, ``Block_3`` and ``block3``.
_NUMBER = re.compile(r"(\d+)(?=/)")

#: A part of a path with such a number.
_NUMBERED = re.compile(r"(.*?)\d+")


def pattern(name: str) -> tuple[str, ...]:
    """Return the parts of a path between the numbers of modules; an operator's name, the last, has none.

    Example:
      >>> pattern("Net/blocks/3/inner/exp2")
      ('Net/blocks/', '/inner/exp2')
    """
    return tuple(_NUMBER.split(name)[::2])


def common_name(names: Sequence[str]) -> str:
    """Return one name for names of one pattern: ``*`` where their numbers differ.

    Example:
      >>> common_name(["Block_0/Dense_1/add", "Block_3/Dense_1/add"])
      'Block_*/Dense_1/add'
    """
    parts = zip(*map(_NUMBER.split, names), strict=True)
    return "".join(choices[0] if len(set(choices)) == 1 else "*" for choices in parts)


def counted(names: Sequence[str]) -> str:
    """Return one name for names of one pattern, with how many they are if there are several."""
    return common_name(names) if len(names) == 1 else f"{len(names)} x {common_name(names)}"


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Return items in groups of equal keys, in the order of the first of each."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def modules_by_family(paths: Iterable[str]) -> Mapping[str, Mapping[str, list[int]]]:
    """Return the places of the paths below each module, by its family and by its own path.

    Example:
      >>> families = modules_by_family(["Net/Block_0/Dense_0", "Net/Block_0/add", "Net/Block_1/Dense_0"])
      >>> dict(families["Net/Block_*"])
      {'Net/Block_0': [0, 1], 'Net/Block_1': [2]}
    """
    families: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, path in enumerate(paths):
        parts = path.split("/")
        for depth, part in enumerate(parts):
            named = _NUMBERED.fullmatch(part)
            if named is not None:
                name = "/".join([*parts[:depth], f"{named[1]}*"])
                families[name]["/".join(parts[: depth + 1])].append(place)
    return families


@dataclass
class _Module(Generic[T]):
    """A module with what its own operators and its submodules have."""

    items_here: list[T] = field(default_factory=list)
    inner: "defaultdict[str, _Module[T]]" = field(default_factory=lambda: defaultdict(_Module))

    def items(self) -> list[T]:
        return [*self.items_here, *(item for module in self.inner.values() for item in module.items())]


def sums_by_module(
    named: Iterable[tuple[str, T]], content: Callable[[T], Hashable], shown: Callable[[list[T]], bool]
) -> list[tuple[str, list[T]]]:
    """Return the modules of a model, outer ones first, with the items of each; equal blocks are one module.

    Args:
      named: the items with their names: the path of a module and the name of an operator in it.
      content: of an item, what is the same in equal blocks; None if it may differ.
      shown: whether a module of some items is worth a line.
    """
    root: _Module[T] = _Module()
    for name, item in named:
        module = root
        for part in name.split("/")[:-1]:
            module = module.inner[part]
        module.items_here.append(item)
    lines: list[tuple[str, list[T]]] = []

    def signature(module: _Module[T]) -> Hashable:
        contents = tuple(c for item in module.items_here if (c := content(item)) is not None)
        return contents, tuple((n, signature(m)) for n, m in module.inner.items())

    def add_lines(modules: Iterable[tuple[str, _Module[T]]]) -> int:
        """Add the lines of modules and of those inside them; return how many kinds of modules there are."""
        kinds = grouped(modules, lambda pair: (pattern(f"{pair[0]}/"), signature(pair[1])))
        for blocks in kinds:
            items = [item for _, module in blocks for item in module.items()]
            if not shown(items):
                continue
            place = len(lines)
            inner = add_lines((f"{path}/{name}", m) for path, module in blocks for name, m in module.inner.items())
            if blocks[0][1].items_here or inner != 1:  # else it has what the one kind inside has
                lines.insert(place, (counted([f"{path}/" for path, _ in blocks]).rstrip("/"), items))
        return len(kinds)

    add_lines(root.inner.items())
    return lines
