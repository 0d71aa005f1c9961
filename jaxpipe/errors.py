"""Errors and warnings a user can meet. Each message says what was asked, the rule, and what to do."""

import contextlib
import sys
import warnings
from pathlib import Path
from typing import Any


class JaxpipeError(Exception):
    """Base of every error that jaxpipe raises on purpose."""


class DifferentiationError(JaxpipeError, TypeError):
    """A derivative that a memory-encoded function does not support, such as forward mode."""


class ModelError(JaxpipeError, TypeError):
    """A model that cannot be used as asked, or variables, codecs or a training state that do not fit it."""


class ScheduleError(JaxpipeError, ValueError):
    """A schedule that breaks a rule, or one that the executor cannot run."""


class PartitionError(JaxpipeError, ValueError):
    """A plan that cannot be made or read: of its model, network, profile, gradient exchange or file.

    Also processes that do not make or follow it alike, or that do not come where others wait for them.
    """


class BatchError(JaxpipeError, ValueError):
    """A batch that does not fit the plan."""


class CheckpointError(JaxpipeError, ValueError):
    """A checkpoint that is missing, damaged, or of another model or optimizer."""


class NonFiniteError(JaxpipeError, ArithmeticError):
    """A loss or a gradient that is not finite.

    Attributes:
      state: the training state as it was before the step.
      stage: where it began, if that is known.
    """

    def __init__(self, message: str, state: Any, stage: int | None = None):
        super().__init__(message)
        self.state = state
        self.stage = stage


class MemoryBudgetError(JaxpipeError, ValueError):
    """A memory budget that no plan meets, or not the one that was made without compiling it.

    Attributes:
      smallest: the smallest budget for which a plan was found, if one was.
    """

    def __init__(self, message: str, smallest: int | None = None):
        super().__init__(message)
        self.smallest = smallest


class JaxpipeWarning(UserWarning):
    """Base of every warning that jaxpipe gives."""


class FewExamplesWarning(JaxpipeWarning):
    """Few examples in a micro-batch for what normalizes over them, compares them, or has a row for each of all."""


class LossWarning(JaxpipeWarning):
    """A loss or a metric of a batch that is not the mean of those of its micro-batches."""


class TrainingModeWarning(JaxpipeWarning):
    """An evaluation or a prediction that draws random numbers, or updates batch statistics, as training does."""


class InitialValuesWarning(JaxpipeWarning):
    """Initial values that depend on a batch whose shapes alone are known."""


class CodecWarning(JaxpipeWarning):
    """A pattern of module paths that no module of the model has."""


#: Frames that no user wrote: this package, and decorators made of context managers.
_INTERNAL = str(Path(__file__).parent), contextlib.__file__


def warn(message: str, category: type[JaxpipeWarning]) -> None:
    """Give a warning at the line outside this package that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
