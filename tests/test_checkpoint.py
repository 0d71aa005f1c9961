"""Checkpoints restore into the same bits on any stages and replicas, or without a pipeline; others are refused."""

import dataclasses
import functools
import json
import shutil
import signal
import tempfile
import zlib
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jaxpipe
from examples import models as zoo
from jaxpipe.checkpoint import load, steps
from tests.support.compare import assert_same_bits
from tests.support.meshes import mesh_of
from tests.support.pipeline_models import ROWS, case_of, classifier, linen, pipeline_of


PREDICT = {
    "mlp": lambda model, batch: model(batch["x"]),
    "cnn-linen": lambda model, batch: model(batch["x"], train=False),
}


def adam() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 20)))


def adam_pipeline(name: str, stages: int, replicas: int | None = None, **options) -> jaxpipe.Pipeline:
    return pipeline_of(name, stages, 2, replicas, **{"predict": PREDICT.get(name), "optimizer": adam(), **options})


def trained(pipeline: jaxpipe.Pipeline, name: str, count: int, state=None):
    state = pipeline.init(jax.random.key(3)) if state is None else state
    metrics = {}
    for _ in range(count):
        state, metrics = pipeline.step(state, case_of(name).batch)
    return state, metrics


@functools.cache
def compiled(name: str, stages: int, replicas: int | None = None) -> jaxpipe.Pipeline:
    """A pipeline that several tests share."""
    return adam_pipeline(name, stages, replicas)


def mlp_pipeline() -> jaxpipe.Pipeline:
    return compiled("mlp", 2)


@pytest.fixture(scope="module")
def saved_mlp(tmp_path_factory):
    """A checkpoint of two steps of the MLP on two stages."""
    folder = tmp_path_factory.mktemp("mlp")
    state, _ = trained(mlp_pipeline(), "mlp", 2)
    mlp_pipeline().save(state, folder, data={"epoch": 1})
    return folder


# Resuming


