"""Messages between processes: how few programs they become, in which order, and when they start."""

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime import waiting_thread
from jaxpipe.runtime.mpmd.combine_sends import join_messages
from jaxpipe.runtime.mpmd.send_between_processes import pair_slots
from jaxpipe.runtime.mpmd.stage_devices import StageDevices
from jaxpipe.runtime.mpmd.step_graph import Call, Place, Send


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int


def devices(*processes: int) -> StageDevices:
    """Stages of one replica, each on a device of its own of some process."""
    return StageDevices(tuple((Device(k, process),) for k, process in enumerate(processes)), 1)


def call(stage: int, reads: tuple[int, ...], writes: tuple[int, ...]) -> Call:
    return Call(0, Place(stage, 0), reads, writes)


def send(source: int, target: int, read: int, write: int) -> Send:
    return Send(Place(source, 0), Place(target, 0), (read,), (write,))


def both_ways(forth: Send, back: Send) -> Send:
    reads, writes = forth.reads + back.reads, forth.writes + back.writes
    return replace(forth, reads=reads, writes=writes, returning=len(back.reads))


TWO = devices(0, 1)


def test_messages_that_cross_become_one_program():
    forth, back = send(0, 1, 0, 10), send(1, 0, 1, 11)
    work = [call(0, (), (0,)), call(1, (), (1,))]
    assert join_messages([*work, forth, back], TWO) == [*work, both_ways(forth, back)]
    assert join_messages([work[0], forth, work[1], back], TWO) == [*work, both_ways(forth, back)]


def test_messages_within_a_process_stay_as_they_are():
    table = [send(0, 1, 0, 10), send(1, 0, 1, 11), send(0, 1, 2, 12)]
    assert join_messages(table, devices(0, 0, 1)) == table


@pytest.mark.parametrize(
    "between",
    [
        [call(1, (10,), (1,))],  # the answer is computed from the message
        [send(1, 2, 10, 20)],  # it is passed on
    ],
)
def test_a_message_does_not_wait_for_one_behind_its_reader(between):
    table = [send(0, 1, 0, 10), *between, send(1, 0, 1, 11)]
    assert join_messages(table, devices(0, 1, 2)) == table


def test_a_message_is_not_joined_with_one_that_it_carries():
    table = [send(0, 1, 0, 10), send(1, 0, 10, 11)]
    assert join_messages(table, TWO) == table


def test_messages_of_one_direction_are_one_unless_work_is_between_them():
    first, second, late = send(0, 1, 0, 10), send(0, 1, 1, 11), send(0, 1, 2, 12)
    both = replace(first, reads=(0, 1), writes=(10, 11))
    elsewhere = call(2, (), (30,))
    assert join_messages([first, elsewhere, second], devices(0, 1, 2)) == [elsewhere, both]
    work = call(0, (), (2,))
    assert join_messages([first, second, work, late], TWO) == [both, work, late]
    back = send(1, 0, 3, 13)
    joined = join_messages([first, back, second], TWO)
    assert joined == [both_ways(both, back)]


def test_other_messages_keep_their_order():
    table = [send(0, 1, 0, 10), send(1, 2, 1, 11), send(2, 1, 2, 12), send(1, 0, 3, 13)]
    joined = join_messages(table, devices(0, 1, 2))
    assert joined == [both_ways(table[1], table[2]), both_ways(table[0], table[3])]


def test_arrays_of_one_shape_that_cross_share_a_place_in_the_program():
    small, large = (jax.ShapeDtypeStruct((n, 2), np.float32) for n in (3, 4))
    half = jax.ShapeDtypeStruct((4, 2), np.float16)
    avals = [small, large, large, half, small, large, large, half]
    message = both_ways(
        Send(Place(0, 0), Place(1, 0), (0, 1), (4, 5)),
        Send(Place(1, 0), Place(0, 0), (2, 3), (6, 7)),
    )
    assert pair_slots(message, avals, [P()] * len(avals)) == [
        {0: (0, 4)},
        {0: (1, 5), 1: (2, 6)},
        {1: (3, 7)},
    ]


def test_after_an_error_no_action_waits_for_other_processes(monkeypatch):
    monkeypatch.setattr(waiting_thread, "_failures", [])

    def fails(_):
        raise ValueError("a message that is never sent")

    def waits(_):
        raise AssertionError("this action would wait for a process that waits for the failed one")

    awaited = waiting_thread.Awaited("Pipeline.step", "messages of stages 0 and 1", frozenset({1}))
    (failed,), (later,) = waiting_thread.started(fails, awaited)(1.0), waiting_thread.started(waits, awaited)(1.0)
    for action in (later, failed):
        with pytest.raises(ValueError, match="never sent"):
            waiting_thread.ended(action)
