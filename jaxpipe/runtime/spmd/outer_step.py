"""The end of a step in an outer loop, inside ``shard_map``: a fragment is exchanged, and replicas go on from it."""

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
from jax import lax

from jaxpipe.array_types import Array, TensorNumber
from jaxpipe.gradients.block_exchange import Averaged, exchange
from jaxpipe.runtime.replica_exchange import StageOuterLoop
from jaxpipe.runtime.spmd.lockstep_program import LockstepProgram, by_parameter
from jaxpipe.runtime.train_state import TrainState
from jaxpipe.sharding.mesh_axes import DATA


def at_outer(program: LockstepProgram, state: TrainState) -> TrainState:
    """Return a state whose replicas all have the outer parameters, if there are any, and the means of variables."""
    if program.update is None or program.update.outer is None:
        return state

    def parameters(device: int) -> list[Array]:
        outer = program.state["outer"].read(device, state.outer)
        return program.parameters.write(device, program.outer_parameters(outer))

    return replace(state, parameters=tuple(program.by_device(parameters)), variables=tuple(means(state.variables)))


def advance(program: LockstepProgram, loop: StageOuterLoop, state: TrainState) -> TrainState:
    """Return the state after the exchange and the restart that are due when an inner step has been made."""
    settings, objective = loop.settings, program.objective
    parameters, ways = program.parameters.places, program.state["residual"].places
    rows = [by_parameter(places) for places in program.state["outer"].places]

    def turn(fragment: int, device: int) -> list[TensorNumber]:
        return [objective.parameters[k] for k in loop.parameters[fragment][device]]

    def exchanged(fragment: int, now: list[Array], outer: list[Array], pending: list[Array]) -> list[list[Array]]:
        def read(d: int) -> list[Array]:
            pairs = ((rows[d][t][0], parameters[d][t]) for t in turn(fragment, d))
            return [settings.difference(before.get(outer), place.get(now)) for before, place in pairs]

        def write(d: int, averaged: Averaged) -> list[list[Array]]:
            new, after, left = list(outer), list(now), list(pending)
            for t, average, rest in zip(turn(fragment, d), averaged.gradients, averaged.residuals, strict=True):
                row = loop.advance(average, [place.get(outer) for place in rows[d][t]])
                for place, x in zip(rows[d][t], row, strict=True):
                    new = place.put(new, x)
                restarted = settings.restart(row[0], rest, parameters[d][t].get(now))
                if settings.delay:
                    left = ways[d][t].put(left, restarted)
                else:
                    after = parameters[d][t].put(after, restarted)
            return [after, new, left]

        return exchange(loop.plans[fragment], settings.exchange.rule, DATA, program.by_device, read, write)

    def moved(fragment: int, now: list[Array], pending: list[Array]) -> list[Array]:
        def write(d: int) -> list[Array]:
            after = list(now)
            for t in turn(fragment, d):
                place = parameters[d][t]
                after = place.put(after, settings.move(place.get(now), ways[d][t].get(pending)))
            return after

        return program.by_device(write)

    held = [list(state.parameters), list(state.outer), list(state.residual)]
    variables = lax.cond(
        state.step % settings.inner_steps == 0, lambda: means(state.variables), lambda: list(state.variables)
    )
    groups = zip(("parameters", "outer", "residual"), settings.after(state.step, held, exchanged, moved), strict=True)
    return replace(state, variables=tuple(variables), **{field: tuple(buffers) for field, buffers in groups})


def means(variables: Sequence[Array]) -> list[Array]:
    """Return the means of state variables over the replicas; of what has none, such as a count, the first one's."""
    return [
        lax.pmean(x, DATA) if jnp.issubdtype(x.dtype, jnp.inexact) else lax.all_gather(x, DATA)[0] for x in variables
    ]
