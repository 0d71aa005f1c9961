"""The block-sparse exchange: against NumPy, against dense SGD, and by what must hold whatever is sent."""

import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.errors import PartitionError
from jaxpipe.gradients import block_numbers, block_sparse, run_length, state_specs
from jaxpipe.gradients.blocks import find_blocks
from jaxpipe.gradients.value_codes import CODES
from tests.support.block_sparse_reference import Reference
from tests.support.compare import assert_same_bits


REPLICAS = 4
MODES = ["own", "consensus"]
NORMS = ["l1", "l2"]


def shapes(tree):
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), tree, is_leaf=lambda x: type(x) is tuple
    )


PARAMETERS = shapes({"conv": {"kernel": (3, 3, 2, 5), "bias": (5,)}, "dense": {"kernel": (6, 7), "bias": (7,)}})


def whole_gradients(seed, tree=PARAMETERS, replicas=REPLICAS):
    """Small integers, of which all sums and their quarters are exact: ``[replicas, ...]``."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.integers(-8, 9, (replicas, *x.shape)).astype(np.float32), tree)


class Replicas:
    """A transformation on simulated replicas; gradients and averages have an axis for them."""

    def __init__(self, transformation, tree=PARAMETERS, replicas=REPLICAS, check_vma=True):
        mesh = jax.sharding.Mesh(jax.devices()[:replicas], ("data",))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
        specs = state_specs(jax.eval_shape(transformation.init, zeros), "data")
        options = {"mesh": mesh, "check_vma": check_vma}
        self.state = jax.jit(jax.shard_map(transformation.init, in_specs=P(), out_specs=specs, **options))(zeros)

        def update(gradients, state):
            updates, state = transformation.update(jax.tree.map(lambda g: g[0], gradients), state)
            return jax.tree.map(lambda x: x[None], jax.lax.pcast(updates, "data", to="varying")), state

        self.step = jax.jit(jax.shard_map(update, in_specs=(P("data"), specs), out_specs=(P("data"), specs), **options))

    def __call__(self, gradients):
        updates, self.state = self.step(gradients, self.state)
        return jax.tree.map(np.asarray, updates)

    def residual(self, replicas=REPLICAS):
        """``[replicas, ...]``, zeros of the gradient's shape where nothing is ever left."""
        state = next(part for part in jax.tree.leaves(self.state, is_leaf=is_exchange) if is_exchange(part))
        return jax.tree.map(lambda r: np.asarray(r).reshape(replicas, -1, *r.shape[1:]), state.residual)


def is_exchange(part):
    return type(part).__name__ == "BlockSparseState"


def same_everywhere(updates):
    for x in jax.tree.leaves(updates):
        assert all(np.array_equal(x[0].view(np.uint32), row.view(np.uint32)) for row in x)
    return jax.tree.map(lambda x: x[0], updates)


# Which blocks there are.


@pytest.mark.core
def test_blocks_of_each_kind_of_parameter():
    tree = shapes(
        {
            "conv": {"kernel": (3, 3, 16, 32), "bias": (32,)},
            "dense": {"kernel": (100, 10)},
            "embed": {"embedding": (1000, 64)},
            "layers": {"kernel": (12, 64, 256)},
            "scale": (),
        }
    )
    rules = {"embed": 0, "layers": (0, -1)}
    blocks = {b.path: (b.layers, b.count, b.size, b.is_whole) for b in find_blocks(tree, 2, False, rules)}
    assert blocks == {
        "conv/kernel": (1, 32, 3 * 3 * 16, False),
        "conv/bias": (1, 32, 1, False),
        "dense/kernel": (1, 10, 100, False),
        "embed/embedding": (1, 1000, 64, False),
        "layers/kernel": (12, 256, 64, False),
        "scale": (1, 1, 1, True),
    }
    assert [b.path for b in find_blocks(tree, 2, True, rules) if b.is_whole] == ["conv/bias", "scale"]


