"""The seconds of a step whose devices walk through the schedule in step."""

from collections.abc import Callable, Sequence

from jaxpipe.runtime.program import Program
from jaxpipe.runtime.spmd.lockstep_program import PAGE, LockstepProgram
from jaxpipe.schedules.simulate import Timeline, simulate


def lockstep_timeline(
    program: Program, work: Sequence[Sequence[float]], send: Callable[[int], float], bytes_per_second: float
) -> Timeline:
    """Return the timeline of a step, with the cost of every tick besides its work.

    Args:
      program: the stages and their schedule.
      work: by stage, seconds forward, backward for inputs and for weights.
      send: seconds of a message of some bytes over the slowest link between neighbors.
      bytes_per_second: of a device's memory.
    """
    own = LockstepProgram.of(program)
    each = sum(send(4 * n) for n in own.message_words) + _moved_bytes(own) / bytes_per_second
    forward, first, second = work
    return simulate(
        program.schedule,
        forward=forward,
        backward_input=first,
        backward_weight=second,
        communication=each,
        lockstep=True,
    )


def _moved_bytes(program: LockstepProgram) -> int:
    """Bytes that every device reads and writes in a tick, whether it has work or not.

    A stash and what waits with it go into the arena where something was, and are copied out of it. Each part of a split
    backward pass adds to all sums of gradients; work is charged for one of them.
    """
    splits = program.schedule.splits_backward
    pages = (7 if splits else 5) * max(program.stash_pages) + 5 * max(program.saved_pages)
    return 4 * PAGE * pages + (3 * program.sums.bytes if splits else 0)
