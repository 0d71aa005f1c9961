"""A traced program as operators and tensors in topological order.

    Flax module --purify--> pure function --trace--> Graph

Tensors are numbered; an operator names the numbers it reads and writes. Wrappers (``jit``, nested
``memory_encoded``) are inlined; an operator with a derivative rule of its own (``custom_jvp``, ``custom_vjp``)
or with control flow (``scan``, ``while``, ``cond``, ``remat``) stays one operator.
"""

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend.core import Jaxpr

from jaxpipe import _compat
from jaxpipe.array_types import AbstractArray, AnyJaxpr, Array, Atom, DType, Equation, PyTree, Shaped, TensorNumber
from jaxpipe.graph.allowed_codecs import Policy
from jaxpipe.graph.axis_names import NO_AXES, TracedIn, names_in
from jaxpipe.graph.primitives import BODIES, CALLS, CHECKPOINTS, FUNCTIONS, MARKS, SHARDS
from jaxpipe.graph.reverse_walk import needed
from jaxpipe.graph.save_policy import is_saved
from jaxpipe.graph.words import by_word


#: A ``jit`` of this name is the body of a ``memory_encoded`` call; its suffix names the policy.
ENCODED_MARK = "jaxpipe_memory_encoded_"

#: Equations that wrap a program with a rule for its VJP. Functions with a rule for their JVP stay single operators.
_RULES = {"custom_vjp_call": FUNCTIONS["custom_vjp_call"]}

T = TypeVar("T")


@dataclass(frozen=True)
class Tensor:
    """One array of a program: its abstract value, and the number of bits an element needs."""

    aval: AbstractArray
    bits: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions."""
        return self.aval.shape

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.aval.dtype

    @functools.cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def shape_and_type(self) -> jax.ShapeDtypeStruct:
        """Shape and element type."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @functools.cached_property
    def bytes(self) -> int:
        """The bytes of the tensor as it is."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Operator:
    """One equation. ``inputs`` and ``outputs`` are tensor numbers; literals stay inside the equation.

    ``equation`` is ``None`` for a call boundary: it hands its inputs on unchanged, so that cotangents are summed
    inside an inlined call first and outside it afterwards, which is the order JAX sums them in. ``origin`` names the
    operator whose derivative asked for this one; ``policy`` is that of the ``memory_encoded`` call it lies in, if any.
    """

    equation: Any
    inputs: tuple[TensorNumber, ...]
    outputs: tuple[TensorNumber, ...]
    path: str = ""
    origin: str = ""
    policy: Policy | None = None

    @functools.cached_property
    def name(self) -> str:
        """The primitive."""
        return "call_boundary" if self.equation is None else self.equation.primitive.name

    @property
    def label(self) -> str:
        """A name that a person recognizes: ``relu`` rather than ``custom_jvp_call``; what ``checkpoint_name`` gave."""
        if self.origin or self.name == "name":
            return self.origin or self.params["name"]
        return (_compat.function_name(self.equation) if self.name in FUNCTIONS else None) or self.name

    @property
    def place(self) -> str:
        """The module path and the label."""
        return join_paths(self.path, self.label)

    @property
    def scope(self) -> str:
        """The module path in which it runs what it holds: of a checkpoint, what its path has around its operators."""
        return self.path if self.equation is None else self.path.removesuffix(_inner_scope(self.equation)).rstrip("/")

    @property
    def params(self) -> Mapping[str, Any]:
        """The primitive's parameters."""
        return {} if self.equation is None else self.equation.params

    @property
    def operands(self) -> list[TensorNumber | None]:
        """The operands by tensor number; None for a literal."""
        if self.equation is None:
            return list(self.inputs)
        numbers = iter(self.inputs)
        return [None if _compat.is_literal(atom) else next(numbers) for atom in self.equation.invars]

    @property
    def literals(self) -> list[Array]:
        """The operands that are numbers in the program's text."""
        atoms = () if self.equation is None else self.equation.invars
        return [atom.val for atom in atoms if _compat.is_literal(atom)]

    @property
    def has_effects(self) -> bool:
        """Return whether running it does more than compute."""
        return self.equation is not None and not all(map(_compat.names_axis, self.equation.effects))

    @functools.cached_property
    def is_collective(self) -> bool:
        """Return whether all shards of the ``shard_map`` around it have to run it."""
        inside = [] if self.equation is None or self.name in SHARDS else equations_in([self.equation])
        return any(names_in(eqn) for eqn in inside if eqn.primitive.name not in MARKS)

    @functools.cached_property
    def saved(self) -> bool | None:
        """The answer of the save policy around it: its results are kept, or it may run again; None without a policy."""
        if self.policy is None or self.policy.saves is None or self.equation is None:
            return None
        return is_saved(self.policy.saves, self.equation)

    @functools.cached_property
    def program(self) -> Jaxpr:
        """The operator alone, as a jaxpr over ``inputs``."""
        return _compat.isolate(self.equation)

    def ends(self) -> tuple[tuple[TensorNumber, ...], tuple[TensorNumber, ...]]:
        """Return the tensors that it makes, and those that it reads."""
        return self.outputs, self.inputs

    def evaluate(self, *values: Array) -> list[Array]:
        """Run the operator on concrete or traced values, under the module path it came from."""
        if self.equation is None:
            return list(values)
        if self.path and not _compat.named_scope_of(self.equation):
            with jax.named_scope(self.scope):
                return _compat.evaluate_jaxpr(self.program, *values)
        return _compat.evaluate_jaxpr(self.program, *values)


