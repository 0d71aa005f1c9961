"""A training run that can be killed: a process that has imported everything forks one for each run.

    python tests/support/checkpoint_run.py DIRECTORY

Each line of its input, a JSON object, starts a run that resumes from ``DIRECTORY``; lines of its output tell what
happens. Nothing has started JAX's backends before the fork, and no run knows of another but through the directory.
"""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpipe


def make_pipeline() -> jaxpipe.Pipeline:
    """Three small layers in two stages, with dropout, and an optimizer with state."""

    def apply(w, x, key):
        kept = jax.random.bernoulli(key, 0.8, (x.shape[0], 16))
        return jnp.tanh(jnp.tanh(x @ w["a"]) * kept @ w["b"]) @ w["c"]

    keys = jax.random.split(jax.random.key(1), 3)
    shapes = {"a": (8, 16), "b": (16, 16), "c": (16, 4)}
    weights = {name: jax.random.normal(k, shape) / 4 for k, (name, shape) in zip(keys, shapes.items(), strict=True)}

    def loss(model, batch):
        key = jax.random.fold_in(jax.random.key(5), batch["seed"][0])
        return jnp.square(model(batch["x"], key) - batch["y"]).mean()

    return jaxpipe.partition(
        jax.tree_util.Partial(apply, weights),
        jax.sharding.Mesh(jax.devices()[:2], ("stage",)),
        jax.eval_shape(lambda: draw(np.random.default_rng(0))),
        loss=loss,
        optimizer=optax.adam(1e-3),
        num_microbatches=2,
        profile="analytic",
    )


def draw(data: np.random.Generator) -> dict[str, np.ndarray]:
    """The next batch."""
    x = data.standard_normal((4, 8), np.float32)
    return {"x": x, "y": x[:, :4] ** 2, "seed": data.integers(0, 1000, (4,), np.int32)}


def generator(position: dict | None) -> np.random.Generator:
    """The data from a saved position on."""
    data = np.random.default_rng(0)
    if position is not None:
        data.bit_generator.state = position
    return data


def tell(*words: object) -> None:
    """One line, at once."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def train(directory: str, every: int, until: int) -> None:
    """Train up to a step, and print every complete save."""
    pipeline = make_pipeline()
    with jaxpipe.Checkpointer(pipeline, directory, every=every, keep=3) as checkpointer:
        state, position = checkpointer.restore() or (pipeline.init(jax.random.key(0)), None)
        data = generator(position)
        begun = int(state.step)
        step = begun
        try:
            while step < until:
                state, _ = pipeline.step(state, draw(data))
                step += 1
                if step == begun + 1:
                    tell("ready", step)
                checkpointer.after_step(state, data.bit_generator.state)
                if step % every == 1 and step > begun + every:  # the save of the step before, in the background
                    checkpointer.wait()
                    tell("complete", step - 1)
        finally:
            tell("stopped", int(state.step))


def main(directory: str) -> None:
    """Fork a run for each line."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                jax.config.update("jax_platforms", "cpu")
                jax.config.update("jax_num_cpu_devices", 2)
                train(directory, **json.loads(line))
                code = 0
            except SystemExit as error:
                code = int(error.code or 0)
            finally:
                os._exit(code)
        tell("pid", child)
        status = os.waitpid(child, 0)[1]
        tell("ended", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    import orbax.checkpoint  # noqa: F401  # before the forks, of which each would

    main(sys.argv[1])
