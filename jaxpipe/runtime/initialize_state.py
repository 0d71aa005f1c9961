"""States put onto devices stage by stage: no device ever holds the whole model.

In: what gives the values of pieces: initialization, arrays of the caller, a checkpoint.
Out: a training state, of whose arrays each process has made those of its own devices.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import filterfalse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpipe import _compat, multihost
from jaxpipe.array_types import AnyJaxpr, Array, ArrayLike, Atom, Device, Equation, PyTree
from jaxpipe.errors import InitialValuesWarning, ModelError, PartitionError, warn
from jaxpipe.graph import sharding_annotations
from jaxpipe.graph.reverse_walk import needed
from jaxpipe.graph.stacked_layers import Stacks, side_by_side
from jaxpipe.models import check_batch
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.models.traced_update import without_captures
from jaxpipe.runtime.executable_plan import ExecutablePlan, Update
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate
from jaxpipe.runtime.select_runtime import Runtime
from jaxpipe.runtime.state_arrays import StageArrays, check_key, of_replicas
from jaxpipe.runtime.train_state import TrainState
from jaxpipe.text.value_text import listed


#: Values of some variables, or of some pieces of them, by position: parameters first, then state.
Values = Callable[[Sequence[int]], Sequence[ArrayLike]]


@dataclass(frozen=True, eq=False)
class Sources:
    """Functions that give the values of a state by piece: of given arrays, by initialization, from a checkpoint.

    Attributes:
      optimizer: the leaves of its state; or the optimizer, whose ``init`` makes them of the parameters of a stage.
      residuals: ``[replicas, ...]`` by parameter; None if nothing is left to send.
      outer: by parameter the outer one of an outer loop, and the state of its optimizer; None: it begins.
      replicas: in an outer loop those of each replica; none: all have the same.
    """

    variables: Values
    optimizer: Values | optax.GradientTransformation
    residuals: Callable[[Sequence[int]], Sequence[np.ndarray]] | None = None
    outer: Callable[[Sequence[int]], Sequence[Sequence[ArrayLike]]] | None = None
    replicas: Sequence["Sources"] = ()


def initial_sources(
    model: BoundModel,
    optimizer: optax.GradientTransformation,
    key: Array,
    update: Update,
    slots: Sequence[ArrayLike] | None = None,
    batch: PyTree = None,
) -> Sources:
    """Return the sources of a run's first state: variables and optimizer state that were given are copied.

    Others are initialized, by a program from which everything that other stages need has been removed. Of stacked
    variables that are cut, one at a time is made as a whole.

    Args:
      slots: leaves of an optimizer state; None: it is made of the parameters.
      batch: arrays that initial values may depend on; None if they depend on none.
    """
    original, stacks = model.original, side_by_side(model.stacks)
    if original.values is None:
        values = _pieces(stacks, _initialized(original, key, batch))
    else:
        values = given_values(stacks, [*original.values[0], *original.values[1]])
    return Sources(values, optimizer if slots is None else given_values(update.by_stage.state_stacks, slots))


def given_values(stacks: Stacks, leaves: Sequence[ArrayLike]) -> Values:
    """Return copies of the pieces of arrays, as a step donates its state, and not the caller's."""

    def values(positions: Sequence[int]) -> list[ArrayLike]:
        pieces = [stacks.cut(k, leaves[stacks.leaf_of[k]]) for k in positions]
        # A device may read a host array where it lies; the copy has JAX's dtype for it: float32 for float64.
        dtype_of = jax.dtypes.canonicalize_dtype
        return [x.copy() if isinstance(x, jax.Array) else np.array(x, dtype_of(x.dtype)) for x in pieces]

    return values


def place_state(runtime: Runtime, sources: Sources, key: Array, step: int = 0, skipped: int = 0) -> TrainState:
    """Put a state onto its devices, stage by stage: each process does what its own devices hold."""
    check_key(key, runtime.planned.everywhere["key"])
    parts, shared = multihost.on_all(lambda: (_parts(runtime, sources), _slots(runtime.planned, sources, None, {})))
    # The key is copied: a step donates the state, and must not take the caller's key with it.
    everywhere = {"shared": tuple(shared), "key": key.copy(), "step": jnp.int32(step), "skipped": jnp.int32(skipped)}
    placed = jax.tree.map(lambda x, aval: multihost.place(x, aval.sharding), everywhere, runtime.planned.everywhere)
    return runtime.assemble(parts, placed)


def _parts(runtime: Runtime, sources: Sources) -> dict[Any, PyTree]:
    """Return what this process's places hold of the state, as the runtime has it."""
    planned, parts = runtime.planned, dict[Any, PyTree]()
    for place in runtime.places:
        every = runtime.devices_of(place)
        devices = multihost.mine(every)
        if not devices:
            continue
        with jax.default_device(devices[0]):
            arrays = _stage_arrays(planned, sources, place, devices[0])
            parameters, _ = planned.placement.held_by(place)
            left = () if sources.residuals is None else sources.residuals(parameters)
            replicas = [_stage_arrays(planned, x, place, devices[0]) for x in sources.replicas]
            outer = () if sources.outer is None else sources.outer(parameters)
        residuals = [of_replicas(x, len(every)) for x in left]
        parts |= runtime.stage_part(place, replace(arrays, residuals=residuals, outer=outer, replicas=replicas))
    return parts


def _stage_arrays(planned: ExecutablePlan, sources: Sources, place: int, device: Device) -> StageArrays:
    """Return variables and optimizer state of a place."""
    count = len(planned.model.parameters)
    parameters, state = planned.placement.held_by(place)
    held = sources.variables([*parameters, *(count + k for k in state)])
    if not callable(sources.optimizer):
        held = jax.device_put(held, device)
    slots = _slots(planned, sources, place, dict(zip(parameters, held, strict=False)))
    return StageArrays(held[: len(parameters)], held[len(parameters) :], slots)


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


def _slots(
    planned: ExecutablePlan, sources: Sources, place: int | None, parameters: Mapping[int, ArrayLike]
) -> Sequence[ArrayLike]:
    """The leaves of the optimizer state of a place, or (None) of all alike, whose parameters are zeros if not given."""
    model, by_stage = planned.model, planned.update.by_stage
    if callable(sources.optimizer):
        return sources.optimizer(by_stage.leaves_of(place))
    init = sources.optimizer.init

    def make(parameters: Mapping[int, Array]) -> list[Array]:
        whole = [
            parameters[k] if k in parameters else jnp.zeros(v.aval.shape, v.aval.dtype)
            for k, v in enumerate(model.parameters)
        ]
        state = jax.tree.leaves(init(without_captures(model.parameter_tree(whole))))
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
