"""States put onto devices stage by stage: no device ever holds the whole model.

In: what gives the arrays of a stage: initialization, arrays of the caller, a checkpoint.
Out: a training state, of whose arrays each process has made those of its own devices.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import filterfalse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpipe import _compat, multihost
from jaxpipe.array_types import AnyJaxpr, Array, ArrayLike, Atom, Equation, PyTree
from jaxpipe.errors import InitialValuesWarning, ModelError, PartitionError, warn
from jaxpipe.graph import sharding_annotations
from jaxpipe.graph.reverse_walk import needed
from jaxpipe.graph.stacked_layers import Stacks, side_by_side
from jaxpipe.models import check_batch
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.models.traced_update import without_captures
from jaxpipe.runtime.executable_plan import ExecutablePlan
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate
from jaxpipe.runtime.select_runtime import Runtime
from jaxpipe.runtime.train_state import StageArrays, TrainState, check_key, of_replicas
from jaxpipe.text.value_text import listed


#: Values of some variables, or of some pieces of them, by position: parameters first, then state.
Values = Callable[[Sequence[int]], Sequence[ArrayLike]]


#: Function that gives the arrays of a place; of None, the optimizer state that all places have alike.
ArraysByPlace = Callable[[int | None], StageArrays]


def initial_arrays(
    planned: ExecutablePlan,
    model: BoundModel,
    optimizer: optax.GradientTransformation,
    key: Array,
    slots: Sequence[ArrayLike] | None = None,
    batch: PyTree = None,
) -> ArraysByPlace:
    """Return the arrays of a run's first state: variables and optimizer state that were given are copied.

    Others are initialized, by a program from which everything that other stages need has been removed. Of stacked
    variables that are cut, one at a time is made as a whole.

    Args:
      model: of the plan, with the values that were given.
      slots: leaves of an optimizer state; None: it is made of the parameters.
      batch: arrays that initial values may depend on; None if they depend on none.
    """
    original, stacks = model.original, side_by_side(model.stacks)
    if original.values is None:
        values = _pieces(stacks, _initialized(original, key, batch))
    else:
        values = given_values(stacks, [*original.values[0], *original.values[1]])
    state_stacks = planned.update.by_stage.state_stacks
    return arrays_by_place(planned, values, optimizer if slots is None else given_values(state_stacks, slots))


def arrays_by_place(
    planned: ExecutablePlan, variables: Values, optimizer: Values | optax.GradientTransformation
) -> ArraysByPlace:
    """Return a function that gives variables and optimizer state of a place.

    Args:
      optimizer: the leaves of its state; or the optimizer, whose ``init`` makes them of the parameters of a place.
    """

    def arrays(place: int | None) -> StageArrays:
        parameters, state = planned.placement.held_by(place)
        held = variables([*parameters, *(len(planned.model.parameters) + k for k in state)])
        if callable(optimizer):
            slots = optimizer(planned.update.by_stage.leaves_of(place))
        else:
            held = jax.device_put(held, jax.config.jax_default_device)  # type: ignore[attr-defined]
            slots = _first_slots(planned, optimizer, place, dict(zip(parameters, held, strict=False)))
        return StageArrays(held[: len(parameters)], held[len(parameters) :], slots)

    return arrays


def given_values(stacks: Stacks, leaves: Sequence[ArrayLike]) -> Values:
    """Return copies of the pieces of arrays, as a step donates its state, and not the caller's."""
    shape = next((x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)), None)
    if shape is not None:
        raise ModelError(
            f"init got {shape} as a value, which is a shape alone. Pass arrays as variables= and optimizer_state=, "
            "or leave these out: a pipeline makes initial values itself."
        )

    def values(positions: Sequence[int]) -> list[ArrayLike]:
        pieces = [stacks.cut(k, leaves[stacks.leaf_of[k]]) for k in positions]
        # A device may read a host array where it lies; the copy has JAX's dtype for it: float32 for float64.
        dtype_of = jax.dtypes.canonicalize_dtype
        return [x.copy() if isinstance(x, jax.Array) else np.array(x, dtype_of(x.dtype)) for x in pieces]

    return values


def place_state(runtime: Runtime, arrays: ArraysByPlace, key: Array, step: int = 0, skipped: int = 0) -> TrainState:
    """Put a state onto its devices, stage by stage: each process does what its own devices hold."""
    check_key(key, runtime.planned.everywhere["key"])
    parts, shared = multihost.on_all(lambda: (_parts(runtime, arrays), arrays(None).optimizer))
    # The key is copied: a step donates the state, and must not take the caller's key with it.
    everywhere = {"shared": tuple(shared), "key": key.copy(), "step": jnp.int32(step), "skipped": jnp.int32(skipped)}
    placed = jax.tree.map(lambda x, aval: multihost.place(x, aval.sharding), everywhere, runtime.planned.everywhere)
    return runtime.assemble(parts, placed)


def _parts(runtime: Runtime, arrays: ArraysByPlace) -> dict[Any, PyTree]:
    """Return what this process's places hold of the state, as the runtime has it."""
    parts = dict[Any, PyTree]()
    for place in runtime.places:
        every = runtime.devices_of(place)
        devices = multihost.mine(every)
        if devices:
            with jax.default_device(devices[0]):
                held = arrays(place)
            residuals = [of_replicas(np.asarray(x), len(every)) for x in held.residuals]
            parts |= runtime.stage_part(place, replace(held, residuals=residuals))
    return parts


