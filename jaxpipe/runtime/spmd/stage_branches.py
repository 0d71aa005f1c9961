"""A stage's work on a micro-batch, as branches of one conditional: all take and return arrays of the same shapes.

    forward:  parameters, state, key, micro-batch, message      -> message, stash, state, results
    backward: parameters, key, micro-batch, stash, message      -> message, saved, gradients
    weight:   parameters, key, micro-batch, stash, saved        -> gradients        (where backward work is split)

Each has an idle branch beside it, whose results have every bit set. Backward work itself reads what it needs out of the
arena (``Kept``), array by array, and all work its micro-batch out of the batch (``Rows``): XLA copies what a branch
changes, but not what it only reads.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.array_types import Array, ArrayLike, PyTree, Shaped, TensorNumber
from jaxpipe.runtime import stage_passes
from jaxpipe.runtime.spmd.lockstep_program import PAGE, LockstepProgram
from jaxpipe.runtime.stages import Stage
from jaxpipe.runtime.uint32_words import POISON, from_words, pack_words, unpack_words, word_count, zeros
from jaxpipe.schedules.table import Kind, StageNumber


class Rows(NamedTuple):
    """The micro-batch that a branch works on."""

    batch: Sequence[Array]  # leaves ``[num_microbatches, ...]``
    number: ArrayLike  # of the micro-batch

    def read(self) -> list[Array]:
        """Its leaves."""
        return [lax.dynamic_index_in_dim(x, self.number, keepdims=False) for x in self.batch]


class Kept(NamedTuple):
    """The places in the arena of what was kept for a branch."""

    arena: Array  # ``[pages, words]``
    first: ArrayLike  # its first page

    def read(self, avals: Sequence[Shaped]) -> list[Array]:
        """The arrays that were packed there."""
        arrays, start = [], 0
        for aval in avals:
            page, offset = divmod(start, PAGE)
            count = word_count(aval)
            shape = (-(-(offset + count) // PAGE), PAGE)
            words = lax.dynamic_slice(self.arena, (self.first + page, jnp.int32(0)), shape).reshape(-1)
            arrays.append(from_words(lax.slice(words, (offset,), (offset + count,)), aval))
            start += count
        return arrays


#: A stash as a backward branch gets it: a place in the arena, or its arrays where one stage does all.
Stash: TypeAlias = Kept | Sequence[Array]

#: Message; stash, in pages or as arrays as ``Stash`` has it; state buffers; results.
ForwardResults: TypeAlias = tuple[Array, PyTree, list[Array], list[Array]]

#: Message, cotangents that wait for the weight part, gradient buffers.
BackwardResults: TypeAlias = tuple[Array, Array, list[Array]]

Branch: TypeAlias = Callable[..., PyTree]


def given_avals(program: LockstepProgram) -> tuple[Rows, Kept]:
    """Shapes of what branches look into: the batch, and an arena that has room for what one micro-batch keeps."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    lead = program.num_microbatches
    batch = [jax.ShapeDtypeStruct((lead, *a.shape), a.dtype) for a in program.avals(program.objective.batch)]
    pages = max(*program.stash_pages, *program.saved_pages)
    return Rows._make((batch, number)), Kept._make((jax.ShapeDtypeStruct((pages, PAGE), jnp.uint32), number))


def stage_programs(program: LockstepProgram, s: StageNumber) -> dict[Kind, tuple[Branch, tuple[PyTree, ...]]]:
    """Return a stage's work by kind, each with the shapes of its operands."""
    parameters, state = (
        [jax.ShapeDtypeStruct((length,), dtype) for length, dtype in layout.buffers]
        for layout in (program.parameters, program.state)
    )
    parameters += program.avals(program.shared)
    key = jax.eval_shape(lambda: jax.random.key(0))
    forward, backward = (jax.ShapeDtypeStruct((n,), jnp.uint32) for n in program.message_words)
    rows, kept = given_avals(program)
    kind = program.schedule.backward_kind
    stash = program.stash_avals(program.stages[s]) if program.alone else kept
    work: dict[Kind, tuple[Branch, tuple[PyTree, ...]]] = {
        Kind.FORWARD: (branch(program, Kind.FORWARD, s), (parameters, state, key, rows, forward)),
        kind: (branch(program, kind, s), (parameters, key, rows, stash, backward)),
    }
    if program.schedule.splits_backward:
        work[Kind.BACKWARD_WEIGHT] = branch(program, Kind.BACKWARD_WEIGHT, s), (parameters, key, rows, stash, kept)
    return work