@pytest.mark.parametrize(
    ("name", "stages", "replicas"),
    [
        pytest.param("mlp", 2, None, marks=pytest.mark.core),
        pytest.param("cnn-linen", 4, None, marks=pytest.mark.slow),
        pytest.param("cnn-nnx", 2, None, marks=pytest.mark.slow),
        pytest.param("transformer", 4, None, marks=pytest.mark.slow),
        pytest.param("resnet", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(name, stages, replicas, tmp_path):
    pipeline = compiled(name, stages, replicas)
    state, _ = trained(pipeline, name, 2)
    pipeline.save(state, tmp_path)
    expected, metrics = trained(pipeline, name, 2, state)
    state, resumed = trained(pipeline, name, 2, pipeline.restore(tmp_path))
    assert_same_bits(state, expected)
    assert_same_bits(resumed, metrics)


def test_residuals_resume_bit_for_bit(tmp_path):
    exchange = jaxpipe.gradients.block_sparse(k=1)
    options = {"optimizer": optax.sgd(0.1, momentum=0.9), "gradient_exchange": exchange}
    pipeline = adam_pipeline("mlp", 2, 2, **options)
    state, _ = trained(pipeline, "mlp", 2)
    assert any(np.any(x) for x in state.residual)
    pipeline.save(state, tmp_path)
    expected, _ = trained(pipeline, "mlp", 2, state)
    assert_same_bits(trained(pipeline, "mlp", 2, pipeline.restore(tmp_path))[0], expected)

    # Another number of replicas: what is still to be added to the parameters is the same, spread evenly.
    state = pipeline.restore(tmp_path)
    rows = [np.asarray(x) for x in state.residual]
    wider = adam_pipeline("mlp", 2, 4, **options).restore(tmp_path)
    for before, after in zip(rows, wider.residual, strict=True):
        assert np.asarray(after).shape == (4, *before.shape[1:])
        # The mean of two is exact but for one rounding, that of four equal ones exactly.
        np.testing.assert_array_equal(
            np.asarray(after), np.broadcast_to((before[:1] + before[1:]) / 2, np.asarray(after).shape)
        )
    whole = adam_pipeline("mlp", 2, optimizer=optax.sgd(0.1, momentum=0.9))
    with pytest.warns(UserWarning, match="what had not been sent is lost"):
        assert whole.restore(tmp_path).residual == ()


def test_residuals_begin_at_zero_where_a_checkpoint_has_none(tmp_path):
    optimizer = optax.sgd(0.1, momentum=0.9)
    dense = adam_pipeline("mlp", 2, 2, optimizer=optimizer)
    dense.save(dense.init(jax.random.key(0)), tmp_path)
    sparse = adam_pipeline("mlp", 2, 2, optimizer=optimizer, gradient_exchange=jaxpipe.gradients.block_sparse(k=1))
    assert_same_bits(sparse.restore(tmp_path), sparse.init(jax.random.key(0)))


def test_random_keys_and_signs_of_zero_are_kept(tmp_path):
    """A typed key in the optimizer state, another kind of key for the run, -0.0 and NaNs with a payload."""
    odd = np.array([-0.0, 0.0, np.nan, -np.nan, 1e-45], np.float32)
    odd[2:3].view(np.uint32)[0] = 0x7FC12345
    model = jax.tree_util.Partial(
        lambda w, x: x @ w["first"] @ w["second"],
        {"first": jnp.tile(odd[:, None], (1, 4)), "second": -jnp.zeros((4, 1)), "a.b/c": jnp.zeros((0, 3))},
    )
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(7)), optax.sgd(0.1))
    batch = jnp.ones((4, 5))
    pipeline = jaxpipe.partition(
        model, mesh_of(2), batch, loss=lambda f, x: f(x).mean(), optimizer=optimizer, profile="analytic"
    )
    state = pipeline.init(jax.random.key(3, impl="threefry2x32"))
    pipeline.save(state, tmp_path)
    assert_same_bits(pipeline.restore(tmp_path), state)


class Drawing(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.key = nnx.Linear(4, 2, rngs=rngs), nnx.Variable(jax.random.key(5))

    def __call__(self, x):
        self.key[...], drawn = jax.random.split(self.key[...])
        return self.dense(x + jax.random.normal(drawn, x.shape))


def test_a_run_resumes_with_random_keys_among_the_variables(tmp_path):
    options = {"loss": lambda model, x: model(x).mean(), "optimizer": optax.sgd(0.1), "profile": "analytic"}
    batch, key = jnp.ones((4, 4)), jax.random.key(5)
    pipeline = jaxpipe.partition(Drawing(nnx.Rngs(0)), mesh_of(1), batch, num_microbatches=1, **options)
    state, _ = pipeline.step(pipeline.init(jax.random.key(0)), batch)
    pipeline.save(state, tmp_path)
    state, _ = pipeline.step(pipeline.restore(tmp_path), batch)
    assert_same_bits(pipeline.parameters(state)["key"].get_value(), jax.random.split(jax.random.split(key)[0])[0])


# Other stages


def test_no_device_holds_the_whole_tree(tmp_path):
    pipeline = compiled("mlp", 4)
    pipeline.save(pipeline.init(jax.random.key(3)), tmp_path)
    state = pipeline.restore(tmp_path)
    whole = sum(x.nbytes for x in jax.tree.leaves(pipeline.parameters(state)))
    for device in pipeline.mesh.devices.flat:
        held = sum(s.data.nbytes for x in state.parameters for s in x.addressable_shards if s.device == device)
        assert 0 < held < whole


@pytest.fixture(scope="module")
def four_stages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    pipeline = compiled("cnn-linen", 4)
    state, _ = trained(pipeline, "cnn-linen", 2)
    pipeline.save(state, folder, data=[1, 2])
    return folder, pipeline.parameters(state)


def plain_prediction(variables):
    # As in training, but one micro-batch after the other is what pipelines predict, too.
    apply = jax.jit(lambda variables, x: case_of("cnn-linen").model.apply(variables, x, train=False))
    x = case_of("cnn-linen").batch["x"].reshape(2, ROWS // 2, 8, 8, 1)
    return np.concatenate([np.asarray(apply(variables, row)) for row in x])


@pytest.mark.parametrize("stages", [1, 2, pytest.param(8, marks=pytest.mark.slow)])
def test_four_stages_become_any_number(stages, four_stages):
    folder, variables = four_stages
    pipeline = compiled("cnn-linen", stages)
    state = pipeline.restore(folder)
    assert_same_bits(pipeline.parameters(state), variables)
    assert int(state.step) == 2
    expected = plain_prediction(variables)
    # Eight devices get cuts within a normalization, where no product is contracted with the sum after it: roundings.
    rounding = 4 * np.spacing(np.abs(expected).max()) if stages == 8 else 0
    prediction = pipeline.predict(state, case_of("cnn-linen").batch)
    np.testing.assert_allclose(prediction, expected, rtol=0, atol=rounding)


# Without a pipeline


def test_a_checkpoint_becomes_plain_flax_and_optax(four_stages):
    """Predictions are those of the pipeline, and the next plain update is optax's own from its state."""
    folder, variables = four_stages
    pipeline = compiled("cnn-linen", 1)
    state = pipeline.restore(folder)
    loaded = load(folder)
    assert_same_bits(loaded.variables, variables)
    predicted = pipeline.predict(state, case_of("cnn-linen").batch)
    np.testing.assert_array_equal(plain_prediction(loaded.variables), predicted)
    assert (loaded.step, loaded.data) == (2, [1, 2])
    np.testing.assert_array_equal(jax.random.key_data(loaded.key), jax.random.key_data(jax.random.key(3)))

    optimizer = adam()
    shapes = jax.eval_shape(optimizer.init, variables["params"])
    loaded = load(folder, variables=jax.eval_shape(lambda: variables), optimizer_state=shapes)
    assert_same_bits(loaded.variables, variables)
    assert jax.tree.structure(loaded.optimizer_state) == jax.tree.structure(shapes)
    assert int(loaded.optimizer_state[1][0].count) == 2


def test_the_optimizer_state_is_that_of_plain_optax(tmp_path):
    """After one step with a known gradient: one weight of ones over rows of ones, by hand."""
    model = jax.tree_util.Partial(lambda w, x: x @ w["a"] @ w["b"], {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 1))})
    batch = jnp.ones((4, 2))
    pipeline = jaxpipe.partition(
        model,
        mesh_of(2),
        batch,
        loss=lambda f, x: f(x).mean(),
        optimizer=optax.sgd(0.5, momentum=0.9),
        profile="analytic",
    )
    state, _ = pipeline.step(pipeline.init(jax.random.key(0)), batch)
    pipeline.save(state, tmp_path)
    loaded = load(tmp_path, variables=model, optimizer_state=optax.sgd(0.5, momentum=0.9).init(model))
    # d/da = [[1, 1], [1, 1]], d/db = [[2], [2]]; the trace after one step is the gradient.
    trace = loaded.optimizer_state[0].trace
    assert_same_bits(trace.args[0], {"a": np.ones((2, 2), np.float32), "b": np.full((2, 1), 2, np.float32)})
    expected = {"a": np.full((2, 2), 0.5, np.float32), "b": np.zeros((2, 1), np.float32)}
    assert_same_bits(loaded.variables.args[0], expected)


def test_boxes_around_parameters_are_no_part_of_their_path(tmp_path):
    kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, None))
    case = linen(nn.Dense(10, kernel_init=kernel), case_of("mlp").batch, classifier())
    pipeline = pipeline_of(case, 1, 2, optimizer=adam())
    state = pipeline.init(jax.random.key(0))
    pipeline.save(state, tmp_path)
    unboxed = nn.meta.unbox(pipeline.parameters(state))
    assert_same_bits(load(tmp_path).variables, unboxed)
    plain = pipeline_of(dataclasses.replace(case, model=nn.Dense(10)), 1, 2, optimizer=adam())
    assert_same_bits(plain.parameters(plain.restore(tmp_path)), unboxed)


