"""Exceptions and signals at random moments of a pipeline's calls: no state is lost untold, and no bit is wrong."""

import copy
import functools
import os
import re
import signal
import sys
import threading
import time
import traceback

import jax
import numpy as np
import optax
import pytest

import jaxpipe
from tests.support.compare import assert_same_bits
from tests.support.interrupted_chain import BATCHES, chain_of_squares


class Stopped(BaseException):
    """Raised at a random moment; nobody else raises or catches it."""


def make_pipeline(runtime):
    return chain_of_squares(optimizer=optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), runtime=runtime)


#: The pipeline whose calls are interrupted, and one whose calls are not.
interrupted_pipeline, quiet_pipeline = (functools.cache(lambda runtime, _=k: make_pipeline(runtime)) for k in range(2))

READING = {
    "evaluate": lambda pipeline, state, _: pipeline.evaluate(state, BATCHES[0]),
    "predict": lambda pipeline, state, _: pipeline.predict(state, BATCHES[0]),
    "value_and_grad": lambda pipeline, state, _: pipeline.value_and_grad(state, BATCHES[0]),
    "save": lambda pipeline, state, folder: pipeline.save(state, folder),
}


def results_of(pipeline, state):
    """What a pipeline says of a state, without files."""
    return [READING[name](pipeline, state, None) for name in ("evaluate", "predict", "value_and_grad")]


class Run:
    """A training run whose calls are interrupted, and which goes on with what is left each time."""

    def __init__(self, runtime, folder):
        self.runtime, self.pipeline, self.folder = runtime, interrupted_pipeline(runtime), folder
        self.state = self.pipeline.init(jax.random.key(0))
        for k in range(2):
            self.state, _ = self.pipeline.step(self.state, BATCHES[k])
        results_of(self.pipeline, self.state)
        self.told = self.saved = 0
        self.folders = 0

    def call(self, name):
        """Call one of the pipeline's methods; what is raised is raised."""
        if name == "step":
            self.state, _ = self.pipeline.step(self.state, BATCHES[int(self.state.step) % len(BATCHES)])
        else:
            self.folders += 1
            self.last = self.folder / str(self.folders)
            READING[name](self.pipeline, self.state, self.last)

    def look(self, name, before):
        """After an interrupted call: the state is usable, or says that it is lost; a checkpoint is whole or absent."""
        if self.state.is_donated:
            with pytest.raises(jaxpipe.ModelError, match="This state is lost: its step ended with "):
                self.pipeline.evaluate(self.state, BATCHES[0])
            self.told, self.state = self.told + 1, before
        if name == "save" and self.last.is_dir() and any(p.name.isdecimal() for p in self.last.iterdir()):
            self.saved += 1
            assert_same_bits(self.pipeline.restore(self.last), self.state)

    def check(self):
        """Compare with the run of another pipeline that nobody interrupts."""
        quiet = quiet_pipeline(self.runtime)
        state = quiet.init(jax.random.key(0))
        for k in range(int(self.state.step)):
            state, _ = quiet.step(state, BATCHES[k % len(BATCHES)])
        assert_same_bits(quiet.parameters(state), self.pipeline.parameters(self.state))
        assert_same_bits(quiet.optimizer_state(state), self.pipeline.optimizer_state(self.state))
        assert_same_bits(results_of(quiet, state), results_of(self.pipeline, self.state))


def check_is_ours(error):
    """JAX's caches, which are written in C++, raise another error because of ours."""
    if "Stopped" not in "".join(traceback.format_exception(error)):
        raise error


class Tracer:
    """Counts the Python functions that a call enters, and raises in one of them.

    In a save these are ours alone: an exception inside orbax's event loop can make that wait for ever.
    """

    def __init__(self, name, position=-1):
        self.count, self.position = 0, position
        self.inside = "/jaxpipe/" if name == "save" else ""

    def __call__(self, frame, event, _):
        # A handler that is being put back is not interrupted by what it has held back.
        file = frame.f_code.co_filename
        if event == "call" and self.inside in file and not file.endswith("hold_signals.py"):
            self.count += 1
            if self.count == self.position:
                raise Stopped

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)


NAMES = ["step", *READING]

#: Orbax leaves sockets, threads and coroutines behind when it is interrupted.
orbax_complains = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
    "ignore::RuntimeWarning",
    "ignore::ResourceWarning",
)


