"""The work of a stage on one micro-batch, as functions over named arrays.

    forward:          parameters, state, batch, activations              -> activations, stash, state, totals
    backward:         parameters, batch, stash, cotangents, gradients    -> cotangents, gradients
    backward input:   the same                                           -> cotangents, gradients, saved
    backward weight:  parameters, batch, stash, saved, gradients         -> gradients

A piece of work may do several of these one after the other: the last stage goes forward and backward in one program,
so that its stash never leaves it. Gradients and totals are added up inside.
"""

import enum
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import AbstractArray, Array, DType, Shaped, TensorNumber
from jaxpipe.gradients.squared_norm import norm_dtype
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.residuals.codecs.keep import KEEP
from jaxpipe.runtime import stage_passes
from jaxpipe.runtime.gradient_precision import add_gradient, larger_gradient, sum_dtype, widened
from jaxpipe.runtime.stages import Stage
from jaxpipe.schedules.table import Kind, StageNumber
from jaxpipe.sharding.partition_specs import Specs
from jaxpipe.sharding.submesh import axis_names


class Role(enum.Enum):
    """The use of an array in a stage; those of the second group exist once for each micro-batch."""

    PARAMETER = "parameter"
    STATE = "state"
    BATCH = "batch"
    KEY = "key"
    STEP = "step"
    GRADIENT = "gradient"
    TOTAL = "total"
    OPTIMIZER = "optimizer"
    SHARED = "shared optimizer state"
    RESIDUAL = "residual"
    WEIGHT = "weight"
    EXCHANGED = "exchanged"
    SQUARES = "squares"
    STOPPED = "stopped"
    MEAN = "mean gradient"
    REPORT = "report"

    INDEX = "index"
    ACTIVATION = "activation"
    STASH = "stash"
    COTANGENT = "cotangent"
    SAVED = "saved"
    RESULT = "result"
    STATISTIC = "statistic"
    PIECE = "piece"

    @property
    def is_of_microbatch(self) -> bool:
        """True for arrays of one micro-batch."""
        return self in _OF_MICROBATCH


_OF_MICROBATCH = frozenset(itertools.dropwhile(lambda role: role is not Role.INDEX, Role))


class Name(NamedTuple):
    """An array of a stage: its role, and the number of its tensor in the objective's graph or of its result.

    ``part`` counts the arrays that one tensor is stored as.
    """

    role: Role
    number: int = 0
    part: int = 0

    @property
    def tensor(self) -> TensorNumber:
        """The number, in roles that have one array for each tensor."""
        return TensorNumber(self.number)


#: Named arrays during the trace of some work: its operands, and what it has computed.
Arrays: TypeAlias = dict[Name, Array]

#: Shapes of named arrays.
Avals: TypeAlias = dict[Name, jax.ShapeDtypeStruct]


def shape_of(x: Shaped) -> jax.ShapeDtypeStruct:
    """Return the shape and the element type of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


#: Roles of arrays that are split as their tensors are.
_OF_TENSORS = {Role.PARAMETER, Role.STATE, Role.MEAN, Role.ACTIVATION, Role.COTANGENT, Role.SAVED}

#: The random key of a run as numbers, the count of its steps, and which micro-batch it is: of the replica, of all.
KEY, STEP, INDEX = Name(Role.KEY), Name(Role.STEP), Name(Role.INDEX)

#: The count of sparse tensors that did not fit, beside the totals of the objective's results.
OVERFLOWS = Name(Role.TOTAL, -1)


@dataclass(frozen=True, eq=False)
class Work:
    """A function over named arrays."""

    label: str
    operands: Avals  # all that it may read; tracing shows what it does read
    function: Callable[[Arrays], Arrays]  # a result replaces an operand of the same name


@dataclass(frozen=True, eq=False)
class Pack:
    """Small sums of gradients side by side in one array: a call takes 0.7 us for each array that it writes over."""

    name: Name
    aval: jax.ShapeDtypeStruct
    tensors: tuple[TensorNumber, ...]  # the parameters, in order
    sizes: tuple[int, ...]  # elements of each

    def part(self, array: Array, t: TensorNumber) -> Array:
        """Return the sum of one parameter's gradients, flat."""
        k = self.tensors.index(t)
        begin = sum(self.sizes[:k])
        return array[..., begin : begin + self.sizes[k]]