@pytest.mark.parametrize(
    ("k", "expected"), [(1, 1), (3, 3), (0.25, 8), (0.26, 9), (0.001, 1), ({"conv": 0.5}, 16), ({"dense": 2}, 1)]
)
def test_numbers_of_blocks(k, expected):
    tree = shapes({"conv": {"kernel": (3, 3, 16, 32)}, "dense": {"kernel": (100, 10)}})
    assert {b.path: b.k for b in find_blocks(tree, k, True, {})}["conv/kernel"] == expected


def test_blocks_lie_where_they_should():
    x = jnp.arange(2 * 3 * 4).reshape(2, 3, 4)
    (b,) = find_blocks([jax.ShapeDtypeStruct((2, 3, 4), jnp.float32)], 1, True, {"*": (2, 1)})
    blocks = b.to_blocks(x)
    assert blocks.shape == (4, 3, 2)
    assert blocks[3, 2].tolist() == x[:, 2, 3].tolist()
    assert np.array_equal(b.from_blocks(blocks), x)


VGG16 = [64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]


def vgg16():
    sizes = zip([3, *VGG16], VGG16, strict=False)
    layers = [(3, 3, i, o) for i, o in sizes] + [(512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)]
    return shapes([{"kernel": shape, "bias": shape[-1:]} for shape in layers])


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "values", "indices", "number_bytes", "norms"),
    [
        # A number takes a byte in the 7 convolutions of 64 to 256 filters, and two in the 9 layers with more.
        ({"dense_1d": False}, 66_731, 32, 2 * (7 + 9 * 2), 0),
        ({}, 80_131, 16, 7 + 9 * 2, 0),
        # One norm for each of the 13,416 filters and neurons.
        ({"mode": "consensus"}, 80_131, 0, 0, sum(VGG16) + 4096 + 4096 + 1000),
    ],
)
def test_what_vgg16_for_imagenet_sends(options, values, indices, number_bytes, norms):
    traffic = block_sparse(k=1, **options).traffic(vgg16())
    assert (traffic.values, traffic.indices, traffic.norms) == (values, indices, norms)
    assert traffic.bytes == 4 * (values + norms) + number_bytes and traffic.dense_bytes == 4 * 138_357_544


# What must hold whatever is sent.


@pytest.mark.versions
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("mode", MODES)
def test_one_replica_sends_or_keeps_every_bit(mode, norm):
    transformation = block_sparse(k=2, norm=norm, mode=mode)
    rng = np.random.default_rng(0)
    gradients = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), PARAMETERS)
    state = transformation.init(gradients)
    sent, state = jax.jit(transformation.update)(gradients, state)
    for g, s, r in zip(*map(jax.tree.leaves, (gradients, sent, state.residual)), strict=True):
        assert np.array_equal(s, g) if not r.size else (np.array_equal(s + r, g) and not ((s != 0) & (r != 0)).any())
    sparse = zip(find_blocks(PARAMETERS, 2, True, {}), jax.tree.leaves(sent), strict=True)
    assert [int((b.to_blocks(s) != 0).any(-1).sum()) for b, s in sparse if not b.is_whole] == [2, 2]


@pytest.mark.core
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_all_blocks_are_dense_sgd_with_momentum(mode, replicas):
    """Bit for bit: a gradient of which all is sent goes by the same all-reduce.

    Momentum runs operator by operator: XLA contracts its product with either neighbor, by what else is in the program.
    """
    momentum = optax.chain(optax.trace(0.9), optax.scale(-0.1))
    run = Replicas(block_sparse("data", k=1.0, mode=mode), replicas=replicas)
    dense = Replicas(optax.stateless(lambda g, _: jax.lax.pmean(g, "data")), replicas=replicas)
    states = [momentum.init(whole_gradients(0, replicas=replicas))] * 2
    rng = np.random.default_rng(0)
    for _ in range(3):
        gradients = jax.tree.map(lambda x: rng.normal(size=(replicas, *x.shape)).astype(np.float32), PARAMETERS)
        results = [momentum.update(f(gradients), state) for f, state in zip((run, dense), states, strict=True)]
        assert_same_bits(*(updates for updates, _ in results))
        states = [state for _, state in results]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dense_1d", [True, False])
