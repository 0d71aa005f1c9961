"""Processes of this machine that train together, as tests start and kill them."""

import atexit
import contextlib
import functools
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).parents[2]
RUN = str(ROOT / "tests" / "support" / "hosts_run.py")


@functools.cache
def programs() -> str:
    """Return a folder of compiled programs, as tests start the same ones again."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return folder.name


def environment(**more: str) -> dict[str, str]:
    """Return the environment of processes on CPUs."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": programs(),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **more,
    }


def launch(count: int, *arguments: object, run: str = RUN) -> str:
    """Run a task in so many processes to its end, and return what they have printed."""
    command = [sys.executable, str(ROOT / "scripts" / "launch_local"), str(count), "--", sys.executable, run]
    done = subprocess.run([*command, *map(str, arguments)], env=environment(), text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@contextlib.contextmanager
def started(count: int, *arguments: object, run: str = RUN):
    """Start processes of a task, which the test kills."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    each = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": str(count)}
    command = [sys.executable, run, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [
        subprocess.Popen(command, env=environment(**each, JAX_PROCESS_ID=str(k)), **pipes) for k in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def read_until(process, line: str) -> None:
    """Read what a process prints, up to a line that begins so."""
    for text in process.stdout:
        if text.startswith(line):
            return
    raise AssertionError(f"no {line!r}; the process has ended")
