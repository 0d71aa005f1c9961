"""Schedules by the names that people, papers and plans call them."""

import functools
import re
from collections.abc import Callable

from jaxpipe.schedules.asynchronous import double_buffered
from jaxpipe.schedules.interleaved import interleaved
from jaxpipe.schedules.one_f_one_b import one_f_one_b
from jaxpipe.schedules.table import Schedule
from jaxpipe.schedules.zero_bubble import zero_bubble


#: What else schedules are called, in small letters and without ``-``, ``_`` and blanks.
_ALIASES: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "1f1btextbook": one_f_one_b,
    "interleaved1f1b": interleaved,
    "zb": zero_bubble,
    "zbh1": zero_bubble,
    "zerobubbleh1": zero_bubble,
    "2bw": double_buffered,
    "pipedream2bw": double_buffered,
}


def plain_name(name: str) -> str:
    """Return a name in small letters, without ``-``, ``_`` and blanks.

    Example:
      >>> plain_name("Zero-Bubble"), plain_name("zero_bubble")
      ('zerobubble', 'zerobubble')
    """
    return re.sub(r"[-_\s]", "", name.lower())


def schedule_named(
    name: str, known: dict[str, Callable[[int, int], Schedule]]
) -> Callable[[int, int], Schedule] | None:
    """Return the function that makes the schedule of a name, in any spelling; None if no schedule is called so.

    A name is one of ``known``, a common alias such as ``"1f1b"`` or ``"zb"``, or one that a plan prints.
    """
    plain = plain_name(name)
    chunks = re.fullmatch(r"interleaved(\d{1,3})", plain)
    if chunks:
        return functools.partial(interleaved, num_chunks=int(chunks[1]))
    return {**_ALIASES, **{plain_name(name): maker for name, maker in known.items()}}.get(plain)
