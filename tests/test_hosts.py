"""Several real processes: the same bits as one, and one that dies ends all."""

import atexit
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxpipe
from jaxpipe.checkpoint import steps
from tests.support import hosts_run
from tests.support.compare import assert_same_bits
from tests.support.processes import ROOT, environment, launch, read_until, started


#: What SLURM tells a process of a job.
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}

#: Seconds until the others end when a process has died.
END = 60


def check_same(folder: Path, count: int, cases: tuple[str, ...], everything: bool = True) -> None:
    for case in cases:
        expected, sizes = hosts_run.results(case, everything), []
        for k in range(count):
            with np.load(folder / f"{k}.npz") as saved:
                arrays = {name: saved[name] for name in saved.files if name.startswith(f"{case} ")}
            rows = arrays.pop(f"{case} rows")
            if everything and "spmd" not in case:
                # Messages between processes are put together: an array may wait for another one.
                sizes.append({name: int(arrays.pop(name)) for name in list(arrays) if name.startswith(f"{case} bytes")})
            mine = {name: x[rows] if name == f"{case} prediction" else x for name, x in expected.items()}
            if sizes:
                mine = {name: x for name, x in mine.items() if name not in sizes[0]}
            assert_same_bits(arrays, mine)
        assert all(size == sizes[0] and min(size.values()) > 0 for size in sizes)


@pytest.mark.core
def test_two_processes_give_the_bits_of_one(tmp_path):
    """Once with the stages across the processes, once with the replicas."""
    launch(2, 2, "compare", tmp_path, 0, "stage", "data")
    check_same(tmp_path, 2, ("stage", "data"), everything=False)
    with np.load(tmp_path / "1.npz") as saved:
        assert saved["stage rows"].tolist() == list(range(16))
        assert saved["data rows"].tolist() == list(range(8, 16))


@pytest.mark.parametrize(
    "cases", [("model across",), pytest.param(("model within", "zero"), marks=pytest.mark.slow)], ids=" and ".join
)
def test_stages_sharded_over_devices_of_two_processes_give_the_bits_of_one(cases, tmp_path):
    """Once each stage's devices are in one process, once in both; and optimizer state split over both."""
    launch(2, 2, "compare", tmp_path, 0, *cases)
    check_same(tmp_path, 2, cases, everything=False)


@pytest.mark.slow
def test_a_v_over_two_processes_gives_the_bits_of_one(tmp_path):
    launch(2, 2, "compare", tmp_path, 0, "v")
    check_same(tmp_path, 2, ("v",), everything=False)


@pytest.mark.core
def test_messages_between_processes_keep_the_bits_of_every_type(tmp_path):
    """One way, both ways in one program, and from one device to all."""
    launch(2, 1, "messages", tmp_path)
    first, second = (dict(np.load(tmp_path / f"{k}.npz")) for k in range(2))
    for k, aval in enumerate(hosts_run.MESSAGES.values()):
        of_first, of_second = (hosts_run.bits(hosts_run.drawn(aval, k + sender)) for sender in (0, 1))
        assert_same_bits(second[f"there {k}"], of_first)
        assert_same_bits(second[f"exchange {k}"], of_first)
        assert_same_bits(first[f"exchange {k}"], of_second)
        assert_same_bits([first[f"spread {k}"], second[f"spread {k}"]], [of_second] * 2)
    assert not any(name.startswith("there") for name in first)


@pytest.mark.versions
def test_two_processes_send_the_bytes_that_the_plan_says(tmp_path):
    """By the kernel's count of what their sockets have delivered, in each step."""
    launch(2, tmp_path, run=str(ROOT / "tests" / "support" / "socket_bytes_run.py"))
    dense, besides = 4 * 2 * 512 * 512, 3000  # sums of the loss and the norms, and what Gloo adds to each message
    # In 2 bits, of the fan-ins of 52 of 512 neurons each a scale and 512 elements; a map of bits says which.
    coded = 2 * (52 * (4 + 128) + 64)
    for k in range(2):
        found = json.loads((tmp_path / f"{k}.json").read_text())
        assert dense <= found["dense"]["sent"] <= dense + besides
        assert found["blocks in 2 bits"]["said"] == coded
        for name in ("blocks", "blocks in 2 bits"):
            assert found[name]["said"] <= found[name]["sent"] <= found[name]["said"] + besides


@pytest.mark.slow
def test_three_processes_give_the_bits_of_one(tmp_path):
    """A stage each; then two devices each, so that the second one has stages of both replicas."""
    for case, devices in (("three", 1), ("six", 2)):
        launch(3, devices, "compare", tmp_path, 1, case)
        check_same(tmp_path, 3, (case,))


