"""Byte counts and times, as people write and read them."""

import re

from jaxpipe.errors import MemoryBudgetError


def parse_bytes(memory: float | str, name: str = "memory") -> int:
    """A memory budget in bytes: a number, or a text such as ``"8GiB"`` or ``"500 MB"``; ``name`` is the argument's.

    Raises:
      MemoryBudgetError: if it is neither.

    Example:
      >>> parse_bytes("1.5 KiB")
      1536
    """
    if isinstance(memory, int | float) and not isinstance(memory, bool) and memory > 0 and memory % 1 == 0:
        return int(memory)
    units = {"": 1, "B": 1, **{f"{p}iB": 1024 ** (k + 1) for k, p in enumerate("KMGT")}}
    units |= {f"{p}B": 1000 ** (k + 1) for k, p in enumerate("KMGT")}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", memory) if isinstance(memory, str) else None
    if match is None or match[2] not in units or float(match[1]) <= 0:
        raise MemoryBudgetError(
            f"{name}={memory!r} is not a size. Pass bytes as a positive int, or a text such as '8GiB' or '500MB'."
        )
    return int(float(match[1]) * units[match[2]])


def bytes_text(count: float) -> str:
    """A byte count to read: ``1.50 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def seconds_text(seconds: float) -> str:
    """A time to read, of three digits.

    Example:
      >>> seconds_text(0.0123), seconds_text(4e-6)
      ('12.3 ms', '4 us')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
