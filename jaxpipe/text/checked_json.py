"""JSON from sources that are not trusted, decoded by msgspec into dataclasses.

Nothing in a text is looked up, imported or run. The range of a number is in the annotation of its field.
"""

import dataclasses
import json
from collections.abc import Collection
from typing import Annotated, Any, TypeVar

import msgspec

from jaxpipe.errors import PartitionError


#: Longer texts are refused, and those of more values, before they are parsed: parsed, a value takes up to 150 bytes
#: and 3 us. A network of 512 devices has 530,000, the profile of a program of 5,000 operators 60,000.
MOST_CHARACTERS, MOST_VALUES = 16 * 2**20, 600_000

#: Whole numbers are below; nothing that is counted here is larger.
LARGEST = 2**63

#: Whole numbers, amounts (seconds, bytes) and differences.
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=LARGEST - 1)]
Amount = Annotated[float, msgspec.Meta(ge=0)]

T = TypeVar("T")


def read_json(text: str, kind: type[T], what: str, beside: Collection[str] = ()) -> T:
    """Return the dataclass that a JSON text holds; fields with a default may be missing.

    Names in ``beside`` may stand in it for people who read it.
    """
    if not isinstance(text, str):
        raise PartitionError(f"{what} is to be read from a {type(text).__name__}; pass the text of the file.")
    if len(text) > MOST_CHARACTERS:
        raise PartitionError(f"{what} has {len(text):,} characters; at most {MOST_CHARACTERS:,} are read.")
    values = sum(map(text.count, ",[{"))
    if values > MOST_VALUES:
        raise PartitionError(f"{what} has {values:,} commas and opening brackets; at most {MOST_VALUES:,} are read.")
    try:
        data = json.loads(text, object_pairs_hook=_object)  # msgspec does not name lines, and takes the last of equals
        value = msgspec.json.decode(text, type=kind, dec_hook=_range)
        _refuse_unknown(value, {name: x for name, x in data.items() if name not in beside}, "$")
    except RecursionError:
        raise PartitionError(f"{what} cannot be read: it is nested too deeply.") from None
    except ValueError as problem:  # of all three
        raise PartitionError(f"{what} cannot be read: {problem}.") from None
    return value


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has {next(n for n in data if names.count(n) > 1)[:40]!r} twice")
    return data


def _range(kind: type, value: object) -> range:
    assert kind is range, f"{kind} is never read from JSON"
    return range(*msgspec.convert(value, tuple[int, int]))


def _refuse_unknown(value: object, data: Any, place: str) -> None:
    """Raise ``ValueError`` for a name in JSON that is no field of the dataclass made of it."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        for name, inner in data.items():
            if name not in names:
                raise ValueError(f"unknown field {name[:40]!r} at `{place}`; known: {', '.join(names)}")
            _refuse_unknown(getattr(value, name), inner, f"{place}.{name}")
    elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        for k, pair in enumerate(zip(value, data, strict=True)):
            _refuse_unknown(*pair, f"{place}[{k}]")
