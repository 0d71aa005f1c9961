"""HiGHS without the banner that it prints when it is first used in a process."""

import contextlib
import ctypes
import functools
import os


@functools.cache
def silence_highs() -> None:
    """Let HiGHS print its banner to nowhere; later solvers in this process print none.

    It comes from C++ as soon as there is a solver, before an option could say no, and goes past ``sys.stdout``.
    """
    try:
        import highspy

        stdout = os.dup(1)
    except (ImportError, OSError):  # cvxpy says that it is missing; nobody reads what is printed
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    _flush()
    try:
        os.dup2(nowhere, 1)
        highspy.Highs()
        _flush()
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)


def _flush() -> None:
    """Write what C has in its buffers; it has large ones where stdout is a file."""
    with contextlib.suppress(OSError, TypeError, AttributeError):  # no C library to be found, as on Windows
        ctypes.CDLL(None).fflush(None)
