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
from jaxpipe.array_types import AbstractArray, AnyJaxpr, Array, PyTreeDef, TensorNumber
from jaxpipe.graph import sharding_annotations, target_products
from jaxpipe.graph.axis_names import NO_AXES, TracedIn
from jaxpipe.graph.graph import Graph, GraphBuilder, Operator, dependents, is_differentiable, live, ordered, replaced
from jaxpipe.graph.primitives import CHECKPOINTS, CONTROL, SHARDS
from jaxpipe.graph.save_policy import SavePolicy


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


def differentiate(op: Operator, avals: Sequence[AbstractArray], wanted: Wanted) -> Halves:
    """Trace the VJP that JAX has for ``op``, and cut it.

    The cut lies where ``jax.vjp`` returns: what a derivative rule computes in its backward pass stays backward work,
    whether or not it depends on a cotangent, and reads what the rule's forward pass returned.
    """
    equation, varied = _compat.without_scope(op.equation), wanted.varied
    shape = wanted.shape if _compat.inner_programs(equation) else None  # others have no rule of a user's
    carried = [k for k in wanted.useful if is_differentiable(equation.outvars[k].aval)]
    tangents = {k: equation.outvars[k].aval.to_tangent_aval() for k in carried}
    count = len(equation.outvars)
    evaluate = _compat.evaluate_equation
    if shape is not None:
        evaluate = functools.partial(sharding_annotations.evaluate, shape=shape)
    run = functools.partial(evaluate, equation)
    if (saves := policy_within(op)) is not None:
        run = jax.checkpoint(run, policy=saves)
    pullback: PyTreeDef | None = None

    def forward(*inputs: Array) -> list[Array]:
        def primal(*operands: Array) -> tuple[list[Array], list[Array]]:
            outputs = run(replaced(inputs, varied, operands))
            return [outputs[k] for k in carried], outputs

        nonlocal pullback
        _, saved, outputs = jax.vjp(primal, *(inputs[k] for k in varied), has_aux=True)
        residuals, pullback = jax.tree.flatten(saved)
        return [*outputs, *residuals]

    def backward(residuals: Sequence[Array], cotangents: Sequence[Array]) -> Sequence[Array]:
        return jax.tree.unflatten(pullback, residuals)(list(cotangents))

    def both() -> tuple[ClosedJaxpr, ClosedJaxpr]:
        first = _compat.trace_without_scope(forward, *map(wanted.plain, avals))
        kept, received = _residuals(first, count), list(map(wanted.plain, tangents.values()))
        return first, _compat.trace_without_scope(backward, kept, received)

    within_stage = functools.partial(sharding_annotations.rule_within_stage, op.label, both)
    traced = both() if shape is None else within_stage(shape, wanted.traced_in)
    first = target_products.for_target(traced[0], may_cut=False)
    second = target_products.for_target(traced[1], may_cut=not wanted.shape)
    if op.name == "custom_vjp_call":  # what the user's own rule adds up stays one cotangent
        return _halves(first, second, avals, count, tangents, varied, in_order=True, ruled=wanted.ruled)
    return _halves(first, second, avals, count, tangents, varied, by_terms=True)


def _residuals(first: AnyJaxpr, count: int) -> list[AbstractArray]:
    """Return the types of what a forward program returns behind so many results."""
    return [atom.aval for atom in _compat.open_jaxpr(first)[0].outvars[count:]]


def policy_within(op: Operator) -> SavePolicy | None:
    """Return the save policy by which the program of a loop, a branch or a checkpoint stores some of what it makes."""
    if op.policy is None or op.name not in {**CHECKPOINTS, **CONTROL, **SHARDS}:
        return None
    return op.policy.saves if op.saved else None


def from_rule(
    forward: Callable[..., tuple[Sequence[Array], Sequence[Array]]],
    backward: Callable[[Sequence[Array], Sequence[Array | None]], Sequence[Array | None]],
    avals: Sequence[AbstractArray],
    wanted: Wanted = Wanted(),
    bits: Sequence[int] = (),
) -> Halves:
    """The halves made of a hand-written pair; arguments as ``differentiate`` has them.

    Args:
      forward: ``operands -> (results, residuals)``.
      backward: ``(residuals, cotangents of results) -> cotangents of operands``; None for one that is zero.
      bits: bits that an element of each residual needs; left out: those of its type.
    """
    count, given = 0, list[int]()

    def both(*values: Array) -> list[Array]:
        nonlocal count
        results, kept = forward(*values)
        count = len(results)
        return [*results, *kept]

    def gradients_of(kept: Sequence[Array], received: Sequence[Array]) -> list[Array]:
        cotangents = dict(zip(tangents, received, strict=True))
        gradients = backward(kept, [cotangents.get(k) for k in range(count)])
        given.extend(k for k in wanted.varied if gradients[k] is not None)
        return [g for k in given if (g := gradients[k]) is not None]

    first = _compat.trace_without_scope(both, *map(wanted.plain, avals))
    results = _compat.open_jaxpr(first)[0].outvars
    tangents = {k: results[k].aval.to_tangent_aval() for k in wanted.useful if is_differentiable(results[k].aval)}
    received = list(map(wanted.plain, tangents.values()))
    second = _compat.trace_without_scope(gradients_of, _residuals(first, count), received)
    return _halves(first, second, avals, count, tangents, given, bits)