@dataclass(frozen=True, eq=False)
class Graph:
    """A pure program ``inputs -> outputs``.

    Attributes:
      operators: in topological order; ``operator.inputs`` are written before they are read.
      constants: values known at trace time, by tensor number.
      parameters: inputs that live outside the program (weights, running statistics, keys): never stored.
      stage_shape: the axes over which a stage is sharded; annotations of others that a derivative brings are dropped
        (``jaxpipe.graph.sharding_annotations``). None outside of pipelines.
      traced_in: axes of size 1 that were made to trace it, which derivatives may name, too.
      ruled: tensors that are values of ``behind_rules`` in the program of which this is a part.
      derived: what was derived of its operators, by what these compute; shared by all graphs that are parts of one.
    """

    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[TensorNumber, ...]
    outputs: tuple[TensorNumber, ...]
    constants: Mapping[TensorNumber, Array] = field(default_factory=dict)
    parameters: frozenset[TensorNumber] = frozenset()
    stage_shape: Mapping[str, int] | None = None
    traced_in: TracedIn = NO_AXES
    ruled: frozenset[TensorNumber] = frozenset()
    derived: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def producers(self) -> Mapping[TensorNumber, Operator]:
        """The operator that makes each tensor but inputs and constants."""
        return {t: op for op in self.operators for t in op.outputs}

    @functools.cached_property
    def places(self) -> Mapping[Operator, int]:
        """The place of each operator."""
        return {op: k for k, op in enumerate(self.operators)}

    def evaluate(self, values: Sequence[Array]) -> list[Array]:
        """Run the program."""
        env = dict(self.constants)
        env.update(zip(self.inputs, values, strict=True))
        run(self.operators, env)
        return [env[t] for t in self.outputs]

    def with_parameters(self, flags: Sequence[bool]) -> "Graph":
        """Return the same graph, with the flagged inputs known to be parameters."""
        chosen = [t for t, flag in zip(self.inputs, flags, strict=True) if flag]
        return replace(self, parameters=frozenset(chosen))

    @functools.cached_property
    def derived_from_parameters(self) -> frozenset[TensorNumber]:
        """Tensors that depend on parameters and numbers alone; constant arrays too, but not what depends on them.

        (A constant array may be the data of a loss that closes over its batch.) Nor what collectives return: it is
        stored or takes time, as other tensors.
        """
        known = set(self.parameters) | {t for t in self.constants if self.tensors[t].size == 1}
        for op in self.operators:
            if not op.has_effects and not op.is_collective and all(t in known for t in op.inputs):
                known.update(op.outputs)
        return frozenset(known | set(self.constants))

    def section(self, start: int, stop: int, *, passing: bool = True) -> "Graph":
        """Operators ``start:stop`` as a graph of their own.

        Its inputs are the tensors that it reads and does not make, its outputs those it makes that the rest of the
        graph needs. A tensor made before the section and needed after it passes through: it is an input and an
        output, so that a chain of sections hands everything from neighbor to neighbor, and cotangents are summed
        in the order of the whole graph; not so without ``passing``. Tensors keep their numbers.
        """
        body = self.operators[start:stop]
        written = dict.fromkeys(t for op in body for t in op.outputs)
        earlier = {t for op in self.operators[:start] for t in op.outputs}
        later = dict.fromkeys((*(t for op in self.operators[stop:] for t in op.inputs), *self.outputs))
        through = [t for t in later if t in earlier] if passing else []
        read = [t for op in body for t in op.inputs if t not in written and t not in self.constants]
        inputs = tuple(ordered((*read, *through)))
        return replace(
            self,
            operators=body,
            inputs=inputs,
            outputs=tuple(ordered((*(t for t in written if t in later), *through))),
            parameters=self.parameters & set(inputs),
        )

    def __str__(self) -> str:
        lines = []
        for op in self.operators:
            outs = ", ".join(f"%{t}:{self.tensors[t].aval.str_short()}" for t in op.outputs)
            ins = ", ".join(f"%{t}" for t in op.inputs)
            lines.append(f"{outs} = {op.name}({ins})  # {op.path}")
        return "\n".join(lines)


