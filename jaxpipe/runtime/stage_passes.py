"""The passes of a stage over one micro-batch, on values by tensor number: what both runtimes do with them in between.

forward         values of the graph's inputs                             -> values of its outputs, stash
backward        parameters, stash, cotangents that the next stage sends  -> cotangents, those that are saved
weight part     parameters, stash, saved cotangents                      -> cotangents
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax.numpy as jnp

from jaxpipe.array_types import AbstractArray, Array, TensorNumber
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.residuals import vjp_program
from jaxpipe.residuals.vjp_program import Absorb
from jaxpipe.runtime.stages import Stage
from jaxpipe.schedules import Kind


#: Arrays by tensor number.
Values: TypeAlias = Mapping[TensorNumber, Array]

#: By tensor number, the arrays that each tensor of a stash is stored as.
Stash: TypeAlias = Mapping[TensorNumber, tuple[Array, ...]]


class Forward(NamedTuple):
    """A stage after its forward pass; ``overflows`` counts sparse tensors that did not fit."""

    outputs: dict[TensorNumber, Array]
    stash: dict[TensorNumber, tuple[Array, ...]]
    overflows: Array


def stage_forward(stage: Stage, known: Values, trains: bool) -> Forward:
    """Run a stage's forward pass; one that trains returns what its backward pass needs besides ``known``."""
    inputs = [known[t] for t in stage.graph.inputs]
    if stage.vjp is None or not trains:
        outputs = stage.graph.evaluate(inputs)
        return Forward(dict(zip(stage.graph.outputs, outputs, strict=True)), {}, jnp.int32(0))
    outputs, parts = vjp_program.forward(stage.vjp, inputs)
    stash = {t: arrays for t, arrays in zip(stage.vjp.plan.stored, parts, strict=True) if t in stage.stashed}
    return Forward(dict(zip(stage.graph.outputs, outputs, strict=True)), stash, vjp_program.overflows(stage.vjp, parts))


def stage_backward(
    objective: MicrobatchProgram,
    stage: Stage,
    kind: Kind,
    known: Values,
    stash: Stash,
    received: Values,
    absorb: Absorb | None = None,
) -> tuple[dict[TensorNumber, Array], dict[TensorNumber, Array]]:
    """Return the cotangents that backward work of a kind computes, and those that its weight part waits for.

    ``received`` are the cotangents that the next stage sends; for the weight part, the saved ones.
    """
    built = stage.vjp
    assert built is not None
    operands = (
        [known[t] for t in built.parameters],
        [stash[t] if t in stash else (known[t],) for t in built.plan.stored],
    )
    zeros = functools.partial(_with_zeros, objective, absorb or {})
    if kind is Kind.BACKWARD_WEIGHT:
        saved = [received.get(t) for t in built.saved]
        values = vjp_program.backward_weight(built, *operands, saved, barriers=True, absorb=absorb)
        return zeros(built.weight_part, values), {}
    seeds = _seeds(objective, stage, received)
    if kind is Kind.BACKWARD:
        values = vjp_program.backward(built, *operands, seeds, barriers=True, absorb=absorb)
        return zeros(built.backward_graph.wrt, values), {}
    values, saved = vjp_program.backward_input(built, *operands, seeds, barriers=True, absorb=absorb)
    return zeros(built.input_part, values), zeros(built.saved, saved)


def _seeds(objective: MicrobatchProgram, stage: Stage, received: Values) -> list[Array | None]:
    """A cotangent for each output of a stage; for one that is returned twice, only at its first place."""
    assert stage.vjp is not None
    left, loss = dict(received), objective.results[0]
    if 0 in stage.results:
        seed = jnp.ones((), objective.graph.tensors[loss].dtype)
        left[loss] = left[loss] + seed if loss in left else seed
    return [left.pop(t, None) for t in stage.vjp.backward_graph.source.outputs]


def _with_zeros(
    objective: MicrobatchProgram, absorb: Absorb, tensors: Sequence[TensorNumber], values: Sequence[Array | None]
) -> dict[TensorNumber, Array]:
    """Cotangents by tensor. JAX gives none where there can only be zeros, as behind an array without elements.

    Sums that absorb cotangents stay what they are.
    """
    avals = {t: cast(AbstractArray, objective.graph.tensors[t].aval.to_tangent_aval()) for t in tensors}
    return {
        t: jnp.zeros(avals[t].shape, avals[t].dtype) if x is None else x
        for t, x in zip(tensors, values, strict=True)
        if x is not None or t not in absorb
    }
