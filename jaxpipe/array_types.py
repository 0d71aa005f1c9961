"""Names for annotations: arrays, what has their shape, trees of them, traced programs over them, and their tensors.

A name here says what a value is where Python's type is anything: `jax.tree_util` takes every object as a tree, and
an array may be one of JAX, of NumPy, or a tracer. The types of traced programs are JAX's own, narrowed to operands
that are arrays: `jax.extend.core` lets an operand be any abstract value, without a shape.
"""

from collections.abc import Iterable
from typing import Any, NewType, Protocol, TypeAlias

import jax
import numpy as np
from jax import core
from jax.extend.core import ClosedJaxpr, DebugInfo, Effects, Jaxpr, Primitive
from jax.extend.source_info_util import SourceInfo


#: An array of JAX, or one that a trace stands for.
Array: TypeAlias = jax.Array

#: An array of JAX or of NumPy.
ArrayLike: TypeAlias = jax.Array | np.ndarray

#: The shape, element type and sharding of an array in a traced program, as ``jax.typeof`` gives them.
AbstractArray: TypeAlias = core.ShapedArray

#: An element type, as NumPy and JAX have it.
DType: TypeAlias = np.dtype[Any]

#: A traced program, with or without the values of its constants (one type from jax 0.12 on).
AnyJaxpr: TypeAlias = ClosedJaxpr | Jaxpr

#: The index of a tensor in ``jaxpipe.graph.graph.Graph.tensors``, as ``GraphBuilder.tensor`` gives it. A position among
#: the operands or results of something stays an ``int``, so that a type checker keeps the two apart.
TensorNumber = NewType("TensorNumber", int)

#: Nested containers of arrays, shapes or other leaves, as ``jax.tree_util`` walks them.
PyTree: TypeAlias = Any


class Shaped(Protocol):
    """Arrays, ``jax.ShapeDtypeStruct`` and abstract values of traces: they have a shape and an element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions."""
        ...

    @property
    def dtype(self) -> Any:
        """Element type."""
        ...


def is_key(x: Shaped) -> bool:
    """Return whether an array holds typed random keys."""
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


class Device(Protocol):
    """A device, as ``jax.devices`` returns it (``jax.Device`` has no type for annotations)."""

    id: int
    process_index: int
    platform: str
    device_kind: str
    client: Any

    def memory_stats(self) -> dict[str, int] | None:
        """Return the numbers that the device keeps of its memory; None if it keeps none."""
        ...


class PyTreeDef(Protocol):
    """The structure of a tree, as ``jax.tree.structure`` returns it."""

    num_leaves: int

    def unflatten(self, leaves: Iterable[Any], /) -> PyTree:
        """Return a tree of this structure."""
        ...


class Atom(Protocol):
    """An operand or a result of an equation: a variable or a literal."""

    aval: AbstractArray


class Literal(Atom, Protocol):
    """An operand that is a number in the program's text."""

    val: Array


class Equation(Protocol):
    """An operator of a traced program: ``jax.extend.core.JaxprEqn``."""

    primitive: Primitive
    params: dict[str, Any]
    invars: list[Atom]
    outvars: list[Atom]
    effects: Effects
    source_info: SourceInfo
    ctx: Any

    def replace(self, **changes: object) -> "Equation":
        """Return a copy of which some attributes differ."""
        ...


class OpenJaxpr(Protocol):
    """A traced program without the values of its constants: ``jax.extend.core.Jaxpr``."""

    constvars: list[Atom]
    invars: list[Atom]
    outvars: list[Atom]
    eqns: list[Equation]
    effects: Effects
    debug_info: DebugInfo