def test_nnx_modules_are_updated_from_a_checkpoint(tmp_path):
    pipeline = adam_pipeline("cnn-nnx", 2)
    state = pipeline.init(jax.random.key(0))
    pipeline.save(state, tmp_path)
    module = zoo.NNXDigitsCNN(nnx.Rngs(9), width=4)
    nnx.update(module, load(tmp_path, variables=module).variables)
    expected = nnx.state(case_of("cnn-nnx").model, nnx.Not(nnx.RngState))
    assert_same_bits(nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.RngState))), nnx.to_pure_dict(expected))
    optimizer_state = jax.eval_shape(adam().init, nnx.state(module, nnx.Param))
    restored = load(tmp_path, optimizer_state=optimizer_state).optimizer_state
    assert jax.tree.structure(restored) == jax.tree.structure(optimizer_state)


@pytest.mark.parametrize("keys", [["a.b", "a"], ["a.b", "a%2Eb", "a%b", ".", "", "a"]], ids=str)
def test_keys_with_dots_are_kept_apart(keys, tmp_path):
    """``{"a.b": x, "a": {"b": y}}``, whose paths look alike when they are joined by dots."""
    weights = {key: jnp.full((3,), float(k)) for k, key in enumerate(keys)} | {"a": {"b": jnp.full((3,), 9.0)}}
    model = jax.tree_util.Partial(lambda w, x: sum(jax.tree.leaves(w)) * x, weights)
    options = {"loss": lambda f, x: f(x).mean(), "optimizer": optax.sgd(0.1, momentum=0.9), "profile": "analytic"}
    pipeline = jaxpipe.partition(model, mesh_of(1), jnp.ones((4, 3)), **options)
    state = pipeline.init(jax.random.key(0))
    pipeline.save(state, tmp_path)
    assert_same_bits(pipeline.parameters(pipeline.restore(tmp_path)).args[0], weights)
    assert_same_bits(load(tmp_path, variables=model).variables.args[0], weights)
    assert_same_bits(load(tmp_path).variables, {"0": {"0": weights}})


