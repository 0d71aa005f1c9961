"""Processes that do not do the same; started by ``tests/test_agreement.py``.

python tests/support/unlike_run.py TASK ARGUMENTS
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import jaxpipe


ROWS = 16
STEPS = 15


class Net(nn.Module):
    """Dense layers with dropout."""

    width: int = 16
    rate: float = 0.1

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(4)(nn.Dropout(self.rate, deterministic=False)(x))


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def halved(model, batch):
    return 0.5 * loss(model, batch)


def smoothed(model, batch):
    labels = optax.smooth_labels(jax.nn.one_hot(batch["y"], 4), 0.1)
    return optax.softmax_cross_entropy(model(batch["x"]), labels).mean()


def weighted(weights):
    weights = np.asarray(weights, np.float32)

    def loss(model, batch):
        each = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
        return (each * jnp.asarray(weights)[batch["y"]]).mean()

    return loss


def with_rule(factor):
    """A loss whose derivative is a rule with a constant."""

    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, g: (factor * g,))
    return lambda model, batch: same(loss(model, batch))


def fails(model, batch):
    raise ValueError("a mistake of the loss")


def shapes(rows=ROWS, dtype=np.float32, **more):
    batch = {"x": jax.ShapeDtypeStruct((rows, 8), dtype), "y": jax.ShapeDtypeStruct((rows,), np.int32)}
    return {**batch, **more}


def devices(order=(0, 1, 2, 3), axes=("stage",), shape=(-1,)):
    return Mesh(np.array(jax.devices())[list(order)].reshape(shape), axes)


def partition(model=None, mesh=None, batch=None, **changed):
    arguments = {"loss": loss, "optimizer": optax.sgd(0.1), "evaluate": loss, "predict": None}
    arguments |= {"num_microbatches": 4, "profile": "analytic", **changed}
    return jaxpipe.partition(model or Net(), mesh or devices(), batch or shapes(), **arguments)


def draw():
    data = np.random.default_rng(0)
    return {"x": data.standard_normal((ROWS, 8), np.float32), "y": data.integers(0, 4, ROWS).astype(np.int32)}


def with_version(package) -> None:
    """Partition with another version of a package in the second process."""
    before = package.__version__
    package.__version__ = pick(before, "0.0.1")
    try:
        partition()
    finally:
        package.__version__ = before


def with_setting(name: str, value: object) -> None:
    """Partition with another setting of JAX in the second process."""
    before = getattr(jax.config, name)
    jax.config.update(name, pick(before, value))
    try:
        partition()
    finally:
        jax.config.update(name, before)


def profiled(factor: float) -> jaxpipe.Profile:
    profile = partition().profile
    seconds = tuple(factor * x for x in profile.forward_seconds)
    return dataclasses.replace(profile, forward_seconds=seconds)


def start(key: int = 0, **given):
    return partition().init(jax.random.key(key), **given)


def values(factor: float):
    variables = Net().init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.ones((1, 8)))
    return jax.tree.map(lambda x: factor * x, variables)


def evaluate(function) -> None:
    pipeline = partition(evaluate=function)
    pipeline.evaluate(pipeline.init(jax.random.key(0)), draw())


def step(**changed) -> None:
    pipeline = partition(**changed)
    pipeline.step(pipeline.init(jax.random.key(0)), draw())


def me() -> int:
    """Return this process's number."""
    return jax.process_index()


def pick(first, second):
    """Return one of two values, the second in the second process."""
    return second if me() else first


def skipping(name):
    return jaxpipe.PlanOptions(**{name: pick(None, "skip")})


def network(rate):
    return jaxpipe.Network.uniform(4, rate)


