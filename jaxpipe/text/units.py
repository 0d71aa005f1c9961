"""Counts, byte counts and times, as people write and read them."""

import numbers
import operator
import re
import reprlib
from typing import Any

from jaxpipe.errors import MemoryBudgetError


#: Memory of fewer bytes than this, written without a unit, is a number of gigabytes or megabytes whose unit is missing.
FEWEST_BYTES = 1000

#: A size as a text: a number, and a unit that may have a prefix.
_SIZE = re.compile(r"\s*(?P<number>\d+(\.\d+)?)\s*(?P<prefix>[kmgt]?)(?P<binary>(?<=[kmgt])i)?b?\s*", re.IGNORECASE)

#: The most gigabytes that a device is thought to have; a larger number without a unit is one of megabytes.
MOST_GIGABYTES = 512


def whole_number(value: Any, name: str, error: type[Exception]) -> int:
    """Return a whole number as an int; NumPy's integers are such numbers, booleans and floats are not.

    Raises:
      error: if it is no whole number; ``name`` is the argument's.

    Example:
      >>> whole_number("4", "num_microbatches", ValueError)
      Traceback (most recent call last):
      ValueError: num_microbatches='4' (str); it must be a whole number, as in num_microbatches=4.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        readable = value.strip().isdecimal() if isinstance(value, str) else isinstance(value, float) and value % 1 == 0
        fix = f", as in {name}={int(value)}" if readable else ""
        raise error(f"{name}={reprlib.repr(value)} ({type(value).__name__}); it must be a whole number{fix}.")
    return operator.index(value)


def parse_bytes(memory: float | str, name: str = "memory") -> int:
    """A memory budget in bytes: a number, or a text such as ``"8GiB"`` or ``"500 MB"``; ``name`` is the argument's.

    Units are read in small or capital letters. Without an ``i`` they are decimal: ``"8G"`` is ``"8GB"``, 8e9 bytes.

    Raises:
      MemoryBudgetError: if it is neither.

    Example:
      >>> parse_bytes("1.5 KiB")
      1536
    """
    if isinstance(memory, numbers.Real) and not isinstance(memory, bool | str) and memory > 0 and memory % 1 == 0:
        return int(memory)
    match = _SIZE.fullmatch(memory) if isinstance(memory, str) else None
    if match is None or float(match["number"]) <= 0:
        raise MemoryBudgetError(
            f"{name}={memory!r} is not a size. Pass bytes as a positive int, or a text such as '8GiB' or '500MB'."
        )
    scale = 1024 if match["binary"] else 1000
    return int(float(match["number"]) * scale ** " kmgt".index(match["prefix"].lower() or " "))


def asked_bytes(memory: int | str | None, budget: int) -> str:
    """Return a budget as the caller wrote it, beside what that is.

    Example:
      >>> asked_bytes("2MB", 2000000), asked_bytes(2000000, 2000000)
      ("memory='2MB' (2000000 bytes)", 'memory=2000000 (1.91 MiB)')
    """
    size = f"{budget} bytes" if isinstance(memory, str) else bytes_text(budget)
    return f"memory={memory!r} ({size})"


def device_bytes(memory: float | str, name: str = "memory") -> int:
    """Return the bytes of a device's or a host's memory, as ``parse_bytes`` does, but no handful without a unit.

    Raises:
      MemoryBudgetError: if it is no size, or a number without a unit that is too small for one of bytes.

    Example:
      >>> device_bytes("8GB")
      8000000000
    """
    size = parse_bytes(memory, name)
    if size < FEWEST_BYTES and not (isinstance(memory, str) and re.search("[A-Za-z]", memory)):
        unit = "GB" if size <= MOST_GIGABYTES else "MB"
        raise MemoryBudgetError(
            f"{name}={memory!r} is {size} byte{'s' if size > 1 else ''}, as a number without a unit is a number of "
            f"bytes, and nothing fits into so few. Did you mean {name}='{memory}{unit}'? Pass '{size}B' for bytes."
        )
    return size


def bytes_text(count: float) -> str:
    """A byte count to read: ``1.50 MiB``."""
    scale, unit = byte_unit(count)
    return f"{count / scale:.{0 if scale == 1 else 2}f} {unit}"


def byte_unit(count: float) -> tuple[int, str]:
    """Return the largest unit of bytes in which a count is at least 1, and its name.

    Example:
      >>> byte_unit(5000)
      (1024, 'KiB')
    """
    units = [(1024**k, unit) for k, unit in enumerate(("B", "KiB", "MiB", "GiB"))]
    return next((unit for unit in reversed(units) if count >= unit[0]), units[0])


def seconds_text(seconds: float) -> str:
    """A time to read, of three digits.

    Example:
      >>> seconds_text(0.0123), seconds_text(4e-6)
      ('12.3 ms', '4 us')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us" if seconds >= 1e-8 or not seconds else "<0.01 us"
