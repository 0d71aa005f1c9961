"""Progress of what takes long: log messages, and a line on a terminal."""

import contextlib
import contextvars
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from jaxpipe import multihost
from jaxpipe.text.printed import printable


#: Its messages of level INFO say what is being done.
LOGGER = logging.getLogger("jaxpipe")

#: The line appears after so many seconds, and its text changes after so many.
PATIENCE, REFRESH = 2.0, 0.1

_T = TypeVar("_T")


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Report the work inside: in the log, and if it takes long and stderr is a terminal, in a line on it.

    Works as a decorator too. Inside another ``progress`` the line is that one's.
    """
    with contextlib.ExitStack() as stack:
        if _line.get() is None:
            console = Console(stderr=True)
            if console.is_terminal and multihost.is_first():
                stack.enter_context(_shown(functools.partial(_spin, console)))
        tell(text)
        yield


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the seconds inside as those of a phase, without those of phases inside it.

    The outermost one writes a line for each to the log, ``planning, trace: 1.23 s``. Works as a decorator too.
    """
    outer = _phases.get()
    phases: dict[str, float] = {} if outer is None else outer
    token = _phases.set(phases)
    start, before = time.perf_counter(), sum(phases.values())
    try:
        yield
    finally:
        _phases.reset(token)
        inside = sum(phases.values()) - before
        phases[name] = phases.get(name, 0.0) + time.perf_counter() - start - inside
        for each, seconds in phases.items() if outer is None else ():
            LOGGER.info("planning, %s: %.2f s", each, seconds)


def tell(text: str) -> None:
    """Say what is done next."""
    LOGGER.info(text)
    _update(text)


def track(items: Sequence[_T], text: str) -> Iterator[_T]:
    """Give the items one by one, and count them in the line if there is one."""
    for k, item in enumerate(items):
        _update(f"{text}: {k + 1} of {len(items)}")
        yield item


@contextlib.contextmanager
def lines_each(seconds: float) -> Iterator[None]:
    """Write a line to stderr, where that is no terminal, after each so many seconds that says what is being done."""
    with contextlib.nullcontext() if sys.stderr.isatty() else _shown(functools.partial(_print_lines, seconds)):
        yield


@dataclass
class _Line:
    """The text that a thread shows until the work ends."""

    text: str = "Starting"
    ended: threading.Event = field(default_factory=threading.Event)


@contextlib.contextmanager
def _shown(show: Callable[[_Line], None]) -> Iterator[None]:
    """Let a thread show what is being done inside."""
    line = _Line()
    thread = threading.Thread(target=show, args=(line,), daemon=True)
    token = _line.set(line)
    thread.start()
    try:
        yield
    finally:
        _line.reset(token)
        line.ended.set()
        thread.join()


def _spin(console: Console, line: _Line) -> None:
    """Show a spinner, after a while."""
    if not line.ended.wait(PATIENCE):
        with console.status(Text(line.text)) as status:
            while not line.ended.wait(REFRESH):
                status.update(Text(line.text))


def _print_lines(seconds: float, line: _Line) -> None:
    """Print lines for a log, each with the seconds since the first."""
    start = time.monotonic()
    while not line.ended.wait(seconds):
        print(f"jaxpipe: {time.monotonic() - start:.0f} s: {printable(line.text)}", file=sys.stderr, flush=True)


#: The seconds of each phase so far.
_phases: contextvars.ContextVar[dict[str, float] | None] = contextvars.ContextVar("phases", default=None)

_line: contextvars.ContextVar[_Line | None] = contextvars.ContextVar("line", default=None)


def _update(text: str) -> None:
    if (line := _line.get()) is not None:
        line.text = text
