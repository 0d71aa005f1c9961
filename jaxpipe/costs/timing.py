"""Seconds of one compiled program on one device: repeated, warm-up dropped, median and spread."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from jaxpipe.array_types import Array, Device, PyTree
from jaxpipe.costs.profile import WIDE


#: One measurement runs a program as often as it takes to last this long.
SHORTEST_SECONDS = 2e-3

#: Measurements of a program: at least so many, and more until ``ENOUGH_SECONDS`` have passed.
FEWEST, MOST = 5, 25
ENOUGH_SECONDS = 0.1

#: What has a wide spread is measured again, so often in all.
TRIES = 3


class Timing(NamedTuple):
    """Median of repeated measurements, and half the range between their quartiles; seconds."""

    median: float
    spread: float


def time_runs(run: Callable[[int], object], clock: Callable[[], float] = time.perf_counter) -> Timing:
    """Measure ``run(count)``, which does something ``count`` times and waits for the end; seconds for once.

    The first two runs, with which memory and caches fill and the count is chosen, are not counted.

    Example:
      >>> import itertools
      >>> ticks = itertools.count()
      >>> time_runs(lambda count: None, lambda: float(next(ticks)))
      Timing(median=1.0, spread=0.0)
    """

    def measured(count: int) -> float:
        begin = clock()
        run(count)
        return (clock() - begin) / count

    measured(1)
    count = math.ceil(SHORTEST_SECONDS / max(measured(1), SHORTEST_SECONDS / 1000))
    seconds: list[float] = []
    begin = clock()
    while len(seconds) < FEWEST or (len(seconds) < MOST and clock() - begin < ENOUGH_SECONDS):
        seconds.append(measured(count))
    low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
    return Timing(median, (high - low) / 2)


def steadiest(measure: Callable[[], Timing]) -> Timing:
    """Measure until the spread is not wide, a few times at most; returns the steadiest.

    Example:
      >>> tries = iter([Timing(4.0, 2.0), Timing(1.0, 0.25), Timing(2.0, 0.75), Timing(1.0, 0.0)])
      >>> steadiest(lambda: next(tries))
      Timing(median=1.0, spread=0.25)
    """
    timings = [measure()]
    while len(timings) < TRIES and timings[-1].spread > WIDE * timings[-1].median:
        timings.append(measure())
    return min(timings, key=lambda timing: timing.spread / max(timing.median, 1e-12))


def time_program(lowered: jax.stages.Lowered, arguments: PyTree, device: Device) -> Timing:
    """Compile and measure a program for arguments of some shapes; compiling is not counted."""
    compiled = lowered.compile()
    values = examples(arguments, device)

    def run(count: int) -> None:
        results = None
        for _ in range(count):
            results = compiled(*values)
        jax.block_until_ready(results)

    return steadiest(lambda: time_runs(run))


def on_device(arguments: PyTree, device: Device) -> PyTree:
    """Shapes of arrays on a device."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)


def examples(arguments: PyTree, device: Device) -> PyTree:
    """Arrays of given shapes, on a device."""
    with jax.default_device(device):
        return jax.block_until_ready(jax.tree.map(_example, arguments))


def _example(x: jax.ShapeDtypeStruct) -> Array:
    """Normally distributed floats, for zeros may be multiplied faster; zeros for all that may be an index."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0, impl=x.dtype), math.prod(x.shape)).reshape(x.shape)
    if jax.dtypes.issubdtype(x.dtype, np.floating):
        block = np.random.default_rng(0).standard_normal(4096).astype(x.dtype)
        return jax.numpy.asarray(np.resize(block, x.shape))
    return jax.numpy.zeros(x.shape, x.dtype)
