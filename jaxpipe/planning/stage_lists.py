"""Lists of calls of plans with the same cuts, and the bytes that devices need along them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from jaxpipe.array_types import Device
from jaxpipe.graph.sharding_annotations import outside_mesh
from jaxpipe.plan import Plan
from jaxpipe.runtime.executable_plan import ExecutablePlan
from jaxpipe.runtime.mpmd.device_bytes import Peak, predicted_bytes
from jaxpipe.runtime.mpmd.mpmd_runtime import MpmdRuntime
from jaxpipe.runtime.program import Program
from jaxpipe.target import building_for
from jaxpipe.text.progress import phase


_Planned = TypeVar("_Planned", bound=ExecutablePlan)


class StageLists:
    """The lists of plans with the same cuts. The list of a program, and the work of a stage, is traced once."""

    def __init__(self, traces: dict[Any, Any]) -> None:
        """Nothing is listed yet; ``traces`` are those of other schedules for the same cuts, too."""
        self._calls: dict[int, tuple[Program, Any]] = {}
        self._traces = traces

    def with_list(self, planned: _Planned) -> _Planned:
        """Return a plan with its list."""
        program, planned = planned.program, replace(planned, traces=self._traces)
        if id(program) not in self._calls:  # with the program, so that its number stays its own
            self._calls[id(program)] = program, MpmdRuntime(planned).calls
        return replace(planned, calls=self._calls[id(program)][1])

    @outside_mesh()
    @phase("bytes")
    def with_bytes(self, planned: _Planned) -> _Planned:
        """Return a plan with its list, and the bytes that each device needs for it."""
        with building_for(planned.mesh.devices.flat[0].platform):
            return self._with_bytes(planned)

    def _with_bytes(self, planned: _Planned) -> _Planned:
        planned = self.with_list(planned)
        runtime = MpmdRuntime(planned)
        peaks = runtime.predicted
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
        return replace(planned, plan=plan)

    def needs(self, planned: ExecutablePlan, program: Program) -> list[int]:
        """Return the predicted bytes of each device along the stage axis, for a plan with another program."""
        runtime = MpmdRuntime(self.with_list(replace(planned, program=program, calls=None)))
        peaks = predicted_bytes(runtime.calls, runtime.devices)
        return [max(peaks[x].total for x in row) for row in runtime.devices.rows[: program.num_devices]]


def with_compiled_bytes(plan: Plan, runtime: MpmdRuntime, peaks: Mapping[Device, Peak]) -> Plan:
    """Return a plan that tells the bytes of each device as they are compiled."""
    each = tuple(peak.total for peak in runtime.in_mesh_order(peaks).values())
    by_stage = tuple(peaks[row[0]].components for row in runtime.devices.rows)
    fullest = tuple(peaks[row[0]].label for row in runtime.devices.rows)
    return replace(plan, compiled_each_device=each, compiled_stage_memory=by_stage, fullest_in=fullest)