# Refused


def test_other_models_shapes_and_optimizers_are_refused(saved_mlp):
    with pytest.raises(
        jaxpipe.CheckpointError,
        match=r"does not fit the model: .* is only in the model; .* is only in the checkpoint; .* and 20 more",
    ):
        compiled("cnn-linen", 1).restore(saved_mlp)
    with pytest.raises(
        jaxpipe.CheckpointError, match=r"does not fit the optimizer: 0/trace/.* is only in the optimizer"
    ):
        adam_pipeline("mlp", 2, optimizer=optax.sgd(0.1, momentum=0.9)).restore(saved_mlp)
    wider = jax.tree_util.Partial(zoo.mlp, zoo.init_mlp(jax.random.key(0), [12, 16, 16, 24, 10]))
    case = case_of("mlp")
    pipeline = jaxpipe.partition(
        wider, mesh_of(1), case.batch, loss=case.loss, optimizer=adam(), num_microbatches=2, profile="analytic"
    )
    match = r"is float32\[16\] in the checkpoint, float32\[24\] in the model"
    with pytest.raises(jaxpipe.CheckpointError, match=match):
        pipeline.restore(saved_mlp)
    with pytest.raises(
        jaxpipe.CheckpointError, match=r"does not fit variables: .*\(float32\[3\]\) is only in variables"
    ):
        load(saved_mlp, variables={"w": jnp.zeros(3)})


def test_a_learning_rate_may_change(saved_mlp):
    other = adam_pipeline(
        "mlp", 2, optimizer=optax.chain(optax.clip_by_global_norm(9.0), optax.adamw(optax.constant_schedule(1.0)))
    )
    assert int(other.restore(saved_mlp).step) == 2


@pytest.mark.parametrize("data", [{1: 2}, {"a": [{None: {}}]}, {"files": {1: 2, "1": 3}}], ids=str)
def test_keys_that_would_come_back_as_others_are_refused(data, tmp_path):
    pipeline = mlp_pipeline()
    with pytest.raises(jaxpipe.CheckpointError, match="data= must be what JSON can hold"):
        pipeline.save(pipeline.init(jax.random.key(0)), tmp_path, data=data)


@pytest.mark.parametrize("variables", [nn.Dense(3), zoo.NNXDigitsCNN, {"params": "x"}, {"params": 1.0}])
def test_what_has_no_arrays_is_no_tree_of_variables(variables, saved_mlp):
    with pytest.raises(jaxpipe.CheckpointError, match="variables= must be a tree of arrays or shapes"):
        load(saved_mlp, variables=variables)


