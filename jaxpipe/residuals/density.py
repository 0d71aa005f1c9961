"""The share of elements of each tensor that are not zero: measured on data, or assumed.

The sparse formats hold a number of values that is fixed when a program is traced. A wrong guess costs bytes or time,
never exactness.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jaxpipe.array_types import Array, PyTree, TensorNumber
from jaxpipe.errors import ModelError
from jaxpipe.graph.graph import Graph, Operator, is_differentiable, read_graph
from jaxpipe.graph.primitives import MOVES
from jaxpipe.graph.rules import relu
from jaxpipe.models.linen_facade import with_linen_model
from jaxpipe.models.purify_nnx import purify
from jaxpipe.residuals.backward_graph import build_backward_graph
from jaxpipe.residuals.codecs.sparse import is_occupied
from jaxpipe.text.value_text import shown


#: Room beyond the measured number of values: it differs a little from batch to batch.
MEASURED_MARGIN = 1 / 16

#: Of a ReLU's output half is assumed to be zero, as it is where the input is distributed evenly around zero.
RELU_DENSITY = 0.5
ASSUMED_MARGIN = 1 / 8

#: Smaller tensors are not worth a look.
SMALLEST_TENSOR = 1024


@dataclass(frozen=True)
class Density:
    """The fraction of elements that are not zero, by tensor name (module path, operator, occurrence).

    ``str()`` lists it.
    """

    fractions: Mapping[str, float] = field(hash=False)

    def __hash__(self) -> int:
        return hash(tuple(self.fractions.items()))

    def __str__(self) -> str:
        return "\n".join(f"{fraction:7.1%}  {name}" for name, fraction in self.fractions.items())


# A context that JAX's tracing caches know of: a jitted function is traced anew under another density.
_ambient = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def with_density(density: Density) -> Iterator[None]:
    """Size the sparse formats by what was measured, in everything that is traced inside.

    Example:
      >>> import jax, jax.numpy as jnp, jaxpipe
      >>> loss = jaxpipe.memory_encoded(lambda x, w: jnp.tanh(jax.nn.relu(x) @ w).sum(), codecs="smallest")
      >>> x, w = jax.random.normal(jax.random.key(0), (64, 64)) - 1, jnp.ones((64, 64))
      >>> density = jaxpipe.measure_density(loss, x, w)
      >>> with jaxpipe.with_density(density):
      ...     gradients = jax.jit(jax.grad(loss, (0, 1)))(x, w)

    Raises:
      ModelError: if ``density`` is none.
    """
    if not isinstance(density, Density):
        raise ModelError(
            f"density={shown(density)}; it must be what jaxpipe.measure_density(function, *args) returns, or "
            "jaxpipe.Density({name: fraction}) with the names of such a one."
        )
    with _ambient(density):
        yield


def measure_density(function: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> Density:
    """Run ``function(*args, **kwargs)`` once and count what is not zero in each tensor of it.

    Of a training step pass the loss, its parameters and a typical batch. Tensors inside ``scan``, ``while`` and other
    opaque operators are not looked at.

    Args:
      function: a function, decorated or not, or an NNX module.
      *args, **kwargs: its arguments, concrete, as for ``residual_report``.
    """
    function, args = with_linen_model(function, args, kwargs)
    call = purify(function, *args, **kwargs)
    graph = read_graph(jax.make_jaxpr(call.function)(*call.leaves))
    wrt = [t for t, leaf in zip(graph.inputs, call.leaves, strict=True) if is_differentiable(leaf)]
    graph = build_backward_graph(graph, wrt).graph
    available = graph.derived_from_parameters
    names = {t: name for t, name in tensor_names(graph).items() if t not in available and can_be_sparse(graph, t)}

    @jax.jit
    def fractions(*leaves: Array) -> list[Array]:
        return [jnp.mean(is_occupied(x)) for x in replace(graph, outputs=tuple(names)).evaluate(leaves)]

    return Density(dict(zip(names.values(), map(float, fractions(*call.leaves)), strict=True)))


def can_be_sparse(graph: Graph, t: TensorNumber) -> bool:
    """Return whether a sparse format may store a tensor: floats, not too few, not split over an explicit mesh axis."""
    tensor = graph.tensors[t]
    split = any(axis is not None for axis in tensor.aval.sharding.spec)
    return (
        is_differentiable(tensor.aval)
        and jnp.issubdtype(tensor.dtype, jnp.floating)
        and (SMALLEST_TENSOR <= tensor.size < 2**31 and not split)
    )


def room(graph: Graph) -> dict[TensorNumber, int]:
    """For each tensor that has, or is assumed to have, many zeros: how many values to make room for."""
    measured = _ambient.value
    wanted = {t: fraction * (1 + ASSUMED_MARGIN) for t, fraction in _assumed(graph).items()}
    if measured is not None:
        for t, name in tensor_names(graph).items():
            if name in measured.fractions:
                wanted[t] = measured.fractions[name] * (1 + MEASURED_MARGIN) + 1 / SMALLEST_TENSOR
    return {
        t: min(graph.tensors[t].size, math.ceil(fraction * graph.tensors[t].size))
        for t, fraction in wanted.items()
        if can_be_sparse(graph, t)
    }


def tensor_names(graph: Graph) -> dict[TensorNumber, str]:
    """A name for each tensor that an operator makes, the same in every trace of the same model, mapped or not."""
    seen: dict[str, int] = {}
    names = {}
    for op in graph.operators:
        for k, t in enumerate(op.outputs):
            name = without_transformations(op.place) + (f".{k}" if k else "")
            seen[name] = seen.get(name, 0) + 1
            names[t] = f"{name}#{seen[name]}"
    return names


def without_transformations(path: str) -> str:
    """Return a path without the transformations of JAX in it.

    Example:
      >>> without_transformations("jvp(Net)/Conv_0"), without_transformations("vmap()/relu")
      ('Net/Conv_0', 'relu')
    """
    return re.sub(r"\w+\(\)/?|\b\w+\(([^()]*)\)", r"\1", path)


def _assumed(graph: Graph) -> dict[TensorNumber, float]:
    """Densities of what ReLUs write, and of what is only moved from there."""
    densities: dict[TensorNumber, float] = {}
    for op in graph.operators:
        fraction = RELU_DENSITY if relu.rectifies(op) else _inherited(op, graph, densities)
        if fraction is not None:
            densities.update(dict.fromkeys(op.outputs, fraction))
    return densities


def _inherited(op: Operator, graph: Graph, densities: Mapping[TensorNumber, float]) -> float | None:
    if not op.inputs or op.name not in MOVES:
        return None
    sizes = {t: graph.tensors[t].size for t in op.inputs}
    fraction = sum(densities.get(t, 1.0) * sizes[t] for t in op.inputs) / max(1, sum(sizes[t] for t in op.inputs))
    return fraction if fraction < 1 else None
