"""Stashes in the host's memory, compiled for GPUs that are not here: what XLA reserves on a device, and with its host.

    JAX_PLATFORMS=cuda,cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m scripts.check_host_memory

See ``scripts.absent_gpu`` for what it needs. Nothing is run, so there are no times, and nobody looks at values.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies

import jaxpipe
from jaxpipe.pipeline.host_probe import why_not
from jaxpipe.pipeline.program import PAGE
from jaxpipe.units import bytes_text
from scripts.absent_gpu import h100s
from scripts.measuring import header


#: Bytes for slices that have just arrived, and for what XLA reserves beyond the prediction.
SLACK = 30 * 2**20

STAGES, MICROBATCHES, ROWS, WIDTH, LAYERS = 4, 16, 4096, 512, 16


def layers(weights: list[Any], x: Any) -> Any:
    """Equal layers, each of which keeps its input."""
    x = x * 2  # so that the first stage stores as much as the others
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def pipeline(mesh: Any, **options: Any) -> Any:
    """The layers in stages, with what ``jax.grad`` stores."""
    shapes = [jnp.zeros((WIDTH, WIDTH), jnp.bfloat16, device=jax.devices("cpu")[0])] * LAYERS
    batch = jax.ShapeDtypeStruct((MICROBATCHES * ROWS, WIDTH), jnp.bfloat16)
    asked = {"num_microbatches": MICROBATCHES, "schedule": "one_f_one_b", "profile": "analytic", "storage": ()}
    return jaxpipe.partition(
        jax.tree_util.Partial(layers, shapes),
        mesh,
        batch,
        loss=lambda f, x: f(x).astype(jnp.float32).mean(),
        optimizer=optax.sgd(0.1),
        **asked,
        **options,
    )


def described(found: Any) -> dict[str, Any]:
    """What a pipeline plans to reserve and what XLA does, and how often whole arenas are copied."""
    report, program, plan = found.memory_report(), found._planned.program, found.plan
    text = found._runtime.compiled_step.as_text()
    sizes = {"arena": program.arena_pages, "host": program.host_pages}
    copies = {
        name: len(re.findall(rf"= \(?u32\[{pages},{PAGE}\][^=]* copy(?:-start)?\(", text))
        for name, pages in sizes.items()
        if pages
    }
    return {
        "away": [stage.away for stage in plan.stages],
        "storage": sorted({stage.storage for stage in plan.stages}),
        "memory": plan.memory,
        "predicted_bytes": report.predicted_bytes[0],
        "compiled_bytes": report.compiled_bytes[0],
        "predicted_host_bytes": report.predicted_host_bytes[0],
        "compiled_host_bytes": report.compiled_host_bytes[0],
        "copies": copies,
    }


def main() -> None:
    """Compile, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/host-memory-h100.json"))
    arguments = parser.parse_args()
    topology = h100s(STAGES)
    mesh = topologies.make_mesh(topology, (STAGES,), ("stage",))
    results: dict[str, Any] = {**header(), "device": topology.devices[0].device_kind}
    results["trial"] = {n: why_not(topology.devices[:n]) or "placed" for n in (1, 2, STAGES)}
    usual = pipeline(mesh)
    results["without"] = described(usual)
    # A budget with room for two of seven stashes, and links so fast that nothing is worth computing again.
    bandwidth = np.full((STAGES, STAGES), 1e12)
    network = jaxpipe.Network(bandwidth, host_bandwidth_bytes_per_second=(1e15,) * STAGES)  # type: ignore[arg-type]
    budget = usual.plan.predicted_bytes - usual.plan.memory["arena"] * 5 // 7 + SLACK
    results["budget"] = budget
    results["with"] = described(pipeline(mesh, memory=budget, host_memory="4GiB", network=network))
    for name in ("without", "with"):
        one = results[name]
        sizes = {key: bytes_text(value) for key, value in one.items() if key.endswith("_bytes")}
        print(
            f"{name}: {sizes['compiled_bytes']} on a device (predicted {sizes['predicted_bytes']}), "
            f"{sizes['compiled_host_bytes']} with its host ({sizes['predicted_host_bytes']}); "
            f"stashes away: {one['away']}; copies: {one['copies']}"
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
