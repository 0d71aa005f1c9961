"""Seconds of compiled programs on devices, measured in rounds that all programs share."""

import functools
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxpipe.array_types import Array, Device, PyTree
from jaxpipe.text.progress import tell, track


#: One run does something as often as it takes to last this long.
SHORTEST_SECONDS = 5e-4

#: In a round it is run ``RUNS`` times and until ``VISIT_SECONDS`` have passed, or once if that takes ``LONG_SECONDS``.
#: The fastest run counts: what else a machine does can only make one longer.
RUNS = 4
VISIT_SECONDS = 2e-3
LONG_SECONDS = 0.05

#: Rounds of measurements: at least so many, and more until ``ENOUGH_SECONDS`` for each program have passed.
FEWEST, MOST = 5, 25
ENOUGH_SECONDS = 0.1

#: Random keys are folded with a hash of the module path, so that equal layers differ in these constants.
_KEY_NUMBER = re.compile(r"(?<=dense<)\d+(?=> : tensor<ui32>)")


@dataclass(frozen=True, eq=False)
class TimedProgram:
    """A function of flat arrays, to be compiled."""

    function: Callable[..., PyTree]
    arguments: tuple[PyTree, ...]


#: The time that it takes is that of starting any program.
_EMPTY = TimedProgram(lambda x: x + 1, (jax.ShapeDtypeStruct((), "float32"),))


def time_programs(programs: Sequence[tuple[TimedProgram, Device]]) -> np.ndarray:
    """Compile programs, run each on its device, and measure; programs that are equal are run once.

    Operands are random, and those of one program at a time are on a device.

    Returns:
      Seconds ``[rounds, programs]``, less the median of what it takes to start any program.
    """
    known: dict[tuple[str, Device], int] = {}
    prepared: list[Callable[[], Callable[[int], object]]] = []

    def number(program: TimedProgram, device: Device) -> int:
        arguments = on_device(program.arguments, device)
        lowered = jax.jit(program.function).lower(*arguments)
        key = _KEY_NUMBER.sub("", lowered.as_text()), device
        if key not in known:
            known[key] = len(known)
            prepared.append(functools.partial(ready_to_run, lowered.compile(), arguments, device))
        return known[key]

    starts = {device: number(_EMPTY, device) for _, device in programs}
    numbers = [number(*each) for each in track(programs, "Compiling what is measured")]
    tell("Measuring")
    seconds = time_in_rounds(prepared)
    start = np.median(seconds, axis=0)[[starts[device] for _, device in programs]]
    return np.maximum(0.0, seconds[:, numbers] - start)


def time_in_rounds(
    prepared: Sequence[Callable[[], Callable[[int], object]]], clock: Callable[[], float] | None = None
) -> np.ndarray:
    """Measure all of some things once in each of several rounds.

    A burst of load from other programs lengthens a few rounds of everything then, which a median passes over, and not
    all measurements of one thing.

    Args:
      prepared: for each thing a function that prepares it and returns ``run(count)``, which does it ``count`` times and
        waits for the end. To prepare is not measured, nor are two first runs, by which the count is chosen.
      clock: gives seconds; left out, ``time.perf_counter``.

    Returns:
      Seconds ``[rounds, things]`` for each thing done once.

    Example:
      >>> import itertools
      >>> ticks = itertools.count()
      >>> time_in_rounds([lambda: lambda count: None], lambda: float(next(ticks))).tolist()
      [[1.0], [1.0], [1.0], [1.0], [1.0]]
    """
    clock = clock or time.perf_counter

    def fastest(run: Callable[[int], object], count: int) -> float:
        seconds: list[float] = []
        first = clock()
        while not seconds or clock() - first < (VISIT_SECONDS if len(seconds) >= RUNS else LONG_SECONDS):
            begin = clock()
            run(count)
            seconds.append((clock() - begin) / count)
        return min(seconds)

    counts = []
    for prepare in prepared:
        run = prepare()
        run(1)
        counts.append(math.ceil(SHORTEST_SECONDS / max(fastest(run, 1), SHORTEST_SECONDS / 1000)))
    rounds: list[list[float]] = []
    begin, enough = clock(), ENOUGH_SECONDS * len(prepared)
    while len(rounds) < FEWEST or (len(rounds) < MOST and clock() - begin < enough):
        rounds.append([])
        for prepare, count in zip(prepared, counts, strict=True):
            run = prepare()
            if count > 1:  # what is short depends on what is in caches
                run(1)
            rounds[-1].append(fastest(run, count))
    return np.array(rounds)


def ready_to_run(compiled: jax.stages.Compiled, arguments: PyTree, device: Device) -> Callable[[int], object]:
    """Put operands of a compiled program onto its device, and return what runs it so many times."""
    values = examples(arguments, device)

    def run(count: int) -> None:
        results = None
        for _ in range(count):
            results = compiled(*values)
        jax.block_until_ready(results)

    return run


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
