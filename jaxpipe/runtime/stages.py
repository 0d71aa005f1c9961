"""A training step as data: the programs of the stages, a schedule, and where variables live."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, TypeVar, cast

import jax

from jaxpipe.array_types import AbstractArray, DType, Shaped, TensorNumber
from jaxpipe.errors import PartitionError
from jaxpipe.graph.allowed_codecs import FAST, Policy
from jaxpipe.graph.graph import Graph, dependents, is_differentiable, live, ordered
from jaxpipe.graph.operator_order import allowed_cuts, spans, uses_apart
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.residuals import vjp_program
from jaxpipe.residuals.choose_formats import ResidualPlan
from jaxpipe.residuals.vjp_program import VJPProgram
from jaxpipe.runtime.gradient_precision import sum_dtype
from jaxpipe.runtime.uint32_words import word_count
from jaxpipe.schedules.replicas import StageReplicas
from jaxpipe.schedules.table import DeviceNumber, Kind, Schedule, StageNumber
from jaxpipe.sharding.mesh_axes import Specs


#: Where a variable is: the number of a stage, or of a device.
PlaceNumber = TypeVar("PlaceNumber", bound=int, covariant=True)


@dataclass(frozen=True, eq=False)
class Fold:
    """The fold of a micro-batch's statistics into the state before it, in a stage whose devices share micro-batches.

        each micro-batch:  what it adds to the state (a mean, a variance)
        end of the step:   these of all devices ──▶ folded, in the order of the micro-batches

    So every device of the stage ends with the state that one device would have. It can be done where nothing but the
    new state follows from the old one.
    """

    graph: Graph  # ``(old state, statistics) -> new state``
    state: tuple[TensorNumber, ...]  # tensor numbers of the state variables that change
    statistics: tuple[TensorNumber, ...]  # tensor numbers of what a micro-batch adds


@dataclass(frozen=True)
class SwapTarget:
    """Memory that takes a part of each stash of a stage."""

    stage: StageNumber  # on whose device it is, in the same replica; or ``swap_points.HOST``: its own device's host
    share: float


@dataclass(frozen=True)
class StashSwap:
    """Swaps of a stage."""

    tensors: tuple[TensorNumber, ...]  # of its stash, by number in the objective's graph; sliced among the targets
    targets: tuple[SwapTarget, ...]


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage's work on a micro-batch. All fields but the programs are tensor numbers of the whole graph."""

    graph: Graph
    parameters: tuple[TensorNumber, ...]
    state: tuple[TensorNumber, ...]
    used: tuple[TensorNumber, ...]  # the micro-batch's arrays and its key, which every stage has
    arriving: tuple[TensorNumber, ...]  # from the stage before, forward; ``leaving``: to the next
    leaving: tuple[TensorNumber, ...]
    results: tuple[int, ...]  # positions among the objective's
    new_state: tuple[TensorNumber, ...]  # the new value of each variable in ``state``
    borrowed: tuple[TensorNumber, ...] = ()  # used here, placed in another stage
    vjp: VJPProgram | None = None
    returning: tuple[TensorNumber, ...] = ()  # of ``arriving``, those whose cotangent is sent back
    saved: tuple[TensorNumber, ...] = ()  # whose cotangents wait for the weight part of the backward pass
    fold: Fold | None = None  # where several devices share its micro-batches; ``new_state`` is the old one then
    swap: StashSwap | None = None  # the part of its stash that is in other memory between the passes
    slices: int = 1  # into how many its largest product is cut

    @cached_property
    def stashed(self) -> dict[TensorNumber, tuple[jax.ShapeDtypeStruct, ...]]:
        """The stored tensors that the backward pass does not get as arguments: shapes of what each is stored as."""
        if self.vjp is None:
            return {}
        stored = zip(self.vjp.plan.stored, self.vjp.stash_avals, strict=True)
        return {t: avals for t, avals in stored if t not in self.used}

    @property
    def stash_avals(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of what one micro-batch keeps for its backward pass."""
        return [aval for avals in self.stashed.values() for aval in avals]

    @property
    def programs(self) -> VJPProgram:
        """The forward and the backward program, of a stage that has both."""
        assert self.vjp is not None
        return self.vjp

    @property
    def is_trained(self) -> bool:
        """True if there is backward work here."""
        return self.vjp is not None and bool(self.vjp.backward_graph.wrt)

    def differentiated(self, kind: Kind) -> frozenset[TensorNumber]:
        """Return the inputs whose cotangent is ready after work of a kind."""
        if self.vjp is None or kind is Kind.FORWARD:
            return frozenset()
        parts = {Kind.BACKWARD_INPUT: self.vjp.input_part, Kind.BACKWARD_WEIGHT: self.vjp.weight_part}
        return frozenset(parts.get(kind, self.vjp.backward_graph.wrt))


@dataclass(frozen=True)
class Placement(Generic[PlaceNumber]):
    """The stage of every parameter and state variable, by position; or, of several stages on each, the device."""

    parameters: tuple[PlaceNumber, ...]
    state: tuple[PlaceNumber, ...]

    def on_devices(self, schedule: Schedule) -> "Placement[DeviceNumber]":
        """The device of every variable, from the stage."""
        return Placement(tuple(map(schedule.device, self.parameters)), tuple(map(schedule.device, self.state)))

    def home(self, objective: MicrobatchProgram) -> dict[TensorNumber, PlaceNumber]:
        """The stage or device of each variable of a program."""
        return dict(zip((*objective.parameters, *objective.state), (*self.parameters, *self.state), strict=True))

    def held_by(self, place: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Positions of the parameters and of the state variables in a stage, or on a device; None has none."""
        return tuple(k for k, s in enumerate(self.parameters) if s == place), tuple(
            k for k, s in enumerate(self.state) if s == place
        )


@dataclass(frozen=True, eq=False)
class Program:
    """Stages, a schedule, and where variables live: all that a runtime needs.

    ``schedule.stage_of`` has the stages of every device. Stage programs (``jaxpipe.runtime.mpmd``) may have several
    devices in a stage: a device of the schedule then stands for all of them, and a micro-batch for a round
    (``jaxpipe.schedules.replicas``).
    """

    objective: MicrobatchProgram
    stages: tuple[Stage, ...]
    schedule: Schedule
    stage_replicas: StageReplicas  # the devices along the stage axis
    num_microbatches: int  # of a step, on each replica of the data axis
    placement: Placement[StageNumber]  # the stage of every variable
    replicated: bool  # the mesh has a data axis
    gradient_dtype: DType | None = None  # in which narrower ones are added up; None: float32
    specs: Specs = field(default_factory=Specs)  # over the devices of a stage

    def bytes_of(self, numbers: Sequence[TensorNumber]) -> int:
        """Bytes of some tensors on each device of a stage, in words."""
        return sum(self._bytes(t, a) for t, a in zip(numbers, self.avals(numbers), strict=True))

    def _bytes(self, t: TensorNumber, aval: Shaped) -> int:
        """Bytes of a tensor, or of an array that it is stored as, on each device of a stage."""
        return -(-4 * word_count(aval) // self.specs.submesh.shards(self.specs.of_tensor(t)))

    def avals(self, numbers: Sequence[TensorNumber]) -> list[AbstractArray]:
        """Shapes of some tensors."""
        return [self.objective.graph.tensors[t].aval for t in numbers]

    @property
    def num_devices(self) -> int:
        """Devices along the stage axis, or the stages on them."""
        return self.schedule.num_devices

    @cached_property
    def stage_numbers(self) -> tuple[StageNumber, ...]:
        """Numbers of the stages."""
        return tuple(map(StageNumber, range(len(self.stages))))

    @property
    def device_numbers(self) -> tuple[DeviceNumber, ...]:
        """Numbers of the devices along the stage axis."""
        return self.schedule.device_numbers

    def device(self, stage: StageNumber) -> DeviceNumber:
        """Return where a stage is."""
        return self.schedule.device(stage)

    @cached_property
    def on_devices(self) -> Placement[DeviceNumber]:
        """The device of every variable."""
        return self.placement.on_devices(self.schedule)

    def held(self, device: DeviceNumber) -> tuple[list[TensorNumber], list[TensorNumber]]:
        """The tensors of the parameters and of the state variables on a device, in the order of the layouts."""
        parameters, state = self.on_devices.held_by(device)
        return [self.objective.parameters[k] for k in parameters], [self.objective.state[k] for k in state]

    def trained(self, device: DeviceNumber) -> list[TensorNumber]:
        """The trained parameters of a device, in the order of the layout of gradients."""
        return [t for t in self.held(device)[0] if t not in self.objective.frozen]

    @cached_property
    def lent(self) -> dict[TensorNumber, DeviceNumber]:
        """The device of each parameter that others use and do not hold."""
        home = self.on_devices.home(self.objective)
        return {t: home[t] for s in self.stage_numbers for t in self.stages[s].borrowed if home[t] != self.device(s)}

    def received(self, s: StageNumber, kind: Kind) -> tuple[TensorNumber, ...]:
        """The tensors whose cotangents backward work of a kind is given, by its input part or by the next stage."""
        if kind is Kind.BACKWARD_WEIGHT:
            return self.stages[s].saved
        return self.stages[s + 1].returning if s + 1 < len(self.stages) else ()

    def sum_bytes(self, numbers: Sequence[TensorNumber]) -> int:
        """Bytes of the sums of gradients of some parameters."""
        return sum(sum_dtype(a.dtype, self.gradient_dtype).itemsize * a.size for a in self.avals(numbers))

    def in_flight(self, stage: StageNumber) -> int:
        """The most stashes of a stage that its device holds at the same time."""
        device = self.device(stage)
        return self.schedule.in_flight(device, self.schedule.chunk(stage)) * self.stage_replicas.per_device(device)

    def stash_bytes(self, stage: Stage) -> int:
        """Bytes of what one micro-batch of a stage keeps for its backward pass, on each of its devices, in words."""
        return sum(self._bytes(t, a) for t, avals in stage.stashed.items() for a in avals)

    def tangents(self, numbers: Sequence[TensorNumber]) -> dict[TensorNumber, AbstractArray]:
        """Shapes of the cotangents of some tensors, by their numbers."""
        avals = zip(numbers, self.avals(numbers), strict=True)
        return {t: cast(AbstractArray, aval.to_tangent_aval()) for t, aval in avals}


def variable_spans(objective: MicrobatchProgram) -> dict[TensorNumber, tuple[tuple[int, int], ...]]:
    """For each parameter and state variable that is used, first and last operator of uses that stay together.

    A parameter that is used again behind other parameters' products (a tied embedding) may be used in several stages.
    """
    pairs = zip(objective.state, objective.new_state, strict=True)
    together = {old: new for old, new in pairs if new not in objective.state}
    # Of a variable that becomes its gradient, the gradients of several stages would be added up at the end of the step.
    apart = [t for t in objective.parameters if t not in objective.overwritten]
    together = spans(objective.graph, objective.state, together) | spans(objective.graph, objective.overwritten, {})
    return {**uses_apart(objective.graph, apart), **{t: (span,) for t, span in together.items()}}


def places_to_cut(objective: MicrobatchProgram) -> list[bool]:
    """Return where a stage may begin: not between two uses of one variable that stay together."""
    return allowed_cuts(objective.graph, itertools.chain.from_iterable(variable_spans(objective).values()))


def place_variables(objective: MicrobatchProgram, cuts: Sequence[int]) -> Placement[StageNumber]:
    """Put every variable into the stage that uses it first; what nothing uses, into the first."""
    first = {t: uses[0][0] for t, uses in variable_spans(objective).items()}

    def stage_of(t: TensorNumber) -> StageNumber:
        return StageNumber(sum(first.get(t, 0) >= c for c in cuts[1:-1]))

    return Placement(tuple(map(stage_of, objective.parameters)), tuple(map(stage_of, objective.state)))


def cut_stages(
    objective: MicrobatchProgram, cuts: Sequence[int], placement: Placement[StageNumber]
) -> tuple[Stage, ...]:
    """The forward programs of all stages. Every operator is in exactly one."""
    graph = objective.graph
    body = replace(graph, outputs=())
    # A result may be a variable as it is: it is made where that lives.
    home: dict[TensorNumber, int] = {**placement.home(objective)}
    home |= {t: s for s in range(len(cuts) - 1) for op in graph.operators[cuts[s] : cuts[s + 1]] for t in op.outputs}
    known = {*objective.parameters, *objective.state, *objective.given}
    last = len(cuts) - 2
    stages: list[Stage] = []
    for s in range(len(cuts) - 1):
        positions = placement.held_by(s)
        parameters = tuple(objective.parameters[k] for k in positions[0])
        state = tuple(objective.state[k] for k in positions[1])
        new_state = tuple(objective.new_state[k] for k in positions[1])
        part = body.section(cuts[s], cuts[s + 1])
        results = tuple(k for k, t in enumerate(objective.results) if home.get(t, last) == s)
        outputs = (*part.outputs, *(objective.results[k] for k in results), *new_state)
        arriving = stages[-1].leaving if stages else ()
        assert set(part.inputs) - known == set(arriving)
        borrowed = tuple(t for t in objective.parameters if t in part.inputs and t not in parameters)
        needed = {*part.inputs, *outputs}
        used = tuple(t for t in objective.given if t in needed)
        inputs = (*parameters, *borrowed, *state, *used, *arriving)
        program = replace(part, inputs=inputs, outputs=outputs, parameters=frozenset((*parameters, *borrowed)))
        stage = Stage(program, parameters, state, used, arriving, part.outputs, results, new_state, borrowed=borrowed)
        stages.append(stage)
    count = sum(len(stage.graph.operators) for stage in stages)
    assert count == len(graph.operators), f"{count} operators in stages, {len(graph.operators)} in the program"
    return tuple(stages)


def with_backward(
    objective: MicrobatchProgram,
    stages: Sequence[Stage],
    policy: Policy = FAST,
    plans: Sequence[ResidualPlan | None] | None = None,
) -> tuple[Stage, ...]:
    """Return the stages with backward programs, by the storage plan of each or the default one under a policy."""
    active = _active(objective)
    loss = objective.results[0]
    done: list[Stage] = []
    seeds: set[TensorNumber] = {loss}
    for stage, plan in zip(reversed(stages), reversed(plans or [None] * len(stages)), strict=True):
        given = [t for t in stage.graph.outputs if t in seeds]
        wrt = [t for t in (*stage.parameters, *stage.borrowed, *stage.arriving) if t in active]
        built = vjp_program.build(stage.graph, wrt, policy=policy, held=stage.used, seeds=given, plan=plan)
        reached = vjp_program.reached(built, given)
        returning = tuple(t for t in stage.arriving if t in reached)
        saved = tuple(t for t in built.saved if t in reached)
        done.append(replace(stage, vjp=built, returning=returning, saved=saved))
        seeds = {loss, *returning}
    return tuple(reversed(done))


def with_storage(
    stage: Stage, vjp: VJPProgram, loss: TensorNumber, slices: int = 1, swap: StashSwap | None = None
) -> Stage:
    """Return a stage with other storage; the last stage may have its largest product in slices, for its loss alone."""
    saved = stage.saved
    if slices > 1:
        reached = vjp_program.reached(vjp, [loss])
        saved = tuple(t for t in vjp.saved if t in reached)
    return replace(stage, graph=vjp.backward_graph.source, vjp=vjp, saved=saved, slices=slices, swap=swap)


def _active(objective: MicrobatchProgram) -> set[TensorNumber]:
    """Tensors that depend on a trained parameter and can carry a cotangent."""
    tensors = objective.graph.tensors
    active = set(objective.differentiated)
    for op in objective.graph.operators:
        if not active.isdisjoint(op.inputs):
            active.update(t for t in op.outputs if is_differentiable(tensors[t].aval))
    return active


def shared_stages(
    objective: MicrobatchProgram, stages: Sequence[Stage], stage_replicas: StageReplicas
) -> tuple[Stage, ...]:
    """Return the stages; those on several devices get a fold for their state."""
    if stage_replicas.is_single:
        return tuple(stages)
    return tuple(
        stage if width == 1 else separate(objective, stage, width)
        for stage, width in zip(stages, stage_replicas.per_stage, strict=True)
    )


def separate(objective: MicrobatchProgram, stage: Stage, width: int) -> Stage:
    """Return the stage without the operators that follow from its state, which become its fold.

    Raises ``PartitionError`` if something else follows from state that changes.
    """
    changing = [(t, new) for t, new in zip(stage.state, stage.new_state, strict=True) if t != new]
    if not changing:
        return stage
    old, new = zip(*changing, strict=True)
    graph = stage.graph
    changed = dependents(graph.operators, old)
    kept = [*stage.leaving, *(objective.results[k] for k in stage.results)]
    for t in kept:
        if t in changed:
            op, source = graph.producers.get(t), next(v for v in old if t in dependents(graph.operators, [v]))
            where = f" in {op.path}" if op is not None and op.path else ""
            what = "what the loss returns" if op is None else f"the output of {op.label}{where}"
            raise PartitionError(
                f"A stage on {width} devices would share its micro-batches among them, but {what} depends on "
                f"{objective.names[source]}, which every micro-batch changes: it would need what "
                "the micro-batch before it has left on another device. Only the new state may depend on the old one, "
                "as with running statistics. Give this stage one device (devices_per_stage=)."
            )
    behind = live([op for op in graph.operators if not changed.isdisjoint(op.outputs)], new)
    written = {t for op in behind for t in op.outputs}
    read = [*(t for op in behind for t in op.inputs), *new]
    statistics = tuple(t for t in ordered(read) if t not in written and t not in old and t not in graph.constants)
    fold = Fold(replace(graph, operators=behind, inputs=(*old, *statistics), outputs=new), old, statistics)
    rest = tuple(op for op in graph.operators if changed.isdisjoint(op.outputs))
    outputs = tuple(ordered((*kept, *stage.state, *statistics)))
    return replace(stage, graph=replace(graph, operators=rest, outputs=outputs), new_state=stage.state, fold=fold)
