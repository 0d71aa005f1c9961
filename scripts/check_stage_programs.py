"""Bytes of every device with a program for each stage, beside those of one program for all devices.

    JAX_PLATFORMS=cuda,cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m scripts.check_stage_programs
    ... python -m scripts.check_stage_programs --models gpt2 mlp --schedule 1f1b --out out/some.json

Compiled for H100s that are not here (``jaxpipe.targets.absent``), or with ``--cpu`` for simulated CPU devices; nothing
is run. Of each stage:

    estimated  the plan's, before anything is compiled
    predicted  parameters + gradients + optimizer + state + batch + in flight x stash + messages, of array sizes, and
               the largest temporaries among its compiled programs
    compiled   the most bytes at once on the walk along the step's graph, with every compiled program's temporaries
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpipe
from examples import models
from jaxpipe import _compat
from jaxpipe.costs.count_products import count_products
from jaxpipe.runtime.mpmd.device_bytes import device_peaks
from jaxpipe.runtime.mpmd.dispatch import Dispatch
from jaxpipe.runtime.mpmd.mpmd_runtime import MpmdRuntime
from jaxpipe.targets.absent import absent_devices
from jaxpipe.targets.known import target_named
from scripts.measuring import header


STAGES, MICROBATCHES = 4, 8
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A model: ``make()`` gives it, or a function with its parameters; ``rows`` and the shape of one."""

    make: Callable[[], Any]
    rows: int
    shape: tuple[int, ...]
    classes: int = 0
    dtype: Any = jnp.float32
    train: bool = True


CASES = {
    "gpt2": Case(models.GPT2, 4, (512,), dtype=jnp.int32),
    "vit-b": Case(models.ViT, 16, (224, 224, 3), 1000),
    "resnet50": Case(models.ResNet50, 32, (224, 224, 3), 1000),
    "unet": Case(lambda: models.UNet(norm=True), 4, (64, 64, 3)),
    "mlp": Case(
        lambda: jax.tree_util.Partial(models.mlp, jax.eval_shape(lambda: models.init_mlp(jax.random.key(0), WIDTHS))),
        256,
        (1024,),
        10,
        train=False,
    ),
}
WIDTHS = (1024,) * 8 + (10,)


def entropy(logits: Any, labels: Any) -> Any:
    """The mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def pipeline_of(case: Case, devices: Any, runtime: str, options: argparse.Namespace) -> Any:
    """Plan a case."""
    rows = case.rows * MICROBATCHES
    batch = {"x": jax.ShapeDtypeStruct((rows, *case.shape), case.dtype)}
    if case.classes:
        batch["y"] = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def loss(model: Any, batch: Any) -> Any:
        logits = model(batch["x"], train=True) if case.train else model(batch["x"])
        if case.classes:
            return entropy(logits, batch["y"])
        if case.dtype == jnp.int32:
            return entropy(logits[:, :-1], batch["x"][:, 1:])
        return jnp.square(logits[..., :1] - batch["x"][..., :1]).mean()

    mesh = jax.sharding.Mesh(np.asarray(devices[:STAGES]), ("stage",))
    return jaxpipe.partition(
        case.make(),
        mesh,
        batch,
        loss=loss,
        optimizer=optax.sgd(0.1),
        num_microbatches=MICROBATCHES,
        schedule=options.schedule,
        memory=options.memory if runtime == "mpmd" else None,  # one program has no budget
        options=jaxpipe.PlanOptions(host_memory=options.host_memory if runtime == "mpmd" else None),
        profile="analytic",
        runtime=runtime,
    )


def measure(pipeline: Any) -> list[dict[str, Any]]:
    """Compile the stage programs of a pipeline; a row for each device."""
    plan, runtime = pipeline.plan, MpmdRuntime(pipeline._planned.with_step())
    dispatch = runtime.compiled_step
    peaks = device_peaks(dispatch, runtime.devices)
    rows = []
    for d, device in enumerate(pipeline.mesh.devices.flat):
        here = [s for s in runtime.places if runtime.devices.rows[s][0] == device]
        estimated = plan.stage_memory[here[0]]
        programs = {
            run.label: {
                "temporaries": run.temporary_bytes,
                "reused": run.alias_bytes,
                **dict(zip(("products", "flops"), count_products(traced_program(dispatch, number)), strict=True)),
            }
            for (number, place), run in dispatch.needs.items()
            if place.stage in here
        }
        arrays = {k: n for k, n in estimated.items() if k not in ("stash", "temporaries")}
        stash = sum(
            plan.stages[s].in_flight * plan.stages[s].stash_bytes
            for s in here
            if len(pipeline.schedule.program_kinds[s][0]) == 1
        )
        if any(plan.stages[s].away for s in here):
            stash = estimated["stash"]
        working = max(n["temporaries"] for label, n in programs.items() if label.startswith("stage"))
        rows.append(
            {
                "stages": here,
                "estimated": plan.each_device[d],
                "predicted": sum(arrays.values()) + stash + working,
                "compiled": peaks[device].total,
                "peak_in": peaks[device].label,
                "split": peaks[device].components,
                "host": peaks[device].host,
                "away": [plan.stages[s].away for s in here],
                "estimated_split": estimated,
                "stash": {"in_flight": [plan.stages[s].in_flight for s in here], "bytes": stash},
                "programs": programs,
            }
        )
    return rows


def traced_program(dispatch: Dispatch, number: int) -> Any:
    """Return the jaxpr of one of the programs."""
    return _compat.open_jaxpr(dispatch.graph.tasks[number].program.closed)[0]


def main() -> None:
    """Compile, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--memory", help="a budget for each device")
    parser.add_argument("--host-memory", help="bytes of the host's memory for each device, with a budget")
    parser.add_argument("--spmd", nargs="*", choices=CASES, default=[], help="models to compile as one program, too")
    parser.add_argument("--cpu", action="store_true", help="for simulated CPU devices")
    parser.add_argument("--out", type=Path, default=Path("out/stage-programs.json"))
    options = parser.parse_args()
    if options.cpu:
        jax.config.update("jax_num_cpu_devices", STAGES)
    devices = jax.devices() if options.cpu else absent_devices(target_named("H100"), STAGES)
    cases = {}
    for name in options.models:
        pipeline = pipeline_of(CASES[name], devices, "mpmd", options)
        print(name, pipeline.plan, sep="\n", file=sys.stderr, flush=True)
        rows = measure(pipeline)
        cases[name] = {"schedule": pipeline.plan.schedule, "devices": rows}
        for row in rows:
            off = row["predicted"] / row["compiled"] - 1, row["estimated"] / row["compiled"] - 1
            split = ", ".join(f"{key} {n / MIB:.0f}" for key, n in row["split"].items())
            print(
                f"{name} stage {row['stages']}: {row['compiled'] / MIB:.1f} MiB in {row['peak_in']} ({split}), "
                f"{row['host'] / MIB:.1f} MiB with the host; "
                f"predicted {off[0]:+.1%}, estimated {off[1]:+.1%}",
                flush=True,
            )
        if name in options.spmd:
            report = pipeline_of(CASES[name], devices, "spmd", options).memory_report()
            sizes = {"predicted": report.predicted_bytes[0], "compiled": report.compiled_bytes[0]}
            cases[name]["one_program"] = sizes
            print(f"{name} as one program: {sizes['compiled'] / MIB:.1f} MiB on each device", flush=True)
        result = {**header(), "device": devices[0].device_kind, "microbatches": MICROBATCHES, "models": cases}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        jax.clear_caches()
        gc.collect()


if __name__ == "__main__":
    main()
