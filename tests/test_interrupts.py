"""Ctrl-C, and states that were used: no step loses the training state."""

import contextlib
import dataclasses
import functools
import os
import signal
import socket
import threading
import time

import jax
import numpy as np
import optax
import pytest

import jaxpipe
from jaxpipe.runtime import check_state
from jaxpipe.runtime.hold_signals import hold_signals
from tests.support.compare import assert_same_bits
from tests.support.interrupted_chain import BATCHES, chain_of_squares


@pytest.fixture(autouse=True)
def interrupts_are_heard():
    """SIGINT raises KeyboardInterrupt; what a shell starts in the background inherits that it is ignored."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


@functools.cache
def pipeline_of(on_nonfinite=None):
    options = jaxpipe.PlanOptions(on_nonfinite=on_nonfinite)
    return chain_of_squares(optimizer=optax.adam(1e-3), options=options, runtime="mpmd")


def steps(pipeline, state, count):
    """Train up to a step, without a look at what the steps return."""
    for k in range(int(state.step), count):
        state, _ = pipeline.step(state, BATCHES[k % len(BATCHES)])
    return state


def interrupt_after(seconds):
    """Send SIGINT to this process a while after the first event that this returns is set, until the second is set.

    Once is not always enough: Python ignores a KeyboardInterrupt that is raised in a finalizer.
    """
    begin, caught = threading.Event(), threading.Event()

    def send():
        begin.wait()
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)
        while not caught.wait(5):
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()
    return begin, caught


def trained_under_interrupts(pipeline, count, waits):
    """A state after ``count`` SIGINTs at random moments of a loop that goes on after each."""
    chance = np.random.default_rng(count)
    state = steps(pipeline, pipeline.init(jax.random.key(0)), 10)
    jax.block_until_ready(state)
    start = time.perf_counter()
    state = jax.block_until_ready(steps(pipeline, state, 20))
    seconds = (time.perf_counter() - start) / 10
    k = 20
    for _ in range(count):
        begin, caught = interrupt_after(5 * seconds * chance.random())
        try:
            begin.set()
            while True:
                state, metrics = pipeline.step(state, BATCHES[k % len(BATCHES)])
                k += 1
                if waits:
                    float(metrics["loss"])
        except KeyboardInterrupt:
            caught.set()
            # Here the only question: whether `state` is usable. If a step was complete, it has that step's arrays.
            k = int(state.step)
    return state


@pytest.mark.parametrize("waits", [False, True], ids=["does not wait", "reads the loss"])
@pytest.mark.parametrize("on_nonfinite", [None, "raise"])
@pytest.mark.parametrize("count", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_an_interrupted_loop_goes_on_with_the_same_bits(count, on_nonfinite, waits):
    pipeline = pipeline_of(on_nonfinite)
    state = trained_under_interrupts(pipeline, count, waits)
    expected = steps(pipeline, pipeline.init(jax.random.key(0)), int(state.step))
    assert_same_bits(pipeline.parameters(state), pipeline.parameters(expected))
    assert_same_bits(state.optimizer, expected.optimizer)


class Interrupting:
    """A step in which the user presses Ctrl-C, after the state was donated."""

    def __init__(self, step):
        self.step = step

    def __call__(self, state, *arguments):
        results = self.step(state, *arguments)
        assert state.is_donated
        signal.raise_signal(signal.SIGINT)
        return results


def test_an_interrupted_step_leaves_the_new_state_in_the_old_one(monkeypatch):
    pipeline = pipeline_of()
    state = pipeline.init(jax.random.key(0))
    expected = steps(pipeline, pipeline.init(jax.random.key(0)), 1)
    monkeypatch.setattr(pipeline._runtime, "step", Interrupting(pipeline._runtime.step))
    with pytest.raises(KeyboardInterrupt):
        pipeline.step(state, BATCHES[0])
    assert_same_bits(state, expected)


def test_whatever_is_raised_after_the_step_leaves_a_state(monkeypatch):
    """Here by the look at what is not finite, which takes long enough to be interrupted."""
    pipeline = pipeline_of("raise")
    state = pipeline.init(jax.random.key(0))
    expected = steps(pipeline, pipeline.init(jax.random.key(0)), 0)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxpipe.runtime.nonfinite_origin.find", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipeline.step(state, np.full((8, 16), np.nan, np.float32))
    assert_same_bits(pipeline.parameters(state), pipeline.parameters(expected))


def test_an_interrupt_waits_for_the_end_of_with():
    before, order = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt), hold_signals():
        signal.raise_signal(signal.SIGINT)
        order.append("after the signal")
    assert order == ["after the signal"]
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ZeroDivisionError), hold_signals():  # nothing was pressed
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before


@contextlib.contextmanager
def handlers(**by_name):
    """Set handlers of signals; afterwards those of before."""
    before = {name: signal.signal(getattr(signal, name), handler) for name, handler in by_name.items()}
    yield
    for name, handler in before.items():
        signal.signal(getattr(signal, name), handler)


def test_the_callers_own_handlers_get_their_signals_once_each_in_order():
    numbers = []

    def note(number, frame):
        assert frame.f_code.co_name == "test_the_callers_own_handlers_get_their_signals_once_each_in_order"
        numbers.append(number)

    with handlers(SIGINT=note, SIGTERM=note, SIGALRM=note, SIGUSR1=note):
        sent = [signal.SIGUSR1, signal.SIGINT, signal.SIGALRM, signal.SIGTERM, signal.SIGINT]
        with hold_signals(), hold_signals():
            for number in sent:
                signal.raise_signal(number)
            assert numbers == []
        assert numbers == sent[:4]
        assert all(signal.getsignal(number) is note for number in sent)


def test_handlers_that_raise_are_all_called_and_all_put_back():
    def fail(number, _):
        called.append(number)
        raise RuntimeError(number)

    called: list[int] = []
    with handlers(SIGINT=fail, SIGTERM=fail, SIGUSR1=fail):
        with pytest.raises(RuntimeError) as caught, hold_signals():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
        assert called == [signal.SIGTERM, signal.SIGINT]
        assert caught.value.args == (signal.SIGINT,)
        assert caught.value.__context__.args == (signal.SIGTERM,)
        assert all(signal.getsignal(number) is fail for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))


def test_who_listens_for_signals_by_a_socket_hears_each_once():
    """As asyncio's event loop does."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno())
    try:
        with handlers(SIGUSR1=lambda *_: None), hold_signals():
            signal.raise_signal(signal.SIGUSR1)
        assert ours.recv(8) == bytes([signal.SIGUSR1])
    finally:
        signal.set_wakeup_fd(before)
        ours.close()
        theirs.close()


