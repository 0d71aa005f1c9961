"""Programs that wait for other processes, on CPUs: in a thread of their own, and not forever.

XLA:CPU runs the programs of a thread one after the other, on as few threads as there are cores. One that waits for
another process in between would hold up work that it has nothing to do with, and several could take all threads from
the work that others wait for. So one thread starts these programs, in the order of the list: each when its operands
have been computed, so that it runs in that thread itself, and after the one before it has ended. At most one is in
flight then. Nothing that it waits for is behind it: whatever leads from this process to there went through an earlier
one. A GPU runs all its programs in the order of the list in any case, and needs none of this.

A program that waits cannot be stopped. Whoever needs its results looks at the other processes from time to time, and
raises an error if one of them is at another call, or has not come for too long.
"""

import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from jaxpipe import multihost
from jaxpipe.array_types import Array
from jaxpipe.errors import PartitionError
from jaxpipe.targets.building import target_of_values


#: The arrays that an action returns; None for those on other processes' devices.
Results: TypeAlias = Sequence[Array | None]

#: Seconds between two looks at other processes.
LOOK = 1.0

#: Seconds for which another process is at another call before that is an error: what it sent may be on its way.
APART = 10.0


@dataclass(frozen=True)
class Awaited:
    """The call, the thing and the other processes that a program waits for."""

    call: str
    what: str
    processes: frozenset[int]

    def __str__(self) -> str:
        others = ", ".join(map(str, sorted(self.processes)))
        return f"in {self.call} for {self.what} with process {others}"


#: The first error of an action. The others would wait for messages that other processes do not send any more, as these
#: wait for the one that has failed: they raise the error at once, and the process ends.
_failures: list[Exception] = []

#: The program that runs, and since when.
_running: list[tuple[Awaited, float]] = []


def started(action: Callable[..., Any], awaited: Awaited) -> Callable[..., tuple[Future[Any]]]:
    """Return a function that starts an action in the thread, and returns the future of its results."""

    def run(*operands: Any) -> Any:
        if _failures:
            raise _failures[0]
        try:
            jax.block_until_ready(operands)
        except Exception as error:
            _failures.append(error)
            raise
        _running.append((awaited, time.monotonic()))
        try:
            return jax.block_until_ready(action(*operands))
        except Exception as error:
            error.add_note(
                f"Process {jax.process_index()} of {jax.process_count()} was waiting {awaited}. Most likely another "
                "process has died: see what it printed. Start all again, from the last checkpoint."
            )
            _failures.append(error)
            raise
        finally:
            _running.clear()

    def start(*operands: Any) -> tuple[Future[Any]]:
        if _failures:
            raise _failures[0]
        future: Future[Any] = Future()
        _tasks().put((future, functools.partial(run, *operands)))
        return (future,)

    return start


def ended(future: Future[Any]) -> Any:
    """Wait for an action, and return its results.

    Raises:
      PartitionError: if another process is at another call, or has not come for too long.
    """
    apart_since: float | None = None
    while not futures.wait([future], LOOK).done:
        running, now = next(iter(_running), None), time.monotonic()
        if running is None or now - running[1] < APART:
            continue
        awaited, since = running
        elsewhere = multihost.elsewhere(awaited.processes)
        apart_since = None if not elsewhere else now if apart_since is None else apart_since
        if apart_since is not None and now - apart_since >= APART:
            raise _failure(awaited, f", and {elsewhere}. {multihost.ALIKE}")
        if now - since >= multihost.waiting_seconds():
            raise _failure(awaited, f" for {multihost.waiting_seconds():g} s. {multihost.ALIKE} {multihost.LONGER}")
    return future.result()


def run_together(action: Callable[..., Any], awaited: Awaited, *operands: Any) -> Any:
    """Run a program of all processes; on CPUs in the thread, until it has ended."""
    target = target_of_values(jax.tree.leaves(operands))
    if jax.process_count() == 1 or target is None or not target.is_host:
        return action(*operands)
    return ended(*started(action, awaited)(*operands))


def _failure(awaited: Awaited, how: str) -> PartitionError:
    who = f"Process {jax.process_index()} of {jax.process_count()}"
    error = PartitionError(f"{who} waits {awaited}{how} Start all again, from the last checkpoint.")
    _failures.append(error)
    return error


@functools.cache
def _tasks() -> "queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]":
    """Return the tasks of the thread, which a process that ends does not wait for."""
    tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            future, task = tasks.get()
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            del future, task  # and with them what they hold

    threading.Thread(target=work, name="jaxpipe-messages", daemon=True).start()
    return tasks
