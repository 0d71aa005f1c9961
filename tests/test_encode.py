"""The promise of `memory_encoded`: nothing changes but what is stored."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpipe
from examples.models import NNXDigitsCNN, init_mlp, mlp
from jaxpipe import memory_encoded, without_encoding
from tests.support.compare import FUSION, assert_same_bits, relative_l2
from tests.support.encoded_models import LINEN


SLOW = (
    "alexnet",
    "gpt2",
    "inception",
    "nin",
    "overfeat",
    "resnet18",
    "resnet50",
    "remat",
    "transformer",
    "unet",
    "unet_norm",
    "vit",
)  # each takes more than 10 seconds


def value_and_gradients(case, decorate):
    loss, arguments = case.losses(decorate)
    return jax.value_and_grad(loss, has_aux=True), arguments


@pytest.mark.core
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in LINEN])
def test_linen_loss_gradients_and_state_are_those_of_the_plain_model(name):
    plain, arguments = value_and_gradients(LINEN[name], lambda cls: cls)
    encoded, _ = value_and_gradients(LINEN[name], memory_encoded)
    expected, actual = jax.jit(plain)(*arguments), jax.jit(encoded)(*arguments)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert relative_l2(actual, expected) < FUSION


@pytest.mark.parametrize(
    "name",
    [
        "custom_vjp",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("scan", "cnn", "gpt2", "transformer", "unet", "vit")),
    ],
)
def test_bit_identical_where_every_operator_runs_alone(name):
    plain, arguments = value_and_gradients(LINEN[name], lambda cls: cls)
    encoded, _ = value_and_gradients(LINEN[name], memory_encoded)
    with jax.disable_jit():
        assert_same_bits(encoded(*arguments), plain(*arguments))


@pytest.mark.slow
def test_a_compiled_vision_transformer_is_within_two_ulps():
    """Ulps are those of the largest entry: XLA may fuse recomputed work otherwise, and add in another order."""
    plain, arguments = value_and_gradients(LINEN["vit"], lambda cls: cls)
    encoded, _ = value_and_gradients(LINEN["vit"], memory_encoded)
    (_, expected), (_, actual) = jax.jit(plain)(*arguments), jax.jit(encoded)(*arguments)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - b).max() <= 2 * np.spacing(np.abs(b).max())


def nnx_step(cls, how):
    model = cls(nnx.Rngs(0), width=4, dropout_rate=0.3)
    x = jax.random.normal(jax.random.key(0), (4, 8, 8, 1))

    def loss(model, x):
        return (model(x) ** 2).mean()

    if how == "nnx":
        value, gradients = nnx.jit(nnx.value_and_grad(loss))(model, x)
        return value, jax.tree.leaves(gradients), jax.tree.leaves(nnx.state(model))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def pure(params, rest):
        merged = nnx.merge(graphdef, params, rest, copy=True)
        return loss(merged, x), jax.tree.leaves(nnx.state(merged))

    (value, state), gradients = jax.jit(jax.value_and_grad(pure, has_aux=True))(params, rest)
    return value, jax.tree.leaves(gradients), state


@pytest.mark.parametrize(
    "how", [pytest.param("nnx", marks=pytest.mark.core), pytest.param("jax", marks=pytest.mark.versions)]
)
def test_nnx_loss_gradients_and_state_are_those_of_the_plain_model(how):
    (*expected, old), (*actual, new) = nnx_step(NNXDigitsCNN, how), nnx_step(memory_encoded(NNXDigitsCNN), how)
    assert relative_l2(actual, expected) < FUSION
    assert_same_bits(new, old)  # running statistics, counts and keys: the forward pass is the same program


def test_a_function_of_an_nnx_module_updates_it():
    def loss(model, x):
        return (model(x) ** 2).mean()

    x = jax.random.normal(jax.random.key(0), (4, 8, 8, 1))
    models = [NNXDigitsCNN(nnx.Rngs(0), width=4) for _ in range(2)]
    before = models[0].norm1.mean[...]
    expected = nnx.jit(nnx.value_and_grad(loss))(models[0], x)
    actual = nnx.jit(nnx.value_and_grad(memory_encoded(loss)))(models[1], x)
    assert relative_l2(jax.tree.leaves(actual), jax.tree.leaves(expected)) < FUSION
    assert_same_bits(nnx.state(models[1], nnx.BatchStat), nnx.state(models[0], nnx.BatchStat))
    assert not np.array_equal(models[1].norm1.mean[...], before)


def body(params, x):
    """Convolution, ReLU, pool, dense, tanh on ``[batch, 64]``."""
    x = x.reshape(-1, 8, 8, 1)
    x = jax.lax.conv_general_dilated(x, params["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.tanh(x.reshape(x.shape[0], -1) @ params["w"])


def data():
    k = jax.random.split(jax.random.key(0), 3)
    params = {
        "k": jax.random.normal(k[0], (3, 3, 1, 4)),
        "w": jax.random.normal(k[1], (64, 5)) / 64,
    }  # tanh far from saturation
    return params, jax.random.normal(k[2], (8, 64))


def squared(function):
    return lambda *args: (function(*args) ** 2).sum()


def scanned(function):
    def total(params, x):
        def step(carry, row):
            y = function(params, row[None])
            return carry + y.sum(), y

        carry, rows = jax.lax.scan(step, 0.0, x)
        return carry + (rows**2).sum()

    return jax.jit(jax.value_and_grad(total))


def sharded(check_vma, axis_type, outside):
    def transform(function):
        mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
        specs = {"mesh": mesh, "in_specs": (P(), P("data")), "check_vma": check_vma}

        def loss(params, x):
            return jax.lax.psum(squared(function)(params, x), "data")

        if outside:
            step = jax.value_and_grad(lambda p, x: jax.shard_map(loss, **specs, out_specs=P())(p, x))
        else:
            step = jax.shard_map(jax.value_and_grad(loss), **specs, out_specs=(P(), P()))

        def run(params, x):
            placed = jax.device_put((params, x), (jax.NamedSharding(mesh, P()), jax.NamedSharding(mesh, P("data"))))
            return jax.jit(step)(*placed)

        return run

    return transform


def explicitly_sharded(function):
    def plain(w, x):
        return jnp.tanh(jax.nn.relu(x @ w))

    layer = plain if function is body else memory_encoded(plain)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))

    def run(params, x):
        with jax.set_mesh(mesh):
            placed = jax.device_put(
                (params["w"], x), (jax.NamedSharding(mesh, P()), jax.NamedSharding(mesh, P("data")))
            )
            return jax.jit(jax.value_and_grad(squared(layer)))(*placed)

    return run


def one_output_of_a_scan(function):
    """Inside ``shard_map``; the other output's cotangent is zero."""

    def carry_only(params, x):
        carry, _ = jax.lax.scan(lambda c, r: (c + jnp.sin(function(params, r[None])).sum(), r * 2), x.sum(), x)
        return carry[None]

    return sharded(True, AxisType.Auto, False)(memory_encoded(carry_only) if function is not body else carry_only)


