"""Reports of what a model stores for its backward pass, tensor by tensor, as JAX traces it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from jax import core

from jaxpipe import _compat
from jaxpipe.array_types import AbstractArray, AnyJaxpr, Array, Equation, PyTree
from jaxpipe.errors import DifferentiationError, ModelError
from jaxpipe.graph.allowed_codecs import FAST
from jaxpipe.graph.graph import GraphBuilder, Operator, encoded_policy, is_differentiable
from jaxpipe.models.purify_nnx import PureCall, purify
from jaxpipe.residuals.memory_encoded import run_encoded, without_encoding
from jaxpipe.residuals.residual_labels import Label, parse_label
from jaxpipe.residuals.stored_formats import has_overflowed
from jaxpipe.text.plain_table import PlainTable
from jaxpipe.text.printed import plain_text
from jaxpipe.text.units import bytes_text


@dataclass(frozen=True)
class StoredTensor:
    """One array that crosses from the forward to the backward pass.

    Attributes:
      producer: the module path and operator that made the tensor.
      shape, dtype: of the tensor, before it was encoded.
      storage: ``"keep"``, ``"mask"``, ``"pool index"``, ``"index"``, ``"bitmap"``, ``"csr"`` for encoded parts,
        ``"vjp"`` for what JAX saves by itself.
      bytes: what is stored.
      readers: the steps of the backward pass that use it, itself or something recomputed from it.
      instead: the alternative, with its cost.
    """

    producer: str
    shape: tuple[int, ...]
    dtype: str
    storage: str
    bytes: int
    readers: tuple[str, ...] = ()
    instead: str = ""


@dataclass(frozen=True)
class ResidualReport:
    """The tensors stored between the forward and the backward pass. ``str()`` is a table.

    Attributes:
      tensors: one row for each stored tensor; arguments and compile-time constants are not among them.
      plain_bytes: what ``jax.vjp`` saves for the undecorated function, counted in the same way.
      plain_bytes_raw: the same with compile-time constants, such as the zeros that ReLU's derivative keeps.
      decorated: whether a part of the function is decorated; else the report is as if all of it were.
    """

    tensors: tuple[StoredTensor, ...]
    plain_bytes: int
    plain_bytes_raw: int
    decorated: bool = True

    @property
    def total_bytes(self) -> int:
        """Bytes stored."""
        return sum(row.bytes for row in self.tensors)

    def __str__(self) -> str:
        table = PlainTable(title=self._headline(), pad_edge=True, show_edge=True, collapse_padding=False)
        for column in ("made by", "tensor", "stored as"):
            table.add_column(column, no_wrap=True)
        for column in ("bytes", "share"):
            table.add_column(column, justify="right")
        for column in ("for the gradient of", "instead of"):
            table.add_column(column, no_wrap=True)
        rows, folded = self._by_size()
        for row in rows:
            shape = f"{row.dtype}[{','.join(map(str, row.shape))}]"
            more = f" and {len(row.readers) - 2} more" if len(row.readers) > 2 else ""
            readers = ", ".join(row.readers[:2]) + more
            share = f"{row.bytes / self.total_bytes:.1%}"
            table.add_row(row.producer, shape, row.storage, f"{row.bytes:,}", share, readers, row.instead)
        if folded:
            size = sum(row.bytes for row in folded)
            table.add_row(f"{len(folded)} smaller ones", "", "", f"{size:,}", f"{size / self.total_bytes:.1%}")
        table.add_section()
        table.add_row("total", "", "", f"{self.total_bytes:,}")
        table.add_row("plain jax.grad", "", "", f"{self.plain_bytes:,}")
        constants = self.plain_bytes_raw - self.plain_bytes
        if constants:
            table.add_row("and constants that it keeps", "", "", f"{constants:,}")
        lines = [plain_text(table, 1000)]
        if constants:
            lines.append(
                "Constants follow from no argument, as the zeros in ReLU's derivative; XLA may leave them out."
            )
        return "\n".join(lines).rstrip()

    def _headline(self) -> str:
        """The bytes stored, beside those of plain ``jax.grad``."""
        how = "" if self.decorated else ", as if the function were decorated with memory_encoded"
        sizes = f"{bytes_text(self.total_bytes)}; plain jax.grad stores {bytes_text(self.plain_bytes)}"
        times = f", {self.plain_bytes / self.total_bytes:.1f}x as much" if self.total_bytes else ""
        return f"Stored for the backward pass{how}: {sizes}{times}"

    def _by_size(self) -> tuple[list[StoredTensor], list[StoredTensor]]:
        """The largest tensors first, and apart the smallest, which together are less than 3 % of all."""
        rows = sorted(self.tensors, key=lambda row: -row.bytes)
        left = len(rows)
        while left and sum(row.bytes for row in rows[left - 1 :]) < 0.03 * self.total_bytes:
            left -= 1
        return (rows, []) if left >= len(rows) - 1 else (rows[:left], rows[left:])


def residual_report(function: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> ResidualReport:
    """Trace what ``function(*args, **kwargs)`` stores when it is differentiated.

    Decorated parts are encoded as they would be in training, the rest is what ``jax.vjp`` saves. A function without
    any decorated part is reported as if it were decorated with the default codecs. All floating arguments (and
    parameters of NNX modules) are differentiated. Nothing is computed: arguments may be ``jax.ShapeDtypeStruct``.

    Args:
      function: a function, decorated or not, or an NNX module.
      *args, **kwargs: its arguments.

    Raises:
      DifferentiationError: if no argument is a floating-point array.
      ModelError: if the function is a Linen module, or a model that does not take these arguments.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> report = residual_report(lambda x: jax.nn.relu(x).sum(), jnp.ones((32, 8)))
      >>> report.total_bytes, report.plain_bytes, report.plain_bytes_raw
      (32, 256, 1280)
    """
    if isinstance(function, nn.Module) and function.scope is None:
        name = type(function).__name__
        raise ModelError(
            f"residual_report was given the Linen module {name}, which has no variables of its own. Pass a function of "
            f"them: residual_report(lambda variables, x: {name}(...).apply(variables, x), variables, x)."
        )
    call = purify(function, *args, **kwargs)
    differentiated = [k for k, leaf in enumerate(call.leaves) if is_differentiable(leaf)]
    if not differentiated:
        names = ", ".join(f"{n}: {x.dtype}" for n, x in zip(call.names, call.leaves, strict=True)) or "no arrays at all"
        raise DifferentiationError(
            f"residual_report differentiates every floating-point argument, and found none among ({names}). "
            "Pass the parameters or inputs that the model is trained on as floating-point arrays."
        )
    try:
        traced = jax.make_jaxpr(call.function)(*call.leaves)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if not isinstance(function, nnx.Module):
            raise
        given = ", ".join([*map(_kind, args), *(f"{name}={_kind(x)}" for name, x in kwargs.items())])
        raise ModelError(
            f"residual_report called the model {type(function).__name__}({given}), which raised "
            f"{type(error).__name__}: {error}. The arguments behind a model are those of its own call, as in "
            "residual_report(model, batch['x']); for a loss, pass it first: residual_report(loss, model, batch)."
        ) from error
    decorated = _has_encoded_part(traced)
    encoded = call.function if decorated else _encode(call)
    rows, _ = _residuals(encoded, call.leaves, differentiated)
    with without_encoding():
        plain = purify(function, *args, **kwargs)
        plain_rows, constant_bytes = _residuals(plain.function, plain.leaves, differentiated)
    plain_bytes = sum(row.bytes for row in plain_rows)
    return ResidualReport(tuple(rows), plain_bytes, plain_bytes + constant_bytes, decorated)


def _kind(x: PyTree) -> str:
    """An argument in few words: dtype and shape of an array, keys of a dictionary, the type of anything else."""
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}{list(x.shape)}"
    return f"a dict of {', '.join(map(repr, x))}" if isinstance(x, dict) else f"a {type(x).__name__}"


def count_overflows(function: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> int:
    """Return how many sparse tensors do not fit their room when ``function(*args, **kwargs)`` is differentiated.

    Their gradients are exact all the same, but each costs the time to compute the tensor again: if this is not 0 in
    the course of a training, measure again (``measure_density``). A pipeline tells it with the metrics of each step.

    Args:
      function: a function with a decorated part.
      *args, **kwargs: its arguments, concrete.
    """
    call = purify(function, *args, **kwargs)
    differentiated = [k for k, leaf in enumerate(call.leaves) if is_differentiable(leaf)]
    saved = _saved(call.function, differentiated)
    labels = _leaf_labels(saved, call.leaves)
    parts: list[tuple[Label, list[Array]]] = []
    for label, leaf in zip(labels, jax.jit(saved)(*call.leaves), strict=True):
        if label is not None and label.part == 0:
            parts.append((label, []))
        if label is not None:
            parts[-1][1].append(leaf)
    sparse = [(label.format, arrays) for label, arrays in parts if label.format.format.is_sparse]
    return sum(int(np.sum(has_overflowed(arrays, fmt))) for fmt, arrays in sparse)


def _leaf_labels(saved: Callable[..., list[Array]], leaves: Sequence[Array]) -> list[Label | None]:
    builder = GraphBuilder()
    outputs = builder.read(jax.make_jaxpr(saved)(*leaves), [builder.tensor(jax.typeof(leaf)) for leaf in leaves])
    producers = {t: op for op in builder.operators for t in op.outputs}
    return [_label(producers[t].equation, producers[t].outputs.index(t)) if t in producers else None for t in outputs]


def _encode(call: PureCall) -> Callable[..., list[Array]]:
    """The call's function as ``memory_encoded`` would run it."""

    def encoded(*leaves: Array) -> list[Array]:
        return run_encoded(replace(call, leaves=leaves, finish=list), policy=FAST)

    return encoded


