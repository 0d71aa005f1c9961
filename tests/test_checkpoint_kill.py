"""Kill -9 at random moments of a training run: what was saved is there, and the run goes on with the same bits."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

import jaxpipe
from jaxpipe.checkpoint import steps
from tests.support.checkpoint_run import draw, generator, make_pipeline
from tests.support.compare import assert_same_bits


class Reference:
    """The run that nobody interrupts."""

    def __init__(self):
        self.pipeline = make_pipeline()
        self.state, self.data = self.pipeline.init(jax.random.key(0)), generator(None)

    def advance(self, step: int) -> None:
        while int(self.state.step) < step:
            self.state, _ = self.pipeline.step(self.state, draw(self.data))


class Runs:
    """The process that forks runs, and what they have told."""

    def __init__(self, directory: Path):
        root = Path(__file__).parents[1]
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(root),
            # The same program is compiled once.
            "JAX_COMPILATION_CACHE_DIR": str(directory.parent / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self._process = subprocess.Popen(
            [sys.executable, str(root / "tests" / "support" / "checkpoint_run.py"), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def start(self, **arguments) -> int:
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        return self.read("pid")[1]

    def read(self, until: str) -> tuple[dict[str, int], int]:
        """Lines up to one that begins with a word: the last number told of each, and its own."""
        told: dict[str, int] = {}
        for line in self._process.stdout:
            word, number = line.split()
            told[word] = int(number)
            if word == until:
                return told, int(number)
            assert word != "ended", f"the run has ended before it was {until}, with {number}"
        raise AssertionError(f"no {until}; the process has ended")

    def close(self) -> None:
        self._process.stdin.close()
        code = self._process.wait(60)
        self._process.stdout.close()
        assert code == 0


@pytest.fixture
def runs(tmp_path):
    started = Runs(tmp_path / "run")
    yield started
    started.close()


def kill_again_and_again(runs: Runs, directory: Path, count: int) -> None:
    chance, reference = random.Random(1), Reference()
    complete, unfinished = 0, 0
    for _ in range(count):
        pid = runs.start(every=2, until=10**9)
        _, step = runs.read("ready")
        assert complete < step <= complete + 5  # resumed from what was complete, or from a save that nobody told of
        time.sleep(chance.uniform(0, 0.4))
        os.kill(pid, signal.SIGKILL)
        told, code = runs.read("ended")
        assert code == -signal.SIGKILL
        unfinished += any(not p.name.isdecimal() for p in directory.glob("[!.]*"))
        complete = max(told.get("complete", 0), complete)
        saved_steps = steps(directory)
        assert max(saved_steps, default=0) >= complete
        for saved in saved_steps:  # nothing half-written, nothing half-deleted
            assert jaxpipe.checkpoint.load(directory, step=saved).step == saved
        if saved_steps:
            with jaxpipe.Checkpointer(reference.pipeline, directory) as checkpointer:
                restored = checkpointer.restore()
            assert restored is not None
            reference.advance(saved_steps[-1])
            assert_same_bits(restored[0], reference.state)
            assert restored[1] == reference.data.bit_generator.state
            complete = saved_steps[-1]
    assert complete > 0
    assert unfinished > count // 10  # deaths in the midst of a save, which are what this is about

    last = complete + 7
    runs.start(every=2, until=last)
    assert runs.read("ended")[1] == 0
    assert len(steps(directory)) == 3  # deaths between a save and the removal of the oldest have left more
    reference.advance(last - last % 2)
    assert_same_bits(reference.pipeline.restore(directory), reference.state)


@pytest.mark.slow
def test_ten_kills_lose_nothing(runs, tmp_path):
    kill_again_and_again(runs, tmp_path / "run", 10)


@pytest.mark.slow
def test_two_hundred_kills_lose_nothing(runs, tmp_path):
    kill_again_and_again(runs, tmp_path / "run", 200)


def test_sigterm_saves_and_exits(runs, tmp_path):
    pid = runs.start(every=10**6, until=10**9)
    runs.read("ready")
    time.sleep(0.2)
    os.kill(pid, signal.SIGTERM)
    told, code = runs.read("ended")
    assert code == 143
    assert told["stopped"] > 1 and steps(tmp_path / "run") == [told["stopped"]]
    reference = Reference()
    reference.advance(told["stopped"])
    assert_same_bits(reference.pipeline.restore(tmp_path / "run"), reference.state)
