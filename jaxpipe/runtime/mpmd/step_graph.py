"""A step as one graph: values are numbers, operators are tasks, sends and the like, in an order that runs.

    schedule, stages ──training_graph.py──▶ StepGraph ──passes.py──▶ StepGraph ──dispatch.py──▶ steps of the host

The graph is the same in every process; each follows the operators for its own devices. A value is written once.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import PartitionSpec as P

from jaxpipe import _compat
from jaxpipe.array_types import Shaped, TensorNumber
from jaxpipe.graph.program_form import TracedProgram
from jaxpipe.runtime.mpmd.instructions import Instruction, Place


#: Where an array is in the tree of a task's operands or results: a group, such as ``"parameters"``, and keys in it.
Path: TypeAlias = tuple[Any, ...]


class Form(NamedTuple):
    """The use of an array, and its split over the devices of its place."""

    purpose: str  # a component of ``device_bytes.COMPONENTS``, or ``HOST``
    spec: P = P()
    is_free: bool = False  # XLA chooses the spec; ``spec`` is the expected one
    tensor: TensorNumber | None = None  # of activations, cotangents and stashes


class Value(NamedTuple):
    """An array of the step; ``place`` is where it was made or sent to."""

    aval: jax.ShapeDtypeStruct  # of all replicas' arrays if these are together
    place: Place
    form: Form


class Port(NamedTuple):
    """An array at the beginning or the end of a step: a field of ``TrainState``, a leaf of the batch, a report."""

    place: Place
    field: str
    number: Hashable = 0


@dataclass(frozen=True, eq=False)
class Task:
    """A traced function: the operands that it reads, and the results that it writes."""

    label: str
    program: TracedProgram
    reads: tuple[Path, ...]
    writes: tuple[Path, ...]
    forms: tuple[Form, ...]  # by result
    consumes: bool = False  # it may write over what exists at the beginning: a new value where the old one is
    estimate: dict[Hashable, int] = field(default_factory=dict)  # of temporary bytes (``device_bytes``)

    @cached_property
    def read_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the operands."""
        return tuple(shape_of(v.aval) for v in _compat.open_jaxpr(self.program.closed)[0].invars)

    @cached_property
    def written_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the results."""
        return tuple(shape_of(v.aval) for v in _compat.open_jaxpr(self.program.closed)[0].outvars)


@dataclass(frozen=True, eq=False)
class StepGraph:
    """A step, or a forward pass."""

    values: tuple[Value, ...]
    tasks: tuple[Task, ...]
    instructions: tuple[Instruction, ...]
    inputs: dict[Port, int]
    outputs: dict[Port, int]
    donated: tuple[frozenset[int], ...] = ()  # by task, positions of operands that it may write over
    drops: tuple[tuple[int, ...], ...] = ()  # by instruction, values that nobody reads any more

    @cached_property
    def avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the values."""
        return tuple(value.aval for value in self.values)

    @cached_property
    def specs(self) -> tuple[P, ...]:
        """Partition specs of the values."""
        return tuple(value.form.spec for value in self.values)


def shape_of(aval: Shaped) -> jax.ShapeDtypeStruct:
    """Return the shape and the element type of an array."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
