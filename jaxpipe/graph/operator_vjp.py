"""The VJP of one operator, cut into what depends on its cotangents and what does not.

The halves are made once for equal operators and then placed into any graph (``Halves`` uses numbers of its own).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np
from jax import core
from jax.extend.core import ClosedJaxpr

from jaxpipe import _compat
from jaxpipe.array_types import AbstractArray, AnyJaxpr, Array, Equation, PyTreeDef, TensorNumber
from jaxpipe.graph import sharding_annotations, target_products
from jaxpipe.graph.axis_names import NO_AXES, TracedIn
from jaxpipe.graph.graph import Graph, GraphBuilder, Operator, dependents, is_differentiable, live, ordered, replaced
from jaxpipe.graph.primitives import CHECKPOINTS, CONTROL, SHARDS
from jaxpipe.graph.save_policy import SavePolicy


#: Runs an operator on its operands, but literals, and returns its results.
Run = Callable[..., list[Array]]


@dataclass(frozen=True, eq=False)
class Halves:
    """Both halves of an operator's VJP.

    Attributes:
      primal: the operator, and what its backward pass needs: ``operands -> (*results, *needs)``.
      cotangents_in: positions among the results whose cotangents are read.
      cotangents_out: positions among the operands that receive one, in the order in which JAX adds them up; one that
        receives several terms occurs several times.
      program: ``(*needs, *cotangents_in) -> cotangents_out``.
    """

    primal: Graph
    cotangents_in: tuple[int, ...]
    cotangents_out: tuple[int, ...]
    program: Graph


@dataclass(frozen=True)
class Wanted:
    """The cotangents that are wanted of an operator, and the stage that it is in.

    Attributes:
      varied: positions of the operands that receive one.
      useful: positions of the results that have one. A zero in the place of others would do for finite numbers only.
      ruled: positions of operands behind which there is a rule of a user's, which JAX calls for a cotangent of zeros,
        too.
      shape: the axes over which stages are sharded, if annotations of others in a rule are dropped.
      traced_in: in whose context the operator was traced.
    """

    varied: tuple[int, ...] = (0,)
    useful: tuple[int, ...] = (0,)
    ruled: tuple[int, ...] = ()
    shape: Mapping[str, int] | None = field(default=None, hash=False)
    traced_in: TracedIn = NO_AXES

    def plain(self, aval: AbstractArray) -> AbstractArray | jax.ShapeDtypeStruct:
        """The type without the mesh of a model with explicit axes: those of a stage are automatic."""
        return sharding_annotations.without_mesh(aval) if self.traced_in.explicit else aval


def differentiate(
    op: Operator, avals: Sequence[AbstractArray], wanted: Wanted, ruled: Run | None = None, bits: int | None = None
) -> Halves:
    """Trace the VJP that JAX has for ``op``, and cut it.

    The cut lies where ``jax.vjp`` returns: what a derivative rule computes in its backward pass stays backward work,
    whether or not it depends on a cotangent, and reads what the rule's forward pass returned.

    Args:
      avals: of the operands.
      ruled: computes what ``op`` does, and has a derivative of its own (``jax.custom_vjp``), which takes its place.
      bits: bits that an element of a residual of integers needs; left out: those of its type.
    """
    equation, varied = _compat.without_scope(op.equation), wanted.varied
    has_rules = ruled is None and bool(_compat.inner_programs(equation))  # others have none of a user's
    shape = wanted.shape if has_rules else None
    run = ruled or _as_function(op, equation, shape)
    tangents = _tangents(op, wanted)
    pullback: PyTreeDef | None = None

    def forward(*inputs: Array) -> list[Array]:
        def primal(*operands: Array) -> tuple[list[Array], list[Array]]:
            outputs = run(*replaced(inputs, varied, operands))
            return [outputs[k] for k in tangents], outputs

        nonlocal pullback
        _, saved, outputs = jax.vjp(primal, *(inputs[k] for k in varied), has_aux=True)
        residuals, pullback = jax.tree.flatten(saved)
        return [*outputs, *residuals]

    def backward(residuals: Sequence[Array], cotangents: Sequence[Array]) -> Sequence[Array]:
        return jax.tree.unflatten(pullback, residuals)(list(cotangents))

    def both() -> tuple[ClosedJaxpr, ClosedJaxpr]:
        first = _compat.trace_without_scope(forward, *map(wanted.plain, avals))
        kept = [atom.aval for atom in _compat.open_jaxpr(first)[0].outvars[len(equation.outvars) :]]
        return first, _compat.trace_without_scope(backward, kept, list(map(wanted.plain, tangents.values())))

    within_stage = functools.partial(sharding_annotations.rule_within_stage, op.label, both)
    traced = both() if shape is None else within_stage(shape, wanted.traced_in)
    first = target_products.for_target(traced[0], may_cut=False)
    second = target_products.for_target(traced[1], may_cut=not wanted.shape)
    by_terms = ruled is None and op.name != "custom_vjp_call"  # what a rule adds up stays one cotangent
    return _halves(op, avals, wanted, first, second, bits, by_terms)


def _tangents(op: Operator, wanted: Wanted) -> dict[int, AbstractArray]:
    """Return the types of the cotangents of an operator's results, by position."""
    avals = {k: op.equation.outvars[k].aval for k in wanted.useful}
    return {k: aval.to_tangent_aval() for k, aval in avals.items() if is_differentiable(aval)}


