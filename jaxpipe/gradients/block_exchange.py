"""Exchange of blocks of gradients between replicas.

    own         each replica picks blocks ──all-gather of numbers and values──▶ every pick is added up
    consensus   norms ──all-reduce──▶ one choice for all ──all-reduce of its values──▶ the sums

Gradients that are sent whole go by one all-reduce in either mode. All that is sent of one type travels in one array.
The result is the average over the replicas; it has the same bits on all of them, as picks are added up in the order
of the replicas.

In a pipeline every stage has gradients of its own, but one program runs everywhere: what depends on the stage is
computed for all stages under ``by_stage``, a conditional, with arrays as long as the longest stage needs; the
collectives stand between the conditionals.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe import _compat
from jaxpipe.array_types import Array
from jaxpipe.gradients import block_numbers
from jaxpipe.gradients.blocks import Blocks, reduced_itemsize
from jaxpipe.gradients.squared_norm import squared_norm, squares_of


T = TypeVar("T")


class ByStage(Protocol):
    """A conditional over stages: ``by_stage(f)`` is ``f(s)`` on the devices of stage ``s``."""

    def __call__(self, function: Callable[[int], T], /) -> T:
        """Return the function's result for the stage of this device."""
        ...


@dataclass(frozen=True)
class Rule:
    """The rule by which blocks are chosen."""

    mode: Literal["own", "consensus"]  # each replica picks for itself, or all pick the same
    norm: Literal["l1", "l2"]
    decay: float = 1.0  # by which what is left is multiplied


@dataclass(frozen=True)
class Traffic:
    """The arrays that one replica hands to the collectives in one step.

    Attributes:
      values: elements of gradients, whole ones included.
      indices: numbers of blocks.
      number_bytes: bytes of these (``jaxpipe.gradients.block_numbers``).
      norms: of blocks, 4 bytes each.
      value_bytes: bytes of the values.
      dense_bytes: bytes of all gradients.
    """

    values: int
    indices: int
    number_bytes: int
    norms: int
    value_bytes: int
    dense_bytes: int

    @property
    def bytes(self) -> int:
        """All that is sent."""
        return self.value_bytes + self.number_bytes + 4 * self.norms


def traffic(plan: Sequence[Blocks], mode: str) -> Traffic:
    """Return the traffic of a replica for gradients that are cut as given.

    Example:
      >>> import jax
      >>> from jaxpipe.gradients.blocks import find_blocks
      >>> plan = find_blocks({"kernel": jax.ShapeDtypeStruct((100, 10), "float32")}, 1, True, {})
      >>> traffic(plan, "own").bytes, traffic(plan, "own").dense_bytes
      (401, 4000)
    """
    own_blocks = mode == "own"
    return Traffic(
        values=sum(b.values for b in plan),
        indices=sum(b.indices for b in plan) if own_blocks else 0,
        number_bytes=sum(b.number_bytes for b in plan) if own_blocks else 0,
        norms=0 if own_blocks else sum(b.layers * b.count for b in plan if not b.is_whole),
        value_bytes=sum(b.wire_bytes(mode) for b in plan),
        dense_bytes=sum(int(np.prod(b.shape, dtype=np.int64)) * b.dtype.itemsize for b in plan),
    )


class Averaged(NamedTuple):
    """A stage's share of an exchange."""

    gradients: list[Array]  # zero where nobody sent anything
    residuals: list[Array]
    squares: Array  # the sum of squares of all that this replica had
    unsent: Array  # the same of its residuals


class Messages(NamedTuple):
    """The arrays that have arrived from all replicas."""

    whole: dict[str, Array]  # by type, sums of gradients that are sent whole
    picks: Array  # codes of the numbers of blocks, a row for each sender; by consensus one
    values: dict[str, Array]  # by type, these blocks, in rows likewise


