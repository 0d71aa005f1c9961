"""The values that a step or a forward pass returns: loss, metrics, counters, predictions, on one device."""

import functools
import operator
from collections.abc import Sequence

import jax.numpy as jnp

from jaxpipe.array_types import Array
from jaxpipe.gradients.block_exchange import sent_share
from jaxpipe.models.combine_metrics import combine
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.runtime.mpmd.step_graph import Arrays


def total_weight(arrays: Arrays) -> Arrays:
    """Add up the weights of the batch's micro-batches in all members of their stage."""
    return {"weight": _add_up(arrays["totals"])}


def batch_results(objective: MicrobatchProgram, arrays: Arrays) -> Arrays:
    """Make a batch's loss and metrics of the totals of all members of their stages.

    Under a guard, where stages say whether a gradient of theirs is not finite, say whether the step is stopped.
    """
    loss, weight, *metrics = map(_add_up, arrays["totals"])
    mean = loss / weight.astype(loss.dtype)
    results: Arrays = {"loss": mean, "metrics": combine(metrics, weight, objective.summed)}
    if "nonfinite" in arrays:
        stages = jnp.stack([flag > 0 for flag in arrays["nonfinite"]])
        results |= {"nonfinite_stages": stages, "stopped": jnp.any(stages) | ~jnp.isfinite(mean)}
    return results


def step_counters(updates: int, arrays: Arrays) -> Arrays:
    """Make a step's counters of what all stages report, in the order of the stages.

    The norm of the gradient is the root of the mean square over the updates. What stands in the state is copied, as
    the next step takes the state's memory, and not that of the metrics.
    """
    counters: Arrays = {"gradient_norm": jnp.sqrt(_add_up(arrays["squares"]) / updates)}
    if arrays["had"]:
        had, unsent = _add_up(arrays["had"]), _add_up(arrays["unsent"])
        counters |= {"sent_share": sent_share(had, unsent), "residual_norm": jnp.sqrt(unsent)}
    counters["overflows"] = sum(arrays["overflows"], start=jnp.int32(0))
    return {"counters": counters | arrays["copied"]}


def stacked_predictions(replicas: int, arrays: Arrays) -> Arrays:
    """Put the predictions of a replica's micro-batches together, each of so many joined replicas."""
    return {"predictions": [_in_order(rows, replicas) for rows in arrays["results"]]}


def _in_order(rows: Sequence[Array], replicas: int) -> Array:
    """The rows of micro-batches, each of so many replicas, in the order of the batch."""
    if replicas == 1:
        return jnp.concatenate(rows)
    whole = jnp.concatenate([x.reshape(replicas, -1, *x.shape[1:]) for x in rows], axis=1)
    return whole.reshape(-1, *whole.shape[2:])


def _add_up(values: Sequence[Array]) -> Array:
    return functools.reduce(operator.add, values)