def test_nothing_is_lost_over_many_steps(mode, norm, dense_1d):
    """Sent and unsent parts add up to the gradient, to the last bit: all numbers are small multiples of 1/4."""
    run = Replicas(block_sparse("data", k=2, norm=norm, mode=mode, dense_1d=dense_1d))
    total = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), PARAMETERS)
    sent = total
    for step in range(12):
        gradients = whole_gradients(step)
        total = jax.tree.map(lambda t, g: t + g.sum(0), total, gradients)
        sent = jax.tree.map(lambda s, u: s + REPLICAS * u, sent, same_everywhere(run(gradients)))
    left = jax.tree.map(lambda s, r: r.sum(0) if r.size else np.zeros_like(s), sent, run.residual())
    for s, r, t in zip(*map(jax.tree.leaves, (sent, left, total)), strict=True):
        assert np.array_equal(s + r, t)


@pytest.mark.core
@pytest.mark.parametrize(
    "options",
    [
        {"bits": 2},
        {"bits": 0.5},
        {"decay": 0.75},
        {"bits": 2, "decay": 0.75, "k": 1.0},
        {"bits": 0.5, "k": 1.0},
        {"decay": 0.5, "mode": "consensus"},
    ],
    ids=str,
)
def test_codes_and_decay_step_by_step(options):
    """Against NumPy: averages, and what every replica keeps."""
    options = {"k": 2, "mode": "own", **options}
    run = Replicas(block_sparse("data", **options))
    reference = Reference(100 if options["k"] == 1.0 else 2, "l2", **{k: v for k, v in options.items() if k != "k"})
    for step in range(6):
        rng = np.random.default_rng(step)
        gradients = jax.tree.map(lambda x, r=rng: r.normal(size=(REPLICAS, *x.shape)).astype(np.float32), PARAMETERS)
        averages, left = same_everywhere(run(gradients)), run.residual()
        for path, g in jax.tree_util.tree_leaves_with_path(gradients):
            name = jax.tree_util.keystr(path)
            expected = reference(name, list(g))
            get = lambda tree, path=path: tree[path[0].key][path[1].key]  # noqa: E731
            np.testing.assert_allclose(get(averages), expected, rtol=1e-5, atol=1e-5)
            if g.ndim > 2:
                np.testing.assert_allclose(get(left), np.stack(reference.left[name]), rtol=1e-5, atol=1e-5)


def decoded(bits, x):
    """A row as a block through the code and back."""
    blocks = x[:, None].astype(np.float32)
    codes = CODES[bits].encode(jnp.asarray(blocks))
    assert codes.dtype == jnp.uint8 and codes.shape == (len(x), CODES[bits].bytes(1, x.shape[1]))
    return np.asarray(CODES[bits].decode(codes, 1, x.shape[1]))[:, 0]


def expected_square_of_the_largest_of_eight():
    """Of normal numbers, the square of the mean of the largest magnitude, by its density."""
    x = np.linspace(0, 8, 80_001)
    density = np.sqrt(2 / np.pi) * np.exp(-(x**2) / 2)
    below = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(x))])
    return float(np.trapezoid(8 * below**7 * density * x, x)) ** 2


@pytest.mark.parametrize(("bits", "lost"), [(2, 0.1175), (0.5, 1 - expected_square_of_the_largest_of_eight() / 8)])
def test_codes_never_lose_more_than_there_was(bits, lost):
    """Of a normal distribution 12 % in 2 bits (Max, 1960); of a spike, of nothing and of equal elements at most all."""
    rng = np.random.default_rng(0)
    normal = rng.normal(size=(8, 4096)).astype(np.float32)
    assert ((decoded(bits, normal) - normal) ** 2).sum() / (normal**2).sum() == pytest.approx(lost, abs=0.003)
    for x in (np.eye(1, 511), np.zeros((1, 5)), -np.ones((1, 6)), rng.standard_cauchy((20, 1001))):
        x = x.astype(np.float32)
        assert (((decoded(bits, x) - x) ** 2).sum(1) <= (x**2).sum(1) * (1 + 1e-6)).all()
    assert np.isnan(decoded(bits, np.array([[1.0, np.nan]], np.float32))).all()


