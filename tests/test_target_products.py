"""Products in the form that suits the target: long contractions of gradients for GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe import _compat
from jaxpipe.graph import target_products
from jaxpipe.graph.graph import trace
from jaxpipe.residuals import vjp_program
from jaxpipe.targets.building import building_for


ROWS, WIDTH, WORDS = 8, 16, 4_100  # 32 * 128 + 4 words


@pytest.fixture(autouse=True)
def small_copies_count(monkeypatch):
    monkeypatch.setattr(target_products, "WORTH", 0)


def contractions(program):
    """The length of the contracted axis of every product in a traced program, loops included."""
    lengths = []
    for equation in _compat.open_jaxpr(program)[0].eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            lengths += [equation.invars[0].aval.shape[d] for d in contracted]
        for inner in _compat.inner_programs(equation):
            lengths += contractions(inner)
    return lengths


def result_types(program):
    """The element types of the results of all products in a traced program, outside of loops."""
    equations = _compat.open_jaxpr(program)[0].eqns
    return {e.outvars[0].aval.dtype for e in equations if e.primitive.name == "dot_general"}


def arrays(dtype=jnp.float32, words=WORDS):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in ((ROWS, WIDTH), (WIDTH, words))]


def gradient_of_hidden(logits_of, platform, hidden, words):
    """The traced gradient of the sum of squares of logits by the hidden states, and its value."""

    def gradient(hidden, words):
        with building_for(platform):
            graph = trace(lambda *a: [jnp.square(logits_of(*a).astype(jnp.float32)).sum()], hidden, words)
            built = vjp_program.build(graph, graph.inputs[:1], held=graph.inputs)
            _, stash = vjp_program.forward(built, [hidden, words])
            parameters = [(hidden, words)[graph.inputs.index(t)] for t in built.parameters]
            return vjp_program.backward(built, parameters, stash, [jnp.ones(())])[0]

    return jax.make_jaxpr(gradient)(hidden, words), jax.jit(gradient)(hidden, words)


def in_loop(hidden, words):
    """Logits of two rows at a time, computed again in the backward pass."""
    body = jax.checkpoint(lambda _, rows: (None, rows @ words))
    return jax.lax.scan(body, None, hidden.reshape(-1, 2, WIDTH))[1].reshape(ROWS, -1)


@pytest.mark.core
@pytest.mark.parametrize("logits_of", [jnp.matmul, in_loop], ids=["product", "loop"])
def test_a_gpu_contracts_the_aligned_words_and_the_rest(logits_of):
    program, value = gradient_of_hidden(logits_of, "gpu", *arrays())
    lengths = contractions(program)
    assert WORDS not in lengths
    assert lengths.count(4_096) == lengths.count(4) == 1
    expected = jax.grad(lambda h, w: jnp.square(logits_of(h, w)).sum())(*arrays())
    # Sums of 4,100 products in another order: a hundred units in the last place of the largest.
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_halves_of_narrow_types_are_added_in_float32():
    hidden, words = arrays(jnp.bfloat16)
    product = jax.make_jaxpr(jnp.matmul)(words, words.T)
    with building_for("gpu"):
        cut = target_products.for_target(product, may_cut=True)
    assert contractions(cut) == [4_096, 4] and result_types(cut) == {jnp.dtype("float32")}
    assert cut.out_avals == product.out_avals
    _, value = gradient_of_hidden(jnp.matmul, "gpu", hidden, words)
    assert value.dtype == jnp.bfloat16
    exact = jax.grad(lambda h, w: jnp.square(h @ w).sum())(hidden.astype(jnp.float32), words.astype(jnp.float32))
    # Logits are rounded to 8 bits, and so is the result.
    np.testing.assert_allclose(value.astype(jnp.float32), exact, rtol=0, atol=2**-8 * np.abs(exact).max())


def test_products_of_integers_stay_whole():
    """Their sums wrap around, which those of floating point numbers do not."""
    left, right = jnp.ones((ROWS, WORDS), jnp.int8), jnp.ones((WORDS, WIDTH), jnp.int8)
    product = jax.make_jaxpr(lambda a, b: jax.lax.dot(a, b, preferred_element_type=jnp.int32))(left, right)
    with building_for("gpu"):
        assert target_products.for_target(product, may_cut=True) is product


def test_what_is_mapped_over_shards_stays_as_it_is():
    """Its program knows axes of a mesh by name."""
    mesh, hidden = Mesh(np.array(jax.devices()[:2]), ("x",)), jnp.ones((ROWS, 2 * WIDTH))
    words = jnp.ones((2 * WIDTH, WORDS))

    def product(hidden, words):
        return jax.lax.psum(hidden @ words, "x")

    mapped = jax.shard_map(product, mesh=mesh, in_specs=(P(None, "x"), P("x", None)), out_specs=P())
    with building_for("gpu"):
        value = jax.jit(jax.grad(lambda hidden: jaxpipe.memory_encoded(mapped)(hidden, words).sum()))(hidden)
    np.testing.assert_array_equal(value, np.full(hidden.shape, WORDS))


@pytest.mark.parametrize(
    ("platform", "words", "worth"),
    [("cpu", WORDS, 0), ("gpu", 4_096, 0), ("gpu", 100, 0), ("gpu", WORDS, 2**25)],
    ids=["cpu", "aligned", "short", "small"],
)
def test_other_contractions_stay_whole(monkeypatch, platform, words, worth):
    monkeypatch.setattr(target_products, "WORTH", worth)
    program, _ = gradient_of_hidden(jnp.matmul, platform, *arrays(words=words))
    assert contractions(program) == [WIDTH, words]


def test_contractions_with_large_results_or_of_sharded_arrays_stay_whole():
    shapes = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    large = jax.make_jaxpr(jnp.matmul)(shapes((4_096, WORDS)), shapes((WORDS, 768)))
    small = jax.make_jaxpr(jnp.matmul)(shapes((2_048, WORDS)), shapes((WORDS, 768)))
    with building_for("gpu"):
        assert contractions(target_products.for_target(large, may_cut=True)) == [WORDS]
        assert contractions(target_products.for_target(small, may_cut=True)) == [4_096, 4]
        assert contractions(target_products.for_target(small, may_cut=False)) == [WORDS]


@pytest.mark.parametrize(
    ("rows", "width", "words", "copies"),
    [
        (4_096, 512, 30_000, False),  # 16 sequences of 256 tokens, and the words of flax/examples/lm1b
        (2_048, 768, 30_000, False),
        (2_048, 768, 30_004, True),
        (1_024, 512, 30_016, False),
        (1_024, 512, 30_008, True),
    ],
)
def test_only_contractions_are_cut_of_which_xla_pads_copies(rows, width, words, copies):
    """``copies``: whether XLA's temporaries for the product are as large as its operands, compiled for an H100."""
    shapes = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    product = jax.make_jaxpr(jnp.matmul)(shapes((rows, words)), shapes((words, width)))
    with building_for("gpu"):
        cut = target_products.for_target(product, may_cut=True)
    assert (len(contractions(cut)) == 2) == copies
