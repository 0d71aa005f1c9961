"""Several processes: their start, and their agreement on choices, errors, and values that all of them hold.

All processes call every function, in the same order. In one process each does the plain thing.
"""

import hashlib
import math
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from jaxpipe import _compat
from jaxpipe.array_types import Array, ArrayLike, Device, Shaped
from jaxpipe.errors import PartitionError
from jaxpipe.target import platform_of


_T = TypeVar("_T")


#: Environment variables by which a run is started by hand, or by ``scripts/launch_local``. JAX reads the first itself.
ADDRESS, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"

#: Seconds without a sign of life after which a process counts as dead. JAX's own are 100.
HEARTBEAT = 30

#: Seconds that a process waits for the others at a meeting: another may be reading data or writing a checkpoint.
MEETING_SECONDS = 300.0

_meetings: Counter[str] = Counter()


def initialize_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout_seconds: int = HEARTBEAT,
    **options: Any,
) -> int:
    """``jax.distributed.initialize`` for scripts that also run alone, and that end together.

    Call it before anything asks JAX for its devices. Under SLURM, Open MPI or Kubernetes JAX finds the other processes;
    by hand set ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID``, or pass them. If there is
    nothing of that, the process is alone, and this does nothing. Beyond what JAX does:

    * CPU devices of different processes are connected by Gloo.
    * A process that dies or hangs ends all others: those are told after ``heartbeat_timeout_seconds`` at the latest,
      whatever they wait for, and abort (exit code 134) with a message that says so.
    * One that ends with an error that nobody catches does not wait for the others, which wait for it.

    JAX takes SIGTERM for a request to save and end; without a ``Checkpointer``, nothing happens on it.

    Args:
      coordinator_address: host and port of process 0.
      num_processes: how many there are.
      process_id: this one's number.
      heartbeat_timeout_seconds: how long a process may give no sign of life.
      options: others of ``jax.distributed.initialize``.

    Returns:
      How many processes there are; ``jax.process_count`` would ask for devices.

    Example:
      >>> initialize_distributed()
      1
    """
    address = coordinator_address or os.environ.get(ADDRESS)
    count = num_processes if num_processes is not None else _number(COUNT)
    process = process_id if process_id is not None else _number(NUMBER)
    if address is None and not _compat.is_in_cluster():
        return 1
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, process, heartbeat_timeout_seconds=heartbeat_timeout_seconds, **options)
    sys.excepthook = _end
    return _compat.num_processes()


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    return None if text is None else int(text)


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Say what went wrong, and end without JAX's farewell to the other processes."""
    sys.__excepthook__(kind, error, trace)
    print(f"Process {jax.process_index()} of {jax.process_count()} ends.", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def is_first() -> bool:
    """Return whether this is the process that writes files."""
    return jax.process_index() == 0


def from_first(function: Callable[[], _T]) -> _T:
    """Return what ``function()`` gives, or raises, in the first process; the others do not call it.

    For all that may come out differently when it is done again: measurements, solvers with a time limit, directories.

    Example:
      >>> from_first(lambda: 3)
      3
    """
    if jax.process_count() == 1:
        return function()
    error, mine = None, b""
    if is_first():
        try:
            mine = pickle.dumps((True, function()))
        except Exception as raised:
            error, mine = raised, pickle.dumps((False, _pickled(raised)))
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(mine))))
    sent = multihost_utils.broadcast_one_to_all(np.frombuffer(mine.ljust(size, b"\0"), np.uint8))
    if error is not None:
        raise error
    fine, value = pickle.loads(np.asarray(sent, np.uint8).tobytes())
    if not fine:
        raise pickle.loads(value)
    return value


