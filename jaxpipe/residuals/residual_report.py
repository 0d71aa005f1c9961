"""Reports of what a model stores for its backward pass, tensor by tensor, as JAX traces it."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from flax import nnx
from flax.errors import FlaxError

from jaxpipe import _compat
from jaxpipe.array_types import AnyJaxpr, Array, Equation, PyTree, TensorNumber
from jaxpipe.errors import DifferentiationError, JaxpipeError, ModelError
from jaxpipe.graph.allowed_codecs import FAST
from jaxpipe.graph.codec import Codec
from jaxpipe.graph.graph import Graph, dependents, encoded_policy, equations_in, is_differentiable, read_graph, replaced
from jaxpipe.graph.primitives import JITS
from jaxpipe.graph.words import by_word
from jaxpipe.models.linen_facade import is_unbound, with_linen_model
from jaxpipe.models.purify_nnx import PureCall, purify
from jaxpipe.models.undecorated import without_encoding
from jaxpipe.models.variable_trees import common_level
from jaxpipe.residuals.density import without_transformations
from jaxpipe.residuals.equal_blocks import common_name, counted, grouped, pattern, sums_by_module
from jaxpipe.residuals.memory_encoded import run_encoded
from jaxpipe.residuals.residual_labels import Label, StoredTensor, parse_label
from jaxpipe.residuals.stored_formats import has_overflowed
from jaxpipe.text.printed import PlainTable, Printed
from jaxpipe.text.short_names import cut_middle
from jaxpipe.text.units import bytes_text


#: A module that has less of all bytes, kept or plain, has no line of its own.
_SMALLEST_SHARE = 0.05

#: Tensors that together have less of all bytes are one line.
_FOLDED_SHARE = 0.03

#: The most characters of a name in a table, which leaves room for the numbers beside it.
_LONGEST_NAME = 44

#: Formats in words.
_STORAGE = {"keep": "as it is", "vjp": "by jax.vjp"}


@dataclass(frozen=True)
class ResidualReport(Printed):
    """The tensors stored between the forward and the backward pass.

    ``str()`` and notebooks show their sums by module, and the largest; equal tensors of equal blocks are one row.

    Attributes:
      tensors: one for each stored tensor; arguments and compile-time constants are not among them.
      plain: the tensors that ``jax.vjp`` saves for the undecorated function, counted in the same way.
      plain_constant_bytes: compile-time constants beside them, such as the zeros that ReLU's derivative keeps.
      decorated: whether a part of the function is decorated; else the report is as if all of it were.
    """

    tensors: tuple[StoredTensor, ...]
    plain: tuple[StoredTensor, ...]
    plain_constant_bytes: int
    decorated: bool = True

    @property
    def total_bytes(self) -> int:
        """Bytes stored."""
        return _sum(self.tensors)

    @property
    def plain_bytes(self) -> int:
        """Bytes that ``jax.vjp`` saves for the undecorated function."""
        return _sum(self.plain)

    @property
    def plain_bytes_raw(self) -> int:
        """Bytes that ``jax.vjp`` saves for the undecorated function, compile-time constants included."""
        return self.plain_bytes + self.plain_constant_bytes

    def _printed(self) -> Sequence[PlainTable | str]:
        note = (
            f"Plain jax.grad keeps {self.plain_constant_bytes:,} bytes of constants besides, such as the zeros in "
            "ReLU's derivative, which follow from no argument; XLA may leave them out."
        )
        tables = [self._module_table(), *([self._tensor_table()] if self.tensors else [])]
        return [self._headline(), *tables, *([note] if self.plain_constant_bytes else [])]

    def _headline(self) -> str:
        """The bytes stored, beside those of plain ``jax.grad``."""
        how = "" if self.decorated else ", as if the function were decorated with memory_encoded"
        sizes = f"{bytes_text(self.total_bytes)}; plain jax.grad: {bytes_text(self.plain_bytes)}"
        times = f" ({self.plain_bytes / self.total_bytes:.1f}x)" if self.total_bytes else ""
        return f"Stored for the backward pass{how}: {sizes}{times}"

    def _module_table(self) -> PlainTable:
        """Bytes by module."""
        table = PlainTable()
        table.add_numbers("bytes", "share", "plain jax.grad")
        table.add_column("module")
        for name, rows in [*self._modules(), ("total", self._all())]:
            kept, plain = (_sum(row for is_kept, row in rows if is_kept is kind) for kind in (True, False))
            table.add_row(*self._size(kept), f"{plain:,}", cut_middle(name, _LONGEST_NAME))
        return table

    def _tensor_table(self) -> PlainTable:
        """The largest tensors."""
        table = PlainTable()
        table.add_numbers("bytes", "share")
        table.add_column("stored", no_wrap=True)
        table.add_column("tensor, and why")
        groups, folded = self._by_size()
        for group in groups:
            storage = _STORAGE.get(group[0].storage, group[0].storage)
            table.add_row(*self._size(_sum(group)), storage, _description(group))
        if folded:
            table.add_row(*self._size(_sum(folded)), "", f"{len(folded)} smaller ones")
        return table

    def _size(self, size: int) -> tuple[str, str]:
        return f"{size:,}", f"{size / self.total_bytes:.1%}" if self.total_bytes else ""

    def _all(self) -> list[tuple[bool, StoredTensor]]:
        """All tensors, and whether each is stored; the others are those of plain ``jax.grad``."""
        return [*((True, row) for row in self.tensors), *((False, row) for row in self.plain)]

    def _modules(self) -> list[tuple[str, list[tuple[bool, StoredTensor]]]]:
        totals = {True: self.total_bytes, False: self.plain_bytes}

        def content(item: tuple[bool, StoredTensor]) -> StoredTensor | None:
            is_kept, row = item
            return replace(row, producer=row.producer.rpartition("/")[2], readers=()) if is_kept else None

        def shown(items: list[tuple[bool, StoredTensor]]) -> bool:
            kinds = [(total, _sum(row for k, row in items if k is is_kept)) for is_kept, total in totals.items()]
            return any(size > _SMALLEST_SHARE * total for total, size in kinds)

        return sums_by_module([(row.producer, (is_kept, row)) for is_kept, row in self._all()], content, shown)

    def _by_size(self) -> tuple[list[list[StoredTensor]], list[StoredTensor]]:
        """Equal tensors in groups, the largest first; and apart the smallest, which together are little."""
        groups = grouped(self.tensors, lambda row: (pattern(row.producer), replace(row, producer="", readers=())))
        groups.sort(key=_sum, reverse=True)
        left = len(groups)
        while left and sum(map(_sum, groups[left - 1 :])) < _FOLDED_SHARE * self.total_bytes:
            left -= 1
        left = len(groups) if left >= len(groups) - 1 else left
        return groups[:left], [row for group in groups[left:] for row in group]


def _sum(rows: Iterable[StoredTensor]) -> int:
    return sum(row.bytes for row in rows)


def _description(group: Sequence[StoredTensor]) -> str:
    """The name of equal tensors, whose gradients need them, and what would be done without them."""
    first = group[0]
    producers = [row.producer for row in group]
    lines = [cut_middle(counted(producers), _LONGEST_NAME), f"{first.dtype}[{','.join(map(str, first.shape))}]"]
    readers = [common_name(names) for names in grouped((name for row in group for name in row.readers), pattern)]
    if readers:
        more = f" and {len(readers) - 2} more" if len(readers) > 2 else ""
        names = [cut_middle(_relative(name, common_name(producers))) for name in readers[:2]]
        lines[1] += f" for the gradient of {', '.join(names)}{more}"
    if first.otherwise:
        lines.append(f"otherwise {first.otherwise}")
    return "\n".join(lines)


def _relative(name: str, other: str) -> str:
    """Return a path without the modules in which another one is too."""
    modules, others = (tuple(path.split("/")[:-1]) for path in (name, other))
    return "/".join(name.split("/")[len(common_level([modules, others])) :])


def residual_report(function: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> ResidualReport:
    """Trace what ``function(*args, **kwargs)`` stores when it is differentiated.

    Decorated parts are encoded as they would be in training, the rest is what ``jax.vjp`` saves. A function without
    any decorated part is reported as if it were decorated with the default codecs. All floating arguments (and
    parameters of NNX modules) are differentiated. Nothing is computed: arguments may be ``jax.ShapeDtypeStruct``.

    Args:
      function: a function, decorated or not, or an NNX module; not ``jax.grad`` of one, as its gradient is taken here.
      *args, **kwargs: its arguments. ``loss(model, batch)`` of a Linen module takes ``module, variables, batch``, and
        gets the model that it gets in a pipeline.

    Raises:
      DifferentiationError: if no argument is a floating-point array, or the function returns gradients.
      ModelError: if the function is a Linen module, or a model that does not take these arguments.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> report = residual_report(lambda x: jax.nn.relu(x).sum(), jnp.ones((32, 8)))
      >>> report.total_bytes, report.plain_bytes, report.plain_bytes_raw
      (32, 256, 1280)
    """
    if is_unbound(function):
        name = type(function).__name__
        raise ModelError(
            f"residual_report was given the Linen module {name}, which has no variables of its own. Pass a function of "
            f"them: residual_report(lambda variables, x: {name}(...).apply(variables, x), variables, x)."
        )
    function, args = with_linen_model(function, args, kwargs)
    call = purify(function, *args, **kwargs)
    try:
        traced = jax.make_jaxpr(call.function)(*call.leaves)
    except (AttributeError, KeyError, TypeError, ValueError, FlaxError) as error:
        fix = _fix(function, args)
        if fix is None or isinstance(error, JaxpipeError):
            raise
        called = ", ".join([*map(_kind, args), *(f"{name}={_kind(x)}" for name, x in kwargs.items())])
        kind = "the model " if isinstance(function, nnx.Module) else ""
        name = getattr(function, "__name__", type(function).__name__)
        raise ModelError(
            f"residual_report called {kind}{name}({called}), which raised {type(error).__name__}: {error}. {fix}"
        ) from error
    differentiated = [k for k, leaf in enumerate(call.leaves) if is_differentiable(leaf)]
    if not differentiated:
        names = ", ".join(f"{n}: {x.dtype}" for n, x in zip(call.names, call.leaves, strict=True)) or "no arrays at all"
        raise DifferentiationError(
            f"residual_report differentiates every floating-point argument, and found none among ({names}). "
            "Pass the parameters or inputs that the model is trained on as floating-point arrays."
        )
    _check_no_gradient(traced)
    equations = equations_in(_compat.open_jaxpr(traced)[0].eqns)
    decorated = any(encoded_policy(equation) is not None for equation in equations)
    encoded = call.function if decorated else _encode(call)
    rows, _ = _residuals(encoded, call.leaves, differentiated)
    with without_encoding():
        plain = purify(function, *args, **kwargs)
        plain_rows, constant_bytes = _residuals(plain.function, plain.leaves, differentiated)
    return ResidualReport(tuple(rows), tuple(plain_rows), constant_bytes, decorated)


def _fix(function: Callable[..., PyTree], args: Sequence[PyTree]) -> str | None:
    """Return the fix for a model that was called with arguments that it does not take."""
    if isinstance(function, nnx.Module):
        return (
            "The arguments behind a model are those of its own call, as in residual_report(model, batch['x']); for a "
            "loss, pass it first: residual_report(loss, model, batch)."
        )
    module = next((type(x).__name__ for x in args if is_unbound(x)), None)
    if module is None:
        return None
    return (
        f"The Linen module {module} has no variables by itself. Pass them behind it, or their shapes: "
        f"residual_report(loss, {module}(...), variables, batch), with variables = jax.eval_shape({module}(...).init, "
        "jax.random.key(0), batch['x'])."
    )


def _check_no_gradient(traced: AnyJaxpr) -> None:
    """Raise ``DifferentiationError`` if a function returns gradients that it computes, and no loss of its own."""
    graph = read_graph(traced, boundaries=False)
    path_of = {t: graph.producers[t].path for t in graph.outputs if t in graph.producers}
    has_loss = any(not graph.tensors[t].shape and "jvp(" not in path for t, path in path_of.items())
    if not has_loss and any("transpose(" in path for path in path_of.values()):
        raise DifferentiationError(
            "residual_report was given a function that returns gradients (jax.grad, jax.value_and_grad). It takes the "
            "gradient itself and reports what waits for the backward pass of the function, so pass the function that "
            "is differentiated: residual_report(loss, ...) in place of residual_report(jax.grad(loss), ...)."
        )


def _kind(x: PyTree) -> str:
    """An argument in few words: dtype and shape of an array, keys of a dictionary, the type of anything else."""
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}{list(x.shape)}"
    return f"a dict of {', '.join(map(repr, x))}" if isinstance(x, dict) else f"a {type(x).__name__}"


def count_overflows(function: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> int:
    """Return how many tensors do not fit their codecs when ``function(*args, **kwargs)`` is differentiated.

    Their gradients are exact all the same, but each costs the time to compute the tensor again: if this is not 0 in
    the course of a training, measure again (``measure_density``). A pipeline tells it with the metrics of each step.

    Args:
      function: a function with a decorated part.
      *args, **kwargs: its arguments, concrete, as for ``residual_report``.
    """
    function, args = with_linen_model(function, args, kwargs)
    call = purify(function, *args, **kwargs)
    differentiated = [k for k, leaf in enumerate(call.leaves) if is_differentiable(leaf)]
    saved = _saved(call.function, differentiated)
    graph = read_graph(jax.make_jaxpr(saved)(*call.leaves), boundaries=False)
    parts: list[tuple[Label, list[Array]]] = []
    for label, leaf in zip((_label(graph, t) for t in graph.outputs), jax.jit(saved)(*call.leaves), strict=True):
        if label is not None and label.part == 0:
            parts.append((label, []))
        if label is not None:
            parts[-1][1].append(leaf)
    return sum(_overflows(by_word(label.codec), label, arrays) for label, arrays in parts)


def _overflows(codec: Codec, label: Label, arrays: Sequence[Array]) -> int:
    """Return how many of the tensors do not fit that the arrays of one label are of: ``vmap`` adds axes in front."""
    if not codec.may_overflow:
        return 0
    overflowed: Callable[[Sequence[Array]], Array] = functools.partial(has_overflowed, codec=codec)
    first = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct(label.tensor.shape, label.tensor.dtype))[0]
    for _ in range(arrays[0].ndim - first.ndim):
        overflowed = jax.vmap(overflowed)
    return int(np.sum(overflowed(arrays)))


def _encode(call: PureCall) -> Callable[..., list[Array]]:
    """The call's function as ``memory_encoded`` would run it."""

    def encoded(*leaves: Array) -> list[Array]:
        return run_encoded(replace(call, leaves=leaves, finish=list), policy=FAST)

    return encoded


