"""Programs that carry arrays between devices of different processes, called by the owners of these devices alone.

    sender: array, receiver: an unused one ──side by side, global──▶ ppermute over the two devices ──▶ receiver: array
    source: arrays, all others: unused ones ──words of the source, sum over the devices──▶ arrays in common

All take part in the order of the list, which rules out that two wait for each other.
"""

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from jaxpipe import multihost
from jaxpipe.array_types import Array, Device, Shaped
from jaxpipe.runtime.mpmd.stage_devices import StageDevices
from jaxpipe.runtime.mpmd.step_graph import Send, Spread
from jaxpipe.runtime.uint32_words import from_words, pack_words, to_words, unpack_words, word_count
from jaxpipe.runtime.waiting_thread import Results
from jaxpipe.sharding.mesh_axes import side_by_side


#: The mesh axis of the devices that take part.
AXIS = "pair"

#: Arrays of one shape that two devices exchange: by side that sends (0 or 1), the number there and that of the other.
Slot: TypeAlias = dict[int, tuple[int, int]]

#: Shape and element type of an array.
_Form: TypeAlias = tuple[tuple[int, ...], str]


@dataclass(frozen=True, eq=False)
class Transfer:
    """Part of this process in a message."""

    run: Callable[..., Results]  # takes the arrays that this process sends, returns those that it receives
    reads: tuple[int, ...]
    writes: tuple[int, ...]


def pair_slots(message: Send, avals: Sequence[jax.ShapeDtypeStruct], specs: Sequence[P]) -> list[Slot]:
    """Return the slots of a message; two arrays of one shape that cross, split alike, share one."""
    pairs = list(zip(message.reads, message.writes, strict=True))
    first = len(pairs) - message.returning
    slots: list[Slot] = [{0: pair} for pair in pairs[:first]]
    form = {k: (_form(avals[k]), specs[k]) for k in message.reads}
    for pair in pairs[first:]:
        slot = next((slot for slot in slots if slot.keys() == {0} and form[slot[0][0]] == form[pair[0]]), None)
        if slot is None:
            slots.append({1: pair})
        else:
            slot[1] = pair
    return slots


