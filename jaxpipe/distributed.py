"""``initialize_distributed``: one script for one process or many."""

import os
import sys
from types import TracebackType
from typing import Any

import jax

from jaxpipe import _compat


#: Environment variables by which a run is started by hand, or by ``scripts/launch_local``. JAX reads the first itself.
ADDRESS, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"

#: Seconds without a sign of life after which a process counts as dead. JAX's own are 100.
HEARTBEAT = 30


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
    own = process_id if process_id is not None else _number(NUMBER)
    if address is None and not _compat.is_in_cluster():
        return 1
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, own, heartbeat_timeout_seconds=heartbeat_timeout_seconds, **options)
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