def made_avals(program: LockstepProgram) -> list[Shaped]:
    """Return what a forward branch hands out of each micro-batch: the results, and how many tensors overflowed."""
    return [*program.avals(program.objective.results), jax.ShapeDtypeStruct((), jnp.int32)]


def touched(program: LockstepProgram, kind: Kind) -> tuple[int, ...]:
    """The gradient buffers that backward work of a kind adds to, in any stage."""
    buffers: set[int] = set()
    for s, stage in zip(program.stage_numbers, program.stages, strict=True):
        device = program.device(s)
        places = zip(program.trained(device), program.gradients.places[device], strict=True)
        given = stage.differentiated(kind)
        buffer_of = {t: buffer for t, (buffer, _) in places}
        further = {t: len(program.gradients.buffers) + k for k, t in enumerate(program.shared_trained)}
        buffers.update(buffer_of.get(t, further.get(t, -1)) for t in given)
    return tuple(sorted(buffers - {-1}))


def branch(program: LockstepProgram, kind: Kind, s: StageNumber | None) -> Branch:
    """Return the work of a kind of a stage; of none (None), or backward of a frozen one, the idle branch."""
    if s is None or (kind is not Kind.FORWARD and s < program.schedule.frozen):
        return _idle_branch(program, kind)
    branches = {Kind.FORWARD: _forward_branch, Kind.BACKWARD_WEIGHT: _weight_branch}
    return branches.get(kind, _backward_branch)(program, s)


def _idle_branch(program: LockstepProgram, kind: Kind) -> Branch:
    """No work: every bit of its results is set, and the state stays."""
    words = [jax.ShapeDtypeStruct((n,), jnp.uint32) for n in program.message_words]

    def idle_forward(_: Sequence[Array], state: Sequence[Array], *__: PyTree) -> ForwardResults:
        message, stash, results = jax.tree.map(_poisoned, (words[0], _window(program.stash_pages), made_avals(program)))
        return message, stash, list(state), results

    def idle_backward(*_: PyTree) -> PyTree:
        steps = [program.gradient_avals[k] for k in touched(program, kind)]
        weights = kind is Kind.BACKWARD_WEIGHT
        return jax.tree.map(_poisoned, steps if weights else (words[1], _window(program.saved_pages), steps))

    return idle_forward if kind is Kind.FORWARD else idle_backward


