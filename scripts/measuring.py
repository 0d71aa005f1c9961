"""Code that all benchmarks share: devices, repetitions, and allocator settings that stay out of the figures."""

import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import flax
import jax
import jaxlib
import numpy as np

import jaxpipe


#: glibc: never return memory, never map it block by block. Read when a process starts.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**28)}

#: What is trained: a model as its loss calls it, the arrays of a batch, and the loss.
Model = Callable[..., jax.Array]
Batch = Mapping[str, jax.Array]
Loss = Callable[[Model, Batch], jax.Array]

#: First quartile, median, third quartile.
Quartiles = tuple[float, float, float]


def keep_freed_memory() -> None:
    """Start this process again with ``MALLOC``, on Linux, unless it already has it.

    A long-running process keeps the memory that it frees. A fresh one pays for new pages in each step that allocates
    more than 32 MiB and in no other, which would flatter the smaller of two programs.
    """
    if sys.platform == "linux" and not MALLOC.items() <= os.environ.items():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **MALLOC})


def alternate(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    seconds: float,
    least: int = 3,
    warm_up: int = 2,
    meet: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Run each step once per round, in turn forwards and backwards; returns the seconds of the counted rounds.

    Args:
      steps: by name; each returns arrays to wait for.
      rounds: how many are counted.
      seconds: no new round begins later than that, once ``least`` are counted.
      least: rounds that are counted in any case.
      warm_up: rounds before those.
      meet: called before each step, and not timed; processes that measure together wait for each other here.
    """
    order = list(steps)
    times: dict[str, list[float]] = {name: [] for name in order}
    start = time.perf_counter()
    for number in range(warm_up + rounds):
        if number >= warm_up + least and time.perf_counter() - start > seconds:
            break
        order.reverse()
        for name in order:
            meet()
            begin = time.perf_counter()
            jax.block_until_ready(steps[name]())
            times[name].append(time.perf_counter() - begin)
    return {name: values[warm_up:] for name, values in times.items()}


def quartiles(values: Sequence[float]) -> Quartiles:
    """First quartile, median, third quartile."""
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return low, median, high


def header() -> dict[str, Any]:
    """Return the machine, the versions and the time of this run."""
    versions = {"python": platform.python_version(), "jax": jax.__version__, "jaxlib": jaxlib.__version__}
    versions |= {"flax": flax.__version__, "jaxpipe": jaxpipe.__version__}
    machine = {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count()}
    machine |= {"device": jax.devices()[0].device_kind, "backend": jax.default_backend()}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"versions": versions, "machine": machine, "date": date, "command": sys.orig_argv[1:]}
