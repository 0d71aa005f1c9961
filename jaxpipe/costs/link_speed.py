"""Latency and bandwidth of the links between devices, and to their host, measured."""

import itertools
import time
import warnings
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxpipe import multihost
from jaxpipe.array_types import Array, Device, PyTree
from jaxpipe.errors import PartitionError
from jaxpipe.targets.known import target_of


#: 64 KiB to 16 MiB: what a stage sends on for a micro-batch.
SIZES = tuple(4**k for k in range(8, 13))

#: Exchanges in one run. They share the time that starting a program takes, which a pipeline pays once in a step.
EXCHANGES = 10

#: A fit that misses a measurement by more than this share of it is reported.
POOR_FIT = 0.25


def measure_links(devices: Sequence[Device], sizes: Sequence[int], repeats: int) -> tuple[np.ndarray, np.ndarray]:
    """Bandwidths and latencies between all pairs of devices, two matrices ``[devices, devices]``.

    Pairs are measured one after the other, disjoint ones too: they may share a switch or a network card, and the
    model of a link is what it carries alone. For 16 devices and 5 sizes these are 600 small programs.
    """
    sizes = sorted(set(sizes))
    if len(sizes) < 2 or sizes[0] < 1 or repeats < 1:
        raise PartitionError(
            f"sizes is {tuple(sizes)} and repeats {repeats}; latency and bandwidth need at least two different sizes "
            "of 1 byte or more, each run once or more."
        )
    if len(set(devices)) != len(devices):
        raise PartitionError("devices names a device twice; a link is between two different ones.")
    pairs = list(itertools.combinations(range(len(devices)), 2))
    mine = np.array([[_exchange_seconds(devices[a], devices[b], n, repeats) for n in sizes] for a, b in pairs])
    bandwidth, latency = np.zeros((2, len(devices), len(devices)))
    poor = []
    for (a, b), seconds in zip(pairs, _slowest(mine), strict=True):
        latency[a, b], bandwidth[a, b] = fit_link(sizes, seconds)
        fitted = latency[a, b] + np.array(sizes) / bandwidth[a, b]
        miss = abs(fitted / seconds - 1)
        k = miss.argmax()
        if miss[k] > POOR_FIT:
            poor.append(
                f"{a} and {b}: {sizes[k]} bytes took {1e6 * seconds[k]:.1f} µs, the fit of "
                f"{1e6 * latency[a, b]:.1f} µs + bytes / {bandwidth[a, b] / 1e9:.2f} GB/s says {1e6 * fitted[k]:.1f} µs"
            )
    if poor:
        warnings.warn(
            f"{len(poor)} of {len(pairs)} links do not follow latency + bytes / bandwidth within {POOR_FIT:.0%}; "
            "measure on an idle machine, with more repeats, or at the sizes that matter:\n" + "\n".join(poor),
            stacklevel=3,
        )
    return bandwidth + bandwidth.T, latency + latency.T


