"""A user's codec: its bits, bytes, budgets and pipelines; what ``check_codec`` accepts and refuses."""

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxpipe
from jaxpipe.graph.codec import SavedTensor
from jaxpipe.graph.graph import trace
from jaxpipe.graph.words import by_word
from jaxpipe.residuals import codecs as built_in
from jaxpipe.residuals import vjp_program
from jaxpipe.residuals.choose_formats import saved_tensor
from jaxpipe.testing import check_codec
from tests.support.codecs import Halves
from tests.support.compare import assert_same_bits
from tests.support.meshes import mesh_of


pytestmark = pytest.mark.optimized


@dataclasses.dataclass(frozen=True)
class Short(jaxpipe.Codec):
    """Keeps the upper half of ``float32`` values of a batch; the lower half has to be zero."""

    name = "short"
    rows: int = 64

    def allows(self, tensor):
        return tensor.dtype == jnp.float32 and tensor.shape[:1] == (self.rows,) and tensor.demand == "value"

    def encode(self, x):
        words = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return (words >> 16).astype(jnp.uint16), jnp.all(words & 0xFFFF == 0)

    def decode(self, arrays, shape_and_type):
        return jax.lax.bitcast_convert_type(arrays[0].astype(jnp.uint32) << 16, jnp.float32)

    def fits(self, arrays):
        return arrays[1]


class Swapped(Halves):
    """Is without a fallback and without a dataclass."""

    name = "swapped"

    def allows(self, tensor):
        return tensor.dtype in (jnp.float32, jnp.int32) and bool(tensor.path or tensor.operator)


def network(x, ws):
    for w in ws:
        x = jax.nn.relu(x @ w)
    return jnp.square(x).sum()


def data(offset=0.0, rows=64, layers=3):
    """Whole numbers, whose products are whole numbers below 256; with an offset, others."""
    keys = jax.random.split(jax.random.key(0), layers + 1)
    x = jax.random.randint(keys[0], (rows, 128), 0, 8).astype(jnp.float32) + offset
    ws = [jnp.eye(128) - 2 * jnp.eye(128, k=k + 1) * jax.random.bernoulli(key) for k, key in enumerate(keys[1:])]
    return x, ws


encoded = jaxpipe.memory_encoded(network, codecs=["fast", Short()])


@pytest.mark.core
def test_gradients_have_the_bits_of_plain_ones_whether_tensors_fit_or_not():
    for offset, some in ((0.0, False), (0.3, True)):
        x, ws = data(offset)
        assert_same_bits(jax.jit(jax.grad(encoded, (0, 1)))(x, ws), jax.jit(jax.grad(network, (0, 1)))(x, ws))
        assert (jaxpipe.count_overflows(encoded, x, ws) > 0) is some
    stored = [row for row in jaxpipe.residual_report(encoded, x, ws).tensors if row.shape == (64, 128)]
    assert {(row.storage, row.bytes) for row in stored} == {("short", 2 * 64 * 128 + 1)}
    assert "short" in str(jaxpipe.residual_report(encoded, x, ws))


def test_each_example_of_a_vmap_fits_by_itself():
    x, ws = data()
    batched = jax.vmap(encoded, (0, None))
    both = jnp.stack([x, x + 0.3])
    assert jaxpipe.count_overflows(batched, both, ws) == jaxpipe.count_overflows(encoded, x + 0.3, ws) > 0
    gradients = jax.jit(jax.vmap(jax.grad(encoded), (0, None)))(both, ws)
    assert_same_bits(gradients, jax.jit(jax.vmap(jax.grad(network), (0, None)))(both, ws))


def test_codecs_of_a_decoration_inside_and_of_module_paths():
    inner = jaxpipe.memory_encoded(lambda x, w: jax.nn.relu(x @ w), codecs=["fast", Short()])
    outer = jaxpipe.memory_encoded(lambda x, w: jnp.square(jnp.exp(inner(x, w) @ w)).sum())
    x, (w, *_) = data()
    stored = {row.producer: row.storage for row in jaxpipe.residual_report(outer, x, w).tensors if row.bytes > 2048}
    assert set(stored.values()) == {"short", "keep"}

    def named(x, w):
        for name in ("first", "second"):
            with jax.named_scope(name):
                x = jnp.tanh(x @ w)
        return x.sum()

    by_path = jaxpipe.memory_encoded(named, codecs={"first": [Short()], "second": {"recompute"}})
    rows = jaxpipe.residual_report(by_path, x, w).tensors
    assert {row.producer.split("/")[0]: row.storage for row in rows} == {"first": "short", "second": "keep"}