def _residuals(
    function: Callable[..., list[Array]], leaves: Sequence[Array], differentiated: Sequence[int]
) -> tuple[list[StoredTensor], int]:
    """The arrays that ``jax.vjp`` keeps, each once and without arguments; and the bytes of constants among them."""
    builder = GraphBuilder()
    inputs = [builder.tensor(core.ShapedArray(leaf.shape, leaf.dtype)) for leaf in leaves]
    outputs = dict.fromkeys(builder.read(jax.make_jaxpr(_saved(function, differentiated))(*leaves), inputs))
    dependent = set(inputs)
    producers = {}
    for op in builder.operators:
        producers.update(dict.fromkeys(op.outputs, op))
        if not dependent.isdisjoint(op.inputs):
            dependent.update(op.outputs)
    rows: list[StoredTensor] = []
    constant_bytes = 0
    for t in outputs:
        if t in inputs or t in builder.constants:
            continue
        tensor = builder.tensors[t]
        size = tensor.bytes
        if t not in dependent:
            constant_bytes += size
            continue
        label = _label(producers[t].equation, producers[t].outputs.index(t))
        if label is not None and label.part > 0:  # the arrays of a tensor stand together
            rows[-1] = replace(rows[-1], bytes=rows[-1].bytes + size)
        else:
            rows.append(_row(producers[t], label, tensor.aval, size))
    return rows, constant_bytes