@dataclass(frozen=True, eq=False)
class Context:
    """Data that the work of every stage needs."""

    objective: MicrobatchProgram
    stages: tuple[Stage, ...]
    batch: tuple[jax.ShapeDtypeStruct, ...]  # of a replica's part of each leaf
    shared: tuple[bool, ...]
    num_microbatches: int
    key: jax.ShapeDtypeStruct  # shape of a random key
    members: tuple[int, ...]  # by stage; where it has several, a sum of gradients has an axis of length 1 in front
    counts: tuple[bool, ...]  # by stage, whether it is the last on its devices, which writes what every device has
    gradient_dtype: DType | None = None  # of sums of narrower gradients
    trains: bool = True  # stages store for a backward pass
    collects: bool = False  # results are kept by micro-batch, not added up
    specs: Specs = field(default_factory=Specs)  # over the axes of a member's devices

    @functools.cached_property
    def stage_numbers(self) -> tuple[StageNumber, ...]:
        """Numbers of the stages."""
        return tuple(map(StageNumber, range(len(self.stages))))

    def aval(self, t: TensorNumber) -> jax.ShapeDtypeStruct:
        """The shape of a tensor."""
        return shape_of(self.objective.graph.tensors[t])

    def spec(self, s: StageNumber, name: Name) -> P:
        """The partition spec of an array of a member of a stage; where XLA chooses it, the expected one."""
        role = name.role
        if role is Role.OPTIMIZER:
            return self.specs.of_leaf(name.number)
        if role is Role.GRADIENT and name.part >= 0:
            return P(*(None for _ in self.lead(s)), *self.specs.of_tensor(name.tensor))
        if role in _OF_TENSORS:
            return self.specs.of_tensor(name.tensor)
        if role is Role.STASH:  # of other dimensions than its tensor, but in as many parts
            axes = tuple(axis for axes in self.specs.of_tensor(name.tensor) for axis in axis_names(axes))
            return P(axes) if axes else P()
        return P()

    def is_free(self, name: Name) -> bool:
        """Return whether XLA chooses how an array is split: one that a member keeps for its own backward pass."""
        if self.specs.submesh.size == 1:
            return False
        kept = name.role is Role.ACTIVATION and name.tensor not in self._sent
        return kept or name.role in (Role.STASH, Role.SAVED, Role.PIECE)

    @functools.cached_property
    def _sent(self) -> frozenset[TensorNumber]:
        return frozenset(t for stage in self.stages for t in (*stage.arriving, *stage.leaving))

    def of_members(self, s: StageNumber, aval: Shaped) -> jax.ShapeDtypeStruct:
        """The shape of the arrays of all members of a stage, side by side along their first axis."""
        if self.members[s] == 1:
            return shape_of(aval)
        shape = aval.shape or (1,)
        return jax.ShapeDtypeStruct((self.members[s] * shape[0], *shape[1:]), aval.dtype)

    def lead(self, s: StageNumber) -> tuple[int, ...]:
        """The axes in front of a sum of gradients in a stage."""
        return (1,) if self.members[s] > 1 else ()

    def sum_aval(self, s: StageNumber, t: TensorNumber) -> jax.ShapeDtypeStruct:
        """The shape of the sum of a parameter's gradients in a stage."""
        aval = self.aval(t)
        return jax.ShapeDtypeStruct((*self.lead(s), *aval.shape), sum_dtype(aval.dtype, self.gradient_dtype))

    @functools.cached_property
    def packs(self) -> tuple[dict[TensorNumber, Pack], ...]:
        """By stage and parameter, the array in which a small sum of gradients lies beside others."""
        return tuple(_packs(self, s) for s in self.stage_numbers)

    def sums(self, s: StageNumber, tensors: Iterable[TensorNumber]) -> Avals:
        """The arrays that hold the sums of some parameters' gradients in a stage, and their shapes."""
        arrays = {}
        for t in tensors:
            pack = self.packs[s].get(t)
            arrays |= {Name(Role.GRADIENT, t): self.sum_aval(s, t)} if pack is None else {pack.name: pack.aval}
        return arrays

    def total_aval(self, name: Name) -> jax.ShapeDtypeStruct:
        """The shape of a total."""
        if name.number == OVERFLOWS.number:
            return jax.ShapeDtypeStruct((), jnp.int32)
        return self.aval(self.objective.results[name.number])

    @property
    def weight_dtype(self) -> DType:
        """The type of the sum of the weights of all micro-batches."""
        return self.total_aval(Name(Role.TOTAL, 1)).dtype

    @functools.cached_property
    def norm_dtype(self) -> DType:
        """The type of the norm of all gradients."""
        return norm_dtype(self.aval(t).dtype for t in self.objective.parameters)

    def trained(self, s: StageNumber) -> list[TensorNumber]:
        """The parameters that receive a gradient in a stage, borrowed ones included."""
        stage = self.stages[s]
        if stage.vjp is None:
            return []
        wrt = set(stage.vjp.backward_graph.wrt) - self.objective.frozen
        return [t for t in (*stage.parameters, *stage.borrowed) if t in wrt]

    def held(self, s: StageNumber) -> list[TensorNumber]:
        """The parameters of a stage whose gradient the optimizer takes."""
        return [t for t in self.stages[s].parameters if t not in self.objective.frozen]

    def statistics(self, s: StageNumber) -> tuple[TensorNumber, ...]:
        """Tensors that a micro-batch adds to the state of a stage whose members share the micro-batches."""
        fold = self.stages[s].fold
        return fold.statistics if fold is not None and self.trains else ()

    def renewed_state(self, s: StageNumber) -> list[TensorNumber]:
        """The state variables of a stage that a step changes."""
        stage = self.stages[s]
        if stage.fold is not None:
            return list(stage.fold.state)
        return [t for t, new in zip(stage.state, stage.new_state, strict=True) if t != new]

    def totals(self, s: StageNumber) -> list[Name]:
        """The totals that a stage adds up."""
        stage = self.stages[s]
        names = [] if self.collects else [Name(Role.TOTAL, k) for k in stage.results]
        uncertain = self.trains and stage.vjp is not None and stage.vjp.plan.uncertain
        return [*names, OVERFLOWS] if uncertain else names


