"""A stage's work on a micro-batch, as branches of one conditional: all take and return arrays of the same shapes.

    forward:  parameters, state, key, micro-batch, message      -> message, stash, state, results
    backward: parameters, key, micro-batch, stash, message      -> message, saved, gradients
    weight:   parameters, key, micro-batch, stash, saved        -> gradients        (where backward work is split)

Each has an idle branch beside it, whose results have every bit set. Backward work itself reads what it needs out of the
arena (``Kept``), array by array, and all work its micro-batch out of the batch (``Rows``): XLA copies what a branch
changes, but not what it only reads.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.graph.graph import Graph
from jaxpipe.residuals import vjp_program
from jaxpipe.runtime.program import PAGE, Program
from jaxpipe.runtime.stages import Stage
from jaxpipe.runtime.uint32_words import POISON, from_words, pack_words, unpack_words, word_count
from jaxpipe.schedules import Kind


class Rows(NamedTuple):
    """The micro-batch that a branch works on.

    Attributes:
      batch: all micro-batches, leaves ``[num_microbatches, ...]``.
      number: which one.
    """

    batch: Sequence[Any]
    number: Any

    def read(self) -> list[Any]:
        """Its leaves."""
        return [lax.dynamic_index_in_dim(x, self.number, keepdims=False) for x in self.batch]


class Kept(NamedTuple):
    """The places in the arena of what was kept for a branch.

    Attributes:
      arena: ``[pages, words]``.
      first: number of its first page.
    """

    arena: Any
    first: Any

    def read(self, avals: Sequence[Any]) -> list[Any]:
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


def given_avals(program: Program) -> tuple[Rows, Kept]:
    """Shapes of what branches look into: the batch, and an arena that has room for what one micro-batch keeps."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    lead = program.num_microbatches
    batch = [jax.ShapeDtypeStruct((lead, *a.shape), a.dtype) for a in program.avals(program.objective.batch)]
    pages = max(*program.stash_pages, *program.saved_pages)
    return Rows(batch, number), Kept(jax.ShapeDtypeStruct((pages, PAGE), jnp.uint32), number)