TRANSFORMS = {
    "grad": lambda f: jax.grad(squared(f)),
    "jit": lambda f: jax.jit(jax.value_and_grad(squared(f), argnums=(0, 1))),
    "vmap of grad": lambda f: jax.jit(lambda p, x: jax.vmap(jax.grad(squared(f)), (None, 0))(p, x[:, None])),
    "grad of vmap": lambda f: jax.jit(jax.grad(lambda p, x: jax.vmap(squared(f), (None, 0))(p, x[:, None]).sum())),
    "vmap of parameters": lambda f: jax.jit(
        lambda p, x: jax.vmap(jax.grad(squared(f)), (0, None))(jax.tree.map(lambda a: jnp.stack([a, -a]), p), x)
    ),
    "scan": scanned,
    "checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(squared(f)))),
    "cond": lambda f: jax.jit(jax.grad(lambda p, x: jax.lax.cond(x[0, 0] < 9, squared(f), lambda p, x: 0.0, p, x))),
    "shard_map": sharded(True, AxisType.Auto, False),
    "shard_map, explicit": sharded(True, AxisType.Explicit, False),
    "shard_map, unchecked": sharded(False, AxisType.Auto, False),
    "grad of shard_map": sharded(True, AxisType.Auto, True),
    "explicit mesh": explicitly_sharded,
    "one output of a scan": one_output_of_a_scan,
}


