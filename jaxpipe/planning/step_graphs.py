"""Graphs of the training steps of plans with the same cuts, and the bytes that devices need along them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from jaxpipe.array_types import Device
from jaxpipe.graph.sharding_annotations import outside_mesh
from jaxpipe.plan import Plan
from jaxpipe.runtime.executable_plan import ExecutablePlan
from jaxpipe.runtime.mpmd.device_bytes import Peak
from jaxpipe.runtime.mpmd.mpmd_runtime import MpmdRuntime
from jaxpipe.runtime.program import Program
from jaxpipe.targets.building import building_for
from jaxpipe.text.progress import phase


_Planned = TypeVar("_Planned", bound=ExecutablePlan)


class StepGraphs:
    """The graphs of plans with the same cuts: each is written once, and the work of a stage traced once."""

    def __init__(self, traces: dict[Any, Any]) -> None:
        """No graph is written yet; ``traces`` are those of other schedules for the same cuts, too."""
        self._written: dict[int, tuple[Program, MpmdRuntime, dict[Device, Peak]]] = {}
        self._traces = traces

    @outside_mesh()
    @phase("bytes")
    def _peaks(self, planned: ExecutablePlan) -> tuple[MpmdRuntime, dict[Device, Peak]]:
        """Return the runtime of a plan's program with its graph, and what each device needs along that."""
        program = planned.program
        if id(program) not in self._written:  # with the program, so that its number stays its own
            with building_for(planned.mesh.devices.flat[0]):
                runtime = MpmdRuntime(replace(planned, traces=self._traces, graph=None))
                self._written[id(program)] = program, runtime, runtime.predicted
        return self._written[id(program)][1:]

    def with_bytes(self, planned: _Planned) -> _Planned:
        """Return a plan with its graph, and the bytes that each device needs for it."""
        runtime, peaks = self._peaks(planned)
        each = [sum(peak.components.values()) for peak in peaks.values()]
        stages = tuple(peaks[row[0]].components for row in runtime.devices.rows)
        fullest = list(peaks.values())[each.index(max(each))]
        plan = replace(
            planned.plan,
            memory=fullest.components,
            each_device=tuple(each),
            stage_memory=stages,
            fullest_in=tuple(peaks[row[0]].label for row in runtime.devices.rows),
        )
        if plan.host is not None:
            plan = replace(plan, host=replace(plan.host, bytes=max(peak.host for peak in peaks.values())))
        return replace(planned, plan=plan, traces=self._traces, graph=runtime.graph)

    def needs(self, planned: ExecutablePlan, program: Program) -> list[int]:
        """Return the predicted bytes of each device along the stage axis, for a plan with another program."""
        runtime, peaks = self._peaks(replace(planned, program=program))
        rows = (runtime.devices.rows[stages[0]] for stages in program.schedule.stage_of)
        return [max(peaks[x].total for x in row) for row in rows]


def with_compiled_bytes(plan: Plan, runtime: MpmdRuntime, peaks: Mapping[Device, Peak]) -> Plan:
    """Return a plan that tells the bytes of each device as they are compiled."""
    each = tuple(peak.total for peak in runtime.in_mesh_order(peaks).values())
    by_stage = tuple(peaks[row[0]].components for row in runtime.devices.rows)
    fullest = tuple(peaks[row[0]].label for row in runtime.devices.rows)
    return replace(plan, compiled_each_device=each, compiled_stage_memory=by_stage, fullest_in=fullest)