@pytest.mark.slow
def test_two_processes_with_all_that_pipelines_do(tmp_path):
    cases = ("stage", "data", "both", "budget", "sparse", "skip", "pipedream", "unrolled", "spmd data")
    launch(2, 2, "compare", tmp_path, 1, *cases)
    check_same(tmp_path, 2, cases)


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", ["host", "peers"])
def test_stashes_leave_to_the_host_and_to_devices_of_another_process(elsewhere, tmp_path):
    launch(2, 2, "swaps", tmp_path, elsewhere)
    expected = hosts_run.swapped(elsewhere)
    for k in range(2):
        with np.load(tmp_path / f"{k}.npz") as saved:
            assert_same_bits(dict(saved), expected)


@pytest.mark.slow
def test_four_processes_give_the_bits_of_one(tmp_path):
    launch(4, 1, "compare", tmp_path, 1, "stage", "data", "both")
    check_same(tmp_path, 4, ("stage", "data", "both"))
    with np.load(tmp_path / "2.npz") as saved:
        assert saved["data rows"].tolist() == list(range(8, 16))
        assert saved["both rows"].tolist() == list(range(8))


@pytest.mark.slow
def test_processes_agree_on_plans_and_on_errors(tmp_path):
    launch(2, 2, "agreement", tmp_path)
    first, second = (json.loads((tmp_path / f"{k}.json").read_text()) for k in range(2))
    assert (first["measured"], second["measured"]) == (1, 0)
    assert first["seconds"] == second["seconds"] > 0
    assert (first["first"], second["first"]) == (7, 7)
    assert first["offered"] == second["offered"]
    smallest, reserved = first["offered"]
    assert 1000 < reserved <= smallest
    assert (first["all"], second["all"]) == (0, 1)
    for answers in (first, second):
        assert answers["first fails"].startswith("CheckpointError: a file is missing")
        assert answers["last fails"] == "CheckpointError: a file is missing Process 1 of 2 has raised this."
        assert answers["other program"].startswith(
            "PartitionError: jaxpipe.partition: the 2 processes of this run differ in\n  the program of model and loss="
        )
        assert re.match(r"PartitionError: The mesh has no device of process [01], of 2", answers["half a mesh"])
        assert answers["rows"].startswith(
            "BatchError: batch['x'] is float32[32, 8], the plan was made for float32[16, 8]"
        )
        assert answers["no checkpoint"].startswith("CheckpointError: directory=")
        assert answers["find"].startswith("PartitionError: find_nonfinite needs all stages in one process")


class Reference:
    """The run of one process that nobody interrupts."""

    def __init__(self, case: str):
        self.pipeline = hosts_run.make_pipeline(case)
        self.state, self.data = self.pipeline.init(jax.random.key(0)), np.random.default_rng(0)

    def advance(self, step: int) -> None:
        while int(self.state.step) < step:
            self.state, _ = self.pipeline.step(self.state, hosts_run.draw(self.data))


@pytest.mark.parametrize(
    ("case", "dies"),
    [("stage", 1), pytest.param("stage", 0, marks=pytest.mark.slow), pytest.param("spmd", 1, marks=pytest.mark.slow)],
)
def test_a_process_that_dies_ends_the_other_and_the_run_goes_on(tmp_path, case, dies):
    with started(2, 2, "train", tmp_path, case, 2, 10**9) as processes:
        read_until(processes[dies], "step 5")
        processes[dies].kill()
        died = time.monotonic()
        text, _ = processes[1 - dies].communicate(timeout=END)
    code = processes[1 - dies].returncode
    assert time.monotonic() - died < END
    # Whatever sees it first: the message that does not come, or JAX, which misses signs of life.
    assert (code == 1 and "another process has died" in text) or (
        code == -signal.SIGABRT and "another task died" in text
    )
    saved_steps = steps(tmp_path)
    assert saved_steps and saved_steps[-1] >= 2
    reference = Reference(case)
    reference.advance(saved_steps[-1])
    loaded = jaxpipe.checkpoint.load(tmp_path)
    assert_same_bits(jax.tree.leaves(loaded.variables), jax.tree.leaves(reference.pipeline.parameters(reference.state)))
    state = reference.pipeline.restore(tmp_path)  # in one process, what two have saved
    assert_same_bits(state, reference.state)
    if dies == 0:
        until = saved_steps[-1] + 4
        assert f"[1] begins {saved_steps[-1]} " in launch(2, 2, "train", tmp_path, case, 2, until)
        reference.advance(until)
        assert_same_bits(reference.pipeline.restore(tmp_path), reference.state)