class Transfers:
    """Compiles messages: each program once, for messages of the same shapes between the same devices."""

    def __init__(self, avals: Sequence[jax.ShapeDtypeStruct], specs: Sequence[P]):
        """Begin without a program."""
        self._avals, self._specs = avals, specs
        self._programs: dict[Hashable, Compiled] = {}
        self._unused: dict[tuple[Device, _Form], Array] = {}

    def between(self, message: Send, devices: StageDevices) -> Transfer:
        """Return this process's part in a message between two places."""
        slots = pair_slots(message, self._avals, self._specs)
        numbers = [next(iter(slot.values()))[0] for slot in slots]
        avals, specs = [self._avals[k] for k in numbers], [self._specs[k] for k in numbers]
        routes = tuple(map(tuple, slots))
        meshes = [devices.mesh(place) for place in message.ends]  # each of one member
        pair = Mesh(np.array([mesh.devices[0] for mesh in meshes]), (AXIS, *meshes[0].axis_names[1:]))
        sides = [side for side in (0, 1) if multihost.mine(list(meshes[side].devices.flat))]
        every = [(k, side, slot) for side in sides for k, slot in enumerate(slots)]
        sent = [(k, side, slot[side][0]) for k, side, slot in every if side in slot]
        received = [(k, side, slot[1 - side][1]) for k, side, slot in every if 1 - side in slot]
        sources = {(k, d) for k, side, _ in sent for d in meshes[side].devices.flat}
        send = self._message(_permuted, routes, avals, pair, specs, sources)

        def run(*arrays: Array) -> list[Array | None]:
            pairs = zip(sent, arrays, strict=True)
            results = send({(k, shard.device): shard.data for (k, *_), x in pairs for shard in x.addressable_shards})
            shards = [{shard.device: shard.data for shard in x.addressable_shards} for x in results]
            return [of_member(avals[k].shape, shards[k], meshes[side], specs[k]) for k, side, _ in received]

        return Transfer(run, tuple(number for *_, number in sent), tuple(number for *_, number in received))

    def spread(self, instruction: Spread, devices: StageDevices) -> Transfer:
        """Return this process's part in copying arrays to many devices."""
        source, every = devices.at(instruction.source), devices.of_replicas(instruction.replicas)
        avals = [self._avals[k] for k in instruction.reads]
        first, mesh = every.index(source), Mesh(np.array(every), (AXIS,))
        specs, sources = [P()] * len(avals), {(k, source) for k in range(len(avals))}
        send = self._message(_copied_from, first, avals, mesh, specs, sources, replicated=True)

        def run(*arrays: Array) -> list[Array]:
            shards = ((k, shard) for k, x in enumerate(arrays) for shard in x.addressable_shards)
            return send({(k, shard.device): shard.data for k, shard in shards if shard.device == source})

        reads = instruction.reads if source in multihost.mine(every) else ()
        return Transfer(run, reads, instruction.writes)

    def _message(
        self,
        function: Callable[[Any, Sequence[Array]], tuple[Array, ...]],
        route: Hashable,
        avals: Sequence[jax.ShapeDtypeStruct],
        mesh: Mesh,
        specs: Sequence[P],  # by array, over the other axes of the mesh
        sent: Collection[tuple[int, Device]],
        replicated: bool = False,
    ) -> Callable[[dict[tuple[int, Device], Array]], list[Array]]:
        """Return a function that runs a program of all that take part: ``function`` of a route and of their arrays.

        It takes what is ``sent`` from this process, by position of the array and device; of the others, unused arrays.
        """
        # Arrays are put side by side. Scalars cannot be: each device passes its own, and gets its own.
        every, pairs = list(mesh.devices.flat), list(zip(avals, specs, strict=True))
        specs = [side_by_side(spec, AXIS) if aval.shape else P() for aval, spec in pairs]
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        shapes = [(aval.shape[0] * mesh.shape[AXIS], *aval.shape[1:]) if aval.shape else () for aval in avals]
        key = function, route, tuple(every), tuple(map(_form, avals)), tuple(specs)
        if key not in self._programs:
            mapped = jax.shard_map(
                lambda *arrays: function(route, arrays),
                mesh=mesh,
                in_specs=tuple(specs),
                out_specs=P() if replicated else tuple(specs),
                check_vma=False,
            )
            rows = zip(shapes, avals, shardings, strict=True)
            shaped = (jax.ShapeDtypeStruct(shape, aval.dtype, sharding=to) for shape, aval, to in rows)
            self._programs[key] = jax.jit(mapped).lower(*shaped).compile()
        program, mine = self._programs[key], multihost.mine(every)
        parts = [to.shard_shape(shape) for shape, to in zip(shapes, shardings, strict=True)]
        unused = {
            (k, d): self._unused_array(jax.ShapeDtypeStruct(part, avals[k].dtype), d)
            for k, part in enumerate(parts)
            for d in mine
            if (k, d) not in sent
        }

        def run(given: dict[tuple[int, Device], Array]) -> list[Array]:
            held = unused | given
            local = [[held[k, d] for d in mine] for k in range(len(avals))]
            return program(*map(jax.make_array_from_single_device_arrays, shapes, shardings, local))

        return run

    def _unused_array(self, aval: jax.ShapeDtypeStruct, device: Device) -> Array:
        key = device, _form(aval)
        if key not in self._unused:
            zeros = from_words(jnp.zeros(word_count(aval), jnp.uint32), aval)
            self._unused[key] = jax.device_put(zeros, device)
        return self._unused[key]


def of_member(shape: tuple[int, ...], shards: Mapping[Device, Array], mesh: Mesh, spec: P) -> Array | None:
    """Return the array of a member of a stage, of parts by device; None for one of other processes."""
    local = [shards[d] for d in mesh.devices.flat if d in shards]
    if mesh.size == 1 or not local:
        return local[0] if local else None
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), local)


def _permuted(routes: Sequence[tuple[int, ...]], arrays: Sequence[Array]) -> tuple[Array, ...]:
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


def _form(aval: Shaped) -> _Form:
    return tuple(aval.shape), str(aval.dtype)
