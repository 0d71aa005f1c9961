"""The models that pipelines are tested on, and plain training with the same micro-batches to compare with."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxpipe
from examples import models as zoo
from jaxpipe.array_types import PyTree
from tests.support.compare import arrays, assert_same_bits, relative_l2
from tests.support.meshes import mesh_of


Model = Callable[..., jax.Array]
Batch = Mapping[str, jax.Array]
Loss = Callable[[Model, Batch], jax.Array]

#: Rows of a batch: 1, 4 and 8 micro-batches for one or two replicas.
ROWS = 16


class Convolutions(nn.Module):
    """Without a bias of the convolution, whose gradient XLA adds up in another order where it fuses another program."""

    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(nn.Conv(4, (3, 3), use_bias=False)(x)), (2, 2), strides=(2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(16)(x.reshape(len(x), -1))))


@dataclass(frozen=True)
class Case:
    """A model, its loss, and the same computation without jaxpipe.

    ``plain(params, state, key, batch) -> (loss, new state)`` for one micro-batch; ``start(key)`` gives params and
    state; ``variables(params, state)`` is the model's own layout.
    """

    model: nn.Module | nnx.Module | Model
    loss: Loss
    batch: Batch
    start: Callable[[jax.Array], tuple[PyTree, PyTree]]
    plain: Callable[[PyTree, PyTree, jax.Array, Batch], tuple[jax.Array, PyTree]]
    variables: Callable[[PyTree, PyTree], PyTree]


def images(*shape: int, rows: int, classes: int = 10) -> dict[str, jax.Array]:
    return {
        "x": jax.random.normal(jax.random.key(1), (rows, *shape)),
        "y": jax.random.randint(jax.random.key(2), (rows,), 0, classes),
    }


def entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def linen(module: nn.Module, batch: Batch, call: Loss) -> Case:
    """A Linen module whose loss is ``call(apply, batch)``; ``apply(*args, **kwargs)`` runs the module."""

    def start(key: jax.Array) -> tuple[PyTree, PyTree]:
        def make() -> dict[str, PyTree]:
            collections: dict[str, PyTree] = {}

            def initialize(*args: jax.Array, **kwargs: Any) -> jax.Array:
                result, variables = module.init_with_output(key, *args, **kwargs)
                collections.update(variables)
                return result

            call(initialize, jax.tree.map(jnp.zeros_like, batch))
            return collections

        state = jax.jit(make)()
        return state.pop("params"), state

    def plain(params: PyTree, state: PyTree, key: jax.Array, batch: Batch) -> tuple[jax.Array, PyTree]:
        new = state

        def apply(*args: jax.Array, **kwargs: Any) -> jax.Array:
            nonlocal new
            rngs = {"dropout": key}
            result, new = module.apply({"params": params, **state}, *args, rngs=rngs, mutable=list(state), **kwargs)
            return result

        loss = call(apply, batch)
        return loss, new

    return Case(module, call, batch, start, plain, lambda params, state: {"params": params, **state})


def classifier(**kwargs: bool) -> Loss:
    return lambda model, batch: entropy(model(batch["x"], **kwargs), batch["y"])


def cnn_linen(rows: int) -> Case:
    return linen(zoo.LinenDigitsCNN(width=4), images(8, 8, 1, rows=rows), classifier(train=True))


def nnx_case(build: Callable[[nnx.Rngs], nnx.Module], batch: Batch) -> Case:
    """Return a classifier of images that ``build(rngs)`` makes; its values are those of ``nnx.Rngs(0)``."""
    graphdef, _, _ = nnx.split(build(nnx.Rngs(0)), nnx.Param, ...)

    def start(key: jax.Array) -> tuple[PyTree, PyTree]:
        del key  # a concrete module keeps its values
        return nnx.split(build(nnx.Rngs(0)), nnx.Param, ...)[1:]

    def plain(params: PyTree, state: PyTree, key: jax.Array, batch: Batch) -> tuple[jax.Array, PyTree]:
        del key  # no dropout
        model = nnx.merge(graphdef, params, state, copy=True)
        return entropy(model(batch["x"]), batch["y"]), nnx.state(model, nnx.Not(nnx.Param))

    return Case(build(nnx.Rngs(0)), classifier(), batch, start, plain, nnx.merge_state)


def cnn_nnx(rows: int) -> Case:
    return nnx_case(lambda rngs: zoo.NNXDigitsCNN(rngs, width=4), images(8, 8, 1, rows=rows))


def resnet(rows: int) -> Case:
    model = zoo.ResNet18(width=4, stage_sizes=(1, 1, 1))
    return linen(model, images(8, 8, 3, rows=rows), classifier(train=True))


def unet(rows: int) -> Case:
    def loss(model: Model, batch: Batch) -> jax.Array:
        return jnp.square(model(batch["x"])[..., 0] - batch["x"][..., 0]).mean()

    return linen(zoo.UNet(width=4, depth=2), {"x": jax.random.normal(jax.random.key(1), (rows, 8, 8, 3))}, loss)


def transformer(rows: int) -> Case:
    model = zoo.Transformer(vocab=20, num_layers=2, width=16, num_heads=2, max_length=8, dropout_rate=0.2, tied=False)

    def loss(model: Model, batch: Batch) -> jax.Array:
        logits = model(batch["tokens"], train=True)
        return entropy(logits[:, :-1], batch["tokens"][:, 1:])

    return linen(model, {"tokens": jax.random.randint(jax.random.key(1), (rows, 8), 0, 20)}, loss)


def mlp(rows: int) -> Case:
    params = zoo.init_mlp(jax.random.key(0), [12, 16, 16, 16, 10])
    model = jax.tree_util.Partial(zoo.mlp, params)

    def plain(params: PyTree, state: PyTree, key: jax.Array, batch: Batch) -> tuple[jax.Array, PyTree]:
        return entropy(params(batch["x"]), batch["y"]), state

    return Case(model, classifier(), images(12, rows=rows), lambda _: (model, ()), plain, lambda params, _: params)


CASES: dict[str, Callable[[int], Case]] = {
    "cnn-linen": cnn_linen,
    "cnn-nnx": cnn_nnx,
    "resnet": resnet,
    "unet": unet,
    "transformer": transformer,
    "mlp": mlp,
}


@functools.cache
def case_of(name: str) -> Case:
    """Return the case of a name with a batch of ``ROWS``."""
    return CASES[name](ROWS)


def pipeline_of(case: str | Case, stages: int, m: int, replicas: int | None = None, **options: Any) -> jaxpipe.Pipeline:
    """Return a case's pipeline."""
    case = case_of(case) if isinstance(case, str) else case
    options = {"optimizer": optax.sgd(0.05, momentum=0.9), "profile": "analytic", **options}
    mesh = mesh_of(stages, replicas)
    return jaxpipe.partition(case.model, mesh, case.batch, loss=case.loss, num_microbatches=m, **options)


