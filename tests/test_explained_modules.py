"""Explanations of steps that make their NNX modules themselves, and the lines that are shown, as they are typed."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxpipe
from jaxpipe.costs.reserved_bytes import reserved_bytes


pytestmark = pytest.mark.compiles

ROWS, WIDTH, BLOCKS = 256, 32, 4
OPTIMIZER = optax.adam(1e-3)
X, Y = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), jax.ShapeDtypeStruct((ROWS,), jnp.int32)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.up = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(self.norm(x))))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class RematBlock(Block):
    __call__ = nnx.remat(Block.__call__)


class RematNet(Net):
    def __init__(self, rngs):
        self.blocks = nnx.List([RematBlock(rngs) for _ in range(BLOCKS)])


def cross_entropy(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def optax_step(loss):
    def step(params, moments, x, y):
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        updates, moments = OPTIMIZER.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    return step


def merged_in_the_loss(cls):
    graph, params = nnx.split(cls(nnx.Rngs(0)))
    step = optax_step(lambda params, x, y: cross_entropy(nnx.merge(graph, params)(x), y))
    return step, (params, OPTIMIZER.init(params), X, Y)


def applied_by_the_graph(cls):
    graph, params = nnx.split(cls(nnx.Rngs(0)))
    step = optax_step(lambda params, x, y: cross_entropy(graph.apply(params)(x)[0], y))
    return step, (params, OPTIMIZER.init(params), X, Y)


def merged_with_the_optimizer(cls):
    model = cls(nnx.Rngs(0))

    def step(graph, state, x, y):
        model, optimizer = nnx.merge(graph, state)
        value, gradients = nnx.value_and_grad(lambda model: cross_entropy(model(x), y))(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), value

    return step, (*nnx.split((model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param))), X, Y)


def held_by_the_optimizer(cls):
    def step(optimizer, x, y):
        value, gradients = nnx.value_and_grad(lambda model: cross_entropy(model(x), y))(optimizer.model)
        optimizer.update(gradients)
        return value

    return step, (nnx.ModelAndOptimizer(cls(nnx.Rngs(0)), OPTIMIZER), X, Y)


def needed_bytes(make, cls):
    step, arguments = make(cls)
    jit = nnx.jit if make is held_by_the_optimizer else jax.jit
    m = jit(step).lower(*arguments).compile().memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(merged_in_the_loss, marks=pytest.mark.versions),
        applied_by_the_graph,
        merged_with_the_optimizer,
        held_by_the_optimizer,
    ],
)
def test_measures_of_modules_need_what_is_compiled_with_their_lines_written(make):
    step, arguments = make(Net)
    explanation = jaxpipe.explain(step, *arguments)
    assert explanation.refused == () and explanation.total_bytes == needed_bytes(make, Net)
    parameters = sum(x.nbytes for x in jax.tree.leaves(nnx.state(Net(nnx.Rngs(0)))))
    causes = explanation.bytes_by_cause()
    assert causes["parameters"] == parameters and 0 <= causes["optimizer state"] - 2 * parameters <= 8  # and counts
    assert any(part.name.startswith("Net/blocks/0/up/") for part in explanation.parts)
    by_line = {m.line: m.bytes for m in explanation.measures}
    assert by_line["@jaxpipe.memory_encoded  # above class Net"] == needed_bytes(make, jaxpipe.memory_encoded(Net))
    with_remat = needed_bytes(make, RematNet)  # which XLA:CPU undoes with jax 0.10
    assert by_line.get("@nnx.remat  # above Block.__call__") == (
        with_remat if with_remat < explanation.total_bytes else None
    )


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(4 * WIDTH)(x if train else -x)))


class KeywordBlock(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        return LinenBlock()(x, train)


def linen_step(block, by_position):
    class LinenNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            for k in range(BLOCKS):
                x = block(name=f"block_{k}")(x, True) if by_position else block(name=f"block_{k}")(x, train=True)
            return x

    def step(params, x):
        return jax.value_and_grad(lambda params: (LinenNet().apply(params, x) ** 2).mean())(params)

    return step, (jax.eval_shape(LinenNet().init, jax.random.key(0), X), X)


def remat_line(block):
    step, arguments = linen_step(block, by_position=False)
    if jax.__version_info__ < (0, 11):
        pytest.skip("XLA:CPU undoes checkpoints with jax 0.10")
    return [m.line for m in jaxpipe.explain(step, *arguments).measures if m.name.startswith("compute")]


def test_a_keyword_that_is_no_array_is_static_by_position():
    (line,) = remat_line(LinenBlock)
    code, note = line.split("  # ")
    assert note == "below class LinenBlock; pass train by position"
    block = {"nn": nn, "LinenBlock": LinenBlock}
    exec(code, block)
    step, arguments = linen_step(block["LinenBlock"], by_position=True)
    jax.jit(step).lower(*arguments)


def test_a_keyword_alone_has_to_become_an_argument_by_position():
    (line,) = remat_line(KeywordBlock)
    assert line.endswith("  # below class KeywordBlock; let it take train by position")
    assert "static_argnums=(2,)" in line


class AnyKeywords(nn.Module):
    @nn.compact
    def __call__(self, x, **options):
        return LinenBlock()(x, **options)


class WithHelper(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return self.between(x, train, times=1)

    def between(self, x, train, times):
        return LinenBlock()(times * x, train)


def test_no_line_is_shown_that_cannot_be_typed():
    assert remat_line(AnyKeywords) == []


def test_arguments_of_helper_methods_are_none_of_the_call():
    assert remat_line(WithHelper) == [
        "WithHelper = nn.remat(WithHelper, static_argnums=(2,))  # below class WithHelper; pass train by position"
    ]


def test_each_of_two_models_of_a_class_is_computed_again():
    def step(first, second, x, y):
        def loss(models):
            return cross_entropy(models[0](x), y) + cross_entropy(models[1](x), y)

        return nnx.value_and_grad(loss)((first, second))

    plain, remat = ((Net(nnx.Rngs(0)), Net(nnx.Rngs(1)), X, Y), (RematNet(nnx.Rngs(0)), RematNet(nnx.Rngs(1)), X, Y))
    explanation = jaxpipe.explain(step, *plain)
    (shown,) = [m for m in explanation.measures if m.name.startswith("compute")] or [None]
    m = nnx.jit(step).lower(*remat).compile().memory_analysis()
    needed = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes
    if shown is None:  # XLA:CPU undoes checkpoints with jax 0.10
        assert needed >= explanation.total_bytes
    else:
        assert (shown.bytes, shown.products) == (needed, 2 * BLOCKS)


@pytest.mark.parametrize("place", [2, 0])
def test_a_frozen_teacher_is_neither_donated_nor_trained(place):
    def trained(model, optimizer, teacher, x):
        def loss(model):
            return jnp.square(model(x) - jax.lax.stop_gradient(teacher(x))).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    def step(*args):
        modules = list(args[:3])
        teacher = modules.pop(place)
        return trained(*modules, teacher, args[3])

    def arguments(optimizer, rows):
        model, teacher = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
        modules = [model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)]
        modules.insert(place, teacher)
        return *modules, jnp.ones((rows, WIDTH))

    measures = {m.name: m for m in jaxpipe.explain(step, *arguments(OPTIMIZER, ROWS)).measures}
    assert measures["donate the state"].line == f"nnx.jit(step, donate_argnums={(0, 1) if place else (1, 2)})"
    half = nnx.jit(step).lower(*arguments(optax.MultiSteps(OPTIMIZER, 2), ROWS // 2)).compile()
    # The sums are those of the student alone; of steps that are not applied XLA copies a part for their condition.
    assert measures["half the batch, twice per update"].bytes == pytest.approx(reserved_bytes(half), rel=0.03)
