"""Measured and assumed densities; maps that do not fit; the metrics that tell."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from jaxpipe import Density, ModelError, measure_density, memory_encoded, residual_report, with_density
from tests.support.compare import assert_same_bits


def network(x, ws):
    for w in ws:
        x = jax.nn.relu(x @ w)
    return jnp.square(x).sum()


def data(offset=0.0):
    keys = jax.random.split(jax.random.key(0), 4)
    return jax.random.normal(keys[0], (32, 128)), [jax.random.normal(k, (128, 128)) / 11 + offset for k in keys[1:]]


encoded = memory_encoded(network, codecs="smallest")


@pytest.mark.core
def test_density_is_the_fraction_that_is_not_zero():
    x, ws = data()
    hidden, expected = x, []
    for w in ws:
        hidden = jax.nn.relu(hidden @ w)
        expected.append(float(np.count_nonzero(hidden) / hidden.size))
    measured = measure_density(encoded, x, ws)
    fractions = [fraction for name, fraction in measured.fractions.items() if name.startswith("relu")]
    assert fractions == pytest.approx(expected, rel=1e-6)  # an average of float32


def test_room_follows_the_measurement():
    x, ws = data(offset=-0.05)
    measured = measure_density(encoded, x, ws)
    assumed = residual_report(encoded, x, ws).total_bytes
    with with_density(measured):
        less = residual_report(encoded, x, ws)
        assert_same_bits(jax.jit(jax.grad(encoded, (0, 1)))(x, ws), jax.jit(jax.grad(network, (0, 1)))(x, ws))
    assert less.total_bytes < assumed
    assert {"bitmap", "csr"} & {row.storage for row in less.tensors}


def test_a_nearly_empty_map_is_stored_as_csr_and_a_full_one_as_it_is():
    x, ws = data()
    names = [name for name in measure_density(encoded, x, ws).fractions if name.startswith("relu")]
    for fraction, storage in ((0.03, "csr"), (0.3, "bitmap"), (0.9, "keep")):
        with with_density(Density(dict.fromkeys(names, fraction))):
            rows = [row for row in residual_report(encoded, x, ws).tensors if row.shape == (32, 128)]
        assert storage in {row.storage for row in rows}


@pytest.mark.parametrize(
    "fraction", [0.0, pytest.param(0.2, marks=pytest.mark.slow), pytest.param(0.45, marks=pytest.mark.core)]
)
def test_overflowing_maps_are_computed_again(fraction):
    """Room for less than there is, in one map or in all of them: the gradient is the same."""
    x, ws = data()
    names = [name for name in measure_density(encoded, x, ws).fractions if name.startswith("relu")]
    expected = jax.jit(jax.grad(network, (0, 1)))(x, ws)
    for tight in (names, names[:1], names[-1:]):
        with with_density(Density({**dict.fromkeys(names, 0.55), **dict.fromkeys(tight, fraction)})):
            assert_same_bits(jax.jit(jax.grad(encoded, (0, 1)))(x, ws), expected)
            assert jaxpipe.count_overflows(encoded, x, ws) >= 1


def test_a_density_of_mapped_examples_is_that_of_each():
    x, ws = data(offset=-0.05)

    def mapped(x, ws):
        return jax.vmap(encoded, (0, None))(x, ws).sum()

    measured, alone = measure_density(mapped, x[None], ws), measure_density(encoded, x, ws)
    names = [name for name in alone.fractions if name.startswith("relu")]
    assert names and [measured.fractions[name] for name in names] == [alone.fractions[name] for name in names]
    with with_density(alone):
        expected = residual_report(encoded, x, ws).total_bytes
    with with_density(measured):
        assert residual_report(mapped, x[None], ws).total_bytes == expected


def test_maps_of_the_branch_that_is_taken_are_counted():
    x, ws = data()
    names = [name for name in measure_density(encoded, x, ws).fractions if name.startswith("relu")]

    def branches(x, ws):
        return jax.lax.cond(x.sum() < np.inf, lambda x: encoded(x, ws), lambda x: encoded(0 * x, ws), x)

    for fraction in (0.2, 0.9):
        with with_density(Density(dict.fromkeys(names, fraction))):
            assert jaxpipe.count_overflows(branches, x, ws) == jaxpipe.count_overflows(encoded, x, ws)


def test_nothing_overflows_at_the_measured_density():
    x, ws = data()
    with with_density(measure_density(encoded, x, ws)):
        assert jaxpipe.count_overflows(encoded, x, ws) == 0


def test_a_long_chain_of_sparse_maps_is_broken_by_a_whole_one(monkeypatch):
    """Otherwise a map at its end could only be computed again from the input, through everything before it."""
    # Of so many maps each is a small part of the whole.
    monkeypatch.setattr("jaxpipe.residuals.choose_formats.WORTH_A_KERNEL", 0.0)
    x, ws = data()
    report = residual_report(encoded, x, ws * 5)
    kinds = [row.storage for row in report.tensors if row.shape == (32, 128)]
    assert kinds.count("bitmap") > kinds.count("keep") >= 2


def test_vmap_scan_and_shard_map():
    x, ws = data()
    single = jax.grad(network, 1)(x, ws)
    batched = jax.jit(jax.vmap(jax.grad(encoded, 1), (0, None)))(jnp.stack([x, x]), ws)
    for a, b in zip(batched, single, strict=True):
        np.testing.assert_allclose(a[0], b, rtol=1e-5, atol=1e-4)  # a batched product sums in another order

    def step(carry, _):
        return carry, jax.grad(encoded, 1)(x, carry)

    _, scanned = jax.jit(lambda ws: jax.lax.scan(step, ws, None, length=2))(ws)
    for a, b in zip(scanned, single, strict=True):
        np.testing.assert_allclose(a[1], b, rtol=1e-5, atol=1e-4)

    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    P = jax.sharding.PartitionSpec
    mapped = jax.shard_map(
        lambda x, ws: jax.lax.psum(jax.grad(encoded, 1)(x, ws), "data"),
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P(),
        check_vma=False,
    )
    for a, b in zip(jax.jit(mapped)(jnp.tile(x, (2, 1)), ws), single, strict=True):
        np.testing.assert_allclose(a, 2 * b, rtol=1e-5, atol=1e-4)


def test_a_pipeline_counts_overflows():
    x, ws = data()
    model = jax.tree_util.Partial(lambda ws, x: encoded(x, ws), ws)
    batch = jnp.tile(x, (4, 1))
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("stage",))
    names = [name for name in measure_density(encoded, x, ws).fractions if name.startswith("relu")]
    results = []
    for density in (Density({}), Density(dict.fromkeys(names, 0.1))):
        with with_density(density):
            pipeline = jaxpipe.partition(
                model,
                mesh,
                batch,
                loss=lambda model, batch: (model(batch) / 1e4, 1.0, {}),
                optimizer=optax.sgd(1e-3),
                num_microbatches=4,
                profile="analytic",
            )
            state = pipeline.init(jax.random.key(0))
            state, metrics = pipeline.step(state, batch)
        results.append((pipeline.parameters(state), int(metrics["overflows"])))
    assert results[0][1] == 0 and results[1][1] >= 4
    assert_same_bits(results[0][0], results[1][0])


@pytest.mark.parametrize("given", [0.05, None, {"relu#1": 0.05}])
def test_a_density_that_is_none_is_refused(given):
    with pytest.raises(ModelError, match=r"density=.* must be what jaxpipe.measure_density"), with_density(given):
        pytest.fail("entered")
