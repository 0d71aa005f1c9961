"""An optax transformation that keeps float32 copies of parameters that are narrower."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpipe.array_types import Array, PyTree, Shaped


class MasterWeightsState(NamedTuple):
    """State of ``master_weights``.

    Attributes:
      masters: a float32 copy of each parameter that is narrower; ``optax.MaskedNode()`` in the place of another one.
      inner: the state of the wrapped optimizer, which has ``masters`` for its parameters.
    """

    masters: PyTree
    inner: optax.OptState


def master_weights(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Run an optimizer on float32 copies of bfloat16 or float16 parameters.

    A bfloat16 weight has 8 significant bits: an update that is less than 1/512 of it is lost. Here such updates add up
    in a float32 copy, the master weight, and ``optax.apply_updates`` gives the parameter that is the copy rounded.
    Moments and all other state of the optimizer are float32, too. Parameters that are not narrower than float32 have no
    copy and are updated as without this.

    Inside ``partition`` the optimizer gets the mean gradient in float32, not rounded to the parameters' type.

    Parameters are set by adding a float32 difference, as optax does: exactly, unless a weight shrinks to less than
    2**-15 of itself (2**-12 in float16) in one step and is not zero; then it may be off by 2**-23 of what it was, until
    the next step.

    Args:
      optimizer: any optax transformation, with all that belongs to it (clipping, schedules, weight decay).

    Returns:
      A transformation whose ``update`` needs ``params``. Its state is a ``MasterWeightsState``.

    The method: P. Micikevicius et al., "Mixed precision training", ICLR 2018.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> optimizer = master_weights(optax.sgd(1.0))
      >>> w = jnp.ones(1, jnp.bfloat16)
      >>> state = optimizer.init(w)
      >>> for _ in range(8):
      ...     updates, state = optimizer.update(jnp.full(1, 2.0**-10), state, w)
      ...     w = optax.apply_updates(w, updates)
      >>> w.dtype.name, w.item() == 1 - 8 * 2.0**-10
      ('bfloat16', True)
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> MasterWeightsState:
        masters = jax.tree.map(lambda p: p.astype(jnp.float32) if is_narrow(p) else optax.MaskedNode(), params)
        return MasterWeightsState(masters, inner.init(_wide(params, masters)))

    def update(
        updates: optax.Updates, state: PyTree, params: optax.Params | None = None, **extra: object
    ) -> tuple[optax.Updates, MasterWeightsState]:
        if params is None:
            raise ValueError("master_weights: update(updates, state, params) needs the parameters, and got none.")
        wide = _wide(params, state.masters)
        updates = jax.tree.map(lambda p, g: g.astype(jnp.float32) if is_narrow(p) else g, params, updates)
        updates, new_inner = inner.update(updates, state.inner, wide, **extra)
        new = optax.apply_updates(wide, updates)
        masters = jax.tree.map(lambda p, w: w if is_narrow(p) else optax.MaskedNode(), params, new)
        updates = jax.tree.map(lambda p, w, u: _difference(p, w) if is_narrow(p) else u, params, new, updates)
        return updates, MasterWeightsState(masters, new_inner)

    return optax.GradientTransformationExtraArgs(init, update)


def is_narrow(x: Shaped) -> bool:
    """Return whether an array is of a floating-point type that is narrower than float32."""
    return jnp.issubdtype(x.dtype, jnp.floating) and np.dtype(x.dtype).itemsize < 4


def _wide(params: PyTree, masters: PyTree) -> PyTree:
    """The parameters, with a master weight in the place of each that has one."""
    return jax.tree.map(lambda p, w: w if is_narrow(p) else p, params, masters)


def _difference(param: Array, master: Array) -> Array:
    """The float32 difference between a parameter and its master weight rounded to the parameter's type.

    XLA may leave out a cast and the cast back; neither ``reduce_precision``, which stays in one kernel but makes
    subnormal float16 numbers zero, nor casts on both sides of a barrier.
    """
    kind = jnp.finfo(param.dtype)
    if kind.nexp == jnp.finfo(jnp.float32).nexp:
        rounded = jax.lax.reduce_precision(master, kind.nexp, kind.nmant)
    else:
        rounded = jax.lax.optimization_barrier(master.astype(param.dtype)).astype(jnp.float32)
    return rounded - param.astype(jnp.float32)