def stage_programs(program: Program, s: int) -> dict[Kind, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return a stage's work by kind, each with the shapes of its operands."""
    parameters, state = (
        [jax.ShapeDtypeStruct((length,), dtype) for length, dtype in layout.buffers]
        for layout in (program.parameters, program.state)
    )
    parameters += program.avals(program.shared)
    key = jax.eval_shape(lambda: jax.random.key(0))
    forward, backward = (jax.ShapeDtypeStruct((n,), jnp.uint32) for n in program.message_words)
    rows, kept = given_avals(program)
    stash: Any = program.stash_avals(program.stages[s]) if program.alone else kept
    work: dict[Kind, Any] = {
        Kind.FORWARD: (forward_branch(program, s), (parameters, state, key, rows, forward)),
        program.schedule.backward_kind: (backward_branch(program, s), (parameters, key, rows, stash, backward)),
    }
    if program.schedule.splits_backward:
        work[Kind.BACKWARD_WEIGHT] = weight_branch(program, s), (parameters, key, rows, stash, kept)
    return work


def made_avals(program: Program) -> list[Any]:
    """Return what a forward branch hands out of each micro-batch: the results, and how many tensors overflowed."""
    return [*program.avals(program.objective.results), jax.ShapeDtypeStruct((), jnp.int32)]


def stash_shape(program: Program) -> tuple[int, int]:
    """Pages and words of the window through which stashes go to and from the arena."""
    return (max(program.stash_pages), PAGE)


def saved_shape(program: Program) -> tuple[int, int]:
    """Return the same for the cotangents that the weight part of the backward work waits for."""
    return (max(program.saved_pages), PAGE)


def touched(program: Program, kind: Kind) -> tuple[int, ...]:
    """The gradient buffers that backward work of a kind adds to, in any stage."""
    buffers: set[int] = set()
    for s, stage in enumerate(program.stages):
        device = program.device(s)
        places = zip(program.trained(device), program.gradients.places[device], strict=True)
        given = stage.differentiated(kind)
        buffer_of = {t: buffer for t, (buffer, _) in places}
        lent = {t: len(program.gradients.buffers) + k for k, t in enumerate(program.lent)}
        buffers.update(buffer_of.get(t, lent.get(t, -1)) for t in given)
    return tuple(sorted(buffers - {-1}))


def idle_forward(program: Program) -> Callable[..., Any]:
    """No forward work; the state stays."""

    def idle(_: Any, state: Any, *__: Any) -> Any:
        results = [_poisoned(a.shape, a.dtype) for a in made_avals(program)]
        message = jnp.full((program.message_words[0],), POISON)
        return message, jnp.full(stash_shape(program), POISON), list(state), results

    return idle


def idle_backward(program: Program) -> Callable[..., Any]:
    """No backward work, whole or of the input part."""

    def idle(*_: Any) -> Any:
        message = jnp.full((program.message_words[1],), POISON)
        saved = jnp.full(saved_shape(program), POISON)
        return message, saved, _idle_steps(program, program.schedule.backward_kind)

    return idle


def idle_weight(program: Program) -> Callable[..., Any]:
    """No work for weights."""
    return lambda *_: _idle_steps(program, Kind.BACKWARD_WEIGHT)


def _idle_steps(program: Program, kind: Kind) -> list[Any]:
    avals = program.gradient_avals
    return [_poisoned(avals[k].shape, avals[k].dtype) for k in touched(program, kind)]


def _poisoned(shape: Sequence[int], dtype: Any) -> Any:
    """An array that nothing may read: NaN where there is one, else every bit set."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.full(shape, jnp.nan, dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.ones(shape, dtype)
    return jnp.full(shape, jnp.iinfo(dtype).max, dtype)


def forward_branch(program: Program, s: int) -> Callable[..., Any]:
    """The forward work of a stage."""
    stage, device = program.stages[s], program.device(s)

    def forward(parameters: Any, state: Any, key: Any, rows: Rows, message: Any) -> Any:
        known = _at_hand(program, s, parameters, key, rows)
        variables = program.held(device)[1]
        known.update(zip(variables, program.state.read(device, state), strict=True))
        known.update(zip(stage.arriving, unpack_words(message, program.avals(stage.arriving)), strict=True))
        inputs = [known[t] for t in stage.graph.inputs]
        overflows = jnp.int32(0)
        if stage.vjp is None or not program.schedule.has_backward:
            outputs, stash = stage.graph.evaluate(inputs), []
        else:
            outputs, stash = vjp_program.forward(stage.vjp, inputs)
            overflows = vjp_program.overflows(stage.vjp, stash)
            kept = set(stage.stashed)
            stash = [x for t, parts in zip(stage.vjp.plan.stored, stash, strict=True) if t in kept for x in parts]
        value_of = dict(zip(stage.graph.outputs, outputs, strict=True))
        results = [
            value_of[t] if k in stage.results else jnp.zeros(a.shape, a.dtype)
            for k, (t, a) in enumerate(
                zip(program.objective.results, program.avals(program.objective.results), strict=True)
            )
        ]
        new = dict(zip(stage.state, stage.new_state, strict=True))
        return (
            pack_words([value_of[t] for t in stage.leaving], program.message_words[0]),
            stash if program.alone else _packed(stash, stash_shape(program)),
            program.state.write(device, [value_of[new[t]] if t in new else known[t] for t in variables]),
            [*results, overflows],
        )

    return forward


def backward_branch(program: Program, s: int) -> Callable[..., Any]:
    """The backward work of a stage, or its input part if the schedule splits it; none of a frozen stage."""
    if s < program.schedule.frozen:
        return idle_backward(program)
    stage = program.stages[s]
    following = program.stages[s + 1].returning if s + 1 < len(program.stages) else ()
    loss = program.objective.results[0]
    kind = program.schedule.backward_kind

    def backward(parameters: Any, key: Any, rows: Rows, stash: Any, message: Any) -> Any:
        built = stage.vjp
        assert built is not None
        known = _at_hand(program, s, parameters, key, rows)
        cotangents = dict(zip(following, unpack_words(message, program.tangents(following)), strict=True))
        if 0 in stage.results:
            seed = jnp.ones((), program.objective.graph.tensors[loss].dtype)
            cotangents[loss] = cotangents[loss] + seed if loss in cotangents else seed
        operands = _stashed(program, stage, known, stash)
        given = _once(built.backward_graph.source, cotangents)
        saved = []
        if kind is Kind.BACKWARD:
            cotangents_out = vjp_program.backward(built, *operands, given, fenced=True)
            gradients = dict(zip(built.backward_graph.wrt, cotangents_out, strict=True))
        else:
            cotangents_out, handed = vjp_program.backward_input(built, *operands, given, fenced=True)
            gradients = dict(zip(built.input_part, cotangents_out, strict=True))
            waiting = dict(zip(built.saved, handed, strict=True))
            saved = [waiting[t] for t in stage.saved]
        message = pack_words([gradients[t] for t in stage.returning], program.message_words[1])
        return message, _packed(saved, saved_shape(program)), _steps(program, s, kind, gradients)

    return backward


def weight_branch(program: Program, s: int) -> Callable[..., Any]:
    """The weight part of the backward work of a stage; none of a frozen one."""
    if s < program.schedule.frozen:
        return idle_weight(program)
    stage = program.stages[s]

    def weight(parameters: Any, key: Any, rows: Rows, stash: Any, saved: Any) -> Any:
        built = stage.vjp
        assert built is not None
        known = _at_hand(program, s, parameters, key, rows)
        handed = dict(zip(stage.saved, saved.read(program.tangents(stage.saved)), strict=True))
        operands = _stashed(program, stage, known, stash)
        weight_gradients = vjp_program.backward_weight(
            built, *operands, [handed.get(t) for t in built.saved], fenced=True
        )
        return _steps(program, s, Kind.BACKWARD_WEIGHT, dict(zip(built.weight_part, weight_gradients, strict=True)))

    return weight


def _at_hand(program: Program, s: int, parameters: Sequence[Any], key: Any, rows: Rows) -> dict[int, Any]:
    """Return the inputs that no stage sends: the micro-batch, its key, parameters that the device has or borrows."""
    device = program.device(s)
    known = dict(zip((*program.objective.batch, program.objective.key), (*rows.read(), key), strict=True))
    borrowed = parameters[len(program.parameters.buffers) :]
    known.update(zip(program.shared, borrowed, strict=True))
    known.update(zip(program.held(device)[0], program.parameters.read(device, parameters), strict=True))
    return known


def _stashed(program: Program, stage: Stage, known: dict[int, Any], stash: Any) -> tuple[list[Any], list[Any]]:
    """The parameters and the stash that a backward pass is given."""
    built = stage.vjp
    assert built is not None
    stored = iter(stash if program.alone else stash.read(program.stash_avals(stage)))
    counts = dict(zip(built.plan.stored, map(len, built.stash_avals), strict=True))
    arena = {t: [next(stored) for _ in range(counts[t])] for t in stage.stashed}
    parts = [arena[t] if t in arena else (known[t],) for t in built.plan.stored]
    return [known[t] for t in built.parameters], parts


def _packed(values: Sequence[Any], shape: tuple[int, int]) -> Any:
    return pack_words(values, shape[0] * shape[1]).reshape(shape)


def _steps(program: Program, s: int, kind: Kind, gradients: dict[int, Any]) -> list[Any]:
    """The buffers that work of a kind adds to, with a stage's gradients in them and zeros elsewhere."""
    device = program.device(s)
    trained = program.trained(device)
    given = program.stages[s].differentiated(kind)
    values = [
        gradients[t] if t in given and gradients.get(t) is not None else jnp.zeros(a.shape, a.dtype)
        for t, a in zip(trained, program.avals(trained), strict=True)
    ]
    written = program.gradients.write(device, values)
    for t, aval in zip(program.lent, program.gradient_avals[len(written) :], strict=True):
        here = t in given and t not in trained and gradients.get(t) is not None
        written.append(gradients[t].reshape(aval.shape) if here else jnp.zeros(aval.shape, aval.dtype))
    return [written[k] for k in touched(program, kind)]


def _once(graph: Graph, cotangents: dict[int, Any]) -> list[Any]:
    """A cotangent for each output; for one that is returned twice, only at its first place."""
    left = dict(cotangents)
    return [left.pop(t, None) for t in graph.outputs]