def on_all(function: Callable[[], _T]) -> _T:
    """Return what ``function()`` gives here, once it is done everywhere; if it fails in one process, it fails in all.

    Without this, those that have not failed would wait for the one that has.
    """
    if jax.process_count() == 1:
        return function()
    value, error = None, b""
    try:
        value = function()
    except Exception as raised:
        raised.add_note(f"Process {jax.process_index()} of {jax.process_count()} has raised this.")
        error = _pickled(raised)
    errors = _gather_bytes(error)
    first = next(filter(None, errors), None)
    if first is not None:
        raise pickle.loads(first)
    return value  # pyright: ignore[reportReturnType]


def gathered(value: _T) -> list[_T]:
    """Return the values of all processes, in their order."""
    if jax.process_count() == 1:
        return [value]
    return [pickle.loads(text) for text in _gather_bytes(pickle.dumps(value))]


def from_owner(device: Device, arrays: Sequence[ArrayLike], avals: Sequence[Shaped]) -> list[np.ndarray]:
    """Copy arrays from the process of a device to all, bit for bit; as host arrays in memory of their own."""
    sizes = [math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in avals]
    is_source = device.process_index == jax.process_index()
    held = [np.array(x).reshape(-1).view(np.uint8) for x in arrays] if is_source else [np.zeros(sum(sizes), np.uint8)]
    sent = np.concatenate([np.zeros(0, np.uint8), *held])
    received = np.asarray(multihost_utils.broadcast_one_to_all(sent, is_source=is_source), np.uint8)
    parts = np.split(received, np.cumsum(sizes, dtype=np.int64))[:-1]
    return [part.copy().view(a.dtype).reshape(a.shape) for part, a in zip(parts, avals, strict=True)]


def agree(what: str, text: str) -> None:
    """Raise ``PartitionError`` in all processes unless all have the same text."""
    if jax.process_count() == 1:
        return
    mine = hashlib.sha256(text.encode()).digest()
    digests = _gather_bytes(mine)
    others = [k for k, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise PartitionError(
            f"{what} of process{'es' if len(others) > 1 else ''} {', '.join(map(str, others))} differs from that of "
            f"process 0, of {len(digests)}. All run the same script: call partition with the same model, loss, "
            "optimizer, mesh and shapes (those of the whole batch) in each of them, with the same versions installed."
        )


def meet(what: str) -> bool:
    """Wait until all processes are about to do the same; returns False if one does not come in ``MEETING_SECONDS``.

    Unlike ``agree`` it can be called where others may not call it, and several times for the same ``what``.
    """
    if jax.process_count() == 1:
        return True
    _meetings[what] += 1
    name = hashlib.sha256(what.encode()).hexdigest()
    return _compat.wait_at_barrier(f"jaxpipe {name} {_meetings[what]}", MEETING_SECONDS)


def place(value: ArrayLike, sharding: NamedSharding) -> Array:
    """Return an array, which every process has whole, on the devices of a mesh."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    parts = sharding.addressable_devices_indices_map(np.shape(value)).items()
    local = [jax.device_put(value if sharding.is_fully_replicated else value[index], d) for d, index in parts]
    dtype = None if local else value.dtype
    return jax.make_array_from_single_device_arrays(np.shape(value), sharding, local, dtype=dtype)


def block_if_cpu(results: _T) -> _T:
    """Return the results of a program that all processes run; on CPUs, wait for them first.

    XLA:CPU runs programs that wait for Gloo on a few threads: several in flight may wait for each other forever.
    """
    if jax.process_count() > 1 and platform_of(jax.tree.leaves(results)) == "cpu":
        jax.block_until_ready(results)
    return results


def mine(devices: Sequence[Device]) -> list[Device]:
    """Return those of some devices that are this process's own."""
    return [device for device in devices if device.process_index == jax.process_index()]


def _pickled(error: Exception) -> bytes:
    """An error as bytes; one that cannot be taken along is told by its text."""
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
        return pickled
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def _gather_bytes(text: bytes) -> list[bytes]:
    """Return what each process has given, by process."""
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(text)))).reshape(-1).tolist()
    padded = np.frombuffer(text.ljust(max(*sizes, 1), b"\0"), np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded), np.uint8)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
