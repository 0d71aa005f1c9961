"""Pipelines under memory budgets: bytes, time to plan, step time, against no plan and ``jax.checkpoint``.

    python -m scripts.bench_memory
    python -m scripts.bench_memory --models U-Net --stages 4 --seconds 20 --out out/some.json
    python -m scripts.bench_memory --rounds 0  # bytes only
    python -m scripts.plot_memory

A budget is the bytes that do not depend on storage (parameters, gradients, optimizer, state, batch) plus a share of
what the fullest device reserves besides if nothing is planned: for the pipeline without codecs (``storage=()``, named
``plain``), or with one stage for what users have today, one jitted function of gradients and update with donated state
(``jax``). Beside that ``jax.checkpoint`` of the whole model under JAX's policies; running statistics of normalizations
are dropped there. ``default`` is the pipeline without a budget.

What is measured is written after every model and number of stages; a file from the same versions and machine is
completed, so that a long run can be had in pieces.

  predicted   bytes on the fullest device in the plan, made before the first compile
  settled     the same of the plan that was kept: one of which XLA reserves more than the budget is made smaller
  compiled    the most that a device holds in a step: arrays and temporaries of the program that runs
  plan        seconds to plan, profile excluded; solve: the longest that solvers took for a stage
  added       predicted time of codecs and recomputation, relative to a step's work
  ratio       step time / plain within a round: median and quartiles; all variants run in turn in one loop
  difference  of the gradients from plain ones, relative, in L2 over all parameters
"""

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import jaxpipe
from examples import models
from jaxpipe.array_types import PyTree
from scripts.measuring import Batch, Loss, Quartiles, alternate, header, keep_freed_memory, quartiles


