"""The agreement of processes that train together on all that a result depends on, by name."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import jax

from jaxpipe import multihost
from jaxpipe.errors import PartitionError
from jaxpipe.text.stable_text import digest
from jaxpipe.text.value_text import listed


_T = TypeVar("_T")

#: The longest text that an error shows as it is.
_LONGEST = 60

#: How many places an error names.
_MOST_PLACES = 4


#: Something that must be the same in all processes: a text, or the texts of its places by name, which tell where two
#: processes differ. A text without a name is of the whole.
Part = str | Mapping[str, str]


def agree(call: str, parts: Callable[[], Mapping[str, Part]]) -> None:
    """Raise ``PartitionError`` in all processes unless all have the same parts, which a single one does not make."""
    agreed(call, lambda: None, lambda _: parts())


def agreed(call: str, make: Callable[[], _T], parts_of: Callable[[_T], Mapping[str, Part]]) -> _T:
    """Return the result of ``make()``, once all processes have the same.

    Args:
      call: what all processes call.
      make: if it raises in one process, all raise.
      parts_of: what is compared of a result, by name.

    Raises:
      PartitionError: in all processes, with the names of the parts, and of places in them, that differ.
    """
    if jax.process_count() == 1:
        return make()
    results: list[_T] = []

    def parts() -> dict[str, dict[str, str]]:
        results.append(make())
        return {name: _digested(part) for name, part in parts_of(results[0]).items()}

    every = multihost.exchanged(call, parts)
    differences = list(_differences(every))
    if differences:
        lines = "".join(f"\n  {line}" for line in differences)
        raise PartitionError(
            f"{call}: the {len(every)} processes of this run differ in{lines}\nAll of them run the same script, with "
            "the same versions installed. Give each the same arguments; shapes are those of the whole batch. What a "
            "process draws or reads for itself (a seed, a file) must be the same in all."
        )
    return results[0]


def _digested(part: Part) -> dict[str, str]:
    """Return the texts of a part by place, long ones as digests."""
    texts = {"": part} if isinstance(part, str) else part
    return {place: f"\n{digest(x)}" if len(x) > _LONGEST or "\n" in x else x for place, x in texts.items()}


def _differences(every: Sequence[Mapping[str, Mapping[str, str]]]) -> Iterator[str]:
    """Yield a line for each part in which processes differ."""
    for name in dict.fromkeys(itertools.chain.from_iterable(every)):
        parts = [parts.get(name, {"": "nothing"}) for parts in every]
        alike: dict[frozenset[tuple[str, str]], list[int]] = {}
        for k, part in enumerate(parts):
            alike.setdefault(frozenset(part.items()), []).append(k)
        kinds = {_processes(numbers): parts[numbers[0]] for numbers in alike.values()}
        if len(kinds) == 1:
            continue
        if all(kind.keys() == {""} and not kind[""].startswith("\n") for kind in kinds.values()):
            yield f"{name}: " + ", ".join(f"{kind['']} in {processes}" for processes, kind in kinds.items())
            continue
        named = filter(None, dict.fromkeys(itertools.chain.from_iterable(kinds.values())))
        places = [place for place in named if len({kind.get(place) for kind in kinds.values()}) > 1]
        where = f", in {listed(places, _MOST_PLACES)}" if places else ""
        first, *others = kinds
        yield f"{name}{where}: not the same in {' and '.join(others)} as in {first}"


def _processes(numbers: Sequence[int]) -> str:
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