@pytest.mark.versions
@pytest.mark.parametrize("name", TRANSFORMS)
def test_works_under(name):
    transform = TRANSFORMS[name]
    assert relative_l2(transform(memory_encoded(body))(*data()), transform(body)(*data())) < FUSION


def test_gradients_reach_what_a_function_closes_over():
    def run(decorate):
        def loss(params, x):
            return squared(decorate(lambda x: body(params, x)))(x)

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(*data())

    assert relative_l2(run(memory_encoded), run(lambda f: f)) < FUSION


@pytest.mark.core
def test_nested_decorations():
    inner = memory_encoded(lambda x: jax.nn.relu(x) * 2, codecs={"mask"})
    outer = memory_encoded(lambda params, x: inner(body(params, x)))
    expected = jax.jit(jax.grad(squared(lambda params, x: jax.nn.relu(body(params, x)) * 2)))(*data())
    assert relative_l2(jax.jit(jax.grad(squared(outer)))(*data()), expected) < FUSION


def test_static_arguments_and_results():
    @memory_encoded
    def f(x, mode, *, scale=1, name=None):
        return {"y": x * scale if mode == "times" else x, "name": name, "count": 3}

    out = f(jnp.ones(2), "times", scale=4, name="n")
    assert out["y"].tolist() == [4, 4] and out["name"] == "n" and out["count"] == 3
    gradient = jax.grad(lambda x: f(x, "times", scale=4)["y"].sum())(jnp.ones(2))
    assert gradient.tolist() == [4, 4]


def test_gradient_of_a_python_number_without_jit():
    loss = memory_encoded(lambda params, x: jnp.sin(params["w"] * params["scale"] * x).sum())
    w, x = np.array([1, 2, 3], np.float32), np.array([0.5, -1, 2], np.float32)
    gradient = jax.grad(loss)({"w": jnp.asarray(w), "scale": 2.0}, jnp.asarray(x))
    np.testing.assert_allclose(gradient["scale"], (np.cos(2 * w * x) * w * x).sum(), rtol=1e-6)
    np.testing.assert_allclose(gradient["w"], np.cos(2 * w * x) * 2 * x, rtol=1e-6)


def test_constant_results_without_jit_are_arrays():
    @jaxpipe.memory_encoded
    def loss(w, x):
        return jnp.square(jax.nn.relu(x @ w)).mean(), {"rows": jnp.int32(len(x)), "rate": np.float32(0.1)}

    _, metrics = jax.value_and_grad(loss, has_aux=True)(jnp.ones((3, 2)), jnp.ones((4, 3)))[0]
    assert all(isinstance(x, jax.Array) for x in metrics.values())
    assert {name: (x.dtype, x.weak_type) for name, x in metrics.items()} == {
        "rows": (jnp.int32, False),
        "rate": (jnp.float32, False),
    }


