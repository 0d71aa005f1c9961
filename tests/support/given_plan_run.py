"""A process of two that pass the same saved plan, and then plans that differ."""

import dataclasses
import sys

import jax
import numpy as np


sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])

import jaxpipe
from tests.support.hosts_run import bits, draw, make_pipeline, own


def trained(pipeline: jaxpipe.Pipeline) -> list[np.ndarray]:
    """Return the bits after a step."""
    state = pipeline.init(jax.random.key(0))
    state, metrics = pipeline.step(state, own(pipeline, draw(np.random.default_rng(0))))
    return [bits(x) for x in jax.tree.leaves((pipeline.parameters(state), metrics["loss"]))]


def main() -> None:
    """Compare a pipeline with that of its plan, and pass plans that differ."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jaxpipe.initialize_distributed(heartbeat_timeout_seconds=10)
    for case in ("stage", "model within"):
        pipeline = make_pipeline(case)
        again = make_pipeline(case, plan=pipeline.plan.to_json())
        assert again.plan == pipeline.plan
        for a, b in zip(trained(pipeline), trained(again), strict=True):
            assert (a == b).all()
    plan = make_pipeline("stage").plan
    plan = dataclasses.replace(plan, step_seconds=plan.step_seconds + 1 + jax.process_index())
    try:
        make_pipeline("stage", plan=plan.to_json())
    except jaxpipe.PartitionError as error:
        print(f"refused: {error}", flush=True)


if __name__ == "__main__":
    main()
