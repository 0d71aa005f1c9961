"""A program with what one program for all devices needs besides: buffers that all have alike, mail and an arena."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial

import jax
import jax.numpy as jnp

from jaxpipe.array_types import Shaped, TensorNumber
from jaxpipe.runtime.executable_plan import Update
from jaxpipe.runtime.gradient_precision import sum_dtype
from jaxpipe.runtime.program import Program
from jaxpipe.runtime.spmd.buffer_layout import BufferLayout, lay_out
from jaxpipe.runtime.spmd.tick_table import TickTable, tick_table
from jaxpipe.runtime.uint32_words import word_count
from jaxpipe.schedules.table import DeviceNumber, Kind, StageNumber
from jaxpipe.sharding.mesh_axes import DATA


#: 32-bit words of a page of the mail and of the arena.
PAGE = 128


@dataclass(frozen=True, eq=False)
class LockstepProgram(Program):
    """A program whose devices walk through its schedule in step, with the same buffers. Layouts are by device."""

    @classmethod
    def of(cls, program: Program) -> "LockstepProgram":
        """Return a program with its layouts."""
        return cls(**{field.name: getattr(program, field.name) for field in fields(program)})

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The mesh axes of the replicas: one, or none."""
        return (DATA,) * self.replicated

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of work in its schedule, in the order of a tick."""
        return tuple(itertools.chain.from_iterable(self.schedule.phases))

    @cached_property
    def parameters(self) -> BufferLayout:
        """The layout of the parameters."""
        return self._layout(lambda d: self.held(d)[0])

    @cached_property
    def variables(self) -> BufferLayout:
        """The layout of the state variables."""
        return self._layout(lambda d: self.held(d)[1])

    @cached_property
    def gradients(self) -> BufferLayout:
        """The layout of the gradients of trained parameters."""
        return self._layout(self.trained)

    def _layout(self, tensors: Callable[[DeviceNumber], Sequence[TensorNumber]]) -> BufferLayout:
        return lay_out([dict(zip(tensors(d), self.avals(tensors(d)), strict=True)) for d in self.device_numbers])

    @cached_property
    def sums(self) -> BufferLayout:
        """The layout of sums of gradients: the places of the gradients, in types that are as wide or wider."""
        return self.gradients.with_dtypes(partial(sum_dtype, gradient_dtype=self.gradient_dtype))

    @cached_property
    def residuals(self) -> BufferLayout:
        """The layout of what replicas have not sent of their gradients, in at least 32 bits."""
        return self.gradients.with_dtypes(lambda dtype: jnp.promote_types(dtype, jnp.float32))

    def taken(self, update: Update) -> BufferLayout:
        """Return the layout of gradients as the optimizer gets them: of sums, where it takes any in their type."""
        by_stage, tensors = update.by_stage, update.by_stage.graph.tensors
        pairs = zip(by_stage.gradients, itertools.compress(by_stage.parameters, by_stage.trained), strict=True)
        wide = any(tensors[gradient].dtype != tensors[t].dtype for gradient, t in pairs)
        return self.sums if wide and update.exchange is None else self.gradients

    def optimizer(self, update: Update) -> BufferLayout:
        """Return the layout of the optimizer state."""
        pieces = update.by_stage.state, update.by_stage.state_avals, update.by_stage.state_stage
        owned = list(zip(*pieces, strict=True))
        return lay_out([{t: aval for t, aval, owner in owned if owner == d} for d in self.device_numbers])

    @cached_property
    def lent(self) -> dict[TensorNumber, DeviceNumber]:
        """The device of each parameter that others borrow."""
        return {t: next(d for d in self.device_numbers if t in self.parameters.places[d]) for t in self.shared}

    def borrowed(self, layout: BufferLayout) -> BufferLayout:
        """Return the layout of arrays of every parameter that is borrowed, which all devices have behind their own."""
        avals = {t: layout.places[d][t].aval for t, d in self.lent.items() if t in layout.places[d]}
        return lay_out([avals] * self.num_devices)

    def with_borrowed(self, layout: BufferLayout) -> BufferLayout:
        """Return the layout of a device's own arrays, and of those behind them."""
        return layout.joined(self.borrowed(layout))

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

    def kept(self, s: StageNumber) -> tuple[Sequence[Shaped], ...]:
        """Return the shapes of what a stage keeps of a micro-batch for a later tick, by ``tick_table.KEPT``."""
        stage, arriving = self.stages[s], self.avals(self.stages[s].arriving)
        if not self.trains(s):
            return arriving, [], [], []
        saved = stage.saved if self.schedule.splits_backward else ()
        return arriving, self.tangents(self.returned(s)), stage.stash_avals, self.tangents(saved)

    @cached_property
    def pages(self) -> list[list[int]]:
        """The pages of the same, by stage."""
        return [[math.ceil(sum(map(word_count, avals)) / PAGE) for avals in self.kept(s)] for s in self.stage_numbers]

    @cached_property
    def windows(self) -> list[int]:
        """The most pages of any stage, by ``tick_table.KEPT``: all write as many."""
        return [max(pages) for pages in zip(*self.pages, strict=True)]

    @cached_property
    def table(self) -> TickTable:
        """The work of every device in each tick, and the places in mail and arena."""
        return tick_table(self.schedule, self.pages)
