"""The agreement of processes that train together on all that a result depends on, by name."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Part:
    """Something that must be the same in all processes.

    Attributes:
      text: equal in processes that have the same.
      places: texts of what it is made of, by name, which tell where two processes differ.
    """

    text: str
    places: Mapping[str, str] = field(default_factory=dict)

    @property
    def digests(self) -> "Part":
        """The part as others get it: long texts as digests."""
        short = len(self.text) <= _LONGEST and "\n" not in self.text
        return Part(self.text if short else f"\n{digest(self.text)}", {k: digest(x) for k, x in self.places.items()})


def agree(call: str, parts: Callable[[], Mapping[str, Part | str]]) -> None:
    """Raise ``PartitionError`` in all processes unless all have the same parts, which a single one does not make."""
    agreed(call, lambda: None, lambda _: parts())


def agreed(call: str, make: Callable[[], _T], parts_of: Callable[[_T], Mapping[str, Part | str]]) -> _T:
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

    def parts() -> dict[str, Part]:
        results.append(make())
        given = parts_of(results[0]).items()
        return {name: (Part(part) if isinstance(part, str) else part).digests for name, part in given}

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


def _differences(every: Sequence[Mapping[str, Part]]) -> Iterator[str]:
    """Yield a line for each part in which processes differ."""
    for name in dict.fromkeys(itertools.chain.from_iterable(every)):
        parts = [parts.get(name, Part("nothing")) for parts in every]
        alike: dict[str, list[int]] = {}
        for k, part in enumerate(parts):
            alike.setdefault(part.text, []).append(k)
        if len(alike) == 1:
            continue
        if not any(text.startswith("\n") for text in alike):
            yield f"{name}: " + ", ".join(f"{text} in {_processes(numbers)}" for text, numbers in alike.items())
            continue
        kinds = [parts[numbers[0]].places for numbers in alike.values()]
        places = [p for p in dict.fromkeys(itertools.chain.from_iterable(kinds)) if len({x.get(p) for x in kinds}) > 1]
        where = f", in {listed(places, _MOST_PLACES)}" if places else ""
        first, *others = map(_processes, alike.values())
        yield f"{name}{where}: not the same in {' and '.join(others)} as in {first}"


def _processes(numbers: Sequence[int]) -> str:
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
