"""Measure what the host spends on a call and on a send of stage programs, and on a call of a step within a budget.

    python -m scripts.bench_dispatch --out docs/results/dispatch-cpu-jax0.12.json

Stages that add 40 vectors of 8 numbers to their input, which is one small loop: XLA:CPU runs small programs in the
thread that calls them, so that their work counts, too. The median over the steps of the time that each kind of
instruction takes until the host goes on.

A step of ``jaxpipe.jit`` looks up its plan for each call. What that takes is the time of a call beyond that of the same
step under ``jax.jit``, in turns, for a state of 450 small arrays (150 parameters and Adam's moments).
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import jaxpipe
from jaxpipe.array_types import Device
from jaxpipe.runtime.mpmd.dispatch import follow
from jaxpipe.runtime.mpmd.step_graph import Call, Send
from jaxpipe.schedules import interleaved
from scripts.measuring import header


STAGES, MICROBATCHES, LEAVES, WIDTH = 4, 16, 40, 8
PARAMETERS, CALLS = 150, 200


def measure(devices: Sequence[Device], steps: int) -> dict[str, Any]:
    """Time calls, sends and steps; on a single device that has all stages, there are no sends."""
    model = jax.tree_util.Partial(_apply, [jnp.zeros(WIDTH)] * (STAGES * LEAVES))
    batch = jnp.ones((2 * MICROBATCHES, WIDTH))
    pipeline = jaxpipe.partition(
        model,
        Mesh(np.array(devices), ("stage",)),
        batch,
        loss=lambda f, x: jnp.mean(f(x)),
        optimizer=optax.sgd(1e-3),
        num_microbatches=MICROBATCHES,
        schedule="1f1b" if len(devices) > 1 else functools.partial(interleaved, num_chunks=STAGES),
        profile="analytic",
        runtime="mpmd",
    )
    state = pipeline.init(jax.random.key(0))
    state, _ = pipeline.step(state, batch)
    runtime = pipeline._runtime
    compiled = runtime._compiled_for(pipeline._planned.batch)
    spent: dict[str, list[float]] = {}
    for _ in range(steps):
        results = _timed(compiled.dispatch, compiled.given(state, batch), spent)
        state = compiled.state_of(state, results)
        jax.block_until_ready(state)
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        state, _ = pipeline.step(state, batch)
        seconds.append(time.perf_counter() - begin)
        jax.block_until_ready(state)
    sends = {"microseconds of a send, median": 1e6 * statistics.median(spent["send"])} if "send" in spent else {}
    return {
        "devices": len(devices),
        "leaves of a stage": LEAVES,
        "microseconds of a call, median": 1e6 * statistics.median(spent["call"]),
        **sends,
        "microseconds of calls by kind, median": {
            kind: round(1e6 * statistics.median(values), 1)
            for kind, values in spent.items()
            if kind in ("forward", "backward", "forward and backward", "update")
        },
        "calls of a step": len(spent["call"]) // steps,
        "sends of a step": len(spent.get("send", ())) // steps,
        "milliseconds of a step until the host goes on, median": 1e3 * statistics.median(seconds),
    }


def measure_budgeted() -> dict[str, Any]:
    """Time calls of a step under ``jax.jit``, and of the same step within a budget."""
    optimizer = optax.adam(1e-3)

    def step(state, x):
        params, moments = state
        gradients = jax.grad(jaxpipe.memory_encoded(lambda params, x: _apply(params, x).sum()))(params, x)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    params, x = [jnp.zeros(WIDTH)] * PARAMETERS, jnp.ones((2, WIDTH))
    state = jax.jit(lambda params: (params, optimizer.init(params)))(params)
    seconds: dict[Any, list[float]] = {jax.jit(step): [], jaxpipe.jit(step, memory="1GiB"): []}
    for k in range(CALLS + 1):
        for jitted, times in seconds.items():
            begin = time.perf_counter()
            state = jitted(state, x)
            if k:  # the first call compiles
                times.append(time.perf_counter() - begin)
            jax.block_until_ready(state)
    plain, budgeted = (1e6 * statistics.median(times) for times in seconds.values())
    return {
        "arrays of a step within a budget": len(jax.tree.leaves((state, x))),
        "microseconds of its call under jax.jit, median": plain,
        "microseconds that jaxpipe.jit adds, median": budgeted - plain,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES)
    results = {**measure(jax.devices(), arguments.steps), **measure_budgeted()}
    for name, value in results.items():
        print(f"{name}: {value:.1f}" if isinstance(value, float) else f"{name}: {value}")
    if arguments.out:
        arguments.out.write_text(json.dumps({**header(), **results}, indent=1) + "\n")


def _apply(vectors, x):
    return functools.reduce(jnp.add, vectors, x)


def _timed(dispatch, given, spent):
    """Follow a list step by step, and keep what each takes."""
    for step, instruction in zip(dispatch.steps, dispatch.graph.instructions, strict=True):
        begin = time.perf_counter()
        follow(given, (step,))
        seconds = time.perf_counter() - begin
        kind = {Call: "call", Send: "send"}.get(type(instruction), "other")
        spent.setdefault(kind, []).append(seconds)
        if isinstance(instruction, Call):
            label = dispatch.graph.tasks[instruction.task].label
            spent.setdefault(label.split(": ")[-1], []).append(seconds)
    return {port: given[number] for port, number in dispatch.graph.outputs.items()}


if __name__ == "__main__":
    main()