SHARES = (1.0, 0.75, 0.5, 0.35, 0.25)
#: By stages.
MICROBATCHES = {1: 1, 4: 8}
POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots-no-batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
OPTIMIZER = optax.sgd(0.01, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """A model, the shape of an example, examples of a micro-batch, a loss, and how many tokens there are."""

    model: Callable[[], nn.Module]
    example: tuple[int, ...]
    rows: int
    loss: Loss
    tokens: int | None = None


def entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def transformer() -> nn.Module:
    """Twelve layers."""
    return models.Transformer(vocab=256, num_layers=12, width=128, num_heads=4, max_length=128, tied=False)


CASES = {
    "VGG-16": Case(
        lambda: models.VGG16(num_classes=10), (32, 32, 3), 32, lambda model, b: entropy(model(b["x"]), b["y"])
    ),
    "ResNet-50": Case(
        lambda: models.ResNet50(num_classes=10),
        (32, 32, 3),
        16,
        lambda model, b: entropy(model(b["x"], train=True), b["y"]),
    ),
    "U-Net": Case(
        lambda: models.UNet(width=16, depth=3),
        (64, 64, 3),
        4,
        lambda model, b: jnp.square(model(b["x"])[..., 0] - b["x"][..., 0]).mean(),
    ),
    "transformer": Case(
        transformer, (128,), 8, lambda model, b: entropy(model(b["x"], train=False)[:, :-1], b["x"][:, 1:]), 256
    ),
}


@dataclass(frozen=True)
class Row:
    """One variant of one model on some stages; see above."""

    model: str
    stages: int
    variant: str
    budget: int | None
    predicted: int | None
    settled: int | None
    compiled: int | None
    plan_seconds: float | None
    solve_seconds: float | None
    status: str
    gap: float | None
    added: float | None
    ratio: Quartiles | None
    difference: float | None


def make_batch(case: Case, m: int) -> dict[str, jax.Array]:
    """``m`` micro-batches of random examples."""
    key = jax.random.key(0)
    shape = (m * case.rows, *case.example)
    x = jax.random.normal(key, shape) if case.tokens is None else jax.random.randint(key, shape, 0, case.tokens)
    return {"x": x, "y": jnp.arange(len(x)) % 10}


@dataclass(frozen=True, eq=False)
class Jitted:
    """A training step without a pipeline, and its first arguments."""

    compiled: jax.stages.Compiled
    state: PyTree

    @property
    def bytes(self) -> int:
        """Return the bytes that XLA reserves."""
        analysis = self.compiled.memory_analysis()
        assert analysis is not None
        total = analysis.argument_size_in_bytes + analysis.output_size_in_bytes + analysis.temp_size_in_bytes
        return total - analysis.alias_size_in_bytes


def jitted(
    case: Case,
    policy: Callable[..., bool] | None,
    variables: PyTree,
    batch: Batch,
) -> Jitted:
    """Gradients and update of one micro-batch, with ``jax.checkpoint`` if there is a policy."""
    held = {name: value for name, value in variables.items() if name != "params"}

    def apply(parameters: PyTree, *args: object, **kwargs: object) -> jax.Array:
        return case.model().apply({"params": parameters, **held}, *args, **kwargs, mutable=["batch_stats"])[0]

    def model(parameters: PyTree, *args: object, **kwargs: object) -> jax.Array:
        bound = functools.partial(apply, **kwargs)
        return (bound if policy is None else jax.checkpoint(bound, policy=policy))(parameters, *args)

    def step(state: PyTree, batch: Batch) -> tuple[PyTree, jax.Array]:
        parameters, optimizer_state = state
        value, gradients = jax.value_and_grad(lambda p: case.loss(functools.partial(model, p), batch))(parameters)
        updates, optimizer_state = OPTIMIZER.update(gradients, optimizer_state, parameters)
        return (optax.apply_updates(parameters, updates), optimizer_state), value

    parameters = jax.tree.map(jnp.array, variables["params"])
    state = parameters, OPTIMIZER.init(parameters)
    return Jitted(jax.jit(step, donate_argnums=0).lower(state, batch).compile(), state)


def jitted_stepper(found: Jitted, batch: Batch) -> Callable[[], object]:
    """A training step that goes on from the one before."""
    held = [found.state]

    def step() -> object:
        held[0], loss = found.compiled(held[0], batch)
        return loss

    return step


def stepper(pipeline: jaxpipe.Pipeline, state: PyTree, batch: Batch) -> Callable[[], object]:
    """A training step that goes on from the one before."""
    held = [state]

    def step() -> object:
        held[0], metrics = pipeline.step(held[0], batch)
        return metrics["loss"]

    return step


def difference(actual: PyTree, expected: PyTree) -> float:
    """``|actual - expected| / |expected|`` over all leaves together."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    squares = np.sum([[np.sum((np.float64(a) - b) ** 2), np.sum(np.float64(b) ** 2)] for a, b in pairs], axis=0)
    return float(np.sqrt(squares[0] / squares[1]))


def make_pipeline(case: Case, stages: int, batch: Batch, **options: Any) -> jaxpipe.Pipeline:
    """Plan a model on some stages."""
    return jaxpipe.partition(
        case.model(),
        jax.sharding.Mesh(jax.devices()[:stages], ("stage",)),
        batch,
        loss=case.loss,
        optimizer=OPTIMIZER,
        num_microbatches=MICROBATCHES[stages],
        **options,
        runtime="mpmd",
    )


@dataclass(frozen=True)
class Planned:
    """The pipeline within a budget, or the message of the error that refuses one."""

    budget: int | None
    seconds: float | None
    predicted: int | None
    pipeline: jaxpipe.Pipeline | None
    message: str = ""


def plan_within(budget: int, make: Callable[..., jaxpipe.Pipeline]) -> Planned:
    """Plan within a budget; the seconds are those before the first compile."""
    start = time.perf_counter()
    seconds = predicted = None
    try:
        pipeline = make(memory=budget)
        seconds, predicted = time.perf_counter() - start, pipeline.plan.predicted_bytes
        pipeline.memory_report()
    except jaxpipe.MemoryBudgetError as error:
        return Planned(budget, seconds or time.perf_counter() - start, predicted, None, str(error))
    return Planned(budget, seconds, predicted, pipeline)


def measure(name: str, stages: int, rounds: int, seconds: float) -> list[Row]:
    """All variants of a model."""
    case = CASES[name]
    batch = make_batch(case, MICROBATCHES[stages])
    plain = make_pipeline(case, stages, batch, storage=())
    make = functools.partial(make_pipeline, case, stages, batch, profile=plain.profile)
    key = jax.random.key(1)
    variables = plain.parameters(plain.init(key))
    policies = {"jax": None, **POLICIES} if stages == 1 else {}
    today = {label: jitted(case, policy, variables, batch) for label, policy in policies.items()}
    reserved = today["jax"].bytes if today else max(plain.memory_report().compiled_bytes)
    memory = {**plain.plan.memory, "gradients": plain.plan.memory["parameters"]}
    fixed = sum(n for part, n in memory.items() if part not in ("stash", "messages", "temporaries"))
    variants = {
        label: Planned(None, None, pipeline.plan.predicted_bytes, pipeline)
        for label, pipeline in (("plain", plain), ("default", make()))
    }
    for share in SHARES:
        variants[f"{share:.0%}"] = plan_within(int(fixed + share * (reserved - fixed)), make)
    pipelines = {label: planned.pipeline for label, planned in variants.items() if planned.pipeline}
    states = {label: pipeline.init(key, variables=variables) for label, pipeline in pipelines.items()}
    gradients = {label: pipelines[label].value_and_grad(states[label], batch)[1] for label in pipelines}
    times: dict[str, list[float]] = {}
    if rounds:
        steps = {label: stepper(pipeline, states[label], batch) for label, pipeline in pipelines.items()}
        steps |= {label: jitted_stepper(variant, batch) for label, variant in today.items()}
        times = alternate(steps, rounds, seconds)

    def ratio(label: str) -> Quartiles | None:
        return quartiles([b / a for a, b in zip(times["plain"], times[label], strict=True)]) if times else None

    rows = []
    for label in pipelines:
        off = difference(gradients[label], gradients["plain"])
        rows.append(pipeline_row((name, stages, label), variants[label], ratio(label), off))
    nothing = (None,) * 3
    for label, variant in today.items():
        rows.append(Row(name, stages, label, *nothing, variant.bytes, None, None, "", None, None, ratio(label), None))
    for label, failed in variants.items():
        if failed.pipeline is None:
            known = failed.budget, failed.predicted, None, None, failed.seconds, None
            rows.append(Row(name, stages, label, *known, failed.message, *nothing, None))
    return rows


def pipeline_row(names: tuple[str, int, str], planned: Planned, ratio: Quartiles | None, off: float) -> Row:
    """The row of a pipeline, by model, stages and variant."""
    assert planned.pipeline is not None
    plan, report = planned.pipeline.plan, planned.pipeline.memory_report()
    work = [s.forward_seconds + s.backward_seconds - s.added_seconds for s in plan.stages]
    return Row(
        *names,
        planned.budget,
        planned.predicted,
        plan.predicted_bytes,
        max(report.compiled_bytes),
        planned.seconds,
        max(s.solve_seconds for s in plan.stages),
        "/".join(dict.fromkeys(s.storage for s in plan.stages)),
        max(s.storage_gap for s in plan.stages),
        max(s.added_seconds / w if w else 0.0 for s, w in zip(plan.stages, work, strict=True)),
        ratio,
        off,
    )


def table(rows: list[Row]) -> Table:
    """The rows for people."""
    grid = Table(title="memory budgets", title_justify="left")
    for name in ("model", "stages", "variant"):
        grid.add_column(name)
    for name in (
        "budget",
        "predicted",
        "settled",
        "compiled",
        "plan s",
        "solve s",
        "added",
        "ratio",
        "difference",
        "storage",
    ):
        grid.add_column(name, justify="right")
    for r in rows:
        sizes = ["" if n is None else f"{n / 2**20:.1f}" for n in (r.budget, r.predicted, r.settled, r.compiled)]
        seconds = ["" if x is None else f"{x:.1f}" for x in (r.plan_seconds, r.solve_seconds)]
        added = "" if r.added is None else f"{r.added:+.1%}"
        ratio = "" if r.ratio is None else f"{r.ratio[1]:.2f}"
        off = "" if r.difference is None else f"{r.difference:.0e}"
        grid.add_row(r.model, str(r.stages), r.variant, *sizes, *seconds, added, ratio, off, r.status[:40])
    return grid


def earlier(path: Path) -> list[Row]:
    """Return the rows of a file that were measured with the same versions on the same machine."""
    if not path.exists():
        return []
    record = json.loads(path.read_text())
    if any(record[name] != header()[name] for name in ("versions", "machine")):
        return []
    return [Row(**row) for row in record["rows"]]


def main() -> None:
    """Measure, write the JSON file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--stages", nargs="+", type=int, choices=MICROBATCHES, default=list(MICROBATCHES))
    parser.add_argument("--rounds", type=int, default=20, help="most rounds per model (default 20); 0: bytes only")
    parser.add_argument("--seconds", type=float, default=60, help="most seconds of rounds per model (default 60)")
    parser.add_argument("--out", type=Path, default=Path("out/bench_memory.json"))
    options = parser.parse_args()
    keep_freed_memory()
    if sys.platform == "linux":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    jax.config.update("jax_num_cpu_devices", max(options.stages))
    rows = earlier(options.out)
    for name in options.models:
        for stages in options.stages:
            rows = [r for r in rows if (r.model, r.stages) != (name, stages)]
            rows += measure(name, stages, options.rounds, options.seconds)
            Console(width=180).print(table([r for r in rows if (r.model, r.stages) == (name, stages)]))
            options.out.parent.mkdir(parents=True, exist_ok=True)
            result = {**header(), "microbatches": MICROBATCHES, "rows": [asdict(row) for row in rows]}
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