def run(operators: Iterable[Operator], env: dict[TensorNumber, Array]) -> None:
    """Evaluate ``operators`` in order; reads and extends ``env``, tensor number to value."""
    for op in operators:
        env.update(zip(op.outputs, op.evaluate(*(env[t] for t in op.inputs)), strict=True))


def ordered(items: Iterable[T]) -> list[T]:
    """The items without repetition, in order of first occurrence."""
    return list(dict.fromkeys(items))


def element_bits(aval: Shaped) -> int:
    """Bits that one element of an array holds: 1 for a boolean, whatever XLA spends on it."""
    return 1 if aval.dtype == np.bool_ else 8 * aval.dtype.itemsize


def position_bits(
    equation: Equation | None, avals: Sequence[AbstractArray], operands: Sequence[int]
) -> list[int | None]:
    """Bits that hold an element of each output that counts positions along an axis: 8 or 16; None for the others.

    The derivative of a sort takes its positions from an ``iota`` that is sorted beside the operand.
    """
    if equation is None:
        return [None] * len(avals)
    name = equation.primitive.name
    if name == "iota" and np.issubdtype(avals[0].dtype, np.integer):
        return [_bits_to_count(equation.params["shape"][equation.params["dimension"]])]
    if name == "top_k":
        return [None, _bits_to_count(equation.invars[0].aval.shape[equation.params["axis"]])]
    return list(operands) if name == "sort" and len(operands) == len(avals) else [None] * len(avals)


def _bits_to_count(length: int) -> int | None:
    return next((bits for bits in (8, 16) if length <= 2**bits), None)


