import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxpipe
from examples.models import VGG16, NNXDigitsCNN, ResNet18
from jaxpipe import memory_encoded, residual_report
from jaxpipe.residuals.equal_blocks import common_name, pattern


MIB = 2**20


def shapes(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def abstract(model, x, **kwargs):
    return jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(x.shape, x.dtype), **kwargs))


@pytest.mark.core
def test_vgg16_numbers():
    """Plain: 92 MiB, 159.5 MiB with ReLU's zeros. Both follow from the shapes of VGG-16 at 64 x 32 x 32 x 3."""
    model, x = VGG16(), jax.ShapeDtypeStruct((64, 32, 32, 3), jnp.float32)
    report = residual_report(lambda v, x: model.apply(v, x), abstract(model, x), x)
    assert report.plain_bytes / MIB == pytest.approx(92.0, abs=0.01)
    assert report.plain_bytes_raw / MIB == pytest.approx(159.5, abs=0.01)
    assert report.total_bytes / MIB < 46


@pytest.mark.core
def test_resnet18_recomputes_its_normalizations():
    model, x = ResNet18(), jax.ShapeDtypeStruct((32, 32, 32, 3), jnp.float32)
    variables = abstract(model, x, train=True)
    report = residual_report(
        lambda p, s, x: model.apply({"params": p, **s}, x, train=True, mutable=["batch_stats"])[0],
        variables["params"],
        {"batch_stats": variables["batch_stats"]},
        x,
    )
    assert report.total_bytes < 0.36 * report.plain_bytes


def test_rows_of_a_small_function():
    report = residual_report(lambda x: jax.nn.relu(x).sum(), jnp.ones((32, 8)))
    (row,) = report.tensors
    assert (row.producer, row.shape, row.dtype, row.storage, row.bytes) == ("relu", (32, 8), "bool", "mask", 32)
    # Plain: a boolean map; with constants also ReLU's map of float zeros.
    assert (report.plain_bytes, report.plain_bytes_raw) == (256, 256 + 1024)


def test_decorated_parts_are_encoded_and_the_rest_is_as_jax_has_it():
    part = memory_encoded(jax.nn.relu)
    report = residual_report(lambda x: jnp.sin(part(x)).sum(), jnp.ones((4, 8)))
    assert sorted((row.storage, row.bytes) for row in report.tensors) == [("mask", 4), ("vjp", 128)]


def test_rows_inside_a_scan_are_found():
    part = memory_encoded(jax.nn.relu)

    def function(x):
        return jax.lax.scan(lambda c, _: (part(c) - 1, None), x, length=5)[0].sum()

    (row,) = residual_report(function, jnp.ones((4, 8))).tensors
    assert (row.storage, row.bytes) == ("mask", 5 * 4)


def test_nnx_module_and_its_names():
    report = residual_report(NNXDigitsCNN(nnx.Rngs(0), width=4), jnp.ones((2, 8, 8, 1)))
    producers = {row.producer for row in report.tensors}
    assert producers & {"DigitsCNN/norm1/sub", "DigitsCNN/norm1/max"}  # by version of JAX
    text = str(report)
    assert f"{report.total_bytes:,}" in text and f"{report.plain_bytes:,}" in text and "pool index" in text


def test_reporting_leaves_the_module_as_it_was():
    model = NNXDigitsCNN(nnx.Rngs(0), width=4)
    before = jax.tree.leaves(nnx.state(model))
    residual_report(model, jnp.ones((2, 8, 8, 1)))
    assert all(a is b for a, b in zip(jax.tree.leaves(nnx.state(model)), before, strict=True))


