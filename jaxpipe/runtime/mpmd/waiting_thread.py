"""Programs that wait for other processes, on CPUs: in a thread of their own.

XLA:CPU runs the programs of a thread one after the other, on as few threads as there are cores. One that waits for
another process in between would hold up work that it has nothing to do with, and several could take all threads from
the work that others wait for. So one thread starts these programs, in the order of the list: each when its operands
have been computed, so that it runs in that thread itself, and after the one before it has ended. At most one is in
flight then. Nothing that it waits for is behind it: whatever leads from this process to there went through an earlier
one. A GPU runs all its programs in the order of the list in any case, and needs none of this.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import jax

from jaxpipe.array_types import Array


#: The arrays that an action returns; None for those on other processes' devices.
Results: TypeAlias = Sequence[Array | None]

#: The first error of an action. The others would wait for messages that other processes do not send any more, as these
#: wait for the one that has failed: they raise the error at once, and the process ends.
_failures: list[Exception] = []


def started(action: Callable[..., Results]) -> Callable[..., tuple[Future[Results]]]:
    """Return a function that has an action done in the thread, and returns what will have its results."""

    def run(*operands: Array) -> Results:
        if _failures:
            raise _failures[0]
        try:
            jax.block_until_ready(operands)
        except Exception as error:
            _failures.append(error)
            raise
        try:
            return jax.block_until_ready(action(*operands))
        except Exception as error:
            error.add_note(
                f"Process {jax.process_index()} of {jax.process_count()} was waiting for a message of another one. "
                "Most likely another process has died: see what it printed. Start all again, from the last checkpoint."
            )
            _failures.append(error)
            raise

    return lambda *operands: (_thread().submit(run, *operands),)


def ended(started: Future[Results]) -> Results:
    """Wait for an action, and return its results."""
    return started.result()


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="jaxpipe-messages")
