"""``Checkpointer``: checkpoints in a training loop."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpipe import multihost
from jaxpipe.checkpoint.checkpoint_layout import put
from jaxpipe.checkpoint.contents import Contents
from jaxpipe.checkpoint.orbax_files import Directory, Writer, open_checkpoint, steps
from jaxpipe.errors import CheckpointError
from jaxpipe.runtime import check_state
from jaxpipe.runtime.select_runtime import Runtime
from jaxpipe.runtime.train_state import TrainState
from jaxpipe.text.value_text import shown


#: What a shell reports of a program that SIGTERM has ended.
TERMINATED = 128 + signal.SIGTERM


#: A signal's handler; None for one that was not set in Python.
Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None


class Source(Protocol):
    """The part of a ``Pipeline`` that checkpoints are made of, and restored to."""

    _folders: list[Directory]

    @property
    def _runtime(self) -> Runtime: ...

    def _contents(self, state: TrainState, data: object) -> Contents | None: ...


class Checkpointer:
    """Saves a training loop's state now and then, in the background, and when the process is asked to end.

    A save copies the state to the host and returns; files are written meanwhile. A checkpoint is there as a whole or
    not at all, at whatever moment the process dies. Inside ``with``, SIGTERM does not end the process at once: the
    step that is running is finished and saved by ``after_step``, which then raises ``SystemExit(143)``.

    All processes of a run do the same with a checkpointer, and agree on when to save and end if one of them is asked to
    end. The first one writes; all read when they restore, so that the directory must be one that all see.

    Args:
      pipeline: whose states are saved.
      directory: where to save; created if it does not exist. One run has one directory.
      every: steps between two checkpoints.
      keep: how many of the last checkpoints are kept; None for all.

    Raises:
      CheckpointError: if ``every`` or ``keep`` is not positive, or another checkpointer has the directory.

    Example:
      >>> import jax, jax.numpy as jnp, jaxpipe, optax, tempfile
      >>> model = jax.tree_util.Partial(lambda w, x: x @ w, jnp.ones((3, 1)))
      >>> mesh, batch = jax.make_mesh((1,), ("stage",)), jnp.ones((4, 3))
      >>> pipeline = jaxpipe.partition(model, mesh, batch, loss=lambda f, x: f(x).mean(), optimizer=optax.sgd(0.5))
      >>> with jaxpipe.Checkpointer(pipeline, tempfile.mkdtemp(), every=2, keep=2) as checkpointer:
      ...     state, position = checkpointer.restore() or (pipeline.init(jax.random.key(0)), 0)
      ...     for position in range(position, 7):
      ...         state, metrics = pipeline.step(state, batch)
      ...         checkpointer.after_step(state, data=position + 1)
      >>> checkpointer.steps
      [4, 6]
    """

    def __init__(self, pipeline: Source, directory: Directory, *, every: int = 1000, keep: int | None = 3):
        for name, value in (("every", every), ("keep", 1 if keep is None else keep)):
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
                raise CheckpointError(f"{name}={value!r}; it must be a whole number, at least 1.")
        if not hasattr(pipeline, "_folders"):
            raise CheckpointError(f"Checkpointer(pipeline, directory) was given {shown(pipeline)}; pass the Pipeline.")
        self._pipeline = pipeline
        self._every = every
        self._writer = Writer(directory, keep)
        pipeline._folders.append(directory)
        self._step: int | None = None
        self._saved: int | None = None
        self._terminated = False
        self._handlers: list[Handler] = []

    @property
    def steps(self) -> list[int]:
        """Steps of which there is a complete checkpoint, in order."""
        return steps(self._writer.directory)

    def restore(self, step: int | None = None) -> tuple[TrainState, Any] | None:
        """The state of the last checkpoint, or of one step, and the ``data`` saved with it.

        Returns:
          None if the directory has no checkpoint and ``step`` is None.

        Raises:
          CheckpointError: as ``Pipeline.restore``.
        """
        self._writer.wait()
        steps = multihost.from_first(lambda: self.steps)
        if step is None and not steps:
            return None
        saved = multihost.on_all(lambda: open_checkpoint(self._writer.directory, steps[-1] if step is None else step))
        state = put(self._pipeline._runtime, saved)
        self._step = self._saved = saved.about.step
        return state, saved.about.data

    def after_step(self, state: TrainState, data: object = None) -> None:
        """Save if it is time to; if SIGTERM has come, save and raise ``SystemExit``.

        Call it after every step. It counts the calls, so as not to wait for the devices.

        Args:
          state: what the step has returned.
          data: where the run is in its data, as JSON: a number, or the state of a data loader or random generator.

        Raises:
          CheckpointError: if a save that was begun before has failed; one that is due now is begun nevertheless.
          ModelError: if ``state`` was passed to ``step``.
        """
        check_state.check_state(state)
        self._step = int(state.step) if self._step is None else self._step + 1
        if jax.process_count() > 1:
            self._terminated = multihost_utils.reached_preemption_sync_point(self._step)
        if self._terminated:
            if self._saved != int(state.step):
                self.save(state, data)
            self.close()
            raise SystemExit(TERMINATED)
        if self._step % self._every == 0:
            self.save(state, data)
        elif jax.process_count() == 1:  # the others are told at the next save
            self._writer.check()

    def save(self, state: TrainState, data: object = None) -> None:
        """Save now; returns when the state has been copied to the host, and the save before is complete.

        Raises:
          CheckpointError: if ``data`` is not JSON, or there is a checkpoint of this or a later step; or if the save
            before has failed, when this one has begun.
        """
        failure = self._writer.write(self._pipeline._contents(state, data))
        self._step = self._saved = int(state.step)
        if failure is not None:
            raise failure

    def wait(self) -> None:
        """Wait until what was saved is on disk; raises ``CheckpointError`` if it cannot be written."""
        self._writer.wait()

    def close(self) -> None:
        """Wait, and end; leaving ``with`` does it."""
        self._writer.close()

    def __enter__(self) -> "Checkpointer":
        alone = jax.process_count() == 1  # else JAX has a handler, and tells the other processes
        here = alone and threading.current_thread() is threading.main_thread()  # only it may
        self._handlers.append(signal.signal(signal.SIGTERM, self._terminate) if here else None)
        return self

    def _terminate(self, *_: object) -> None:
        self._terminated = True

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        handler = self._handlers.pop()
        try:
            if not self._handlers:  # in the outermost ``with``
                self.close()
        finally:
            if handler is not None:
                signal.signal(signal.SIGTERM, handler)
        if self._terminated and kind is None:  # came after the last step
            raise SystemExit(TERMINATED)
