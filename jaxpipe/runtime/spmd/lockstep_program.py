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
from jaxpipe.runtime.spmd.allocate import Inbox, inbox
from jaxpipe.runtime.spmd.buffer_layout import Layout, lay_out
from jaxpipe.runtime.spmd.tick_table import Arena, Row, arena, tick_table
from jaxpipe.runtime.uint32_words import word_count
from jaxpipe.schedules.table import Kind


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
    def state(self) -> Layout:
        """The layout of the state variables."""
        return lay_out([self.avals(self.held(d)[1]) for d in self.device_numbers])

    def slots(self, update: Update) -> Layout:
        """Return the layout of the optimizer state."""
        by_stage = update.by_stage
        owned = list(zip(by_stage.state_avals, by_stage.state_stage, strict=True))
        return lay_out([[aval for aval, owner in owned if owner == d] for d in self.device_numbers])

    @cached_property
    def residuals(self) -> Layout:
        """The layout of what replicas have not sent of their gradients, in at least 32 bits."""
        avals = ([(a.shape, jnp.promote_types(a.dtype, jnp.float32)) for a in held] for held in self.gradients.avals)
        return lay_out([[jax.ShapeDtypeStruct(*aval) for aval in held] for held in avals])

    @cached_property
    def sums(self) -> Layout:
        """The layout of sums of gradients: the places of the gradients, in types that are as wide or wider."""
        return self.summed(self.gradients)

    def summed(self, layout: Layout) -> Layout:
        """Return the layout of sums of gradients, given that of what they are gradients of."""
        return layout.with_dtypes(functools.partial(sum_dtype, gradient_dtype=self.gradient_dtype))

    @cached_property
    def shared_trained(self) -> tuple[TensorNumber, ...]:
        """The trained ones among the shared parameters."""
        return tuple(t for t in self.shared if t not in self.objective.frozen)

    @cached_property
    def gradient_avals(self) -> list[jax.ShapeDtypeStruct]:
        """The gradient buffers of one micro-batch: those of the layout, then one for each that is shared."""
        shared = [(math.prod(a.shape), a.dtype) for a in self.avals(self.shared_trained)]
        return [jax.ShapeDtypeStruct((n,), dtype) for n, dtype in (*self.gradients.buffers, *shared)]

    @cached_property
    def sum_avals(self) -> list[jax.ShapeDtypeStruct]:
        """The buffers in which gradients are added up."""
        return [jax.ShapeDtypeStruct(a.shape, sum_dtype(a.dtype, self.gradient_dtype)) for a in self.gradient_avals]

    @cached_property
    def alone(self) -> bool:
        """Return whether one stage does all, both passes of a micro-batch in every tick: nothing waits in an arena."""
        if len(self.stages) > 1 or not self.schedule.has_backward:
            return False
        ahead, behind = (self.schedule.row(0, kind) for kind in (Kind.FORWARD, Kind.BACKWARD))
        return ahead == behind and -1 not in ahead

    @cached_property
    def stash_pages(self) -> tuple[int, ...]:
        """Pages that one micro-batch takes in the arena, by stage."""
        return tuple(
            _pages(self.stash_avals(stage)) if stage.vjp and self.schedule.has_backward else 0 for stage in self.stages
        )

    @cached_property
    def saved_pages(self) -> tuple[int, ...]:
        """Pages that the cotangents take which wait for the weight part of the backward work, by stage."""
        if not self.schedule.splits_backward:
            return (0,) * len(self.stages)
        return tuple(_pages(self.tangents(stage.saved)) for stage in self.stages)

    @property
    def sends_early(self) -> bool:
        """Return whether messages to the next stage leave before the backward work of a tick, not after all of it.

        Kinds of work that share a phase exchange their messages when it is over.
        """
        return self.schedule.backward_kind not in self.schedule.phases[0]

    @cached_property
    def places(self) -> Arena:
        """First pages of everything in the arena."""
        return arena(self.schedule, self.stash_pages, self.saved_pages)

    @cached_property
    def arena_pages(self) -> int:
        """Pages of the arena, each thing in which is read and written through a window of the largest of its kind."""
        if self.alone or not self.schedule.has_backward:
            return 0
        windows = (self.places.stashes, self.stash_pages), (self.places.saved, self.saved_pages)
        return max((place + max(pages) for places, pages in windows for place in places.values()), default=0)

    @cached_property
    def inboxes(self) -> tuple[Inbox, Inbox]:
        """Slots of the messages forward and backward."""
        return inbox(self.schedule, Kind.FORWARD), inbox(self.schedule, self.schedule.backward_kind)

    @cached_property
    def table(self) -> Row:
        """The work of every device in each tick, as numbers."""
        return tick_table(self.schedule, self.places, *self.inboxes)

    @cached_property
    def message_words(self) -> tuple[int, int]:
        """Words sent forward and backward after each tick."""
        forward = max(sum(word_count(a) for a in self.avals(s.leaving)) for s in self.stages)
        back = max(sum(word_count(a) for a in self.avals(s.returning)) for s in self.stages)
        return forward, back

    @property
    def inbox_words(self) -> int:
        """Words of the messages that a device has room for."""
        return sum(box.slots * words for box, words in zip(self.inboxes, self.message_words, strict=True))


def _pages(avals: Sequence[Shaped]) -> int:
    return -(-sum(map(word_count, avals)) // PAGE)
