"""Ctrl-C while a step has donated its state."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def hold_interrupts() -> Iterator[None]:
    """Hold SIGINT back inside ``with``; whoever handles it gets it at the end.

    Only the main thread of a process handles signals; in others this does nothing.

    Example:
      >>> done = []
      >>> try:
      ...     with hold_interrupts():
      ...         signal.raise_signal(signal.SIGINT)
      ...         done.append("all of it")
      ... except KeyboardInterrupt:
      ...     print(done)
      ['all of it']
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is None:  # None: a handler that Python cannot put back
        yield
        return
    signals: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if signals:
            signal.raise_signal(signal.SIGINT)