def _pieces(stacks: Stacks, values: Values) -> Values:
    """Values by piece, from values by leaf. Of the leaves that are cut, only one is there as a whole at a time."""

    def pieces(positions: Sequence[int]) -> list[ArrayLike]:
        leaf_of = {k: stacks.leaf_of[k] for k in positions}
        leaves = dict.fromkeys(leaf_of.values())
        uncut = [n for n in leaves if stacks.bounds[n] is None]
        piece_of: dict[int, ArrayLike] = {}
        for group in (uncut, *([n] for n in leaves if n not in uncut)):
            whole = dict(zip(group, values(group), strict=True))
            piece_of |= {k: stacks.cut(k, whole[n]) for k, n in leaf_of.items() if n in whole}
        return [piece_of[k] for k in positions]

    return pieces


def _initialized(model: BoundModel, key: Array, batch: PyTree) -> Values:
    """Initialization, traced once; of its operators only those run that the wanted variables follow from.

    They run one by one, as they do when a model is initialized outside ``jit``: the same bits, and initializers of
    equal shape are compiled once. Where they follow from the batch, and only its shapes are known, it is zeros.
    """
    initialize = model.make
    assert initialize is not None
    leaves, tree = jax.tree.flatten(model.batch if batch is None else batch)
    avals = [check_batch.shape_of(x) for x in leaves]

    def make(key: Array, *leaves: Array) -> list[ArrayLike]:
        return [x for part in model.flatten(initialize(key, jax.tree.unflatten(tree, leaves))) for x in part]

    closed, _ = sharding_annotations.trace(make, jax.ShapeDtypeStruct(key.shape, key.dtype), *avals)
    jaxpr, consts = _compat.open_jaxpr(closed)
    arrays = dict(zip(jaxpr.invars[1:], avals if batch is None else leaves, strict=True))
    _check_reads(model, closed, batch is not None)

    def values(positions: Sequence[int]) -> list[ArrayLike]:
        wanted = [jaxpr.outvars[k] for k in positions]
        equations, read = needed(jaxpr.eqns, filterfalse(_compat.is_literal, wanted), _ends)
        part = _compat.rebuilt(jaxpr, jaxpr.constvars, consts, jaxpr.invars, equations, wanted)
        given: list[Any] = [_on_default_device(x) if var in read else x for var, x in arrays.items()]
        return list(map(jnp.asarray, _compat.evaluate_jaxpr(part, key, *given)))

    return values


def _ends(eqn: Equation) -> tuple[Iterable[Atom], Iterable[Atom]]:
    return eqn.outvars, filterfalse(_compat.is_literal, eqn.invars)


def _on_default_device(x: ArrayLike | jax.ShapeDtypeStruct) -> Array:
    """Return an array of a batch, or zeros where only its shape is known, on the default device."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jnp.zeros(x.shape, x.dtype)
    return jax.device_put(jnp.asarray(x), jax.config.jax_default_device)  # type: ignore[attr-defined]


def _check_reads(model: BoundModel, closed: AnyJaxpr, has_values: bool) -> None:
    """Warn of initial values that follow from a batch that is shapes alone; refuse them in several processes."""
    variables = (*model.parameters, *model.state)
    if not any(_compat.inputs_read(closed, [True] * len(variables))[1:]):
        return
    names = [v.name for v in variables if any(_compat.inputs_read(closed, [v is x for x in variables])[1:])]
    which = f"The initial values of {', '.join(names[:3])}{' and others' if len(names) > 3 else ''} depend on the batch"
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


def _first_slots(
    planned: ExecutablePlan,
    optimizer: optax.GradientTransformation,
    place: int | None,
    parameters: Mapping[int, ArrayLike],
) -> Sequence[ArrayLike]:
    """The leaves of the first optimizer state of a place, or (None) of all alike; of parameters elsewhere, of zeros."""
    model, by_stage = planned.model, planned.update.by_stage

    def make(parameters: Mapping[int, Array]) -> list[Array]:
        whole = [
            parameters[k] if k in parameters else jnp.zeros(v.aval.shape, v.aval.dtype)
            for k, v in enumerate(model.parameters)
        ]
        state = jax.tree.leaves(optimizer.init(without_captures(model.parameter_tree(whole))))
        leaves = by_stage.state_stacks.split(state)
        return [leaves[k] for k in by_stage.leaves_of(place)]

    _check_alone(by_stage, model, make, place, parameters)
    return jax.jit(make)(parameters)


def _check_alone(
    by_stage: PartitionedUpdate,
    model: BoundModel,
    make: Callable[[Mapping[int, Array]], list[Array]],
    place: int | None,
    held: Collection[int],
) -> None:
    """Raise ``PartitionError`` if state that updates read is made of parameters that a place does not hold."""
    closed = jax.make_jaxpr(make)({k: v.aval for k, v in enumerate(model.parameters)})
    used = {t for op in by_stage.graph.operators for t in op.inputs}
    read = _compat.inputs_read(closed, [by_stage.state[k] in used for k in by_stage.leaves_of(place)])
    leaf_of = model.stacks[0].leaf_of
    leaves = {leaf_of[k] for k in held}  # of which a piece needs no other
    names = [v.name for k, v in enumerate(model.parameters) if read[k] and leaf_of[k] not in leaves]
    if names:
        raise PartitionError(
            f"optimizer: its first state has a value that is made of {listed(names, 3)}, as a norm of all parameters "
            "is, and no stage holds them all. Make it outside: init(key, variables=variables, optimizer_state="
            "optimizer.init(parameters)), with all variables and the parameters among them."
        )