def _halves(
    first: AnyJaxpr,
    second: AnyJaxpr,
    avals: Sequence[AbstractArray],
    count: int,
    tangents: Mapping[int, AbstractArray],
    given: Sequence[int],
    bits: Sequence[int] = (),
    *,
    by_terms: bool = False,
    in_order: bool = False,
    ruled: Sequence[int] = (),
) -> Halves:
    """Sort the operators of a traced VJP by whether they depend on a cotangent, or run in the backward program.

    JAX adds up cotangents in the order in which it makes them; those of a ``custom_vjp`` in the order of its operands.

    Args:
      first: ``operands -> (*results, *residuals)``, of which so many (``count``) are results.
      second: ``(*residuals, *cotangents) -> gradients``.
      avals: of the operands.
      tangents: by position, types of the results that have a cotangent.
      given: positions of the operands that the gradients are of.
      bits: as ``from_rule`` has them.
      by_terms: whether a gradient that is a sum is several cotangents, which JAX adds to others one by one.
      in_order, ruled: as ``_nonzero_gradients`` has them.
    """
    builder = GraphBuilder(inline_rules=True)
    operands = [builder.tensor(aval) for aval in avals]
    results = builder.read(first, operands)
    for t, width in zip(results[count:], bits, strict=False):
        builder.tensors[t] = replace(builder.tensors[t], bits=width)
    start = len(builder.operators)
    cotangents = {k: builder.tensor(aval) for k, aval in tangents.items()}
    gradients = list(zip(given, builder.read(second, [*results[count:], *cotangents.values()]), strict=True))
    if by_terms:
        sums = {id(eqn) for eqn in _compat.open_jaxpr(second)[0].eqns if eqn.primitive.name == "add_any"}
        terms = {t: op for op in builder.operators if id(op.equation) in sums for t in op.outputs}
        gradients = [(k, t) for k, g in gradients for t in _summands(g, terms)]
    # What a rule does in its backward pass is meant to be done there, with or without the cotangent; but constants.
    late = [t for op in builder.operators[start:] if op.inputs for t in op.outputs]
    dependent = dependents(builder.operators, (*cotangents.values(), *late))
    summands = _nonzero_gradients(builder, gradients, in_order, ruled)
    wanted = [g for _, g in summands]
    backward = tuple(op for op in live(builder.operators, wanted) if not dependent.isdisjoint(op.outputs))
    read = ordered((*(t for op in backward for t in op.inputs), *wanted))
    written = dependent.union(*(op.outputs for op in backward))
    needs = [t for t in read if t not in written and t not in builder.constants]
    used = [(k, c) for k, c in cotangents.items() if c in read]
    if summands and not used:  # a derivative of the user's own that does not look at its cotangent
        used = list(cotangents.items())
    builder.operators = [op for op in builder.operators if dependent.isdisjoint(op.outputs)]
    primal = builder.build(operands, [*results[:count], *needs])
    return Halves(
        primal=primal,
        cotangents_in=tuple(k for k, _ in used),
        cotangents_out=tuple(k for k, _ in summands),
        program=replace(
            primal,
            operators=backward,
            inputs=(*needs, *(c for _, c in used)),
            outputs=tuple(wanted),
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
    builder: GraphBuilder, gradients: Sequence[tuple[int, TensorNumber]], in_order: bool, ruled: Sequence[int]
) -> list[tuple[int, TensorNumber]]:
    """Return the gradients that are not known to be zero, ``in_order`` or in the order in which they are made.

    Those of ``ruled`` operands are among them.
    """
    zeros = {t for op in builder.operators if writes_zeros(op) for t in op.outputs}
    known = {g: builder.constants[g] for _, g in gradients if g in builder.constants}
    zeros |= {g for g, value in known.items() if not isinstance(value, core.Tracer) and not np.any(value)}
    nonzero = [(k, g) for k, g in gradients if g not in zeros or k in ruled]
    made_at = {t: position for position, op in enumerate(builder.operators) for t in op.outputs}
    return nonzero if in_order else sorted(nonzero, key=lambda item: made_at.get(item[1], -1))


def writes_zeros(op: Operator) -> bool:
    """Return whether an operator writes zeros: JAX writes them for a gradient that does not exist."""
    return op.name == "broadcast_in_dim" and len(op.literals) == 1 and not np.any(op.literals[0])
