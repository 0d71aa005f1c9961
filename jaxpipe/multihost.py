"""Several processes: their start, and their agreement on choices, errors, and values that all of them hold.

All processes call every function, in the same order. In one process each does the plain thing.

    process 0: the call's name ──▶ store of jax.distributed ──▶ names of all, compared ──▶ its value ──▶ values of all
    process 1: the call's name ──▶            "                          "                    "               "

Nothing here is a program on devices: processes that do not do the same are told so, and do not wait for each other.
"""

import atexit
import contextlib
import functools
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from concurrent.futures import Future
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from jaxpipe import _compat
from jaxpipe.array_types import Array, ArrayLike, Device, Shaped
from jaxpipe.errors import PartitionError


_T = TypeVar("_T")


#: Environment variables by which a run is started by hand, or by ``scripts/launch_local``. JAX reads the first itself.
ADDRESS, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"

#: Seconds that a process waits for all others to join. JAX's own are 300.
JOINING = 45.0

#: Seconds until JAX would abort a process that waits for others to join.
_FOREVER = 7 * 24 * 3600

#: Seconds without a sign of life after which a process counts as dead. JAX's own are 100.
HEARTBEAT = 30

#: Seconds that a process waits for another one that is alive: at a call that all make, and for a message. Another may
#: be reading data.
WAITING = 300.0

#: Seconds in which what another process has stored is found, if it has stored anything.
LOOK = 0.5

#: The longest text of an error of another process in a message.
_LONGEST = 200

#: The rule, and what to do about a process that is late, for messages.
ALIKE = (
    "All processes call the functions of jaxpipe alike, in the same order, and take the same number of steps with "
    "batches of the same shapes."
)
LONGER = "If one needs longer, to read data for example, pass initialize_distributed(waiting_timeout_seconds=...)."

#: Seconds that others have to read why the first process ends.
END = 1.0

_has_joined, _waiting_seconds = False, WAITING

#: How many calls all processes have made so far.
_calls = 0


