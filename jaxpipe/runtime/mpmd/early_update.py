"""Updates during a step: a stage renews its weights as soon as it has the gradient of a group of micro-batches.

    last backward pass of a group: sums of gradients ──replicas──▶ mean ──▶ newest weights, newest optimizer state
    end of the step:               running statistics, counters; under a guard, the weights from before if it is stopped

Schedules say which version of the weights a micro-batch uses (``jaxpipe.schedules.asynchronous``); the list holds a
reference to each version until the last backward pass that reads it.
"""

import jax.numpy as jnp

from jaxpipe.array_types import Array
from jaxpipe.runtime.mpmd.stage_work import Arrays, Avals, Context, Role, Work, shape_of
from jaxpipe.runtime.mpmd.update_work import (
    NONFINITE,
    SQUARES,
    STOPPED,
    WEIGHT,
    UpdateContext,
    choose_value,
    end_operands,
    newest,
    older,
    optimizer_operands,
    renew,
    renewed_names,
    results_at_end,
    scalars,
)
from jaxpipe.schedules.table import StageNumber


def early_update_work(context: UpdateContext, s: StageNumber, group: int) -> Work:
    """Return the update of a stage by the mean gradient of a group of micro-batches; adds up its squared norm."""
    names = renewed_names(context, s)

    def function(values: Arrays) -> list[Array]:
        values = values | {WEIGHT: jnp.float32(group * context.replicas)}
        results, squares = renew(context, s, values, names)
        return [*results, values[SQUARES] + squares]

    operands = optimizer_operands(context, s, 0) | scalars(context.pipeline, SQUARES)
    return Work(f"stage {s}: early update", operands, [*names.values(), SQUARES], function)


def nonfinite_work(context: Context, s: StageNumber) -> Work:
    """Return whether any gradient of a stage was not finite: the sum of their squares is not, either."""

    def function(values: Arrays) -> list[Array]:
        return [(~jnp.isfinite(values[SQUARES])).astype(jnp.int32)]

    return Work(f"stage {s}: look for what is not finite", scalars(context, SQUARES), [NONFINITE], function)


def end_work(context: UpdateContext, s: StageNumber, counts: bool) -> Work:
    """Return the end of a stage's step after its updates: state of all replicas, numbers of steps if it counts.

    Under a guard it also writes parameters and optimizer state, those from before the step if it is stopped.
    """
    operands: Avals = {}
    renewed = renewed_names(context, s) if context.guarded else {}
    for t, name in renewed.items():
        is_parameter, tensors = name.role is Role.PARAMETER, context.by_stage.graph.tensors
        aval = context.pipeline.aval(name.tensor) if is_parameter else shape_of(tensors[t])
        operands |= {name: aval, older(name): aval}
    ends = end_operands(context, s, counts)

    def function(values: Arrays) -> list[Array]:
        results = [choose_value(values, values[older(name)], values[name]) for name in renewed.values()]
        return [*results, *results_at_end(context, s, counts, values)]

    operands |= (scalars(context.pipeline, STOPPED) if context.guarded else {}) | ends
    return Work(f"stage {s}: end of the step", operands, [*renewed.values(), *newest(ends)], function)
