"""The program of each process in tests with several; started by ``tests/test_hosts.py``, and imported for one process.

python tests/support/hosts_run.py DEVICES TASK ARGUMENTS
"""

import functools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpipe
from jaxpipe import multihost
from jaxpipe.runtime.mpmd.send_between_processes import Transfers
from jaxpipe.runtime.mpmd.stage_devices import StageDevices
from jaxpipe.runtime.mpmd.step_graph import Place, Send, Spread


ROWS = 16

#: Every second dimension of a kernel over the axis ``model``.
KERNELS = jaxpipe.PlanOptions(shardings={"Dense_*/kernel": PartitionSpec(None, "model")})

#: Meshes, and what else ``partition`` gets.
CASES = {
    "stage": (((4,), ("stage",)), {}),
    "data": (((2, 2), ("data", "stage")), {}),
    "both": (((2, 2), ("stage", "data")), {}),
    "three": (((3,), ("stage",)), {}),
    "six": (((2, 3), ("data", "stage")), {"options": jaxpipe.PlanOptions(on_nonfinite="skip")}),
    "spmd": (((4,), ("stage",)), {"runtime": "spmd"}),
    "spmd data": (((2, 2), ("data", "stage")), {"runtime": "spmd"}),
    "budget": (((4,), ("stage",)), {"memory": "36KiB", "options": jaxpipe.PlanOptions(allow_over_budget=True)}),
    "sparse": (
        ((2, 2), ("data", "stage")),
        {"gradient_exchange": jaxpipe.gradients.block_sparse(k=2), "optimizer": optax.sgd(0.1, momentum=0.9)},
    ),
    "skip": (((4,), ("stage",)), {"options": jaxpipe.PlanOptions(on_nonfinite="skip"), "schedule": "zero_bubble"}),
    "v": (((4,), ("stage",)), {"schedule": "zbv"}),
    "pipedream": (
        ((4,), ("stage",)),
        {"schedule": "pipedream", "optimizer": optax.sgd(0.01, momentum=0.9)},
    ),
    "unrolled": (((4,), ("stage",)), {"options": jaxpipe.PlanOptions(unroll_scans=True)}),
    "model within": (((2, 2), ("stage", "model")), {"options": KERNELS}),
    "model across": (((2, 2), ("model", "stage")), {"options": KERNELS}),
    "zero": (((2, 2), ("data", "stage")), {"options": jaxpipe.PlanOptions(zero=1)}),
}


#: Arrays of all kinds that stages may send to each other.
MESSAGES = {
    "float32": jax.ShapeDtypeStruct((3, 2), np.float32),
    "bfloat16": jax.ShapeDtypeStruct((5,), jnp.bfloat16),
    "float16": jax.ShapeDtypeStruct((2, 3), np.float16),
    "float8": jax.ShapeDtypeStruct((7,), jnp.float8_e4m3fn),
    "bool": jax.ShapeDtypeStruct((9,), np.bool_),
    "int8": jax.ShapeDtypeStruct((3,), np.int8),
    "complex": jax.ShapeDtypeStruct((2,), np.complex64),
    "scalar": jax.ShapeDtypeStruct((), np.float32),
    "half scalar": jax.ShapeDtypeStruct((), jnp.bfloat16),
    "empty": jax.ShapeDtypeStruct((0, 4), np.float32),
    "key": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2)),
    "lone key": jax.eval_shape(lambda: jax.random.key(0)),
}


def drawn(aval, seed: int):
    """An array with random bits: NaNs, infinities and negative zeros among them."""
    data = np.random.default_rng(seed)
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(seed), aval.shape) if aval.shape else jax.random.key(seed)
    if aval.dtype == np.bool_:
        return data.random(aval.shape) < 0.5
    return np.frombuffer(data.bytes(aval.size * aval.dtype.itemsize), aval.dtype).reshape(aval.shape)


def bits(x) -> np.ndarray:
    """The bytes of an array."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.frombuffer(np.asarray(x).tobytes(), np.uint8)


class Net(nn.Module):
    """Dense layers with normalization and dropout."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(24)(x))
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(x))
        return nn.Dense(4)(nn.tanh(nn.Dense(24)(nn.tanh(nn.Dense(24)(x)))))