def test_equal_codecs_make_equal_policies_and_others_do_not():
    parse = jaxpipe.graph.allowed_codecs.parse
    assert parse([Short()]).name == parse([Short()]).name != parse([Short(32)]).name
    assert parse(["fast", Swapped()]) == parse(["fast", Swapped()]) != parse([Swapped()])
    assert parse(["fast", "csr"]) == parse({"mask", "index", "alias", "recompute", "csr"})

    def other():
        @dataclasses.dataclass(frozen=True)
        class Mine(Short):
            pass

        return Mine()

    first, second = parse([other()]), parse([other()])  # defined twice, as in a notebook
    assert first.name != second.name
    assert by_word(second.name) is second


def test_codecs_see_what_the_backward_pass_needs():
    def function(x, w):
        return (
            jnp.where(x @ w > 1, jax.nn.relu(x), jnp.exp(x)).sum()
            + nn.max_pool(x[None, ..., None], (2, 2), (2, 2)).sum()
        )

    graph = vjp_program.build(trace(function, *[jnp.ones((8, 8))] * 2), range(2)).backward_graph
    seen = [saved_tensor(graph.graph, t) for t in graph.needs]
    assert {x.demand for x in seen} == {"sign", "predicate", "window index", "value"}


def test_a_budget_for_a_step_uses_a_codec():
    x, ws = data(rows=2048, layers=6)
    step = jax.value_and_grad(jaxpipe.memory_encoded(network, codecs=["fast", Short(2048)]), 1)
    plain = jaxpipe.jit(step, memory="1GiB").lower(x, ws).plan.plain_bytes
    budgeted = jaxpipe.jit(step, memory=int(0.6 * plain))
    lowered = budgeted.lower(x, ws)
    assert lowered.plan.needed_bytes <= 0.6 * plain and "2048x128xui16" in lowered.as_text()
    for values in (x, x + 0.3):
        assert_same_bits(budgeted(values, ws), jax.jit(jax.value_and_grad(network, 1))(values, ws))


def test_a_storage_plan_has_a_codec_beside_keep_and_recompute():
    x, ws = data()
    policy = jaxpipe.graph.allowed_codecs.parse(["fast", Short()])
    graph = trace(lambda x, *ws: [network(x, ws)], x, *ws).with_parameters([False, True, True, True])
    stage = vjp_program.build(graph, graph.inputs, policy=policy, held=graph.inputs)
    ample = jaxpipe.planning.plan_storage(stage, "1GiB")
    small = jaxpipe.planning.plan_storage(stage, ample.peak_bytes, in_flight=1)
    assert "keep" in {row.storage for row in ample.tensors}  # no time to pack what has room
    assert {"keep", "short", "recompute", "unused", "mask"} >= {row.storage for row in small.tensors}
    many = jaxpipe.planning.plan_storage(stage, int(0.8 * plan_bytes(stage, 8)), in_flight=8)
    short = [row for row in many.tensors if row.storage == "short"]
    assert short and all(row.bytes == 2 * 64 * 128 + 1 for row in short)


def plan_bytes(stage, in_flight):
    return jaxpipe.planning.plan_storage(stage, "1GiB", in_flight=in_flight).peak_bytes


