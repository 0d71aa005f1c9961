"""Programs that carry arrays between devices of different processes, called by the owners of these devices alone.

    sender: array, receiver: an unused one ──side by side, global──▶ ppermute over the two devices ──▶ receiver: array
    source: arrays, all others: unused ones ──words of the source, sum over the devices──▶ arrays in common

All take part in the order of the list, which rules out that two wait for each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe import hosts
from jaxpipe.pipeline.words import pack_words, unpack_words, word_count
from jaxpipe.runtime.mpmd.instructions import Exchange, Send, Spread
from jaxpipe.runtime.mpmd.stage_devices import StageDevices


#: The mesh axis of the devices that take part.
AXIS = "pair"


@dataclass(frozen=True)
class Slot:
    """Arrays of one shape that two devices exchange.

    Attributes:
      sent: the registers that the first device and the second device send; None for nothing.
      received: where each of the two puts the other's.
    """

    sent: tuple[int | None, int | None]
    received: tuple[int | None, int | None]


@dataclass(frozen=True, eq=False)
class Transfer:
    """Part of this process in a message.

    Attributes:
      run: takes the arrays that this process sends, and returns those that it receives.
      reads, writes: their registers.
    """

    run: Callable[..., Sequence[Any]]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


def pair_slots(message: Send | Exchange, avals: Sequence[Any]) -> list[Slot]:
    """Return the slots of a message; two arrays of one shape that cross share one."""
    forth, back = (message.forth, message.back) if isinstance(message, Exchange) else (message, None)
    returning = [] if back is None else list(zip(back.reads, back.writes, strict=True))
    slots = []
    for read, write in zip(forth.reads, forth.writes, strict=True):
        match = next((pair for pair in returning if _alike(avals[pair[0]], avals[read])), None)
        if match is None:
            slots.append(Slot((read, None), (None, write)))
        else:
            returning.remove(match)
            slots.append(Slot((read, match[0]), (match[1], write)))
    return slots + [Slot((None, read), (write, None)) for read, write in returning]


class Transfers:
    """Compiles messages: each program once, for messages of the same shapes between the same devices."""

    def __init__(self, avals: Sequence[Any]):
        """Begin without a program.

        Args:
          avals: by register, the shape of its array.
        """
        self._avals = avals
        self._programs: dict[Any, Any] = {}
        self._unused: dict[Any, Any] = {}

    def between(self, message: Send | Exchange, ends: tuple[Any, Any]) -> Transfer:
        """Return this process's part in a message.

        Args:
          message: between two devices.
          ends: the device that it leaves, or its first half, and the other one.
        """
        slots = pair_slots(message, self._avals)
        avals = [self._avals[next(k for k in slot.sent if k is not None)] for slot in slots]
        routes = tuple(tuple(side for side in (0, 1) if slot.sent[side] is not None) for slot in slots)
        side = ends.index(*hosts.mine(ends))
        key = ends, routes, tuple(map(_form, avals))
        program = self._program(key, lambda *arrays: _permuted(arrays, routes), avals, ends)
        inputs = [k for k, slot in enumerate(slots) if slot.sent[side] is not None]
        outputs = [k for k, slot in enumerate(slots) if slot.received[side] is not None]
        reads = tuple(slots[k].sent[side] for k in inputs)
        writes = tuple(slots[k].received[side] for k in outputs)
        operands = self._operands(avals, ends[side], inputs)
        shardings = [NamedSharding(Mesh(np.array(ends), (AXIS,)), _spec(aval)) for aval in avals]

        def run(*arrays: Any) -> list[Any]:
            results = program(*_global(operands, inputs, arrays, avals, shardings))
            return [results[k].addressable_shards[0].data for k in outputs]

        return Transfer(run, reads, writes)  # pyright: ignore[reportArgumentType]

    def spread(self, instruction: Spread, devices: StageDevices) -> Transfer:
        """Return this process's part in copying arrays to many devices.

        Args:
          instruction: from where.
          devices: of the stages.
        """
        source, every = devices.at(instruction.source), devices.of_replicas(instruction.replicas)
        avals = [self._avals[k] for k in instruction.reads]
        first = every.index(source)
        program = self._program(
            ("spread", every, first, tuple(map(_form, avals))),
            lambda *arrays: _copied_from(first, arrays),
            avals,
            every,
            replicated=True,
        )
        mine, shardings = hosts.mine(every), [NamedSharding(Mesh(np.array(every), (AXIS,)), _spec(a)) for a in avals]
        unused = {device: self._operands(avals, device, ()) for device in mine}

        def run(*arrays: Any) -> list[Any]:
            rows = [arrays if device == source else unused[device] for device in mine]
            columns = zip(*rows, strict=True)
            operands = [
                jax.make_array_from_single_device_arrays(_stacked(aval, len(every)), sharding, list(column))
                for aval, sharding, column in zip(avals, shardings, columns, strict=True)
            ]
            return program(*operands)

        return Transfer(run, instruction.reads if source in mine else (), instruction.writes)

    def _program(
        self,
        key: Any,
        function: Callable[..., Any],
        avals: Sequence[Any],
        devices: Sequence[Any],
        replicated: bool = False,
    ) -> Any:
        if key not in self._programs:
            mesh = Mesh(np.array(devices), (AXIS,))
            specs = tuple(map(_spec, avals))
            results = (P(),) * len(avals) if replicated else specs
            mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
            shaped = [
                jax.ShapeDtypeStruct(_stacked(a, len(devices)), a.dtype, sharding=NamedSharding(mesh, spec))
                for a, spec in zip(avals, specs, strict=True)
            ]
            self._programs[key] = jax.jit(mapped).lower(*shaped).compile()
        return self._programs[key]

    def _operands(self, avals: Sequence[Any], device: Any, inputs: Sequence[int]) -> list[Any]:
        """Return arrays that nobody reads where a device sends nothing."""
        return [None if k in inputs else self._unused_array(aval, device) for k, aval in enumerate(avals)]

    def _unused_array(self, aval: Any, device: Any) -> Any:
        key = device, _form(aval)
        if key not in self._unused:
            self._unused[key] = jax.device_put(_zeros(aval), device)
        return self._unused[key]


def _global(
    operands: Sequence[Any],
    inputs: Sequence[int],
    arrays: Sequence[Any],
    avals: Sequence[Any],
    shardings: Sequence[Any],
) -> list[Any]:
    local = list(operands)
    for k, x in zip(inputs, arrays, strict=True):
        local[k] = x
    return [
        jax.make_array_from_single_device_arrays(_stacked(aval, 2), sharding, [x])
        for aval, sharding, x in zip(avals, shardings, local, strict=True)
    ]


def _permuted(arrays: Sequence[Any], routes: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
    """Send each array from one device, or from each of the two, to the other one."""
    return tuple(
        _from_bits(lax.ppermute(_to_bits(x), AXIS, [(side, 1 - side) for side in route]), x)
        for x, route in zip(arrays, routes, strict=True)
    )


def _copied_from(source: int, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Copy the arrays of one device to all, bit for bit: the sum of words of which the others are zero."""
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    words = pack_words(arrays, sum(map(word_count, avals)))
    words = lax.psum(jnp.where(lax.axis_index(AXIS) == source, words, jnp.zeros_like(words)), AXIS)
    return tuple(unpack_words(words, avals))


def _to_bits(x: Any) -> Any:
    """Return an array as one of a type that no compiler sends as another one."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
        return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return x


def _from_bits(bits: Any, like: Any) -> Any:
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(like))
    if like.dtype == jnp.bool_:
        return bits.astype(jnp.bool_)
    return bits if bits.dtype == like.dtype else lax.bitcast_convert_type(bits, like.dtype)


def _spec(aval: Any) -> P:
    """Arrays are put side by side. Scalars cannot be: each device passes its own, and gets its own."""
    return P(AXIS) if aval.shape else P()


def _stacked(aval: Any, count: int) -> tuple[int, ...]:
    return (count * aval.shape[0], *aval.shape[1:]) if aval.shape else ()


def _zeros(aval: Any) -> Any:
    if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return np.zeros(aval.shape, aval.dtype)
    data = jax.eval_shape(jax.random.key_data, aval)
    impl = jax.random.key_impl(jnp.empty((), aval.dtype))
    return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=impl)


def _form(aval: Any) -> tuple[tuple[int, ...], str]:
    return tuple(aval.shape), str(aval.dtype)


def _alike(a: Any, b: Any) -> bool:
    return _form(a) == _form(b)