def exchange(
    plans: Sequence[Sequence[Blocks]],
    rule: Rule,
    axis_name: str | None,
    by_stage: ByStage,
    read: Callable[[int], Sequence[Array]],
    write: Callable[[int, Averaged], T],
) -> T:
    """Average gradients over the replicas along a mesh axis (None: one replica), sending the best blocks only.

    ``plans`` are by stage; ``read`` gives a stage's gradients with their residuals added.
    """
    chosen, messages = send(plans, rule, axis_name, by_stage, read)
    replicas = 1 if axis_name is None else lax.axis_size(axis_name)

    def finish(s: int) -> T:
        return write(s, Averaged(averages(plans[s], messages, replicas), *leave(plans[s], read(s), chosen, rule.decay)))

    return by_stage(finish)


def exchange_one(plan: Sequence[Blocks], rule: Rule, axis_name: str | None, gradients: Sequence[Array]) -> Averaged:
    """Average gradients, their residuals added, as ``exchange`` does where all replicas have one stage."""
    return exchange([plan], rule, axis_name, lambda f: f(0), lambda _: gradients, lambda _, averaged: averaged)


def send(
    plans: Sequence[Sequence[Blocks]],
    rule: Rule,
    axis_name: str | None,
    by_stage: ByStage,
    read: Callable[[int], Sequence[Array]],
) -> tuple[Array, Messages]:
    """Return the numbers of the blocks that this replica has sent, and what has arrived; arguments as ``exchange``."""
    wire = _Wire(plans, rule.mode)

    def total(x: Array) -> Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return wide if axis_name is None else lax.psum(wide, axis_name)

    def gathered(x: Array) -> Array:
        if axis_name is None:
            return x[None]
        if not x.size:
            return jnp.zeros((lax.axis_size(axis_name), 0), x.dtype)
        return lax.all_gather(x, axis_name, to="invarying")

    def scores(s: int) -> Array:
        block_scores = [_scores(b, x, rule.norm) for b, x in zip(plans[s], read(s), strict=True) if not b.is_whole]
        return _pad(block_scores, wire.norms, jnp.float32)

    def message(s: int, scores: Array) -> tuple[Array, Array, dict[str, Array], dict[str, Array]]:
        chosen = _choose(plans[s], scores)
        sparse = (b for b in plans[s] if not b.is_whole)
        codes = [block_numbers.encode(numbers, b.count) for b, numbers in zip(sparse, chosen, strict=True)]
        numbers = _pad(chosen, wire.indices, jnp.int32), _pad(codes, wire.number_bytes, jnp.uint8)
        return *numbers, *wire.pack(s, read(s), chosen)

    if rule.mode == "consensus":
        common = total(by_stage(scores))
        chosen, codes, whole, values = by_stage(lambda s: message(s, common))
        picks, arrived = codes[None], jax.tree.map(lambda v: total(v)[None], values)
    else:
        chosen, codes, whole, values = by_stage(lambda s: message(s, scores(s)))
        picks, arrived = gathered(codes), jax.tree.map(gathered, values)
    return chosen, Messages(jax.tree.map(total, whole), picks, arrived)


def averages(plan: Sequence[Blocks], messages: Messages, replicas: int) -> list[Array]:
    """Return the averages of a stage's gradients over the replicas; messages may be longer than the plan says."""
    codes = _cut(messages.picks, [b.number_bytes for b in plan])
    whole = {d: _cut(x, [b.values * _is(b, d, True) for b in plan]) for d, x in messages.whole.items()}
    values = {d: _cut(x, [b.wire_size * _is(b, d, False) for b in plan]) for d, x in messages.values.items()}
    sums = [
        whole[str(b.dtype)][k].reshape(b.shape) if b.is_whole else _add_up(b, codes[k], values[str(b.wire_dtype)][k])
        for k, b in enumerate(plan)
    ]
    return [(x / replicas).astype(b.dtype) for b, x in zip(plan, sums, strict=True)]


def _is(b: Blocks, dtype: str, whole: bool) -> bool:
    return (str(b.wire_dtype), b.is_whole) == (dtype, whole)


def leave(
    plan: Sequence[Blocks], gradients: Sequence[Array], chosen: Array, decay: float = 1.0
) -> tuple[list[Array], Array, Array]:
    """Return a stage's new residuals, and the sums of squares of its gradients and of what is left of them."""
    sent = _cut(chosen, [b.indices for b in plan])
    left = [_unsent(b, x, numbers) for b, x, numbers in zip(plan, gradients, sent, strict=True)]
    return [x * decay for x in left] if decay < 1 else left, squared_norm(gradients), squared_norm(left)