@pytest.mark.parametrize("runtime", ["auto", "spmd"])
def test_pipelines_use_a_codec_and_count_what_did_not_fit(runtime):
    x, ws = data(rows=256)
    model = jax.tree_util.Partial(lambda ws, x: network(x, ws), ws)
    mesh = jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
    results = []
    for storage in ("fast", ["fast", Short()]):
        pipeline = jaxpipe.partition(
            model,
            mesh,
            x,
            loss=lambda model, batch: (model(batch) / 2.0**20, 1.0, {}),
            optimizer=optax.sgd(2.0**-3),
            num_microbatches=4,
            profile="analytic",
            runtime=runtime,
            storage=storage,
        )
        state, metrics = pipeline.step(pipeline.init(jax.random.key(0)), x)
        overflows = int(metrics.get("overflows", 0))
        state, metrics = pipeline.step(state, x + 0.3)
        results.append((pipeline.parameters(state), overflows, int(metrics.get("overflows", 0)), pipeline.plan))
    (plain, *_), (parameters, fitting, others, plan) = results
    assert_same_bits(parameters, plain)
    assert fitting == 0 < others
    assert any("short" in stage.stored for stage in plan.stages) and "short" in plan.to_json()
    assert jaxpipe.Plan.from_json(plan.to_json()) == plan


def test_check_codec_accepts_what_keeps_every_bit():
    check_codec(Short(16))
    check_codec(Swapped())


@pytest.mark.parametrize("codec", [codec for group in built_in.BUILT_IN.values() for codec in group], ids=repr)
def test_check_codec_accepts_codecs_of_jaxpipe(codec):
    check_codec(codec)


@pytest.mark.slow
def test_check_codec_accepts_codecs_of_jaxpipe_in_double_precision():
    with jax.enable_x64(True):
        check_codec(built_in.KEEP)
        check_codec(built_in.Bitmap())


class Copy(jaxpipe.Codec):
    """Correct; those below change one method."""

    name = "copy"

    def allows(self, tensor):
        return tensor.dtype == jnp.float32 and len(tensor.shape) < 2

    def encode(self, x):
        return (x,)

    def decode(self, arrays, shape_and_type):
        return arrays[0]


class DropsPayloads(Copy):
    def decode(self, arrays, shape_and_type):
        return jnp.where(jnp.isnan(arrays[0]), jnp.nan, arrays[0])


class LosesSign(Copy):
    def encode(self, x):
        return x, x != 0

    def decode(self, arrays, shape_and_type):
        return jnp.where(arrays[1], arrays[0], 0.0)


class TooCertain(Copy):
    """Compares values, for which NaN is unequal and subnormals may be zero; and the first of them alone."""

    def encode(self, x):
        half = x.astype(jnp.bfloat16)
        same = jnp.ravel(half == x)[:1]
        return half, jnp.all(same)

    def decode(self, arrays, shape_and_type):
        return arrays[0].astype(jnp.float32)

    def fits(self, arrays):
        return arrays[1]


class WrongShape(Copy):
    def decode(self, arrays, shape_and_type):
        return arrays[0].reshape(-1)


class WrongType(Copy):
    def decode(self, arrays, shape_and_type):
        return arrays[0].astype(jnp.bfloat16)


class NoEmptyArrays(Copy):
    def encode(self, x):
        return x, x.max()


class NoTuple(Copy):
    def encode(self, x):
        return x.astype(jnp.bfloat16)


class WrongBytes(Copy):
    def nbytes(self, shape_and_type):
        return 4 * shape_and_type.size + 4


class AllowsNothing(Copy):
    def allows(self, tensor):
        return False


class FitsNothing(Copy):
    def fits(self, arrays):
        return jnp.bool_(False)


class FitsByElement(Copy):
    def fits(self, arrays):
        return arrays[0] == arrays[0]


class Nameless(Copy):
    name = ""


@dataclasses.dataclass
class NotHashable(Copy):
    scale: int = 1


