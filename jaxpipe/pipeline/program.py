"""The program that every device runs: a scan over the ticks of a schedule.

    tick:  forward of one micro-batch ─▶ stash to the arena ─▶ send to the next stage
           stash from the arena ─▶ backward of one micro-batch ─▶ send to the stage before, add to gradients

Which stage a device is, is a number at run time: forward and backward are a ``switch`` over the stages. Everything
that all stages do alike stays outside it: collectives, arena reads and writes, sums. What is not there to be read
(an idle tick, a slot that nobody has written) has every bit set, which is a NaN in each floating type.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe import stage as stages
from jaxpipe.errors import ScheduleError
from jaxpipe.graph import Graph
from jaxpipe.pipeline.layout import Layout
from jaxpipe.pipeline.objective import Objective
from jaxpipe.pipeline.sections import Section
from jaxpipe.pipeline.swap import swap, swap_columns
from jaxpipe.pipeline.words import POISON, pack_words, unpack_words, word_count
from jaxpipe.schedules import Kind, Schedule
from jaxpipe.schedules.swaps import Swaps
from jaxpipe.schedules.transport import Transport, transport


#: Names of the mesh axes.
STAGE, DATA = "stage", "data"

#: 32-bit words of a page of the arena.
PAGE = 1024


@dataclass(frozen=True, eq=False)
class Program:
    """Sections, a schedule, and where variables live: all that the tick loop needs.

    Attributes:
      objective: what is computed for a micro-batch.
      sections: its stages.
      schedule: the table.
      parameters, state: layouts of the variables.
      replicated: whether the mesh has a data axis.
      swaps: where stashes are that spend some ticks on another device; None if all stay.
    """

    objective: Objective
    sections: tuple[Section, ...]
    schedule: Schedule
    parameters: Layout
    state: Layout
    replicated: bool
    swaps: Swaps | None = None

    def avals(self, numbers: Sequence[int]) -> list[Any]:
        """Shapes of some tensors."""
        return [self.objective.graph.tensors[t].aval for t in numbers]

    @cached_property
    def alone(self) -> bool:
        """Whether one stage does all, forward and backward of a micro-batch in one tick: nothing waits in an arena."""
        rows = [self.schedule.row(0, kind) for kind in (Kind.FORWARD, Kind.BACKWARD)]
        return len(self.sections) == 1 and self.schedule.has_backward and rows[0] == rows[1]

    @cached_property
    def stash_pages(self) -> tuple[int, ...]:
        """Pages that one micro-batch takes in the arena, by stage."""
        return tuple(
            -(-sum(word_count(a) for a in self.stash_avals(section)) // PAGE) if section.stage else 0
            for section in self.sections
        )

    @cached_property
    def transport(self) -> Transport | None:
        """How stashes go to peers; None if all stay."""
        return None if self.swaps is None else transport(self.swaps, self.stash_pages)

    @cached_property
    def arena_pages(self) -> int:
        """Pages of the arena: every stage's slots, each read and written through a window of the largest stash."""
        if self.alone:
            return 0
        window = max(self.stash_pages)
        if self.transport is not None:
            return self.transport.arena
        slots = [self.schedule.in_flight(s) for s in range(len(self.sections))]
        return max(
            (max(n - 1, 0) * pages + window for n, pages in zip(slots, self.stash_pages, strict=True)), default=0
        )

    @cached_property
    def message_words(self) -> tuple[int, int]:
        """Words sent forward and backward after each tick."""
        forward = max(sum(word_count(a) for a in self.avals(s.leaving)) for s in self.sections)
        back = max(sum(word_count(a) for a in self.avals(s.returning)) for s in self.sections)
        return forward, back

    def stash_avals(self, section: Section) -> list[Any]:
        """Shapes of what one micro-batch of a stage keeps in the arena."""
        assert section.stage is not None
        kept = set(section.stashed)
        stored = zip(section.stage.storage.stored, section.stage.stash_avals, strict=True)
        return [aval for t, avals in stored if t in kept for aval in avals]

    def check_transport(self) -> None:
        """Raise ``ScheduleError`` if the executor cannot run the schedule.

        It runs one stage on each device and whole backward passes, and what a tick sends is read in the next one.
        """
        if self.schedule.num_chunks > 1 or self.schedule.splits_backward:
            what = "several stages on a device" if self.schedule.num_chunks > 1 else "a split backward pass"
            raise ScheduleError(
                f"{self.schedule.name}: {what} is for paper (schedules.simulate) so far; the executor runs one stage "
                "on each device and whole backward passes, such as schedules.one_f_one_b and schedules.gpipe."
            )
        for s in range(1, len(self.sections)):
            for kind, (source, target) in ((Kind.FORWARD, (s - 1, s)), (Kind.BACKWARD, (s, s - 1))):
                sent, read = self.schedule.when(source, kind), self.schedule.when(target, kind)
                for j, tick in read.items():
                    if tick != sent[j] + 1:
                        raise ScheduleError(
                            f"{self.schedule.name}: stage {target} does {kind.value}{j} in tick {tick}, but what it "
                            f"needs of stage {source} is made in tick {sent[j]}. The executor hands a "
                            "message on in the very next tick."
                        )