def plain_gradients(
    case: Case, params: PyTree, state: PyTree, keys: jax.Array, replicas: int, m: int
) -> tuple[jax.Array, PyTree, PyTree]:
    """Loss, gradient and new state of one step of plain training with ``replicas * m`` micro-batches.

    Replica r takes the micro-batches from r*m on; state folds over those, then is averaged over replicas.
    """

    gradient_of = jax.jit(jax.value_and_grad(case.plain, has_aux=True))
    add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
    rows = jax.tree.map(lambda x: x.reshape(replicas * m, -1, *x.shape[1:]), case.batch)
    sums = []
    for r in range(replicas):
        now, total = state, None
        for j in range(r * m, (r + 1) * m):
            microbatch = jax.tree.map(lambda x, j=j: x[j], rows)
            (loss, now), gradient = gradient_of(params, now, keys[j], microbatch)
            total = (loss, gradient) if total is None else add(total, (loss, gradient))
        sums.append((total, now))
    (loss, gradient), state = sums[0]
    for other, now in sums[1:]:
        loss, gradient = add((loss, gradient), other)
        state = add(state, now)
    total = replicas * m
    state = jax.tree.map(lambda x: x / replicas if jnp.issubdtype(x.dtype, jnp.inexact) else x // replicas, state)
    return loss / total, jax.tree.map(lambda g: g / total, gradient), state


def check_training(
    case: Case, pipeline: jaxpipe.Pipeline, optimizer: optax.GradientTransformation, tolerance: float
) -> None:
    """Compare two steps of four micro-batches with plain training: values, gradients and variables."""
    params, variables = case.start(jax.random.key(3))
    state, slots = pipeline.init(jax.random.key(3)), optimizer.init(params)
    assert_same_bits(arrays(pipeline.parameters(state)), arrays(case.variables(params, variables)))
    for _ in range(2):
        keys = jnp.stack([pipeline.microbatch_key(state, j) for j in range(4)])
        loss, gradient, variables = plain_gradients(case, params, variables, keys, 1, 4)
        (value, _), ours = pipeline.value_and_grad(state, case.batch)
        assert abs(float(value) - float(loss)) <= tolerance * abs(float(loss))
        assert [x.shape for x in arrays(ours)] == [x.shape for x in arrays(gradient)]
        assert relative_l2(arrays(ours), arrays(gradient)) < tolerance
        updates, slots = jax.jit(optimizer.update)(gradient, slots, params)
        params = optax.apply_updates(params, updates)
        state, _ = pipeline.step(state, case.batch)
    assert relative_l2(arrays(pipeline.parameters(state)), arrays(case.variables(params, variables))) < tolerance