def _poisoned(aval: Shaped) -> Array:
    """An array that nothing may read: NaN where there is one, else every bit set."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return from_words(jnp.full(word_count(aval), POISON), aval)
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        return jnp.full(aval.shape, jnp.nan, aval.dtype)
    if jnp.issubdtype(aval.dtype, jnp.bool_):
        return jnp.ones(aval.shape, aval.dtype)
    return jnp.full(aval.shape, jnp.iinfo(aval.dtype).max, aval.dtype)


def _window(pages: Sequence[int]) -> jax.ShapeDtypeStruct:
    """The shape in which what every stage keeps goes to and from the arena."""
    return jax.ShapeDtypeStruct((max(pages), PAGE), jnp.uint32)


def _forward_branch(program: LockstepProgram, s: StageNumber) -> Branch:
    stage, device, wanted = program.stages[s], program.device(s), program.objective.results

    def forward(
        parameters: Sequence[Array], state: Sequence[Array], key: Array, rows: Rows, message: Array
    ) -> ForwardResults:
        known = _available(program, s, parameters, key, rows)
        variables = program.held(device)[1]
        known.update(zip(variables, program.state.read(device, state), strict=True))
        known.update(zip(stage.arriving, unpack_words(message, program.avals(stage.arriving)), strict=True))
        value_of, kept, overflows = stage_passes.forward(stage, known, program.schedule.has_backward)
        stash = [x for parts in kept.values() for x in parts]
        results = [
            value_of[t] if k in stage.results else zeros(a.shape, a.dtype)
            for k, (t, a) in enumerate(zip(wanted, program.avals(wanted), strict=True))
        ]
        new = dict(zip(stage.state, stage.new_state, strict=True))
        return (
            pack_words([value_of[t] for t in stage.leaving], program.message_words[0]),
            stash if program.alone else _packed(stash, program.stash_pages),
            program.state.write(device, [value_of[new[t]] if t in new else known[t] for t in variables]),
            [*results, overflows],
        )

    return forward


def _backward_branch(program: LockstepProgram, s: StageNumber) -> Branch:
    """The backward work of a stage, or its input part if the schedule splits it."""
    stage = program.stages[s]
    following = program.stages[s + 1].returning if s + 1 < len(program.stages) else ()
    kind = program.schedule.backward_kind

    def backward(parameters: Sequence[Array], key: Array, rows: Rows, stash: Stash, message: Array) -> BackwardResults:
        known = _available(program, s, parameters, key, rows)
        cotangents = dict(zip(following, unpack_words(message, program.tangents(following)), strict=True))
        kept = _stashed(program, stage, stash)
        gradients, saved = stage_passes.backward(program.objective, stage, kind, known, kept, cotangents)
        message = pack_words([gradients[t] for t in stage.returning], program.message_words[1])
        saved = [saved[t] for t in stage.saved] if kind is Kind.BACKWARD_INPUT else []
        return message, _packed(saved, program.saved_pages), _steps(program, s, kind, gradients)

    return backward


def _weight_branch(program: LockstepProgram, s: StageNumber) -> Branch:
    stage, kind = program.stages[s], Kind.BACKWARD_WEIGHT

    def weight(parameters: Sequence[Array], key: Array, rows: Rows, stash: Stash, saved: Kept) -> list[Array]:
        known = _available(program, s, parameters, key, rows)
        received = dict(zip(stage.saved, saved.read(program.tangents(stage.saved)), strict=True))
        kept = _stashed(program, stage, stash)
        gradients, _ = stage_passes.backward(program.objective, stage, kind, known, kept, received)
        return _steps(program, s, kind, gradients)

    return weight


def _available(
    program: LockstepProgram, s: StageNumber, parameters: Sequence[Array], key: Array, rows: Rows
) -> dict[TensorNumber, Array]:
    """Return the inputs that no stage sends: the micro-batch, its key, parameters that the device has or borrows."""
    device = program.device(s)
    known = dict(zip((*program.objective.batch, program.objective.key), (*rows.read(), key), strict=True))
    borrowed = parameters[len(program.parameters.buffers) :]
    known.update(zip(program.shared, borrowed, strict=True))
    known.update(zip(program.held(device)[0], program.parameters.read(device, parameters), strict=True))
    return known


def _stashed(program: LockstepProgram, stage: Stage, stash: Stash) -> dict[TensorNumber, tuple[Array, ...]]:
    assert stage.vjp is not None
    stored = iter(stash.read(program.stash_avals(stage)) if isinstance(stash, Kept) else stash)
    counts = dict(zip(stage.vjp.plan.stored, map(len, stage.vjp.stash_avals), strict=True))
    return {t: tuple(next(stored) for _ in range(counts[t])) for t in stage.stashed}


def _packed(values: Sequence[Array], pages: Sequence[int]) -> Array:
    return pack_words(values, max(pages) * PAGE).reshape(max(pages), PAGE)


def _steps(program: LockstepProgram, s: StageNumber, kind: Kind, gradients: dict[TensorNumber, Array]) -> list[Array]:
    """The buffers that work of a kind adds to, with a stage's gradients in them and zeros elsewhere."""
    device = program.device(s)
    trained = program.trained(device)
    given = program.stages[s].differentiated(kind)
    values = [
        gradients[t] if t in given and t in gradients else jnp.zeros(a.shape, a.dtype)
        for t, a in zip(trained, program.avals(trained), strict=True)
    ]
    written = program.gradients.write(device, values)
    for t, aval in zip(program.shared_trained, program.gradient_avals[len(written) :], strict=True):
        here = t in given and t not in trained and t in gradients
        written.append(gradients[t].reshape(aval.shape) if here else jnp.zeros(aval.shape, aval.dtype))
    return [written[k] for k in touched(program, kind)]
