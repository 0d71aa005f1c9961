"""A transformation that looks at the gradients of each pipeline stage apart."""

import contextlib
from collections.abc import Sequence
from contextvars import ContextVar

import jax
import optax

from jaxpipe.context_values import holding


class _Stages:
    """The stage of every leaf of the gradients, and whether a transformation has asked."""

    def __init__(self, numbers: Sequence[int]):
        self.numbers = tuple(numbers)
        self.asked = False


_STAGES: ContextVar[_Stages | None] = ContextVar("stages", default=None)


def known_stages(numbers: Sequence[int]) -> contextlib.AbstractContextManager[_Stages]:
    """Tell ``per_stage`` the stages of the leaves while an optimizer is traced; ``asked`` says whether it is there."""
    return holding(_STAGES, _Stages(numbers))


def per_stage(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply a transformation to the gradients of each pipeline stage as if there were no others.

    For transformations that read the whole tree, such as clipping by the global norm. With asynchronous updates
    (``schedule="pipedream"``), a late stage updates before the gradient of an early one exists, so only the norm of its
    own is known. The result depends on where the model is cut; the plan says so. Stages are those that ``partition``
    chooses, together where a device has several; outside of a pipeline, all parameters are one stage.

    Args:
      transformation: keeps no arrays, which a checkpoint could not restore into another number of stages.

    Raises:
      ValueError: from ``init``, if it keeps some.

    Example:
      >>> import optax
      >>> from jaxpipe.gradients import per_stage
      >>> optimizer = optax.chain(per_stage(optax.clip_by_global_norm(1.0)), optax.sgd(0.1))
    """

    def init(params: optax.Params) -> optax.OptState:
        state = transformation.init(params)
        kept = jax.tree.leaves(state)
        if kept:
            raise ValueError(
                f"per_stage(transformation): the transformation keeps {len(kept)} arrays between updates, but may "
                "keep none, since a run may go on with other stages. Chain it with what keeps some: "
                "optax.chain(per_stage(optax.clip_by_global_norm(1.0)), optax.adam(1e-3))."
            )
        return state

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        tree = jax.tree.structure(updates)
        stages, numbers = _STAGES.get(), (0,) * tree.num_leaves
        if stages is not None:
            stages.asked, numbers = True, stages.numbers
        for stage in sorted(set(numbers)):
            mask = jax.tree.unflatten(tree, [n == stage for n in numbers])
            updates, _ = optax.masked(transformation, mask).update(updates, optax.MaskedState(state), params)
        return updates, state

    return optax.GradientTransformation(init, update)
