"""The training step of a plan, compiled: the bytes that XLA reserves for it, against its budget."""

from dataclasses import replace

from jaxpipe.errors import MemoryBudgetError
from jaxpipe.planning.candidate import PlannedStep
from jaxpipe.planning.step_graphs import with_compiled_bytes
from jaxpipe.runtime.executable_plan import CompiledStep
from jaxpipe.runtime.mpmd import device_bytes
from jaxpipe.runtime.mpmd.mpmd_runtime import MpmdRuntime
from jaxpipe.text.progress import phase, tell
from jaxpipe.text.units import asked_bytes, bytes_text


@phase("compile")
def with_step(planned: PlannedStep) -> PlannedStep:
    """Compile the stage programs of a plan, in all processes at once; nothing if they have been compiled.

    What counts is the fullest device of any process.
    """
    if planned.compiled is not None:
        return planned
    tell(f"Compiling the training step, {bytes_text(planned.plan.predicted_bytes)} predicted")
    runtime = MpmdRuntime(planned)
    step = runtime.build()
    peaks = device_bytes.device_peaks(step, runtime.devices)
    size = max(peak.total for peak in peaks.values())
    tell(f"XLA reserves {bytes_text(size)} on the fullest device")
    return replace(planned, plan=with_compiled_bytes(planned.plan, runtime, peaks), compiled=CompiledStep(step, size))


def check_budget(planned: PlannedStep) -> None:
    """Raise ``MemoryBudgetError`` if XLA reserves more than the budget for a compiled plan."""
    budget, reserved = planned.plan.budget, planned.needed_bytes
    if budget is not None and reserved > budget:
        request = planned.candidate.traced.request
        if request.plan is not None:
            raise MemoryBudgetError(
                f"{asked_bytes(request.memory, budget)}: XLA reserves {reserved} bytes ({bytes_text(reserved)}) for "
                f"plan= here, and {bytes_text(request.plan.compiled_bytes or request.plan.predicted_bytes)} where that "
                "was made. Leave out plan= for one that keeps the budget.",
                reserved,
            )
        raise MemoryBudgetError(
            f"{asked_bytes(request.memory, budget)}: XLA reserves {reserved} bytes "
            f"({bytes_text(reserved)}) for this plan, which was made without compiling it "
            f"({bytes_text(planned.plan.predicted_bytes)} predicted). Call pipeline.compile() before pipeline.init, or "
            "leave out PlanOptions(compile=False), for a plan that keeps it once it is compiled.",
            reserved,
        )
