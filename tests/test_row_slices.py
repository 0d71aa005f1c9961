"""A large row-wise product runs in slices: the same losses and gradients, and no array of the product's size."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jaxpipe
from jaxpipe import _compat
from jaxpipe.graph.graph import trace
from jaxpipe.graph.row_slices import slice_rows


ROWS, WIDTH, WORDS = (4, 16), 8, 240


def by_log_softmax(hidden, words, labels, weights):
    logits = hidden @ words.T
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1).mean()


def with_padding(hidden, words, labels, weights):
    losses = optax.softmax_cross_entropy_with_integer_labels(jnp.einsum("bsd,vd->bsv", hidden, words), labels)
    return (losses * weights).sum() / weights.sum()


def with_one_hot_labels(hidden, words, labels, weights):
    logits = 30 * jnp.tanh((hidden @ words.T).astype(jnp.float32) / 30)
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, WORDS)).mean()


def of_next_words(hidden, words, labels, weights):
    return optax.softmax_cross_entropy_with_integer_labels((hidden @ words.T)[:, :-1], labels[:, 1:]).mean()


def of_flat_tokens(hidden, words, labels, weights):
    logits = (hidden @ words.T).reshape(-1, WORDS)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels.reshape(-1)).mean()


def arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    hidden, words = jax.random.normal(keys[0], (*ROWS, WIDTH)), jax.random.normal(keys[1], (WORDS, WIDTH))
    labels = jax.random.randint(keys[2], ROWS, 0, WORDS)
    return hidden, words, labels, jax.random.bernoulli(keys[3], 0.7, ROWS).astype(jnp.float32)


def largest_array(function, *arguments):
    """The most elements of any array that a program has, those inside its loops included."""

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (var.aval.size for var in equation.outvars)
            for inner in _compat.inner_programs(equation):
                yield from sizes(_compat.open_jaxpr(inner)[0])

    return max(sizes(jax.make_jaxpr(function)(*arguments).jaxpr))


@pytest.mark.core
@pytest.mark.parametrize(
    "loss", [by_log_softmax, with_padding, with_one_hot_labels, of_next_words, of_flat_tokens], ids=lambda f: f.__name__
)
def test_losses_and_gradients_are_those_of_the_whole_product(loss):
    hidden, words, labels, weights = arrays()
    whole = trace(loss, hidden, words, labels, weights)
    sliced = slice_rows(whole, most_bytes=np.prod(ROWS) * WORDS)
    assert {"dot_general", "reduce_max", "exp"} <= {op.name for op in sliced.operators}

    def of_slices(hidden, words):
        return sliced.graph.evaluate([hidden, words, labels, weights])[0]

    def plain(hidden, words):
        return loss(hidden, words, labels, weights)

    value, gradients = jax.jit(jax.value_and_grad(of_slices, (0, 1)))(hidden, words)
    expected, plain_gradients = jax.jit(jax.value_and_grad(plain, (0, 1)))(hidden, words)
    # Products of fewer rows may be rounded otherwise, and the gradient of the words is a sum over the slices.
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for mine, other in zip(gradients, plain_gradients, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)
    product = np.prod(ROWS) * WORDS
    assert largest_array(jax.grad(plain, (0, 1)), hidden, words) >= product
    assert largest_array(jax.grad(of_slices, (0, 1)), hidden, words) <= product / 4


@pytest.mark.parametrize("most_bytes, count", [(4 * 1024, 16), (4 * 7680, 2), (4 * 20000, None)])
def test_number_of_slices(most_bytes, count):
    sliced = slice_rows(trace(by_log_softmax, *arrays()), most_bytes)
    assert (sliced and sliced.count) == count


def test_rows_that_meet_are_not_sliced():
    hidden, words, *_ = arrays()

    def over_batch(hidden, words):
        return jax.nn.softmax((hidden @ words.T).reshape(-1), axis=0).max()

    def returned(hidden, words):
        return hidden @ words.T

    assert slice_rows(trace(over_batch, hidden, words), most_bytes=1024) is None
    assert slice_rows(trace(returned, hidden, words), most_bytes=1024) is None


def language_model(variables, tokens):
    hidden = variables["embedding"][tokens]
    for kernel in variables["kernels"]:
        hidden = hidden + jnp.tanh(hidden @ kernel)
    return hidden @ variables["head"]


def loss_of(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["labels"]).mean()


@pytest.mark.parametrize("stages", [1, 2])
def test_a_budget_below_the_logits_is_met(stages):
    words, width, shape = 4096, 32, (8, 32)
    keys = jax.random.split(jax.random.key(0), 5)
    variables = {
        "embedding": jax.random.normal(keys[0], (words, width)),
        "kernels": [0.2 * jax.random.normal(key, (width, width)) for key in jax.random.split(keys[1], 4)],
        "head": jax.random.normal(keys[2], (width, words)) / width,
    }
    batch = {
        "tokens": jax.random.randint(keys[3], shape, 0, words),
        "labels": jax.random.randint(keys[4], shape, 0, words),
    }
    logits = 4 * np.prod(shape) * words
    fixed = 2 * 4 * (words * width + (width * words if stages == 1 else 4 * width**2))  # parameters and gradients
    memory = int(fixed + 0.75 * logits)
    pipeline = jaxpipe.partition(
        jax.tree_util.Partial(language_model, variables),
        Mesh(np.array(jax.devices()[:stages]), ("stage",)),
        batch,
        loss=loss_of,
        optimizer=optax.sgd(0.5),
        memory=memory,
        num_microbatches=1,
        profile="analytic",
        runtime="mpmd",
    )
    assert max(pipeline.memory_report().compiled_bytes) <= memory
    slices = [stage.slices for stage in pipeline.plan.stages]
    assert slices[:-1] == [1] * (stages - 1) and slices[-1] > 1
    assert f"largest product in {slices[-1]} slices" in str(pipeline.plan)
    state, metrics = pipeline.step(pipeline.init(jax.random.key(1)), batch)

    def plain(variables):
        return loss_of(lambda tokens: language_model(variables, tokens), batch)

    loss, gradients = jax.jit(jax.value_and_grad(plain))(variables)
    expected = jax.tree.map(lambda p, g: p - 0.5 * g, variables, gradients)
    # The gradient of the head is a sum over slices.
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    (trained,) = pipeline.parameters(state).args
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), trained, expected)