def test_steps_run_in_other_threads():
    """Only the main thread may change handlers."""
    pipeline, results = pipeline_of(), []
    state = pipeline.init(jax.random.key(0))
    thread = threading.Thread(target=lambda: results.append(steps(pipeline, state, 2)))
    thread.start()
    thread.join()
    assert_same_bits(results[0], steps(pipeline, pipeline.init(jax.random.key(0)), 2))


# States that were used


CALLS = {
    "step": lambda pipeline, state, _: pipeline.step(state, BATCHES[0]),
    "value_and_grad": lambda pipeline, state, _: pipeline.value_and_grad(state, BATCHES[0]),
    "evaluate": lambda pipeline, state, _: pipeline.evaluate(state, BATCHES[0]),
    "predict": lambda pipeline, state, _: pipeline.predict(state, BATCHES[0]),
    "find_nonfinite": lambda pipeline, state, _: pipeline.find_nonfinite(state, BATCHES[0]),
    "parameters": lambda pipeline, state, _: pipeline.parameters(state),
    "microbatch_key": lambda pipeline, state, _: pipeline.microbatch_key(state, 0),
    "save": lambda pipeline, state, folder: pipeline.save(state, folder),
    "after_step": lambda pipeline, state, folder: jaxpipe.Checkpointer(pipeline, folder).after_step(state),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_state_used_twice_is_refused(call, tmp_path):
    pipeline = pipeline_of()
    state = pipeline.init(jax.random.key(0))
    pipeline.step(state, BATCHES[0])
    with pytest.raises(jaxpipe.ModelError, match=r"was passed to pipeline\.step before, which used its memory"):
        call(pipeline, state, tmp_path)


@pytest.mark.parametrize("call", [c for name, c in CALLS.items() if name not in ("after_step", "microbatch_key")])
@pytest.mark.parametrize("wrong", [None, BATCHES[0], {"x": BATCHES[0]}], ids=["None", "an array", "a batch"])
def test_something_else_than_a_state_is_refused(call, wrong, tmp_path):
    with pytest.raises(jaxpipe.ModelError, match=rf"state is of type {type(wrong).__name__}; .*step\(state, batch\)"):
        call(pipeline_of(), wrong, tmp_path)


def test_exchanged_arguments_are_told():
    pipeline = pipeline_of()
    with pytest.raises(jaxpipe.ModelError, match="The state comes first, then the batch"):
        pipeline.step(BATCHES[0], pipeline.init(jax.random.key(0)))


def test_of_two_threads_with_one_state_one_gets_it():
    pipeline = pipeline_of()
    for _ in range(10):
        state, results, errors = pipeline.init(jax.random.key(0)), [], []
        barrier = threading.Barrier(2)

        def train(state=state, results=results, errors=errors, barrier=barrier):
            barrier.wait()
            try:
                results.append(pipeline.step(state, BATCHES[0]))
            except jaxpipe.ModelError as error:
                errors.append(error)

        threads = [threading.Thread(target=train) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(results), len(errors)) == (1, 1)


def test_a_lost_state_may_have_arrays_of_numpy():
    state = pipeline_of().init(jax.random.key(0))
    mixed = dataclasses.replace(state, parameters=(np.asarray(state.parameters[0]), *state.parameters[1:]))
    state.parameters[1].delete()
    error = RuntimeError("no room")
    check_state.lose(mixed, error, [0, 1, 1, 1], None)
    assert "no room, when the update of stage 1 had begun" in error.__notes__[0] and mixed.lost == error.__notes__[0]