def test_integer_and_key_arguments():
    @memory_encoded
    def f(table, rows, key):
        x = table[rows]
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)

    arguments = jax.random.normal(jax.random.key(0), (7, 3)), jnp.array([1, 5, 5]), jax.random.key(1)
    expected = jax.grad(squared(f.__wrapped__))(*arguments)
    assert_same_bits(jax.grad(squared(f))(*arguments), expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
def test_mlp_function_in_several_precisions(dtype):
    params = jax.tree.map(lambda a: a.astype(dtype), init_mlp(jax.random.key(0), [8, 16, 16, 3]))
    x = jax.random.normal(jax.random.key(1), (5, 8), dtype)
    plain, encoded = (jax.value_and_grad(squared(f)) for f in (mlp, memory_encoded(mlp)))
    with jax.disable_jit():
        assert_same_bits(encoded(params, x), plain(params, x))


@pytest.mark.parametrize("codecs", ["fast", "smallest", (), {"mask"}, ["index", "alias"], ("recompute",)])
def test_every_set_of_codecs_gives_the_same_gradients(codecs):
    # Not to the last bit: XLA of jax 0.12 rounds a matrix product by what it is fused with, on some processors.
    gradients = jax.jit(jax.grad(squared(memory_encoded(body, codecs=codecs))))(*data())
    assert relative_l2(gradients, jax.jit(jax.grad(squared(body)))(*data())) < FUSION


def test_user_code_runs_once_for_each_call():
    calls = []

    @memory_encoded
    def f(x):
        calls.append(1)
        return jnp.sin(x) ** 2

    jax.value_and_grad(f)(1.0 * jnp.ones(()))
    assert len(calls) == 1


def test_side_effects_happen_once(capfd):
    @memory_encoded
    def f(x):
        jax.debug.print("seen {}", x)
        return jnp.sin(x) ** 2

    jax.jit(jax.grad(f))(jnp.ones(())).block_until_ready()
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 1


def test_without_encoding():
    for f in (memory_encoded(jax.nn.relu), jax.jit(memory_encoded(jax.nn.relu))):
        encoded = str(jax.make_jaxpr(f)(jnp.ones(3)))
        with without_encoding():
            plain = str(jax.make_jaxpr(f)(jnp.ones(3)))
        assert "jaxpipe" in encoded and "jaxpipe" not in plain


@pytest.mark.core
@pytest.mark.parametrize(
    ("derivative", "words"),
    [
        (lambda f: jax.jvp(f, (jnp.ones(3),), (jnp.ones(3),)), "Forward-mode"),
        (lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(jnp.ones(3)), "Forward-mode"),
        (lambda f: jax.jacfwd(f)(jnp.ones(3)), "Forward-mode"),
        (lambda f: jax.hessian(f)(jnp.ones(3)), "second derivative"),
        (lambda f: jax.jit(jax.hessian(jax.jit(f)))(jnp.ones(3)), "second derivative"),
        (lambda f: jax.grad(lambda x: jax.grad(f)(x).sum())(jnp.ones(3)), "second derivative"),
    ],
    ids=["jvp", "jvp in jit", "jacfwd", "hessian", "hessian of jit", "grad of grad"],
)
def test_other_derivatives_are_refused(derivative, words):
    f = memory_encoded(lambda x: (jax.nn.relu(x) ** 2).sum())
    with pytest.raises(jaxpipe.DifferentiationError, match=rf"(?s){words}.*Use the undecorated model"):
        derivative(f)


def test_the_way_of_first_order_meta_learning_that_the_error_names():
    def loss(w, x):
        return (jnp.tanh(jnp.tanh(x @ w) @ w) ** 2).mean()

    def adapted(inner, w, x):
        return loss(w - 0.1 * jax.lax.stop_gradient(inner(w, x)), 2 * x)

    w, x = (jax.random.normal(jax.random.key(k), (8, 8)) for k in range(2))
    encoded = jax.grad(memory_encoded(loss))
    with pytest.raises(jaxpipe.DifferentiationError, match=re.escape("jax.grad(loss)(jax.lax.stop_gradient(params))")):
        jax.grad(functools.partial(adapted, encoded))(w, x)
    given = jax.grad(functools.partial(adapted, lambda w, x: encoded(jax.lax.stop_gradient(w), x)))(w, x)
    # Two derivatives that fuse their sums in their own ways: float32 rounding.
    np.testing.assert_allclose(given, jax.grad(functools.partial(adapted, jax.grad(loss)))(w, x), rtol=1e-4, atol=1e-6)


def test_symbolic_shapes_are_refused_where_bytes_count():
    @memory_encoded
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    w, rows = jnp.eye(3), jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 3"), jnp.float32)
    exported = jax.export.export(jax.jit(loss))(w, rows)
    np.testing.assert_allclose(exported.call(w, jnp.ones((5, 3))), 15 * np.tanh(1), rtol=1e-6)
    with pytest.raises(jaxpipe.ModelError, match=r"\(rows\).*shapes of numbers"):
        jax.export.export(jax.jit(jax.grad(loss)))(w, rows)


def test_a_linearized_function_is_transposed():
    _, linear = jax.linearize(memory_encoded(lambda x: jnp.tanh(x).sum()), jnp.arange(3.0))
    (gradient,) = jax.linear_transpose(linear, jnp.arange(3.0))(jnp.ones(()))
    np.testing.assert_allclose(gradient, 1 / np.cosh(np.arange(3.0)) ** 2, rtol=1e-5)


def test_jvp_of_a_jitted_function_is_refused_by_jax():
    # JAX meets the custom_vjp inside an already traced program; DifferentiationError is a TypeError too.
    f = jax.jit(memory_encoded(lambda x: x**2))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(f, (jnp.ones(()),), (jnp.ones(()),))


@pytest.mark.parametrize("target", [3, "net", [jnp.sin], dict])
def test_neither_module_nor_function(target):
    with pytest.raises(jaxpipe.ModelError, match=r"decorates a flax.linen.Module class, a flax.nnx.Module class or"):
        memory_encoded(target)


def test_an_instance_is_not_a_class():
    with pytest.raises(jaxpipe.ModelError, match=r"instance of DigitsCNN.*Decorate the class"):
        memory_encoded(NNXDigitsCNN(nnx.Rngs(0)))


def test_an_nnx_module_without_call():
    class Silent(nnx.Module):
        pass

    with pytest.raises(jaxpipe.ModelError, match="Silent, which has no __call__"):
        memory_encoded(Silent)


@pytest.mark.parametrize("codecs", ["zip", {"mask", "zip"}, ["mask", 3]])
def test_unknown_codecs(codecs):
    with pytest.raises(jaxpipe.ModelError, match=r"unknown codec .*Use one of the sets 'fast', 'smallest'"):
        memory_encoded(lambda x: x, codecs=codecs)


def test_arrays_of_objects():
    with pytest.raises(jaxpipe.DifferentiationError, match=r"Argument 1 is a NumPy array of dtype <U1"):
        memory_encoded(lambda x, names: x)(jnp.ones(2), np.array(["a", "b"]))


@pytest.mark.optimized
def test_a_loop_behind_stop_gradient_needs_no_derivative():
    """A fixed point, differentiated through its last iteration."""

    def loss(w, x):
        def iterate(y):
            return jnp.tanh(y @ w + x)

        _, y = jax.lax.while_loop(lambda carry: carry[0] < 5, lambda carry: (carry[0] + 1, iterate(carry[1])), (0, x))
        rows = jnp.argmax(jax.lax.while_loop(lambda y: y.sum() < 3, lambda y: y + jnp.abs(w).sum(), x), axis=1)
        return (iterate(jax.lax.stop_gradient(y)) ** 2)[jnp.arange(8), rows].mean()

    w, x = jax.random.normal(jax.random.key(0), (16, 16)) / 8, jax.random.normal(jax.random.key(1), (8, 16))
    expected = jax.jit(jax.grad(loss, argnums=(0, 1)))(w, x)
    given = jax.jit(jax.grad(jaxpipe.memory_encoded(loss), argnums=(0, 1)))(w, x)
    jax.tree.map(np.testing.assert_array_equal, given, expected)
