"""The requests of several processes, and the programs that these lead to, as texts to compare."""

from collections.abc import Mapping, Sequence

import flax
import jax
import jaxlib
import numpy as np
import optax

from jaxpipe._version import __version__
from jaxpipe.agreement import Part
from jaxpipe.array_types import Array, PyTree
from jaxpipe.errors import ModelError
from jaxpipe.graph.program_text import digests_by, program_text
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.models.traced_update import trace_initial_state, transformation_of
from jaxpipe.planning.check_request import Request
from jaxpipe.planning.cut_scans import TracedLayers
from jaxpipe.runtime.executable_plan import Batching
from jaxpipe.text.stable_text import stable_text, writer


#: Settings of JAX that programs depend on.
_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")


def request_parts(request: Request, batches: Sequence[PyTree], functions: Mapping[str, object]) -> dict[str, str]:
    """Return the arguments of ``partition``, and what they are traced with, by name.

    Args:
      functions: by name, those that may be left out.
    """
    mesh = request.mesh
    names = [maker.__name__ if hasattr(maker, "__name__") else stable_text(maker) for maker in request.schedules]
    devices = [(d.id, d.process_index) for d in mesh.devices.flat]
    groups = [[d.id for d in group] for group in request.submesh.groups.values()]
    return {
        **{f"version of {x.__name__}": x.__version__ for x in (jax, jaxlib, flax, optax, np)},
        "version of jaxpipe": __version__,
        **settings(),
        "mesh=, axes": stable_text([*mesh.shape.items(), *request.submesh.shape.items()]),
        "mesh=, order of devices (number, process)": stable_text([devices, groups]),
        **shape_parts(batches[0] if len(batches) == 1 else batches),
        "memory=": str(request.budget),
        "num_microbatches=": str(request.num_microbatches),
        "schedule=": names[0] if len(names) == 1 else "auto",
        "profile=": request.profile if isinstance(request.profile, str) else stable_text(request.profile),
        "network=": stable_text(request.network),
        "storage=": stable_text(request.policy),
        "gradient_exchange=": stable_text(request.exchange),
        "runtime=": request.runtime,
        "cuts=": stable_text(request.cuts),
        "plan=": "" if request.plan is None else request.plan.to_json(),
        **{f"{name}=": "left out" if function is None else "given" for name, function in functions.items()},
        **{f"PlanOptions({name}=)": stable_text(value) for name, value in vars(request.options).items()},
    }


def settings() -> dict[str, str]:
    """Return the settings of JAX that programs depend on, as they are here."""
    return {name: str(getattr(jax.config, name, None)) for name in _SETTINGS}


def check_settings(planned: Mapping[str, str]) -> None:
    """Raise ``ModelError`` where settings are not those that a model was traced under."""
    now = settings()
    if changed := ", ".join(f"{name} was {x} and is {now[name]}" for name, x in planned.items() if now[name] != x):
        raise ModelError(
            f"Settings of JAX have changed since partition traced the model ({changed}): its programs are no longer "
            "those of jax.jit. Call the pipeline under the settings that partition was called under, or call "
            "partition again."
        )


def shape_parts(batches: PyTree) -> dict[str, str]:
    """Return shapes of a batch, or of several, by path."""
    return {
        f"batch{jax.tree_util.keystr(path)}": f"{x.dtype}{list(x.shape)}"
        for path, x in jax.tree_util.tree_leaves_with_path(batches)
    }


def program_parts(request: Request, layers: TracedLayers, batching: Batching) -> dict[str, Part]:
    """Return the programs of a loss and of an optimizer, with their constants."""
    model, objective, update = layers.model, layers.objective, layers.update
    initial = trace_initial_state(request.optimizer, model)
    return {
        "the model's variables": {v.name: stable_text(v.aval) for v in (*model.parameters, *model.state)},
        "num_microbatches": str(batching.num_microbatches),
        "the program of model and loss=": {
            "": program_text(objective.graph, values=True),
            **digests_by(objective.graph, lambda op: op.path or "operators outside of all modules"),
        },
        "the metrics of loss=": stable_text((objective.tree, objective.weighted, objective.summed)),
        "the program of optimizer=": {
            "": program_text(update.graph, values=True),
            **digests_by(update.graph, lambda op: transformation_of(op) or "operators of its own"),
            "the first state": stable_text(initial),
        },
    }


def state_parts(key: Array, batch: PyTree, model: BoundModel, slots: PyTree, step: int) -> dict[str, Part]:
    """Return the parts that a first state is made of."""
    write, original, parts = writer(), model.original, dict[str, Part]()
    if original.values is not None:
        names = [v.name for v in (*original.parameters, *original.state)]
        pairs = zip(names, [*original.values[0], *original.values[1]], strict=True)
        parts["values of variables"] = {name: write(x) for name, x in pairs}
    if slots is not None:
        parts["optimizer_state="] = {str(k): write(x) for k, x in enumerate(slots)}
    return {"key": stable_text(key), **shape_parts(batch), "number of steps": str(step), **parts}