def measure_host_links(
    devices: Sequence[Device], sizes: Sequence[int], repeats: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bandwidth and latency between each device and the memory of its host.

    All devices of a process are measured at once, and in both directions: that is how a step uses links that devices of
    one machine may share.
    """
    local_devices = [device for device in devices if _is_mine(device)]
    sizes = sorted(set(sizes))
    here = [_host_seconds(local_devices, size, repeats) for size in sizes]
    mine = np.array([here if _is_mine(device) else [np.nan] * len(sizes) for device in devices])
    latency, bandwidth = zip(*(fit_link(sizes, seconds) for seconds in _slowest(mine)), strict=True)
    return bandwidth, latency


def measure_speeds(devices: Sequence[Device], repeats: int) -> tuple[float, ...]:
    """Return the speed at which each device multiplies matrices, relative to the first."""
    seconds = _slowest(np.array([_product_seconds(device, repeats) for device in devices]))
    return tuple((seconds[0] / seconds).tolist())


def memory_limits(devices: Sequence[Device]) -> tuple[float, ...]:
    """The bytes that each device's allocator may hand out; infinite where it does not say."""
    limits = [np.nan if not _is_mine(d) else (d.memory_stats() or {}).get("bytes_limit", np.inf) for d in devices]
    return tuple(_slowest(np.array(limits)).tolist())


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency and bandwidth of a link from the time that messages of several sizes took.

    Least squares of the relative error, so that small messages decide the latency and large ones the bandwidth; neither
    is negative. Where time does not grow with size, the largest message gives a bandwidth that the link has at least.

    Returns:
      The latency in seconds and the bandwidth in bytes per second.

    Example:
      >>> latency, bandwidth = fit_link([1000, 2000, 4000], [3e-6, 4e-6, 6e-6])
      >>> round(1e6 * latency, 3), round(bandwidth / 1e9, 3)
      (2.0, 1.0)
    """
    count, took = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    scale = count.max()  # so that both columns are of one magnitude
    rows = np.stack([1 / took, count / scale / took], axis=1)
    # The best of the solutions in which both unknowns, or one of them, differ from zero. (scipy.optimize.nnls does this
    # too, but to import it takes 18 MiB in every process that trains.)
    candidates = []
    for free in ([0, 1], [0], [1]):
        solution = np.zeros(2)
        solution[free] = np.linalg.lstsq(rows[:, free], np.ones(len(took)), rcond=None)[0]
        if (solution >= 0).all():
            candidates.append(solution)
    latency, slope = min(candidates, key=lambda solution: float(np.square(rows @ solution - 1).sum()))
    return float(latency), float(scale / slope) if slope else float(scale / took[count.argmax()])


def best_seconds(run: Callable[[], PyTree], repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """The fastest of several runs, after one that does not count."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(repeats):
        start = clock()
        jax.block_until_ready(run())
        seconds.append(clock() - start)
    return min(seconds)


def _exchange_seconds(first: Device, second: Device, size: int, repeats: int) -> float:
    """One exchange of ``size`` bytes, both ways at once as in a pipeline; not a number if other processes have both."""
    if not (_is_mine(first) or _is_mine(second)):
        return np.nan
    mesh = Mesh(np.array([first, second]), ("pair",))
    split = PartitionSpec("pair")

    def swap(_: Array, block: Array) -> Array:
        return jax.lax.ppermute(block, "pair", [(0, 1), (1, 0)])

    def exchanges(block: Array) -> Array:
        return jax.lax.fori_loop(0, EXCHANGES, swap, block)

    data = jax.make_array_from_callback((2 * size,), NamedSharding(mesh, split), lambda _: np.zeros(size, np.uint8))
    mapped = jax.shard_map(exchanges, mesh=mesh, in_specs=split, out_specs=split)
    compiled = jax.jit(mapped).lower(data).compile()
    return best_seconds(lambda: compiled(data), repeats) / EXCHANGES


def _host_seconds(devices: Sequence[Device], size: int, repeats: int) -> float:
    """Until all of some devices have sent ``size`` bytes to the host and got as many from there."""
    on_devices = [SingleDeviceSharding(device) for device in devices]
    on_host = [sharding.with_memory_kind("pinned_host") for sharding in on_devices]
    data = [np.zeros(size, np.uint8)] * len(devices)
    held = jax.device_put([*data, *data], [*on_devices, *on_host])
    return best_seconds(lambda: jax.device_put(held, [*on_host, *on_devices]), repeats)


def _product_seconds(device: Device, repeats: int) -> float:
    """Products of square matrices, large enough to occupy the device; not a number if another process has it."""
    if not _is_mine(device):
        return np.nan
    length = 512 if target_of(device).is_host else 4096

    def products(matrix: Array) -> Array:
        return jax.lax.fori_loop(0, EXCHANGES, lambda _, x: x @ matrix, matrix)

    matrix = jax.device_put(np.zeros((length, length), np.float32), device)
    compiled = jax.jit(products).lower(matrix).compile()
    return best_seconds(lambda: compiled(matrix), repeats)


def _is_mine(device: Device) -> bool:
    return device.process_index == jax.process_index()


def _slowest(mine: np.ndarray) -> np.ndarray:
    """Each number from the processes that have measured it, the largest if several have."""
    return np.nanmax(multihost.gathered(mine), axis=0)