def message_shapes(plans: Sequence[Sequence[Blocks]], rule: Rule, replicas: int) -> Messages:
    """Return the shapes of what arrives where any of some plans may be followed."""
    wire, own_blocks = _Wire(plans, rule.mode), rule.mode == "own"
    rows = replicas if own_blocks else 1

    def by_type(lengths: Mapping[str, int], is_sum: bool, *rows: int) -> dict[str, Any]:
        types = {d: jnp.promote_types(d, jnp.float32) if is_sum else d for d in lengths}
        return {d: jax.ShapeDtypeStruct((*rows, n), types[d]) for d, n in lengths.items()}

    picks: Any = jax.ShapeDtypeStruct((rows, wire.number_bytes), jnp.uint8)
    return Messages(by_type(wire.whole, True), picks, by_type(wire.values, not own_blocks, rows))


def sent_share(squares: Array, unsent: Array) -> Array:
    """The part of a squared norm that was sent; all of nothing."""
    return 1 - unsent / jnp.where(squares == 0, 1, squares)


def wire_bytes(plans: Sequence[Sequence[Blocks]], mode: str) -> tuple[int, int]:
    """Bytes that every device hands to gathers and to reductions: as many as the stage needs that needs most."""
    wire = _Wire(plans, mode)
    if mode == "own":
        return wire.number_bytes + wire.value_bytes, wire.whole_bytes
    return 0, 4 * wire.norms + wire.value_bytes + wire.whole_bytes