#: Ways to differ, by name: all raise an error.
WAYS: dict[str, Callable[[], object]] = {
    "learning rate": lambda: partition(optimizer=optax.sgd(pick(0.1, 0.01))),
    "learning rate in the state": lambda: partition(
        optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=pick(0.1, 0.01))
    ),
    "schedule of the learning rate": lambda: partition(
        optimizer=optax.sgd(optax.cosine_decay_schedule(0.1, pick(100, 200)))
    ),
    "momentum": lambda: partition(optimizer=optax.sgd(0.1, momentum=pick(0.9, 0.99))),
    "clip norm": lambda: partition(optimizer=optax.chain(optax.clip_by_global_norm(pick(1.0, 2.0)), optax.sgd(0.1))),
    "optimizer": lambda: partition(optimizer=pick(optax.sgd, optax.adam)(0.1)),
    "constant of the loss": lambda: partition(loss=pick(loss, halved)),
    "another loss": lambda: partition(loss=pick(loss, smoothed)),
    "array of the loss": lambda: partition(loss=weighted(pick([1, 1, 1, 1], [1, 1, 1, 2]))),
    "rule of the loss": lambda: step(loss=with_rule(pick(1.0, 2.0))),
    "constant of the model": lambda: partition(Net(rate=pick(0.1, 0.2))),
    "width of the model": lambda: partition(Net(width=pick(16, 24))),
    "seed": lambda: start(pick(0, 1)),
    "values": lambda: start(variables=values(pick(1.0, 1.5))),
    "kind of profile": lambda: partition(profile=pick("analytic", "measured")),
    "profile": lambda: partition(profile=profiled(pick(1.0, 2.0))),
    "micro-batches": lambda: partition(num_microbatches=pick(4, 2)),
    "schedule": lambda: partition(schedule=pick("1f1b", "gpipe")),
    "memory": lambda: partition(memory=pick(None, "1GiB")),
    "order of the mesh": lambda: partition(mesh=devices(pick((0, 1, 2, 3), (0, 1, 3, 2)))),
    "number of devices": lambda: partition(mesh=devices(pick((0, 1, 2, 3), (0, 1, 2)))),
    "axes of the mesh": lambda: partition(
        mesh=devices(axes=pick(("data", "stage"), ("stage", "data")), shape=(2, 2)), num_microbatches=2
    ),
    "rows of the batch": lambda: partition(batch=shapes(pick(16, 32))),
    "type of the batch": lambda: partition(batch=shapes(dtype=pick(np.float32, np.float16))),
    "leaf of the batch": lambda: partition(batch=pick(shapes(), shapes(z=jax.ShapeDtypeStruct((ROWS,), np.float32)))),
    "version": lambda: with_version(optax),
    "precision": lambda: with_setting("jax_default_matmul_precision", "float32"),
    "options": lambda: partition(options=skipping("on_nonfinite")),
    "storage": lambda: partition(storage=pick("auto", ())),
    "network": lambda: partition(network=network(pick(1e9, 2e9))),
    "runtime": lambda: partition(runtime=pick("mpmd", "spmd")),
    "exchange": lambda: partition(
        mesh=devices(axes=("data", "stage"), shape=(2, 2)),
        num_microbatches=2,
        gradient_exchange=pick("dense", jaxpipe.gradients.block_sparse(k=2)),
    ),
    "missing prediction": lambda: partition(predict=pick(loss, None)),
    "evaluation": lambda: evaluate(pick(loss, halved)),
    "argument that is refused": lambda: partition(schedule=pick("1f1b", "no such schedule")),
    "loss that fails": lambda: partition(loss=pick(loss, fails)),
    "call": lambda: pick(partition, lambda: jaxpipe.multihost.meet("Pipeline.parameters"))(),
}


def differ(folder: str) -> None:
    """Leave the error of each way to differ, and the seconds until it came."""
    errors = {}
    for name, way in WAYS.items():
        began = time.monotonic()
        try:
            way()
            errors[name] = "nothing", 0.0
        except Exception as error:
            notes = " ".join(getattr(error, "__notes__", []))
            errors[name] = f"{type(error).__name__}: {error} {notes}", time.monotonic() - began
    (Path(folder) / f"{me()}.json").write_text(json.dumps(errors))


def train() -> None:
    """Train for some steps, and print each."""
    print("joined", flush=True)
    pipeline = partition()
    print("planned", flush=True)
    state = pipeline.init(jax.random.key(0))
    print("initialized", flush=True)
    for number in range(STEPS):
        state, metrics = pipeline.step(state, draw())
        print("step", number, float(metrics["loss"]), flush=True)


def leave(where: str) -> None:
    """Leave the others after two steps, in the second process, or do there what they do not."""
    pipeline = partition()
    state, batch = pipeline.init(jax.random.key(0)), draw()
    for number in range(4):
        if me() and number == 2:
            if where == "end":
                return
            if where == "parameters":
                pipeline.parameters(state)
            if where == "evaluate":
                pipeline.evaluate(state, batch)
            if where == "sleep":
                time.sleep(60)
        state, metrics = pipeline.step(state, batch)
        print("step", number, float(metrics["loss"]), flush=True)


def join(seconds: int) -> None:
    """Do nothing once all have joined."""


def main() -> None:
    """Run a task in this process of several."""
    task, *arguments = sys.argv[1:]
    print("begins", flush=True)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    options = {"initialization_timeout": int(arguments[0])} if task == "join" else {}
    options |= {"waiting_timeout_seconds": 15 if "sleep" in arguments else 60} if task == "leave" else {}
    jaxpipe.initialize_distributed(**options)
    {"differ": differ, "train": train, "leave": leave, "join": join}[task](*arguments)


if __name__ == "__main__":
    main()