@pytest.mark.core
@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (DropsPayloads, r"lost bits of float32\[\] under jit: element \(\) was nan \(0x7fc00005\) .*\(0x7fc00000\)"),
        (LosesSign, r"element \(\) was -0.0 \(0x80000000\) and became 0.0 \(0x00000000\)\. .* work on bit patterns"),
        (TooCertain, r"lost bits of float32\["),
        (WrongShape, r"'copy' decoded float32\[\] as float32\[1\]\. decode returns an array of the shape and type"),
        (WrongType, r"'copy' decoded float32\[\] as bfloat16\[\]\. decode returns"),
        (NoEmptyArrays, r"raised ValueError for float32\[0\]: .* let allows refuse"),
        (NoTuple, r"'copy' encoded float32\[\] as .*encode returns a tuple of arrays"),
        (WrongBytes, r"nbytes returned 8 for float32\[\], but encode returned 4 bytes\. .* leave nbytes out"),
        (AllowsNothing, r"whose allows returned False for all that was tried"),
        (FitsNothing, r"whose fits returned False for all that was tried"),
        (FitsByElement, r"whose fits returned bool\[0\] for float32\[0\]\. Return one boolean"),
        (Nameless, r"whose name is ''.*give it one of its own"),
        (NotHashable, r"cannot be hashed .* make it a frozen dataclass"),
    ],
)
def test_check_codec_refuses_what_is_broken(codec, message):
    with pytest.raises(jaxpipe.ModelError, match=re.compile(message, re.DOTALL)) as error:
        check_codec(codec())
    assert isinstance(error.value, jaxpipe.JaxpipeError)


def test_what_is_no_codec_is_refused_where_it_is_passed():
    for codecs, message in (
        ([Copy], "unknown codec .*objects of jaxpipe.Codec"),
        (["fast", NotHashable()], "codecs has NotHashable.*frozen dataclass"),
        ([Nameless()], "whose name is ''"),
        ([Short(), Short(32)], "whose name is 'short'.*other than"),
        ([type("Mask", (Copy,), {"name": "mask"})()], "whose name is 'mask'"),
    ):
        with pytest.raises(jaxpipe.ModelError, match=message):
            jaxpipe.memory_encoded(network, codecs=codecs)
    with pytest.raises(jaxpipe.ModelError, match=r"which is no codec\. Pass an object"):
        check_codec(Copy)
    x, ws = data()
    with pytest.raises(jaxpipe.ModelError, match="encode returns a tuple of arrays"):
        tall = type("Tall", (NoTuple,), {"allows": lambda self, tensor: tensor.dtype == jnp.float32})()
        tall_encoded = jaxpipe.memory_encoded(network, codecs=["fast", tall])
        jax.grad(tall_encoded)(x, ws)


@dataclasses.dataclass(frozen=True)
class Few(Copy):
    """Keeps half of the bits of values in 32 rows, whose other half is zero: it is wrong for others."""

    name = "few"

    def allows(self, tensor):
        return tensor.dtype == jnp.float32 and tensor.shape[:1] == (32,) and tensor.demand == "value"

    def encode(self, x):
        return ((jax.lax.bitcast_convert_type(x, jnp.uint32) >> 16).astype(jnp.uint16),)

    def decode(self, arrays, shape_and_type):
        return jax.lax.bitcast_convert_type(arrays[0].astype(jnp.uint32) << 16, jnp.float32)


@pytest.mark.core
@pytest.mark.parametrize(
    ("rows", "other", "storage"),
    [(400, 998, "fast"), (64, 106, ["fast", Few()])],  # places among 998 rows take 16 bits; it is for 32 rows only
)
def test_batches_of_another_size_have_codecs_of_their_own(rows, other, storage):
    weights = [jax.random.normal(jax.random.key(k), (16, 16)) / 4 for k in range(4)]

    def chain(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w).astype(jnp.bfloat16).astype(jnp.float32)
        return x

    def loss(model, x):
        values = jnp.sort(model(x), axis=0)
        return (values * jnp.linspace(0, 1, values.shape[0])[:, None]).mean()

    x, y = (jax.random.normal(jax.random.key(n), (n, 16)) for n in (rows, other))
    model, mesh = jax.tree_util.Partial(chain, weights), mesh_of(2)
    options = {"num_microbatches": 2, "profile": "analytic", "schedule": "1f1b", "storage": storage}
    pipeline = jaxpipe.partition(model, mesh, x, loss=loss, optimizer=optax.sgd(1.0), **options)
    _, gradients = pipeline.value_and_grad(pipeline.init(jax.random.key(0)), y)

    plain = jax.grad(lambda weights: loss(functools.partial(chain, weights), y))(weights)  # it is one micro-batch
    for given, expected in zip(jax.tree.leaves(gradients), plain, strict=True):
        # Two programs in place of one round otherwise; a wrong code is off by half of the largest gradient.
        assert jnp.abs(given - expected).max() <= 1e-5 * jnp.abs(expected).max()


