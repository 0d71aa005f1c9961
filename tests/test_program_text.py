"""Programs and values as text: equal for what is equal, whatever terminal there is, and another for what differs."""

import enum
import functools
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.graph.graph import trace
from jaxpipe.graph.program_text import program_text
from jaxpipe.text.stable_text import stable_text


ROOT = Path(__file__).parents[1]


class Layer(nn.Module):
    """A layer with functions that have derivative rules of their own."""

    @nn.compact
    def __call__(self, x, _):
        return x + nn.relu(nn.Dense(4)(x)), None


def program(scale: float = 2.0, weights=(1.0, 2.0, 3.0, 4.0)):
    """A traced program with nested programs: a scan of rematerialized layers, a conditional, a loop, a rule."""

    @jax.custom_vjp
    def doubled(x):
        return scale * x

    doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (scale * g,))
    weights = jnp.asarray(np.asarray(weights, np.float32))

    def run(params, key, x):
        scanned = nn.scan(nn.remat(Layer), length=3, variable_axes={"params": 0}, split_rngs={"params": True})
        x, _ = scanned().apply(params, x, None)
        x = jax.lax.cond(x.sum() > 0, jnp.sin, nn.gelu, x) + jax.random.normal(key, x.shape)
        x = jax.lax.fori_loop(0, 3, lambda _, x: nn.silu(x), x)
        return doubled(x * weights).sum()

    scanned = nn.scan(nn.remat(Layer), length=3, variable_axes={"params": 0}, split_rngs={"params": True})
    params = jax.eval_shape(lambda: scanned().init(jax.random.key(0), jnp.ones((2, 4)), None))
    return jax.make_jaxpr(jax.grad(run))(params, jax.eval_shape(lambda: jax.random.key(0)), jnp.ones((2, 4)))


def graph(scale: float = 2.0, weights=(1.0, 2.0, 3.0, 4.0)):
    array = np.asarray(weights, np.float32)
    return trace(lambda x: jnp.sum(scale * jax.nn.relu(x) * jnp.asarray(array)), jnp.ones((2, 4)))


#: What a process prints: texts of programs, and the file of a profile.
SHOW = """
import json, jax
from tests.test_program_text import graph, program
from jaxpipe.costs.profile_cache import profile_path
from jaxpipe.graph.program_text import program_text
from jaxpipe.residuals.backward_graph import build_backward_graph
from jaxpipe.text.stable_text import stable_text
key = profile_path(build_backward_graph(graph(), graph().inputs), jax.devices()[0]).name
print("RESULT", json.dumps([stable_text(program()), program_text(graph()), program_text(graph(), values=True), key]))
"""


def shown(terminal: bool, **environment: str) -> list[str]:
    """Run ``SHOW`` in a process that writes to a terminal, or to a pipe."""
    more = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TERM": "xterm-256color"}
    environment = {k: x for k, x in os.environ.items() if k not in ("NO_COLOR", "CI")} | more | environment
    command = [sys.executable, "-W", "ignore", "-c", SHOW]
    if not terminal:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.partition("RESULT ")[2])
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        text = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            text += piece
    os.close(ours)
    assert process.returncode == 0, text.decode()
    return json.loads(text.decode().partition("RESULT ")[2].splitlines()[0])


@pytest.mark.core
def test_texts_are_the_same_on_a_terminal_and_in_a_pipe():
    """JAX colors programs on a terminal."""
    on_terminal = shown(True, COLUMNS="40", PYTHONHASHSEED="1")
    assert on_terminal == shown(False, COLUMNS="200", PYTHONHASHSEED="2")
    assert not any("\x1b" in text or " at 0x" in text for text in on_terminal)


def test_programs_differ_in_text_where_they_differ():
    same = stable_text(program())
    assert stable_text(program()) == same
    assert stable_text(program(scale=3.0)) != same
    assert stable_text(program(weights=(1, 2, 3, 5))) != same
    assert stable_text(program(), values=False) == stable_text(program(weights=(1, 2, 3, 5)), values=False)


def test_values_of_constants_count_only_where_they_are_asked_for():
    """A profile depends on shapes; what processes agree on depends on values."""
    first, second = graph(), graph(weights=(1, 2, 3, 5))
    assert program_text(first) == program_text(second)
    assert program_text(first, values=True) != program_text(second, values=True)
    assert program_text(first) != program_text(graph(scale=3.0))  # a literal


class Color(enum.Enum):
    """Two colors."""

    RED = 1
    BLUE = 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1"),
        ({"b": 1, "a": (None, True)}, "{'a': [None, True], 'b': 1}"),
        ({"z", "y", "x"}, "{'x', 'y', 'z'}"),
        (Color.RED, "Color.RED"),
        (np.float32(1.5), "float32[](0000c03f)"),
        (np.zeros((2,), np.int8), "int8[2](0000)"),
        (functools.partial(json.dumps, indent=1), "partial(json.dumps, [], {'indent': 1})"),
        (jnp.float32, "jax.numpy.float32"),
        (jax.ShapeDtypeStruct((2, 3), np.float32), "ShapeDtypeStruct(shape=(2, 3), dtype=float32)"),
        (optax.EmptyState(), "EmptyState()"),
    ],
)
def test_texts_of_values(value, text):
    assert stable_text(value) == text


def test_long_arrays_are_told_by_a_digest_of_their_values():
    array = np.arange(100.0).reshape(10, 10)
    texts = {stable_text(x) for x in (array, array.copy(), jnp.asarray(array).astype(float))}
    other = array.copy()
    other[9, 9] = 0.0
    assert len(stable_text(array)) < 60 and stable_text(array) in texts and stable_text(other) not in texts
    assert stable_text(array, values=False) == "float64[10, 10]"
