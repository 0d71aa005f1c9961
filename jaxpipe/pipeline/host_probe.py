"""Whether devices can keep stashes in their host's memory: they have to show it before a plan relies on it.

XLA moves an array there only if it can follow it through the whole program, may leave it on the device without a word,
and has read wrong parts of such arrays in loops (openxla/xla#46231). So a small loop of the executor's own form, with
its own ``swap``, is compiled and run: the arena for the host must be in the host's memory wherever it occurs in the
compiled program, and every stash must come back with its bits.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxpipe import hosts
from jaxpipe._compat import host_buffer
from jaxpipe.pipeline.program import PAGE, STAGE
from jaxpipe.pipeline.swap import PORTIONS, swap, swap_columns
from jaxpipe.pipeline.words import POISON
from jaxpipe.schedules import Kind, one_f_one_b
from jaxpipe.schedules.swaps import HOST, Slice, Swaps, swap_table
from jaxpipe.schedules.table import Schedule
from jaxpipe.schedules.transport import transport


#: Pages of a stash: more than one in each portion, and not the same number in all.
STASH_PAGES = 2 * PORTIONS + 3

#: XLA's number for the host's memory, as its programs name it in layouts.
HOST_SPACE = "S(5)"


class _RefusedError(Exception):
    """The devices of some process cannot do it."""


def why_not(devices: Sequence[Any]) -> str:
    """Why devices cannot keep stashes in their host's memory; empty if they can.

    In several processes all call it, and all get the answer of the first one that refuses.
    """

    def check() -> None:
        reason = _why_not(tuple(hosts.mine(devices)))
        if reason:
            raise _RefusedError(reason)

    try:
        hosts.on_all(check)
    except _RefusedError as error:
        return str(error)
    return ""


@functools.cache
def _why_not(devices: tuple[Any, ...]) -> str:
    """The same for devices of this process; tried once."""
    schedule, swaps = probe_swaps(len(devices))
    pages = transport(swaps, (STASH_PAGES,) * schedule.num_stages).host
    kind = devices[0].device_kind
    try:
        compiled = trace_probe(devices).lower().compile()
        places = re.findall(rf"u32\[{pages},{PAGE}\]\{{([^}}]*)\}}", compiled.as_text())
        if not places or not all(HOST_SPACE in place for place in places):
            return f"XLA leaves on the device ({kind}) what is to go to the host's memory"
        if not any(device.addressable_memories() for device in devices):
            return ""  # they are not here, and programs are only compiled for them (jax.experimental.topologies)
        fine = np.asarray(compiled())
    except jax.errors.JaxRuntimeError as error:
        return f"XLA cannot compile or run such a loop for {kind}: {str(error).splitlines()[0]}"
    wrong, all_of_them = int((~fine).sum()), len(devices) * schedule.num_microbatches
    if wrong:
        return f"{wrong} of {all_of_them} stashes do not come back from the host's memory ({kind}) as they were"
    return ""


def probe_swaps(num_devices: int) -> tuple[Schedule, Swaps]:
    """Stashes that are with the host for as many ticks as possible, of early stages partly with a peer."""
    stages = max(2, num_devices)
    schedule = one_f_one_b(stages, 2 * stages)
    slices = [[Slice(HOST)] for _ in range(stages)]
    for s in range(stages // 2) if num_devices > 1 else ():
        slices[s].append(Slice(stages - 1 - s))
    ticks = [max(2 * (stages - 1 - s) - 1, 0) for s in range(stages)]
    return schedule, swap_table(schedule, ticks, [parts if n else [] for n, parts in zip(ticks, slices, strict=True)])


def trace_probe(devices: Sequence[Any]) -> Any:
    """The loop, traced: without arguments, ``[devices, ticks]``: does a backward pass find what was stored for it?"""
    schedule, swaps = probe_swaps(len(devices))
    found = transport(swaps, (STASH_PAGES,) * schedule.num_stages)
    tables = []
    for kind, slots in ((Kind.FORWARD, swaps.written), (Kind.BACKWARD, swaps.read)):
        rows = [schedule.row(s, kind) for s in range(schedule.num_stages)]
        places = [[found.home[s] + STASH_PAGES * slots[s].get(j, 0) for j in row] for s, row in enumerate(rows)]
        tables += [np.array(rows, np.int32), np.array(places, np.int32)]

    def stash(stage: Any, j: Any) -> Any:
        shape = STASH_PAGES, PAGE
        number = lax.broadcasted_iota(jnp.uint32, shape, 0) * PAGE + lax.broadcasted_iota(jnp.uint32, shape, 1)
        first = (stage * schedule.num_microbatches + j).astype(jnp.uint32) * np.uint32(STASH_PAGES * PAGE)
        return (first + number) * np.uint32(2654435761)  # odd: no two are the same

    def loop() -> Any:
        stage = lax.axis_index(STAGE)

        def tick(carry: Any, row: Any) -> Any:
            arena, host = carry
            (stored, there, used, here), columns = row
            old = lax.dynamic_slice(arena, (there, jnp.int32(0)), (STASH_PAGES, PAGE))
            new = jnp.where(stored >= 0, stash(stage, stored), old)
            arena = lax.dynamic_update_slice(arena, new, (there, jnp.int32(0)))
            kept = lax.dynamic_slice(arena, (here, jnp.int32(0)), (STASH_PAGES, PAGE))
            fine = jnp.all(kept == stash(stage, used)) | (used < 0)
            return swap(found, arena, host, STAGE, columns, used < -1, fine), fine

        own = [jnp.asarray(table)[stage] for table in tables]
        rows = own, swap_columns(found, schedule.num_stages, len(schedule.ticks), stage)
        arenas = jnp.full((found.arena, PAGE), POISON), host_buffer((found.host, PAGE), np.uint32)
        return lax.scan(tick, arenas, rows)[1][None]

    mesh = Mesh(np.array(devices), (STAGE,))
    mapped = jax.shard_map(loop, mesh=mesh, in_specs=(), out_specs=PartitionSpec(STAGE), check_vma=False)
    return jax.jit(mapped).trace()
