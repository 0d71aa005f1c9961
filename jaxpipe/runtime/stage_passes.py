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
from jaxpipe.residuals.backward_graph import BackwardOp
from jaxpipe.residuals.vjp_program import Absorb, run_backward
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
    built = stage.programs
    stored = [stash[t] if t in stash else (known[t],) for t in built.plan.stored]
    parameters = [known[t] for t in built.parameters]

    def run(steps: Sequence[BackwardOp], given: Values, *keep: TensorNumber) -> Values:
        return run_backward(built, steps, parameters, stored, given, keep=keep, barriers=True, absorb=absorb)

    zeros = functools.partial(_with_zeros, objective, absorb or {})
    if kind is Kind.BACKWARD_WEIGHT:
        saved = {t: received[t] for t in built.saved if t in received}
        return zeros(built.weight_part, run(built.weight_steps, saved, *built.saved)), {}
    seeds = _seeds(objective, stage, received)
    if kind is Kind.BACKWARD:
        return zeros(built.backward_graph.wrt, run(built.backward_graph.steps, seeds)), {}
    values = run(built.input_steps, seeds, *built.saved)
    return zeros(built.input_part, values), zeros(built.saved, values)


def _seeds(objective: MicrobatchProgram, stage: Stage, received: Values) -> Values:
    """Return the cotangents of a stage's outputs, in their order."""
    seeds, loss = dict(received), objective.results[0]
    if 0 in stage.results:
        seed = jnp.ones((), objective.graph.tensors[loss].dtype)
        seeds[loss] = seeds[loss] + seed if loss in seeds else seed
    return {t: seeds[t] for t in stage.programs.backward_graph.source.outputs if t in seeds}


def _with_zeros(
    objective: MicrobatchProgram, absorb: Absorb, tensors: Sequence[TensorNumber], values: Values
) -> dict[TensorNumber, Array]:
    """Cotangents by tensor. JAX gives none where there can only be zeros, as behind an array without elements.

    Sums that absorb cotangents stay what they are.
    """
    avals = {t: cast(AbstractArray, objective.graph.tensors[t].aval.to_tangent_aval()) for t in tensors}
    return {
        t: values[t] if t in values else jnp.zeros(avals[t].shape, avals[t].dtype)
        for t in tensors
        if t in values or t not in absorb
    }
