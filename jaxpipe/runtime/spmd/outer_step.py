"""The end of a step in an outer loop, inside ``shard_map``: a fragment is exchanged, and replicas go on from it."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.array_types import Array, ArrayLike, DType, TensorNumber
from jaxpipe.gradients.block_exchange import Averaged, exchange
from jaxpipe.runtime.spmd.buffer_layout import lay_out
from jaxpipe.runtime.spmd.lockstep_program import LockstepProgram
from jaxpipe.runtime.stage_outer_loop import StageOuterLoop
from jaxpipe.runtime.state_arrays import StageArrays
from jaxpipe.runtime.train_state import TrainState
from jaxpipe.sharding.mesh_axes import DATA, STAGE


T = TypeVar("T")


class OuterBuffers:
    """The layouts of outer parameters with the states of their optimizer, and of what is pending."""

    def __init__(self, program: LockstepProgram, loop: StageOuterLoop, sites: list[list[int]] | None = None):
        self._program, self.loop, self.sites = program, loop, sites
        avals = [{t: loop.avals(place.aval) for t, place in held.items()} for held in program.parameters.places]
        self._count = max((len(shapes) for held in avals for shapes in held.values()), default=1)
        self.outer = lay_out(
            [
                {n: x for t, shapes in held.items() for n, x in zip(self._numbers(t), shapes, strict=False)}
                for held in avals
            ]
        )
        self.pending = program.residuals if loop.settings.delay else lay_out([{}] * program.num_devices)

    def _numbers(self, t: TensorNumber) -> list[TensorNumber]:
        """The numbers in the layout of an outer parameter and of its optimizer's state."""
        return [TensorNumber(self._count * t + i) for i in range(self._count)]

    def write(self, device: int, arrays: StageArrays) -> list[Any]:
        """Return the buffers of a device for what it has of the outer loop, or for its beginning."""
        held = self._program.parameters.places[device]
        rows = arrays.outer or [
            self._first(self.loop.avals(place.aval)[0].dtype, x)
            for place, x in zip(held.values(), arrays.parameters, strict=True)
        ]
        numbered = (zip(self._numbers(t), row, strict=False) for t, row in zip(held, rows, strict=True))
        return self.outer.write(device, dict(itertools.chain(*numbered)), np)

    def _first(self, dtype: DType, parameter: ArrayLike) -> list[ArrayLike]:
        outer = jnp.asarray(parameter).astype(dtype)
        return [outer, *jax.tree.leaves(self.loop.slots(outer))]

    def rows(self, held: Mapping[TensorNumber, Any]) -> list[list[Any]]:
        """Return by parameter the outer one and the state of its optimizer, of the arrays of all devices."""
        return [[held[n] for n in self._numbers(t) if n in held] for t in self._program.objective.parameters]

    def parameters_of(self, held: Mapping[TensorNumber, Any]) -> dict[TensorNumber, Any]:
        """Return the outer parameters among the arrays of some devices, in the types of the model's."""
        places = {t: place for row in self._program.parameters.places for t, place in row.items()}
        numbers = {t: self._numbers(t)[0] for t in places}
        return {t: held[n].astype(places[t].aval.dtype) for t, n in numbers.items() if n in held}

    def _get(self, device: int, t: TensorNumber, buffers: Sequence[Array]) -> list[Array]:
        held = self.outer.places[device]
        return [self.outer.get(device, n, buffers) for n in self._numbers(t) if n in held]

    def at_outer(self, state: TrainState) -> TrainState:
        """Return a state whose replicas all have the outer parameters, and the mean of the model's variables."""
        program = self._program
        parameters = _by_stage(
            program, lambda s: program.parameters.write(s, self.parameters_of(self.outer.read(s, state.outer)))
        )
        return replace(state, parameters=tuple(parameters), variables=tuple(means(state.variables)))

    def advance(self, state: TrainState) -> TrainState:
        """Return the state after the exchange and the restart that are due when an inner step has been made."""
        settings, step = self.loop.settings, state.step
        fragments = range(settings.fragments)
        held = list(state.parameters), list(state.outer), list(state.residual)
        turns = [partial(self._exchange, state, f) for f in fragments]
        parameters, outer, pending = lax.switch(settings.due(step), [lambda: held, *turns])
        if settings.delay:
            moves = [partial(self._move, parameters, pending, f) for f in fragments]
            parameters = lax.switch(settings.due(step - settings.delay), [lambda: parameters, *moves])
        variables = lax.cond(
            step % settings.inner_steps == 0, lambda: means(state.variables), lambda: list(state.variables)
        )
        groups = {"parameters": parameters, "outer": outer, "residual": pending, "variables": variables}
        return replace(state, **{field: tuple(buffers) for field, buffers in groups.items()})

    def _tensors(self, f: int, s: int) -> list[TensorNumber]:
        """The parameters of a fragment in a stage."""
        return [self._program.objective.parameters[k] for k in self.loop.parameters[f][s]]

    def _exchange(self, state: TrainState, f: int) -> tuple[list[Array], list[Array], list[Array]]:
        """Return parameters, outer ones and what is pending after the exchange of a fragment."""
        layout, settings = self._program.parameters, self.loop.settings

        def read(s: int) -> list[Array]:
            pairs = ((self._get(s, t, state.outer)[0], layout.get(s, t, state.parameters)) for t in self._tensors(f, s))
            return [settings.difference(outer, now) for outer, now in pairs]

        def write(s: int, averaged: Averaged) -> tuple[list[Array], list[Array], list[Array]]:
            parameters, outer, pending = list(state.parameters), list(state.outer), list(state.residual)
            for t, average, left in zip(self._tensors(f, s), averaged.gradients, averaged.residuals, strict=True):
                before, *slots = self._get(s, t, state.outer)
                tree = jax.tree.structure(self.loop.slots(before))
                new, moments = settings.advance(average, before, jax.tree.unflatten(tree, slots))
                for n, x in zip(self._numbers(t), [new, *jax.tree.leaves(moments)], strict=False):
                    outer = self.outer.put(s, n, outer, x)
                after = settings.restart(new, left, layout.get(s, t, state.parameters))
                if settings.delay:
                    pending = self.pending.put(s, t, pending, after)
                else:
                    parameters = layout.put(s, t, parameters, after)
            return parameters, outer, pending

        by_stage = partial(_by_stage, self._program)
        return exchange(self.loop.plans[f], settings.exchange.rule, DATA, by_stage, read, write)

    def _move(self, parameters: Sequence[Array], pending: Sequence[Array], f: int) -> list[Array]:
        """Return parameters of which those of a fragment were moved by what was pending."""
        layout = self._program.parameters

        def write(s: int) -> list[Array]:
            buffers = list(parameters)
            for t in self._tensors(f, s):
                moved = self.loop.settings.move(layout.get(s, t, parameters), self.pending.get(s, t, pending))
                buffers = layout.put(s, t, buffers, moved)
            return buffers

        return _by_stage(self._program, write)


def _by_stage(program: LockstepProgram, function: Callable[[int], T]) -> T:
    return lax.switch(lax.axis_index(STAGE), [partial(function, s) for s in program.device_numbers])


def means(variables: Sequence[Array]) -> list[Array]:
    """Return the means of state variables over the replicas; of what has none, such as a count, the first one's."""
    return [
        lax.pmean(x, DATA) if jnp.issubdtype(x.dtype, jnp.inexact) else lax.all_gather(x, DATA)[0] for x in variables
    ]