class GraphBuilder:
    """Numbers tensors and collects operators while jaxprs are read. Mutable; ``build`` gives the graph.

    Args:
      tensors, constants: those of a graph to which operators are added.
      inline_rules: whether calls of ``jax.custom_vjp`` functions are inlined, too: in a program that is not
        differentiated any more.
      inline_shards: whether the body of a ``shard_map`` is, which works on parts: in a program that is not run.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor] = (),
        constants: Mapping[TensorNumber, Array] | None = None,
        *,
        inline_rules: bool = False,
        inline_shards: bool = False,
    ):
        self._calls = {**CALLS, **(_RULES if inline_rules else {}), **(SHARDS if inline_shards else {})}
        self.tensors = list(tensors)
        self.operators: list[Operator] = []
        self.constants = dict(constants or {})

    def tensor(self, aval: AbstractArray, bits: int | None = None) -> TensorNumber:
        """A new tensor's number."""
        self.tensors.append(Tensor(aval, element_bits(aval) if bits is None else bits))
        return TensorNumber(len(self.tensors) - 1)

    def constant(self, value: Array) -> TensorNumber:
        """A new tensor whose value is known."""
        number = self.tensor(jax.typeof(value))
        self.constants[number] = value
        return number

    def emit(
        self, equation: Equation | None, inputs: Sequence[TensorNumber], path: str, policy: Policy | None = None
    ) -> tuple[TensorNumber, ...]:
        """Append an operator; returns the numbers of its outputs."""
        avals = [self.tensors[t].aval for t in inputs] if equation is None else [v.aval for v in equation.outvars]
        bits = position_bits(equation, avals, [self.tensors[t].bits for t in inputs])
        outputs = tuple(self.tensor(aval, width) for aval, width in zip(avals, bits, strict=True))
        self.operators.append(Operator(equation, tuple(inputs), outputs, path, policy=policy))
        return outputs

    def read(
        self,
        closed: AnyJaxpr,
        inputs: Sequence[TensorNumber],
        *,
        path: str = "",
        boundaries: bool = False,
        policy: Policy | None = None,
    ) -> list[TensorNumber]:
        """Append a traced program over ``inputs``; returns the numbers of its outputs.

        ``boundaries`` marks the borders of inlined calls (needed where the result is differentiated); ``policy`` is
        that of the ``memory_encoded`` call around it.
        """
        jaxpr, consts = _compat.open_jaxpr(closed)
        env: dict[Atom, TensorNumber] = dict(zip(jaxpr.constvars, map(self.constant, consts), strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))

        for eqn in jaxpr.eqns:
            here = join_paths(path, _compat.named_scope_of(eqn), _inner_scope(eqn))
            operands = [env[a] for a in eqn.invars if not _compat.is_literal(a)]
            inner = _wrapped_program(eqn, self._calls)
            if inner is None:
                outputs: Sequence[TensorNumber] = self.emit(eqn, operands, here, policy)
            else:
                arguments = [self.constant(a.val) if _compat.is_literal(a) else env[a] for a in eqn.invars]
                read = self.read_call if boundaries else self.read
                outputs = read(inner, arguments, path=here, policy=encoded_policy(eqn) or policy)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [self.constant(a.val) if _compat.is_literal(a) else env[a] for a in jaxpr.outvars]

    def read_call(
        self, inner: AnyJaxpr, arguments: Sequence[TensorNumber], *, path: str, policy: Policy | None
    ) -> list[TensorNumber]:
        """``read`` of a call that is differentiated.

        There is a call boundary on the arguments that the call uses more than once, or that are one tensor.
        """
        jaxpr, _ = _compat.open_jaxpr(inner)
        uses = Counter(atom for eqn in jaxpr.eqns for atom in eqn.invars if not _compat.is_literal(atom))
        arguments = list(arguments)
        many = [
            k
            for k, var in enumerate(jaxpr.invars)
            if (uses[var] > 1 or arguments.count(arguments[k]) > 1)
            and arguments[k] not in self.constants
            and is_differentiable(var.aval)
        ]
        if many:
            arguments = replaced(arguments, many, self.emit(None, [arguments[k] for k in many], path))
        return self.read(inner, arguments, path=path, boundaries=True, policy=policy)

    def build(self, inputs: Sequence[TensorNumber], outputs: Sequence[TensorNumber]) -> Graph:
        """The graph, without the operators that nothing reads."""
        return Graph(
            tensors=tuple(self.tensors),
            operators=live(self.operators, outputs),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            constants=dict(self.constants),
        )


def trace(function: Callable[..., PyTree], *avals: Shaped) -> Graph:
    """Trace a pure function of arrays (or shapes) into a graph.

    Arguments and results are flat: one array each. Constants that the function closes over are found at
    ``graph.constants``.
    """
    return read_graph(jax.make_jaxpr(function)(*avals))


def read_graph(
    closed: AnyJaxpr, inline_shards: bool = False, policy: Policy | None = None, boundaries: bool = True, path: str = ""
) -> Graph:
    """Read a traced program as a graph; wrappers inlined, dead operators dropped.

    Args:
      inline_shards: as ``GraphBuilder`` has it.
      policy, boundaries, path: as ``GraphBuilder.read`` has them.
    """
    closed = _compat.without_references(closed)
    jaxpr, _ = _compat.open_jaxpr(closed)
    builder = GraphBuilder(inline_shards=inline_shards)
    inputs = [builder.tensor(var.aval) for var in jaxpr.invars]
    return builder.build(inputs, builder.read(closed, inputs, path=path, boundaries=boundaries, policy=policy))


def equations_in(equations: Iterable[Equation]) -> Iterator[Equation]:
    """Give equations, each with those of the programs in it behind it."""
    for equation in equations:
        yield equation
        for program in _compat.inner_programs(equation):
            yield from equations_in(_compat.open_jaxpr(program)[0].eqns)


def bodies(op: Operator) -> list[AnyJaxpr]:
    """Return the programs that an operator runs on its last operands, whose results are its own: branches, or one."""
    value = op.params.get(BODIES.get(op.name, ""), ())
    return list(value) if isinstance(value, tuple) else [value]