@orbax_complains
@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
@pytest.mark.parametrize("count", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_an_exception_anywhere_loses_no_state_untold(count, runtime, tmp_path):
    run, chance = Run(runtime, tmp_path), np.random.default_rng(count)
    entered = {}
    for name in [*NAMES, *NAMES]:  # the first save imports orbax
        with Tracer(name) as tracer:
            run.call(name)
        entered[name] = tracer.count
    raised = 0
    for k in range(count):
        name, before = NAMES[k % len(NAMES)], copy.deepcopy(run.state)
        try:
            with Tracer(name, chance.integers(1, entered[name] + 1)):
                run.call(name)
        except BaseException as error:
            check_is_ours(error)
            raised += 1
        run.look(name, before)
    run.check()
    print(f"{runtime}: {raised} raised, {run.told} lost and told, {run.saved} checkpoints complete")
    assert raised > count / 2


def test_an_exception_in_any_call_of_the_list_leaves_the_old_state_or_says_that_it_is_lost(tmp_path, monkeypatch):
    """Before a call of the list and behind it: what the update has not begun to write over is the old state."""
    pipeline = interrupted_pipeline("mpmd")
    state = pipeline.init(jax.random.key(0))
    pipeline.save(state, tmp_path)
    expected, results = pipeline.parameters(state), results_of(pipeline, state)
    pipeline.step(state, BATCHES[0])
    steps = pipeline._runtime.compiled_step.steps
    lost = []
    for k, (action, *rest) in enumerate(steps):
        for is_behind in (False, True):

            def stopped(*operands, action=action, is_behind=is_behind):
                if is_behind:
                    action(*operands)
                raise Stopped

            state = pipeline.init(jax.random.key(0))
            with monkeypatch.context() as patch, pytest.raises(Stopped) as caught:
                changed = (*steps[:k], (stopped, *rest), *steps[k + 1 :])
                patch.setitem(pipeline._runtime.compiled_step.__dict__, "steps", changed)
                pipeline.step(state, BATCHES[0])
            if state.is_donated:
                lost.append((k, is_behind))
                text = rf"lost: its step .* Stopped, .* of stages? 0.*restore\({str(tmp_path)!r}\)"
                assert re.search(text, caught.value.__notes__[0])
                with pytest.raises(jaxpipe.ModelError, match=text):
                    pipeline.step(state, BATCHES[0])
            else:
                assert_same_bits(pipeline.parameters(state), expected)
                assert_same_bits(results_of(pipeline, state), results)
    updates = [k for k, _ in lost]
    assert lost and min(updates) >= len(steps) - 4  # two updates, and what is counted behind them
    assert_same_bits(pipeline.parameters(pipeline.restore(tmp_path)), expected)


def raise_stopped(*_):
    raise Stopped


@pytest.fixture
def raising_handler(request):
    """A signal whose handler raises ``Stopped``; afterwards the handler is the one that was set."""
    before = signal.signal(request.param, raise_stopped)
    yield request.param
    assert signal.getsignal(request.param) is raise_stopped
    signal.signal(request.param, before)


def send_after(seconds, number, caught):
    """Send a signal to this process, again and again until an event is set: one raised in a finalizer is ignored."""
    if number == signal.SIGALRM:
        signal.setitimer(signal.ITIMER_REAL, seconds, 5)
        return

    def send():
        time.sleep(seconds)
        while not caught.is_set():
            os.kill(os.getpid(), number)
            caught.wait(5)

    threading.Thread(target=send, daemon=True).start()


@orbax_complains
@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "raising_handler", [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1], indirect=True, ids=str
)
def test_a_signal_whose_handler_raises_loses_no_state(count, raising_handler, runtime, tmp_path):
    run, chance = Run(runtime, tmp_path), np.random.default_rng(count)
    seconds = {}
    for name in [*NAMES, *NAMES]:
        start = time.perf_counter()
        run.call(name)
        seconds[name] = time.perf_counter() - start
    for k in range(count):
        name, caught = NAMES[k % len(NAMES)], threading.Event()
        try:
            send_after(1e-4 + seconds[name] * chance.random(), raising_handler, caught)
            while True:
                run.call(name)
        except BaseException as error:
            caught.set()
            signal.setitimer(signal.ITIMER_REAL, 0)
            check_is_ours(error)
        assert not run.state.is_donated
        run.look(name, None)
    run.check()
