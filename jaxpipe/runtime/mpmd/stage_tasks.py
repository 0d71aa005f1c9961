"""The work of a stage on one micro-batch, as functions over arrays by group.

    forward:          parameters, state, batch, arriving, totals                 -> leaving, stash, state, totals
    backward:         parameters, batch, stash, cotangents, sums of gradients    -> returning, sums
    backward input:   the same                                                   -> returning, sums, saved
    backward weight:  parameters, batch, stash, saved, sums                      -> sums

Work may be several of these one after the other: the last stage goes forward and backward in one program, so that its
stash never leaves it. Gradients and totals are added up inside. What nobody reads is not made (``remove_unread``).
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import Array, DType, Shaped, TensorNumber
from jaxpipe.gradients.squared_norm import norm_dtype
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.residuals.codecs.keep import KEEP
from jaxpipe.runtime.gradient_precision import add_gradient, larger_gradient, sum_dtype, widened
from jaxpipe.runtime.mpmd.step_graph import Form, Path
from jaxpipe.runtime.mpmd.trace_task import OF_MICROBATCH, Arrays, TaskWork
from jaxpipe.runtime.stage_passes import stage_backward, stage_forward
from jaxpipe.runtime.stages import Stage
from jaxpipe.schedules.joined_work import Kinds
from jaxpipe.schedules.table import Kind, StageNumber
from jaxpipe.sharding.partition_specs import Specs
from jaxpipe.sharding.submesh import axis_names


def shape_of(x: Shaped) -> jax.ShapeDtypeStruct:
    """Return the shape and the element type of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


#: By group of arrays, the component of memory that they are counted in; ``"state"`` for the others.
_PURPOSE = {
    "parameters": "parameters",
    "optimizer": "optimizer",
    "shared": "optimizer",
    "residual": "residual",
    "batch": "batch",
    **dict.fromkeys(("sums", "packs", "mean"), "gradients"),
    **dict.fromkeys(("stash", "saved"), "stash"),
    **dict.fromkeys(("leaving", "returning", "results", "exchanged", "averages", "messages"), "messages"),
}

#: Groups of arrays that are split as their tensors are.
_OF_TENSORS = {"parameters", "state", "sums", "mean", "leaving", "returning", "saved"}


@dataclass(frozen=True, eq=False)
class Pack:
    """Small sums of gradients side by side in one array: a call takes 0.7 us for each array that it writes over."""

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

    def form(self, s: StageNumber, path: Path) -> Form:
        """Return the purpose of an array in a stage's trees, and its sharding within a member of the stage."""
        group, t = path[0], path[1] if len(path) > 1 else 0
        purpose = _PURPOSE.get(str(group), "state")
        if group == "optimizer":
            return Form(purpose, self.specs.of_leaf(cast(int, t)))
        if group not in _OF_TENSORS and group != "stash":
            return Form(purpose)
        tensor = TensorNumber(cast(int, t))
        spec, lead = self.specs.of_tensor(tensor), self.lead(s) if group == "sums" else ()
        if group == "stash" and not self._is_kept(s, tensor):  # of other dimensions than its tensor, in as many parts
            axes = tuple(axis for axes in spec for axis in axis_names(axes))
            return Form(purpose, P(axes) if axes else P(), self.specs.submesh.size > 1, tensor)
        stays = group == "saved" or (group in ("leaving", "stash") and tensor not in self._sent)
        is_of_microbatch = group in OF_MICROBATCH
        is_free = stays and self.specs.submesh.size > 1
        return Form(purpose, P(*(None for _ in lead), *spec), is_free, tensor if is_of_microbatch else None)

    def _is_kept(self, s: StageNumber, t: TensorNumber) -> bool:
        """Return whether a tensor of a stash is kept as it is."""
        vjp = self.stages[s].vjp
        return vjp is not None and vjp.plan.formats[t] == KEEP

    @functools.cached_property
    def _sent(self) -> frozenset[TensorNumber]:
        return frozenset(t for stage in self.stages for t in (*stage.arriving, *stage.leaving))

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

    def sums(self, s: StageNumber, tensors: Iterable[TensorNumber]) -> Arrays:
        """The arrays that hold the sums of some parameters' gradients in a stage, as shapes."""
        sums, packs, of_stage = {}, {}, self.packs[s]
        for t in tensors:
            if t in of_stage:
                packs[of_stage[t].tensors[0]] = of_stage[t].aval
            else:
                sums[t] = self.sum_aval(s, t)
        return {"sums": sums, "packs": packs}

    def totals(self, s: StageNumber) -> Arrays:
        """The totals that a stage adds up, and the count of sparse tensors that did not fit, as shapes."""
        stage = self.stages[s]
        results = () if self.collects else stage.results
        totals: Arrays = {"totals": {k: self.aval(self.objective.results[k]) for k in results}}
        uncertain = self.trains and stage.vjp is not None and stage.vjp.plan.uncertain
        return totals | ({"overflows": jax.ShapeDtypeStruct((), jnp.int32)} if uncertain else {})

    @property
    def weight_dtype(self) -> DType:
        """The type of the sum of the weights of all micro-batches."""
        return self.aval(self.objective.results[1]).dtype

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
            packs |= dict.fromkeys(tensors, Pack(aval, tuple(tensors), sizes))
    return packs


def stage_work(context: Context, s: StageNumber, kinds: Kinds) -> TaskWork:
    """Return the work of a stage on a micro-batch, several kinds in one, in their order."""

    def function(arrays: Arrays) -> Arrays:
        results: Arrays = {}
        for kind in kinds:
            if kind is Kind.FORWARD:
                results |= _forward(context, s, arrays)
            else:
                results |= _backward(context, s, kind, arrays | results)
        return results

    label = f"stage {s}: " + " and ".join(_LABELS[kind] for kind in kinds)
    return TaskWork(label, function, functools.partial(context.form, s))