class _Wire:
    """The arrays that travel: as long as the longest stage needs, for each type one whole and one of blocks."""

    def __init__(self, plans: Sequence[Sequence[Blocks]], mode: str):
        self._plans = plans
        dtypes = sorted({str(b.wire_dtype) for plan in plans for b in plan})

        def longest(length: Callable[[Blocks], int]) -> int:
            return max(sum(map(length, plan)) for plan in plans)

        self.indices = longest(lambda b: b.indices)
        self.number_bytes = longest(lambda b: b.number_bytes)
        self.norms = longest(lambda b: 0 if b.is_whole else b.layers * b.count)
        self.whole = {d: longest(lambda b, d=d: b.values * _is(b, d, True)) for d in dtypes}
        self.values = {d: longest(lambda b, d=d: b.wire_size * _is(b, d, False)) for d in dtypes}
        #: Bytes of what is sent whole, and of the blocks.
        self.whole_bytes = sum(reduced_itemsize(d) * n for d, n in self.whole.items())
        width = reduced_itemsize if mode == "consensus" else lambda dtype: np.dtype(dtype).itemsize
        self.value_bytes = sum(width(d) * n for d, n in self.values.items())

    def pack(
        self, s: int, gradients: Sequence[Array], chosen: Sequence[Array]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Whole gradients and chosen blocks, by type."""
        numbers = iter(chosen)
        pairs = zip(self._plans[s], gradients, strict=True)
        parts = [(b, x if b.is_whole else _take(b, x, next(numbers))) for b, x in pairs]

        def packed(lengths: Mapping[str, int], is_whole: bool) -> dict[str, Array]:
            return {d: _pad([x for b, x in parts if _is(b, d, is_whole)], n, d) for d, n in lengths.items()}

        return packed(self.whole, True), packed(self.values, False)


def _scores(b: Blocks, x: Array, norm: str) -> Array:
    """``float32[layers, count]``: the L1 norm of each block, or the square of its L2 norm."""
    sums = jnp.sum(jnp.abs(x).astype(jnp.float32) if norm == "l1" else squares_of(x), axis=b.inside)
    remaining = sorted(b.numbered)
    return jnp.transpose(sums, [remaining.index(a) for a in b.numbered]).reshape(b.layers, b.count)


def _choose(plan: Sequence[Blocks], scores: Array) -> list[Array]:
    """``int32[layers, k]`` for each gradient that is not sent whole: its best blocks, ascending; of equals, the first.

    A block with a NaN is sent before others, whatever the NaN's sign: it would never leave the residual otherwise.
    """
    sparse = [b for b in plan if not b.is_whole]
    scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    parts = _cut(scores, [b.layers * b.count for b in sparse])
    best = [lax.top_k(part.reshape(b.layers, b.count), b.k)[1] for b, part in zip(sparse, parts, strict=True)]
    return [jnp.sort(numbers) for numbers in best]


def _take(b: Blocks, x: Array, numbers: Array) -> Array:
    """``[layers, k, size]``: the chosen blocks, or ``[layers, bytes]``: their codes."""
    blocks = _chosen_blocks(b, x, numbers)
    return blocks if b.code is None else b.code.encode(blocks)


def _chosen_blocks(b: Blocks, x: Array, numbers: Array) -> Array:
    return jnp.take_along_axis(b.to_blocks(x), numbers[:, :, None], axis=1, mode="promise_in_bounds")


def _add_up(b: Blocks, codes: Array, values: Array) -> Array:
    """The sum of the blocks that each sender has picked, zero elsewhere, in the shape of the gradient."""
    numbers = block_numbers.decode(codes.reshape(*codes.shape[:-1], b.layers, -1), b.count, b.k)
    values = values.reshape(len(numbers), b.layers, -1)
    values = values.reshape(*numbers.shape, -1) if b.code is None else b.code.decode(values, b.k, b.size)
    values = values.astype(jnp.promote_types(b.dtype, jnp.float32))
    layer = jnp.arange(b.layers)[:, None]

    def add(r: Array, total: Array) -> Array:
        return total.at[layer, numbers[r]].add(values[r], unique_indices=True, mode="promise_in_bounds")

    empty = _compat.vary_as(jnp.zeros((b.layers, b.count, b.size), values.dtype), values)
    return b.from_blocks(lax.fori_loop(0, values.shape[0], add, empty))


def _unsent(b: Blocks, x: Array, numbers: Array) -> Array:
    """Return the rest of a gradient that has been sent whole, or of which the blocks with some numbers have been.

    Nothing of what was sent is left but what its type or its code could not hold; of what is not finite, nothing.
    """
    if b.is_whole:
        return _lost(b, x)
    numbers, layer = numbers.reshape(b.layers, b.k), jnp.arange(b.layers)[:, None]
    if b.code is None:
        chosen = jnp.zeros((b.layers, b.count, 1), bool).at[layer, numbers].set(True)
        return jnp.where(b.from_blocks(jnp.repeat(chosen, b.size, -1)), _lost(b, x), x)
    lost = _lost(b, _chosen_blocks(b, x, numbers))
    blocks = b.to_blocks(x).at[layer, numbers].set(lost, unique_indices=True, mode="promise_in_bounds")
    return b.from_blocks(blocks)


def _lost(b: Blocks, sent: Array) -> Array:
    """Return what the type or the code of some values does not hold of them."""
    nothing = _compat.vary_as(jnp.zeros(sent.shape, sent.dtype), sent)
    if b.code is None and sent.dtype == b.dtype:
        return nothing
    arrived = sent.astype(b.dtype) if b.code is None else b.code.decode(b.code.encode(sent), b.k, b.size)
    lost = sent - arrived.astype(sent.dtype)
    return jnp.where(jnp.isfinite(lost), lost, nothing)


def _pad(parts: Sequence[Array], length: int, dtype: jax.typing.DTypeLike) -> Array:
    """All parts, flat, one after the other, and zeros up to a length."""
    flat = [part.reshape(-1).astype(dtype) for part in parts if part.size]
    missing = length - sum(part.size for part in flat)
    if missing or not flat:
        flat.append(jnp.zeros(missing, dtype))
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def _cut(flat: Array, lengths: Sequence[int]) -> list[Array]:
    """The first elements along the last axis, in parts of the given lengths."""
    ends = np.cumsum([0, *lengths]).tolist()
    return [lax.slice_in_dim(flat, start, stop, axis=-1) for start, stop in itertools.pairwise(ends)]
