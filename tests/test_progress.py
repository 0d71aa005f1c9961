"""Messages of what takes long, in the log and on a terminal."""

import io
import logging
import os
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import optax
import pytest
from rich.console import Console

import jaxpipe
from jaxpipe.text import progress


MODEL = jax.tree_util.Partial(
    lambda w, x: jnp.tanh(x @ w["a"]) @ w["b"], {"a": jnp.ones((3, 4)), "b": jnp.ones((4, 2))}
)


@pytest.fixture
def written(monkeypatch):
    """Texts on a terminal on which lines appear at once."""
    stream = io.StringIO()
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=stream, force_terminal=True, width=100))
    return stream


def wait_for(written, text):
    """Wait until a text is on the terminal."""
    end = time.monotonic() + 60
    while text not in written.getvalue() and time.monotonic() < end:
        time.sleep(0.01)
    return text in written.getvalue()


def test_a_terminal_shows_what_is_being_done(written):
    with progress.progress("Planning"):
        assert wait_for(written, "Planning")
        progress.tell("Choosing [bold]storage")
        # Texts are not taken for markup, and the line is gone in the end.
        assert wait_for(written, "Choosing [bold]storage")
    text = written.getvalue()
    assert progress._line.get() is None
    assert text.endswith("\x1b[2K")


def test_a_line_inside_another_is_the_same(written):
    with progress.progress("outer"):
        outer = progress._line.get()
        with progress.progress("inner"):
            assert progress._line.get() is outer
        assert progress._line.get() is outer


def test_items_are_counted_in_the_line(written):
    with progress.progress("groups"):
        for k, _ in enumerate(progress.track("abc", "groups"), 1):
            assert wait_for(written, f"groups: {k} of 3")
    assert "groups: 4 of 3" not in written.getvalue()
    assert list(progress.track("abc", "without a line")) == ["a", "b", "c"]


def test_nothing_is_shown_before_it_takes_long(written, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 1000.0)
    with progress.progress("quick"):
        pass
    assert written.getvalue() == ""  # it ended at once


def test_a_line_ends_with_an_error(written):
    with pytest.raises(KeyError), progress.progress("failing"):
        assert wait_for(written, "failing")
        raise KeyError
    assert progress._line.get() is None


def test_nothing_is_shown_where_stderr_is_no_terminal(written, monkeypatch):
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=written, force_terminal=False))
    with progress.progress("planning"):
        assert progress._line.get() is None
    assert written.getvalue() == ""


def test_logs_get_a_line_each_few_seconds(capsys):
    """For the command: capsys is no terminal."""
    with progress.lines_each(0.05):
        with progress.progress("Cutting\x1b[31m"):
            shown = progress._line.get()
            for _ in progress.track("abc", "groups"):
                assert progress._line.get() is shown
        time.sleep(0.5)
    assert progress._line.get() is None
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(re.fullmatch(r"jaxpipe: \d s: (Cutting\\x1b\[31m|groups: \d of 3)", line) for line in lines)
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_a_plan_and_a_first_step_are_told_in_the_log(caplog):
    mesh, batch = jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), jnp.ones((8, 3))
    options = {"loss": lambda f, x: f(x).mean(), "optimizer": optax.sgd(0.1), "profile": "analytic"}
    options["runtime"] = "spmd"
    with caplog.at_level(logging.INFO, "jaxpipe"):
        pipeline = jaxpipe.partition(MODEL, mesh, batch, num_microbatches=2, **options)
        pipeline.step(pipeline.init(jax.random.key(0)), batch)
    # Two products, tanh, a sum and a division.
    everything = [record.message for record in caplog.records if record.name == "jaxpipe"]
    phases = [message.split(":")[0].split(", ")[1] for message in everything if message.startswith("planning, ")]
    assert {"trace", "profile", "cut", "candidates"} <= set(phases)
    messages = [message for message in everything if not message.startswith("planning, ")]
    assert messages[:3] == [
        "Tracing the model",
        "Profiling 5 operators, analytic",
        "Cutting 5 operators into stages, on 2 devices",
    ]
    first = messages.index("Compiling the training step")
    assert all(message.endswith("stages with default storage") for message in messages[3:first])
    assert messages[first + 1].startswith("Compiling the training step, ") and len(messages) == first + 3
    assert messages[first + 2].startswith("XLA reserves ")


#: A budget that the default storage does not keep, so that a solver chooses, and the streams while it does.
WITHIN_A_BUDGET = """
import jax, jax.numpy as jnp, optax, jaxpipe
from jaxpipe.planning.storage.quiet_solver import silence_highs

def net(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w) * jax.nn.sigmoid(x)
    return x

model = jax.tree_util.Partial(net, [jnp.ones((16, 16))] * 6)
mesh, x = jax.make_mesh((1,), ("stage",)), jnp.ones((256, 16))
options = {"loss": lambda model, x: model(x).mean(), "optimizer": optax.sgd(0.1), "num_microbatches": 2}
options |= {"profile": "analytic", "options": jaxpipe.PlanOptions(compile=False, allow_over_budget=True)}
(needed,) = jaxpipe.partition(model, mesh, x, **options).plan.device_bytes
jaxpipe.partition(model, mesh, x, memory=int(0.8 * needed), **options)
assert silence_highs.cache_info().currsize == 1  # the solver was asked
"""


def test_planning_and_its_solver_print_nothing():
    """HiGHS prints a banner from C++, which only another process can see."""
    command = [sys.executable, "-c", WITHIN_A_BUDGET]
    done = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_stdout_is_what_it_was_after_the_banner():
    script = "print('before'); from jaxpipe.planning.storage.quiet_solver import silence_highs; silence_highs()"
    done = subprocess.run([sys.executable, "-c", f"{script}; print('after')"], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("before\nafter\n", "")
