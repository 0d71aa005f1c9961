"""Derivative rules of the user's own (``custom_vjp``): gradients, stored bytes and costs are those of the rule."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe import memory_encoded, residual_report
from jaxpipe.array_types import PyTree
from jaxpipe.costs.profile_model import profile_model
from jaxpipe.schedules import one_f_one_b, zero_bubble
from tests.support.compare import FUSION, assert_same_bits, relative_l2


ROWS, WIDTH, CLASSES = 16, 8, 96


# Rules. Each one's backward pass computes again what its forward pass did not return.


def entropy_of(logits, labels):
    chosen = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(logits, -1) - chosen).mean()


@jax.custom_vjp
def head(x, w, labels):
    """Linear layer and cross-entropy; the labels are integers, whose cotangent is None."""
    return entropy_of(x @ w, labels)


def head_backward(saved, cotangent):
    x, w, labels = saved
    gradient = (jax.nn.softmax(x @ w) - jax.nn.one_hot(labels, w.shape[1])) * (cotangent / len(x))
    return gradient @ w.T, x.T @ gradient, None


head.defvjp(lambda x, w, labels: (head(x, w, labels), (x, w, labels)), head_backward)


@jax.custom_vjp
def attention(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


def attention_forward(q, k, v):
    scores = q @ k.T
    total = jax.nn.logsumexp(scores, -1, keepdims=True)
    result = jnp.exp(scores - total) @ v
    return result, (q, k, v, result, total)


def attention_backward(saved, cotangent):
    q, k, v, result, total = saved
    weights = jnp.exp(q @ k.T - total)
    scores = weights * (cotangent @ v.T - (result * cotangent).sum(-1, keepdims=True))
    return scores @ k, scores.T @ q, weights.T @ cotangent


attention.defvjp(attention_forward, attention_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def repeated(function, count, x):
    for _ in range(count):
        x = function(x)
    return x


def repeated_backward(function, count, x, cotangent):
    return jax.vjp(lambda x: repeated.__wrapped__(function, count, x), x)[1](cotangent)


repeated.defvjp(lambda function, count, x: (repeated(function, count, x), x), repeated_backward)


@jax.custom_vjp
def outer(x, w, labels):
    """A rule that calls another one forward and backward."""
    return jnp.square(head(jnp.exp(x), w, labels))


def outer_backward(saved, cotangent):
    x, w, labels = saved
    loss, pullback = jax.vjp(lambda x, w: head(jnp.exp(x), w, labels), x, w)
    return *pullback(2 * loss * cotangent), np.zeros(labels.shape, jax.dtypes.float0)


outer.defvjp(lambda x, w, labels: (outer(x, w, labels), (x, w, labels)), outer_backward)


@jax.custom_vjp
def looping(x):
    return jnp.tanh(x).sum()


def looping_backward(x, cotangent):
    """With a scan, a while loop and a conditional."""
    _, rows = lax.scan(lambda c, row: (c + 1, 1 - jnp.tanh(row) ** 2), 0, x)
    _, kept = lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] * 1.5), (0, rows))
    return (lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, kept) * cotangent,)


looping.defvjp(lambda x: (looping(x), x), looping_backward)


@jax.custom_vjp
def symbolic(x, y):
    return x * y, x + y


def symbolic_forward(x, y):
    return symbolic(x.value, y.value), (x.value, y.value if y.perturbed else None)


def symbolic_backward(saved, cotangents):
    x, y = saved
    first, second = (0 if type(ct) is jax.custom_derivatives.SymbolicZero else ct for ct in cotangents)
    wide = jnp.outer(x[0], x[0]).sum()
    return (0 if y is None else first * y) + wide * first + second, None if y is None else first * x + second


symbolic.defvjp(symbolic_forward, symbolic_backward, symbolic_zeros=True)


def kernel(x_ref, y_ref):
    y_ref[...] = jnp.tanh(x_ref[...])


def run_kernel(x):
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


@jax.custom_vjp
def by_kernel(x):
    return run_kernel(x)


by_kernel.defvjp(lambda x: (run_kernel(x), x), lambda x, ct: ((1 - run_kernel(x) ** 2) * ct,))


def linen_product(module, x):
    return jnp.exp(module(x))


def linen_forward(module, x):
    return jnp.exp(module(x)), (module.variables["params"], x)


def linen_backward(saved, cotangent):
    params, x = saved
    cotangent = cotangent * jnp.exp(x @ params["kernel"] + params["bias"])
    return {"params": {"kernel": x.T @ cotangent, "bias": cotangent.sum(0)}}, cotangent @ params["kernel"].T


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.custom_vjp(linen_product, linen_forward, linen_backward)(nn.Dense(CLASSES), jnp.tanh(x)).mean()


class NNXLayer(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, CLASSES)))


@nnx.custom_vjp(graph_updates=True)
def nnx_product(module, x):
    return jnp.exp(x @ module.kernel[...])


def nnx_backward(saved, cotangents):
    module, x = saved
    (updates, _), cotangent = cotangents
    cotangent = cotangent * jnp.exp(x @ module.kernel[...])
    gradient = jax.tree.map(lambda g: g, updates)
    gradient["kernel"][...] = x.T @ cotangent
    return gradient, cotangent @ module.kernel[...].T


nnx_product.defvjp(lambda module, x: (nnx_product(module, x), (module, x)), nnx_backward)


@dataclass(frozen=True)
class Example:
    """A loss of parameters, and the parameters."""

    loss: Callable[..., jax.Array]
    arguments: tuple[PyTree, ...]


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


X, LABELS, W = normal(1, ROWS, WIDTH), jnp.arange(ROWS) % CLASSES, normal(2, WIDTH, CLASSES)
SQUARE = normal(3, WIDTH, WIDTH)


def layers(w, x):
    """Rules inside a scan over stacked weights."""
    return lax.scan(lambda c, w: (c + attention(c @ w, c, jnp.sin(c)), None), x, w)[0].sum()


EXAMPLES = {
    "head": Example(lambda w, x: head(jnp.tanh(x), w, LABELS), (W, X)),
    "head in jit": Example(lambda w, x: jax.jit(head)(jnp.tanh(x), w, LABELS), (W, X)),
    "attention": Example(lambda w, x: jnp.sin(attention(x @ w, x, jnp.tanh(x))).sum(), (SQUARE, X)),
    "static arguments": Example(lambda w, x: repeated(jnp.sin, 3, x @ w).sum(), (SQUARE, X)),
    "a rule in a rule": Example(lambda w, x: outer(jnp.tanh(x), w, LABELS), (W, X)),
    "loops": Example(lambda w, x: looping(jnp.tanh(x @ w)), (SQUARE, X)),
    "symbolic zeros": Example(lambda w, x: symbolic(jnp.sin(x @ w), jnp.ones(WIDTH))[0].sum(), (SQUARE, X)),
    "kernel": Example(lambda w, x: by_kernel(x @ w).sum(), (SQUARE, X)),
    "in a scan": Example(layers, (normal(4, 3, WIDTH, WIDTH) / 4, X)),
    "in remat": Example(lambda w, x: jax.checkpoint(lambda x: head(jnp.tanh(x), w, LABELS))(x), (W, X)),
}


def saved_bytes(function, *arguments) -> int:
    """Return the residuals of ``jax.vjp``, arguments excluded."""
    given: set[int] = set()

    def pullback(*values):
        given.update(map(id, values))
        kept = {id(x): x for x in jax.tree.leaves(jax.vjp(function, *values)[1]) if id(x) not in given}
        return list(kept.values())

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(pullback, *arguments)))


@pytest.mark.versions
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_rule_gives_its_own_gradients_and_stores_no_more_than_it_returns(name):
    example = EXAMPLES[name]
    assert residual_report(example.loss, *example.arguments).total_bytes <= saved_bytes(
        example.loss, *example.arguments
    )
    argnums = tuple(range(len(example.arguments)))
    compiled = name in ("in a scan", "in remat", "loops")  # a loop is compiled in any case, so all around it is too
    with jax.disable_jit(not compiled):
        expected, actual = (
            (jax.jit(f) if compiled else f)(*example.arguments)
            for f in (jax.value_and_grad(f, argnums) for f in (example.loss, memory_encoded(example.loss)))
        )
    assert_same_bits(actual, expected)


@pytest.mark.core
def test_what_a_rule_computes_again_is_not_stored():
    """By hand: the head keeps its input alone; attention its operands, its result and a number for each row."""
    rows = ROWS * WIDTH * 4
    assert residual_report(EXAMPLES["head"].loss, W, X).total_bytes == rows
    # Two of the operands are cheap to compute from the argument x.
    report = residual_report(EXAMPLES["attention"].loss, SQUARE, X)
    assert report.total_bytes <= 2 * rows + ROWS * 4 < ROWS * ROWS * 4 + rows
    assert {row.shape for row in report.tensors} <= {(ROWS, WIDTH), (ROWS, 1)}


@pytest.mark.core
def test_residuals_of_a_rule_are_encoded():
    """A rule that returns a boolean array: one bit for each element."""

    @jax.custom_vjp
    def clipped(x):
        return jnp.clip(x, -1, 1)

    clipped.defvjp(lambda x: (clipped(x), jnp.abs(x) < 1), lambda inside, ct: (ct * inside * 0.5,))
    assert residual_report(lambda x: clipped(x).sum(), X).total_bytes == X.size // 8
    assert_same_bits(jax.grad(memory_encoded(lambda x: clipped(x).sum()))(X), jnp.where(jnp.abs(X) < 1, 0.5, 0.0))


def test_a_rule_may_exchange_over_a_mesh():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.custom_vjp
    def normalized(x):
        return x - lax.pmean(x.mean(0), "data")

    def backward(x, ct):
        return ((ct - lax.pmean(ct.mean(0), "data")) * jnp.tanh(lax.pmean(x.mean(0), "data")),)

    normalized.defvjp(lambda x: (normalized(x), x), backward)

    def loss(w, x):
        return jnp.sin(normalized(jnp.exp(x @ w))).sum()

    def gradients(loss):
        specs = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": False}
        return jax.jit(jax.shard_map(lambda w, x: jax.grad(loss)(w, x)[None], **specs))(SQUARE, X)

    assert relative_l2(gradients(memory_encoded(loss)), gradients(loss)) < FUSION


@pytest.mark.core
def test_rules_of_flax_modules():
    model = LinenLayer()
    variables = model.init(jax.random.key(0), X)
    with jax.disable_jit():
        expected = jax.value_and_grad(model.apply, (0, 1))(variables, X)
        actual = jax.value_and_grad(memory_encoded(LinenLayer)().apply, (0, 1))(variables, X)
    assert_same_bits(actual, expected)
    report = residual_report(memory_encoded(LinenLayer)().apply, variables, X)
    assert report.total_bytes <= saved_bytes(model.apply, variables, X)

    def loss(module, x):
        return nnx_product(module, jnp.tanh(x)).mean()

    module = NNXLayer(nnx.Rngs(0))
    expected, actual = (jax.tree.leaves(nnx.grad(f)(module, X)) for f in (loss, memory_encoded(loss)))
    assert relative_l2(actual, expected) < FUSION
    # The kernel is a parameter; what is left is the input.
    assert residual_report(loss, module, X).total_bytes <= X.size * 4


@pytest.mark.core
def test_what_a_rule_computes_again_is_priced_as_backward_work():
    """The head alone, whose input needs no gradient: one product forward, that one again and another one backward."""
    model = jax.tree_util.Partial(lambda w, x: head(x, w, jnp.zeros(len(x), jnp.int32)), normal(1, 512, 4096))
    profile = profile_model(
        model, jax.ShapeDtypeStruct((256, 512), np.float32), loss=lambda f, x: f(x), source="analytic"
    )
    product = 2 * 256 * 512 * 4096 / 5e10  # a CPU core is taken to do 5e10 operations in a second
    k = int(np.argmax(profile.backward_seconds))
    assert product <= profile.forward_seconds[k] < 2 * product <= profile.backward_seconds[k]


def tower(params, x, labels, scan):
    """Attention layers and the head, all by rules."""

    def layer(x, w):
        q, k, v = (x @ part for part in jnp.split(w, 3, 1))
        return x + jax.vmap(attention)(q, k, v), None

    x = (
        lax.scan(layer, x, params["layers"])[0]
        if scan
        else functools.reduce(lambda x, w: layer(x, w)[0], params["layers"], x)
    )
    return head(x.reshape(-1, WIDTH), params["head"], labels.reshape(-1))


@pytest.mark.parametrize(("schedule", "scan"), [(zero_bubble, False), (one_f_one_b, True)])
def test_pipelines_keep_rules_as_they_are_written(schedule, scan):
    layers, length, rows, m = 2, 24, 2, 2
    stacked = normal(5, layers, WIDTH, 3 * WIDTH) / 4
    params = {"layers": stacked if scan else list(stacked), "head": W}
    labels = jax.random.randint(jax.random.key(7), (m * rows, length), 0, CLASSES)
    batch = {"x": normal(6, m * rows, length, WIDTH), "y": labels}
    pipeline = jaxpipe.partition(
        jax.tree_util.Partial(tower, params),
        jax.make_mesh((2,), ("stage",)),
        batch,
        loss=lambda model, batch: model(batch["x"], batch["y"], scan),
        optimizer=optax.sgd(0.1),
        num_microbatches=m,
        schedule=schedule,
        profile="analytic",
        options=jaxpipe.PlanOptions(unroll_scans=scan),
    )
    (value, _), gradients = pipeline.value_and_grad(pipeline.init(jax.random.key(0)), batch)

    @jax.jit
    @jax.value_and_grad
    def plain(params, x, y):
        return tower(params, x, y, scan)

    parts = [plain(params, batch["x"][j : j + rows], batch["y"][j : j + rows]) for j in range(0, m * rows, rows)]
    expected = jax.tree.map(lambda *terms: sum(terms) / m, *parts)
    assert relative_l2((value, *jax.tree.leaves(gradients)), jax.tree.leaves(expected)) < FUSION
    # A layer keeps its input, q, k, v, its result and a number for each row; the head its input and the labels. Scores
    # would be `length` numbers for each row.
    kept = 4 * rows * length * (layers * (5 * WIDTH + 1) + WIDTH + 1)
    assert sum(stage.stash_bytes for stage in pipeline.plan.stages) <= kept
