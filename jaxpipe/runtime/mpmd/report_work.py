"""The values that a step or a forward pass returns: loss, metrics, counters, predictions, on one device."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxpipe.gradients.block_exchange import sent_share
from jaxpipe.models.combine_metrics import combine
from jaxpipe.runtime.mpmd.stage_work import OVERFLOWS, Context, Name, Role, Work
from jaxpipe.runtime.mpmd.update_work import (
    HAD,
    NONFINITE,
    SQUARES,
    STOPPED,
    UNSENT,
    WEIGHT,
    Operands,
    named_work,
    reported,
)


def weight_work(members: int) -> Work:
    """Return the work that adds up the weights of the batch's micro-batches in all members of their stage."""
    operands = Operands()
    names = [Name(Role.TOTAL, 1, r) for r in range(members)]
    for name in names:
        operands.add(name, (), jnp.float32)

    def function(values: dict[Name, Any]) -> list[Any]:
        return [functools.reduce(operator.add, [values[name] for name in names])]

    return named_work("the total weight", operands, [WEIGHT], function)


def results_work(context: Context, members: Sequence[int], stages: int, guarded: bool) -> Work:
    """Return the work that makes a batch's loss and metrics of the totals of all members of their stages.

    Args:
      members: by result, those of its stage.
      stages: how many of them say whether their gradients are finite, if a step is guarded.
      guarded: whether they do.
    """
    objective, operands = context.objective, Operands()
    for k, t in enumerate(objective.results):
        for r in range(members[k]):
            aval = context.aval(t)
            operands.add(Name(Role.TOTAL, k, r), aval.shape, aval.dtype)
    if guarded:
        for s in range(stages):
            operands.add(reported(NONFINITE, s), (), jnp.int32)

    def function(values: dict[Name, Any]) -> list[Any]:
        totals = [
            functools.reduce(operator.add, [values[Name(Role.TOTAL, k, r)] for r in range(members[k])])
            for k in range(len(objective.results))
        ]
        loss, weight, *metrics = totals
        mean = loss / weight.astype(loss.dtype)
        results = [mean, *combine(metrics, weight, objective.summed)]
        if guarded:
            flags = jnp.stack([values[reported(NONFINITE, s)] > 0 for s in range(stages)])
            results += [flags, jnp.any(flags) | ~jnp.isfinite(mean)]
        return results

    reports = [Name(Role.REPORT, k) for k in range(len(objective.results) - 1)]
    writes = [*reports, *([NONFINITE, STOPPED] if guarded else [])]
    return named_work("loss and metrics", operands, writes, function)


#: What a step counts, in this order.
COUNTERS = ("gradient_norm", "sent_share", "residual_norm", "overflows")


def counters_work(stages: int, exchanges: bool, sparse: int, updates: int = 1) -> Work:
    """Return the work that makes a step's counters of what all stages report, in the order of the stages.

    Args:
      stages: how many there are.
      exchanges: whether replicas exchange gradients block-sparsely.
      sparse: how many replicas of stages count overflows.
      updates: of a step; the norm of the gradient is the root of the mean square over them.
    """
    operands = Operands()
    kinds = [SQUARES, *([HAD, UNSENT] if exchanges else [])]
    for name in kinds:
        for s in range(stages):
            operands.add(reported(name, s), (), jnp.float32)
    for place in range(sparse):
        operands.add(reported(OVERFLOWS, place), (), jnp.int32)

    def function(values: dict[Name, Any]) -> list[Any]:
        sums = [functools.reduce(operator.add, [values[reported(n, s)] for s in range(stages)]) for n in kinds]
        counters = [jnp.sqrt(sums[0] / updates)]
        if exchanges:
            counters += [sent_share(sums[1], sums[2]), jnp.sqrt(sums[2])]
        missed = [values[reported(OVERFLOWS, place)] for place in range(sparse)]
        return [*counters, sum(missed, start=jnp.int32(0))]

    names = [0, 1, 2, 3] if exchanges else [0, 3]
    return named_work("counters", operands, [Name(Role.REPORT, -1 - k) for k in names], function)


def stack_work(context: Context) -> Work:
    """Return the work that puts the predictions of a replica's micro-batches together."""
    objective, operands = context.objective, Operands()
    m = context.num_microbatches
    for k, t in enumerate(objective.results):
        for j in range(m):
            operands.add(Name(Role.RESULT, k, j), context.aval(t).shape, context.aval(t).dtype)

    def function(values: dict[Name, Any]) -> list[Any]:
        return [
            jnp.concatenate([values[Name(Role.RESULT, k, j)] for j in range(m)]) for k in range(len(objective.results))
        ]

    return named_work("predictions", operands, [Name(Role.REPORT, k) for k in range(len(objective.results))], function)