def _as_function(op: Operator, equation: Equation, shape: Mapping[str, int] | None) -> Run:
    """Return a function of an operator's operands, which stores what the save policy around it says."""

    def run(*operands: Array) -> list[Array]:
        if shape is None:
            return _compat.evaluate_equation(equation, operands)
        return sharding_annotations.evaluate(equation, operands, shape)

    saves = policy_within(op)
    return run if saves is None else jax.checkpoint(run, policy=saves)


def policy_within(op: Operator) -> SavePolicy | None:
    """Return the save policy by which the program of a loop, a branch or a checkpoint stores some of what it makes."""
    if op.policy is None or op.name not in {**CHECKPOINTS, **CONTROL, **SHARDS}:
        return None
    return op.policy.saves if op.saved else None


def _halves(
    op: Operator,
    avals: Sequence[AbstractArray],
    wanted: Wanted,
    first: AnyJaxpr,
    second: AnyJaxpr,
    bits: int | None,
    by_terms: bool,
) -> Halves:
    """Sort the operators of a traced VJP by whether they depend on a cotangent, or run in the backward program.

    JAX adds up cotangents in the order in which it makes them; those of a ``custom_vjp`` in the order of its operands.

    Args:
      op, avals, wanted, bits: as ``differentiate`` has them.
      first: ``operands -> (*results, *residuals)``.
      second: ``(*residuals, *cotangents) -> gradients``.
      by_terms: whether a gradient that is a sum is several cotangents, which JAX adds to others one by one.
    """
    builder = GraphBuilder(inline_rules=True)
    operands = [builder.tensor(aval) for aval in avals]
    outputs, count = builder.read(first, operands), len(op.outputs)
    results, residuals = outputs[:count], outputs[count:]
    for t in residuals:
        if bits is not None and np.issubdtype(builder.tensors[t].dtype, np.integer):
            builder.tensors[t] = replace(builder.tensors[t], bits=bits)
    start = len(builder.operators)
    cotangents = {k: builder.tensor(aval) for k, aval in _tangents(op, wanted).items()}
    gradients = list(zip(wanted.varied, builder.read(second, [*residuals, *cotangents.values()]), strict=True))
    if by_terms:
        sums = {id(eqn) for eqn in _compat.open_jaxpr(second)[0].eqns if eqn.primitive.name == "add_any"}
        terms = {t: op for op in builder.operators if id(op.equation) in sums for t in op.outputs}
        gradients = [(k, t) for k, g in gradients for t in _summands(g, terms)]
    # What a rule does in its backward pass is meant to be done there, with or without the cotangent; but constants.
    late = [t for op in builder.operators[start:] if op.inputs for t in op.outputs]
    dependent = dependents(builder.operators, (*cotangents.values(), *late))
    ruled = wanted.ruled if op.name == "custom_vjp_call" else None
    summands = _nonzero_gradients(builder, gradients, ruled)
    produced = [g for _, g in summands]
    backward = tuple(op for op in live(builder.operators, produced) if not dependent.isdisjoint(op.outputs))
    read = ordered((*(t for op in backward for t in op.inputs), *produced))
    written = dependent.union(*(op.outputs for op in backward))
    needs = [t for t in read if t not in written and t not in builder.constants]
    used = [(k, c) for k, c in cotangents.items() if c in read]
    if summands and not used:  # a derivative of the user's own that does not look at its cotangent
        used = list(cotangents.items())
    builder.operators = [op for op in builder.operators if dependent.isdisjoint(op.outputs)]
    primal = builder.build(operands, [*results, *needs])
    return Halves(
        primal=primal,
        cotangents_in=tuple(k for k, _ in used),
        cotangents_out=tuple(k for k, _ in summands),
        program=replace(
            primal,
            operators=backward,
            inputs=(*needs, *(c for _, c in used)),
            outputs=tuple(produced),
            constants={t: builder.constants[t] for t in read if t in builder.constants},
        ),
    )


def _summands(gradient: TensorNumber, sums: Mapping[TensorNumber, Operator]) -> list[TensorNumber]:
    """The terms of a gradient, which JAX adds one by one to whatever cotangent the operand has already."""
    if gradient not in sums:
        return [gradient]
    total, last = sums[gradient].inputs
    return [*_summands(total, sums), last]


def _nonzero_gradients(
    builder: GraphBuilder, gradients: Sequence[tuple[int, TensorNumber]], ruled: Sequence[int] | None
) -> list[tuple[int, TensorNumber]]:
    """Return the gradients that are not known to be zero, in the order in which they are made.

    Args:
      ruled: operands of a ``custom_vjp`` that have a gradient in any case; all are then in the order of the operands.
    """
    zeros = {t for op in builder.operators if writes_zeros(op) for t in op.outputs}
    known = {g: builder.constants[g] for _, g in gradients if g in builder.constants}
    zeros |= {g for g, value in known.items() if not isinstance(value, core.Tracer) and not np.any(value)}
    if ruled is not None:
        return [(k, g) for k, g in gradients if g not in zeros or k in ruled]
    made_at = {t: position for position, op in enumerate(builder.operators) for t in op.outputs}
    return sorted(((k, g) for k, g in gradients if g not in zeros), key=lambda item: made_at.get(item[1], -1))


def writes_zeros(op: Operator) -> bool:
    """Return whether an operator writes zeros: JAX writes them for a gradient that does not exist."""
    return op.name == "broadcast_in_dim" and len(op.literals) == 1 and not np.any(op.literals[0])
