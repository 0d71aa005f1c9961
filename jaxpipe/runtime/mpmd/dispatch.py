"""A list of calls on its devices: compiled, and followed by the host.

The host waits for nothing, but between processes on CPUs for what comes from others (``jaxpipe.runtime.mpmd.waiting``).
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpipe import hosts
from jaxpipe.pipeline.axes import DATA
from jaxpipe.runtime.mpmd.calls import CallList, Program
from jaxpipe.runtime.mpmd.compile import Executable, Job, Target, compile_jobs
from jaxpipe.runtime.mpmd.crossing import crosses, ends
from jaxpipe.runtime.mpmd.instructions import Call, Exchange, Instruction, Join, Key, Place, Send, Split, Spread
from jaxpipe.runtime.mpmd.stage_devices import StageDevices
from jaxpipe.runtime.mpmd.transfers import Transfer, Transfers
from jaxpipe.runtime.mpmd.waiting import ended, started


#: Arrays in, arrays out.
Action = Callable[..., Sequence[Any]]

#: Registers one behind the other, and as many times None.
Emptied = tuple[slice, tuple[None, ...]]

#: An action, how to take its operands out of the registers, where its results go (a slice if that is one), and which
#: registers nobody reads any more.
Step = tuple[Action, Callable[[list[Any]], Sequence[Any]], slice | tuple[int, ...], tuple[Emptied, ...]]


@dataclass(frozen=True, eq=False)
class Dispatch:
    """A list that can be followed.

    Attributes:
      calls: the list.
      executables: by program and place of a call; those of other processes cannot be run here.
      steps: what this process does.
      registers: how many it needs: those of the list, and those for actions that have not ended.
    """

    calls: CallList
    executables: dict[tuple[int, Place], Executable]
    steps: tuple[Step, ...]
    registers: int

    def run(self, given: dict[int, Any]) -> dict[Key, Any]:
        """Follow the list.

        Args:
          given: by register, the arrays of its inputs on this process's devices.

        Returns:
          Its outputs; None for those on other processes' devices.
        """
        registers: list[Any] = [None] * self.registers
        for register, x in given.items():
            registers[register] = x
        follow(registers, self.steps)
        return {key: registers[register] for key, register in self.calls.outputs.items()}


def follow(registers: list[Any], steps: Sequence[Step]) -> None:
    """Follow steps; changes the registers."""
    for action, read, writes, left in steps:
        results = action(*read(registers))
        if type(writes) is slice:
            registers[writes] = results
        else:
            for register, x in zip(writes, results, strict=True):
                registers[register] = x
        for part, nothing in left:
            registers[part] = nothing


def _step(action: Action, reads: Sequence[int], writes: Sequence[int], left: Sequence[int]) -> Step:
    """Return a step; registers in slices, which a list takes at once."""
    runs = _runs(writes)
    to = runs[0] if len(runs) == 1 and list(writes) == sorted(writes) else tuple(writes)
    emptied = tuple((part, (None,) * (part.stop - part.start)) for part in _runs(left))
    return action, _reader(reads), to, emptied


def _runs(registers: Sequence[int]) -> list[slice]:
    """Return registers as slices."""
    runs: list[slice] = []
    for register in sorted(registers):
        if runs and runs[-1].stop == register:
            runs[-1] = slice(runs[-1].start, register + 1)
        else:
            runs.append(slice(register, register + 1))
    return runs


def compile_list(calls: CallList, devices: StageDevices) -> Dispatch:
    """Compile the programs of a list for this process's devices.

    Args:
      calls: the list.
      devices: of the stages.
    """
    jobs: dict[tuple[int, Place], Job] = {}
    for instruction in calls.instructions:
        if isinstance(instruction, Call) and (instruction.program, instruction.place) not in jobs:
            target = Target(devices.of(instruction.place))
            program = calls.programs[instruction.program]
            jobs[instruction.program, instruction.place] = Job(program.traced, program.donated, target, _specs(program))
    compiled = compile_jobs(list(jobs.values()), "cuda" if devices.platform == "gpu" else devices.platform)
    executables = {key: program for key, program in zip(jobs, compiled, strict=True) if program is not None}
    if len(devices.processes) > 1:
        hosts.agree("The list of calls", repr((calls.instructions, calls.avals)))
    steps = _Steps(calls, devices, executables)
    for instruction, left in zip(calls.instructions, calls.dropped, strict=True):
        steps.add(instruction, left)
    steps.end_all()
    shown = {key: replace(program, run=_runs_elsewhere) for key, program in executables.items()}
    every = {key: program for some in hosts.gathered(shown) for key, program in some.items()}
    return Dispatch(calls, every | executables, tuple(steps.steps), steps.registers)


class _Steps:
    """The steps of this process for the instructions of a list."""

    def __init__(self, calls: CallList, devices: StageDevices, executables: dict[tuple[int, Place], Executable]):
        self.steps: list[Step] = []
        self.registers = len(calls.avals)
        self._calls, self._devices, self._executables = calls, devices, executables
        self._transfers = Transfers(calls.avals)
        self._waits = devices.platform == "cpu"
        self._running: dict[int, tuple[Transfer, tuple[int, ...]]] = {}

    def add(self, instruction: Instruction, left: tuple[int, ...]) -> None:
        """Add what this process does for an instruction, if that is anything."""
        part = self._part(instruction)
        if part is None:
            return
        donated = self._donated(instruction)
        for register, (running, _) in list(self._running.items()):
            if not (donated.isdisjoint(running.reads) and set(part.reads).isdisjoint(running.writes)):
                self._end(register)
        if not (self._waits and self._crosses(instruction)):
            self.steps.append(_step(part.run, part.reads, part.writes, left))
            return
        self.steps.append(_step(started(part.run), part.reads, (self.registers,), left))
        self._running[self.registers] = part, left
        self.registers += 1

    def end_all(self) -> None:
        """Wait for all that has been started."""
        for register in list(self._running):
            self._end(register)

    def _end(self, register: int) -> None:
        running, left = self._running.pop(register)
        unread = set(left).intersection(running.writes)
        self.steps.append(_step(ended, (register,), running.writes, (register, *unread)))

    def _part(self, instruction: Instruction) -> Transfer | None:
        devices = self._devices
        if isinstance(instruction, (Send, Exchange)):
            pair = ends(instruction, devices)
            if hosts.mine(pair) and crosses(*pair):
                return self._transfers.between(instruction, pair)
        if isinstance(instruction, Spread):
            takes_part = hosts.mine(devices.of_replicas(instruction.replicas))
            return self._transfers.spread(instruction, devices) if takes_part else None
        action = _action(instruction, self._calls, devices, self._executables)
        return None if action is None else Transfer(action, instruction.reads, instruction.writes)

    def _donated(self, instruction: Instruction) -> set[int]:
        if not isinstance(instruction, Call):
            return set()
        return {instruction.reads[k] for k in self._calls.programs[instruction.program].donated}

    def _crosses(self, instruction: Instruction) -> bool:
        """Return whether other processes take part."""
        if isinstance(instruction, Call):
            row = self._devices.of(instruction.place)
            return instruction.place.is_whole and len(hosts.mine(row)) < len(row)
        if isinstance(instruction, Send):
            return crosses(*ends(instruction, self._devices))
        return isinstance(instruction, (Exchange, Spread))


def _runs_elsewhere(*_: Any) -> Any:
    """Stand for a program of another process."""
    raise AssertionError


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
    instruction: Instruction, calls: CallList, devices: StageDevices, executables: dict[tuple[int, Place], Executable]
) -> Action | None:
    """Return what this process does for an instruction; None for nothing."""
    if isinstance(instruction, Call):
        executable = executables.get((instruction.program, instruction.place))
        return None if executable is None else executable.run
    if isinstance(instruction, Send):
        return _send(instruction, devices)
    if not isinstance(instruction, (Split, Join)):
        return None
    whole = Place(instruction.stage)
    mine = [r for r, device in enumerate(devices.of(whole)) if hosts.mine([device])]
    if not mine:
        return None
    if isinstance(instruction, Split):
        return _split(len(devices.of(whole)), mine)
    return _join(instruction, calls, devices.mesh(whole), mine)


def _send(instruction: Send, devices: StageDevices) -> Action | None:
    source, target = devices.at(instruction.source), devices.at(instruction.target)
    if not hosts.mine([source]):
        return None
    if source == target:  # between the device's memory and its host's
        kind = "pinned_host" if instruction.to_host else "device"
        target = SingleDeviceSharding(source, memory_kind=kind)
    # A device as the target takes half of the time that a sharding takes.
    if len(instruction.reads) == 1:
        return lambda x: (jax.device_put(x, target),)
    return lambda *arrays: jax.device_put(arrays, target)


def _split(count: int, mine: Sequence[int]) -> Action:
    def split(x: Any) -> list[Any]:
        parts: list[Any] = [None] * count
        for shard, r in zip(x.addressable_shards, mine, strict=True):
            parts[r] = shard.data
        return parts

    return split


def _join(instruction: Join, calls: CallList, mesh: Mesh, mine: Sequence[int]) -> Action:
    aval = calls.avals[instruction.writes[0]]
    sharding = NamedSharding(mesh, P(DATA) if instruction.sharded else P())

    def join(*parts: Any) -> tuple[Any]:
        local = [parts[r] for r in mine]
        if instruction.sharded and not local[0].shape:
            local = [x.reshape(1) for x in local]
        return (jax.make_array_from_single_device_arrays(aval.shape, sharding, local),)

    return join