@dataclass(frozen=True)
class Totals:
    """What a device has after the last tick.

    Attributes:
      gradients: sums over its micro-batches, in the buffers of the parameters; empty without a backward pass.
      state: the state buffers, folded over the micro-batches.
      results: sums of the results, or predictions by micro-batch, where this stage makes them; zeros elsewhere.
      overflows: sparse tensors of this stage that did not fit their room and were computed again.
    """

    gradients: Sequence[Any]
    state: Sequence[Any]
    results: Sequence[Any]
    overflows: Any


def run_ticks(
    program: Program,
    parameters: Sequence[Any],
    state: Sequence[Any],
    key: Any,
    batch: Sequence[Any],
    collect: bool = False,
) -> Totals:
    """All micro-batches of one device through its stage, inside ``shard_map``.

    Args:
      program: what to run.
      parameters, state: this device's buffers.
      key: random key of the step.
      batch: the micro-batches of this replica: leaves ``[num_microbatches, ...]``.
      collect: keep the results of each micro-batch apart, instead of adding them up.
    """
    schedule, sections = program.schedule, program.sections
    count, m = len(sections), schedule.num_microbatches
    stage = lax.axis_index(STAGE)
    replica = lax.axis_index(DATA) if program.replicated else 0
    forward_branches = [forward_branch(program, s) for s in range(count)]
    backward_branches = [backward_branch(program, s) for s in range(count)]
    trains = schedule.has_backward
    pages = jnp.asarray(program.stash_pages, jnp.int32)[stage]
    window = max(program.stash_pages)

    def microbatch(j: Any) -> tuple[Any, list[Any]]:
        own = jnp.maximum(j, 0)
        return jax.random.fold_in(key, replica * m + own), [x[own] for x in batch]

    def tick(carry: Any, columns: Any) -> tuple[Any, None]:
        arena, arriving, returning, state, gradients, results = carry
        j, place, back_j, back_place, *moves = columns

        active = j >= 0
        local_key, rows = microbatch(j)
        operands = parameters, state, local_key, rows, arriving
        if program.alone:
            message, stash, state, made = forward_branches[0](*operands)
        else:
            choice = jnp.where(active, stage + 1, 0)
            message, stash, state, made = lax.switch(choice, [_idle_forward(program), *forward_branches], *operands)
        results = [_add(old, new, j, active, collect) for old, new in zip(results, made, strict=True)]
        arriving = _send(message, [(s, s + 1) for s in range(count - 1)])
        if not trains:
            return (arena, arriving, returning, state, gradients, results), None

        if window and not program.alone:
            start = (place, jnp.int32(0))
            mine = (jnp.arange(window, dtype=jnp.int32)[:, None] < pages) & active
            old = lax.dynamic_slice(arena, start, (window, PAGE))
            arena = lax.dynamic_update_slice(arena, jnp.where(mine, stash, old), start)
            stash = lax.dynamic_slice(arena, (back_place, jnp.int32(0)), (window, PAGE))
        active = back_j >= 0
        local_key, rows = microbatch(back_j)
        operands = parameters, local_key, rows, stash, returning
        if program.alone:
            message, steps = backward_branches[0](*operands)
        else:
            choice = jnp.where(active, stage + 1, 0)
            message, steps = lax.switch(choice, [_idle_backward(program), *backward_branches], *operands)
        sums = [g + d for g, d in zip(gradients, steps, strict=True)]
        gradients = (
            sums if program.alone else [jnp.where(active, new, g) for g, new in zip(gradients, sums, strict=True)]
        )
        returning = _send(message, [(s + 1, s) for s in range(count - 1)])
        if program.transport is not None and window:
            # XLA copies the arena unless it sees that the stash is read before anything is written over it.
            after = jnp.where(back_j < -1, lax.convert_element_type(message[:1].sum(), jnp.int32), 0)
            arena = swap(program, arena, STAGE, moves, after)
        return (arena, arriving, returning, state, gradients, results), None

    words = program.message_words
    lead = (m,) if collect else ()
    initial = (
        jnp.full((program.arena_pages, PAGE), POISON),
        jnp.full((words[0],), POISON),
        jnp.full((words[1],), POISON),
        list(state),
        [jnp.zeros(length, dtype) for length, dtype in program.parameters.buffers] if trains else [],
        [jnp.zeros((*lead, *a.shape), a.dtype) for a in _made_avals(program)],
    )
    (_, _, _, state, gradients, results), _ = lax.scan(tick, initial, _columns(program, stage))
    return Totals(gradients, state, results[:-1], results[-1])