#: Vectors, such as biases and scales, of at most so many bytes have their sums side by side.
_PACKED_BYTES = 1 << 16


def _packs(context: Context, s: StageNumber) -> dict[TensorNumber, Pack]:
    """By parameter that no other stage uses and whose gradients add up, the array in which its small sum lies."""
    built = context.stages[s].vjp
    if built is None:
        return {}
    apart = {t for stage in context.stages for t in stage.borrowed} | context.objective.overwritten
    groups: dict[tuple[DType, bool], list[TensorNumber]] = {}
    for t in context.trained(s):
        aval = context.sum_aval(s, t)
        is_vector = len(context.aval(t).shape) < 2 and context.specs.of_tensor(t) == P()
        if is_vector and t not in apart and 0 < aval.size * aval.dtype.itemsize <= _PACKED_BYTES:
            groups.setdefault((aval.dtype, t in built.input_part), []).append(t)
    packs: dict[TensorNumber, Pack] = {}
    for (dtype, _), tensors in groups.items():
        if len(tensors) > 1:
            sizes = tuple(context.aval(t).size for t in tensors)
            aval = jax.ShapeDtypeStruct((*context.lead(s), sum(sizes)), dtype)
            packs |= dict.fromkeys(tensors, Pack(Name(Role.GRADIENT, tensors[0], -1), aval, tuple(tensors), sizes))
    return packs


def stage_work(context: Context, s: StageNumber, kinds: Sequence[Kind]) -> Work:
    """Return what a stage does with a micro-batch, several kinds of work in one, in their order.

    What one kind makes for the next, and nobody else reads, is not among the results.
    """
    writes = _results(context, s, kinds)

    def function(values: Arrays) -> Arrays:
        arrays = dict(values)
        for kind in kinds:
            if kind is Kind.FORWARD:
                _forward(context, s, arrays)
            else:
                _backward(context, s, kind, arrays)
        return {name: arrays[name] for name in writes}

    label = f"stage {s}: " + " and ".join(_LABELS[kind] for kind in kinds)
    return Work(label, _operands(context, s), function)


_LABELS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, inputs",
    Kind.BACKWARD_WEIGHT: "backward, weights",
}


def _operands(context: Context, s: StageNumber) -> Avals:
    """Return all that the work on a micro-batch may read, with its shape."""
    stage = context.stages[s]
    operands: Avals = {Name(Role.PARAMETER, t): context.aval(t) for t in (*stage.parameters, *stage.borrowed)}
    operands |= {KEY: jax.eval_shape(jax.random.key_data, context.key), STEP: jax.ShapeDtypeStruct((), jnp.int32)}
    operands |= {Name(Role.BATCH, k): context.batch[k] for k in _leaves_used(context, stage)}
    operands[INDEX] = jax.ShapeDtypeStruct((2,), jnp.int32)
    operands |= {Name(Role.STATE, t): context.aval(t) for t in stage.state}
    operands |= {Name(Role.ACTIVATION, t): context.aval(t) for t in stage.arriving}
    operands |= {name: context.total_aval(name) for name in context.totals(s)}
    for avals in stash_avals(stage).values() if stage.vjp is not None else ():
        operands |= avals
    operands |= {Name(Role.COTANGENT, t): _tangent(context, t) for t in _following(context, s)}
    operands |= {Name(Role.SAVED, t): _tangent(context, t) for t in stage.saved}
    # The gradients of a single micro-batch are the sums.
    return operands | (context.sums(s, context.trained(s)) if context.num_microbatches > 1 else {})