@pytest.mark.parametrize("bits", CODES)
def test_codes_are_the_same_with_64_bit_numbers(bits):
    x = np.random.default_rng(0).normal(size=(8, 100))
    usual = decoded(bits, x)
    with jax.enable_x64(True):
        assert_same_bits(decoded(bits, x).astype(np.float32), usual)


def test_bytes_of_codes():
    """By hand: of [100, 40] two blocks, each a number, a scale and 100 elements of a quarter of a byte."""
    tree = shapes({"kernel": (100, 40)})
    traffic = block_sparse(k=2, bits=2).traffic(tree)
    assert (traffic.bytes, traffic.value_bytes, traffic.dense_bytes) == (2 * (1 + 4 + 25), 2 * (4 + 25), 4 * 4000)
    # Of all 40 a map of bits is shorter than their numbers.
    assert block_sparse(k=1.0, bits=2).traffic(tree).bytes == 5 + 40 * (4 + 25)
    # One scale for all; half a byte for each eight elements.
    assert block_sparse(k=1.0, bits=0.5).traffic(tree).bytes == 5 + 4 + 4000 // 16


@pytest.mark.versions
@pytest.mark.parametrize("count", [1, 2, 8, 9, 40, 255, 256, 257, 1000, 65536, 65537])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.2, 0.5, 1.0])
def test_numbers_of_blocks_are_what_was_encoded(count, share):
    """In the fewest bytes of a byte, two or four for each, or a bit for each of all."""
    k, rng = max(1, int(share * count)), np.random.default_rng(count)
    numbers = np.sort(np.stack([rng.permutation(count)[:k] for _ in range(3)]), axis=1).astype(np.int32)
    codes = block_numbers.encode(jnp.asarray(numbers), count)
    assert codes.dtype == jnp.uint8 and codes.shape == (3, block_numbers.number_bytes(count, k))
    assert codes.shape[1] == min(k * (1 if count <= 256 else 2 if count <= 65536 else 4), -(-count // 8))
    decoded = block_numbers.decode(codes, count, k)
    assert decoded.dtype == jnp.int32 and np.array_equal(decoded, numbers)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_contraction(mode, k):
    """``|p - C(p)|^2 <= (1 - k/n) |p|^2`` for the L2 norm: of each replica, or summed over them by consensus."""
    tree = shapes({"kernel": (9, 8)})
    run = Replicas(block_sparse("data", k=k, mode=mode), tree)
    before = jax.tree.map(np.zeros_like, run.residual())
    for step in range(6):
        rng = np.random.default_rng(step)
        gradients = jax.tree.map(lambda x, rng=rng: rng.normal(size=(REPLICAS, *x.shape)).astype(np.float32), tree)
        corrected = (gradients["kernel"] + before["kernel"]).astype(np.float64)
        run(gradients)
        before = run.residual()
        have, left = ((x.astype(np.float64) ** 2).sum((1, 2)) for x in (corrected, before["kernel"]))
        if mode == "consensus":
            have, left = have.sum(), left.sum()
        assert (left <= (1 - k / 8) * have * (1 + 1e-6)).all()  # squares were summed in float32


@pytest.mark.parametrize("mode", MODES)
def test_another_order_of_replicas_only_reorders_the_residuals(mode):
    order = [2, 0, 3, 1]
    first, second = (Replicas(block_sparse("data", k=1, mode=mode)) for _ in range(2))
    for step in range(5):
        gradients = whole_gradients(step)
        updates = same_everywhere(first(gradients))
        assert_same_bits(same_everywhere(second(jax.tree.map(lambda g: g[order], gradients))), updates)
        assert_same_bits(second.residual(), jax.tree.map(lambda r: r[order], first.residual()))


# Against NumPy.


class SmallCNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(6, (3, 3))(x))
        x = nn.relu(nn.Conv(9, (3, 3), strides=2)(x))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


@pytest.fixture(scope="module")
def cnn():
    """Parameters, and ``gradients(params, step)`` of four replicas."""
    model = SmallCNN()
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))["params"]

    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply({"params": params}, x), y).mean()

    @jax.jit
    def gradients(params, step):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(1), step), REPLICAS)
        x = jax.vmap(lambda key: jax.random.normal(key, (6, 8, 8, 1)))(keys)
        y = jax.vmap(lambda key: jax.random.randint(key, (6,), 0, 10))(keys)
        return jax.vmap(jax.grad(loss), (None, 0, 0))(params, x, y)

    return params, gradients


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("mode", MODES)
def test_twenty_steps_of_a_cnn_agree_with_numpy(cnn, mode, norm):
    """Every run picks the same blocks, so only roundings differ: of the sum of four, and of momentum in one kernel."""
    params, gradients = cnn
    run = Replicas(
        optax.chain(block_sparse("data", k=2, norm=norm, mode=mode), optax.trace(0.9), optax.scale(-0.05)), params
    )
    reference = Reference(2, norm, mode)
    velocity = jax.tree.map(np.zeros_like, params)
    expected = params
    for step in range(20):
        g = jax.tree.map(np.asarray, gradients(params, step))
        params = optax.apply_updates(params, same_everywhere(run(g)))
        flat = jax.tree_util.tree_leaves_with_path(g)
        means = jax.tree.unflatten(jax.tree.structure(g), [reference(str(path), list(x)) for path, x in flat])
        velocity = jax.tree.map(lambda v, u: np.float32(0.9) * v + u, velocity, means)
        expected = jax.tree.map(lambda w, v: w - np.float32(0.05) * v, expected, velocity)
    for a, b in zip(*map(jax.tree.leaves, (params, expected)), strict=True):
        assert np.abs(a - b).max() <= 20 * 4 * np.spacing(np.abs(b).max())  # four roundings a step


