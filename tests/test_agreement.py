"""Processes that do not do the same: all raise, soon, an error that names what differs; and none waits forever."""

import json
import random
import signal
import time

import pytest

from tests.support import unlike_run
from tests.support.processes import launch, read_until, started


RUN = unlike_run.__file__

#: Seconds in which all processes must raise, or end.
SOON = 60

#: What a process has printed last when it is killed; at first nothing, as it imports.
MARKS = ("", "begins", "joined", "planned", "initialized", *(f"step {k}" for k in range(0, unlike_run.STEPS - 1, 3)))

LOSS = "the program of model and loss=, in "
OPTIMIZER = "the program of optimizer=, in "

#: What the error of each way to differ says.
SAYS = {
    "learning rate": OPTIMIZER + "scale: not the same in process 1 as in process 0",
    "learning rate in the state": OPTIMIZER + "the first state:",
    "schedule of the learning rate": OPTIMIZER + "scale_by_schedule:",
    "momentum": OPTIMIZER + "trace:",
    "clip norm": OPTIMIZER + "clip_by_global_norm:",
    "optimizer": "the program of optimizer=",
    "constant of the loss": LOSS + "operators outside of all modules:",
    "another loss": LOSS + "operators outside of all modules:",
    "array of the loss": LOSS + "operators outside of all modules:",
    "rule of the loss": "Pipeline.step: the 2 processes of this run differ in\n  programs, in stage",
    "constant of the model": LOSS + "Net/Dropout_0:",
    "width of the model": "the model's variables, in Dense_0/bias, Dense_0/kernel, Dense_1/kernel:",
    "seed": "key: key<fry>[](0000000000000000) in process 0, key<fry>[](0000000001000000) in process 1",
    "values": "values of variables, in Dense_0/kernel, Dense_1/kernel:",
    "kind of profile": "profile=: analytic in process 0, measured in process 1",
    "profile": "profile=: not the same",
    "micro-batches": "num_microbatches=: 4 in process 0, 2 in process 1",
    "schedule": "schedule=: one_f_one_b in process 0, gpipe in process 1",
    "memory": "memory=: None in process 0, 1073741824 in process 1",
    "order of the mesh": "mesh=, order of devices",
    "number of devices": "mesh=, axes: [['stage', 4]] in process 0, [['stage', 3]] in process 1",
    "axes of the mesh": "[['data', 2], ['stage', 2]] in process 0, [['stage', 2], ['data', 2]] in process 1",
    "rows of the batch": "batch['x']: float32[16, 8] in process 0, float32[32, 8] in process 1",
    "type of the batch": "batch['x']: float32[16, 8] in process 0, float16[16, 8] in process 1",
    "leaf of the batch": "batch['z']: nothing in process 0, float32[16] in process 1",
    "version": "version of optax: ",
    "precision": "jax_default_matmul_precision: None in process 0, float32 in process 1",
    "options": "PlanOptions(on_nonfinite=): None in process 0, 'skip' in process 1",
    "storage": "storage=: not the same",
    "network": "network=: not the same",
    "runtime": "runtime=: mpmd in process 0, spmd in process 1",
    "exchange": "gradient_exchange=: ",
    "missing prediction": "predict=: given in process 0, left out in process 1",
    "evaluation": "Pipeline.evaluate: the 2 processes of this run differ in\n  programs, in stage 2: forward",
    "argument that is refused": "schedule='no such schedule'; it must be 'auto'",
    "loss that fails": "ValueError: a mistake of the loss",
    "call": "is at Pipeline.parameters",
}


def test_processes_that_differ_all_raise_an_error_that_names_the_difference(tmp_path):
    launch(2, "differ", tmp_path, run=RUN)
    errors = [json.loads((tmp_path / f"{k}.json").read_text()) for k in range(2)]
    assert errors[0].keys() == errors[1].keys() == SAYS.keys()
    for texts in errors:
        wrong = {name: text for name, (text, seconds) in texts.items() if SAYS[name] not in text or seconds > SOON}
        assert wrong == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "first", "second"),
    [
        ("end", "with process 1, and process 1 is at the end of its program.", ""),
        ("parameters", "with process 1, and process 1 is at Pipeline.parameters.", "is at Pipeline.parameters, and"),
        ("evaluate", "with process 1, and process 1 is at Pipeline.evaluate.", "is at Pipeline.evaluate, and"),
        ("sleep", "waits in Pipeline.step for messages of stages 1 and 2 with process 1 for 15 s.", ""),
    ],
)
def test_a_process_that_leaves_the_others_is_named(where, first, second):
    began = time.monotonic()
    with started(2, "leave", where, run=RUN) as processes:
        texts = [process.communicate(timeout=2 * SOON)[0] for process in processes]
    assert time.monotonic() - began < 2 * SOON
    assert processes[0].returncode == 1 and processes[1].returncode
    assert "PartitionError: Process 0 of 2 waits in Pipeline.step for messages of stages" in texts[0]
    assert first in texts[0] and second in texts[1]


def test_a_process_does_not_wait_forever_for_others_to_join():
    began = time.monotonic()
    with started(2, "join", 5, run=RUN) as processes:
        processes[1].kill()
        text, _ = processes[0].communicate(timeout=SOON)
    assert processes[0].returncode == 1 and time.monotonic() - began < SOON
    assert "PartitionError: Process 0 of 2 has waited 5 s, and not all others have joined at localhost:" in text


@pytest.mark.slow
@pytest.mark.parametrize("number", range(30))
def test_a_process_killed_at_any_moment_ends_the_other(number):
    """From the first import to the last step, with the default limits."""
    draw = random.Random(number)
    with started(2, "train", run=RUN) as processes:
        victim, other = draw.sample(processes, 2)
        mark = draw.choice(MARKS)
        if mark:
            read_until(victim, mark)
        time.sleep(draw.uniform(0.0, 0.02 if mark.startswith("step") else 2.0))
        if victim.poll() is not None or other.poll() is not None:
            pytest.skip("the run has ended")
        victim.send_signal(signal.SIGKILL)
        read_until(other, "begins")  # else it would take as long as imports do on a busy machine
        killed = time.monotonic()
        text, _ = other.communicate(timeout=2 * SOON)
    assert time.monotonic() - killed < SOON
    # It may have taken its last step before it could notice.
    assert other.returncode or f"step {unlike_run.STEPS - 1}" in text