def _results(context: Context, s: StageNumber, kinds: Sequence[Kind]) -> list[Name]:
    stage = context.stages[s]
    writes: list[Name] = []
    if Kind.FORWARD in kinds:
        writes += [Name(Role.ACTIVATION, t) for t in stage.leaving]
        writes += [Name(Role.STATE, t) for t in stage.state]
        writes += context.totals(s)
        writes += [Name(Role.STATISTIC, t) for t in context.statistics(s)]
        if context.collects:
            writes += [Name(Role.RESULT, k) for k in stage.results]
        if context.trains and stage.vjp is not None and kinds[-1] in (Kind.FORWARD, Kind.BACKWARD_INPUT):
            stashed = (name for avals in stash_avals(stage).values() for name in avals)
            writes += [name for name in stashed if name not in writes]
    if Kind.BACKWARD in kinds or Kind.BACKWARD_INPUT in kinds:
        writes += [Name(Role.COTANGENT, t) for t in stage.returning]
        if Kind.BACKWARD not in kinds and Kind.BACKWARD_WEIGHT not in kinds:
            writes += [Name(Role.SAVED, t) for t in stage.saved]
    given = {t for kind in kinds for t in stage.differentiated(kind)}
    return [*writes, *context.sums(s, [t for t in context.trained(s) if t in given])]


def _leaves_used(context: Context, stage: Stage) -> list[int]:
    return [k for k, t in enumerate(context.objective.batch) if t in stage.used]


def _following(context: Context, s: StageNumber) -> tuple[TensorNumber, ...]:
    """The tensors whose cotangents the next stage sends."""
    return context.stages[s + 1].returning if s + 1 < len(context.stages) else ()


def _tangent(context: Context, t: TensorNumber) -> jax.ShapeDtypeStruct:
    return shape_of(cast(AbstractArray, context.objective.graph.tensors[t].aval.to_tangent_aval()))


def stash_avals(stage: Stage) -> dict[TensorNumber, Avals]:
    """Return the arrays of a stash by tensor. One that is kept as it is goes by its own name, whoever else reads it."""
    assert stage.vjp is not None
    plan, kept, stash = stage.vjp.plan, set(stage.stashed), {}
    for t, avals in zip(plan.stored, stage.vjp.stash_avals, strict=True):
        names = [Name(Role.STASH, t, part) for part in range(len(avals))]
        if plan.formats[t] == KEEP:
            names = [Name(Role.ACTIVATION, t)]
        if t in kept:
            stash[t] = dict(zip(names, avals, strict=True))
    return stash


def _available(context: Context, stage: Stage, arrays: Arrays) -> dict[TensorNumber, Array]:
    """Parameters, the micro-batch and its key, by tensor number."""
    objective = context.objective
    known = {t: arrays[Name(Role.PARAMETER, t)] for t in (*stage.parameters, *stage.borrowed)}
    if objective.key in stage.used:
        key = jax.random.wrap_key_data(arrays[KEY], impl=jax.random.key_impl(jnp.empty((), context.key.dtype)))
        known[objective.key] = jax.random.fold_in(jax.random.fold_in(key, arrays[STEP]), arrays[INDEX][1])
    if objective.index is not None and objective.index in stage.used:
        known[objective.index] = arrays[INDEX][1]
    for k in _leaves_used(context, stage):
        leaf = arrays[Name(Role.BATCH, k)]
        if not context.shared[k]:
            leaf = _rows(leaf, arrays[INDEX][0], context.num_microbatches, objective.joined)
            spec = context.specs.of_tensor(objective.batch[k])
            if spec != P():  # each device of a member holds the whole batch, and works on its own examples
                leaf = lax.with_sharding_constraint(leaf, NamedSharding(context.specs.submesh.abstract(), spec))
        known[objective.batch[k]] = leaf
    return known


