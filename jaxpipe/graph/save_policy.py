"""The answer of a policy as ``jax.checkpoint`` takes it: results of an operator stay stored, or are computed again."""

from collections.abc import Callable
from typing import Any

from jax.ad_checkpoint import Offloadable, Recompute, Saveable

from jaxpipe import _compat
from jaxpipe.array_types import Equation
from jaxpipe.errors import CodecWarning, ModelError, warn


#: ``policy(primitive, *avals, **params)`` returns whether what an equation computes is saved, or one of JAX's marks.
SavePolicy = Callable[..., Any]


def check_policy(policy: object) -> None:
    """Raise ``ModelError`` unless a policy is one that can be asked."""
    if policy is not None and (not callable(policy) or type(policy).__hash__ is None):
        raise ModelError(
            f"policy={policy!r}: a save policy is a function of a primitive, the shapes of its operands and its "
            "parameters, and can be hashed, as jax.checkpoint takes it. Pass one of jax.checkpoint_policies, such as "
            'policy=jax.checkpoint_policies.dots_saveable or save_only_these_names("a"), or a function.'
        )


def is_saved(policy: SavePolicy, equation: Equation) -> bool:
    """Return whether a policy saves what an equation computes, or something inside it.

    What it offloads counts as saved: it stays on the device.

    Raises:
      ModelError: if the policy returns what it may not.
    """
    programs = _compat.inner_programs(equation)
    if programs:
        return any(is_saved(policy, inner) for program in programs for inner in _compat.open_jaxpr(program)[0].eqns)
    primitive = equation.primitive
    try:
        answer = policy(primitive, *(atom.aval for atom in equation.invars), **equation.params)
    except TypeError as error:  # of one that makes policies, in place of one that it has made
        raise ModelError(_unknown(primitive.name, error)) from error
    if isinstance(answer, Offloadable):
        warn(
            f"policy= offloads what {primitive.name} computes to {answer.dst}; memory_encoded stores it on the device. "
            "jaxpipe.partition(memory=...) moves to hosts what a budget asks for.",
            CodecWarning,
        )
    if isinstance(answer, bool | Offloadable | type(Saveable) | type(Recompute)):
        return answer is not False and answer is not Recompute
    raise ModelError(_unknown(primitive.name, answer))


def _unknown(primitive: str, answer: object) -> str:
    return (
        f"policy= returned {answer!r} for {primitive}: a save policy returns True or False, or Saveable, "
        "Recompute or Offloadable(...) of jax.ad_checkpoint. One that is made of names is passed called: "
        'jax.checkpoint_policies.save_only_these_names("a").'
    )
