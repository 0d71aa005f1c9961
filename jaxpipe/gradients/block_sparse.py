"""``block_sparse``: the block-sparse exchange with error feedback as an optax transformation."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpipe import _compat
from jaxpipe.array_types import Array, PyTree
from jaxpipe.errors import PartitionError
from jaxpipe.gradients.block_exchange import Rule, Traffic, exchange_one, sent_share, traffic
from jaxpipe.gradients.blocks import BlockRules, Blocks, Count, find_blocks
from jaxpipe.gradients.value_codes import CODES


class BlockSparseState(NamedTuple):
    """The residuals that a replica keeps from step to step.

    Attributes:
      step: steps taken, ``int32[]``.
      residual: what was not sent, for each parameter; empty, ``[0]``, for one that is always sent whole.
      sent_share: ``float32[1]``, the part of the last gradient's squared norm, residual included, that was sent.
      residual_norm: ``float32[1]``, the L2 norm of all residuals before they decay.
    """

    step: Array
    residual: PyTree
    sent_share: Array
    residual_norm: Array


@dataclass(frozen=True)
class Settings:
    """The arguments of ``block_sparse``, checked."""

    axis_name: str | None
    phases: tuple[tuple[int | None, Count], ...]
    dense_1d: bool
    rules: BlockRules
    rule: Rule
    bits: float | None

    def plans(self, tree: PyTree) -> list[tuple[Blocks, ...]]:
        """The blocks of each leaf, by phase."""
        return [find_blocks(tree, k, self.dense_1d, self.rules, self.rule.mode, self.bits) for _, k in self.phases]

    def phase(self, step: Array | int) -> Array:
        """The number of the phase that a step is in, ``int32[]``."""
        ends = itertools.accumulate(steps or 0 for steps, _ in self.phases[:-1])
        return sum((jnp.asarray(step) >= end for end in ends), start=jnp.zeros((), jnp.int32))


class BlockSparse(optax.GradientTransformationExtraArgs):
    """An optax transformation that knows how it was made."""

    settings: Settings

    def traffic(self, params: PyTree, step: int | None = None) -> Traffic:
        """Return the traffic of one replica in a step: the step of that number, or any after the warm-up.

        Args:
          params: arrays or shapes.
          step: counted from 0.
        """
        phase = -1 if step is None else int(self.settings.phase(step))
        return traffic(self.settings.plans(params)[phase], self.settings.rule.mode)


def block_sparse(
    axis_name: str | None = None,
    k: Count = 1,
    norm: Literal["l1", "l2"] = "l2",
    dense_1d: bool = True,
    mode: Literal["own", "consensus"] = "own",
    blocks: BlockRules | None = None,
    warmup: Sequence[tuple[int, Count]] = (),
    decay: float = 1.0,
    bits: float | None = None,
) -> BlockSparse:
    """Average gradients over replicas, sending only the best blocks of each and keeping the rest for later steps.

    A block is one filter of a convolution, the fan-in of one neuron of a dense layer, or one element of a vector.
    Each step adds the residual to the gradient, scores the blocks by their norm, sends the ``k`` best of each
    parameter, and keeps what was not sent as the new residual. What comes out is the average over the replicas of
    what they sent: chain it with ``optax.trace`` and ``optax.scale`` for the method's global momentum.

    That is error feedback. For Adam and its kind a residual is the first moment, too: it adds up gradients of some
    steps, blocks are chosen by it, and the optimizer divides what arrives. A first moment behind it would count twice:
    take it away, ``optax.adamw(rate, b1=0.0)``.

    Args:
      axis_name: the mesh axis of the replicas, inside ``shard_map``; None for a single replica.
      k: blocks sent of each parameter: a number, or a float for a fraction of them; or by pattern of paths (those of
        a shell, such as ``{"*Conv*": 4}``), 1 for what none fits. 1 of 4,096 is far more sparse than anything known to
        converge on large networks: warm up.
      norm: of a block, its score.
      dense_1d: parameters with one axis (biases, scales) are sent whole; False: element by element.
      mode: ``"own"``: each replica picks its blocks, which are gathered, so what arrives grows with their number.
        ``"consensus"``: all send the blocks whose L1 norms, or squares of L2 norms, summed over the replicas are
        largest.
      blocks: by pattern of paths, the axis that numbers blocks, -1 where none fits; ``(0, -1)`` if axis 0 stacks
        layers, each of which sends its own ``k``; ``"whole"`` to send all.
      warmup: ``(steps, k)`` for the first steps, one after the other: ``[(100, 1.0), (200, 0.25)]``.
      decay: by which residuals are multiplied after each step, from 0.0 to 1.0, which loses nothing. What is sent whole
        has no residual.
      bits: of an element of a block that is sent. 2: its sign and one of two magnitudes, with a scale in float32 for
        each block. 0.5: of eight neighbors place and sign of the largest one, with a scale for all ``k`` blocks. What
        that loses stays in the residual. In the warm-up, too, and not by consensus.

    Returns:
      A transformation. ``init`` makes a residual of zeros, which varies over the mesh axes that the parameters vary
      over; ``update(updates, state)`` takes a replica's own gradients and gives averages that have the same bits on all
      replicas. ``.traffic(params)`` counts what is sent.

    Raises:
      PartitionError: if an argument has no meaning or fits no parameter; in ``update``, if gradients were summed over
        the axis before.

    The method: error feedback after F. Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; choice by
    consensus after P. Sun et al., "Optimizing network performance for distributed DNN training on GPU clusters:
    ImageNet/AlexNet training in 1.5 minutes", 2019. A residual that is momentum, and what is sent leaves it, after B.
    Peng et al., "DeMo: Decoupled momentum optimization", arXiv 2411.19870; for Adam's kind, choice by the first moment
    after M. Zheng et al., "SCAPE: Accurate and efficient LLM training with extreme sparse communication", arXiv
    2607.01678, whose masks, late by a step and the same for all, are not built.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> optimizer = optax.chain(block_sparse(k=1), optax.trace(0.9), optax.scale(-0.1))
      >>> w = jnp.zeros((4, 3))
      >>> updates, state = optimizer.update(jnp.arange(12.0).reshape(4, 3), optimizer.init(w))
      >>> updates[:, 0].sum() == 0, updates[:, 2].tolist()
      (Array(True, dtype=bool), [-0.2..., -0.5, -0.8..., -1.1...])
    """
    if norm not in ("l1", "l2"):
        raise PartitionError(f"norm={norm!r}; it must be 'l1' or 'l2'.")
    if mode not in ("own", "consensus"):
        raise PartitionError(f"mode={mode!r}; it must be 'own' or 'consensus'.")
    if axis_name is not None and not isinstance(axis_name, str):
        raise PartitionError(f"axis_name={axis_name!r}; it must be the name of one mesh axis, or None.")
    if not 0 <= decay <= 1:
        raise PartitionError(f"decay={decay!r}; it must be from 0.0, by which nothing is left, to 1.0.")
    if bits not in (None, *CODES) or (bits and mode == "consensus"):
        raise PartitionError(
            f"bits={bits!r} with mode={mode!r}; it must be 2, 0.5 or None, and None by consensus, where values are "
            "added up on their way."
        )
    for phase in warmup if isinstance(warmup, Sequence) else (warmup,):
        if not isinstance(phase, (tuple, list)) or len(phase) != 2 or not isinstance(phase[0], int) or phase[0] < 1:
            raise PartitionError(f"warmup: {phase!r}; each entry must be (steps, k) with 1 or more steps.")
    phases = (*((steps, count) for steps, count in warmup), (None, k))
    settings = Settings(axis_name, phases, dense_1d, dict(blocks or {}), Rule(mode, norm, decay), bits)

    def init(params: optax.Params) -> BlockSparseState:
        leaves, tree = jax.tree.flatten(params)
        always = [all(b.is_whole for b in choices) for choices in zip(*settings.plans(params), strict=True)]

        def zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, like: Array) -> Array:
            return _compat.vary_as(jnp.zeros(shape, dtype), like)

        residual = [
            zeros((0,) if whole else x.shape, jnp.promote_types(x.dtype, jnp.float32), x)
            for x, whole in zip(leaves, always, strict=True)
        ]
        zero = zeros((1,), jnp.float32, leaves[0]) if leaves else jnp.zeros(1)
        return BlockSparseState(jnp.zeros((), jnp.int32), jax.tree.unflatten(tree, residual), zero, zero)

    def update(
        updates: optax.Updates, state: PyTree, params: optax.Params | None = None, **_: object
    ) -> tuple[optax.Updates, BlockSparseState]:
        leaves, tree = jax.tree.flatten(updates)
        _check_local(leaves, axis_name)
        residuals = jax.tree.leaves(state.residual)
        corrected = [g if not r.size else g.astype(r.dtype) + r for g, r in zip(leaves, residuals, strict=True)]

        plans = settings.plans(updates)
        branches = [functools.partial(exchange_one, plan, settings.rule, axis_name) for plan in plans]
        averages, left, squares, unsent = lax.switch(settings.phase(state.step), branches, corrected)
        kept = [new if old.size else old for old, new in zip(residuals, left, strict=True)]
        share, norm = sent_share(squares, unsent).reshape(1), jnp.sqrt(unsent).reshape(1)
        new = BlockSparseState(state.step + 1, jax.tree.unflatten(tree, kept), share, norm)
        return jax.tree.unflatten(tree, averages), new

    transformation = BlockSparse(init, update)
    transformation.settings = settings
    return transformation


def state_specs(state: optax.OptState, axis_name: str) -> optax.OptState:
    """The ``PartitionSpec`` of each leaf of an optimizer state: only residuals differ from replica to replica.

    Args:
      state: of an optax transformation in which ``block_sparse`` comes before all that keeps arrays (momentum, say),
        since what is before it sees gradients of its own on every replica; arrays or shapes.
      axis_name: the mesh axis of the replicas, along which residuals are put one after the other.

    Raises:
      PartitionError: if something that keeps arrays comes before ``block_sparse``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> tx = block_sparse("data")
      >>> params = {"kernel": jnp.ones((8, 4))}
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> specs = state_specs(jax.eval_shape(tx.init, params), "data")
      >>> state = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs))(params)
    """

    for part in jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, BlockSparseState)):
        if isinstance(part, BlockSparseState):
            break
        if part.ndim:
            raise PartitionError(
                f"state_specs: a state of shape {part.shape} comes before block_sparse in the chain, so it would "
                "differ from replica to replica. Put block_sparse first, or after what keeps no arrays."
            )

    def specs(part: PyTree) -> PyTree:
        if isinstance(part, BlockSparseState):
            residual = jax.tree.map(lambda _: P(axis_name), part.residual)
            return part._replace(step=P(), residual=residual, sent_share=P(axis_name), residual_norm=P(axis_name))
        return P()

    return jax.tree.map(specs, state, is_leaf=lambda part: isinstance(part, BlockSparseState))


def _check_local(gradients: Sequence[Array], axis_name: str | None) -> None:
    """Under ``shard_map`` with types, a gradient that does not vary over the axis was summed over it by JAX."""
    if axis_name is None or axis_name not in _compat.manual_axes(lax.axis_index(axis_name)):
        return
    if not all(axis_name in _compat.manual_axes(g) for g in gradients):
        raise PartitionError(
            f"block_sparse was given gradients that are the same on all replicas along {axis_name!r}: JAX has summed "
            "them when it differentiated by parameters that do not vary over the axis. Differentiate by "
            f"jax.lax.pcast(params, {axis_name!r}, to='varying')."
        )