# What is sent.


def collective_bytes(text):
    """Bytes that one replica hands to the collectives of a compiled program: results, of gathers a replica's part."""
    sizes = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "u8": 1}
    sent = {"all-reduce": 0, "all-gather": 0}
    for result, name in re.findall(r"= (.*?) (all-reduce|all-gather)(?:-start)?\(", text):
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", result):
            sent[name] += sizes[dtype] * int(np.prod([int(d) for d in dims.split(",") if d] or [1]))
    return sent["all-reduce"] + sent["all-gather"] // REPLICAS


@pytest.mark.versions
@pytest.mark.parametrize("dense_1d", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_bytes_in_the_compiled_program(mode, dense_1d):
    transformation = block_sparse("data", k=2, mode=mode, dense_1d=dense_1d)
    run = Replicas(transformation)
    text = run.step.lower(whole_gradients(0), run.state).compile().as_text()
    by_element = mode == "own" and not dense_1d  # by consensus, as many norms would be sent as there are elements
    kernels, biases = (3 * 3 * 2 + 6) * 2, (2 + 2) if by_element else (5 + 7)
    # Two of 5 or of 7 blocks are told by a byte that has a bit for each; by consensus norms are.
    extra = {"own": 4 if by_element else 2, "consensus": 4 * (5 + 7)}[mode]
    assert collective_bytes(text) == 4 * (kernels + biases) + extra == transformation.traffic(PARAMETERS).bytes


def test_bytes_of_the_run_length_code():
    """Block-major gradients have a run for each block, and one for a vector that is sent whole."""
    exchange = block_sparse(k=2)
    rng = np.random.default_rng(0)
    gradients = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), PARAMETERS)
    sent, _ = exchange.update(gradients, exchange.init(gradients))
    blocks = find_blocks(PARAMETERS, 2, True, {})
    kernels = [b.to_blocks(x) for b, x in zip(blocks, jax.tree.leaves(sent), strict=True) if not b.is_whole]
    codes = [run_length.encode(np.asarray(x)) for x in kernels]
    whole = 4 * (5 + 7)
    values = exchange.traffic(PARAMETERS).value_bytes
    assert sum(code.bytes - 8 * len(code.runs) for code in codes) + whole == values
    assert all(len(code.runs) <= 2 for code in codes)  # two blocks side by side are one run


