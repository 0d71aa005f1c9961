"""Progress of what takes long: log messages, and a line on a terminal."""

import contextlib
import contextvars
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from rich.console import Console
from rich.status import Status
from rich.text import Text

from jaxpipe import multihost
from jaxpipe.text.plain_table import printable


#: Its messages of level INFO say what is being done.
LOGGER = logging.getLogger("jaxpipe")

#: The line appears after so many seconds.
PATIENCE = 2.0

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
                shown = stack.enter_context(contextlib.closing(_Line(console)))
                stack.callback(_line.reset, _line.set(shown))
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
    if sys.stderr.isatty():
        yield
        return
    with contextlib.closing(_Lines(seconds)) as shown:
        token = _line.set(shown)
        try:
            yield
        finally:
            _line.reset(token)


class _Shown(Protocol):
    def update(self, text: str) -> None: ...


class _Lines:
    """Lines for a log, each with the seconds since the first."""

    def __init__(self, seconds: float):
        self._text = "Starting"
        self._ended = threading.Event()
        threading.Thread(target=self._write, args=(seconds, time.monotonic()), daemon=True).start()

    def update(self, text: str) -> None:
        self._text = text

    def close(self) -> None:
        self._ended.set()

    def _write(self, seconds: float, start: float) -> None:
        while not self._ended.wait(seconds):
            print(f"jaxpipe: {time.monotonic() - start:.0f} s: {printable(self._text)}", file=sys.stderr, flush=True)


class _Line:
    """A line with a spinner, which appears after a while."""

    def __init__(self, console: Console):
        self._status = Status("", console=console)
        self._lock = threading.Lock()
        self._closed = False
        self._timer = threading.Timer(PATIENCE, self._start)
        self._timer.daemon = True
        self._timer.start()

    def update(self, text: str) -> None:
        self._status.update(Text(text))

    def close(self) -> None:
        with self._lock:
            self._timer.cancel()
            self._closed = True
            self._status.stop()

    def _start(self) -> None:
        with self._lock:
            if not self._closed:
                self._status.start()


#: The seconds of each phase so far.
_phases: contextvars.ContextVar[dict[str, float] | None] = contextvars.ContextVar("phases", default=None)

_line: contextvars.ContextVar[_Shown | None] = contextvars.ContextVar("line", default=None)


def _update(text: str) -> None:
    line = _line.get()
    if line is not None:
        line.update(text)
