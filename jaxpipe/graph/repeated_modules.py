"""Modules that a model has several of, ``Block_0``, ``Block_1``, ..., by the paths of operators."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping


#: A module's number at the end of its name: the 3 of ``Block_3`` and of ``blocks/3``.
_NUMBERED = re.compile(r"(.*?)\d+")


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
