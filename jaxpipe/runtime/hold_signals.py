"""Signals that arrive while a step has donated its state."""

# The functions of ``signal`` make an enumeration's member of every number and handler, which costs a step 60 us.
import _signal  # pyright: ignore[reportMissingImports]
import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import jax


#: Handlers written in Python, by the number of their signal.
Handlers = dict[int, Callable[[int, FrameType | None], object]]


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
    """Hold signals back inside ``with``; their handlers in Python are called at the end, once each.

    Signals without such a handler do what they always do. Only the main thread of a process handles signals; in others
    this does nothing.

    Example:
      >>> done = []
      >>> try:
      ...     with hold_signals():
      ...         signal.raise_signal(signal.SIGINT)
      ...         done.append("all of it")
      ... except KeyboardInterrupt:
      ...     print(done)
      ['all of it']
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = _numbers(jax.process_count() == 1)
    pairs = zip(numbers, map(_signal.getsignal, numbers), strict=True)
    handlers = {number: handler for number, handler in pairs if callable(handler)}
    held: dict[int, FrameType | None] = {}
    try:
        for number in handlers:
            _signal.signal(number, held.__setitem__)
        yield
    finally:
        _put_back(handlers)
        _call(handlers, held)


@functools.cache
def _numbers(alone: bool) -> tuple[int, ...]:
    """Return the signals that may have handlers; of several processes JAX handles SIGTERM, and not in Python."""
    return tuple(int(n) for n in sorted(signal.valid_signals()) if alone or n != signal.SIGTERM)


def _put_back(handlers: Handlers) -> None:
    """Put handlers back, all of them even if one that is back already is called meanwhile, and raises."""
    try:
        for number, handler in handlers.items():
            _signal.signal(number, handler)
    except BaseException:
        _put_back(handlers)
        raise


def _call(handlers: Handlers, held: dict[int, FrameType | None]) -> None:
    """Call the handlers of signals that have come, all of them even if one raises.

    A signal raised again would be told a second time to who listens with ``signal.set_wakeup_fd``, as asyncio does.
    """
    if held:
        number = next(iter(held))
        frame = held.pop(number)
        try:
            handlers[number](number, frame)
        finally:
            _call(handlers, held)
