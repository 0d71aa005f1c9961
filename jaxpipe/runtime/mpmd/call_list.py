"""A list of what the host does for a step, compiled once from the schedule's table.

Instructions read and write numbered registers, each of which is written once. The list is the same in every process;
each follows the instructions for its own devices (``jaxpipe.runtime.mpmd.instructions``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import jax
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.mpmd.combine_sends import join_messages
from jaxpipe.runtime.mpmd.compile_work import TracedWork
from jaxpipe.runtime.mpmd.instructions import Call, Instruction, Join, Key, Place, Send, Split, Spread
from jaxpipe.runtime.mpmd.stage_devices import StageDevices
from jaxpipe.runtime.mpmd.stage_work import Context, Name, Role
from jaxpipe.schedules.table import StageNumber
from jaxpipe.sharding.mesh_axes import DATA
from jaxpipe.sharding.partition_specs import side_by_side


@dataclass(frozen=True, eq=False)
class Program:
    """A program of a list."""

    traced: TracedWork
    whole: bool  # runs on all replicas of a stage together
    consumes: bool  # may use the memory of what exists at the beginning
    donated: frozenset[int] = frozenset()  # positions of operands whose memory it may use


@dataclass(frozen=True, eq=False)
class CallList:
    """A compiled list."""

    instructions: tuple[Instruction, ...]
    programs: tuple[Program, ...]
    avals: tuple[jax.ShapeDtypeStruct, ...]  # by register; of all replicas' arrays if these are together
    inputs: dict[Key, int]  # by key, the register at the beginning
    outputs: dict[Key, int]  # by key, the register at the end
    dropped: tuple[tuple[int, ...], ...]  # by instruction, registers that nobody reads any more
    specs: tuple[P, ...]  # by register, over the devices of its place
    free: frozenset[int]  # registers whose spec XLA chooses; ``specs`` has the expected one
    away: frozenset[int] = frozenset()  # registers of stashes that other stages' devices keep
    hosted: frozenset[int] = frozenset()  # registers in the host's memory


@dataclass
class ListBuilder:
    """A list that is being written."""

    devices: StageDevices
    context: Context
    kept: set[int] = field(default_factory=set)  # their memory is shared: no program may write over it
    instructions: list[Instruction] = field(default_factory=list)
    programs: list[Program] = field(default_factory=list)
    avals: list[jax.ShapeDtypeStruct] = field(default_factory=list)
    specs: list[P] = field(default_factory=list)
    free: set[int] = field(default_factory=set)
    inputs: dict[Key, int] = field(default_factory=dict)
    now: dict[Key, int] = field(default_factory=dict)
    away: set[int] = field(default_factory=set)
    hosted: set[int] = field(default_factory=set)

    def key(self, place: Place, name: Name, j: int = -1) -> Key:
        """The key of an array."""
        return Key(place, name, j if name.role.is_of_microbatch else -1)

    def register(self, aval: jax.ShapeDtypeStruct, spec: P, free: bool = False) -> int:
        """Return a new register."""
        self.avals.append(aval)
        self.specs.append(spec)
        register = len(self.avals) - 1
        if free:
            self.free.add(register)
        return register

    def copied(self, register: int) -> int:
        """Return a new register for a copy of an array."""
        return self.register(self.avals[register], self.specs[register], register in self.free)

    def spec(self, place: Place, name: Name) -> P:
        """Return the partition spec of an array at a place; each member has its own residuals."""
        spec = self.context.spec(place.stage, name)
        return side_by_side(spec, DATA) if place.is_whole and name.role is Role.RESIDUAL else spec

    def given(self, place: Place, name: Name, aval: jax.ShapeDtypeStruct, j: int = -1, keep: bool = False) -> None:
        """Note an array that exists at the beginning; no program may write over one to ``keep``."""
        key = self.key(place, name, j)
        if key not in self.inputs:
            self.inputs[key] = self.now[key] = self.register(aval, self.spec(place, name))
        if keep:
            self.kept.add(self.inputs[key])

    def has(self, place: Place, name: Name, j: int = -1) -> bool:
        """Return whether an array is there."""
        return self.key(place, name, j) in self.now

    def program(self, traced: TracedWork, whole: bool = False, consumes: bool = False) -> int:
        """Add a program."""
        self.programs.append(Program(traced, whole, consumes))
        return len(self.programs) - 1

    def call(self, number: int, stage: StageNumber, member: int = -1, j: int = -1) -> None:
        """Run a program at a place."""
        program = self.programs[number]
        place = self.devices.place(stage, -1 if program.whole else member)
        traced = program.traced
        reads = []
        for name, aval in zip(traced.read_names, traced.read_avals, strict=True):
            key = self.key(place, name, j)
            if place.is_whole and key not in self.now:
                self.join(stage, name, aval, is_own(name))
            reads.append(self.now[key])
        writes = []
        for name, aval in zip(traced.written_names, traced.written_avals, strict=True):
            writes.append(self.register(aval, self.spec(place, name), self.context.is_free(name)))
        self.instructions.append(Call(number, place, tuple(reads), tuple(writes)))
        results = dict(zip(traced.written_names, writes, strict=True))
        for name, source in traced.same.items():  # a result, or else an operand
            results[name] = results[source] if source in results else self.now[self.key(place, source, j)]
        self.now |= {self.key(place, name, j): register for name, register in results.items()}

    def send(
        self, source: Place, target: Place, names: Sequence[tuple[Name, Name]], j: int = -1, to: int | None = None
    ) -> None:
        """Copy arrays, pairs of their names at both ends; within a device nothing is copied."""
        pairs = [(self.now[self.key(source, a, j)], self.key(target, b, j if to is None else to)) for a, b in names]
        if not pairs:
            return
        if self.devices.at(source) == self.devices.at(target):
            self.now |= {key: register for register, key in pairs}
            return
        writes = self.copy(source, target, [register for register, _ in pairs])
        self.now |= {key: register for (_, key), register in zip(pairs, writes, strict=True)}

    def copy(self, source: Place, target: Place, registers: Sequence[int], to_host: bool = False) -> list[int]:
        """Copy arrays to another place, or to the host's memory and back; returns their registers."""
        writes = [self.copied(register) for register in registers]
        if registers:
            self.instructions.append(Send(source, target, tuple(registers), tuple(writes), to_host))
        return writes

    def spread(self, source: Place, replicas: Sequence[int], names: Sequence[Name]) -> None:
        """Copy arrays to all stages of some replicas."""
        keys = [self.key(source, name) for name in names]
        reads = tuple(self.now[key] for key in keys)
        writes = tuple(map(self.copied, reads))
        self.now |= dict(zip(keys, writes, strict=True))
        self.instructions.append(Spread(source, tuple(replicas), reads, writes))

    def split(self, stage: StageNumber, name: Name) -> None:
        """Give each replica its own part of an array; of one that is the same everywhere, all of it."""
        if len(self.devices.members(stage)) == 1:
            return
        read = self.now[Key(Place(stage), name)]
        writes = tuple(self.copied(read) for _ in self.devices.members(stage))
        self.kept.update(writes)
        self.now |= {Key(Place(stage, r), name): register for r, register in enumerate(writes)}
        self.instructions.append(Split(stage, (read,), writes))

    def join(self, stage: StageNumber, name: Name, aval: jax.ShapeDtypeStruct, own: bool) -> None:
        """Put the replicas' arrays of a name together: side by side if each has its ``own``; else they are equal."""
        reads = tuple(self.now[Key(Place(stage, r), name)] for r in self.devices.members(stage))
        write = self.register(aval, side_by_side(self.specs[reads[0]], DATA) if own else self.specs[reads[0]])
        if not self.kept.isdisjoint(reads):
            self.kept.add(write)
        self.now[Key(Place(stage), name)] = write
        self.instructions.append(Join(stage, reads, (write,), own))

    def finish(self, outputs: Iterable[Key]) -> CallList:
        """Return the list that ends with some arrays, without copies that nobody reads."""
        wanted = {key: self.now[key] for key in outputs}
        instructions = join_messages(_without_unread(self.instructions, set(wanted.values())), self.devices)
        last: dict[int, int] = {}
        for k, instruction in enumerate(instructions):
            last.update(dict.fromkeys((*instruction.reads, *instruction.writes), k))
        final, given = set(wanted.values()), set(self.inputs.values())
        needed = dict(last)  # an array, as long as parts of it are, which share its memory
        for instruction in reversed(instructions):
            if isinstance(instruction, Split):
                (whole,) = instruction.reads
                needed[whole] = max(needed[whole], *(needed[part] for part in instruction.writes))
        dropped: list[list[int]] = [[] for _ in instructions]
        for register, k in last.items():
            if register not in final:
                dropped[k].append(register)
        donated: dict[int, set[int]] = {}
        for k, instruction in enumerate(instructions):
            if not isinstance(instruction, Call):
                continue
            free = {
                position
                for position, register in enumerate(instruction.reads)
                if needed[register] == k
                and register not in final
                and instruction.reads.count(register) == 1
                and register not in self.kept
                and (register not in given or self.programs[instruction.program].consumes)
            }
            if self.programs[instruction.program].consumes:
                # A new value goes where the old one is, and nowhere else: XLA pairs operands and results by shape.
                traced = self.programs[instruction.program].traced
                free = {position for position in free if traced.read_names[position] in traced.written_names}
            donated[instruction.program] = donated.get(instruction.program, free) & free
        programs = [replace(p, donated=frozenset(donated.get(k, ()))) for k, p in enumerate(self.programs)]
        return CallList(
            tuple(instructions),
            tuple(programs),
            tuple(self.avals),
            {key: register for key, register in self.inputs.items() if register in last or register in final},
            wanted,
            tuple(map(tuple, dropped)),
            tuple(self.specs),
            frozenset(self.free),
            frozenset(self.away),
            frozenset(self.hosted),
        )


def _without_unread(instructions: Sequence[Instruction], needed: set[int]) -> list[Instruction]:
    """Leave out copies that nobody reads."""
    needed, kept = set(needed), []
    for instruction in reversed(instructions):
        if isinstance(instruction, Send):
            pairs = [pair for pair in zip(instruction.reads, instruction.writes, strict=True) if pair[1] in needed]
            if not pairs:
                continue
            reads, writes = zip(*pairs, strict=True)
            instruction = replace(instruction, reads=reads, writes=writes)
        elif needed.isdisjoint(instruction.writes):
            continue
        kept.append(instruction)
        needed.update(instruction.reads)
    return kept[::-1]


def is_own(name: Name) -> bool:
    """Return whether each member of a stage has an array of its own under a name, when a step ends."""
    return name.role in (Role.GRADIENT, Role.RESIDUAL) or (name.role is Role.STATE and name.part == 0)
