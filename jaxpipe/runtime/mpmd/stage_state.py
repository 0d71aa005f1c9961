"""A training state as arrays of the stages: parameters, state and optimizer state are leaves on their stage's devices.

    TrainState, batch ──LoadedGraph──▶ inputs of a step's graph, run
    its outputs ──LoadedGraph.state_of──▶ TrainState

What every stage needs (shared optimizer state, the random key, numbers of steps) is one array on all devices.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe import _compat, multihost
from jaxpipe.array_types import Array, ArrayLike, PyTree, Shaped
from jaxpipe.runtime import check_state, shard_batch
from jaxpipe.runtime.mpmd.dispatch import Dispatch, Values
from jaxpipe.runtime.mpmd.send_between_processes import of_member
from jaxpipe.runtime.mpmd.stage_layout import StageLayout
from jaxpipe.runtime.mpmd.step_graph import Port
from jaxpipe.runtime.train_state import TrainState, check_key, of_replicas
from jaxpipe.sharding.mesh_axes import DATA


#: A function of a state, and of the leaves of a batch as functions of the replica.
Source: TypeAlias = Callable[[TrainState, Sequence[Callable[[int], ArrayLike]]], Array]


class LoadedGraph:
    """A compiled graph, and the arrays of a training state, of a batch, and constants that it begins with."""

    def __init__(self, layout: StageLayout, dispatch: Dispatch):
        """Find out what goes where."""
        self.layout, self.dispatch, self._mesh = layout, dispatch, layout.planned.all_devices
        self._shared = layout.update.by_stage.leaves_of(None)
        self._key_data: tuple[Array, Array] | None = None
        self._positions = {x.port: n for arrays in layout.state_arrays.values() for n, x in enumerate(arrays)}
        sources = {number: self._source(port) for port, number in dispatch.graph.inputs.items()}
        self._sources = {number: source for number, source in sources.items() if source is not None}

    def _source(self, port: Port) -> Source | None:
        """Return the source of an array that the graph begins with; None if no device of this process has it."""
        layout, field, mesh = self.layout, port.field, self.layout.devices.mesh(port.place)
        leaf, sharding = cast(int, port.number), NamedSharding(mesh, P())
        if not multihost.mine(list(mesh.devices.flat)):
            return None
        if port in self._positions:
            n = self._positions[port]
            return lambda state, _: getattr(state, field)[n]
        if field == "shared":
            n = self._shared.index(leaf)
            return lambda state, _: _at(state.shared[n], mesh)
        if field == "key":
            return lambda state, _: _at(self._data_of(state.key), mesh)
        if field in ("step", "skipped"):
            return lambda state, _: _at(getattr(state, field), mesh)
        replica = layout.devices.replica(port.place)
        if field == "batch":
            return lambda _, batch: multihost.place(batch[leaf](replica), sharding)
        if field == "weight":
            value = np.array(layout.num_microbatches * layout.devices.replicas, np.float32)
        else:  # the index of a micro-batch in its replica, and in all of them
            value = np.array([leaf, replica * layout.num_microbatches + leaf], np.int32)
        constant = multihost.place(value, sharding)
        return lambda *_: constant

    def _data_of(self, key: Array) -> Array:
        """Return the words of a random key, which is that of the step before as a rule."""
        if self._key_data is None or self._key_data[0] is not key:
            self._key_data = key, jax.random.key_data(key)
        return self._key_data[1]

    def given(self, state: TrainState, batch: PyTree) -> Values:
        """Return the values with which the graph begins: a state, and a batch on the devices that read it."""
        pairs = zip(jax.tree.leaves(batch), self.layout.planned.batching.shared, strict=True)
        parts = [_parts(x, shared, self._mesh) for x, shared in pairs]
        values: Values = [None] * self.dispatch.size
        for number, source in self._sources.items():
            values[number] = source(state, parts)
        return values

    def run(self, state: TrainState, batch: PyTree) -> tuple[dict[Port, Array | None], Array, list[Array]]:
        """Return the outputs of a graph with a loss, that, and the leaves of the metrics."""
        outputs = self.dispatch.run(self.given(state, batch))
        loss, metrics = outputs[Port(self.layout.home, "loss")], self.reports(outputs, "metrics")
        return outputs, cast(Array, loss), [metrics[k] for k in range(len(metrics))]

    def state_of(self, old: TrainState, outputs: dict[Port, Array | None]) -> TrainState:
        """Return the state after a step, of the outputs of its graph; arrays elsewhere stay as they are."""
        new: dict[str, PyTree] = {}
        for field, arrays in self.layout.state_arrays.items():
            pairs = zip(arrays, getattr(old, field), strict=True)
            new[field] = tuple(before if (after := outputs.get(x.port)) is None else after for x, before in pairs)
        pairs = zip(self._shared, old.shared, strict=True)
        new["shared"] = tuple(self._everywhere("shared", k, x, outputs) for k, x in pairs)
        for field in ("step", "skipped"):
            new[field] = self._everywhere(field, 0, getattr(old, field), outputs)
        return replace(old, **new)

    def _everywhere(self, field: str, number: int, old: Array, outputs: dict[Port, Array | None]) -> Array:
        """A value of all devices, of what the stages have made of it; the old one if they have not."""
        arrays = (x for port, x in outputs.items() if (port.field, port.number) == (field, number) and x is not None)
        parts = {shard.device: shard.data for x in arrays for shard in x.addressable_shards}
        if not parts:
            return old
        local = multihost.mine(list(self._mesh.devices.flat))
        sharding = NamedSharding(self._mesh, P())
        return jax.make_array_from_single_device_arrays(old.shape, sharding, [parts[d] for d in local])

    def reports(self, outputs: dict[Port, Array | None], field: str) -> dict[Any, Array]:
        """Return the reports of a field, on the device that computes them or where they are sent."""
        home = self.layout.home
        return {p.number: x for p, x in outputs.items() if (p.place, p.field) == (home, field) and x is not None}


def _at(x: Array, mesh: Mesh) -> Array:
    """Return the part of a value of all devices that is at a place."""
    return cast(Array, of_member(x.shape, {shard.device: shard.data for shard in x.addressable_shards}, mesh, P()))


def _parts(x: ArrayLike, shared: bool, mesh: Mesh) -> Callable[[int], ArrayLike]:
    """Return a function that gives the part of a leaf for a replica, of which this process has a stage."""
    replicas, local = mesh.shape.get(DATA, 1), shard_batch.own_replicas(mesh)
    x = _compat.in_default_layout(x)
    if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:
        if not x.is_fully_replicated:
            spread = jax.device_put(x, NamedSharding(mesh, P() if shared or replicas == 1 else P(DATA)))
            by_device = {shard.device: shard.data for shard in spread.addressable_shards}
            rows = np.moveaxis(mesh.devices, mesh.axis_names.index(DATA), 0) if replicas > 1 else mesh.devices[None]
            return lambda r: by_device[multihost.mine(list(rows[r].flat))[0]]
        x, local = x.addressable_data(0), list(range(replicas))
    if shared or len(local) == 1:
        return lambda _: x
    rows = x.shape[0] // len(local)
    return lambda r: x[local.index(r) * rows : (local.index(r) + 1) * rows]


def adopt(layout: StageLayout, state: TrainState) -> TrainState:
    """Copy a state of another pipeline to the devices of this one, whatever its cuts, devices and batches.

    Layers of a scan that it has in other groups are grouped again, on the host.

    With another number of replicas, each gets the mean of the residuals of a block-sparse exchange.
    """
    check_state.check_state(state)
    expected, fields = layout.abstract_state, ("parameters", "variables", "optimizer")
    groups = {field: _grouped(layout, field, getattr(state, field)) for field in fields}
    check_key(state.key, expected.key)
    given = replace(state, **groups, residual=_residuals(state.residual, expected.residual), plan=expected.plan)
    fitted = check_state.fitted(given, expected, layout.state_names)
    return jax.tree.map(lambda x, before: x.copy() if x is before else x, fitted, given)  # a step donates it


def _grouped(layout: StageLayout, field: str, arrays: Sequence[ArrayLike]) -> tuple[ArrayLike, ...]:
    """Return arrays of a state with the layers of each stacked one in the groups that this pipeline has."""
    by_stage, (parameters, variables) = layout.update.by_stage, layout.planned.model.stacks
    owned = [k for k, s in zip(by_stage.state_stacks.leaf_of, by_stage.state_stage, strict=True) if s is not None]
    leaf_of = {"parameters": parameters.leaf_of, "variables": variables.leaf_of, "optimizer": owned}[field]
    given, grouped = list(arrays), []
    pieces = zip(leaf_of, layout.state_arrays[field], strict=True)
    for _, pairs in itertools.groupby(pieces, key=operator.itemgetter(0)):
        wanted = [held.aval.shape for _, held in pairs]
        rows, taken = sum(shape[0] for shape in wanted if shape), given[:1]
        while sum(x.shape[0] for x in taken if x.shape) < rows and len(taken) < len(given):
            taken.append(given[len(taken)])
        del given[: len(taken)]
        if (
            [tuple(x.shape) for x in taken] != wanted
            and {tuple(x.shape[1:]) for x in taken} == {tuple(wanted[0][1:])}
            and sum(x.shape[0] for x in taken) == rows
        ):
            bounds = list(itertools.accumulate(shape[0] for shape in wanted))[:-1]
            taken = np.split(np.concatenate([np.asarray(x) for x in taken]), bounds)
        grouped += taken
    return (*grouped, *given)


def _residuals(given: Sequence[ArrayLike], expected: Sequence[Shaped]) -> tuple[np.ndarray, ...]:
    """Return residuals for this pipeline's replicas; zeros where the other one has none."""
    if not given:
        return tuple(np.zeros(aval.shape, aval.dtype) for aval in expected)
    pairs = zip(given[: len(expected)], expected, strict=True)
    return tuple(of_replicas(np.array(x), aval.shape[0]) for x, aval in pairs)
