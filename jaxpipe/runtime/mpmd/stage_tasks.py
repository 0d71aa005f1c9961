"""The work of a stage on one micro-batch, as functions over arrays by group.

    forward:          parameters, state, batch, arriving, totals                 -> leaving, stash, state, totals
    backward:         parameters, batch, stash, cotangents, sums of gradients    -> returning, sums
    backward input:   the same                                                   -> returning, sums, saved
    backward weight:  parameters, batch, stash, saved, sums                      -> sums

Work may be several of these one after the other: the last stage goes forward and backward in one program, so that its
stash never leaves it. Gradients and totals are added up inside. What nobody reads is not made (``remove_unread``).
"""

import functools
from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import Array, TensorNumber
from jaxpipe.graph.graph import ordered
from jaxpipe.runtime.gradient_precision import add_gradient, larger_gradient, widened
from jaxpipe.runtime.mpmd.stage_layout import StageLayout
from jaxpipe.runtime.mpmd.step_graph import Arrays
from jaxpipe.runtime.stage_passes import stage_backward, stage_forward
from jaxpipe.runtime.stages import Stage
from jaxpipe.runtime.uint32_words import typed
from jaxpipe.schedules.table import Kind, Kinds, StageNumber


def run_kinds(layout: StageLayout, s: StageNumber, kinds: Kinds, arrays: Arrays) -> Arrays:
    """Do the work of a stage on a micro-batch, several kinds in one, in their order."""
    results: Arrays = {}
    for kind in kinds:
        if kind is Kind.FORWARD:
            results |= _forward(layout, s, arrays)
        else:
            results |= _backward(layout, s, kind, arrays | results)
    return results


def leaves_used(layout: StageLayout, stage: Stage) -> list[int]:
    """Return which leaves of the batch a stage reads."""
    return [k for k, t in enumerate(layout.objective.batch) if t in stage.used]


def _available(layout: StageLayout, stage: Stage, arrays: Arrays) -> dict[TensorNumber, Array]:
    """Parameters, the micro-batch and its key, by tensor number."""
    objective, known = layout.objective, dict(arrays["parameters"])
    if objective.key in stage.used:
        key = typed(arrays["key"], layout.aval(objective.key).dtype)
        known[objective.key] = jax.random.fold_in(jax.random.fold_in(key, arrays["step"]), arrays["index"][1])
    if objective.index is not None and objective.index in stage.used:
        known[objective.index] = arrays["index"][1]
    for k in leaves_used(layout, stage):
        leaf = arrays["batch"][k]
        if not layout.planned.batching.shared[k]:
            leaf = _rows(leaf, arrays["index"][0], layout.num_microbatches, objective.model.joined)
            spec = layout.specs.of_tensor(objective.batch[k])
            if spec != P():  # each device of a member holds the whole batch, and works on its own examples
                leaf = lax.with_sharding_constraint(leaf, NamedSharding(layout.specs.submesh.abstract(), spec))
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


def _forward(layout: StageLayout, s: StageNumber, arrays: Arrays) -> Arrays:
    stage = layout.stage(s)
    known = _available(layout, stage, arrays) | arrays["state"] | arrays["arriving"]
    outputs, stash, overflows = stage_forward(stage, known, layout.schedule.has_backward)
    computed = known | outputs
    values = {k: computed[layout.objective.results[k]] for k in stage.results}
    results = {
        "leaving": {t: computed[t] for t in stage.leaving},
        "state": {t: computed[new] for t, new in zip(stage.state, stage.new_state, strict=True)},
        "totals": {k: total + values[k] for k, total in arrays["totals"].items()},
        "overflows": {k: count + overflows for k, count in arrays["overflows"].items()},
        "statistics": {} if stage.fold is None else {t: computed[t] for t in stage.fold.statistics},
        "stash": stash,
    }
    return results | ({"results": values} if layout.collects else {})


def _backward(layout: StageLayout, s: StageNumber, kind: Kind, arrays: Arrays) -> Arrays:
    """Go backward through a stage, or the part of it that a kind is."""
    stage, overwritten = layout.stage(s), layout.objective.overwritten
    known = _available(layout, stage, arrays)
    # Additions to sums of single gradients, each made as soon as its gradient is there.
    sums = {
        t: functools.partial(_add_shaped, larger_gradient if t in overwritten else add_gradient, total)
        for t, total in arrays["sums"].items()
        if t not in stage.returning and layout.sums[s][t].is_alone
    }
    received = arrays["saved" if kind is Kind.BACKWARD_WEIGHT else "cotangents"]
    gradients, saved = stage_backward(layout.objective, stage, kind, known, arrays["stash"], received, sums)
    results = _hand_out(layout, s, arrays, gradients)
    return results | ({"saved": {t: saved[t] for t in stage.saved}} if kind is Kind.BACKWARD_INPUT else {})


def _add_shaped(add: Callable[[Array, Array], Array], total: Array, gradient: Array) -> Array:
    return add(total, gradient.reshape(total.shape))


def _hand_out(layout: StageLayout, s: StageNumber, arrays: Arrays, gradients: Mapping[TensorNumber, Array]) -> Arrays:
    """Return sums of gradients, to which these have been added if there is any, and the cotangents that go back."""
    returning = {t: gradients[t] for t in layout.stage(s).returning if t in gradients}
    sums: dict[TensorNumber, Array] = {}
    for entry in ordered(layout.sums[s][t] for t in layout.trained(s) if t in gradients):
        number, total = entry.tensors[0], arrays["sums"].get(entry.tensors[0])
        if entry.is_alone and total is not None:
            sums[number] = gradients[number]  # which has been added to the sum already
            continue
        parts = [widened(gradients[t], entry.aval.dtype).reshape(-1) for t in entry.tensors]
        added = jnp.concatenate(parts).reshape(entry.aval.shape)
        sums[number] = added if total is None else total + added
    return {"returning": returning, "sums": sums}


def first_sums(avals: Arrays, low: Collection[TensorNumber]) -> Arrays:
    """Make zeros; of sums of parameters that become their gradient, what is below all gradients."""
    zeros = jax.tree.map(lambda aval: jnp.zeros(aval.shape, aval.dtype), avals)
    sums = avals.get("sums", {}).items()
    lowest = {t: jnp.full(aval.shape, -jnp.inf, aval.dtype) for t, aval in sums if t in low}
    return zeros | ({"sums": zeros["sums"] | lowest} if lowest else {})
