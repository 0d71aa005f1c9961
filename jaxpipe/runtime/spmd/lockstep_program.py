"""A program with what one program for all devices needs besides: buffers that all have alike, mail and an arena."""

import functools
import math
from dataclasses import dataclass, fields
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.array_types import Shaped, TensorNumber
from jaxpipe.runtime.executable_plan import Update
from jaxpipe.runtime.gradient_precision import sum_dtype
from jaxpipe.runtime.program import Program
from jaxpipe.runtime.spmd.buffer_layout import Layout, lay_out
from jaxpipe.runtime.spmd.tick_table import KEPT, STASH, TickTable, tick_table
from jaxpipe.runtime.uint32_words import word_count
from jaxpipe.schedules.table import Kind, StageNumber


#: 32-bit words of a page of the mail and of the arena.
PAGE = 128


@dataclass(frozen=True, eq=False)
class LockstepProgram(Program):
    """A program whose devices walk through its schedule in step, with the same buffers. Layouts are by device."""

    @classmethod
    def of(cls, program: Program) -> "LockstepProgram":
        """Return a program with its layouts."""
        return cls(**{field.name: getattr(program, field.name) for field in fields(program)})

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of work in its schedule, in the order of a tick."""
        backward = (self.schedule.backward_kind,) * self.schedule.has_backward
        return (Kind.FORWARD, *backward, *(Kind.BACKWARD_WEIGHT,) * self.schedule.splits_backward)

    @cached_property
    def parameters(self) -> Layout:
        """The layout of the parameters."""
        return lay_out([self.avals(self.held(d)[0]) for d in self.device_numbers])

    @cached_property
    def gradients(self) -> Layout:
        """The layout of the gradients of trained parameters."""
        return lay_out([self.avals(self.trained(d)) for d in self.device_numbers])

    @cached_property
    def sums(self) -> Layout:
        """The layout of sums of gradients: the places of the gradients, in types that are as wide or wider."""
        return self.gradients.with_dtypes(functools.partial(sum_dtype, gradient_dtype=self.gradient_dtype))

    @cached_property
    def residuals(self) -> Layout:
        """The layout of what replicas have not sent of their gradients, in at least 32 bits."""
        return self.gradients.with_dtypes(lambda dtype: jnp.promote_types(dtype, jnp.float32))

    @cached_property
    def variables(self) -> Layout:
        """The layout of the state variables."""
        return lay_out([self.avals(self.held(d)[1]) for d in self.device_numbers])

    def optimizer(self, update: Update) -> Layout:
        """Return the layout of the optimizer state."""
        owned = list(zip(update.by_stage.state_avals, update.by_stage.state_stage, strict=True))
        return lay_out([[aval for aval, owner in owned if owner == d] for d in self.device_numbers])

    @cached_property
    def shared_trained(self) -> tuple[TensorNumber, ...]:
        """The trained ones among the shared parameters."""
        return tuple(t for t in self.shared if t not in self.objective.frozen)

    @cached_property
    def sum_avals(self) -> list[jax.ShapeDtypeStruct]:
        """The buffers in which gradients are added up: those of the layout, then one for each that is shared."""
        shared = ((a.size, sum_dtype(a.dtype, self.gradient_dtype)) for a in self.avals(self.shared_trained))
        return [*self.sums.buffers, *(jax.ShapeDtypeStruct((size,), dtype) for size, dtype in shared)]

    @cached_property
    def result_avals(self) -> list[Shaped]:
        """Shapes of what forward work hands out of each micro-batch: the results, and how many tensors overflowed."""
        return [*self.avals(self.objective.results), jax.ShapeDtypeStruct((), jnp.int32)]

    def trains(self, s: StageNumber) -> bool:
        """Return whether a stage works backward, too."""
        return self.stages[s].vjp is not None and self.schedule.has_backward and s >= self.schedule.frozen

    def returned(self, s: StageNumber) -> tuple[TensorNumber, ...]:
        """Return the tensors whose cotangents the next stage sends back."""
        return self.stages[s + 1].returning if s + 1 < len(self.stages) else ()

    def kept(self, s: StageNumber) -> tuple[list[Shaped], ...]:
        """Return the shapes of what a stage keeps of a micro-batch for a later tick, by ``tick_table.KEPT``."""
        stage, trains = self.stages[s], self.trains(s)
        return (
            [*self.avals(stage.arriving)],
            [*self.tangents(self.returned(s))] if trains else [],
            [*self.stash_avals(stage)] if trains else [],
            [*self.tangents(stage.saved)] if trains and self.schedule.splits_backward else [],
        )

    @cached_property
    def pages(self) -> list[list[int]]:
        """The pages of the same, by stage."""
        return [[math.ceil(sum(map(word_count, avals)) / PAGE) for avals in self.kept(s)] for s in self.stage_numbers]

    @cached_property
    def windows(self) -> list[int]:
        """The most pages of any stage, by ``tick_table.KEPT``: all write as many."""
        return [max(pages) for pages in zip(*self.pages, strict=True)]

    @cached_property
    def mail(self) -> TickTable:
        """The places of messages, from the tick after they were sent to the one that reads them."""
        return tick_table(self.schedule, [[*pages[:STASH], 0, 0] for pages in self.pages])

    @cached_property
    def arena(self) -> TickTable:
        """The places of what else a device keeps for a later tick."""
        return tick_table(self.schedule, [[0, 0, *pages[STASH:]] for pages in self.pages])

    @cached_property
    def work(self) -> np.ndarray:
        """The work of every device in each tick, as ``TickTable`` has it, with both kinds of places."""
        behind = self.arena.work.shape[-1] - len(KEPT) + STASH
        return np.concatenate([self.mail.work[..., :behind], self.arena.work[..., behind:]], axis=-1)
