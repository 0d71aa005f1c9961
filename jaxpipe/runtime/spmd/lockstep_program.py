"""A program with what one program for all devices needs besides: buffers that all have alike, mail and an arena."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.array_types import AbstractArray, PyTree, Shaped, TensorNumber
from jaxpipe.runtime.executable_plan import Update
from jaxpipe.runtime.gradient_precision import sum_dtype
from jaxpipe.runtime.replica_exchange import StageOuterLoop
from jaxpipe.runtime.spmd.buffer_layout import BufferLayout, lay_out
from jaxpipe.runtime.spmd.tick_table import TickTable, tick_table
from jaxpipe.runtime.stages import Program
from jaxpipe.runtime.uint32_words import word_count
from jaxpipe.schedules.table import DeviceNumber, Kind, StageNumber
from jaxpipe.sharding.mesh_axes import DATA, STAGE


T = TypeVar("T")

#: The name of an outer parameter, or of a part of its optimizer's state: the parameter's tensor number, and a number.
Outer: TypeAlias = tuple[TensorNumber, int]

#: 32-bit words of a page of the mail and of the arena.
PAGE = 128


@dataclass(frozen=True, eq=False)
class LockstepProgram(Program):
    """A program whose devices walk through its schedule in step, with the same buffers. Layouts are by device."""

    update: Update | None = None  # which its timeline does not need
    sites: list[list[int]] | None = None  # in an outer loop, if there are several, the replicas of each

    @classmethod
    def of(cls, program: Program, **more: Any) -> "LockstepProgram":
        """Return a program with its layouts; ``more`` is what it has besides."""
        return cls(**{field.name: getattr(program, field.name) for field in fields(program)}, **more)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The mesh axes of the replicas: one, or none."""
        return (DATA,) * self.replicated

    def by_device(self, function: Callable[[DeviceNumber], T]) -> T:
        """Return a function's result for this device, inside ``shard_map``: a conditional."""
        return lax.switch(lax.axis_index(STAGE), [partial(function, d) for d in self.device_numbers])

    def by_number(self, tensors: Sequence[TensorNumber]) -> dict[TensorNumber, AbstractArray]:
        """Return the shapes of some tensors by their numbers."""
        return dict(zip(tensors, self.avals(tensors), strict=True))

    @cached_property
    def parameters(self) -> BufferLayout:
        """The layout of the parameters."""
        return lay_out([self.by_number(self.held(d)[0]) for d in self.device_numbers])

    @cached_property
    def variables(self) -> BufferLayout:
        """The layout of the state variables."""
        return lay_out([self.by_number(self.held(d)[1]) for d in self.device_numbers])

    @cached_property
    def gradients(self) -> BufferLayout:
        """The layout of the gradients of trained parameters."""
        return lay_out([self.by_number(self.trained(d)) for d in self.device_numbers])

    @cached_property
    def sums(self) -> BufferLayout:
        """The layout of sums of gradients: the places of the gradients, in types that are as wide or wider."""
        return self.gradients.with_dtypes(partial(sum_dtype, gradient_dtype=self.gradient_dtype))

    @cached_property
    def taken(self) -> BufferLayout:
        """The layout of gradients as the optimizer gets them: of sums, where it takes any in their type."""
        assert self.update is not None
        by_stage, tensors = self.update.by_stage, self.update.by_stage.graph.tensors
        pairs = zip(by_stage.gradients, itertools.compress(by_stage.parameters, by_stage.trained), strict=True)
        wide = any(tensors[gradient].dtype != tensors[t].dtype for gradient, t in pairs)
        return self.sums if wide and self.update.exchange is None else self.gradients

    @cached_property
    def state(self) -> dict[str, BufferLayout]:
        """The layout of each part of a training state, by field."""
        assert self.update is not None
        by_stage, exchange, loop = self.update.by_stage, self.update.exchange, self.update.outer
        leaves = map(by_stage.leaves_of, self.device_numbers)
        optimizer = lay_out([{by_stage.state[k]: by_stage.state_avals[k] for k in positions} for positions in leaves])
        nothing = lay_out([{}] * self.num_devices)
        # What replicas have not sent of their gradients, or are to be moved by, in at least 32 bits.
        left = self.gradients.with_dtypes(lambda dtype: jnp.promote_types(dtype, jnp.float32))
        return {
            "parameters": self.parameters,
            "variables": self.variables,
            "optimizer": optimizer,
            "residual": left if exchange is not None or (loop is not None and loop.settings.delay) else nothing,
            "outer": nothing if loop is None else lay_out([self._outer(loop, d) for d in self.device_numbers]),
        }

    def _outer(self, loop: StageOuterLoop, device: DeviceNumber) -> dict[Outer, Shaped]:
        """Shapes of a device's outer parameters, and of the states of their optimizer, which have numbers from 1 on."""
        avals = self.by_number(self.held(device)[0])
        return {(t, i): x for t, aval in avals.items() for i, x in enumerate(loop.avals(aval))}

    def outer_parameters(self, outer: Mapping[Outer, Any]) -> dict[TensorNumber, Any]:
        """Return the outer parameters among some arrays, in the types of the model's."""
        return {t: x.astype(self.objective.graph.tensors[t].dtype) for (t, i), x in outer.items() if i == 0}

    def added(self, layout: BufferLayout) -> tuple[list[Shaped], dict[TensorNumber, Shaped]]:
        """Shapes of gradients in a layout, and of those of borrowed parameters, which all devices have beside them."""
        places = {t: layout.places[d][t] for t, d in self.lent.items() if t in layout.places[d]}
        dtypes = {t: layout.buffers[place.buffer].dtype for t, place in places.items()}
        return [*layout.buffers], {t: jax.ShapeDtypeStruct(x.shape, dtypes[t]) for t, x in places.items()}

    @cached_property
    def result_avals(self) -> list[Shaped]:
        """Shapes of what forward work hands out of each micro-batch: the results, and how many tensors overflowed."""
        return [*self.avals(self.objective.results), jax.ShapeDtypeStruct((), jnp.int32)]

    def trains(self, s: StageNumber) -> bool:
        """Return whether a stage works backward, too."""
        return self.stages[s].vjp is not None and self.schedule.has_backward and s >= self.schedule.frozen

    def kept(self, s: StageNumber) -> tuple[PyTree, ...]:
        """Return the shapes of what a stage keeps of a micro-batch for a later tick, by ``tick_table.KEPT``."""
        stage = self.stages[s]
        arriving = self.by_number(stage.arriving)
        if not self.trains(s):
            return arriving, {}, {}, {}
        saved = stage.saved if self.schedule.splits_backward else ()
        return arriving, self.tangents(self.received(s, Kind.BACKWARD)), stage.stashed, self.tangents(saved)

    @cached_property
    def pages(self) -> list[list[int]]:
        """The pages of the same, by stage."""
        return [[math.ceil(word_count(avals) / PAGE) for avals in self.kept(s)] for s in self.stage_numbers]

    @cached_property
    def windows(self) -> list[int]:
        """The most pages of any stage, by ``tick_table.KEPT``: all write as many."""
        return [max(pages) for pages in zip(*self.pages, strict=True)]

    @cached_property
    def table(self) -> TickTable:
        """The work of every device in each tick, and the places in mail and arena."""
        return tick_table(self.schedule, self.pages)
