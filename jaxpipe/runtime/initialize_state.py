"""The first state of a run, made stage by stage: no device ever holds the whole model."""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import core

from jaxpipe import _compat, multihost
from jaxpipe.array_types import Array, ArrayLike
from jaxpipe.graph import sharding_annotations
from jaxpipe.graph.stacked_layers import Stacks
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.models.captures import without_captures
from jaxpipe.runtime.executable_plan import Update
from jaxpipe.runtime.interface import Runtime
from jaxpipe.runtime.state_arrays import CommonArrays, StageArrays
from jaxpipe.runtime.train_state import TrainState


def initial_state(
    runtime: Runtime, model: BoundModel, optimizer: optax.GradientTransformation, key: Array
) -> TrainState:
    """Make each stage's variables and optimizer state on that stage's devices, in the process that has them.

    Variables that were given are copied there; others are initialized there, by a program from which everything
    that other stages need has been removed. Of stacked variables that are cut, one at a time is made as a whole.
    """
    original, planned = model.original, runtime.planned
    values = _pieces(model, _given(original) if original.values is not None else _initialized(original, key))
    make = functools.partial(_optimizer_state, model, optimizer, planned.update)
    parts = {}
    for place in runtime.places:
        devices = multihost.mine(runtime.devices_of(place))
        if not devices:
            continue
        parameters, state = planned.placement.held_by(place)
        with jax.default_device(devices[0]):
            whole = values([*parameters, *(len(model.parameters) + k for k in state)])
            # A step donates its state, and must not take the caller's arrays with it.
            whole = [x.copy() if original.values is not None and isinstance(x, jax.Array) else x for x in whole]
            whole = jax.device_put(whole, devices[0])
            held = whole[: len(parameters)]
            slots = jax.jit(functools.partial(make, place))(dict(zip(parameters, held, strict=True)))
        parts[place] = runtime.stage_part(place, StageArrays(held, whole[len(parameters) :], slots))
    shared = jax.jit(functools.partial(make, None))({})
    return runtime.assemble(parts, CommonArrays(shared, _copied(key)))


def _copied(key: Array) -> Array:
    """A key in memory of its own: a step donates the state, and must not take the caller's key with it."""
    data = jnp.array(jax.random.key_data(key), copy=True)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


#: Values of some variables, by position: parameters first, then state.
Values = Callable[[Sequence[int]], Sequence[ArrayLike]]


def _given(model: BoundModel) -> Values:
    assert model.values is not None
    values = [*model.values[0], *model.values[1]]
    return lambda positions: [values[k] for k in positions]


def _pieces(model: BoundModel, values: Values) -> Values:
    """Values by piece, from values by leaf. Of the leaves that are cut, only one is there as a whole at a time."""
    parameters, state = model.stacks
    stacks = Stacks((*parameters.bounds, *state.bounds))

    def pieces(positions: Sequence[int]) -> list[ArrayLike]:
        leaves = list(dict.fromkeys(stacks.leaf_of[k] for k in positions))
        uncut = [k for k in leaves if stacks.bounds[k] is None]
        value_of_leaf = dict(zip(uncut, values(uncut), strict=True))
        piece_of = {k: value_of_leaf[stacks.leaf_of[k]] for k in positions if stacks.leaf_of[k] in value_of_leaf}
        for leaf in leaves:
            if leaf not in value_of_leaf:
                (whole,) = values([leaf])
                piece_of.update((k, stacks.cut(k, whole)) for k in positions if stacks.leaf_of[k] == leaf)
        return [piece_of[k] for k in positions]

    return pieces


def _initialized(model: BoundModel, key: Array) -> Values:
    """Initialization, traced once; of its operators only those run that the wanted variables follow from.

    They run one by one, as they do when a model is initialized outside ``jit``: the same bits, and initializers of
    equal shape are compiled once.
    """
    initialize = model.initialize
    assert initialize is not None
    aval = jax.ShapeDtypeStruct(key.shape, key.dtype)
    closed, _ = sharding_annotations.trace(lambda key: [x for part in initialize(key) for x in part], aval)
    jaxpr, consts = _compat.open_jaxpr(closed)

    def values(positions: Sequence[int]) -> list[Array]:
        wanted = [jaxpr.outvars[k] for k in positions]
        needed = {a for a in wanted if not _compat.is_literal(a)}
        equations = []
        for eqn in reversed(jaxpr.eqns):
            if not needed.isdisjoint(eqn.outvars):
                equations.append(eqn)
                needed.update(a for a in eqn.invars if not _compat.is_literal(a))
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, key), strict=True))
        for eqn in reversed(equations):
            operands = [env[a] for a in eqn.invars if not _compat.is_literal(a)]
            env.update(zip(eqn.outvars, core.eval_jaxpr(_compat.isolate(eqn), (), *operands), strict=True))
        return [jnp.asarray(a.val) if _compat.is_literal(a) else env[a] for a in wanted]

    return values


def _optimizer_state(
    model: BoundModel,
    optimizer: optax.GradientTransformation,
    update: Update,
    s: int | None,
    parameters: Mapping[int, Array],
) -> list[Array]:
    """The leaves of the optimizer state of a stage, or (None) of all alike, whose parameters are zeros if not given."""
    whole = [
        parameters[k] if k in parameters else jnp.zeros(v.aval.shape, v.aval.dtype)
        for k, v in enumerate(model.parameters)
    ]
    state = jax.tree.leaves(optimizer.init(without_captures(model.parameter_tree(whole))))
    leaves = zip(update.by_stage.state_stacks.split(state), update.by_stage.state_stage, strict=True)
    return [x for x, owner in leaves if owner == s]