def _residuals(
    function: Callable[..., list[Array]], leaves: Sequence[Array], differentiated: Sequence[int]
) -> tuple[list[StoredTensor], int]:
    """The arrays that ``jax.vjp`` keeps, each once and without arguments; and the bytes of constants among them."""
    graph = read_graph(jax.make_jaxpr(_saved(function, differentiated))(*leaves), boundaries=False)
    dependent = dependents(graph.operators, graph.inputs)
    rows: list[StoredTensor] = []
    constant_bytes = 0
    for t in dict.fromkeys(graph.outputs):
        if t in graph.inputs or t in graph.constants:
            continue
        tensor = graph.tensors[t]
        if t not in dependent:
            constant_bytes += tensor.bytes
            continue
        label = _label(graph, t)
        if label is not None and label.part > 0:  # the arrays of a tensor stand together
            rows[-1] = replace(rows[-1], bytes=rows[-1].bytes + tensor.bytes)
        elif label is not None or tensor.bytes:  # without elements are marks of what jax.vmap maps
            row = _by_jax(graph, t) if label is None else label.tensor
            rows.append(replace(row, bytes=tensor.bytes))
    return rows, constant_bytes


def _saved(function: Callable[..., list[Array]], differentiated: Sequence[int]) -> Callable[..., list[Array]]:
    """``leaves -> what jax.vjp keeps``."""

    def saved(*values: Array) -> list[Array]:
        def varied(*some: Array) -> list[Array]:
            results = function(*replaced(values, differentiated, some))
            return [y for y in results if is_differentiable(jax.typeof(y))]

        _, pullback = jax.vjp(varied, *(values[k] for k in differentiated))
        return jax.tree.leaves(pullback)

    return saved


def _by_jax(graph: Graph, t: TensorNumber) -> StoredTensor:
    """Return a tensor that JAX saves by itself."""
    op, tensor = graph.producers[t], graph.tensors[t]
    place = replace(op, path=without_transformations(op.path)).place
    return StoredTensor(place, tensor.shape, str(tensor.dtype), "vjp", tensor.bytes)


def _label(graph: Graph, t: TensorNumber) -> Label | None:
    """Return the label of a tensor of a program, if it has one."""
    op = graph.producers.get(t)
    return None if op is None else _label_of(op.equation, op.outputs.index(t))


def _label_of(equation: Equation, position: int) -> Label | None:
    """The stash label of an equation's output, looked up in loops, branches and functions if need be.

    What one branch stores is zeros of the others.
    """
    if equation.primitive.name == "name":
        return parse_label(str(equation.params["name"]))
    if equation.primitive.name not in {"scan", "cond", *JITS}:
        return None
    for program in equation.params.get("branches") or [equation.params["jaxpr"]]:
        body, _ = _compat.open_jaxpr(program)
        inner = body.outvars[position]
        for eqn in body.eqns:
            if inner in eqn.outvars and (label := _label_of(eqn, eqn.outvars.index(inner))) is not None:
                return label
    return None
