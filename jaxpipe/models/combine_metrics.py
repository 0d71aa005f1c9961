"""The metrics of a batch from those of its micro-batches: averages, or sums where ``Sum`` says so."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpipe.array_types import Array, PyTree, PyTreeDef
from jaxpipe.errors import PartitionError


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[])
@dataclass(frozen=True)
class Sum:
    """A metric that is added up over micro-batches and replicas; all others are averaged.

    ``loss`` and ``evaluate`` return it among their metrics; ``Pipeline.step``, ``value_and_grad`` and ``evaluate``
    give the total in its place. Integers stay integers, and are added in 32 bits at least.

    Attributes:
      value: an array, or a tree of arrays, of this micro-batch, such as a count of shape ``[]`` or counts by class of
        shape ``[classes]``.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxpipe import partition
      >>> model = jax.tree_util.Partial(lambda w, x: x @ w, jnp.ones((3, 1)))
      >>> def loss(model, x):
      ...     y = model(x)
      ...     return y.mean(), {"positive": Sum(jnp.sum(y > 0))}
      >>> mesh = jax.make_mesh((1,), ("stage",))
      >>> pipeline = partition(model, mesh, jnp.ones((8, 3)), loss=loss, optimizer=optax.sgd(0.5), num_microbatches=4)
      >>> _, metrics = pipeline.step(pipeline.init(jax.random.key(0)), jnp.ones((8, 3)))
      >>> int(metrics["positive"])
      8
    """

    value: PyTree


@dataclass(frozen=True)
class Metric:
    """One array among the metrics of a micro-batch, by its path in what the function returned: ``['accuracy']``."""

    name: str
    summed: bool
    value: Array


def flatten_metrics(metrics: PyTree, name: str, weighted: bool) -> tuple[list[Metric], PyTreeDef]:
    """Return the arrays among some metrics, as they are added up, and the structure of the result."""

    def is_sum(x: object) -> bool:
        return isinstance(x, Sum)

    plain = jax.tree.map(lambda x: x.value if is_sum(x) else x, metrics, is_leaf=is_sum)
    flags = jax.tree.map(lambda x: is_sum(x) and jax.tree.map(lambda _: True, x.value), metrics, is_leaf=is_sum)
    flat, tree = jax.tree_util.tree_flatten_with_path(plain)
    arrays = []
    for (path, value), summed in zip(flat, jax.tree.leaves(flags), strict=True):
        metric = Metric(jax.tree_util.keystr(path), summed, jnp.asarray(value))
        if not summed and not weighted and not _is_inexact(metric.value):
            raise PartitionError(
                f"{returned_metric(name, metric.name)} of dtype {metric.value.dtype}. Metrics are averaged over the "
                "micro-batches of a batch, and an average of counts is not their total. Return jaxpipe.Sum(value) to "
                "add them up, or a floating-point number, such as the mean over the examples, to average it."
            )
        inexact = metric.value if summed or _is_inexact(metric.value) else metric.value.astype(jnp.float32)
        arrays.append(Metric(metric.name, summed, addable(inexact)))
    return arrays, tree


def combine(totals: Sequence[Array], weight: Array, summed: Sequence[bool]) -> list[Array]:
    """Return the metrics of a batch, from their sums over its micro-batches and the sum of the weights."""
    return [x if flag else x / weight.astype(x.dtype) for x, flag in zip(totals, summed, strict=True)]


def _is_inexact(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def addable(x: Array) -> Array:
    """Return a value in a type in which it may be added up: its own, but of 32 bits at least."""
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.float32 if _is_inexact(x) else jnp.int32)


def returned_metric(name: str, path: str) -> str:
    """Begin a sentence on a metric that a function has returned."""
    return f"{name} returned the metric {path}" if path else f"{name} returned as its metrics an array"
