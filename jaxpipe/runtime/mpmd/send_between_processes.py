"""Programs that carry arrays between devices of different processes, called by the owners of these devices alone.

    sender: array, receiver: an unused one ──side by side, global──▶ ppermute over the two devices ──▶ receiver: array
    source: arrays, all others: unused ones ──words of the source, sum over the devices──▶ arrays in common

All take part in the order of the list, which rules out that two wait for each other.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from jaxpipe import multihost
from jaxpipe.array_types import Array, ArrayLike, Device, Shaped
from jaxpipe.runtime.mpmd.instructions import Exchange, Send, Spread, ends
from jaxpipe.runtime.mpmd.stage_devices import StageDevices
from jaxpipe.runtime.uint32_words import from_words, pack_words, to_words, unpack_words, word_count
from jaxpipe.runtime.waiting_thread import Results
from jaxpipe.sharding.partition_specs import side_by_side


#: The mesh axis of the devices that take part.
AXIS = "pair"

#: Shape and element type of an array.
_Form: TypeAlias = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class Slot:
    """Arrays of one shape that two devices exchange."""

    sent: tuple[int | None, int | None]  # registers that the first and the second device send
    received: tuple[int | None, int | None]


@dataclass(frozen=True, eq=False)
class Transfer:
    """Part of this process in a message."""

    run: Callable[..., Results]  # takes the arrays that this process sends, returns those that it receives
    reads: tuple[int, ...]
    writes: tuple[int, ...]


def pair_slots(message: Send | Exchange, avals: Sequence[jax.ShapeDtypeStruct], specs: Sequence[P]) -> list[Slot]:
    """Return the slots of a message; two arrays of one shape that cross, split alike, share one."""
    forth, back = (message.forth, message.back) if isinstance(message, Exchange) else (message, None)
    returning = [] if back is None else list(zip(back.reads, back.writes, strict=True))
    slots = []
    form = {k: (_form(avals[k]), specs[k]) for k in message.reads}
    for read, write in zip(forth.reads, forth.writes, strict=True):
        match = next((pair for pair in returning if form[pair[0]] == form[read]), None)
        if match is None:
            slots.append(Slot((read, None), (None, write)))
        else:
            returning.remove(match)
            slots.append(Slot((read, match[0]), (match[1], write)))
    return slots + [Slot((None, read), (write, None)) for read, write in returning]


class Transfers:
    """Compiles messages: each program once, for messages of the same shapes between the same devices."""

    def __init__(self, avals: Sequence[jax.ShapeDtypeStruct], specs: Sequence[P]):
        """Begin without a program."""
        self._avals, self._specs = avals, specs
        self._programs: dict[Hashable, Compiled] = {}
        self._unused: dict[tuple[Device, _Form], Array] = {}

    def between(self, message: Send | Exchange, devices: StageDevices) -> Transfer:
        """Return this process's part in a message between two places."""
        slots = pair_slots(message, self._avals, self._specs)
        registers = [next(k for k in slot.sent if k is not None) for slot in slots]
        avals, specs = [self._avals[k] for k in registers], [self._specs[k] for k in registers]
        routes = tuple(tuple(side for side in (0, 1) if slot.sent[side] is not None) for slot in slots)
        meshes = [devices.mesh(place) for place in ends(message)]
        mine = [multihost.mine(mesh.devices.flatten().tolist()) for mesh in meshes]
        sides = [side for side in (0, 1) if mine[side]]
        pair = _pair_mesh(meshes)
        shardings = [
            NamedSharding(pair, side_by_side(spec, AXIS) if a.shape else P())
            for a, spec in zip(avals, specs, strict=True)
        ]
        key = tuple(pair.devices.flat), routes, tuple(map(_form, avals)), tuple(specs)
        program = self._program(key, lambda *arrays: _permuted(arrays, routes), avals, shardings)
        inputs = [(k, side) for side in sides for k, slot in enumerate(slots) if slot.sent[side] is not None]
        outputs = [(k, side) for side in sides for k, slot in enumerate(slots) if slot.received[side] is not None]
        unused = {
            (k, side): [self._unused_array(_shard(avals[k], specs[k], meshes[side]), d) for d in mine[side]]
            for side in sides
            for k in range(len(slots))
            if (k, side) not in inputs
        }

        def run(*arrays: Array) -> list[Array | None]:
            parts = unused | {
                at: [shard.data for shard in x.addressable_shards] for at, x in zip(inputs, arrays, strict=True)
            }
            operands = [
                jax.make_array_from_single_device_arrays(
                    _stacked(aval, 2), shardings[k], [part for side in sides for part in parts[k, side]]
                )
                for k, aval in enumerate(avals)
            ]
            results = [{shard.device: shard.data for shard in x.addressable_shards} for x in program(*operands)]
            return [of_member(avals[k].shape, results[k], meshes[side], specs[k]) for k, side in outputs]

        return Transfer(
            run,
            tuple(slots[k].sent[side] for k, side in inputs),  # pyright: ignore[reportArgumentType]
            tuple(slots[k].received[side] for k, side in outputs),  # pyright: ignore[reportArgumentType]
        )

    def spread(self, instruction: Spread, devices: StageDevices) -> Transfer:
        """Return this process's part in copying arrays to many devices."""
        source, every = devices.at(instruction.source), devices.of_replicas(instruction.replicas)
        avals = [self._avals[k] for k in instruction.reads]
        first, mesh = every.index(source), Mesh(np.array(every), (AXIS,))
        shardings = [NamedSharding(mesh, _spec(aval)) for aval in avals]
        program = self._program(
            ("spread", every, first, tuple(map(_form, avals))),
            lambda *arrays: _copied_from(first, arrays),
            avals,
            shardings,
            replicated=True,
        )
        mine = multihost.mine(every)
        unused = {device: [self._unused_array(aval, device) for aval in avals] for device in mine}

        def run(*arrays: Array) -> list[Array]:
            sent = [next(shard.data for shard in x.addressable_shards if shard.device == source) for x in arrays]
            rows = [sent if device == source else unused[device] for device in mine]
            columns = zip(*rows, strict=True)
            operands = [
                jax.make_array_from_single_device_arrays(_stacked(aval, len(every)), sharding, list(column))
                for aval, sharding, column in zip(avals, shardings, columns, strict=True)
            ]
            return program(*operands)

        return Transfer(run, instruction.reads if source in mine else (), instruction.writes)

    def _program(
        self,
        key: Hashable,
        function: Callable[..., tuple[Array, ...]],
        avals: Sequence[jax.ShapeDtypeStruct],
        shardings: Sequence[NamedSharding],
        replicated: bool = False,
    ) -> Compiled:
        if key not in self._programs:
            mesh, specs = shardings[0].mesh, tuple(sharding.spec for sharding in shardings)
            results = (P(),) * len(avals) if replicated else specs
            mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
            shaped = [
                jax.ShapeDtypeStruct(_stacked(a, mesh.shape[AXIS]), a.dtype, sharding=sharding)
                for a, sharding in zip(avals, shardings, strict=True)
            ]
            self._programs[key] = jax.jit(mapped).lower(*shaped).compile()
        return self._programs[key]

    def _unused_array(self, aval: jax.ShapeDtypeStruct, device: Device) -> Array:
        key = device, _form(aval)
        if key not in self._unused:
            self._unused[key] = jax.device_put(_zeros(aval), device)
        return self._unused[key]


