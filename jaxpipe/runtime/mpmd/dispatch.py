"""A step's graph on its devices: compiled, and followed by the host.

The host waits for nothing but stashes on their way (``Wait``) and, between processes on CPUs, for what comes from
others (``jaxpipe.runtime.waiting_thread``).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from jax.profiler import TraceAnnotation
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpipe import agreement, multihost
from jaxpipe.agreement import Part
from jaxpipe.array_types import Array, Device
from jaxpipe.runtime.mpmd.compile_tasks import CompileJob, Needs, compile_jobs
from jaxpipe.runtime.mpmd.send_between_processes import Transfer, Transfers, of_member
from jaxpipe.runtime.mpmd.stage_devices import StageDevices
from jaxpipe.runtime.mpmd.step_graph import Call, Instruction, Join, Port, Send, Split, Spread, StepGraph, TaskAt, Wait
from jaxpipe.runtime.waiting_thread import Awaited, Results, ended, started
from jaxpipe.text.stable_text import writer


#: Arrays in, arrays out.
Action = Callable[..., Results]

#: Arrays by number of their value; None on other processes' devices, and where nobody reads them any more. Behind
#: them, actions that have not ended.
Values = list[Any]


class Step(NamedTuple):
    """Part of this process in an instruction."""

    action: Action | Callable[..., tuple[Future[Results]]]  # or one that is begun, and waited for later
    reads: Sequence[int]
    writes: Sequence[int]
    drops: Sequence[int]  # what nobody reads any more
    label: str  # in traces


@dataclass(frozen=True, eq=False)
class Dispatch:
    """A graph that can be followed."""

    graph: StepGraph  # with the specs that XLA has chosen
    needs: dict[TaskAt, Needs]  # by task and place, in all processes
    calls: dict[TaskAt, Action]  # this process's
    steps: tuple[Step, ...]  # this process's
    size: int  # how many values there are, and actions that have not ended

    def run(self, values: Values) -> dict[Port, Array | None]:
        """Follow the graph from its inputs, which it drops; outputs on other processes' devices are None."""
        follow(values, self.steps)
        return {port: values[number] for port, number in self.graph.outputs.items()}


def follow(values: Values, steps: Sequence[Step]) -> None:
    """Follow steps; changes the values."""
    for action, reads, writes, drops, label in steps:
        with TraceAnnotation(label):
            results = action(*[values[number] for number in reads])
        for number, x in zip(writes, results, strict=True):
            values[number] = x
        for number in drops:
            values[number] = None


def compile_graph(graph: StepGraph, devices: StageDevices, call: str) -> Dispatch:
    """Compile the tasks of a graph, that of a function of ``Pipeline``, for this process's devices."""
    if len(devices.processes) > 1:
        agreement.agree(call, lambda: _parts(graph))
    calls, needs, specs = _compile_tasks(graph, devices)
    # Values that passes have left out have no spec by XLA.
    values = (x._replace(form=x.form._replace(spec=specs.get(k, x.form.spec))) for k, x in enumerate(graph.values))
    graph = replace(graph, values=tuple(values))
    steps = _Steps(graph, devices, calls, call)
    for instruction, left in zip(graph.instructions, graph.drops, strict=True):
        steps.add(instruction, left)
    steps.end_all()
    return Dispatch(graph, needs, calls, tuple(steps.steps), steps.size)


def _parts(graph: StepGraph) -> dict[str, Part]:
    """Return the parts of a graph that must be equal in all processes that follow it."""
    write = writer()
    programs = {f"{x.label} (number {k})": write(x.program.closed) for k, x in enumerate(graph.tasks)}
    return {"the graph of the step": repr((graph.instructions, graph.avals)), "programs": programs}


