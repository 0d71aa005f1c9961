"""The values that a step or a forward pass returns: loss, metrics, counters, predictions, on one device."""

import itertools
from collections.abc import Sequence

import jax.numpy as jnp

from jaxpipe.array_types import Array
from jaxpipe.gradients.block_exchange import sent_share
from jaxpipe.models.combine_metrics import combine
from jaxpipe.runtime.mpmd.stage_work import OVERFLOWS, Arrays, Context, Name, Role, Work, shape_of
from jaxpipe.runtime.mpmd.update_work import (
    HAD,
    NONFINITE,
    SKIPPED,
    SQUARES,
    STOPPED,
    UNSENT,
    WEIGHT,
    UpdateContext,
    add_up,
    reported,
    value_avals,
)


def weight_work(context: Context, members: int) -> Work:
    """Return the work that adds up the weights of the batch's micro-batches in all members of their stage."""
    names = [Name(Role.TOTAL, 1, r) for r in range(members)]
    return Work("the total weight", value_avals(context, names), lambda x: {WEIGHT: add_up(x, names)})


def results_work(context: Context, members: Sequence[int], stages: int, guarded: bool) -> Work:
    """Return the work that makes a batch's loss and metrics of the totals of all members of their stages."""
    objective = context.objective
    totals = [[Name(Role.TOTAL, k, r) for r in range(count)] for k, count in enumerate(members)]
    flags = [reported(NONFINITE, s) for s in range(stages)] if guarded else []
    operands = value_avals(context, itertools.chain(*totals, flags))

    def function(values: Arrays) -> Arrays:
        loss, weight, *metrics = [add_up(values, names) for names in totals]
        mean = loss / weight.astype(loss.dtype)
        reports = [mean, *combine(metrics, weight, objective.summed)]
        results = {Name(Role.REPORT, k): x for k, x in enumerate(reports)}
        if guarded:
            stopped = jnp.stack([values[name] > 0 for name in flags])
            results |= {NONFINITE: stopped, STOPPED: jnp.any(stopped) | ~jnp.isfinite(mean)}
        return results

    return Work("loss and metrics", operands, function)


#: What a step counts, in this order.
COUNTERS = ("gradient_norm", "sent_share", "residual_norm", "overflows", "learning_rate", "skipped")


def counters_work(update: UpdateContext, sparse: int, updates: int = 1) -> Work:
    """Return the work that makes a step's counters of what all stages report, in the order of the stages.

    The norm of the gradient is the root of the mean square over the updates. What stands in the state is copied, as
    the next step takes the state's memory, and not that of the metrics.
    """
    context, exchanges = update.pipeline, update.exchange is not None
    stages, copied = len(context.stages), copied_counters(update)
    kinds = [SQUARES, *([HAD, UNSENT] if exchanges else [])]
    names = [[reported(kind, s) for s in range(stages)] for kind in kinds]
    overflows = [reported(OVERFLOWS, place) for place in range(sparse)]
    operands = value_avals(context, itertools.chain(*names, overflows))

    def function(values: Arrays) -> Arrays:
        sums = [add_up(values, row) for row in names]
        counters = {0: jnp.sqrt(sums[0] / updates)}
        if exchanges:
            counters |= {1: sent_share(sums[1], sums[2]), 2: jnp.sqrt(sums[2])}
        counters[3] = sum((values[name] for name in overflows), start=jnp.int32(0))
        counters |= {k: values[name] for k, name in copied.items()}
        return {Name(Role.REPORT, -1 - k): x for k, x in counters.items()}

    state, tensors = update.by_stage.state, update.by_stage.graph.tensors
    for name in copied.values():
        is_shared = name.role is Role.SHARED
        operands |= {name: shape_of(tensors[state[name.number]])} if is_shared else value_avals(context, [name])
    return Work("counters", operands, function)


def copied_counters(update: UpdateContext) -> dict[int, Name]:
    """Return the counters that stand in the state, by number in ``COUNTERS``."""
    rate = update.by_stage.learning_rate
    copied = {} if rate is None else {4: Name(Role.SHARED, rate)}
    return copied | ({5: SKIPPED} if update.skips else {})


def stack_work(context: Context) -> Work:
    """Return the work that puts the predictions of a replica's micro-batches together."""
    results, m = context.objective.results, context.num_microbatches
    names = [[Name(Role.RESULT, k, j) for j in range(m)] for k in range(len(results))]
    operands = {name: context.aval(results[name.number]) for row in names for name in row}

    def function(values: Arrays) -> Arrays:
        rows = ([values[name] for name in row] for row in names)
        return {Name(Role.REPORT, k): _in_order(row, context.objective.joined) for k, row in enumerate(rows)}

    return Work("predictions", operands, function)


def _in_order(rows: Sequence[Array], replicas: int) -> Array:
    """The rows of micro-batches, each of so many replicas, in the order of the batch."""
    if replicas == 1:
        return jnp.concatenate(rows)
    whole = jnp.concatenate([x.reshape(replicas, -1, *x.shape[1:]) for x in rows], axis=1)
    return whole.reshape(-1, *whole.shape[2:])