_LABELS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, inputs",
    Kind.BACKWARD_WEIGHT: "backward, weights",
}


def leaves_used(context: Context, stage: Stage) -> list[int]:
    """Return which leaves of the batch a stage reads."""
    return [k for k, t in enumerate(context.objective.batch) if t in stage.used]


def _available(context: Context, stage: Stage, arrays: Arrays) -> dict[TensorNumber, Array]:
    """Parameters, the micro-batch and its key, by tensor number."""
    objective, known = context.objective, dict(arrays["parameters"])
    if objective.key in stage.used:
        key = jax.random.wrap_key_data(arrays["key"], impl=jax.random.key_impl(jnp.empty((), context.key.dtype)))
        known[objective.key] = jax.random.fold_in(jax.random.fold_in(key, arrays["step"]), arrays["index"][1])
    if objective.index is not None and objective.index in stage.used:
        known[objective.index] = arrays["index"][1]
    for k in leaves_used(context, stage):
        leaf = arrays["batch"][k]
        if not context.shared[k]:
            leaf = _rows(leaf, arrays["index"][0], context.num_microbatches, objective.joined)
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


def _forward(context: Context, s: StageNumber, arrays: Arrays) -> Arrays:
    stage = context.stages[s]
    known = _available(context, stage, arrays) | arrays["state"] | arrays["arriving"]
    outputs, stash, overflows = stage_forward(stage, known, context.trains)
    computed = known | outputs
    values = {k: computed[context.objective.results[k]] for k in stage.results}
    results: Arrays = {
        "leaving": {t: computed[t] for t in stage.leaving},
        "state": {t: computed[new] for t, new in zip(stage.state, stage.new_state, strict=True)},
        "totals": {k: total + values[k] for k, total in arrays["totals"].items()},
        "statistics": {t: computed[t] for t in context.statistics(s)},
        "stash": stash,
    }
    if context.collects:
        results["results"] = values
    return results | ({"overflows": arrays["overflows"] + overflows} if "overflows" in arrays else {})


def _backward(context: Context, s: StageNumber, kind: Kind, arrays: Arrays) -> Arrays:
    """Go backward through a stage, or the part of it that a kind is."""
    stage = context.stages[s]
    known, sums = _available(context, stage, arrays), _adding_to_sums(context, s, arrays)
    received = arrays["saved" if kind is Kind.BACKWARD_WEIGHT else "cotangents"]
    gradients, saved = stage_backward(context.objective, stage, kind, known, arrays["stash"], received, sums)
    results = _hand_out(context, s, arrays, gradients)
    return results | ({"saved": {t: saved[t] for t in stage.saved}} if kind is Kind.BACKWARD_INPUT else {})


def _adding_to_sums(context: Context, s: StageNumber, arrays: Arrays) -> dict[TensorNumber, Callable[[Array], Array]]:
    """Return the additions to sums of single gradients, each made as soon as its gradient is there."""
    returning, overwritten = context.stages[s].returning, context.objective.overwritten
    return {
        t: functools.partial(_add_shaped, larger_gradient if t in overwritten else add_gradient, total)
        for t, total in arrays["sums"].items()
        if t not in returning
    }


def _add_shaped(add: Callable[[Array, Array], Array], total: Array, gradient: Array) -> Array:
    return add(total, gradient.reshape(total.shape))


def _hand_out(context: Context, s: StageNumber, arrays: Arrays, gradients: Mapping[TensorNumber, Array]) -> Arrays:
    """Return sums of gradients, to which these have been added if there is any, and the cotangents that go back."""
    packs = context.packs[s]
    results: Arrays = {"returning": {t: gradients[t] for t in context.stages[s].returning if t in gradients}}
    sums, packed = {}, {}
    for t in context.trained(s):
        if t in gradients and t not in packs:
            aval = context.sum_aval(s, t)
            is_sum = t in arrays["sums"]
            sums[t] = gradients[t] if is_sum else widened(gradients[t], aval.dtype).reshape(aval.shape)
    for pack in {pack.tensors[0]: pack for t, pack in packs.items() if t in gradients}.values():
        zeros = (jnp.zeros(size, pack.aval.dtype) for size in pack.sizes)
        parts = [
            widened(gradients[t], pack.aval.dtype).reshape(-1) if t in gradients else zero
            for t, zero in zip(pack.tensors, zeros, strict=True)
        ]
        number, array = pack.tensors[0], jnp.concatenate(parts).reshape(pack.aval.shape)
        packed[number] = arrays["packs"][number] + array if number in arrays["packs"] else array
    return results | {"sums": sums, "packs": packed}


def zeros_work(context: Context, s: StageNumber, what: str, avals: Arrays) -> TaskWork:
    """Return the work that makes zeros, and what is below all gradients of parameters that become their gradient."""
    low = context.objective.overwritten

    def function(_: Arrays) -> Arrays:
        zeros = jax.tree.map(lambda aval: jnp.zeros(aval.shape, aval.dtype), avals)
        sums = avals.get("sums", {})
        lowest = {t: jnp.full(aval.shape, -jnp.inf, aval.dtype) for t, aval in sums.items() if t in low}
        return zeros | ({"sums": zeros["sums"] | lowest} if lowest else {})

    return TaskWork(f"stage {s}: {what}", function, functools.partial(context.form, s))
