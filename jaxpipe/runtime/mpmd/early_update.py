"""Updates during a step: a stage renews its weights as soon as it has the gradient of a group of micro-batches.

    last backward pass of a group: sums of gradients ──replicas──▶ mean ──▶ newest weights, newest optimizer state
    end of the step:               running statistics, counters; under a guard, the weights from before if it is stopped

Schedules say which version of the weights a micro-batch uses (``jaxpipe.schedules.asynchronous``); the list holds a
reference to each version until the last backward pass that reads it.
"""

from typing import Any

import jax.numpy as jnp

from jaxpipe.runtime.mpmd.stage_work import Name, Role, Work
from jaxpipe.runtime.mpmd.update_work import (
    NONFINITE,
    SQUARES,
    STOPPED,
    WEIGHT,
    Operands,
    UpdateContext,
    end_operands,
    named_work,
    optimizer_operands,
    renew,
    renewed_names,
)


def early_update_work(context: UpdateContext, s: int, group: int) -> Work:
    """Return the update of a stage by the gradient of a group of micro-batches; adds up its squared norm.

    Args:
      group: micro-batches of a replica that the gradient is the mean of.
    """
    operands = optimizer_operands(context, s, 0)
    operands.add(SQUARES, (), jnp.float32)
    names = renewed_names(context, s)

    def function(values: dict[Name, Any]) -> list[Any]:
        values = values | {WEIGHT: jnp.float32(group * context.replicas)}
        results, squares = renew(context, s, values, names, lambda _, after: after)
        return [*results, values[SQUARES] + squares]

    return named_work(f"stage {s}: early update", operands, [*names.values(), SQUARES], function)


def nonfinite_work(s: int) -> Work:
    """Return whether any gradient of a stage was not finite: the sum of their squares is not, either."""
    operands = Operands()
    operands.add(SQUARES, (), jnp.float32)

    def function(values: dict[Name, Any]) -> list[Any]:
        return [(~jnp.isfinite(values[SQUARES])).astype(jnp.int32)]

    return named_work(f"stage {s}: look for what is not finite", operands, [NONFINITE], function)


def older(name: Name) -> Name:
    """Return the name of an array as it was before the step."""
    return name._replace(part=1)


def end_work(context: UpdateContext, s: int, counts: bool) -> Work:
    """Return the end of a stage's step after its updates: state of all replicas, numbers of steps.

    Under a guard it also writes parameters and optimizer state, those from before the step if it is stopped.

    Args:
      counts: whether it writes the numbers of steps.
    """
    ends, results_at_end = end_operands(context, s, counts)
    operands, renewed = Operands(), list(renewed_names(context, s).items()) if context.guarded else []
    by_stage, pipeline = context.by_stage, context.pipeline
    for t, name in renewed:
        parameter = name.role is Role.PARAMETER
        aval = pipeline.aval(name.number) if parameter else by_stage.graph.tensors[t]
        operands.add(name, aval.shape, aval.dtype)
        operands.add(older(name), aval.shape, aval.dtype)
    if context.guarded:
        operands.add(STOPPED, (), jnp.bool_)

    def function(values: dict[Name, Any]) -> list[Any]:
        def choose_value(before: Any, after: Any) -> Any:
            return jnp.where(values[STOPPED], before, after) if context.guarded else after

        results = [choose_value(values[older(name)], values[name]) for _, name in renewed]
        return [*results, *results_at_end(values, choose_value)]

    writes = [*(name for _, name in renewed), *(name for name in ends if name.part == 0)]
    return named_work(f"stage {s}: end of the step", operands | ends, writes, function)