def _compile_tasks(
    graph: StepGraph, devices: StageDevices
) -> tuple[dict[TaskAt, Action], dict[TaskAt, Needs], dict[int, P]]:
    """Compile the tasks of a graph: those of this process, what all need, and by number how a value is split.

    Where XLA chooses how results are split, programs that read them wait for it.
    """
    waiting: dict[TaskAt, Call] = {}
    for instruction in graph.instructions:
        if isinstance(instruction, Call):
            waiting.setdefault((instruction.task, instruction.place), instruction)
    specs = {k: value.form.spec for k, value in enumerate(graph.values) if not value.form.is_free}
    calls: dict[TaskAt, Action] = {}
    needs: dict[TaskAt, Needs] = {}
    while waiting:
        ready = {key: call for key, call in waiting.items() if specs.keys() >= set(call.reads)}
        assert ready, "a program reads what no program before it has written"
        waiting = {key: call for key, call in waiting.items() if key not in ready}
        jobs = {
            (number, place): CompileJob(
                graph.tasks[number],
                graph.donated[number],
                devices.mesh(place),
                tuple(specs[k] for k in call.reads),
                tuple(None if graph.values[k].form.is_free else specs[k] for k in call.writes),
            )
            for (number, place), call in ready.items()
        }
        here = compile_jobs(jobs, devices.target.lowers_for)
        calls |= {key: program.run for key, program in here.items()}
        for known in multihost.gathered({key: program.needs for key, program in here.items()}):
            needs |= known
        _follow_specs(graph, specs, needs)
    return calls, needs, specs


def _follow_specs(graph: StepGraph, specs: dict[int, P], needs: dict[TaskAt, Needs]) -> None:
    """Note how the results of compiled programs are split, and with them their copies."""
    for x in graph.instructions:
        if isinstance(x, Call):
            known = needs.get((x.task, x.place))
            pairs = () if known is None else zip(x.writes, known.writes, strict=True)
        else:  # of parts and of what is put together, specs are known
            pairs = ((write, specs[k]) for k, write in zip(x.reads, x.writes, strict=False) if k in specs)
        for number, spec in pairs:
            specs.setdefault(number, spec)


class _Steps:
    """The steps of this process for the instructions of a graph."""

    def __init__(self, graph: StepGraph, devices: StageDevices, calls: dict[TaskAt, Action], call: str):
        self.steps: list[Step] = []
        self.size = len(graph.values)
        self._graph, self._devices, self._calls, self._call = graph, devices, calls, call
        self._transfers = Transfers(graph.avals, graph.specs)
        self._running: dict[int, tuple[Transfer, tuple[int, ...]]] = {}  # with what nobody reads behind it

    def add(self, instruction: Instruction, left: tuple[int, ...]) -> None:
        """Add what this process does for an instruction, if that is anything."""
        every = _devices_of(instruction, self._devices)
        if not multihost.mine(every):
            return
        part = self._part(instruction)
        positions = self._graph.donated[instruction.task] if isinstance(instruction, Call) else ()
        donated = {instruction.reads[k] for k in positions}
        for number, (running, _) in list(self._running.items()):
            if not (donated.isdisjoint(running.reads) and set(part.reads).isdisjoint(running.writes)):
                self._end(number)
        others, label = {d.process_index for d in every} - {jax.process_index()}, _label(instruction, self._graph)
        what = self._awaited(instruction) if others and self._devices.target.is_host else None
        if what is None:
            self.steps.append(Step(part.run, part.reads, part.writes, left, label))
            return
        action = started(part.run, Awaited(self._call, what, frozenset(others)))
        self.steps.append(Step(action, part.reads, (self.size,), left, label))
        self._running[self.size] = part, left
        self.size += 1

    def end_all(self) -> None:
        """Wait for all that has been started."""
        for number in list(self._running):
            self._end(number)

    def _end(self, number: int) -> None:
        running, left = self._running.pop(number)
        unread = set(left).intersection(running.writes)
        self.steps.append(Step(ended, (number,), running.writes, (number, *unread), "wait"))

    def _part(self, x: Instruction) -> Transfer:
        """Return the part of this process in an instruction."""
        if isinstance(x, Spread):
            return self._transfers.spread(x, self._devices)
        if isinstance(x, Send) and self._devices.cross(*x.ends):
            return self._transfers.between(x, self._devices)
        if isinstance(x, Call):
            action = self._calls[x.task, x.place]
        elif isinstance(x, Send):
            action = _send(x, self._devices, self._graph.specs)
        else:
            action = _wait if isinstance(x, Wait) else _share(x, self._graph, self._devices)
        return Transfer(action, x.reads, x.writes)

    def _awaited(self, x: Instruction) -> str | None:
        """Return what an instruction waits for that comes from other processes; None if it does not."""
        if isinstance(x, Call):
            return f"work of stage {x.place.stage}"
        if isinstance(x, Spread):
            return f"values of stage {x.source.stage}"
        if isinstance(x, Send) and self._devices.cross(*x.ends):
            return f"messages of stages {x.source.stage} and {x.target.stage}"
        return None


