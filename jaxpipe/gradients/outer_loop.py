"""``outer_loop``: inner steps without an exchange, and an outer optimizer on what the replicas have moved by.

    replica   step step step ... step │ outer - own ──blocks or all──▶ average ─▶ outer optimizer ─▶ new outer
                                      │ goes on from the new outer parameters, and from what it did not send
    fragments of the parameters have their turns one after the other, so that bytes are spread over the steps

The outer optimizer sees each parameter by itself, so that neither fragments nor stages change what it does. A replica's
own parameters are its error feedback: what was not sent is still between them and the outer ones at its next turn.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxpipe import _compat
from jaxpipe.array_types import Array, DType, PyTree, Shaped
from jaxpipe.errors import PartitionError
from jaxpipe.gradients.block_exchange import Traffic, exchange_one, traffic
from jaxpipe.gradients.block_sparse import BlockSparse, Settings, block_sparse
from jaxpipe.gradients.blocks import Blocks
from jaxpipe.text.units import whole_number


class OuterLoopState(NamedTuple):
    """The state of ``outer_loop``, of which only ``pending`` differs from replica to replica.

    Attributes:
      step: steps taken, ``int32[]``.
      outer: the outer parameters, in at least 32 bits.
      optimizer: for each parameter the state of the outer optimizer.
      pending: with a delay, by what each parameter is to be moved when it is over; empty, ``[0]``, without.
    """

    step: Array
    outer: PyTree
    optimizer: PyTree
    pending: PyTree


@dataclass(frozen=True)
class OuterSettings:
    """The arguments of ``outer_loop``, checked."""

    axis_name: str | None
    inner_steps: int
    optimizer: optax.GradientTransformation
    exchange: Settings
    fragments: int
    delay: int

    def plans(self, tree: PyTree) -> list[tuple[Blocks, ...]]:
        """Return by fragment the blocks of its leaves."""
        wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, wide_dtype(x)), tree)
        (blocks,) = self.exchange.plans(wide)
        return [tuple(blocks[k] for k in numbers) for numbers in self.leaves(jax.tree.leaves(tree))]

    def leaves(self, leaves: Sequence[Shaped]) -> list[list[int]]:
        """Return by fragment the numbers of its leaves: neighbors, with about as many elements as in the others.

        Raises:
          PartitionError: if there are too few leaves.
        """
        sizes = [int(np.prod(x.shape, dtype=np.int64)) for x in leaves]
        middles = [stop - size / 2 for stop, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
        parts: list[list[int]] = [[] for _ in range(self.fragments)]
        for k, middle in enumerate(middles):
            parts[min(self.fragments - 1, int(self.fragments * middle / max(1, sum(sizes))))].append(k)
        filled = sum(map(bool, parts))
        if filled < self.fragments:
            raise PartitionError(
                f"fragments={self.fragments} of {len(leaves)} parameters, the largest with {max(sizes, default=0):,} "
                f"of {sum(sizes):,} elements: only {filled} would have one. A parameter is in one fragment; pass fewer."
            )
        return parts

    def due(self, step: Array) -> Array:
        """Return which fragment is exchanged after so many steps, counted from 1; 0 for none."""
        apart = self.inner_steps // self.fragments
        number = (step % self.inner_steps // apart - 1) % self.fragments + 1
        return jnp.where((step % apart == 0) & (step > 0), number, 0)

    def after(
        self, step: Array, held: PyTree, exchanged: Callable[..., PyTree], moved: Callable[..., PyTree]
    ) -> PyTree:
        """Return what is held, parameters first and what is pending last, after what is due at a step.

        ``exchanged(fragment, *held)`` is all of it after an exchange, ``moved(fragment, parameters, pending)`` are the
        parameters after what was pending.
        """
        turns, moves = ([functools.partial(f, k) for k in range(self.fragments)] for f in (exchanged, moved))
        now, *others = lax.switch(self.due(step), [lambda *held: list(held), *turns], *held)
        if self.delay:
            now = lax.switch(self.due(step - self.delay), [lambda now, _: now, *moves], now, others[-1])
        return [now, *others]

    def difference(self, outer: Array, now: Array) -> Array:
        """Return the pseudo-gradient of a parameter: what it has moved by, downward."""
        return outer - now.astype(outer.dtype)

    def advance(self, average: Array, outer: Array, slots: PyTree) -> tuple[Array, PyTree]:
        """Return an outer parameter and the state of its optimizer after an update with an average."""
        updates, slots = self.optimizer.update(average, slots, outer)
        return jnp.asarray(optax.apply_updates(outer, updates)), slots

    def restart(self, outer: Array, left: Array, now: Array) -> Array:
        """Return the parameter with which a replica goes on, of what it did not send; with a delay the way to it."""
        after = outer - left
        return after - now.astype(outer.dtype) if self.delay else after.astype(now.dtype)

    def move(self, now: Array, pending: Array) -> Array:
        """Return a parameter after what was pending; what a replica has learned meanwhile stays."""
        return (now.astype(pending.dtype) + pending).astype(now.dtype)


class OuterLoop(optax.GradientTransformationExtraArgs):
    """An optax transformation that knows how it was made."""

    settings: OuterSettings

    def traffic(self, params: PyTree) -> list[Traffic]:
        """Return what one replica sends of each fragment, once in ``inner_steps`` steps.

        Args:
          params: arrays or shapes.
        """
        return [traffic(plan, self.settings.exchange.rule.mode) for plan in self.settings.plans(params)]

    def bytes_per_step(self, params: PyTree) -> float:
        """Return the bytes that one replica sends in a step, on average over ``inner_steps`` of them."""
        return sum(part.bytes for part in self.traffic(params)) / self.settings.inner_steps


def outer_loop(
    axis_name: str | None = None,
    inner_steps: int = 16,
    optimizer: optax.GradientTransformation | None = None,
    exchange: BlockSparse | Literal["dense"] = "dense",
    fragments: int = 1,
    delay: int = 0,
) -> OuterLoop:
    """Train replicas apart for some inner steps, then move the outer parameters by the average of what they learned.

    A replica has parameters and an optimizer state of its own. After ``inner_steps`` steps its pseudo-gradient, the
    outer parameters less its own, is averaged over the replicas; the outer optimizer takes that for a gradient, and
    all replicas go on from the new outer parameters. Their inner optimizers keep their states. Where only the best
    blocks are sent, a replica keeps for itself what it did not send, until that is among the best.

    As an optax transformation it stands last in a chain, and its updates lead to the outer parameters where it is due.
    In ``partition(gradient_exchange=)`` it stands beside the optimizer.

    Args:
      axis_name: the mesh axis of the replicas, inside ``shard_map`` or ``vmap``; None for a single replica, and inside
        ``partition``.
      inner_steps: between two exchanges of a parameter.
      optimizer: any optax optimizer, which gets each parameter by itself; left out,
        ``optax.sgd(0.7, momentum=0.9, nesterov=True)``. ``optax.sgd(1.0)`` averages the replicas' parameters.
      exchange: ``"dense"``, or ``block_sparse(...)`` for the best blocks of the pseudo-gradient.
      fragments: into how many parts the parameters are cut, of about as many elements, in the order of their tree; part
        f has its turn at step ``(f + 1) * inner_steps / fragments`` of each round.
      delay: after how many more steps the result of an exchange is used. So long the bytes have, while replicas go on;
        what they learn meanwhile is added to it.

    Raises:
      PartitionError: if an argument has no meaning, or the exchange has a warm-up or an axis of its own.

    The method: A. Douillard et al., "DiLoCo: Distributed low-communication training of language models", arXiv
    2311.08105; fragments and delay after A. Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv
    2501.18512, what is learned meanwhile after S. Kale et al., "Eager updates for overlapped communication and
    computation in DiLoCo", arXiv 2502.12996; blocks with error feedback in place of the outer momentum after A. Sarfi
    et al., "Communication efficient LLM pre-training with SparseLoCo", arXiv 2508.15706. That the feedback stays in the
    replica's parameters is our own.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> optimizer = optax.chain(optax.sgd(0.5), outer_loop("data", inner_steps=2, optimizer=optax.sgd(1.0)))
      >>> w = jnp.zeros(2)
      >>> state = jax.vmap(optimizer.init)(w)
      >>> for _ in range(2):
      ...     gradients = w - jnp.array([1.0, 3.0])  # each replica has a goal of its own
      ...     updates, state = jax.vmap(optimizer.update, axis_name="data")(gradients, state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(w)
      [0.5 1.5]
      [1.5 1.5]
    """
    inner_steps = whole_number(inner_steps, "inner_steps", PartitionError)
    fragments = whole_number(fragments, "fragments", PartitionError)
    delay = whole_number(delay, "delay", PartitionError)
    if axis_name is not None and not isinstance(axis_name, str):
        raise PartitionError(f"axis_name={axis_name!r}; it must be the name of one mesh axis, or None.")
    if inner_steps < 1 or fragments < 1 or inner_steps % fragments:
        raise PartitionError(
            f"inner_steps={inner_steps} with fragments={fragments}; both must be 1 or more, and the fragments must "
            "divide the steps, so that each has its turn at a step."
        )
    if not 0 <= delay < inner_steps:
        raise PartitionError(f"delay={delay} with inner_steps={inner_steps}; it must be from 0 to {inner_steps - 1}.")
    optimizer = optax.sgd(0.7, momentum=0.9, nesterov=True) if optimizer is None else optimizer
    if not isinstance(optimizer, optax.GradientTransformation):
        raise PartitionError(f"optimizer={optimizer!r}; it must be an optax optimizer, such as optax.sgd(0.7).")
    chosen = _check_blocks(exchange)
    settings = OuterSettings(axis_name, inner_steps, optimizer, chosen, fragments, delay)

    def init(params: optax.Params) -> OuterLoopState:
        leaves, tree = jax.tree.flatten(params)
        outer = [jnp.array(x, wide_dtype(x), copy=True) for x in leaves]  # a step may donate both
        pending = [_compat.vary_as(jnp.zeros(x.shape if delay else (0,), x.dtype), x) for x in outer]
        groups = outer, [optimizer.init(x) for x in outer], pending
        return OuterLoopState(jnp.zeros((), jnp.int32), *(jax.tree.unflatten(tree, group) for group in groups))

    def update(
        updates: optax.Updates, state: PyTree, params: optax.Params | None = None, **_: object
    ) -> tuple[optax.Updates, OuterLoopState]:
        if params is None:
            raise ValueError("outer_loop: update(updates, state, params) needs the parameters, and got none.")
        before, tree = jax.tree.flatten(params)
        now = jax.tree.leaves(optax.apply_updates(params, updates))
        held = [now, *(tree.flatten_up_to(part) for part in (state.outer, state.optimizer, state.pending))]
        parts, plans, step = settings.leaves(now), settings.plans(params), state.step + 1

        def exchanged(fragment: int, *held: list[PyTree]) -> list[list[PyTree]]:
            now, outer, slots, pending = map(list, held)
            gone = [settings.difference(outer[k], now[k]) for k in parts[fragment]]
            averaged = exchange_one(plans[fragment], chosen.rule, axis_name, gone)
            for k, average, left in zip(parts[fragment], averaged.gradients, averaged.residuals, strict=True):
                outer[k], slots[k] = settings.advance(average, outer[k], slots[k])
                (pending if delay else now)[k] = settings.restart(outer[k], left, now[k])
            return [now, outer, slots, pending]

        def moved(fragment: int, now: list[Array], pending: list[Array]) -> list[Array]:
            turn = parts[fragment]
            return [settings.move(x, pending[k]) if k in turn else x for k, x in enumerate(now)]

        now, outer, slots, pending = settings.after(step, held, exchanged, moved)
        new = (jax.tree.unflatten(tree, part) for part in (outer, slots, pending))
        changes = [x - y for x, y in zip(now, before, strict=True)]
        return jax.tree.unflatten(tree, changes), OuterLoopState(step, *new)

    transformation = OuterLoop(init, update)
    transformation.settings = settings
    return transformation


def wide_dtype(x: Shaped) -> DType:
    """Return the type of the outer parameter that stands for a parameter: its own, of at least 32 bits."""
    return np.dtype(jnp.promote_types(x.dtype, jnp.float32))


def _check_blocks(exchange: object) -> Settings:
    """Return how pseudo-gradients are cut into blocks; a dense exchange has none."""
    if isinstance(exchange, str) and exchange == "dense":
        return block_sparse(blocks={"*": "whole"}).settings
    if not isinstance(exchange, BlockSparse):
        raise PartitionError(f"exchange={exchange!r}; it must be 'dense' or jaxpipe.gradients.block_sparse(...).")
    settings = exchange.settings
    if settings.axis_name is not None or len(settings.phases) > 1:
        raise PartitionError(
            f"exchange=block_sparse(...) with axis_name={settings.axis_name!r} and {len(settings.phases) - 1} phases "
            "of a warm-up; in an outer loop the axis is the loop's own, and there is no warm-up. Leave both out."
        )
    return settings
