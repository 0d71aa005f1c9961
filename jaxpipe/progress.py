"""Progress of long work, such as a plan within a budget: log records, and a line on a terminal.

Records go to the logger ``jaxpipe``, at level INFO. If they are not shown and the error stream is a terminal, the
latest of them stands there on a line of its own until the work is done.
"""

import contextlib
import contextvars
import logging
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxpipe import hosts


_LOGGER = logging.getLogger("jaxpipe")

#: The line on the terminal while there is work, a ``rich.status.Status``.
_LINE: contextvars.ContextVar[Any] = contextvars.ContextVar("jaxpipe_progress", default=None)


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Show progress on a line of the terminal during the block, in the first process, unless it is logged."""
    logged = _LOGGER.isEnabledFor(logging.INFO)
    if logged or _LINE.get() is not None or not sys.stderr.isatty() or not hosts.is_first():
        yield
        return
    with Console(stderr=True).status(Text("planning")) as line:
        token = _LINE.set(line)
        try:
            yield
        finally:
            _LINE.reset(token)


def tell(text: str) -> None:
    """Log what is being done now, and show it if there is a line for it."""
    _LOGGER.info("%s", text)
    line = _LINE.get()
    if line is not None:
        line.update(Text(text))
