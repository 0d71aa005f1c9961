"""Programs are built for the platform of their mesh or arguments, not for the default backend."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxpipe
from jaxpipe.costs.device_memory import memory_of
from jaxpipe.errors import PartitionError
from jaxpipe.targets import Rates, Target, register
from jaxpipe.targets.building import building_for, current, target_of_values
from jaxpipe.targets.known import target_named, target_of, target_of_kind


pytestmark = pytest.mark.core


def gpu_mesh(kind=AxisType.Auto):
    """A mesh of a GPU that only has a name."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(kind,)).abstract_mesh
    return mesh.update(abstract_device=type(mesh.abstract_device)("NVIDIA H100", None, "gpu"))


def on_gpu(x, kind=AxisType.Auto):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(gpu_mesh(kind), PartitionSpec()))


def test_the_default_backend_decides_where_nothing_else_is_known():
    assert current().platform == jax.default_backend() == "cpu"
    assert target_of_values([np.ones(3), 1.0]) is None


def test_a_chosen_platform_decides_before_anything_else():
    with building_for("gpu"):
        assert current().platform == "gpu"
        with building_for(None):
            assert current().platform == "gpu"
    assert current().platform == "cpu"


def test_a_jitted_function_is_traced_again_for_another_platform():
    seen = []
    function = jax.jit(lambda x: (seen.append(current().platform), x)[1])
    for name in ("gpu", "cpu", "gpu"):
        with building_for(name):
            function.trace(jnp.ones(2))
    assert seen == ["gpu", "cpu"]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arguments_decide_concrete_or_traced(kind):
    seen = []
    jax.jit(lambda x: (seen.append(target_of_values([1.0, x]).name), x)[1]).trace(on_gpu(jnp.ones(2), kind))
    assert seen == ["H100"]
    assert target_of_values([jnp.ones(2)]).name == "cpu"


def test_the_mesh_decides_inside_shard_map_at_any_depth():
    seen = []

    def body(carry, _):
        seen.append(current().platform)
        return carry, None

    mapped = jax.shard_map(
        lambda x: jax.lax.scan(body, x, None, length=2)[0],
        mesh=gpu_mesh(),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
    )
    jax.jit(mapped).trace(on_gpu(jnp.ones(2)))
    assert seen == ["gpu"]


def test_an_encoded_gradient_is_that_of_its_arguments_platform():
    @jaxpipe.memory_encoded(codecs="smallest")
    def loss(kernel, x):
        x = jax.nn.relu(jax.lax.conv(x, kernel, (1, 1), "SAME"))
        return jax.lax.conv(x, kernel, (1, 1), "SAME").sum()

    kernel, x = jnp.ones((16, 16, 3, 3)), jnp.ones((8, 16, 32, 32))
    gradient = jax.jit(jax.grad(loss))
    ahead = [str(gradient.trace(k, x).jaxpr) for k in (kernel, on_gpu(kernel), kernel)]
    # XLA:CPU compacts in a loop over blocks and wants convolutions in one dimension order, by transposes.
    assert [("while[" in text, "scatter" in text) for text in ahead] == [(True, False), (False, True), (True, False)]
    assert [text.count("transpose[") > 2 for text in ahead] == [True, False, True]


def test_a_pipeline_is_built_for_its_mesh(monkeypatch):
    def lowered():
        pipeline = jaxpipe.partition(
            jax.tree_util.Partial(lambda w, x: jax.nn.relu(x @ w) @ w, jnp.ones((4, 4))),
            jax.make_mesh((1,), ("stage",)),
            jnp.ones((8, 4)),
            loss=lambda f, x: f(x).mean(),
            optimizer=optax.adam(0.1),
            num_microbatches=2,
            profile="analytic",
        )
        report = pipeline.memory_report()
        return report.predicted_bytes, report.compiled_bytes

    expected = lowered()
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(device_kind="NVIDIA H100", platform="gpu")])
    assert current().name == "H100"
    assert lowered() == expected


def test_a_kind_of_device_is_known_by_its_name_its_whole_kind_or_a_word_in_it():
    kinds = {
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA L40S": "L40S",
        "AMD Instinct MI300X": "MI300X",
        "TPU v4": "v4",
        "TPU v5 lite": "v5e",
        "TPU v5": "v5p",
        "TPU v6 lite": "v6e",
        "cpu": "cpu",
    }
    assert {kind: target_of_kind(kind).name for kind in kinds} == kinds
    assert target_of_kind("NVIDIA L4 of tomorrow, L400") == target_named("L4")
    assert target_of_kind("Chip of another maker") is None


def test_an_unknown_kind_is_any_device_of_its_platform():
    unknown = SimpleNamespace(device_kind="Chip of another maker", platform="tpu")
    assert (target_of(unknown).order, target_of(unknown).memory) == ("stepwise", None)
    assert target_of(SimpleNamespace(device_kind="?", platform="gpu")).name == "gpu"


def test_a_target_of_ones_own_is_one_call():
    chip = Target("Chip 8", "gpu", Rates(flops=1e14, bytes=1e12), kinds=("Chip eight",), memory=48 << 30)
    register(chip)
    device = SimpleNamespace(device_kind="Chip eight", platform="gpu", memory_stats=lambda: None)
    assert target_of(device) is chip and memory_of(device) == 48 << 30
    with building_for(device):
        assert current() is chip


def test_a_name_that_nothing_has_is_refused():
    with pytest.raises(PartitionError, match=r"^device='Chip 0': .*H100, .*v5e, .*jaxpipe\.targets\.register"):
        target_named("Chip 0")
