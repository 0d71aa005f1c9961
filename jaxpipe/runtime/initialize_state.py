"""The first state of a run, made stage by stage: no device ever holds the whole model."""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import core

from jaxpipe import _compat, multihost
from jaxpipe.array_types import AnyJaxpr, Array, ArrayLike, Atom, PyTree
from jaxpipe.errors import InitialValuesWarning, ModelError, warn
from jaxpipe.graph import sharding_annotations
from jaxpipe.graph.graph import dependents, read_graph
from jaxpipe.graph.stacked_layers import Stacks
from jaxpipe.models import check_batch
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.models.captures import without_captures
from jaxpipe.runtime.executable_plan import Update
from jaxpipe.runtime.interface import Runtime
from jaxpipe.runtime.state_arrays import CommonArrays, StageArrays
from jaxpipe.runtime.train_state import TrainState


def initial_state(
    runtime: Runtime, model: BoundModel, optimizer: optax.GradientTransformation, key: Array, batch: PyTree = None
) -> TrainState:
    """Make each stage's variables and optimizer state on that stage's devices, in the process that has them.

    Variables that were given are copied there; others are initialized there, by a program from which everything
    that other stages need has been removed. Of stacked variables that are cut, one at a time is made as a whole.
    ``batch`` has the arrays that initial values may depend on, or is None.
    """
    original, planned = model.original, runtime.planned
    values = _pieces(model, _given(original) if original.values is not None else _initialized(original, key, batch))
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


def _initialized(model: BoundModel, key: Array, batch: PyTree) -> Values:
    """Initialization, traced once; of its operators only those run that the wanted variables follow from.

    They run one by one, as they do when a model is initialized outside ``jit``: the same bits, and initializers of
    equal shape are compiled once. Where they follow from the batch, and only its shapes are known, it is zeros.
    """
    initialize = model.initialize
    assert initialize is not None
    leaves, tree = jax.tree.flatten(model.batch if batch is None else batch)
    avals = [check_batch.shape_of(x) for x in leaves]

    def make(key: Array, *leaves: Array) -> list[Array]:
        return [x for part in initialize(key, jax.tree.unflatten(tree, leaves)) for x in part]

    closed, _ = sharding_annotations.trace(make, jax.ShapeDtypeStruct(key.shape, key.dtype), *avals)
    jaxpr, consts = _compat.open_jaxpr(closed)
    arrays = dict(zip(jaxpr.invars[1:], avals if batch is None else leaves, strict=True))
    _check_reads(model, closed, batch is not None)

    def values(positions: Sequence[int]) -> list[Array]:
        wanted = [jaxpr.outvars[k] for k in positions]
        needed = {a for a in wanted if not _compat.is_literal(a)}
        equations = []
        for eqn in reversed(jaxpr.eqns):
            if not needed.isdisjoint(eqn.outvars):
                equations.append(eqn)
                needed.update(a for a in eqn.invars if not _compat.is_literal(a))
        env: dict[Atom, Array] = dict(zip((*jaxpr.constvars, jaxpr.invars[0]), (*consts, key), strict=True))
        env |= {var: _on_default_device(x) for var, x in arrays.items() if var in needed}
        for eqn in reversed(equations):
            operands = [env[a] for a in eqn.invars if not _compat.is_literal(a)]
            env.update(zip(eqn.outvars, core.eval_jaxpr(_compat.isolate(eqn), (), *operands), strict=True))
        return [jnp.asarray(a.val if _compat.is_literal(a) else env[a]) for a in wanted]

    return values


def _on_default_device(x: ArrayLike | jax.ShapeDtypeStruct) -> Array:
    """Return an array of a batch, or zeros where only its shape is known, on the default device."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jnp.zeros(x.shape, x.dtype)
    return jax.device_put(jnp.asarray(x), jax.config.jax_default_device)  # type: ignore[attr-defined]


def _check_reads(model: BoundModel, closed: AnyJaxpr, has_values: bool) -> None:
    """Warn of initial values that follow from a batch that is shapes alone; refuse them in several processes."""
    graph = read_graph(closed)
    reached = dependents(graph.operators, graph.inputs[1:])
    variables = zip((*model.parameters, *model.state), graph.outputs, strict=True)
    names = [v.name for v, t in variables if t in reached]
    if not names:
        return
    which = f"The initial value{'s' if len(names) > 1 else ''} of {', '.join(names[:3])}"
    which += f"{' and others' if len(names) > 3 else ''} depend on the batch"
    if jax.process_count() > 1:
        raise ModelError(
            f"{which}, of which each process has a part. Initialize the model in one process with module.init, and "
            "pass pipeline.init(key, variables=...) in all."
        )
    if not has_values:
        warn(
            f"{which}, of which pipeline.init knows the shapes alone: they were made from zeros. Pass arrays: "
            "pipeline.init(key, batch).",
            InitialValuesWarning,
        )


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
