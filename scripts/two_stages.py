"""A chain of layers in two stages on one device, whose stashes wait there or in the host's memory."""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import jaxpipe
from jaxpipe.array_types import Device
from jaxpipe.schedules.ordered import from_orders
from jaxpipe.schedules.table import Action, Kind, Schedule
from scripts.bench_encoding import compare


def forward_first(num_devices: int, num_microbatches: int) -> Schedule:
    """All forward passes of both stages before all backward passes."""
    forward = [Action(Kind.FORWARD, j, chunk) for chunk in (0, 1) for j in range(num_microbatches)]
    backward = [Action(Kind.BACKWARD, j, chunk) for chunk in (1, 0) for j in range(num_microbatches)]
    return from_orders("all forward first", [forward + backward], num_microbatches, num_chunks=2)


def model(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Layers of products and tanh."""
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def loss(chain: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """The mean square."""
    return jnp.square(chain(x)).mean()


def two_stages(device: Device, share: float, host: bool, small: bool) -> tuple[dict[str, Any], Callable[[], object]]:
    """Plan the chain, run a step and compare its parameters with those of plain JAX.

    Args:
      device: one that is there.
      share: of the bytes that the default plan needs, the part that is the budget; 0: no budget.
      host: whether stashes may wait in the host's memory.
      small: whether this is a rehearsal.

    Returns:
      What is known of it, and its step.
    """
    width, rows, layers, count = (64, 64, 4, 4) if small else (8192, 4096, 8, 8)
    keys = jax.random.split(jax.random.key(0), layers + 1)
    weights = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys[1:]]
    batch, optimizer = jax.random.normal(keys[0], (count * rows, width)), optax.sgd(0.1)

    def planned(memory: int | None) -> jaxpipe.Pipeline:
        return jaxpipe.partition(
            jax.tree_util.Partial(model, weights),
            Mesh(np.array([device]), ("stage",)),
            batch,
            loss=loss,
            optimizer=optimizer,
            memory=memory,
            num_microbatches=count,
            schedule=forward_first,
            profile="analytic",
            options=jaxpipe.PlanOptions(host_memory="64GiB" if host and memory else None),
        )

    def plain(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        gradient = jax.grad(lambda w, x: loss(jax.tree_util.Partial(model, w), x))
        zeros = jax.tree.map(jnp.zeros_like, weights)
        parts = x.reshape(count, rows, width)
        total, _ = jax.lax.scan(lambda g, x: (jax.tree.map(jnp.add, g, gradient(weights, x)), None), zeros, parts)
        updates, _ = optimizer.update(jax.tree.map(lambda g: g / count, total), optimizer.init(weights))
        return optax.apply_updates(weights, updates)

    pipeline = planned(None)
    needed = pipeline.compile().compiled_bytes
    assert needed is not None
    if share:
        pipeline = planned(int(share * needed))
    plan = pipeline.compile()
    first, _ = pipeline.step(pipeline.init(jax.random.key(0)), batch)
    got = jax.device_get(jax.tree.leaves(pipeline.parameters(first)))
    difference, ulps, same = compare(jax.device_get(jax.jit(plain)(weights, batch)), got)
    states = [first]

    def step() -> object:
        states[0], metrics = pipeline.step(states[0], batch)
        return states[0], metrics

    return {
        "needed": needed,
        "memory": int(share * needed),
        "bytes": plan.compiled_bytes,
        "predicted_seconds": plan.step_seconds,
        "away": [stage.away for stage in plan.stages],
        "identical": same,
        "difference": difference,
        "ulps": ulps,
        "plan": json.loads(plan.to_json()),
    }, step