def all_operands(equation: Equation, operands: Sequence[T]) -> list[T | Array]:
    """Return values of all operands of an equation from those of the operands that are not literals."""
    given = iter(operands)
    return [atom.val if _compat.is_literal(atom) else next(given) for atom in equation.invars]


def without_literals(equation: Equation, values: Sequence[T]) -> list[T]:
    """Return those of the values of all operands, or of what belongs to them, that are not of literals."""
    return [value for atom, value in zip(equation.invars, values, strict=True) if not _compat.is_literal(atom)]


def with_copies(graph: Graph, positions: Sequence[int]) -> Graph:
    """Return the same program, with operators that copy some of its results."""
    builder = GraphBuilder(graph.tensors, graph.constants)
    builder.operators = list(graph.operators)
    copies = [builder.emit(None, [graph.outputs[k]], "")[0] for k in positions]
    return builder.build(graph.inputs, replaced(graph.outputs, positions, copies)) if positions else graph


def replaced(values: Sequence[T], positions: Sequence[int], others: Sequence[T]) -> list[T]:
    """Return values of which those at some positions are others."""
    changed = dict(zip(positions, others, strict=True))
    return [changed.get(k, value) for k, value in enumerate(values)]


def live(operators: Sequence[Operator], wanted: Iterable[TensorNumber]) -> tuple[Operator, ...]:
    """The operators that ``wanted`` tensors or side effects depend on."""
    return needed(operators, wanted, Operator.ends, always=lambda op: op.has_effects)[0]


def dependents(operators: Iterable[Operator], sources: Iterable[TensorNumber]) -> set[TensorNumber]:
    """The tensors that depend on some others, and these."""
    reached = set(sources)
    for op in operators:
        if not reached.isdisjoint(op.inputs):
            reached.update(op.outputs)
    return reached


def behind_rules(operators: Sequence[Operator]) -> set[TensorNumber]:
    """Return the values that derivative rules of a user's make, and all that follow from these."""
    return dependents(operators, [t for op in operators if op.name == "custom_vjp_call" for t in op.outputs])


def is_differentiable(aval: Shaped) -> bool:
    """Return whether an array can carry a cotangent."""
    return jax.dtypes.issubdtype(aval.dtype, np.inexact)


def inside(path: str, module: str) -> str:
    """Return the path of a module that is named from outside of ``path``, or inside it.

    Example:
      >>> inside("Net/encoder", "encoder/layers"), inside("Net", "layers")
      ('Net/encoder/layers', 'Net/layers')
    """
    parts, more = path.split("/"), module.split("/")
    start = parts.index(more[0]) if more[0] in parts else len(parts)
    return "/".join(part for part in (*parts[:start], *more) if part)


def join_paths(*paths: str) -> str:
    """Join module paths with ``/``, leaving out empty ones."""
    return "/".join(p for p in paths if p)


def _inner_scope(equation: Equation) -> str:
    """Return the module, inside of that of a checkpoint, in which all that it runs lies; empty for other equations."""
    if equation.primitive.name not in CHECKPOINTS:
        return ""
    equations = [eqn for program in _compat.inner_programs(equation) for eqn in _compat.open_jaxpr(program)[0].eqns]
    paths = [join_paths(_compat.named_scope_of(eqn), _inner_scope(eqn)) for eqn in equations]
    return os.path.commonpath(filter(None, paths)) if any(paths) else ""


def encoded_policy(equation: Equation) -> Policy | None:
    """The policy of a nested ``memory_encoded`` call, or None for any other equation."""
    if equation.primitive.name != "custom_vjp_call":
        return None
    body, _ = _compat.open_jaxpr(equation.params["call_jaxpr"])
    name = str(body.eqns[0].params.get("name", "")) if len(body.eqns) == 1 else ""
    return by_word(name.removeprefix(ENCODED_MARK)) if name.startswith(ENCODED_MARK) else None


def _wrapped_program(equation: Equation, calls: Mapping[str, str]) -> AnyJaxpr | None:
    """The program inside an equation that only wraps it, else None."""
    key = calls.get(equation.primitive.name)
    if key is not None and _compat.has_default_sharding(equation.params):
        return equation.params[key]
    return equation.params["call_jaxpr"] if encoded_policy(equation) is not None else None