def _rows(leaf: Array, j: Array, num_microbatches: int, replicas: int) -> Array:
    """The rows of micro-batch ``j``, which is of so many replicas."""
    if replicas > 1:
        leaf = leaf.reshape(replicas, -1, *leaf.shape[1:])
    axis = int(replicas > 1)
    rows = leaf.shape[axis] // num_microbatches
    leaf = lax.dynamic_slice_in_dim(leaf, j * rows, rows, axis)
    return leaf.reshape(-1, *leaf.shape[2:]) if replicas > 1 else leaf


def _forward(context: Context, s: StageNumber, arrays: Arrays) -> None:
    stage = context.stages[s]
    known = _available(context, stage, arrays)
    known |= {t: arrays[Name(Role.STATE, t)] for t in stage.state}
    known |= {t: arrays[Name(Role.ACTIVATION, t)] for t in stage.arriving}
    outputs, stash, overflows = stage_passes.forward(stage, known, context.trains)
    if OVERFLOWS in arrays:
        arrays[OVERFLOWS] = arrays[OVERFLOWS] + overflows
    for t, avals in stash_avals(stage).items() if stash else ():
        arrays.update(zip(avals, stash[t], strict=True))
    computed = known | outputs
    arrays.update((Name(Role.ACTIVATION, t), computed[t]) for t in stage.leaving)
    arrays.update((Name(Role.STATE, t), computed[new]) for t, new in zip(stage.state, stage.new_state, strict=True))
    arrays.update((Name(Role.STATISTIC, t), computed[t]) for t in context.statistics(s))
    for k in stage.results:
        value, total = computed[context.objective.results[k]], Name(Role.TOTAL, k)
        arrays[Name(Role.RESULT, k)] = value
        if total in arrays:
            arrays[total] = arrays[total] + value


def _backward(context: Context, s: StageNumber, kind: Kind, arrays: Arrays) -> None:
    """Go backward through a stage, or the part of it that a kind is."""
    stage = context.stages[s]
    known, sums = _available(context, stage, arrays), _adding_to_sums(context, s, arrays)
    stash = {t: tuple(arrays[name] for name in avals) for t, avals in stash_avals(stage).items()}
    if kind is Kind.BACKWARD_WEIGHT:
        received = {t: arrays[Name(Role.SAVED, t)] for t in stage.saved}
    else:
        received = {t: arrays[Name(Role.COTANGENT, t)] for t in _following(context, s)}
    gradients, saved = stage_passes.backward(context.objective, stage, kind, known, stash, received, sums)
    if kind is Kind.BACKWARD_INPUT:
        arrays.update((Name(Role.SAVED, t), saved[t]) for t in stage.saved)
    _hand_out(context, s, arrays, gradients)


def _adding_to_sums(context: Context, s: StageNumber, arrays: Arrays) -> dict[TensorNumber, Callable[[Array], Array]]:
    """Return what becomes of the gradients that have a sum by themselves: it is added to, as soon as they are there."""
    tensors = [t for t in context.trained(s) if t not in context.packs[s] and t not in context.stages[s].returning]
    sums = {t: arrays[Name(Role.GRADIENT, t)] for t in tensors if Name(Role.GRADIENT, t) in arrays}
    overwritten = context.objective.overwritten
    add = {t: larger_gradient if t in overwritten else add_gradient for t in tensors}
    return {t: functools.partial(_add_shaped, add[t], total) for t, total in sums.items()}


def _add_shaped(add: Callable[[Array, Array], Array], total: Array, gradient: Array) -> Array:
    return add(total, gradient.reshape(total.shape))


def _hand_out(context: Context, s: StageNumber, arrays: Arrays, gradients: Mapping[TensorNumber, Array]) -> None:
    """Name sums of gradients, to which these have been added if there is any, and the cotangents that go back."""
    stage = context.stages[s]
    arrays.update((Name(Role.COTANGENT, t), gradients[t]) for t in stage.returning if t in gradients)
    packs = context.packs[s]
    for t in context.trained(s):
        if t in gradients and t not in packs:
            aval, name = context.sum_aval(s, t), Name(Role.GRADIENT, t)
            arrays[name] = gradients[t] if name in arrays else widened(gradients[t], aval.dtype).reshape(aval.shape)
    for pack in {pack.name: pack for t, pack in packs.items() if t in gradients}.values():
        zeros = (jnp.zeros(size, pack.aval.dtype) for size in pack.sizes)
        parts = [
            widened(gradients[t], pack.aval.dtype).reshape(-1) if t in gradients else zero
            for t, zero in zip(pack.tensors, zeros, strict=True)
        ]
        packed = jnp.concatenate(parts).reshape(pack.aval.shape)
        arrays[pack.name] = arrays[pack.name] + packed if pack.name in arrays else packed
