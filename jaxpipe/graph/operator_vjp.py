"""The VJP of one operator, cut into what depends on its cotangents and what does not.

The halves are made once for equal operators and then placed into any graph (``Halves`` uses numbers of its own).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax import core
from jax.extend.core import ClosedJaxpr

from jaxpipe import _compat
from jaxpipe.array_types import AbstractArray, Array, PyTreeDef, TensorNumber
from jaxpipe.graph import sharding_annotations, target_products
from jaxpipe.graph.axis_names import NO_AXES, TracedIn
from jaxpipe.graph.graph import (
    Graph,
    GraphBuilder,
    Operator,
    Tensor,
    dependents,
    is_differentiable,
    live,
    ordered,
)
from jaxpipe.graph.primitives import CHECKPOINTS, CONTROL, SHARDS
from jaxpipe.graph.save_policy import SavePolicy


@dataclass(frozen=True, eq=False)
class Halves:
    """Both halves of an operator's VJP.

    Attributes:
      tensors, constants: by local number.
      inputs, outputs: local numbers of the operator's operands and results.
      primal: operators that make ``outputs`` and ``needs``.
      cotangents_in: positions among the outputs whose cotangents are read.
      cotangents_out: positions among the inputs that receive one, in the order in which JAX adds them up; one that
        receives several terms occurs several times.
      program: ``(*needs, *cotangents_in) -> cotangents_out``.
    """

    tensors: tuple[Tensor, ...]
    constants: dict[TensorNumber, Array]
    inputs: tuple[TensorNumber, ...]
    outputs: tuple[TensorNumber, ...]
    primal: tuple[Operator, ...]
    needs: tuple[TensorNumber, ...]
    cotangents_in: tuple[int, ...]
    cotangents_out: tuple[int, ...]
    program: Graph


def differentiate(
    op: Operator,
    avals: Sequence[AbstractArray],
    varied: Sequence[int],
    useful: Sequence[int],
    shape: Mapping[str, int] | None = None,
    traced_in: TracedIn = NO_AXES,
    ruled: Sequence[int] = (),
) -> Halves:
    """Trace the VJP that JAX has for ``op`` with respect to the operands at positions ``varied``, and cut it.

    The cut lies where ``jax.vjp`` returns: what a derivative rule computes in its backward pass stays backward work,
    whether or not it depends on a cotangent, and reads what the rule's forward pass returned.
    Outputs at other positions than ``useful`` have no cotangent. A zero in its place would do for finite numbers only.
    ``shape``: the axes over which stages are sharded, if annotations of others in a rule are dropped. ``traced_in``:
    in whose context the operator was traced. ``ruled``: positions of operands behind which there is a rule of a
    user's, which JAX calls for a cotangent of zeros, too.
    """
    equation, is_sharded = _compat.without_scope(op.equation), bool(shape)
    shape = shape if _compat.inner_programs(equation) else None  # others have no rule of a user's
    carried = [k for k in useful if is_differentiable(equation.outvars[k].aval)]
    tangents = [equation.outvars[k].aval.to_tangent_aval() for k in carried]
    count = len(equation.outvars)
    evaluate = _compat.evaluate_equation
    if shape is not None:
        evaluate = functools.partial(sharding_annotations.evaluate, shape=shape)
    run = functools.partial(evaluate, equation)
    if (saves := policy_within(op)) is not None:
        run = jax.checkpoint(run, policy=saves)
    operands, cotangents = list(avals), tangents
    if traced_in.explicit:  # a stage's own axes are automatic
        operands, cotangents = (list(map(sharding_annotations.without_mesh, x)) for x in (avals, tangents))
    pullback: PyTreeDef | None = None

    def forward(*inputs: Array) -> list[Array]:
        def primal(*operands: Array) -> tuple[list[Array], list[Array]]:
            values = list(inputs)
            for k, value in zip(varied, operands, strict=True):
                values[k] = value
            outputs = run(values)
            return [outputs[k] for k in carried], outputs

        nonlocal pullback
        _, saved, outputs = jax.vjp(primal, *(inputs[k] for k in varied), has_aux=True)
        residuals, pullback = jax.tree.flatten(saved)
        return [*outputs, *residuals]

    def backward(residuals: Sequence[Array], cotangents: Sequence[Array]) -> Sequence[Array]:
        return jax.tree.unflatten(pullback, residuals)(list(cotangents))

    def both() -> tuple[ClosedJaxpr, ClosedJaxpr]:
        first = _compat.trace_without_scope(forward, *operands)
        residuals = [atom.aval for atom in _compat.open_jaxpr(first)[0].outvars[count:]]
        return first, _compat.trace_without_scope(backward, residuals, cotangents)

    traced = both() if shape is None else sharding_annotations.rule_within_stage(op.label, both, shape, traced_in)
    first = target_products.for_target(traced[0], may_cut=False)
    closed = target_products.for_target(traced[1], may_cut=not is_sharded)
    builder = GraphBuilder(inline_rules=True)
    inputs = [builder.tensor(aval) for aval in avals]
    results = builder.read(first, inputs)
    outputs, residuals = results[:count], results[count:]
    start = len(builder.operators)
    cotangents = [builder.tensor(aval) for aval in tangents]
    gradients = list(zip(varied, builder.read(closed, [*residuals, *cotangents]), strict=True))
    seeds = dict(zip(carried, cotangents, strict=True))
    late = [t for part in builder.operators[start:] if part.inputs for t in part.outputs]  # the others are constants
    if op.name == "custom_vjp_call":  # what the user's own rule adds up stays one cotangent
        return _split(builder, inputs, outputs, seeds, gradients, late, in_order=True, ruled=ruled)
    sums = {id(eqn) for eqn in _compat.open_jaxpr(closed)[0].eqns if eqn.primitive.name == "add_any"}
    terms = {t: part for part in builder.operators if id(part.equation) in sums for t in part.outputs}
    apart = [(k, t) for k, g in gradients for t in _summands(g, terms)]
    return _split(builder, inputs, outputs, seeds, apart, late)


def policy_within(op: Operator) -> SavePolicy | None:
    """Return the save policy by which the program of a loop, a branch or a checkpoint stores some of what it makes."""
    if op.policy is None or op.name not in {**CHECKPOINTS, **CONTROL, **SHARDS}:
        return None
    return op.policy.saves if op.saved else None


def _summands(gradient: TensorNumber, sums: Mapping[TensorNumber, Operator]) -> list[TensorNumber]:
    """The terms of a gradient, which JAX adds one by one to whatever cotangent the operand has already."""
    if gradient not in sums:
        return [gradient]
    total, last = sums[gradient].inputs
    return [*_summands(total, sums), last]


def from_rule(
    forward: Callable[..., tuple[Sequence[Array], Sequence[Array]]],
    backward: Callable[[Sequence[Array], Sequence[Array | None]], Sequence[Array | None]],
    avals: Sequence[AbstractArray],
    varied: Sequence[int] = (0,),
    useful: Sequence[int] = (0,),
    bits: Sequence[int] = (),
    traced_in: TracedIn = NO_AXES,
) -> Halves:
    """The halves made of a hand-written pair; arguments as ``differentiate`` has them.

    Args:
      forward: ``operands -> (results, residuals)``.
      backward: ``(residuals, cotangents of results) -> cotangents of operands``; None for one that is zero.
      bits: bits that an element of each residual needs; left out: those of its type.
    """
    builder = GraphBuilder()
    operands = [builder.tensor(aval) for aval in avals]
    count, given = 0, list[int]()

    def both(*values: Array) -> list[Array]:
        nonlocal count
        results, kept = forward(*values)
        count = len(results)
        return [*results, *kept]

    def gradients_of(kept: Sequence[Array], received: Sequence[Array]) -> list[Array]:
        cotangents = dict(zip(seeds, received, strict=True))
        gradients = backward(kept, [cotangents.get(k) for k in range(count)])
        given.extend(k for k in varied if gradients[k] is not None)
        return [g for k in given if (g := gradients[k]) is not None]

    plain = sharding_annotations.without_mesh if traced_in.explicit else (lambda aval: aval)
    outputs = builder.read(_compat.trace_without_scope(both, *map(plain, avals)), operands)
    results, residuals = outputs[:count], outputs[count:]
    for t, width in zip(residuals, bits, strict=False):
        builder.tensors[t] = replace(builder.tensors[t], bits=width)
    tangents = {k: builder.tensors[results[k]].aval.to_tangent_aval() for k in useful}
    seeds = {k: builder.tensor(aval) for k, aval in tangents.items() if is_differentiable(aval)}
    kept, received = ([plain(builder.tensors[t].aval) for t in ts] for ts in (residuals, seeds.values()))
    closed = _compat.trace_without_scope(gradients_of, kept, received)
    start = len(builder.operators)
    gradients = builder.read(closed, [*residuals, *seeds.values()])
    # What the rule does in its backward pass is meant to be done there, with or without the cotangent; but constants.
    late = [t for op in builder.operators[start:] if op.inputs for t in op.outputs]
    return _split(builder, operands, results, seeds, list(zip(given, gradients, strict=True)), late)


def _split(
    builder: GraphBuilder,
    inputs: Sequence[TensorNumber],
    outputs: Sequence[TensorNumber],
    cotangents: dict[int, TensorNumber],
    gradients: Sequence[tuple[int, TensorNumber]],
    late: Sequence[TensorNumber] = (),
    in_order: bool = False,
    ruled: Sequence[int] = (),
) -> Halves:
    """Sort the operators of a traced VJP by whether they depend on a cotangent, or on one of the tensors ``late``.

    ``gradients`` are pairs of an operand's position and a cotangent for it.
    JAX adds up cotangents in the order in which it makes them; those of a ``custom_vjp`` in the order of its operands.
    """
    dependent = dependents(builder.operators, (*cotangents.values(), *late))
    summands = _nonzero_gradients(builder, gradients, in_order, ruled)
    results = [g for _, g in summands]
    forward = tuple(op for op in builder.operators if dependent.isdisjoint(op.outputs))
    backward = tuple(op for op in live(builder.operators, results) if not dependent.isdisjoint(op.outputs))
    read = ordered((*(t for op in backward for t in op.inputs), *results))
    written = dependent.union(*(op.outputs for op in backward))
    needs = tuple(t for t in read if t not in written and t not in builder.constants)
    used = [(k, c) for k, c in cotangents.items() if c in read]
    if summands and not used:  # a derivative of the user's own that does not look at its cotangent
        used = list(cotangents.items())
    program = Graph(
        tensors=tuple(builder.tensors),
        operators=backward,
        inputs=(*needs, *(c for _, c in used)),
        outputs=tuple(results),
        constants={t: builder.constants[t] for t in read if t in builder.constants},
    )
    return Halves(
        tensors=tuple(builder.tensors),
        constants=dict(builder.constants),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        primal=live(forward, [*outputs, *needs]),
        needs=needs,
        cotangents_in=tuple(k for k, _ in used),
        cotangents_out=tuple(k for k, _ in summands),
        program=program,
    )


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