def _made_avals(program: Program) -> list[Any]:
    """What a forward branch hands out of each micro-batch: the results, and how many tensors overflowed."""
    return [*program.avals(program.objective.results), jax.ShapeDtypeStruct((), jnp.int32)]


def _columns(program: Program, stage: Any) -> list[Any]:
    """This device's rows of the table, by tick.

    Micro-batch and first page of its stash, forward and backward; then those of ``jaxpipe.pipeline.swap``.
    """
    schedule, swaps, sizes = program.schedule, program.swaps, program.stash_pages
    home = (0,) * len(sizes) if program.transport is None else program.transport.home
    table: list[list[Sequence[int]]] = []
    for s in range(schedule.num_stages):
        slots = schedule.slots(s)
        written, read = (slots, slots) if swaps is None else (swaps.written[s], swaps.read[s])
        rows = schedule.row(s, Kind.FORWARD), schedule.row(s, Kind.BACKWARD)
        tables = zip(rows, (written, read), strict=True)
        places = [[home[s] + sizes[s] * found.get(j, 0) for j in row] for row, found in tables]
        table.append([rows[0], places[0], rows[1], places[1]])
    columns = jnp.asarray(np.asarray(table, np.int32))[stage]
    return [*(columns[k] for k in range(4)), *swap_columns(program, stage)]


def _add(total: Any, new: Any, j: Any, active: Any, collect: bool) -> Any:
    if not collect:
        return jnp.where(active, total + new, total)
    place = jnp.maximum(j, 0)
    return total.at[place].set(jnp.where(active, new, total[place]))


def _send(message: Any, pairs: Sequence[tuple[int, int]]) -> Any:
    return lax.ppermute(message, STAGE, pairs) if pairs and message.size else message


