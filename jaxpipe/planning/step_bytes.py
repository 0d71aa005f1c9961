"""The bytes that devices need for a plan's training step: predicted along its graph, and as XLA reserves them."""

from dataclasses import replace
from typing import TypeAlias, TypeVar

from jaxpipe.array_types import Device
from jaxpipe.collect_later import collecting_later
from jaxpipe.graph.sharding_annotations import outside_mesh
from jaxpipe.runtime.executable_plan import ExecutablePlan
from jaxpipe.runtime.mpmd.device_bytes import Peak, device_peaks
from jaxpipe.runtime.mpmd.mpmd_runtime import MpmdRuntime
from jaxpipe.runtime.stages import Program
from jaxpipe.targets.building import building_for
from jaxpipe.text.progress import phase, tell
from jaxpipe.text.units import bytes_text


_Planned = TypeVar("_Planned", bound=ExecutablePlan)

#: Runtimes that have written the graph of a program's step, with what each device needs along it.
Graphs: TypeAlias = dict[Program, tuple[MpmdRuntime, dict[Device, Peak]]]


@outside_mesh()
@collecting_later()
@phase("bytes")
def _peaks(planned: ExecutablePlan, graphs: Graphs) -> tuple[MpmdRuntime, dict[Device, Peak]]:
    """Return the runtime of a plan's program with its graph, and what each device needs along that."""
    if planned.program not in graphs:
        with building_for(planned.mesh.devices.flat[0]):
            runtime = MpmdRuntime(replace(planned, graph=None))
            graphs[planned.program] = runtime, runtime.predicted
    return graphs[planned.program]


def with_bytes(planned: _Planned, graphs: Graphs) -> _Planned:
    """Return a plan with its graph, and the bytes that each device needs for it."""
    runtime, peaks = _peaks(planned, graphs)
    each = [sum(peak.components.values()) for peak in peaks.values()]
    firsts = [peaks[row[0]] for row in runtime.devices.rows]
    plan = replace(
        planned.plan,
        memory=list(peaks.values())[each.index(max(each))].components,
        each_device=tuple(each),
        stage_memory=tuple(peak.components for peak in firsts),
        fullest_in=tuple(peak.label for peak in firsts),
    )
    if plan.host is not None:
        plan = replace(plan, host=replace(plan.host, bytes=max(peak.host for peak in peaks.values())))
    return replace(planned, plan=plan, graph=runtime.graph)


def needs(planned: ExecutablePlan, graphs: Graphs) -> list[int]:
    """Return the predicted bytes of each device along the stage axis."""
    runtime, peaks = _peaks(planned, graphs)
    rows = (runtime.devices.rows[stages[0]] for stages in planned.program.schedule.stage_of)
    return [max(peaks[x].total for x in row) for row in rows]


@phase("compile")
def with_step(planned: _Planned) -> _Planned:
    """Compile the stage programs of a plan, in all processes at once; nothing if they have been compiled.

    What counts is the fullest device of any process.
    """
    if planned.compiled is not None:
        return planned
    tell(f"Compiling the training step, {bytes_text(planned.plan.predicted_bytes)} predicted")
    runtime = MpmdRuntime(planned)
    step = runtime.build()
    peaks = device_peaks(step, runtime.devices)
    size = max(peak.total for peak in peaks.values())
    tell(f"XLA reserves {bytes_text(size)} on the fullest device")
    firsts = [peaks[row[0]] for row in runtime.devices.rows]
    plan = replace(
        planned.plan,
        compiled_each_device=tuple(peak.total for peak in runtime.in_mesh_order(peaks).values()),
        compiled_stage_memory=tuple(peak.components for peak in firsts),
        fullest_in=tuple(peak.label for peak in firsts),
    )
    return replace(planned, plan=plan, compiled=step)
