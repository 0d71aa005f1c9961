"""Two processes, a replica each, over a link of some bandwidth: the seconds of a step, and the bytes that were sent.

    scripts/launch_local 2 -- python tests/support/outer_loop_run.py FOLDER BYTES_PER_SECOND CASE...

The kernel paces every socket of the process (``SO_MAX_PACING_RATE``) and counts what the other end has acknowledged.
"""

import contextlib
import json
import os
import socket
import statistics
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import jaxpipe
from jaxpipe.gradients import block_sparse, outer_loop


#: Of a step in a round, and rounds that are measured.
STEPS, ROUNDS = 8, 6
WIDTHS = 16, 4096, 512

#: Numbers of ``SO_MAX_PACING_RATE`` on Linux, and where ``tcp_info`` has the bytes that were acknowledged.
PACING, ACKNOWLEDGED = 47, 120

EXCHANGES = {
    "dense": "dense",
    "outer": outer_loop(inner_steps=STEPS),
    "fragments": outer_loop(inner_steps=STEPS, fragments=2),
    "blocks": outer_loop(inner_steps=STEPS, exchange=block_sparse(k=0.01)),
}


def connections() -> Iterator[tuple[str, socket.socket]]:
    """Yield the TCP connections of this process with their names."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(path.readlink())
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as connection:
                    if connection.family != socket.AF_UNIX and connection.type == socket.SOCK_STREAM:
                        yield name, connection


def sent_bytes() -> dict[str, int]:
    """Return the bytes of each connection that have arrived at its other end."""
    sizes = {}
    for name, connection in connections():
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        sizes[name] = struct.unpack_from("Q", info, ACKNOWLEDGED)[0]
    return sizes


def pace(bytes_per_second: int) -> None:
    """Send no faster over any connection."""
    for _, connection in connections():
        connection.setsockopt(socket.SOL_SOCKET, PACING, bytes_per_second)


def loss(model, batch):
    return jnp.square(model(batch)).mean()


def make_pipeline(case: str, bytes_per_second: float) -> jaxpipe.Pipeline:
    keys = jax.random.split(jax.random.key(0))
    weights = [jax.random.normal(k, shape) / 64 for k, shape in zip(keys, (WIDTHS[:2], WIDTHS[1:]), strict=True)]
    model = jax.tree_util.Partial(lambda ws, x: jnp.tanh(x @ ws[0]) @ ws[1], [jax.device_get(w) for w in weights])
    return jaxpipe.partition(
        model,
        jax.make_mesh((2, 1), ("data", "stage")),
        jax.ShapeDtypeStruct((4, WIDTHS[0]), "float32"),
        loss=loss,
        optimizer=optax.sgd(1e-2),
        gradient_exchange=EXCHANGES[case],
        num_microbatches=1,
        profile="analytic",
        network=jaxpipe.Network.uniform(2, bytes_per_second),
        runtime="spmd",
    )


def measured(case: str, bytes_per_second: int) -> dict[str, object]:
    """Return what the plan says of a step, and what one takes and sends; seconds of the fastest round."""
    pipeline = make_pipeline(case, bytes_per_second)
    state = pipeline.init(jax.random.key(0))
    batch = jax.device_get(jax.random.normal(jax.random.key(1 + jax.process_index()), (2, WIDTHS[0])))
    seconds, sizes, losses = [], [], []
    for k in range(ROUNDS + 1):
        if k == 1:
            pace(bytes_per_second)
        before, begin = sent_bytes(), time.perf_counter()
        for _ in range(STEPS):
            state, metrics = pipeline.step(state, batch)
            losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        seconds.append((time.perf_counter() - begin) / STEPS)
        time.sleep(0.2)  # until the last bytes are acknowledged
        sizes.append(max(n - before.get(name, 0) for name, n in sent_bytes().items()) / STEPS)
    exchanges = {row.name: [row.bytes, row.seconds] for row in pipeline.plan.exchanges}
    parameters = [float(jnp.abs(x).sum()) for x in jax.tree.leaves(pipeline.parameters(state))]
    return {
        "exchanges": exchanges,
        "seconds": min(seconds[1:]),
        "bytes": statistics.median(sizes[1:]),
        "losses": losses,
        "parameters": parameters,
    }


def main() -> None:
    """Leave the results of some cases."""
    folder, bytes_per_second, *cases = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jaxpipe.initialize_distributed(heartbeat_timeout_seconds=10)
    results = {case: measured(case, int(bytes_per_second)) for case in cases}
    (Path(folder) / f"{jax.process_index()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
