"""A step as one graph: values are numbers, operators are tasks, sends and the like, in an order that runs.

    schedule, stages ──training_graph.py──▶ StepGraph ──passes.py──▶ StepGraph ──dispatch.py──▶ steps of the host

The graph is the same in every process; each follows the operators for its own devices. A value is written once.
Operators read and write numbered values:

    Call      run a task, a traced function, on the device of a stage, or on those of all its replicas
    Send      copy arrays to another device, or to the host's memory and back
    Spread    copy arrays to all devices, if they belong to several processes
    Split     take an array of all replicas of a stage apart, without a copy
    Join      put the replicas' arrays together, without a copy
    Wait      let the host wait for copies
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import PartitionSpec as P

from jaxpipe import _compat
from jaxpipe.array_types import Atom, PyTree, PyTreeDef, Shaped, TensorNumber
from jaxpipe.graph.program_form import TracedProgram
from jaxpipe.schedules.table import StageNumber


class Place(NamedTuple):
    """A stage and one of its replicas; or all of them (-1), whose arrays are global."""

    stage: StageNumber
    replica: int = -1


#: The number of a task of the graph, and where it runs.
TaskAt: TypeAlias = tuple[int, Place]


@dataclass(frozen=True)
class Call:
    """Run task number ``task`` of the graph.

    ``microbatch`` is -1 for work at the end of a step; ``action`` is the position in the order of a device's actions.
    """

    task: int
    place: Place
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    microbatch: int = -1
    action: int = -1


@dataclass(frozen=True)
class Send:
    """Copy arrays from one device to another, or between a device's memory and its host's.

    Between devices of different processes the last ``returning`` arrays go the other way.
    """

    source: Place
    target: Place
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    to_host: bool = False
    returning: int = 0

    @property
    def ends(self) -> tuple[Place, Place]:
        """The source and the target."""
        return self.source, self.target

    @property
    def targets(self) -> tuple[Place, ...]:
        """By array, the place that it goes to."""
        return (self.target,) * (len(self.reads) - self.returning) + (self.source,) * self.returning


@dataclass(frozen=True)
class Spread:
    """Copy arrays from one device to those of all stages of some replicas, as arrays that these have in common."""

    source: Place
    replicas: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """Take the array of all replicas of a stage apart."""

    place: Place
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class Join:
    """Put arrays of all replicas together: side by side along their first axis, or, if they are equal, as one."""

    place: Place
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    sharded: bool


@dataclass(frozen=True)
class Wait:
    """Let the host wait for copies from a place. It reads them and what they are of, which is held until then."""

    place: Place
    reads: tuple[int, ...]
    writes: tuple[()] = ()


Instruction = Call | Send | Spread | Split | Join | Wait


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


#: Arrays by group, such as ``"parameters"``, and in a group by tensor number or the like. Of values, their numbers.
Arrays: TypeAlias = dict[str, Any]

#: Work that is traced: arrays in, arrays out.
Work: TypeAlias = Callable[[Arrays], Arrays]

#: Groups of arrays that belong to one micro-batch: a result may be one of these, without a copy.
OF_MICROBATCH = {"arriving", "leaving", "cotangents", "returning", "stash", "saved", "statistics", "results"}

#: The order of a stage's results, by which XLA orders what it computes: what is sent and small values, then sums.
_ORDER = ("leaving", "state", "totals", "overflows", "statistics", "results", "stash", "returning", "saved", "sums")


class Traced(NamedTuple):
    """A task, and how its results stand in a tree."""

    task: Task
    reads: tuple[int, ...]  # positions among all operands
    tree: PyTreeDef  # of the results
    sources: tuple[int, ...]  # by leaf of this tree, the position among the written results, or ~position of an operand


#: Tasks by what decides them.
Traces: TypeAlias = dict[Hashable, Any]


def trace_task(
    label: str, work: Work, form: Callable[[Path], Form], operands: Arrays, consumes: bool = False
) -> Traced:
    """Trace work, a function of arrays by group that returns such, on operands of some shapes.

    ``form`` gives the form of each result.

    A result that is an operand of the same path, or an array of one micro-batch, is not written anew.
    """
    closed, shapes = jax.make_jaxpr(work, return_shape=True)(operands)
    jaxpr, _ = _compat.open_jaxpr(closed)
    given, results = _paths(operands), _paths(shapes)
    position = {v: k for k, v in enumerate(jaxpr.invars)}
    written: dict[Atom, int] = {}
    writes: list[int] = []  # positions among the results
    sources: dict[int, int] = {}
    for n in sorted(range(len(results)), key=lambda n: _rank(results[n])):
        atom = jaxpr.outvars[n]
        if not _compat.is_literal(atom):
            k = position.get(atom)
            if k is not None and (given[k] == results[n] or given[k][0] in OF_MICROBATCH):
                sources[n] = ~k
                continue
            if atom in written and results[writes[written[atom]]][0] in OF_MICROBATCH:
                sources[n] = written[atom]
                continue
            written[atom] = len(writes)
        sources[n] = len(writes)
        writes.append(n)
    program, reads = _part(closed, writes)
    names = tuple(results[n] for n in writes)
    task = Task(label, program, tuple(given[k] for k in reads), names, tuple(map(form, names)), consumes)
    tree = jax.tree.structure(shapes)
    return Traced(task, reads, tree, tuple(sources[n] for n in range(len(results))))


def trim_task(task: Task, writes: Collection[int]) -> tuple[Task, tuple[int, ...]]:
    """Return the task with some of its results, and the positions of the operands that it then reads."""
    kept = sorted(writes)
    program, reads = _part(task.program.closed, kept)
    names, forms = tuple(task.writes[k] for k in kept), tuple(task.forms[k] for k in kept)
    paths = tuple(task.reads[k] for k in reads)
    return replace(task, program=program, reads=paths, writes=names, forms=forms, estimate={}), reads


def _part(closed: Any, writes: Sequence[int]) -> tuple[TracedProgram, tuple[int, ...]]:
    """Return the part of a program that makes some of its results, and which operands it reads."""
    part, used = _compat.without_dead_code(closed, writes)
    program = TracedProgram(part, jax.tree.structure((0,) * len(writes)))
    return program, tuple(k for k, is_used in enumerate(used) if is_used)


def _rank(path: Path) -> int:
    return _ORDER.index(path[0]) if path[0] in _ORDER else len(_ORDER)


def _paths(tree: PyTree) -> list[Path]:
    """Return the keys that lead to each leaf."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path) for path, _ in leaves]