def _poisoned(shape: Sequence[int], dtype: Any) -> Any:
    """An array that nothing may read: NaN where there is one, else every bit set."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.full(shape, jnp.nan, dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.ones(shape, dtype)
    return jnp.full(shape, jnp.iinfo(dtype).max, dtype)


def _stash_shape(program: Program) -> tuple[int, int]:
    return (max(program.stash_pages) if program.schedule.has_backward else 0, PAGE)


def _idle_forward(program: Program) -> Callable[..., Any]:
    def idle(_: Any, state: Any, __: Any, ___: Any, ____: Any) -> Any:
        results = [_poisoned(a.shape, a.dtype) for a in _made_avals(program)]
        message = jnp.full((program.message_words[0],), POISON)
        return message, jnp.full(_stash_shape(program), POISON), list(state), results

    return idle


def _idle_backward(program: Program) -> Callable[..., Any]:
    def idle(*_: Any) -> Any:
        steps = [_poisoned((length,), dtype) for length, dtype in program.parameters.buffers]
        return jnp.full((program.message_words[1],), POISON), steps

    return idle


def _at_hand(program: Program, key: Any, rows: Sequence[Any]) -> dict[int, Any]:
    objective = program.objective
    return dict(zip((*objective.batch, objective.key), (*rows, key), strict=True))


def forward_branch(program: Program, s: int) -> Callable[..., Any]:
    """``(parameters, state, key, micro-batch, message) -> (message, stash, state, results)`` of a stage."""
    section = program.sections[s]

    def forward(parameters: Any, state: Any, key: Any, rows: Any, message: Any) -> Any:
        known = _at_hand(program, key, rows)
        known.update(zip(section.parameters, program.parameters.read(s, parameters), strict=True))
        known.update(zip(section.state, program.state.read(s, state), strict=True))
        known.update(zip(section.arriving, unpack_words(message, program.avals(section.arriving)), strict=True))
        inputs = [known[t] for t in section.graph.inputs]
        stash_words = _stash_shape(program)[0] * PAGE
        overflows = jnp.int32(0)
        if section.stage is None or not program.schedule.has_backward:
            outputs, stash = section.graph.evaluate(inputs), []
        else:
            outputs, stash = stages.forward(section.stage, inputs)
            overflows = stages.overflows(section.stage, stash)
            kept = set(section.stashed)
            stash = [
                x for t, parts in zip(section.stage.storage.stored, stash, strict=True) if t in kept for x in parts
            ]
        made = dict(zip(section.graph.outputs, outputs, strict=True))
        results = [
            made[t] if k in section.results else jnp.zeros(a.shape, a.dtype)
            for k, (t, a) in enumerate(
                zip(program.objective.results, program.avals(program.objective.results), strict=True)
            )
        ]
        return (
            pack_words([made[t] for t in section.leaving], program.message_words[0]),
            stash if program.alone else pack_words(stash, stash_words).reshape(_stash_shape(program)),
            program.state.write(s, [made[t] for t in section.new_state]),
            [*results, overflows],
        )

    return forward


def backward_branch(program: Program, s: int) -> Callable[..., Any]:
    """``(parameters, key, micro-batch, stash, message) -> (message, gradients)`` of a stage."""
    section = program.sections[s]
    following = program.sections[s + 1].returning if s + 1 < len(program.sections) else ()
    loss = program.objective.results[0]

    def backward(parameters: Any, key: Any, rows: Any, stash: Any, message: Any) -> Any:
        built = section.stage
        assert built is not None
        known = _at_hand(program, key, rows)
        known.update(zip(section.parameters, program.parameters.read(s, parameters), strict=True))
        stored = iter(stash if program.alone else unpack_words(stash.reshape(-1), program.stash_avals(section)))
        counts = dict(zip(built.storage.stored, map(len, built.stash_avals), strict=True))
        arena = {t: [next(stored) for _ in range(counts[t])] for t in section.stashed}
        cotangents = dict(zip(following, unpack_words(message, _tangents(program.avals(following))), strict=True))
        if 0 in section.results:
            one = jnp.ones((), program.objective.graph.tensors[loss].dtype)
            cotangents[loss] = cotangents[loss] + one if loss in cotangents else one
        found = stages.backward(
            built,
            [known[t] for t in built.parameters],
            [arena[t] if t in arena else (known[t],) for t in built.storage.stored],
            _once(built.linearization.source, cotangents),
            beside_forward=program.alone,
        )
        gradients = dict(zip(built.linearization.wrt, found, strict=True))
        steps = [
            gradients[t] if gradients.get(t) is not None else jnp.zeros(a.shape, a.dtype)
            for t, a in zip(section.parameters, program.avals(section.parameters), strict=True)
        ]
        message = pack_words([gradients[t] for t in section.returning], program.message_words[1])
        return message, program.parameters.write(s, steps)

    return backward


def _tangents(avals: Sequence[Any]) -> list[Any]:
    return [a.to_tangent_aval() for a in avals]


def _once(graph: Graph, cotangents: dict[int, Any]) -> list[Any]:
    """A cotangent for each output; for one that is returned twice, only at its first place."""
    left = dict(cotangents)
    return [left.pop(t, None) for t in graph.outputs]
