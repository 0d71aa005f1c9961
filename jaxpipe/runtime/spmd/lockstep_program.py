"""A program with what one program for all devices needs besides: buffers that all have alike, an arena, inboxes."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import jax
import jax.numpy as jnp

from jaxpipe.array_types import Shaped, TensorNumber
from jaxpipe.runtime.executable_plan import Update
from jaxpipe.runtime.gradient_precision import sum_dtype
from jaxpipe.runtime.program import Program
from jaxpipe.runtime.spmd.buffer_layout import Layout, lay_out
from jaxpipe.runtime.spmd.tick_table import TickTable, tick_table
from jaxpipe.runtime.uint32_words import word_count


#: 32-bit words of a page of the arena.
PAGE = 1024


@dataclass(frozen=True, eq=False)
class LockstepProgram(Program):
    """A program whose devices walk through its schedule in step, with the same buffers. Layouts are by device."""

    @classmethod
    def of(cls, program: Program) -> "LockstepProgram":
        """Return a program with its layouts."""
        return cls(**{field.name: getattr(program, field.name) for field in fields(program)})

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
    def state(self) -> Layout:
        """The layout of the state variables."""
        return lay_out([self.avals(self.held(d)[1]) for d in self.device_numbers])

    @cached_property
    def residuals(self) -> Layout:
        """The layout of what replicas have not sent of their gradients, in at least 32 bits."""
        return self.gradients.with_dtypes(lambda dtype: jnp.promote_types(dtype, jnp.float32))

    def slots(self, update: Update) -> Layout:
        """Return the layout of the optimizer state."""
        by_stage = update.by_stage
        owned = list(zip(by_stage.state_avals, by_stage.state_stage, strict=True))
        return lay_out([[aval for aval, owner in owned if owner == d] for d in self.device_numbers])

    @cached_property
    def shared_trained(self) -> tuple[TensorNumber, ...]:
        """The trained ones among the shared parameters."""
        return tuple(t for t in self.shared if t not in self.objective.frozen)

    @cached_property
    def sum_avals(self) -> list[jax.ShapeDtypeStruct]:
        """The buffers in which gradients are added up: those of the layout, then one for each that is shared."""
        shared = ((a.size, sum_dtype(a.dtype, self.gradient_dtype)) for a in self.avals(self.shared_trained))
        return [jax.ShapeDtypeStruct((n,), dtype) for n, dtype in (*self.sums.buffers, *shared)]

    @cached_property
    def stash_pages(self) -> tuple[int, ...]:
        """Pages that one micro-batch takes in the arena, by stage."""
        trains = self.schedule.has_backward
        return tuple(_pages(self.stash_avals(stage)) if stage.vjp and trains else 0 for stage in self.stages)

    @cached_property
    def saved_pages(self) -> tuple[int, ...]:
        """Pages that the cotangents take which wait for the weight part of the backward work, by stage."""
        splits = self.schedule.splits_backward
        return tuple(_pages(self.tangents(stage.saved)) if splits else 0 for stage in self.stages)

    @cached_property
    def table(self) -> TickTable:
        """The work of every device in each tick, as numbers."""
        return tick_table(self.schedule, self.stash_pages, self.saved_pages)

    @cached_property
    def message_words(self) -> tuple[int, int]:
        """Words sent forward and backward after each tick."""
        forward = max(sum(map(word_count, self.avals(s.leaving))) for s in self.stages)
        back = max(sum(map(word_count, self.avals(s.returning))) for s in self.stages)
        return forward, back


def _pages(avals: Sequence[Shaped]) -> int:
    return math.ceil(sum(map(word_count, avals)) / PAGE)