def test_warm_up_goes_from_dense_to_sparse():
    transformation = block_sparse("data", k=1, warmup=[(2, 1.0), (1, 0.5)])
    assert [transformation.traffic(PARAMETERS, step).values for step in (0, 1, 2, 3, 9)] == [144, 144, 90, 36, 36]
    run = Replicas(transformation)
    counts = []
    for step in range(5):
        gradients = whole_gradients(step)
        updates = same_everywhere(run(gradients))
        counts.append(int((updates["dense"]["kernel"] != 0).any(0).sum()))
        if step < 2:
            assert np.array_equal(updates["dense"]["kernel"], gradients["dense"]["kernel"].mean(0))
            assert not any(r.any() for r in jax.tree.leaves(run.residual()))
    assert counts[:2] == [7, 7] and counts[2] >= 4 and counts[3] <= REPLICAS and counts[4] <= REPLICAS


def test_the_share_that_was_sent_is_told():
    transformation = block_sparse(k=1)
    gradient = jnp.array([[3.0, 0.0, 1.0], [4.0, 0.0, 1.0]])
    _, state = transformation.update(gradient, transformation.init(gradient))
    assert state.sent_share == pytest.approx(25 / 27) and state.residual_norm == pytest.approx(2**0.5)


# State.


@pytest.mark.parametrize("keep_residual", [True, False])
def test_resumed_runs_need_the_residuals(keep_residual):
    straight, first = (Replicas(block_sparse("data", k=1)) for _ in range(2))
    expected = [straight(whole_gradients(step)) for step in range(6)]
    for step in range(3):
        first(whole_gradients(step))
    saved = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, first.state)))
    if not keep_residual:
        saved = saved._replace(residual=jax.tree.map(np.zeros_like, saved.residual))
    second = Replicas(block_sparse("data", k=1))
    second.state = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), saved, second.state)
    resumed = [second(whole_gradients(step)) for step in range(3, 6)]
    same = [np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (resumed, expected[3:])), strict=True)]
    assert all(same) == keep_residual


def test_half_precision_gradients_keep_what_their_type_could_not_hold():
    transformation = block_sparse(k=1)
    gradients = jnp.array([[1.0, 0.25], [2.0, 0.5]] * 2, jnp.bfloat16)
    state = transformation.init(gradients)
    assert state.residual.dtype == jnp.float32
    state = state._replace(residual=jnp.full((4, 2), 2.0**-12, jnp.float32))
    sent, state = transformation.update(gradients, state)
    assert sent.dtype == jnp.bfloat16 and sent.tolist() == [[1.0, 0.0], [2.0, 0.0]] * 2
    assert state.residual.tolist() == [[2.0**-12, 0.25 + 2.0**-12], [2.0**-12, 0.5 + 2.0**-12]] * 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_not_finite_blocks_are_sent_and_leave_nothing(dtype, norm, sign):
    """A NaN of either sign: sorted by its bits, a negative one would come last, and never be sent."""
    transformation = block_sparse(k=2, norm=norm)
    not_finite = jnp.array([jnp.copysign(jnp.nan, sign), jnp.inf, 1.0])
    gradients = jnp.ones((5, 3)).at[0].set(not_finite).astype(dtype)
    sent, state = transformation.update(gradients, transformation.init(gradients))
    assert np.isnan(state.sent_share)
    assert not np.isfinite(sent[0, :2]).any() and state.residual.tolist() == [[0, 0, 1]] * 5


def test_what_overflows_a_narrow_type_leaves_nothing():
    transformation = block_sparse(k=1)
    gradients = jnp.full((5, 3), 1.0, jnp.float16).at[:, 0].set(6e4)
    state = transformation.init(gradients)
    sent, state = transformation.update(gradients, state._replace(residual=state.residual.at[:, 0].set(6e4)))
    assert np.isinf(sent[:, 0]).all() and state.residual[:, 0].tolist() == [0] * 5


