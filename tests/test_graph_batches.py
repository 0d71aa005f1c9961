"""Batches without an axis of examples, as those of graphs: nodes, edges and labels of different numbers."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from tests.support.compare import relative_l2
from tests.support.meshes import mesh_of


GRAPHS, NODES, EDGES = 4, 12, 20
RUNTIMES = ["mpmd", "spmd"]

#: XLA fuses a stage's sums otherwise than the whole network's: last bits of float32.
FUSED = 1e-6


class GraphNet(nn.Module):
    """Sums of messages along the edges, and of nodes for each graph; also what each node becomes."""

    @nn.compact
    def __call__(self, batch):
        h = nn.Dense(8)(batch["nodes"])
        for _ in range(3):
            messages = nn.tanh(nn.Dense(8)(jnp.concatenate([h[batch["senders"]], h[batch["receivers"]]], -1)))
            h = h + jax.ops.segment_sum(messages, batch["receivers"], len(h))
        return h, nn.Dense(2)(jax.ops.segment_sum(h, batch["graph"], len(batch["labels"])))


def batch_of(seed, nodes=NODES, edges=EDGES, graphs=GRAPHS):
    generator = np.random.default_rng(seed)
    senders, receivers = generator.integers(0, nodes, (2, edges))
    return {
        "nodes": generator.normal(size=(nodes, 3)).astype(np.float32),
        "senders": senders,
        "receivers": receivers,
        "graph": np.sort(generator.integers(0, graphs, nodes)),
        "labels": generator.integers(0, 2, graphs),
    }


def loss(model, batch):
    _, logits = model(batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return losses.mean(), {"worst": losses.max(), "of each": losses}


def loss_alone(model, batch):
    return loss(model, batch)[0]


def pipeline_of(function=loss, batch=None, *, stages=2, replicas=None, m=1, **options):
    arguments = {"optimizer": optax.sgd(0.1), "num_microbatches": m, "profile": "analytic"} | options
    batch = batch_of(0) if batch is None else batch
    return jaxpipe.partition(GraphNet(), mesh_of(stages, replicas), batch, loss=function, **arguments)


@pytest.fixture(scope="module")
def variables():
    return GraphNet().init(jax.random.key(1), batch_of(0))


def plain(variables, batch):
    """Loss, metrics and gradients of ``jax.value_and_grad``."""

    @jax.jit
    def of(variables, batch):
        return jax.value_and_grad(lambda v: loss(lambda b: GraphNet().apply(v, b), batch), has_aux=True)(variables)

    return of(variables, batch)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_one_micro_batch_is_the_whole_batch(variables, runtime):
    batch = batch_of(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one micro-batch was asked for
        pipeline = pipeline_of(runtime=runtime, evaluate=loss, predict=lambda model, batch: model(batch))
    assert pipeline.plan.num_microbatches == 1
    state = pipeline.init(jax.random.key(0), variables=variables)
    expected = plain(variables, batch)
    (value, metrics), gradients = expected
    named = {"loss": value, **metrics}
    assert relative_l2(pipeline.value_and_grad(state, batch), ((value, named), gradients)) < FUSED
    assert relative_l2(pipeline.evaluate(state, batch), named) < FUSED
    nodes, logits = pipeline.predict(state, batch)
    assert (nodes.shape, logits.shape) == ((NODES, 8), (GRAPHS, 2))
    assert relative_l2((nodes, logits), GraphNet().apply(variables, batch)) < FUSED
    state, metrics = pipeline.step(state, batch)
    assert relative_l2(metrics["loss"], value) < FUSED
    updated = jax.tree.map(lambda p, g: p - 0.1 * g, variables, gradients)
    assert relative_l2(pipeline.parameters(state), updated) < FUSED


def test_batches_of_other_sizes(variables):
    """Also of sizes that are equal by chance: what has no examples is not cut."""
    pipeline = pipeline_of(loss_alone, evaluate=loss_alone, runtime="mpmd")
    state = pipeline.init(jax.random.key(0), variables=variables)
    for batch in (batch_of(1, nodes=9, edges=15), batch_of(2, nodes=6, edges=6, graphs=6), batch_of(3, edges=0)):
        (value, _), gradients = plain(variables, batch)
        (got, _), got_gradients = pipeline.value_and_grad(state, batch)
        assert relative_l2((got, got_gradients), (value, gradients)) < FUSED
        assert relative_l2(pipeline.evaluate(state, batch)["loss"], value) < FUSED


def test_one_micro_batch_is_the_default_with_a_warning():
    with pytest.warns(jaxpipe.JaxpipeWarning, match=r"num_microbatches=1 was chosen.*batch\['labels'\]: 4.*np.stack"):
        pipeline = pipeline_of(m=None)
    assert pipeline.plan.num_microbatches == 1


@pytest.mark.parametrize(("m", "replicas"), [(2, None), (1, 2)])
def test_more_are_refused_with_the_way_out(m, replicas):
    with pytest.raises(jaxpipe.BatchError, match=rf"num_microbatches={m} .*differ in size.*np\.stack.*x\[0\]"):
        pipeline_of(m=m, replicas=replicas)


@pytest.mark.core
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_way_out(variables, runtime):
    """Batches of graphs as the error says, one for each micro-batch."""
    batches = [batch_of(k) for k in range(4)]
    batch = jax.tree.map(lambda *x: np.stack(x), *batches)

    def of_stacked(model, batch):
        return loss_alone(model, jax.tree.map(lambda x: x[0], batch))

    pipeline = jaxpipe.partition(
        GraphNet(),
        mesh_of(2, 2),
        batch,
        loss=of_stacked,
        optimizer=optax.sgd(0.1),
        num_microbatches=2,
        profile="analytic",
        runtime=runtime,
    )
    _, gradients = pipeline.value_and_grad(pipeline.init(jax.random.key(0), variables=variables), batch)
    expected = jax.tree.map(lambda *g: sum(g) / 4, *[plain(variables, b)[1] for b in batches])
    assert relative_l2(gradients, expected) < FUSED


def test_a_batch_of_graphs_for_a_plan_that_cuts(variables):
    batch = {name: np.zeros((8, *x.shape[1:]), x.dtype) for name, x in batch_of(0).items()}
    pipeline = pipeline_of(loss_alone, batch, m=4, runtime="mpmd")
    state = pipeline.init(jax.random.key(0), variables=variables)
    with pytest.raises(jaxpipe.BatchError, match=r"num_microbatches=4 .*differ in size"):
        pipeline.step(state, batch_of(0))


def test_a_profile_of_a_batch_of_graphs(variables):
    options = {"loss": loss_alone, "variables": variables, "source": "analytic"}
    profile = jaxpipe.profile_model(GraphNet(), batch_of(0), **options, num_microbatches=1)
    assert profile == pipeline_of(loss_alone).profile
    with pytest.raises(jaxpipe.BatchError, match="differ in size"):
        jaxpipe.profile_model(GraphNet(), batch_of(0), **options, num_microbatches=2)
