"""The training step of a model of ``scripts.encoding_cases`` as a pipeline of one stage, within a budget."""

from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

import jaxpipe
from jaxpipe.array_types import Device
from scripts.check_stage_programs import measure
from scripts.encoding_cases import Problem, cross_entropy


def one_stage(
    problem: Problem, device: Device, memory: int | None, compile: bool | None = None, num_microbatches: int = 1
) -> jaxpipe.Pipeline:
    """Plan a step with plain SGD on one device.

    Args:
      problem: the model, with arrays or shapes.
      device: one that is there, or of a topology that is only compiled for.
      memory: most bytes of parameters, gradients, batch and temporaries.
      compile: as ``PlanOptions.compile``.
      num_microbatches: whose gradients are added up.

    Raises:
      MemoryBudgetError: if no plan keeps it.
    """
    _, x, _, labels, _ = problem.arguments
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch_of(x, labels))
    return jaxpipe.partition(
        problem.model,
        Mesh(np.array([device]), ("stage",)),
        batch,
        loss=lambda model, rows: cross_entropy(model(rows["x"], **problem.call), rows["labels"]),
        optimizer=optax.sgd(1e-3),
        memory=memory,
        num_microbatches=num_microbatches,
        profile="analytic",
        runtime="mpmd",
        options=jaxpipe.PlanOptions(compile=compile),
    )


def stage_summary(pipeline: jaxpipe.Pipeline) -> dict[str, Any]:
    """Return what ``scripts.bench_encoding.summary`` does, of such a pipeline, and the bytes that were predicted."""
    (row,) = measure(pipeline)
    program = next(program for label, program in row["programs"].items() if "backward" in label)
    count = pipeline.plan.num_microbatches
    known = {"temporaries": program["temporaries"], **{key: count * program[key] for key in ("products", "flops")}}
    return {"bytes": row["compiled"], "predicted_bytes": row["estimated"], "microbatches": count, **known}


def batch_of(x: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """The batch that such a pipeline takes."""
    return {"x": x, "labels": labels}