def test_a_state_made_of_varying_parameters_is_a_carry():
    transformation = block_sparse("data", k=1)
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))

    def run(params, gradients):
        varying = jax.lax.pcast(params, "data", to="varying")

        def step(state, g):
            return transformation.update({"w": g}, state)[::-1]

        _, updates = jax.lax.scan(step, transformation.init({"w": varying}), gradients[0])
        return updates["w"]

    gradients = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5, 4)), jnp.float32)
    updates = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))(
        jnp.zeros((5, 4)), gradients
    )
    one_by_one = Replicas(transformation, shapes({"w": (5, 4)}), replicas=2)
    assert_same_bits(updates, jnp.stack([one_by_one({"w": gradients[:, t]})["w"][0] for t in range(3)]))


def test_momentum_before_the_exchange_is_refused():
    chain = optax.chain(optax.trace(0.9), block_sparse("data"))
    with pytest.raises(PartitionError, match="comes before block_sparse"):
        state_specs(jax.eval_shape(chain.init, PARAMETERS), "data")
    state_specs(jax.eval_shape(optax.chain(optax.clip(1.0), block_sparse("data")).init, PARAMETERS), "data")


def test_nothing_is_sent_in_blocks_that_whole_takes_fewer_bytes():
    bias = shapes({"bias": (64,)})
    assert block_sparse(dense_1d=False).traffic(bias).bytes == 4 + 1
    assert block_sparse(dense_1d=False, mode="consensus").traffic(bias).bytes == 4 * 64
    half = {"bias": jax.ShapeDtypeStruct((100,), jnp.bfloat16)}
    # Blocks are gathered as they are, 2 bytes with a bit for each of all; what is whole is added up in float32.
    assert block_sparse(k=0.6, dense_1d=False).traffic(half).bytes == 60 * 2 + 13
    assert block_sparse(k=1.0, dense_1d=False).traffic(half).bytes == 100 * 2 + 13
    tiny = {"bias": jax.ShapeDtypeStruct((3,), jnp.float32)}
    assert block_sparse(k=1.0, dense_1d=False).traffic(tiny).bytes == 3 * 4


def test_without_checked_types_the_result_is_the_same():
    checked, unchecked = (Replicas(block_sparse("data", k=2), check_vma=flag) for flag in (True, False))
    assert_same_bits(checked(whole_gradients(0)), unchecked(whole_gradients(0)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "linf"}, "norm='linf'"),
        ({"mode": "union"}, "mode='union'"),
        ({"axis_name": ("a", "b")}, "axis_name="),
        ({"k": 0}, "k=0 for conv/kernel"),
        ({"k": 1.5}, "k=1.5 for conv/kernel"),
        ({"k": True}, "k=True"),
        ({"k": {"convolution": 3}}, "'convolution' fits no parameter. There are conv/bias, conv/kernel"),
        ({"blocks": {"conv": 4}}, r"4 for conv/bias of shape \(5,\)"),
        ({"blocks": {"*kernel": "all"}}, "'all' for conv/kernel"),
        ({"blocks": {"*kernel": (0, 0)}}, "names an axis twice"),
        ({"warmup": [(0, 1.0)]}, "warmup"),
        ({"warmup": (100, 1.0)}, "warmup: 100; each entry must be"),
        ({"warmup": 100}, "warmup: 100; each entry must be"),
        ({"decay": 1.5}, "decay=1.5"),
        ({"bits": 4}, "bits=4"),
        ({"bits": 2, "mode": "consensus"}, "bits=2 with mode='consensus'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(PartitionError, match=message):
        block_sparse(**options).init(jax.tree.map(lambda x: jnp.zeros(x.shape), PARAMETERS))


def test_gradients_that_jax_has_summed_are_refused():
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    transformation = block_sparse("data")

    def step(w, x):
        return transformation.update(jax.grad(lambda w: (x @ w).sum())(w), transformation.init(w))[0]

    with pytest.raises(PartitionError, match="pcast"):
        jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(jnp.ones((4, 3)), jnp.ones((2, 4)))