def initialize_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    initialization_timeout: float = JOINING,
    heartbeat_timeout_seconds: int = HEARTBEAT,
    waiting_timeout_seconds: float = WAITING,
    **options: Any,
) -> int:
    """``jax.distributed.initialize`` for scripts that also run alone, and that end together.

    Call it before anything asks JAX for its devices. Under SLURM, Open MPI or Kubernetes JAX finds the other processes;
    by hand set ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID``, or pass them. If there is
    nothing of that, the process is alone, and this does nothing. Beyond what JAX does:

    * CPU devices of different processes are connected by Gloo.
    * A process that does not join makes the others raise ``PartitionError``.
    * A process that dies or hangs ends all others: those are told after ``heartbeat_timeout_seconds`` at the latest,
      whatever they wait for, and abort (exit code 134) with a message that says so.
    * One that is alive and does not come makes those that wait for it raise ``PartitionError``: it names the process
      and the call. A process may be late by ``waiting_timeout_seconds``, because it reads data for example.
    * One that ends with an error that nobody catches does not wait for the others, which wait for it.

    JAX takes SIGTERM for a request to save and end; without a ``Checkpointer``, nothing happens on it.

    Args:
      coordinator_address: host and port of process 0.
      num_processes: how many there are.
      process_id: this one's number.
      initialization_timeout: seconds in which all must join.
      heartbeat_timeout_seconds: how long a process may give no sign of life.
      waiting_timeout_seconds: how long another process is waited for at a call of jaxpipe that all make, and, on CPUs,
        for its messages in a step. What one process does for all (profiling, solving, writing a checkpoint) may take
        longer.
      options: others of ``jax.distributed.initialize``.

    Returns:
      How many processes there are; ``jax.process_count`` would ask for devices.

    Raises:
      PartitionError: if not all processes have joined in time.

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
    sys.excepthook = _end
    options["heartbeat_timeout_seconds"] = heartbeat_timeout_seconds
    join = functools.partial(jax.distributed.initialize, address, count, process, **options)
    # JAX's own limit would abort the process.
    if not _is_done(functools.partial(join, initialization_timeout=_FOREVER), initialization_timeout):
        who = "This process" if process is None or count is None else f"Process {process} of {count}"
        raise PartitionError(
            f"{who} has waited {initialization_timeout:g} s, and not all others have joined at "
            f"{address or 'the address that the cluster gives'}. See what they have printed, check that they get the "
            "same address and number of processes, and start all again. If one needs longer to begin, pass "
            "initialize_distributed(initialization_timeout=...)."
        )
    global _has_joined, _waiting_seconds
    _has_joined, _waiting_seconds = True, waiting_timeout_seconds
    atexit.register(_say_end, "the end of its program")
    return _compat.num_processes()


def _is_done(function: Callable[[], object], seconds: float) -> bool:
    """Call a function that cannot be stopped; returns False if it has not returned within some seconds."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not futures.wait([future], seconds).done:
        return False
    future.result()
    return True


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    return None if text is None else int(text)


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Say what went wrong, here and to processes that wait, and end without JAX's farewell to the others."""
    sys.__excepthook__(kind, error, trace)
    _say_end(f"its end, with {kind.__name__}: {str(error)[:_LONGEST]}")
    number, count = _compat.process_number(), _compat.num_processes()
    if number == 0 and count > 1:
        time.sleep(END)  # what the others read is in this process
    print(f"Process {number} of {count} ends.", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _say_end(text: str) -> None:
    """Tell processes that come to a call that this one does not come there any more."""
    if not _has_joined:
        return
    with contextlib.suppress(Exception):
        _compat.share(_key(f"{_calls} call", _compat.process_number()), text.encode())


def is_first() -> bool:
    """Return whether this is the process that writes files."""
    return jax.process_index() == 0


def waiting_seconds() -> float:
    """Return how long a process waits for another one that is alive."""
    return _waiting_seconds


def exchanged(call: str, make: Callable[[], _T]) -> list[_T]:
    """Return the results of ``make()`` in all processes, by process; if it fails in one of them, all raise its error.

    Each process first says at which call it is, and waits for the others to be there, too; ``make`` may then take as
    long as it does.
    """
    if jax.process_count() == 1:
        return [make()]
    global _calls
    me, count, number = jax.process_index(), jax.process_count(), _calls
    _calls += 1
    others = [k for k in range(count) if k != me]
    try:
        _store(f"{number} call", call.encode())
        for k in others:
            _check_call(call, k, _fetched(f"{number} call", k, _waiting_seconds))
        value = make()
    except BaseException as error:
        error.add_note(f"Process {me} of {count} has raised this.")
        _store(f"{number} value", _pickled(error))
        raise
    _store(f"{number} value", pickle.dumps((True, value)))
    values: list[_T] = []
    for k in range(count):
        fine, other = (True, value) if k == me else pickle.loads(_fetched(f"{number} value", k) or b"")
        if not fine:
            raise other  # pyright: ignore[reportGeneralTypeIssues]
        values.append(other)
    # Who has made a value has read all names, and nobody reads values of the call before any more.
    for name in (f"{number} call", f"{number - 1} value"):
        _compat.delete_shared(_key(name, me))
    return values


def elsewhere(processes: Collection[int]) -> str:
    """Return which of some processes are at a call that this one has not come to, as a text; empty if none is."""
    texts = []
    for k in sorted(processes):
        call = _fetched(f"{_calls} call", k, LOOK)
        texts += [] if call is None else [f"process {k} is at {call.decode()}"]
    return ", ".join(texts)


def meet(call: str) -> None:
    """Wait until all processes are at a call; raises ``PartitionError`` in all if one is at another one."""
    exchanged(call, lambda: None)


def from_first(function: Callable[[], _T]) -> _T:
    """Return the result of ``function()`` in the first process, or raise its error; the others do not call it.

    For all that may come out differently when it is done again: measurements, solvers with a time limit, directories.

    Example:
      >>> from_first(lambda: 3)
      3
    """
    return exchanged(_name_of(function), function if is_first() else lambda: None)[0]  # pyright: ignore


def on_all(function: Callable[[], _T]) -> _T:
    """Return the result of ``function()`` here, once it is done everywhere; what fails in one process fails in all.

    Without this, those that have not failed would wait for the one that has.
    """
    value: list[_T] = []
    exchanged(_name_of(function), lambda: value.append(function()))
    return value[0]


def gathered(value: _T) -> list[_T]:
    """Return the values of all processes, in their order."""
    return exchanged("compiling", lambda: value)


def from_owner(device: Device, arrays: Sequence[ArrayLike], avals: Sequence[Shaped]) -> list[np.ndarray]:
    """Copy arrays from the process of a device to all, bit for bit; as host arrays in memory of their own."""
    sizes = [math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in avals]
    is_source = device.process_index == jax.process_index()
    held = [np.array(x).reshape(-1).view(np.uint8) for x in arrays] if is_source else [np.zeros(sum(sizes), np.uint8)]
    sent = np.concatenate([np.zeros(0, np.uint8), *held])
    received = np.asarray(multihost_utils.broadcast_one_to_all(sent, is_source=is_source), np.uint8)
    parts = np.split(received, np.cumsum(sizes, dtype=np.int64))[:-1]
    return [part.copy().view(a.dtype).reshape(a.shape) for part, a in zip(parts, avals, strict=True)]


def place(value: ArrayLike, sharding: NamedSharding) -> Array:
    """Return an array, which every process has whole, on the devices of a mesh."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    parts = sharding.addressable_devices_indices_map(np.shape(value)).items()
    local = [jax.device_put(value if sharding.is_fully_replicated else value[index], d) for d, index in parts]
    dtype = None if local else value.dtype
    return jax.make_array_from_single_device_arrays(np.shape(value), sharding, local, dtype=dtype)


def mine(devices: Sequence[Device]) -> list[Device]:
    """Return those of some devices that are this process's own."""
    return [device for device in devices if device.process_index == jax.process_index()]


def _name_of(function: Callable[..., object]) -> str:
    """Return the name of the function that a function is made in."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", str(function)).split(".<locals>")[0]


def _check_call(call: str, k: int, other: bytes | None) -> None:
    who = f"Process {jax.process_index()} of {jax.process_count()}"
    if other is None:
        raise PartitionError(
            f"{who} has waited {_waiting_seconds:g} s at {call} for process {k}, which is alive and has not come there."
            f" {ALIKE} {LONGER}"
        )
    if other.decode() != call:
        raise PartitionError(f"{who} is at {call}, and process {k} is at {other.decode()}. {ALIKE}")


def _key(name: str, process: int) -> str:
    return f"jaxpipe/{name}/{process}"


def _store(name: str, value: bytes) -> None:
    try:
        _compat.share(_key(name, jax.process_index()), value)
    except jax.errors.JaxRuntimeError as error:
        _raise_lost(error)


def _fetched(name: str, process: int, seconds: float = math.inf) -> bytes | None:
    """Return the bytes that a process has stored; None if it has not done so within some seconds."""
    try:
        return _compat.shared(_key(name, process), seconds)
    except jax.errors.JaxRuntimeError as error:
        _raise_lost(error)


def _raise_lost(error: Exception) -> NoReturn:
    raise PartitionError(
        f"Process {jax.process_index()} of {jax.process_count()} cannot reach process 0, through which all agree. Most "
        "likely it has died: see what it printed. Start all again, from the last checkpoint."
    ) from error


def _pickled(error: BaseException) -> bytes:
    """An error as bytes; one that cannot be taken along is told by its text, and so is one that ends a process."""
    with contextlib.suppress(Exception):
        pickled = pickle.dumps((False, error))
        pickle.loads(pickled)
        if isinstance(error, Exception):
            return pickled
    return pickle.dumps((False, PartitionError(f"{type(error).__name__}: {error} {' '.join(error.__notes__)}")))
