"""The first state of a run, made stage by stage: no device ever holds the whole model."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import core
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe import _compat, annotations, hosts
from jaxpipe.model import BoundModel
from jaxpipe.pipeline.captures import without_captures
from jaxpipe.pipeline.exchange import StageExchange
from jaxpipe.pipeline.layout import Layout
from jaxpipe.pipeline.program import DATA, STAGE
from jaxpipe.pipeline.sections import Placement
from jaxpipe.pipeline.state import TrainState
from jaxpipe.pipeline.step import Update
from jaxpipe.schedules.teams import Teams
from jaxpipe.stacks import Stacks


def initial_state(
    mesh: Mesh,
    model: BoundModel,
    placement: Placement,
    layouts: tuple[Layout, Layout],
    teams: Teams,
    optimizer: optax.GradientTransformation,
    update: Update,
    key: Any,
    plan: str,
) -> TrainState:
    """Make each stage's variables and optimizer state on that stage's devices, in the process that has them.

    Variables that were given are copied there; others are initialised there, by a program from which everything
    that other stages need has been removed. Of stacked variables that are cut, one at a time is made as a whole.
    """
    own = model.own
    values = _pieces(model, _given(own) if own.values is not None else _initialised(own, key))
    parts = []
    for s in range(len(teams.widths)):
        devices = hosts.mine(stage_devices(mesh, teams, s))
        if not devices:
            continue
        first, *others = devices
        parameters, state = placement.held_by(s)
        with jax.default_device(first):
            whole = values([*parameters, *(len(model.parameters) + k for k in state)])
            whole = jax.device_put(whole, first)

            def buffers(whole: list[Any], s: int = s, count: int = len(parameters)) -> list[list[Any]]:
                mine = _optimizer_state(whole[:count], model, placement, s, optimizer, update)
                return _buffers((whole[:count], whole[count:], mine), s, (*layouts, update.layout))

            made = jax.jit(buffers)(whole)
        copies = [jax.device_put(made, device) for device in others]
        parts.append(jax.tree.map(lambda *rows: list(rows), made, *copies))
    shared = _shared_state(model, optimizer, update)
    residual = () if update.exchange is None else _residual(mesh, update.exchange)
    everywhere = NamedSharding(mesh, P())
    gathered = [assemble(mesh, P(STAGE), [part[k] for part in parts]) for k in range(3)]
    return TrainState(
        *gathered,
        residual=residual,
        shared=tuple(hosts.replicate(x, everywhere) for x in shared),
        key=hosts.replicate(_copied(key), everywhere),
        step=hosts.replicate(jnp.zeros((), jnp.int32), everywhere),
        skipped=hosts.replicate(jnp.zeros((), jnp.int32), everywhere),
        plan=plan,
    )


def _residual(mesh: Mesh, exchange: StageExchange) -> tuple[Any, ...]:
    """Nothing is left over yet."""
    sharding = NamedSharding(mesh, P(STAGE, DATA))
    count = mesh.shape[STAGE], mesh.shape[DATA]
    shapes = [(*count, length) for length, _ in exchange.residuals.buffers]
    dtypes = [dtype for _, dtype in exchange.residuals.buffers]
    make = jax.jit(lambda: [jnp.zeros(*spec) for spec in zip(shapes, dtypes, strict=True)], out_shardings=sharding)
    return tuple(make())


def _copied(key: Any) -> Any:
    """A key in memory of its own: a step donates the state, and must not take the caller's key with it."""
    data = jnp.array(jax.random.key_data(key), copy=True)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


#: Values of some variables, by position: parameters first, then state.
Values = Callable[[Sequence[int]], list[Any]]


def _given(model: BoundModel) -> Values:
    assert model.values is not None
    values = [*model.values[0], *model.values[1]]
    return lambda positions: [values[k] for k in positions]


def _pieces(model: BoundModel, values: Values) -> Values:
    """Values by piece, from values by leaf. Of the leaves that are cut, only one is there as a whole at a time."""
    parameters, state = model.stacks
    stacks = Stacks((*parameters.bounds, *state.bounds))

    def pieces(positions: Sequence[int]) -> list[Any]:
        leaves = list(dict.fromkeys(stacks.leaf_of[k] for k in positions))
        uncut = [k for k in leaves if stacks.bounds[k] is None]
        found = dict(zip(uncut, values(uncut), strict=True))
        made = {k: found[stacks.leaf_of[k]] for k in positions if stacks.leaf_of[k] in found}
        for leaf in leaves:
            if leaf not in found:
                (whole,) = values([leaf])
                made.update((k, stacks.cut(k, whole)) for k in positions if stacks.leaf_of[k] == leaf)
        return [made[k] for k in positions]

    return pieces


def _initialised(model: BoundModel, key: Any) -> Values:
    """Initialisation, traced once; of its operators only those run that the wanted variables follow from.

    They run one by one, as they do when a model is initialised outside ``jit``: the same bits, and initialisers of
    equal shape are compiled once.
    """
    initialise = model.initialise
    assert initialise is not None
    aval = jax.ShapeDtypeStruct(key.shape, key.dtype)
    closed, _ = annotations.trace(lambda key: [x for part in initialise(key) for x in part], aval)
    jaxpr, consts = _compat.open_jaxpr(closed)

    def values(positions: Sequence[int]) -> list[Any]:
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
    parameters: Sequence[Any],
    model: BoundModel,
    placement: Placement,
    s: int,
    optimizer: optax.GradientTransformation,
    update: Update,
) -> list[Any]:
    """A stage's leaves of the optimizer state. Other stages' parameters are zeros that nothing reads."""
    whole: list[Any] = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in model.parameters]
    for k, value in zip(placement.held_by(s)[0], parameters, strict=True):
        whole[k] = value
    leaves = update.coloured.state_stacks.split(
        jax.tree.leaves(optimizer.init(without_captures(model.parameter_tree(whole))))
    )
    return [x for x, owner in zip(leaves, update.coloured.state_stage, strict=True) if owner == s]


def _shared_state(model: BoundModel, optimizer: optax.GradientTransformation, update: Update) -> list[Any]:
    def make() -> list[Any]:
        zeros = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in model.parameters]
        leaves = update.coloured.state_stacks.split(
            jax.tree.leaves(optimizer.init(without_captures(model.parameter_tree(zeros))))
        )
        return [x for x, owner in zip(leaves, update.coloured.state_stage, strict=True) if owner is None]

    return jax.jit(make)()


def _buffers(values: Sequence[Sequence[Any]], s: int, layouts: Sequence[Layout]) -> list[list[Any]]:
    written = [layout.write(s, part) for layout, part in zip(layouts, values, strict=True)]
    return [[x.reshape(1, *x.shape) for x in buffers] for buffers in written]


def stage_devices(mesh: Mesh, teams: Teams, s: int) -> list[Any]:
    """The devices of a stage, one for each replica."""
    return list(np.take(mesh.devices, teams.groups[s], axis=mesh.axis_names.index(STAGE)).flat)


def assemble(mesh: Mesh, spec: P, parts: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """Global buffers from the rows that this process's devices hold.

    Args:
      mesh: the devices.
      spec: how a buffer is sharded; all but its last axis.
      parts: by stage and buffer, the rows of the stage's devices; stages without devices in this process left out.
    """
    sharding = NamedSharding(mesh, spec)
    whole = [mesh.shape[axis] for axis in spec]
    return tuple(
        jax.make_array_from_single_device_arrays(
            (*whole, rows[0][0].shape[-1]), sharding, [x for copies in rows for x in copies]
        )
        for rows in zip(*parts, strict=True)
    )