def _saved(function: Callable[..., list[Array]], differentiated: Sequence[int]) -> Callable[..., list[Array]]:
    """``leaves -> what jax.vjp keeps``."""

    def saved(*values: Array) -> list[Array]:
        def varied(*some: Array) -> list[Array]:
            full = list(values)
            for k, value in zip(differentiated, some, strict=True):
                full[k] = value
            return [y for y in function(*full) if is_differentiable(jax.typeof(y))]

        _, pullback = jax.vjp(varied, *(values[k] for k in differentiated))
        return jax.tree.leaves(pullback)

    return saved


def _row(op: Operator, label: Label | None, aval: AbstractArray, size: int) -> StoredTensor:
    if label is None:
        path = re.sub(r"\w+\(\)/?|\b\w+\(([^()]*)\)", r"\1", op.path)  # jvp(Net)/Conv_0 -> Net/Conv_0
        producer = "/".join(filter(None, (path, op.label)))
        return StoredTensor(producer, tuple(aval.shape), str(aval.dtype), "vjp", size)
    storage = label.format.format.value
    return StoredTensor(label.producer, label.shape, label.dtype, storage, size, label.readers, label.instead)


def _label(equation: Equation, position: int) -> Label | None:
    """The stash label of an equation's output, looked up inside ``scan`` and other programs if need be."""
    if equation.primitive.name == "name":
        return parse_label(str(equation.params["name"]))
    if equation.primitive.name not in ("scan", "jit", "pjit"):
        return None
    body, _ = _compat.open_jaxpr(equation.params["jaxpr"])
    inner = body.outvars[position]
    for eqn in body.eqns:
        if inner in eqn.outvars:
            return _label(eqn, eqn.outvars.index(inner))
    return None


def _has_encoded_part(closed: AnyJaxpr) -> bool:
    """Return whether a traced program has a ``memory_encoded`` call in it, at any depth."""
    jaxpr, _ = _compat.open_jaxpr(closed)
    return any(
        encoded_policy(eqn) is not None or any(map(_has_encoded_part, _compat.inner_programs(eqn)))
        for eqn in jaxpr.eqns
    )