def _pair_mesh(meshes: Sequence[Mesh]) -> Mesh:
    """Return the devices of two places, each of one member, with an axis over the two in front."""
    axes = meshes[0].axis_names[1:]
    return Mesh(np.array([mesh.devices[0] for mesh in meshes]), (AXIS, *axes))


def _shard(aval: Shaped, spec: P, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(aval.shape), aval.dtype)


def of_member(shape: tuple[int, ...], shards: Mapping[Device, Array], mesh: Mesh, spec: P) -> Array | None:
    """Return the array of a member of a stage, of parts by device; None for one of other processes."""
    local = [shards[d] for d in mesh.devices.flat if d in shards]
    if mesh.size == 1 or not local:
        return local[0] if local else None
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), local)


def _permuted(arrays: Sequence[Array], routes: Sequence[tuple[int, ...]]) -> tuple[Array, ...]:
    """Send each array's bits from one device, or from each of the two, to the other one."""

    def sent(x: Array, route: tuple[int, ...]) -> Array:
        permuted = functools.partial(lax.ppermute, axis_name=AXIS, perm=[(side, 1 - side) for side in route])
        is_narrow = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) or x.dtype.itemsize < 4
        # A compiler may send narrow types as wider ones; words of others would be copies that take time.
        return from_words(permuted(to_words(x)), x) if is_narrow else permuted(x)

    return tuple(sent(x, route) for x, route in zip(arrays, routes, strict=True))


def _copied_from(source: int, arrays: Sequence[Array]) -> tuple[Array, ...]:
    """Copy the arrays of one device to all, bit for bit: the sum of words of which the others are zero."""
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    words = pack_words(arrays, sum(map(word_count, avals)))
    words = lax.psum(jnp.where(lax.axis_index(AXIS) == source, words, jnp.zeros_like(words)), AXIS)
    return tuple(unpack_words(words, avals))


def _spec(aval: Shaped) -> P:
    """Arrays are put side by side. Scalars cannot be: each device passes its own, and gets its own."""
    return P(AXIS) if aval.shape else P()


def _stacked(aval: Shaped, count: int) -> tuple[int, ...]:
    return (count * aval.shape[0], *aval.shape[1:]) if aval.shape else ()


def _zeros(aval: jax.ShapeDtypeStruct) -> ArrayLike:
    if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return np.zeros(aval.shape, aval.dtype)
    data = jax.eval_shape(jax.random.key_data, aval)
    impl = jax.random.key_impl(jnp.empty((), aval.dtype))
    return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=impl)


def _form(aval: Shaped) -> _Form:
    return tuple(aval.shape), str(aval.dtype)
