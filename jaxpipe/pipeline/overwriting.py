"""New parameters and optimizer state, each written over the old one before the next is computed.

    gradient, old state ─▶ new state ─▶ written ─▶ read there ─▶ new parameter ─▶ written     and the next parameter

So nothing as large as the parameters of a stage is made besides. XLA copies a buffer that is written to unless all that
reads what was there before is known to come first; fences between the steps say so.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxpipe import _compat
from jaxpipe.graph import Operator, ordered, run
from jaxpipe.pipeline.layout import Layout
from jaxpipe.pipeline.optimizer import ColouredUpdate, exchanged_values, held_by, operators_of
from jaxpipe.pipeline.switch import overwrite


@dataclass(frozen=True, eq=False)
class Renewal:
    """A parameter or a part of the optimizer state that gets a new value.

    Attributes:
      old, new: tensor numbers.
      operators: that make the new value, of what is there when those before it have been written.
    """

    old: int
    new: int
    operators: tuple[Operator, ...]

    @property
    def reads(self) -> list[int]:
        """Tensors that the operators read and do not make; the new value if there are none."""
        made = {t for op in self.operators for t in op.outputs}
        return ordered(t for t in (*(t for op in self.operators for t in op.inputs), self.new) if t not in made)


def renewals(update: ColouredUpdate, s: int, everywhere: Collection[int]) -> list[Renewal]:
    """What a stage writes, in order: the state that a new parameter is computed from, then that parameter.

    Args:
      update: the coloured program.
      s: the stage.
      everywhere: tensors that all stages have.
    """
    parameters, _, state = held_by(update, s)
    olds, news = (*update.parameters, *update.state), (*update.new_parameters, *update.new_state)
    new = dict(zip(olds, news, strict=True))
    maker = {t: op for op in operators_of(update, s) for t in op.outputs}
    known = set(everywhere)
    left = dict.fromkeys(state)
    found = []

    def renew(t: int) -> None:
        operators = _behind(new[t], maker, known)
        found.append(Renewal(t, new[t], tuple(operators)))
        known.update(u for op in operators for u in op.outputs)

    for t in parameters:
        for u in Renewal(t, new[t], tuple(_behind(new[t], maker, known))).reads:
            if u in left:
                left.pop(u)
                renew(u)
        renew(t)
    for t in left:
        renew(t)
    return [x for x in found if x.new != x.old]


def _behind(wanted: int, maker: dict[int, Operator], known: Collection[int]) -> list[Operator]:
    """The operators that make a tensor from what is known, in an order in which they can run."""
    found: dict[int, Operator] = {}
    waiting = [(wanted, False)]
    while waiting:
        t, ready = waiting.pop()
        op = maker.get(t)
        if op is None or t in known or op.outputs[0] in found:
            continue
        if ready:
            found[op.outputs[0]] = op
        else:
            waiting += [(t, True), *((u, False) for u in reversed(op.inputs))]
    return list(found.values())


def run_update(
    update: ColouredUpdate,
    stage: Any,
    together: Callable[[Any], Any],
    layouts: tuple[Layout, Layout],
    own: tuple[Sequence[Any], Sequence[Any]],
    gradients: Sequence[Any],
    shared: Sequence[Any],
    unless: Any = None,
    rates: Sequence[float] | None = None,
) -> tuple[list[Any], list[Any], list[Any]]:
    """One update, inside ``shard_map``.

    Args:
      update: the coloured program.
      stage: this device's stage, a tracer.
      together: the sum over the stages.
      layouts: of parameters and of state.
      own: this device's buffers of both.
      gradients: in the buffers of the parameters.
      shared: the state of which every stage has a copy.
      unless: whether nothing changes.
      rates: by stage, how far parameters go from the old values to the new ones, if not all the way.

    Returns:
      Parameters, state, and shared state.
    """
    stages = range(len(layouts[0].avals))

    def read(s: int) -> Any:
        held = own[0], gradients, own[1]
        return tuple(x.read(s, buffers) for x, buffers in zip((layouts[0], *layouts), held, strict=True))

    everywhere = exchanged_values(update, stage, together, read, shared, len(stages))

    def branch(s: int) -> Callable[..., Any]:
        rate = None if rates is None else rates[s]
        return functools.partial(_overwrite_stage, update, s, everywhere, layouts, rate=rate)

    parameters, state = overwrite(stage, [*map(branch, stages)], tuple(map(list, own)), gradients, unless)
    new = [everywhere[n] for n, s in zip(update.new_state, update.state_stage, strict=True) if s is None]
    if unless is not None:
        new = [jnp.where(unless, before, after) for before, after in zip(shared, new, strict=True)]
    return parameters, state, new


def _overwrite_stage(
    update: ColouredUpdate,
    s: int,
    everywhere: dict[int, Any],
    layouts: tuple[Layout, Layout],
    own: tuple[Sequence[Any], Sequence[Any]],
    gradients: Sequence[Any],
    after: Any,
    rate: float | None = None,
) -> tuple[list[Any], list[Any]]:
    """A stage's new parameters and state in place of the old ones.

    Args:
      update: the coloured program.
      s: the stage.
      everywhere: values by tensor number that all stages have, those that were exchanged included.
      layouts: of parameters and of state.
      own: buffers of parameters and of state.
      gradients: in the buffers of the parameters.
      after: an integer before which nothing is done.
      rate: how far parameters go from the old values to the new ones; all the way if there is none.
    """
    by_part = layouts[0], layouts[0], layouts[1]
    numbers = held_by(update, s)
    place = {t: (part, n) for part, ts in enumerate(numbers) for n, t in enumerate(ts)}
    gradients_held = set(numbers[1])
    hidden = [_compat.disguise(x, after) for x in gradients]
    buffers = list(map(list, _compat.fence(((own[0], hidden, own[1]), after))[0]))
    known = dict(everywhere)
    written: dict[int, int] = {}  # a new value: the old one in whose place it is

    def read(t: int) -> Any:
        part, n = place[t]
        value = by_part[part].get(s, n, buffers[part])
        # XLA writes over what a fused computation reads, but not if it has another shape in there.
        return _compat.fence(value) if by_part[part].is_whole(s, n) else value

    before = None
    for step in renewals(update, s, everywhere.keys()):
        for t in step.reads:
            if t in written:
                known[t] = read(written[t])  # not to be computed again from what was there before
            elif t in gradients_held:
                known[t] = read(t) if before is None else _compat.disguise(read(t), read(before))
            elif t in place and t not in known:
                known[t] = read(t)
        run(step.operators, known)
        known.setdefault(step.old, read(step.old))  # for those that compute with the old value later
        part, n = place[step.old]
        value = known[step.new]
        if rate is not None and part == 0:
            old = known[step.old]
            value = old + jnp.asarray(rate, old.dtype) * (value - old)
        value = _compat.fence(value) if by_part[part].is_whole(s, n) else value
        buffers[part] = by_part[part].put(s, n, buffers[part], value)
        buffers[:] = _compat.fence(buffers)
        written[step.new] = before = step.old
    return buffers[0], buffers[2]
