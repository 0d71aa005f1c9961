"""A list of calls on its devices: compiled, and followed by the host without waiting for anything."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe import hosts
from jaxpipe.runtime.mpmd.calls import Call, CallList, Instruction, Join, Key, Place, Program, Send, Split
from jaxpipe.runtime.mpmd.compile import DATA, Executable, Job, Target, compile_jobs


#: Arrays in, arrays out.
Action = Callable[..., Sequence[Any]]


@dataclass(frozen=True, eq=False)
class Dispatch:
    """A list that can be followed.

    Attributes:
      calls: the list.
      executables: by program and place of a call.
      steps: of each instruction of this process: the action, how to take its operands out of the registers, where the
        results go, and which registers are left.
    """

    calls: CallList
    executables: dict[tuple[int, Place], Executable]
    steps: tuple[tuple[Action, Callable[[list[Any]], Sequence[Any]], tuple[int, ...], tuple[int, ...]], ...]

    def run(self, given: dict[int, Any]) -> dict[Key, Any]:
        """Follow the list.

        Args:
          given: by register, the arrays of its inputs on this process's devices.

        Returns:
          Its outputs; None for those on other processes' devices.
        """
        registers: list[Any] = [None] * len(self.calls.avals)
        for register, x in given.items():
            registers[register] = x
        for action, read, writes, left in self.steps:
            results = action(*read(registers))
            for register, x in zip(writes, results, strict=True):
                registers[register] = x
            for register in left:
                registers[register] = None
        return {key: registers[register] for key, register in self.calls.outputs.items()}


def stage_mesh(devices: np.ndarray, place: Place) -> Mesh:
    """The devices of a place as a mesh."""
    row = devices[place.stage] if place.is_whole else devices[place.stage, place.replica : place.replica + 1]
    return Mesh(np.array(row), (DATA,))


def compile_list(calls: CallList, devices: np.ndarray) -> Dispatch:
    """Compile the programs of a list for this process's devices.

    Args:
      calls: the list.
      devices: by stage and replica.
    """
    platform = devices.flat[0].platform
    jobs: dict[tuple[int, Place], Job] = {}
    for instruction in calls.instructions:
        if isinstance(instruction, Call) and (instruction.program, instruction.place) not in jobs:
            target = tuple(stage_mesh(devices, instruction.place).devices.flat)
            if hosts.mine(target):
                program = calls.programs[instruction.program]
                jobs[instruction.program, instruction.place] = Job(
                    program.traced, program.donated, Target(target), _specs(program)
                )
    found = compile_jobs(list(jobs.values()), "cuda" if platform == "gpu" else platform)
    executables = dict(zip(jobs, found, strict=True))
    steps = []
    for instruction, left in zip(calls.instructions, calls.dropped, strict=True):
        action = _action(instruction, calls, devices, executables)
        if action is not None:
            steps.append((action, _reader(instruction.reads), instruction.writes, left))
    return Dispatch(calls, executables, tuple(steps))


def _specs(program: Program) -> tuple[tuple[P, ...], tuple[P, ...]] | None:
    if not program.whole:
        return None
    reads, writes = (tuple(P(DATA) if sharded else P() for sharded in side) for side in program.sharded)
    return reads, writes


def _reader(reads: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a function that takes arrays out of the registers."""
    if len(reads) > 1:
        return operator.itemgetter(*reads)
    if not reads:
        return lambda _: ()
    (register,) = reads
    return lambda registers: (registers[register],)


def _action(
    instruction: Instruction, calls: CallList, devices: np.ndarray, executables: dict[tuple[int, Place], Executable]
) -> Action | None:
    """Return what this process does for an instruction; None for nothing."""
    if isinstance(instruction, Call):
        executable = executables.get((instruction.program, instruction.place))
        return None if executable is None else executable.run
    if isinstance(instruction, Send):
        return _send(instruction, devices)
    mine = [r for r, device in enumerate(devices[instruction.stage]) if hosts.mine([device])]
    if not mine:
        return None
    if isinstance(instruction, Split):
        return _split(instruction, len(devices[instruction.stage]), mine)
    return _join(instruction, calls, stage_mesh(devices, Place(instruction.stage)), mine)


def _send(instruction: Send, devices: np.ndarray) -> Action | None:
    source, target = (devices[p.stage, max(p.replica, 0)] for p in (instruction.source, instruction.target))
    here = [bool(hosts.mine([device])) for device in (source, target)]
    if not any(here):
        return None
    if not all(here):
        raise NotImplementedError
    # A device as the target takes half of the time that a sharding takes.
    if len(instruction.reads) == 1:
        return lambda x: (jax.device_put(x, target),)
    return lambda *arrays: jax.device_put(arrays, target)


def _split(instruction: Split, replicas: int, mine: Sequence[int]) -> Action:
    def split(x: Any) -> list[Any]:
        parts: list[Any] = [None] * replicas
        for shard, r in zip(x.addressable_shards, mine, strict=True):
            parts[r] = shard.data
        return parts

    return split


def _join(instruction: Join, calls: CallList, mesh: Mesh, mine: Sequence[int]) -> Action:
    aval = calls.avals[instruction.writes[0]]
    sharding = NamedSharding(mesh, P(DATA) if instruction.sharded else P())

    def join(*parts: Any) -> tuple[Any]:
        own = [parts[r] for r in mine]
        if instruction.sharded and not own[0].shape:
            own = [x.reshape(1) for x in own]
        return (jax.make_array_from_single_device_arrays(aval.shape, sharding, own),)

    return join