@pytest.mark.slow
def test_an_error_in_one_process_ends_the_others(tmp_path):
    code = (
        "import jax, jaxpipe, time; jaxpipe.initialize_distributed(heartbeat_timeout_seconds=10);"
        "print(jax.process_count()); assert jax.process_index() != 1, 'a mistake'; time.sleep(100)"
    )
    command = [sys.executable, str(ROOT / "scripts" / "launch_local"), "2", "--", sys.executable, "-c", code]
    began = time.monotonic()
    done = subprocess.run(command, env=environment(), text=True, capture_output=True)
    assert done.returncode == 1 and time.monotonic() - began < END
    assert "AssertionError: a mistake" in done.stdout and "Process 1 of 2 ends" in done.stdout


def test_batches_of_unequal_sizes_are_refused_and_nobody_waits_forever():
    began = time.monotonic()
    with started(2, 2, "unequal") as processes:
        texts = [process.communicate(timeout=END)[0] for process in processes]
    assert time.monotonic() - began < END
    assert all(process.returncode for process in processes)
    at = "at a first batch of shapes [8, 8], [8]"
    assert f"for messages of stages 1 and 2 with process 1, and process 1 is {at}." in texts[0]
    assert f"PartitionError: Process 1 of 2 is {at}, and process 0 is at its end, with PartitionError:" in texts[1]
    assert not any("loss" in text.splitlines()[-1] for text in texts)


@pytest.mark.slow
def test_sigterm_to_one_process_saves_and_ends_all(tmp_path):
    with started(2, 2, "train", tmp_path, "data", 10**6, 10**9) as processes:
        read_until(processes[0], "step 3")
        processes[1].send_signal(signal.SIGTERM)
        texts = [process.communicate(timeout=END)[0] for process in processes]
    assert [process.returncode for process in processes] == [143, 143], texts[0][-2000:]
    (saved,) = steps(tmp_path)
    assert [re.findall(r"step (\d+)", text)[-1] for text in texts] == [str(saved)] * 2
    reference = Reference("data")
    reference.advance(saved)
    assert_same_bits(reference.pipeline.restore(tmp_path), reference.state)


def launch_plain(count: int, code: str, **options) -> subprocess.CompletedProcess:
    command = [str(ROOT / "scripts" / "launch_local"), str(count), "--", sys.executable, "-c", code]
    return subprocess.run([sys.executable, *command], text=True, capture_output=True, timeout=60, **options)


def test_the_launcher_numbers_processes_and_their_output():
    done = launch_plain(3, "import os; print('I am', os.environ['JAX_PROCESS_ID'], os.environ['JAX_NUM_PROCESSES'])")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"[{k}] I am {k} 3" for k in range(3)]


@pytest.mark.parametrize(("end", "code"), [("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_the_launcher_ends_all_and_passes_the_exit_code_on(end, code):
    began = time.monotonic()
    program = f"import os, time; {end} if os.environ['JAX_PROCESS_ID'] == '1' else time.sleep(100)"
    done = launch_plain(2, program)
    assert done.returncode == code and time.monotonic() - began < 30
    assert f"process 1 ended with exit code {code}" in done.stderr


def test_the_launcher_wants_a_number_and_a_program():
    for arguments in (["2"], ["0", "--", "true"]):
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "launch_local"), *arguments], capture_output=True, text=True
        )
        assert done.returncode == 2 and "give a number of processes" in done.stderr


def test_a_lone_process_needs_no_initialization(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: pytest.fail("it is alone"))
    for name in ("JAX_COORDINATOR_ADDRESS", "SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri"):
        monkeypatch.delenv(name, raising=False)
    assert jaxpipe.initialize_distributed() == 1


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}, ("a:1", 4, 2)),
        (SLURM, (None, None, None)),  # JAX finds them itself
    ],
)
def test_initialization_reads_the_environment(monkeypatch, variables, expected):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(jax.config, "update", lambda *args: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(atexit, "register", lambda *args: None)
    jaxpipe.initialize_distributed(heartbeat_timeout_seconds=20)
    ((given, options),) = calls
    assert given == expected and options["heartbeat_timeout_seconds"] == 20


@pytest.mark.slow
def test_the_example_runs_in_two_processes_and_goes_on_in_one(tmp_path):
    example = [
        sys.executable,
        str(ROOT / "examples" / "train_hosts.py"),
        "--checkpoints",
        str(tmp_path),
        "--replicas",
        "2",
    ]
    start = [
        sys.executable,
        str(ROOT / "scripts" / "launch_local"),
        "2",
        "--",
        *example,
        "--stages",
        "2",
        "--steps",
        "100",
    ]
    subprocess.run(start, env=environment(), check=True, timeout=300)
    assert steps(tmp_path) == [50, 100]
    subprocess.run([*example, "--stages", "1", "--steps", "150"], env=environment(), check=True, timeout=300)
    assert steps(tmp_path) == [100, 150]