def _devices_of(x: Instruction, devices: StageDevices) -> tuple[Device, ...]:
    """Return the devices that take part in an instruction."""
    if isinstance(x, Spread):
        return devices.of_replicas(x.replicas)
    places = x.ends if isinstance(x, Send) else (x.place,)
    return tuple(d for place in places for d in devices.of(place))


def _label(instruction: Instruction, graph: StepGraph) -> str:
    """Return the name of an instruction in traces."""
    if isinstance(instruction, Call):
        label = graph.tasks[instruction.task].label
        return f"{label}, micro-batch {instruction.microbatch}" if instruction.microbatch >= 0 else label
    if isinstance(instruction, Send):
        source, target = (place.stage for place in instruction.ends)
        return f"send from stage {source} to {f'stage {target}' if source != target else 'other memory'}"
    return type(instruction).__name__.lower()


def _wait(*arrays: Array | None) -> tuple[()]:
    """Wait for arrays; None are those of another process."""
    jax.block_until_ready(arrays)
    return ()


def _share(instruction: Split | Join, graph: StepGraph, devices: StageDevices) -> Action:
    """Return the action of this process that takes arrays apart or puts them together."""
    places = devices.members(instruction.place.stage)
    mine = [r for r, place in enumerate(places) if multihost.mine(devices.of(place))]
    meshes, write = [devices.mesh(place) for place in places], instruction.writes[0]
    sharding = NamedSharding(devices.mesh(instruction.place), graph.specs[write])

    def split(x: Array) -> list[Array | None]:
        shards = {shard.device: shard.data for shard in x.addressable_shards}
        return [of_member(x.shape, shards, mesh, graph.specs[instruction.reads[0]]) for mesh in meshes]

    def join(*parts: Array) -> tuple[Array]:
        members = [parts[r] for r in mine]
        if isinstance(instruction, Join) and instruction.sharded and not members[0].shape:
            members = [x.reshape(1) for x in members]
        local = [shard.data for x in members for shard in x.addressable_shards]
        return (jax.make_array_from_single_device_arrays(graph.avals[write].shape, sharding, local),)

    return split if isinstance(instruction, Split) else join


def _send(instruction: Send, devices: StageDevices, specs: Sequence[P]) -> Action:
    """Return the action for a message between devices of this process."""
    source, target = devices.of(instruction.source), devices.of(instruction.target)
    kind = None
    if source == target:  # between the device's memory and its host's
        kind = "pinned_host" if instruction.to_host else "device"
    if len(target) > 1:
        mesh = devices.mesh(instruction.target)
        shardings = tuple(NamedSharding(mesh, specs[k], memory_kind=kind) for k in instruction.writes)
        if len(multihost.mine(target)) == len(target):
            return lambda *arrays: jax.device_put(arrays, shardings)
        return lambda *arrays: [_moved(x, to) for x, to in zip(arrays, shardings, strict=True)]
    # A device as the target takes half of the time that a sharding takes.
    device = devices.at(instruction.target)
    to = device if kind is None else SingleDeviceSharding(device, memory_kind=kind)
    if len(instruction.reads) == 1:
        return lambda x: (jax.device_put(x, to),)
    return lambda *arrays: jax.device_put(arrays, to)


def _moved(x: Array, to: NamedSharding) -> Array:
    """Copy this process's parts of an array to the devices at their places in another mesh."""
    assert isinstance(x.sharding, NamedSharding)
    source, goal = x.sharding.mesh, to.mesh
    assert isinstance(source, Mesh) and isinstance(goal, Mesh)
    target = dict(zip(source.devices.flat, goal.devices.flat, strict=True))
    local = [
        jax.device_put(shard.data, SingleDeviceSharding(target[shard.device], memory_kind=to.memory_kind))
        for shard in x.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(x.shape, to, local)