class Layer(nn.Module):
    """One of several that are alike."""

    train: bool

    @nn.compact
    def __call__(self, x, _):
        y = nn.BatchNorm(use_running_average=not self.train, momentum=0.9)(nn.Dense(24)(x))
        return x + nn.Dropout(0.1, deterministic=not self.train)(nn.tanh(y)), None


class Scanned(nn.Module):
    """Layers that are one scan."""

    @nn.compact
    def __call__(self, x, train=True):
        axes = {"variable_axes": {"params": 0, "batch_stats": 0}, "split_rngs": {"params": True, "dropout": True}}
        x, _ = nn.scan(Layer, length=4, **axes)(train)(nn.Dense(24)(x), None)
        return nn.Dense(4)(x)


#: Models of the cases that have another one.
MODELS = {"unrolled": Scanned}


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def evaluate(model, batch):
    right = model(batch["x"], train=False).argmax(-1) == batch["y"]
    return {"right": right.mean(), "count": jaxpipe.Sum(right.sum())}


def predict(model, batch):
    return model(batch["x"], train=False)


def draw(data: np.random.Generator) -> dict[str, np.ndarray]:
    """The next whole batch."""
    x = data.standard_normal((ROWS, 8), np.float32)
    return {"x": x, "y": np.argmax(x[:, :4], axis=1).astype(np.int32)}


@functools.cache
def make_pipeline(case: str, **changed) -> jaxpipe.Pipeline:
    """The pipeline of a case, over the first devices there are."""
    (shape, axes), options = CASES[case]
    count = int(np.prod(shape))
    options = {"optimizer": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)), **options, **changed}
    return jaxpipe.partition(
        MODELS.get(case, Net)(),
        Mesh(np.array(jax.devices()[:count]).reshape(shape), axes),
        jax.eval_shape(lambda: draw(np.random.default_rng(0))),
        loss=loss,
        evaluate=evaluate,
        predict=predict,
        num_microbatches=4,
        **{"profile": "analytic", "runtime": "mpmd", **options},
    )