class CountsFits(Copy):
    name = "counts"

    def allows(self, tensor):
        return tensor.dtype == jnp.float32

    def fits(self, arrays):
        return jnp.int32(1)

    def nbytes(self, shape_and_type):
        return 0  # it is chosen before the tensor as it is


def test_fits_is_a_boolean():
    encoded = jaxpipe.memory_encoded(lambda x: jnp.sin(x @ x).sum(), codecs=["fast", CountsFits()])
    with pytest.raises(jaxpipe.ModelError, match=r"'counts': fits returned .* one boolean"):
        jax.grad(encoded)(jnp.ones((8, 8)))
    with pytest.raises(jaxpipe.ModelError, match=r"'counts': fits returned .* one boolean"):
        jaxpipe.count_overflows(encoded, jnp.ones((8, 8)))


def test_a_codec_without_a_method_and_a_class_are_refused():
    class Bare(jaxpipe.Codec):
        name = "bare"

    with pytest.raises(jaxpipe.ModelError, match=r"lacks a method\. Write encode, decode and allows"):
        jaxpipe.memory_encoded(jnp.sin, codecs=["fast", Bare()])
    with pytest.raises(jaxpipe.ModelError, match=r"Short is a class: pass an object of it, Short\(\)"):
        jaxpipe.memory_encoded(jnp.sin, codecs=["fast", Short])


def test_check_codec_tries_the_tensors_that_it_is_given():
    class OfTanh(Copy):
        name = "of tanh"

        def allows(self, tensor):
            return tensor.operator == "tanh"

    with pytest.raises(jaxpipe.ModelError, match=r"Pass what it is for as tensors="):
        check_codec(OfTanh())
    check_codec(OfTanh(), [SavedTensor((4, 3), jnp.dtype("float32"), "value", "Net", "tanh", 32)])
    with pytest.raises(jaxpipe.ModelError, match=r"float32\[3\], number 0, is none of its own: allows returned False"):
        check_codec(OfTanh(), [jnp.ones(3)])


class WholeNumbers(Copy):
    """Small whole numbers in 8 bits."""

    def encode(self, x):
        whole = x.astype(jnp.int8)
        words = [lax.bitcast_convert_type(y, jnp.uint32) for y in (x, whole.astype(jnp.float32))]
        return whole, jnp.all(words[0] == words[1])

    def decode(self, arrays, shape_and_type):
        return arrays[0].astype(jnp.float32)

    def fits(self, arrays):
        return arrays[1]


class WithoutSigns(WholeNumbers):
    def decode(self, arrays, shape_and_type):
        return jnp.abs(arrays[0]).astype(jnp.float32)


class WithoutOneNumber(WholeNumbers):
    def decode(self, arrays, shape_and_type):
        return jnp.where(arrays[0] == -128, 0, arrays[0]).astype(jnp.float32)


def test_check_codec_tries_numbers_that_fit():
    check_codec(WholeNumbers(), [np.arange(-128, 128, dtype=np.float32)])
    with pytest.raises(jaxpipe.ModelError, match=r"lost bits of float32\[\] under jit: element \(\) was -"):
        check_codec(WithoutSigns())
    with pytest.raises(jaxpipe.ModelError, match=r"element \(0,\) was -128.0"):
        check_codec(WithoutOneNumber(), [np.arange(-128, 128, dtype=np.float32)])
    with pytest.raises(jaxpipe.ModelError, match=r"float32\[2\], number 1, is none of its own: fits returned False"):
        check_codec(WholeNumbers(), [np.ones(2, np.float32), np.array([0.5, 1], np.float32)])


def test_what_a_codec_raises_names_it():
    class Rows(Copy):
        name = "rows"

        def allows(self, tensor):
            return tensor.shape[5] == 3

    with pytest.raises(jaxpipe.ModelError, match=r"The codec 'rows' raised IndexError for SavedTensor"):
        jax.grad(jaxpipe.memory_encoded(lambda x: jnp.sin(x @ x).sum(), codecs=["fast", Rows()]))(jnp.ones((8, 8)))
