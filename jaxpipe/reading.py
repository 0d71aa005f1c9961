"""JSON from sources that are not trusted, checked against the types that it is to become.

Nothing in a text is looked up, imported or run: only dataclasses and named tuples that the caller names are made, from
numbers, texts and lists of the kinds that their annotations name.
"""

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from jaxpipe.errors import JaxpipeError


#: Longer texts are refused, and those of more values, before they are parsed: parsed, a value takes up to 150 bytes
#: and 3 us. A network of 512 devices has 530,000, the profile of a program of 5,000 operators 60,000.
MOST_CHARACTERS, MOST_VALUES = 16 * 2**20, 600_000

#: Whole numbers are below; nothing that is counted here is larger.
LARGEST = 2**63

T = TypeVar("T")


def read_json(text: str, what: str, error: type[JaxpipeError]) -> dict[str, Any]:
    """The object that a JSON text holds.

    Args:
      text: of at most ``MOST_CHARACTERS``, with at most ``MOST_VALUES`` commas and opening brackets.
      what: what it is, for errors.
      error: what to raise.

    Raises:
      error: naming the line, if it is not JSON; if it is too long, too deep, or no object; if a number is not finite,
        or an object has a name twice.
    """
    if not isinstance(text, str):
        raise error(f"{what} is to be read from a {type(text).__name__}; pass the text of the file.")
    if len(text) > MOST_CHARACTERS:
        raise error(f"{what} has {len(text):,} characters; at most {MOST_CHARACTERS:,} are read.")
    values = sum(map(text.count, ",[{"))
    if values > MOST_VALUES:
        raise error(f"{what} has {values:,} commas and opening brackets; at most {MOST_VALUES:,} are read.")
    try:
        data = json.loads(text, parse_constant=_refuse, object_pairs_hook=_object)
    except json.JSONDecodeError as problem:
        raise error(f"{what} is not JSON: line {problem.lineno}: {problem.msg}.") from None
    except ValueError as problem:  # a number of thousands of digits, one that is no number, or a name twice
        raise error(f"{what} cannot be read: {problem}.") from None
    except RecursionError:
        raise error(f"{what} cannot be read: its lists stand too deep in each other.") from None
    if not isinstance(data, dict):
        raise error(f"{what} is a JSON {_kind(data)}; it must be an object.")
    return data


def read_as(kind: Any, value: Any, where: str, error: type[JaxpipeError]) -> Any:
    """A JSON value as an annotated type.

    Args:
      kind: ``int``, ``float``, ``str``, ``bool``, ``None``, a union of these, ``tuple[...]``, ``dict[str, ...]``, a
        dataclass (from an object), a named tuple (from a list), or ``range`` (from its two ends).
      value: what ``json.loads`` gave.
      where: the value's place, for errors.
      error: what to raise.

    Raises:
      error: saying where which kind was found in place of which.

    Example:
      >>> from jaxpipe.errors import ProfileError
      >>> read_as(tuple[int, ...], [1, 2], "cuts", ProfileError)
      (1, 2)
      >>> read_as(dict[str, int], {"arena": "big"}, "memory", ProfileError)
      Traceback (most recent call last):
      ...
      jaxpipe.errors.ProfileError: memory.arena is a string; it must be a whole number.
    """
    origin, arguments = _parts(kind)
    if origin in (typing.Union, types.UnionType):
        chosen = next((one for one in arguments if _fits(one, value)), None)
        if chosen is None and not (value is None and types.NoneType in arguments):
            raise error(f"{where} is {_kind(value)}; it must be {' or '.join(map(_name, arguments))}.")
        return value if chosen is None else read_as(chosen, value, where, error)
    if not _fits(kind, value):
        raise error(f"{where} is {_kind(value)}; it must be {_name(kind)}.")
    if kind is float:
        return _finite(value, where, error)
    if kind is str and any("\ud800" <= c <= "\udfff" for c in value):
        raise error(f"{where} holds half of a surrogate pair, which is no character.")
    if kind is int and not -LARGEST <= value < LARGEST:
        raise error(f"{where} is a number of {len(str(abs(value)))} digits; it must be below 2**63.")
    if kind is range:
        return range(*read_as(tuple[int, int], value, where, error))
    if origin is tuple:
        return _read_tuple(arguments, value, where, error)
    if origin is dict:
        return {
            read_as(str, name, f"a name in {where}", error): read_as(arguments[1], one, f"{where}.{name[:40]}", error)
            for name, one in value.items()
        }
    if dataclasses.is_dataclass(kind):
        return read_dataclass(typing.cast("type[Any]", kind), value, where, error)
    if _is_named_tuple(kind):
        return _read_named_tuple(kind, value, where, error)
    return value


