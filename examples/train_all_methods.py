"""One plan with everything in it: train on handwritten digits with all five methods at the same time.

    python -m examples.train_all_methods
    python -m examples.train_all_methods --epochs 120 --blocks 8

Two replicas of four stages, on eight devices. The plan is told of a cluster (two machines whose links and processors
differ), and of a budget below what the network takes even with encoded feature maps. It then stores feature maps
as bits, positions and sparse values; puts every stage on the devices that suit it; has replicas send each other
only the best blocks of their gradients; keeps some stashes in peers' memory and computes others again; and cuts the
network anew where that makes the step shorter. A table says what of each is in the plan, read off the plan.

The data are the 1,797 digits that ship with scikit-learn. Without accelerators the devices are simulated, and the
cluster is one on paper; with accelerators their links are measured, and so is the model. At the end: gradients through
all of it against plain ``jax.grad`` of the same micro-batches, and test accuracy.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxpipe
from jaxpipe import Network, Node
from jaxpipe.gradients import block_sparse
from jaxpipe.text.units import bytes_text


@dataclass(frozen=True)
class Options:
    """The plan to make, and the training to run."""

    shares: tuple[float, ...] = (0.85, 0.82, 0.8, 0.88)
    """Memory budgets, as shares of what the plan without one needs; the first that takes all methods is used."""
    blocks: float = 4
    """Blocks of gradients that are sent of each layer; 1.0 sends all of them."""
    epochs: int = 60
    batch_size: int = 192
    learning_rate: float = 0.02
    seed: int = 0
    out: Path | None = None
    """Folder for ``report.html``; left out: none is written."""


STAGES, REPLICAS, MICROBATCHES = 4, 2, 8
WIDTH, LAYERS = 32, 12


@jaxpipe.memory_encoded(codecs="smallest")  # sparse formats, too: most of what it keeps has passed a ReLU
class DigitsNet(nnx.Module):
    """Wide and narrow convolutions in turn, then two dense layers: images ``[batch, 8, 8, 1]`` to logits."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.he_normal()
        self.first = nnx.Conv(1, WIDTH, (3, 3), kernel_init=init, rngs=rngs)
        sides = [(3, 3) if k % 2 == 0 else (1, 1) for k in range(LAYERS)]
        self.convs = nnx.List([nnx.Conv(WIDTH, WIDTH, side, kernel_init=init, rngs=rngs) for side in sides])
        self.dense1 = nnx.Linear(2 * 2 * WIDTH, 128, rngs=rngs)
        self.dense2 = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of a batch of images."""
        x = nnx.relu(self.first(x))
        for conv in self.convs:
            x = nnx.relu(conv(x))
        x = nnx.max_pool(x, (4, 4), strides=(4, 4))
        return self.dense2(nnx.relu(self.dense1(x.reshape(x.shape[0], -1))))


Data = dict[str, np.ndarray]


def loss(model: DigitsNet, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross entropy of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()


def evaluate(model: DigitsNet, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The share of images that are classified correctly."""
    return {"accuracy": (model(batch["image"]).argmax(-1) == batch["label"]).mean()}


