"""Two processes that exchange gradients, and the bytes that the kernel says that each has sent over its sockets.

socket_bytes_run.py <folder>
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import jaxpipe
from jaxpipe import gradients
from tests.support.outer_loop_run import sent_bytes


STEPS = 8
WIDTH = 512

EXCHANGES = {
    "dense": "dense",
    "blocks": gradients.block_sparse(k=0.1),
    "blocks in 2 bits": gradients.block_sparse(k=0.1, bits=2),
}


def sent() -> int:
    """Return the bytes that the TCP connections of this process have delivered."""
    return sum(sent_bytes().values())


def loss(model, x):
    return jnp.square(model(x)).mean()


def run(folder: Path) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    jaxpipe.initialize_distributed(heartbeat_timeout_seconds=10)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / 30 for key in jax.random.split(jax.random.key(0), 2)]
    model = jax.tree_util.Partial(lambda ws, x: jnp.tanh(x @ ws[0]) @ ws[1], weights)
    mesh = jax.make_mesh((1, 2), ("stage", "data"))
    rows = jnp.ones((4, WIDTH))
    found = {}
    for name, exchange in EXCHANGES.items():
        pipeline = jaxpipe.partition(
            model, mesh, jax.ShapeDtypeStruct((8, WIDTH), jnp.float32), loss=loss, optimizer=optax.sgd(0.1),
            num_microbatches=1, profile="analytic", gradient_exchange=exchange,
        )  # fmt: skip
        state = pipeline.init(jax.random.key(0))
        state, _ = jax.block_until_ready(pipeline.step(state, rows))
        before = sent()
        for _ in range(STEPS):
            state, _ = jax.block_until_ready(pipeline.step(state, rows))
        found[name] = {"sent": (sent() - before) / STEPS, "said": pipeline.plan.exchange_bytes}
    (folder / f"{jax.process_index()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
