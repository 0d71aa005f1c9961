"""Seconds of operators from a function of the caller: a cost model, or measurements of one's own."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax

from jaxpipe.costs.profile import Profile
from jaxpipe.errors import PartitionError
from jaxpipe.graph.graph import Graph


@dataclass(frozen=True)
class Work:
    """One operator of a micro-batch's program, as ``partition(profile=function)`` shows it to the function.

    Attributes:
      name: module path and what it does, as in a profile.
      primitive: its name in JAX.
      operands, results: shapes and types; parameters are among the operands.
      flops: floating-point operations of the forward pass.
      estimate: seconds, forward and backward, from the rates of the device.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> def twice_as_fast(work):
      ...     forward, backward = work.estimate
      ...     return forward / 2, backward / 2
      >>> from jaxpipe import profile_model
      >>> model = jax.tree_util.Partial(lambda w, x: x @ w, jnp.ones((3, 1)))
      >>> given, batch = {"loss": lambda f, x: f(x).mean()}, jnp.ones((4, 3))
      >>> fast, usual = (profile_model(model, batch, source=x, **given) for x in (twice_as_fast, "analytic"))
      >>> fast.seconds[0] == usual.seconds[0] / 2
      True
    """

    name: str
    primitive: str
    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    flops: float
    estimate: tuple[float, float]


#: A function of an operator that gives its seconds, forward and backward.
SecondsOf = Callable[[Work], tuple[float, float]]


def with_given_seconds(estimate: Profile, graph: Graph, seconds_of: SecondsOf) -> Profile:
    """Return an estimated profile of a graph with the seconds that a function gives for its operators.

    Raises:
      PartitionError: if it gives anything but two numbers for one of them.
    """
    shapes = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in graph.tensors]
    pairs: list[tuple[float, float]] = []
    for k, op in enumerate(graph.operators):
        operands, results = (tuple(shapes[t] for t in tensors) for tensors in (op.inputs, op.outputs))
        times = estimate.forward_seconds[k], estimate.backward_seconds[k]
        given = seconds_of(Work(estimate.names[k], op.name, operands, results, estimate.forward_flops[k], times))
        try:
            forward, backward = map(float, given)
        except (TypeError, ValueError):
            raise PartitionError(
                f"profile= gave {given!r} for {estimate.names[k]}; it must give two numbers, the seconds of "
                "forward and of backward work."
            ) from None
        pairs.append((forward, backward))
    forwards, backwards = zip(*pairs, strict=True)
    return replace(estimate, forward_seconds=forwards, backward_seconds=backwards, source="given")