def load(seed: int) -> tuple[Data, Data]:
    """The digits, scaled to [0, 1] and split into training data and 360 for the test."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    split = train_test_split(images, labels, test_size=360, stratify=labels, random_state=seed)
    return {"image": split[0], "label": split[2]}, {"image": split[1], "label": split[3]}


def cluster() -> Network:
    """Two machines with four processors each, two and two of them on faster links; the older ones are slower."""
    pairs = {(0, 1): 200e9, (2, 3): 200e9}
    new = Node(4, 64e9, links=pairs, latency_seconds=1e-6, name="new")
    old = Node(4, 32e9, links=pairs, latency_seconds=1e-6, speed=0.6, name="old")
    return Network.from_nodes([new, old], 25e9, latency_seconds=3e-6)


def planner(options: Options, model: DigitsNet) -> Callable[[int | None], jaxpipe.Pipeline]:
    """A function from a budget in bytes to a pipeline."""
    devices = jax.devices()[: STAGES * REPLICAS]
    mesh = jax.make_mesh((REPLICAS, STAGES), ("data", "stage"), devices=devices)
    simulated = devices[0].platform == "cpu"
    rows = options.batch_size
    steps = options.epochs * (1437 // rows)
    batch = {
        "image": jax.ShapeDtypeStruct((rows, 8, 8, 1), jnp.float32),
        "label": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }
    network = cluster() if simulated else Network.measure(mesh, speed=True)

    def plan(budget: int | None) -> jaxpipe.Pipeline:
        return jaxpipe.partition(
            model,
            mesh,
            batch,
            loss=loss,
            optimizer=optax.sgd(optax.cosine_decay_schedule(options.learning_rate, steps), momentum=0.9),
            evaluate=evaluate,
            num_microbatches=MICROBATCHES,
            schedule="one_f_one_b",
            profile="analytic" if simulated else "measured",
            network=network,
            memory=budget,
            gradient_exchange=block_sparse(k=options.blocks),
        )

    return plan


def methods(pipeline: jaxpipe.Pipeline) -> dict[str, str]:
    """Return a text for each method that a plan uses, read off the plan."""
    plan = pipeline.plan
    stored: dict[str, int] = {}
    for stage in plan.stages:
        for form, size in stage.stored.items():
            stored[form] = stored.get(form, 0) + size
    encoded = {form: size for form, size in stored.items() if form != "keep"}
    sparse = stored.get("bitmap", 0) + stored.get("csr", 0)
    order = [stage.devices for stage in plan.stages]
    given = [tuple(range(s, STAGES * REPLICAS, STAGES)) for s in range(STAGES)]
    away = [f"{stage.away} of stage {k}" for k, stage in enumerate(plan.stages) if stage.away]
    again = [name for stage in plan.stages if stage.storage != "default" for name in stage.recomputed]
    cuts = tuple(stage.operators[1] for stage in plan.stages[:-1])
    last = next((r for r in plan.rounds if r.cuts == cuts), None)
    texts = dict.fromkeys(METHODS, "")
    if sparse:
        texts["encoded feature maps"] = ", ".join(f"{form} {bytes_text(size)}" for form, size in encoded.items())
    if not pipeline.partition.network.is_uniform and order != given:
        texts["placement on unequal devices"] = f"stages on {', '.join(map(str, order))}, not on {given[0]}, ..."
    if plan.exchange_bytes is not None and plan.exchange_bytes < plan.memory["gradients"]:
        sent, dense = bytes_text(plan.exchange_bytes), bytes_text(plan.memory["gradients"])
        texts["block-sparse exchange"] = f"{sent} of {dense} sent in a step"
    if away:
        texts["stashes in peers' memory"] = f"{', '.join(away)}, in {sum(len(s.pieces) for s in plan.stages)} slices"
    if again:
        texts["recomputation"] = f"{len(again)} operators run again, the first of them {again[0]}"
    if last is not None and cuts != plan.rounds[0].cuts:
        first = plan.rounds[0]
        texts["balance"] = (
            f"{len(plan.rounds)} rounds, fastest over slowest stage {first.rate:.2f} -> {last.rate:.2f}, "
            f"step {1e3 * first.step_seconds:.1f} -> {1e3 * last.step_seconds:.1f} ms"
        )
    return texts


#: Peers' memory and recomputation are two sides of one method: what to do with stashes beyond the budget.
METHODS = (
    "encoded feature maps",
    "placement on unequal devices",
    "block-sparse exchange",
    "stashes in peers' memory",
    "recomputation",
    "balance",
)


def within_a_budget(
    plan: Callable[[int | None], jaxpipe.Pipeline], shares: tuple[float, ...], console: Console
) -> jaxpipe.Pipeline:
    """The pipeline of the first share that needs all methods, else of the last; a share may be too small, too."""
    needed = plan(None).plan.predicted_bytes
    pipeline = None
    for share in shares:
        console.print(f"without a budget {bytes_text(needed)} on each device; {share:.0%} of that are allowed")
        try:
            tried = plan(int(share * needed))
            tried.memory_report()  # compiles; should XLA reserve more than the budget, this plans again
        except jaxpipe.MemoryBudgetError as error:
            console.print(str(error))
            continue
        pipeline = tried
        if all(methods(pipeline).values()):
            break
    if pipeline is None:
        raise SystemExit("no plan keeps any of these budgets")
    return pipeline


def show(found: dict[str, str], console: Console) -> None:
    """The methods as a table."""
    table = Table(title="What is in the plan", title_justify="left", show_header=False)
    for method, text in found.items():
        table.add_row(method, text or "not used")
    console.print(table)


def plain_gradients(model: DigitsNet, batch: Data) -> tuple[jax.Array, nnx.State]:
    """Loss and gradient without jaxpipe: ``jax.grad`` of each micro-batch, added up."""
    graphdef, params = nnx.split(model)

    @jax.jit
    def gradient(params: nnx.State, rows: dict[str, jax.Array]) -> tuple[jax.Array, nnx.State]:
        with jaxpipe.without_encoding():
            return jax.value_and_grad(lambda p: loss(nnx.merge(graphdef, p), rows))(params)

    count = REPLICAS * MICROBATCHES
    parts = [jax.tree.map(lambda x, j=j: np.split(x, count)[j], batch) for j in range(count)]
    halves = []
    for r in range(REPLICAS):  # first over the micro-batches of a replica, then over replicas, as a pipeline does
        total = gradient(params, parts[r * MICROBATCHES])
        for rows in parts[r * MICROBATCHES + 1 : (r + 1) * MICROBATCHES]:
            total = jax.tree.map(jnp.add, total, gradient(params, rows))
        halves.append(total)
    return jax.tree.map(lambda *x: sum(x[1:], start=x[0]) / count, *halves)


def difference(actual: nnx.State, expected: nnx.State) -> float:
    """``|actual - expected| / |expected|`` over all parameters together."""
    pairs = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
    squares = np.sum([[np.sum((np.float64(a) - b) ** 2), np.sum(np.float64(b) ** 2)] for a, b in pairs], axis=0)
    return float(np.sqrt(squares[0] / squares[1]))


def train(pipeline: jaxpipe.Pipeline, data: Data, options: Options, console: Console) -> jaxpipe.TrainState:
    """Train for all epochs; returns the last state."""
    state = pipeline.init(jax.random.key(options.seed))
    order = np.random.default_rng(options.seed)
    with console.status("training") as status:
        for epoch in range(options.epochs):
            rows = order.permutation(len(data["label"]))
            for first in range(0, len(rows) - options.batch_size + 1, options.batch_size):
                chosen = rows[first : first + options.batch_size]
                state, metrics = pipeline.step(state, {name: x[chosen] for name, x in data.items()})
            status.update(f"epoch {epoch + 1} of {options.epochs}: loss {metrics['loss']:.4f}")
    return state


def main(options: Options) -> tuple[dict[str, str], float, float]:
    """Plan, check, train; returns the methods, how far gradients are from plain ones, and the test accuracy."""
    console = Console()
    data, test = load(options.seed)
    model = DigitsNet(nnx.Rngs(options.seed))
    start = time.perf_counter()
    plan = planner(options, model)
    pipeline = within_a_budget(plan, options.shares, console)
    print(pipeline.plan)
    print(pipeline.partition)
    texts = methods(pipeline)
    show(texts, console)
    console.print(f"planned and compiled in {time.perf_counter() - start:.0f} s")

    first = {name: x[: options.batch_size] for name, x in data.items()}
    (value, _), gradients = pipeline.value_and_grad(pipeline.init(jax.random.key(options.seed)), first)
    expected_value, expected = plain_gradients(model, first)
    off = max(difference(gradients, expected), abs(float(value / expected_value) - 1))
    console.print(f"before blocks are chosen, loss and gradients differ from those of plain jax.grad by {off:.0e}")

    start = time.perf_counter()
    state = train(pipeline, data, options, console)
    console.print(f"trained {options.epochs} epochs in {time.perf_counter() - start:.0f} s")
    accuracy = float(pipeline.evaluate(state, test)["accuracy"])
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        pipeline.report(options.out / "report.html")
        console.print(f"wrote {options.out / 'report.html'}")
    console.print(f"test accuracy {accuracy:.2%}")
    return texts, off, accuracy


if __name__ == "__main__":
    chosen_options = tyro.cli(Options, description=__doc__)
    # Counts only where JAX finds no accelerator, and only before it has looked for devices.
    jax.config.update("jax_num_cpu_devices", STAGES * REPLICAS)
    used, off_by, reached = main(chosen_options)
    sys.exit(0 if all(used.values()) and off_by < 1e-5 and reached >= 0.95 else "not all of it worked; see above")