def test_a_buffer_counts_once_and_arguments_do_not_count():
    def function(x, w):
        y = jnp.exp(x)
        return (y * w + y).sum()

    report = residual_report(memory_encoded(function), jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert [(row.producer, row.bytes) for row in report.tensors] == [("exp", 64)]
    assert report.plain_bytes == 64


def test_a_jitted_function_is_reported_as_the_plain_one():
    def function(x):
        return jnp.sin(memory_encoded(jax.nn.relu)(x)).sum()

    x = jnp.ones((4, 8))
    plain, jitted = residual_report(function, x), residual_report(jax.jit(function), x)
    assert (jitted.total_bytes, jitted.plain_bytes) == (plain.total_bytes, plain.plain_bytes)
    assert jitted.plain_bytes > jitted.total_bytes


def test_nothing_to_differentiate():
    with pytest.raises(jaxpipe.DifferentiationError, match=r"found none among \(0: int32\)"):
        residual_report(lambda x: x, jnp.arange(3))


def rows_of(table):
    """The first cells of the rows of a printed table, and the line of text behind them."""
    return [(*line.split()[:2], line) for line in table.splitlines() if re.match(r" *[\d,]+ +[\d.]+%", line)]


def number(text):
    return int(text.replace(",", ""))


def test_the_print_has_the_ratio_first_and_the_largest_tensors_last():
    def function(x, y):
        return (jnp.tanh(x).sum() + jax.nn.relu(y).sum()) * jnp.tanh(y[0, 0]) * jnp.tanh(y[0, 1])

    x, y = jnp.ones((64, 64)), jnp.ones((32, 32))
    for report, how in (
        (residual_report(function, x, y), ", as if the function were decorated with memory_encoded: "),
        (residual_report(memory_encoded(function), x, y), ": "),
    ):
        text = str(report)
        first, _, rest = text.partition("\n\n")
        first = first.replace("\n", " ")
        assert first.startswith(f"Stored for the backward pass{how}")
        assert first.endswith(f"({report.plain_bytes / report.total_bytes:.1f}x)")
        *rows, folded = rows_of(rest.partition("tensor, and why")[2])
        sizes = [number(size) for size, *_ in rows]
        assert sizes == sorted((row.bytes for row in report.tensors), reverse=True)[: len(sizes)]
        assert len(rows) + int(folded[-1].split()[2]) == len(report.tensors)
        assert number(folded[0]) == report.total_bytes - sum(sizes) < 0.03 * report.total_bytes
        (constants,) = re.findall(r"keeps ([\d,]+) bytes of constants", text)
        assert number(constants) == report.plain_bytes_raw - report.plain_bytes == 4 * 32 * 32


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return x + nn.Dropout(0.5, deterministic=not train)(nn.Dense(16)(nn.gelu(nn.Dense(32)(x))))


class Blocks(nn.Module):
    """Four equal blocks and a head, with batch statistics."""

    @nn.compact
    def __call__(self, x, train=False):
        for _ in range(4):
            x = Block()(x, train)
        return nn.Dense(10)(nn.BatchNorm(use_running_average=not train)(x))


def blocks_loss(model, batch):
    logits = model(batch["x"], train=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


BLOCKS_BATCH = {"x": jnp.ones((64, 16)), "y": jnp.zeros(64, jnp.int32)}


@pytest.fixture(scope="module")
def blocks_report():
    variables = jax.eval_shape(Blocks().init, jax.random.key(0), BLOCKS_BATCH["x"])
    return residual_report(blocks_loss, Blocks(), variables, BLOCKS_BATCH)


@pytest.mark.core
def test_equal_blocks_are_one_row_with_their_sum(blocks_report, narrow):
    modules, tensors = str(blocks_report).split("tensor, and why")
    hidden = 4 * 64 * 32 * 4  # in each of four blocks the argument of gelu, float32[64, 32]
    (row,) = [row for row in rows_of(tensors) if row[-1].endswith("4 x Blocks/Block_*/Dense_1/add")]
    assert number(row[0]) == hidden and "float32[64,32] for the gradient of" in tensors
    by_name = {line.split(None, 3)[3]: number(size) for size, _, line in rows_of(modules)}
    of_blocks = sum(row.bytes for row in blocks_report.tensors if "/Block_" in row.producer)
    assert by_name["4 x Blocks/Block_*/Dense_1"] == hidden
    assert by_name["4 x Blocks/Block_*"] == of_blocks and by_name["total"] == blocks_report.total_bytes
    assert not any(f"Block_{k}" in str(blocks_report) for k in range(4))


def test_the_print_is_no_wider_than_the_terminal(blocks_report, monkeypatch):
    for width in (60, 80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        assert max(map(len, str(blocks_report).splitlines())) <= width


def test_notebooks_show_html(blocks_report):
    page = blocks_report._repr_html_()
    assert page.count("<table>") == 2 and "4 x Blocks/Block_*/Dense_1/add" in page
    assert f'<td class="right">{blocks_report.total_bytes:,}</td>' in page


def test_numbers_of_modules_are_not_those_of_operators():
    assert pattern("Net/block3/exp2") == pattern("Net/block12/exp2") != pattern("Net/block3/exp3")
    assert pattern("Net/block*/exp2") != pattern("Net/block3/exp2")
    assert common_name(["Block_0/Dense_1/add", "Block_3/Dense_1/add"]) == "Block_*/Dense_1/add"


def test_blocks_that_keep_something_else_are_rows_of_their_own(narrow):
    def function(x, ws):
        for k, w in enumerate(ws):
            with jax.named_scope(f"block_{k}"):
                x = jnp.tanh(x @ w)
        return x.sum()

    x, ws = jnp.ones((32, 16)), [jnp.ones((16, 16)), jnp.ones((16, 16)), jnp.ones((16, 64))]
    modules = str(residual_report(function, x, ws)).partition("tensor, and why")[0]
    assert "2 x block_*" in modules and "block_2" in modules


@pytest.mark.core
def test_a_loss_of_a_linen_module_takes_module_variables_and_batch(blocks_report):
    """As ``module.apply`` with the same random keys, which the same loss in plain Flax writes."""

    def plain(variables, key, batch):
        def model(x, train):
            return Blocks().apply(variables, x, train=train, mutable=["batch_stats"], rngs={"dropout": key})[0]

        return blocks_loss(model, batch)

    variables = jax.eval_shape(Blocks().init, jax.random.key(0), BLOCKS_BATCH["x"])
    expected = residual_report(plain, variables, jax.random.key(0), BLOCKS_BATCH)
    assert [row.bytes for row in blocks_report.tensors] == [row.bytes for row in expected.tensors]
    assert blocks_report.plain_bytes == expected.plain_bytes

    def with_streams(model, batch, rngs):
        return blocks_loss(model, batch | {"x": batch["x"] + jax.random.normal(rngs.noise(), (64, 16))})

    assert residual_report(with_streams, Blocks(), variables, BLOCKS_BATCH).total_bytes >= blocks_report.total_bytes
    alone = residual_report(
        lambda model, x: model(x), nn.Dense(3), {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}, X
    )
    assert alone.plain_bytes == 0

    def own(module, variables, x):  # a function that takes variables keeps them
        return module.apply(variables, x).sum()

    assert residual_report(own, nn.Dense(3), nn.Dense(3).init(jax.random.key(0), X), X).plain_bytes == 0


def test_an_error_of_a_linen_loss_is_its_own():
    variables = Blocks().init(jax.random.key(0), BLOCKS_BATCH["x"])
    with pytest.raises(KeyError, match="'y'") as raised:
        residual_report(blocks_loss, Blocks(), variables, {"x": BLOCKS_BATCH["x"]})
    assert any(note.startswith("jaxpipe called blocks_loss(model, batch)") for note in raised.value.__notes__)


X = jnp.ones((2, 4))


def test_density_and_overflows_take_a_linen_module_too():
    variables = Blocks().init(jax.random.key(0), BLOCKS_BATCH["x"])
    assert jaxpipe.measure_density(blocks_loss, Blocks(), variables, BLOCKS_BATCH).fractions
    assert jaxpipe.count_overflows(blocks_loss, memory_encoded(Blocks)(), variables, BLOCKS_BATCH) == 0


@pytest.mark.core
@pytest.mark.parametrize("batch", [BLOCKS_BATCH, {"x": jnp.zeros((4, 8), jnp.int32), "y": jnp.zeros(4, jnp.int32)}])
def test_a_linen_module_without_variables_says_what_to_pass(batch):
    message = (
        r"blocks_loss\(a Blocks, a dict of 'x', 'y'\).*residual_report\(loss, Blocks\(\.\.\.\), variables, batch\)"
    )
    with pytest.raises(jaxpipe.ModelError, match=message):
        residual_report(blocks_loss, Blocks(), batch)


@pytest.mark.core
@pytest.mark.parametrize(
    "derivative",
    [jax.grad, jax.value_and_grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(memory_encoded(f)), nnx.grad],
)
def test_a_gradient_is_refused(derivative):
    with pytest.raises(jaxpipe.DifferentiationError, match=r"pass the function .* residual_report\(loss, \.\.\.\)"):
        residual_report(derivative(lambda x: jnp.sin(x).sum()), jnp.ones(3))


def test_a_loss_with_a_gradient_in_it_is_none():
    def penalty(x):
        gradient = jax.grad(lambda x: jnp.sin(x).sum())(x)
        return (gradient**2).sum(), gradient

    assert residual_report(penalty, jnp.ones(3)).plain_bytes > 0


def test_a_model_that_is_given_a_whole_batch():
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    message = (
        r"called the model Linear\(a dict of 'x', 'y'\), which raised .* as in residual_report\(model, batch\['x'\]\)"
    )
    with pytest.raises(jaxpipe.ModelError, match=message):
        residual_report(model, {"x": jnp.ones((2, 3)), "y": jnp.ones(2)})
    with pytest.raises(
        jaxpipe.ModelError, match=r"the Linen module VGG16, .*lambda variables, x: VGG16\(\.\.\.\)\.apply"
    ):
        residual_report(VGG16(), jnp.ones((1, 32, 32, 3)))


def test_bytes_of_devices_are_a_table():
    report = jaxpipe.MemoryReport((1024, 2048), (1536, 2560), (512, 0), (0, 0), (0, 0))
    assert [line.split() for line in str(report).splitlines()[2:]] == [
        ["0", "1.00", "KiB", "1.50", "KiB", "512", "B"],
        ["1", "2.00", "KiB", "2.50", "KiB", "0", "B"],
    ]
    assert '<td class="right">2.50 KiB</td>' in report._repr_html_()