def test_a_module_that_has_sown_is_loaded_into(tmp_path):
    class Sowing(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(3, 2, rngs=rngs)

        def __call__(self, x):
            self.sow(nnx.Intermediate, "x", x)
            return self.dense(x)

    batch, module = jnp.ones((4, 3)), Sowing(nnx.Rngs(0))
    pipeline = jaxpipe.partition(
        module, mesh_of(1), batch, loss=lambda f, x: f(x).mean(), optimizer=optax.sgd(0.5), profile="analytic"
    )
    pipeline.save(pipeline.init(jax.random.key(0)), tmp_path)
    other = Sowing(nnx.Rngs(1))
    other(batch)
    nnx.update(other, load(tmp_path, variables=other).variables)
    np.testing.assert_array_equal(other.dense.kernel[...], module.dense.kernel[...])


def test_what_is_not_there_is_said(saved_mlp, tmp_path):
    with pytest.raises(jaxpipe.CheckpointError, match="has no checkpoint; it must be one that was saved to"):
        mlp_pipeline().restore(tmp_path / "nowhere")
    with pytest.raises(jaxpipe.CheckpointError, match="has no checkpoint of step=7, only of 2"):
        mlp_pipeline().restore(saved_mlp, step=7)
    (tmp_path / "5").mkdir()
    with pytest.raises(jaxpipe.CheckpointError, match="5 is not a checkpoint of jaxpipe"):
        mlp_pipeline().restore(tmp_path)


def test_formats_of_later_versions_are_refused(saved_mlp, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxpipe.checkpoint.contents.FORMAT", 2)
    mlp_pipeline().save(mlp_pipeline().restore(saved_mlp), tmp_path)
    monkeypatch.undo()
    with pytest.raises(jaxpipe.CheckpointError, match=r"has the format 2, written by jaxpipe .* reads formats up to 1"):
        mlp_pipeline().restore(tmp_path)


# When one array cannot be read, orbax closes its event loop while others are still being read, and asyncio grumbles.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["flip", "truncate", "remove", "empty"])
def test_damaged_files_are_refused_or_do_not_matter(how, saved_mlp, tmp_path):
    """Every file in turn, some places in each; what is restored has the bits that were saved, or nothing is."""
    expected = mlp_pipeline().restore(saved_mlp)
    chance = np.random.default_rng(0)
    refused = set()
    files = [p for p in sorted(saved_mlp.rglob("*")) if p.is_file() and p.stat().st_size]
    assert len(files) > 5
    for number, file in enumerate(files):
        for attempt in range(6 if how == "flip" else 2 if how == "truncate" else 1):
            folder = tmp_path / f"{number}-{attempt}"
            shutil.copytree(saved_mlp, folder)
            damaged = folder / file.relative_to(saved_mlp)
            content = bytearray(damaged.read_bytes())
            if how == "flip":
                content[chance.integers(len(content))] ^= 1 << chance.integers(8)
            damaged.write_bytes(content[: chance.integers(len(content))] if how == "truncate" else content)
            if how == "remove":
                damaged.unlink()
            if how == "empty":
                damaged.write_bytes(b"")
            try:
                state = mlp_pipeline().restore(folder)
            except jaxpipe.CheckpointError as error:
                assert str(folder) in str(error)
                refused.add(file.name if file.parent.name != "d" else "d")
            else:
                assert_same_bits(state, expected)
    # Others are orbax's marks, and what it has written again in another file.
    assert refused >= {"metadata", "manifest.ocdbt", "d"}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_descriptions_by_others_are_refused_or_do_no_harm(saved_mlp, data):
    """With a checksum that fits: any value, in any place, of any kind of JSON."""
    kinds = st.one_of(
        st.none(), st.integers(-(10**30), 10**30), st.text(max_size=4), st.lists(st.integers(), max_size=3)
    )
    name = data.draw(st.sampled_from(["format", "step", "skipped", "key", "key_impl", "leaves", "variables", "leaf"]))
    value = data.draw(kinds)
    about = json.loads((saved_mlp / "2" / "about" / "metadata").read_text())["about"]
    if name == "leaf":
        row = data.draw(st.sampled_from(about["leaves"]["variables"]))
        row[data.draw(st.integers(0, 3))] = value
    else:
        (about["leaves"] if name == "variables" else about)[name] = value
    sealed = {"about": about, "crc32": zlib.crc32(json.dumps(about, sort_keys=True).encode())}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(saved_mlp, folder, dirs_exist_ok=True)
        (Path(folder) / "2" / "about" / "metadata").write_text(json.dumps(sealed))
        try:
            state = mlp_pipeline().restore(folder)
        except jaxpipe.CheckpointError:
            return
    assert name in ("format", "step", "skipped", "key", "key_impl")  # another run's would do as well
    assert_same_bits(state.parameters, mlp_pipeline().restore(saved_mlp).parameters)


def forged(saved, folder, change):
    """A copy of a checkpoint whose description somebody has changed, with a checksum that fits."""
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    file = next(folder.glob("*/about/metadata"))
    about = json.loads(file.read_text())["about"]
    change(about)
    file.write_text(json.dumps({"about": about, "crc32": zlib.crc32(json.dumps(about, sort_keys=True).encode())}))
    return folder


FIRST_LEAF = {
    "a product that overflows": {1: [2**32, 2**32]},
    "a text": {1: "ab"},
    "a long number": {1: [10**30]},
    "no bytes, of no dtype": {1: [0], 2: "float7"},
    "no bytes, of objects": {1: [0], 2: "object"},
    "no bytes, in place of some": {1: [0, 10**18]},
    "a negative size": {1: [-1, 0]},
    "no path": {0: []},
    "a path that goes on from another": {0: "longer"},
    "the path of another": {0: "second"},
    "no checksum": {3: None},
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # see above
@pytest.mark.parametrize("change", FIRST_LEAF.values(), ids=FIRST_LEAF)
def test_forged_descriptions_are_refused_without_a_pipeline(change, saved_mlp, tmp_path):
    def forge(about):
        first, second, *_ = about["leaves"]["variables"]
        for place, value in change.items():
            first[place] = {"longer": [*second[0], "x"], "second": second[0]}.get(str(value), value)

    folder = forged(saved_mlp, tmp_path / "run", forge)
    with pytest.raises(jaxpipe.CheckpointError, match="is damaged"):
        load(folder)
    with pytest.raises(jaxpipe.CheckpointError):
        mlp_pipeline().restore(folder)


@pytest.mark.parametrize("name", ["another folder", "forged"])
def test_a_checkpoint_under_another_step_is_refused(name, saved_mlp, tmp_path):
    if name == "forged":
        forged(saved_mlp, tmp_path, lambda about: about.update(step=99))
        (tmp_path / "2").rename(tmp_path / "4")
    else:
        shutil.copytree(saved_mlp / "2", tmp_path / "4")
    message = f"4 is damaged: it holds step {99 if name == 'forged' else 2}, so it was copied or renamed"
    for read in (mlp_pipeline().restore, load):
        with pytest.raises(jaxpipe.CheckpointError, match=message):
            read(tmp_path, step=4)


def test_a_changed_description_is_refused(saved_mlp, tmp_path):
    """Also where it is still JSON, such as another position in the data."""
    shutil.copytree(saved_mlp, tmp_path / "copy")
    file = tmp_path / "copy" / "2" / "about" / "metadata"
    description = json.loads(file.read_text())
    description["about"]["data"]["epoch"] = 2
    file.write_text(json.dumps(description))
    with pytest.raises(
        jaxpipe.CheckpointError, match=r"is damaged: about/metadata cannot be read .*its checksum is another"
    ):
        mlp_pipeline().restore(tmp_path / "copy")


def test_errors_name_the_other_checkpoints(saved_mlp, tmp_path):
    shutil.copytree(saved_mlp / "2", tmp_path / "2")
    shutil.copytree(saved_mlp / "2", tmp_path / "4")
    for file in (tmp_path / "4" / "arrays").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(
        jaxpipe.CheckpointError, match=r"4 is damaged: .* There are others, of step 2: pass step= to restore"
    ):
        mlp_pipeline().restore(tmp_path)
    assert int(mlp_pipeline().restore(tmp_path, step=2).step) == 2


# Saving


def test_a_save_does_not_replace_another(saved_mlp, tmp_path):
    pipeline = mlp_pipeline()
    state = pipeline.restore(saved_mlp)
    with pytest.raises(jaxpipe.CheckpointError, match="has a checkpoint of step 2, so that step 2 cannot be saved"):
        pipeline.save(state, saved_mlp)
    with pytest.raises(jaxpipe.CheckpointError, match="data= must be what JSON can hold"):
        pipeline.save(state, tmp_path, data=np.zeros(3))
    with pytest.raises(jaxpipe.ModelError, match="belongs to the plan"):
        compiled("mlp", 4).save(state, tmp_path)
    assert steps(tmp_path) == []


def test_a_saved_state_may_be_donated_at_once(tmp_path):
    """Files are written while the next steps use the memory that the state had."""
    pipeline = mlp_pipeline()
    with jaxpipe.Checkpointer(pipeline, tmp_path, every=1, keep=None) as checkpointer:
        state = pipeline.init(jax.random.key(3))
        expected = []
        for _ in range(5):
            state, _ = pipeline.step(state, case_of("mlp").batch)
            expected.append(jax.tree.map(np.array, pipeline.parameters(state)))
            checkpointer.after_step(state)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    for step, variables in enumerate(expected, 1):
        assert_same_bits(load(tmp_path, step=step, variables=case_of("mlp").model).variables, variables)


def test_a_checkpointer_keeps_the_last_and_tells_where_data_were(tmp_path):
    pipeline = mlp_pipeline()
    for name, value in (("every", 0), ("keep", 0)):
        with pytest.raises(jaxpipe.CheckpointError, match=f"{name}=0; it must be a whole number, at least 1"):
            jaxpipe.Checkpointer(pipeline, tmp_path, **{name: value})
    with jaxpipe.Checkpointer(pipeline, tmp_path, every=2, keep=2) as checkpointer:
        assert checkpointer.restore() is None
        state = pipeline.init(jax.random.key(3))
        for k in range(7):
            state, _ = pipeline.step(state, case_of("mlp").batch)
            checkpointer.after_step(state, {"row": k + 1})
        checkpointer.wait()
        assert checkpointer.steps == [4, 6]
        state, data = checkpointer.restore(step=4)
        assert (int(state.step), data) == (4, {"row": 4})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["4", "6"]


def test_a_checkpointer_may_be_entered_several_times(tmp_path):
    """It is closed by the outermost ``with``, and every handler is the one that was there before."""
    pipeline, before = mlp_pipeline(), signal.getsignal(signal.SIGTERM)
    state = pipeline.init(jax.random.key(3))
    with jaxpipe.Checkpointer(pipeline, tmp_path, every=1) as checkpointer:
        handler = signal.getsignal(signal.SIGTERM)
        for _ in range(2):
            with checkpointer, checkpointer:
                state, _ = pipeline.step(state, case_of("mlp").batch)
                checkpointer.after_step(state)
            assert signal.getsignal(signal.SIGTERM) == handler
    assert signal.getsignal(signal.SIGTERM) is before
    with checkpointer:
        pass
    assert signal.getsignal(signal.SIGTERM) is before
    assert steps(tmp_path) == [1, 2]


def test_sigterm_is_answered_after_the_step(tmp_path):
    pipeline = mlp_pipeline()
    before = signal.getsignal(signal.SIGTERM)
    state = pipeline.init(jax.random.key(3))
    with pytest.raises(SystemExit) as ended, jaxpipe.Checkpointer(pipeline, tmp_path, every=100) as checkpointer:
        state, _ = pipeline.step(state, case_of("mlp").batch)
        checkpointer.after_step(state)
        signal.raise_signal(signal.SIGTERM)
        state, _ = pipeline.step(state, case_of("mlp").batch)
        checkpointer.after_step(state, data="here")
        pytest.fail("after_step returned")
    assert ended.value.code == 143
    assert load(tmp_path).data == "here" and steps(tmp_path) == [2]
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(SystemExit), jaxpipe.Checkpointer(pipeline, tmp_path / "other"):
        signal.raise_signal(signal.SIGTERM)  # no step came after it