def own(pipeline: jaxpipe.Pipeline, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The rows that this process passes."""
    rows = pipeline.local_rows(len(batch["x"]))
    return {name: x[rows] for name, x in batch.items()}


def as_global(pipeline: jaxpipe.Pipeline, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """The whole batch as arrays over all devices."""
    everywhere = NamedSharding(pipeline.mesh, PartitionSpec())
    return {name: jax.make_array_from_callback(x.shape, everywhere, x.__getitem__) for name, x in batch.items()}


def results(case: str, everything: bool = True) -> dict[str, np.ndarray]:
    """Return the results of three steps, by name; also evaluation, prediction and bytes, if asked.

    Gradients of some cases only then.
    """
    pipeline = make_pipeline(case)
    data = np.random.default_rng(0)
    state = pipeline.init(jax.random.key(0))
    arrays = {}

    def note(name, tree):
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
            arrays[f"{case} {name}{jax.tree_util.keystr(path)}"] = np.asarray(x)

    if everything or case == "stage":
        (first, _), gradients = pipeline.value_and_grad(state, own(pipeline, draw(np.random.default_rng(0))))
        note("first loss", first)
        note("gradient", gradients)
    for k in range(3):
        batch = draw(data)
        state, metrics = pipeline.step(state, own(pipeline, batch) if k else as_global(pipeline, batch))
        note(f"metrics {k}", metrics)
    variables, moments = pipeline.parameters(state), pipeline.optimizer_state(state)
    note("parameters", variables)
    note("optimizer state", moments)
    again = pipeline.init(jax.random.key(0), variables=variables, optimizer_state=moments)
    jax.tree.map(np.testing.assert_array_equal, pipeline.optimizer_state(again), moments)
    if not everything:
        return arrays
    note("evaluation", pipeline.evaluate(state, own(pipeline, draw(data))))
    prediction = pipeline.predict(state, own(pipeline, draw(data)))
    rows = {s.index[0].indices(ROWS)[0]: np.asarray(s.data) for s in prediction.addressable_shards}
    note("prediction", np.concatenate([rows[k] for k in sorted(rows)]))
    note("bytes", list(pipeline.memory_report().compiled_bytes))
    if pipeline.plan.runtime == "mpmd":  # which takes batches of other sizes
        smaller = {name: x[: ROWS // 2] for name, x in draw(data).items()}
        _, metrics = pipeline.step(state, own(pipeline, smaller))
        note("metrics of a smaller batch", metrics)
    return arrays


def compare(folder: str, everything: int, *cases: str) -> None:
    """Leave the results of some cases, and the rows that this process passes."""
    arrays = {}
    for case in cases:
        arrays |= results(case, bool(everything))
        arrays[f"{case} rows"] = make_pipeline(case).local_rows(ROWS)
    np.savez(Path(folder) / f"{jax.process_index()}.npz", **arrays)


def swapped(elsewhere: str) -> dict[str, np.ndarray]:
    """Return the results of two steps whose first stage swaps to the host or to peers."""
    weights = [np.asarray(jax.random.normal(jax.random.key(k), (64, 64)) / 8) for k in range(16)]
    model = jax.tree_util.Partial(lambda ws, x: functools.reduce(lambda x, w: jax.numpy.tanh(x @ w), ws, x), weights)
    batch = np.asarray(jax.random.normal(jax.random.key(99), (16 * 64, 64)))
    mesh = Mesh(np.array(jax.devices()[:4]), ("stage",))
    options = {"loss": lambda f, x: jax.numpy.square(f(x)).mean(), "optimizer": optax.sgd(0.125)}
    options |= {"num_microbatches": 16, "profile": "analytic", "schedule": "1f1b", "runtime": "mpmd"}
    plan = jaxpipe.partition(model, mesh, batch, **options).plan
    options["options"] = jaxpipe.PlanOptions(
        compile=False, time_limit=60, host_memory="1GiB" if elsewhere == "host" else None
    )
    options |= {"network": jaxpipe.Network.uniform(4, 1e12)} if elsewhere == "peers" else {}
    budget = plan.predicted_bytes - plan.stages[0].stash_bytes // 4
    pipeline = jaxpipe.partition(model, mesh, batch, memory=budget, **options)
    pipeline.compile()
    state = pipeline.init(jax.random.key(0))
    losses = []
    for _ in range(2):
        state, metrics = pipeline.step(state, batch)
        losses.append(np.asarray(metrics["loss"]))
    assert pipeline.plan.stages[0].away
    parameters = jax.tree.leaves(pipeline.parameters(state))
    return {"losses": np.stack(losses), **{f"parameter {k}": np.asarray(x) for k, x in enumerate(parameters)}}


def swaps(folder: str, elsewhere: str) -> None:
    """Leave the results of steps with swaps."""
    np.savez(Path(folder) / f"{jax.process_index()}.npz", **swapped(elsewhere))


def messages(folder: str) -> None:
    """Leave what this process gets of messages of all types, one way, both ways, and from one to all."""
    me, ends = jax.process_index(), tuple(jax.devices()[:2])
    avals = [*MESSAGES.values()] * 2
    count = len(MESSAGES)
    transfers = Transfers(avals * 2, [PartitionSpec()] * (4 * count))
    devices = StageDevices(tuple((device,) for device in ends), 1)
    send = Send(Place(0, 0), Place(1, 0), tuple(range(count)), tuple(range(2 * count, 3 * count)))
    both = replace(send, reads=tuple(range(2 * count)), writes=tuple(range(2 * count, 4 * count)), returning=count)
    spread = Spread(Place(1, 0), (0,), send.reads, send.writes)
    parts = {
        "there": transfers.between(send, devices),
        "exchange": transfers.between(both, devices),
        "spread": transfers.spread(spread, devices),
    }
    received = {}
    for name, part in parts.items():
        arrays = [jax.device_put(drawn(avals[k], k % count + me), ends[me]) for k in part.reads]
        for k, x in zip(part.writes, part.run(*arrays), strict=True):
            received[f"{name} {k % count}"] = bits(x.addressable_data(0))
    np.savez(Path(folder) / f"{me}.npz", **received)


def message(function) -> str:
    """Return the text of the error that a function raises."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', []))}"
    return "nothing"


def offered() -> list[int]:
    """The budget that an error offers, and the most bytes that are then reserved."""
    try:
        make_pipeline("stage", memory=1000)
    except jaxpipe.MemoryBudgetError as error:
        report = make_pipeline("stage", memory=error.smallest).memory_report()
        return [error.smallest, max(report.compiled_bytes)]
    return []


def agreement(folder: str) -> None:
    """Leave what processes say of things that go wrong in one of them, or are not alike."""
    me = jax.process_index()
    os.environ["JAXPIPE_CACHE_DIR"] = str(Path(folder) / f"cache{me}")
    plan = make_pipeline("stage", profile="measured").plan

    def fail(where: int):
        if me == where:
            raise jaxpipe.CheckpointError("a file is missing")
        return me

    half = Mesh(np.array(jax.local_devices()), ("stage",))
    texts = {
        "seconds": plan.step_seconds,
        "measured": len(list(Path(folder).glob(f"cache{me}/*/*.json"))),
        "first": multihost.from_first(lambda: me + 7),
        "first fails": message(lambda: multihost.from_first(lambda: fail(0))),
        "all": multihost.on_all(lambda: me),
        "last fails": message(lambda: multihost.on_all(lambda: fail(1))),
        "other program": message(
            lambda: jaxpipe.partition(
                jax.tree_util.Partial(lambda w, x: x @ w * (2 if me else 3), np.ones((8, 4), np.float32)),
                Mesh(np.array(jax.devices()), ("stage",)),
                jax.ShapeDtypeStruct((ROWS, 8), np.float32),
                loss=lambda f, x: f(x).mean(),
                optimizer=optax.sgd(0.1),
            )
        ),
        "half a mesh": message(
            lambda: jaxpipe.partition(Net(), half, None, loss=loss, optimizer=optax.sgd(0.1)),
        ),
        "rows": message(
            lambda: make_pipeline("spmd data").step(
                make_pipeline("spmd data").init(jax.random.key(0)), draw(np.random.default_rng())
            )
        ),
        "offered": offered(),
        "no checkpoint": message(lambda: make_pipeline("stage").restore(folder)),
        "find": message(lambda: make_pipeline("stage").find_nonfinite(None, None)),
    }
    (Path(folder) / f"{me}.json").write_text(json.dumps(texts))


def train(directory: str, case: str, every: int, until: int) -> None:
    """Train from the last checkpoint up to a step, and print each."""
    pipeline = make_pipeline(case)
    with jaxpipe.Checkpointer(pipeline, directory, every=every, keep=3) as checkpointer:
        restored = checkpointer.restore()
        state, position = restored or (pipeline.init(jax.random.key(0)), None)
        data = np.random.default_rng(0)
        if position is not None:
            data.bit_generator.state = position
        print("begins", int(state.step), os.getpid(), flush=True)
        for step in range(int(state.step) + 1, until + 1):
            state, metrics = pipeline.step(state, own(pipeline, draw(data)))
            metrics["loss"].block_until_ready()
            print("step", step, flush=True)
            checkpointer.after_step(state, data.bit_generator.state)
    print("ends", int(state.step), flush=True)


def unequal() -> None:
    """Pass batches of other sizes in one of two processes, and print the error."""
    pipeline = make_pipeline("stage")
    batch = draw(np.random.default_rng(0))
    state, _ = pipeline.step(pipeline.init(jax.random.key(0)), batch)
    jax.block_until_ready(state)
    if jax.process_index():
        batch = jax.tree.map(lambda x: x[: len(x) // 2], batch)
    state, metrics = pipeline.step(state, batch)
    print("loss", float(metrics["loss"]), flush=True)


def main() -> None:
    """Run a task in this process of several."""
    devices, task, *arguments = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(devices))
    jaxpipe.initialize_distributed(heartbeat_timeout_seconds=10)
    known = {"compare": compare, "agreement": agreement, "train": train, "messages": messages, "unequal": unequal}
    known["swaps"] = swaps
    known[task](*(int(x) if x.isdecimal() else x for x in arguments))


if __name__ == "__main__":
    main()