def read_dataclass(
    kind: type[T],
    data: Any,
    where: str,
    error: type[JaxpipeError],
    parts: Mapping[str, Callable[[Any, str], Any]] = types.MappingProxyType({}),
) -> T:
    """A dataclass from a JSON object, every field by its annotation; those that have a default may be missing.

    Args:
      kind: the dataclass.
      data: what ``json.loads`` gave.
      where: its place, for errors.
      error: what to raise.
      parts: fields that are read by a function of the value and its place instead.

    Raises:
      error: if a field is missing, unknown, or of the wrong kind.
    """
    if not isinstance(data, dict):
        raise error(f"{where} is {_kind(data)}; it must be an object.")
    fields, hints = dataclasses.fields(typing.cast("Any", kind)), _hints(kind)
    names = [field.name for field in fields]
    unknown = [name for name in data if name not in names]
    if unknown:
        raise error(f"{where} has the field {unknown[0][:40]!r}, which is not known; known: {', '.join(names)}.")
    missing = dataclasses.MISSING
    for field in fields:
        if field.name not in data and field.default is missing and field.default_factory is missing:
            raise error(f"{where} lacks the field {field.name!r}.")
    values = {}
    for name, value in data.items():
        place = f"{where}.{name}"
        values[name] = parts[name](value, place) if name in parts else read_as(hints[name], value, place, error)
    return kind(**values)


def refuse_negative(
    value: Any, where: str, error: type[JaxpipeError], signed: Collection[str] = (), least: int = 0
) -> None:
    """Raise an error if a number in a dataclass is negative.

    Args:
      value: the dataclass, or a field of one.
      where: its place, for errors.
      error: what to raise.
      signed: fields that may be negative.
      least: what numbers are at least.
    """
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in signed:
                refuse_negative(getattr(value, field.name), f"{where}.{field.name}", error, signed)
    elif isinstance(value, tuple):
        for k, entry in enumerate(value):
            refuse_negative(entry, f"{where}[{k}]", error, signed)
    elif isinstance(value, dict):
        for name, entry in value.items():
            refuse_negative(entry, f"{where}.{name[:40]}", error, signed)
    elif isinstance(value, int | float) and value < least:
        raise error(f"{where} is {value}; it must be at least {least}.")


@functools.cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read_tuple(arguments: tuple[Any, ...], value: list[Any], where: str, error: type[JaxpipeError]) -> tuple[Any, ...]:
    if len(arguments) == 2 and arguments[1] is ...:
        if _are_numbers(arguments[0], value):
            return tuple(map(arguments[0], value))
        return tuple(read_as(arguments[0], one, f"{where}[{k}]", error) for k, one in enumerate(value))
    if len(value) != len(arguments):
        raise error(f"{where} has {len(value)} entries; it must have {len(arguments)}.")
    return tuple(
        read_as(kind, one, f"{where}[{k}]", error) for k, (kind, one) in enumerate(zip(arguments, value, strict=True))
    )


def _are_numbers(kind: Any, values: list[Any]) -> bool:
    """Return whether all of a list are numbers of a kind; checked together, which is ten times faster than singly."""
    if kind is int:
        return set(map(type, values)) == {int} and min(values) >= -LARGEST and max(values) < LARGEST
    return kind is float and set(map(type, values)) == {float} and all(map(math.isfinite, values))


def _read_named_tuple(kind: Any, value: list[Any], where: str, error: type[JaxpipeError]) -> Any:
    fields, hints = kind._fields, _hints(kind)
    least = len(fields) - len(kind._field_defaults)
    if not least <= len(value) <= len(fields):
        raise error(f"{where} has {len(value)} entries; it must be [{', '.join(fields)}].")
    named = zip(fields, value, strict=False)
    return kind(*(read_as(hints[name], one, f"{where}.{name}", error) for name, one in named))


def _fits(kind: Any, value: Any) -> bool:
    """Whether a JSON value is of the kind of value that a type is read from."""
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind in (str, bool, types.NoneType):
        return isinstance(value, kind)
    origin, _ = _parts(kind)
    if origin is tuple or kind is range or _is_named_tuple(kind):
        return isinstance(value, list)
    assert origin is dict or dataclasses.is_dataclass(kind), f"{kind} is never read from JSON"
    return isinstance(value, dict)


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _finite(value: float, where: str, error: type[JaxpipeError]) -> float:
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise error(f"{where} is not a finite number.")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has {next(n for n in data if names.count(n) > 1)[:40]!r} twice")
    return data


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _kind(value: Any) -> str:
    """What a value is, as JSON calls it."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _name(kind: Any) -> str:
    """What a type is read from."""
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", types.NoneType: "null"}
    if kind in names:
        return names[kind]
    is_list = typing.get_origin(kind) is tuple or kind is range or _is_named_tuple(kind)
    return "a list" if is_list else "an object"
