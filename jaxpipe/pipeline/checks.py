"""Checks of a mesh, a batch and a budget, before anything is traced."""

from collections.abc import Sequence
from typing import Any, cast

import jax
from jax.sharding import Mesh

from jaxpipe.errors import (
    BatchError,
    FewExamplesWarning,
    ModelError,
    PartitionError,
    TrainingModeWarning,
    warn,
)
from jaxpipe.network import Network
from jaxpipe.pipeline.arguments import check_arrays, check_function
from jaxpipe.pipeline.state import TrainState
from jaxpipe.pipeline.statistics import FEW_EXAMPLES
from jaxpipe.schedules import BY_NAME, Schedule
from jaxpipe.schedules.candidates import AUTO, ScheduleMaker
from jaxpipe.schedules.names import plain_name, schedule_named
from jaxpipe.sharding.mesh_axes import COMMON_NAMES, DATA, STAGE
from jaxpipe.text.value_text import structure_difference


def check_mesh(mesh: Mesh) -> tuple[int, int]:
    """Stages and replicas of a mesh, whose axes have the names of ``with_own_names``.

    Raises:
      PartitionError: unless it has one axis ``stage`` and at most one of replicas.
    """
    if not isinstance(mesh, Mesh):
        raise PartitionError(
            f"mesh is {type(mesh).__name__}; partition needs a jax.sharding.Mesh with an axis {STAGE!r}, for example "
            f"jax.make_mesh((4,), ({STAGE!r},))."
        )
    if STAGE not in mesh.axis_names:
        raise PartitionError(
            f"The mesh has the axes {mesh.axis_names}. A pipeline uses {STAGE!r} (required); {DATA!r} makes replicas, "
            f"and any other axis shards within a stage. Make it with jax.make_mesh((2, 4), ({DATA!r}, {STAGE!r})), or "
            "say which axis is which: options=jaxpipe.PlanOptions(stage_axis=...). Names that are taken for them: "
            f"{', '.join(map(repr, COMMON_NAMES[STAGE][1:]))}; {', '.join(map(repr, COMMON_NAMES[DATA][1:]))}."
        )
    for axis, names in COMMON_NAMES.items():
        twice = [name for name in mesh.axis_names if name in names]
        if len(twice) > 1:
            raise PartitionError(
                f"The mesh has the axes {mesh.axis_names}, of which {' and '.join(map(repr, twice))} are both taken "
                f"for {axis!r}. Give one of them another name: a mesh has one axis of stages, at most one of replicas, "
                "and others that shard within a stage."
            )
    without = set(range(jax.process_count())) - {device.process_index for device in mesh.devices.flat}
    if without:
        raise PartitionError(
            f"The mesh has no device of process {', '.join(map(str, sorted(without)))}, of {jax.process_count()}. All "
            "processes of a run take part in its pipeline: make the mesh of jax.devices()."
        )
    return mesh.shape[STAGE], mesh.shape.get(DATA, 1)


def check_devices_per_stage(given: Any, num_devices: int, mesh: Mesh, exchanged: bool) -> bool | tuple[int, ...]:
    """Return how many devices each stage has, or whether that may be chosen.

    Args:
      given: ``PlanOptions.devices_per_stage``.
      exchanged: whether gradients are exchanged by blocks.

    Raises:
      PartitionError: if it does not fit the mesh.
    """
    widths = given
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 1 or num_devices % given:
            raise PartitionError(
                f"devices_per_stage={given}: each stage would have {given} of the {num_devices} devices along "
                f"{STAGE!r}, which is no multiple of that. Pass a divisor of {num_devices}, or a number for each stage "
                "that add up to it."
            )
        widths = (given,) * (num_devices // given)
    if not isinstance(given, bool | int):
        good = isinstance(given, Sequence) and all(type(k) is int and k > 0 for k in given)
        if not good or sum(given) != num_devices:
            raise PartitionError(
                f"devices_per_stage={given!r}; it must be True (the planner chooses), False, a number of devices for "
                f"every stage, or a sequence of numbers above 0, one for each stage, that add up to the {num_devices} "
                f"device(s) along {STAGE!r}, such as {(num_devices - 1, 1) if num_devices > 1 else (1,)}."
            )
        widths = tuple(given)
    if not widths or num_devices == 1 or (isinstance(widths, tuple) and max(widths) == 1):
        return False
    if DATA in mesh.axis_names:
        raise PartitionError(
            f"devices_per_stage={given!r} gives stages several devices along {STAGE!r}, and the mesh has an axis "
            f"{DATA!r} for replicas of the whole pipeline; there can be one of the two. Make a mesh with the axis "
            f"{STAGE!r} alone, or leave devices_per_stage= out."
        )
    if exchanged:
        raise PartitionError(
            f"devices_per_stage={given!r} with gradient_exchange=block_sparse(...): blocks are exchanged between the "
            f"replicas of a whole pipeline only. Use a mesh axis {DATA!r}, or 'dense'."
        )
    return widths


def check_unroll(rows: int, exchanged: bool) -> int:
    """The iterations that stay together when scans are unrolled; 0 if they are not.

    Raises:
      PartitionError: if that is no such number, or gradients are exchanged by blocks of whole parameters.
    """
    if not isinstance(rows, int) or rows < 0:
        raise PartitionError(
            f"unroll_scans={rows!r}; it must be True, the number of iterations that stay together, or False."
        )
    if rows and exchanged:
        raise PartitionError(
            "unroll_scans: gradient_exchange=block_sparse(...) sends the best blocks of each whole parameter, and a "
            "stacked one would be in several stages. Use gradient_exchange='dense', or leave out unroll_scans."
        )
    return int(rows)


def check_network(network: Any, mesh: Mesh) -> None:
    """Raise ``PartitionError`` unless a network is that of the mesh."""
    if network is None:
        return
    if not isinstance(network, Network):
        raise PartitionError(f"network is {type(network).__name__}; it must be a jaxpipe.Network.")
    if network.num_devices != mesh.devices.size:
        raise PartitionError(
            f"network= has {network.num_devices} devices, the mesh {mesh.devices.size}; it must have one for each, in "
            "the order of mesh.devices.flat."
        )


def schedule_makers(schedule: Any) -> tuple[ScheduleMaker, ...]:
    """Return what makes the tables that were asked for, of which the fastest is wanted.

    Raises:
      PartitionError: if there is no such name, or it is no function.
    """
    if isinstance(schedule, str) and plain_name(schedule) == "auto":
        return AUTO
    maker = schedule_named(schedule, BY_NAME) if isinstance(schedule, str) else schedule
    if isinstance(schedule, Schedule):
        raise PartitionError(
            f"schedule= is a table, {schedule.name} for {schedule.num_stages} stages; partition asks for one of the "
            "size that it needs. Pass a function: schedule=lambda num_stages, num_microbatches: table."
        )
    if not callable(maker):
        raise PartitionError(
            f"schedule={schedule!r}; it must be 'auto', {', '.join(map(repr, BY_NAME))}, or a function (num_stages, "
            "num_microbatches) -> Schedule, such as jaxpipe.schedules.gpipe."
        )
    check_function(maker, "schedule", ("num_stages", "num_microbatches"))
    return (cast(ScheduleMaker, maker),)


def batch_shapes(batch: Any) -> Any:
    """A batch as shapes, in the dtypes that JAX gives its arrays: 32 bits for NumPy's 64, unless x64 is enabled.

    Raises:
      BatchError: if it holds anything that is not an array.
    """
    check_arrays(batch)

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True))

    return jax.tree.map(shape, batch)


def listed_batches(batch: Any) -> list[Any]:
    """Return the batches of a list of batches, or the one batch.

    A list of batches has several elements of one structure, none of which is an array by itself.
    """
    if not isinstance(batch, list) or len(batch) < 2 or any(jax.tree_util.all_leaves([x]) for x in batch):
        return [batch]
    structures = {jax.tree.structure(x) for x in batch}
    return list(batch) if len(structures) == 1 else [batch]


def batch_size(batch: Any) -> int:
    """The number of examples: the first axis of every array that has one.

    Raises:
      BatchError: if arrays disagree, or there is no example.
    """
    sizes = {
        jax.tree_util.keystr(path): x.shape[0] for path, x in jax.tree_util.tree_flatten_with_path(batch)[0] if x.shape
    }
    if not sizes:
        raise BatchError("In the batch no array has an axis; a batch is a tree of arrays [examples, ...].")
    if 0 in sizes.values():
        names = ", ".join(f"batch{name}" for name, n in sizes.items() if not n)
        raise BatchError(f"The first axis of {names} is 0: the batch has no example. Pass one at least.")
    if len(set(sizes.values())) != 1:
        listed = ", ".join(f"batch{name}: {n}" for name, n in sizes.items())
        raise BatchError(
            f"The first axis of every array of a batch is its examples, but they differ in size ({listed})."
        )
    return next(iter(sizes.values()))


def check_microbatches(size: int, replicas: int, num_microbatches: int, what: str = "batch") -> None:
    """Raise ``BatchError`` unless a batch can be cut into equal micro-batches."""
    if num_microbatches < 1:
        raise BatchError(f"num_microbatches={num_microbatches}; it must be at least 1.")
    if size % (replicas * num_microbatches):
        fits = [m for m in range(1, size + 1) if size % (replicas * m) == 0]
        near = sorted(sorted(fits, key=lambda m: abs(m - num_microbatches))[:2])
        counts = f"num_microbatches={' or '.join(map(str, near))}" if near else f"a multiple of {replicas} examples"
        unit = replicas * num_microbatches
        below, above = size // unit * unit, (size // unit + 1) * unit
        sizes = " or ".join(str(n) for n in (below, above) if n)
        raise BatchError(
            f"A {what} of {size} examples cannot be cut into num_microbatches={num_microbatches} equal micro-batches "
            f"on each of {replicas} replica(s). Use {counts}, or a {what} of {sizes} examples."
        )


def warn_few_examples(modules: Sequence[str], size: int, replicas: int, num_microbatches: int, fewer: int) -> None:
    """Warn that a model normalizes over the few examples of a micro-batch.

    Args:
      fewer: a number of micro-batches that leaves more examples to each, if it is a smaller one.
    """
    unit = replicas * num_microbatches
    more = f"num_microbatches={fewer}, of {size // (replicas * fewer)} each, or " if fewer < num_microbatches else ""
    listed = ", ".join(path or "the loss" for path in modules[:3]) + (" and others" if len(modules) > 3 else "")
    warn(
        f"{listed} normalize(s) over the examples of a micro-batch, and a batch of {size} in "
        f"num_microbatches={num_microbatches} on each of {replicas} replica(s) leaves {size // unit} to each. "
        f"Statistics of fewer than {FEW_EXAMPLES} examples are mostly noise (of one example, a dense layer's output "
        f"becomes the same whatever it was). Use {more}a batch of at least {FEW_EXAMPLES * unit} examples.",
        FewExamplesWarning,
    )


def warn_training_mode(name: str, drawn: Sequence[str], updated: Sequence[str]) -> None:
    """Warn that an evaluation or a prediction runs as training does.

    Args:
      drawn: module paths where random numbers are drawn.
    """
    signs = [
        f"{verb} {', '.join(items[:3])}{' and others' if len(items) > 3 else ''}"
        for verb, items in (("draws random numbers in", drawn), ("computes new batch statistics for", updated))
        if items
    ]
    warn(
        f"{name} {' and '.join(signs)}, as a model in training mode does. Switch the mode in {name}: model.eval() for "
        "NNX, the module's own argument for Linen, such as model(x, train=False) or deterministic=True. If it is meant "
        "so, as for samples, silence this with warnings.simplefilter('ignore', jaxpipe.TrainingModeWarning).",
        TrainingModeWarning,
    )


def paired_leaves(given: Any, planned: Any) -> list[tuple[str, Any, Any]]:
    """Return the name of each leaf of a batch, the leaf, and the one that was planned for.

    Raises:
      BatchError: if the structures differ.
    """
    if difference := structure_difference(given, planned):
        raise BatchError(
            f"The batch has another structure than the plan was made for: {difference}. Pass batches of one "
            "structure, or make another pipeline."
        )
    pairs = zip(*map(jax.tree_util.tree_leaves_with_path, (given, planned)), strict=True)
    return [(f"batch{jax.tree_util.keystr(path)}", x, y) for (path, x), (_, y) in pairs]


def check_same_structure(given: Any, planned: Any) -> None:
    """Raise ``BatchError`` unless a batch has the structure, shapes and dtypes that were planned for."""
    for name, x, y in paired_leaves(given, planned):
        if (tuple(x.shape), x.dtype) != (tuple(y.shape), y.dtype):
            raise BatchError(
                f"{name} is {x.dtype}{list(x.shape)}, the plan was made for {y.dtype}{list(y.shape)}. {_fit(x, y)}"
            )


def _fit(given: Any, planned: Any) -> str:
    """The way to make an array of a batch fit the plan."""
    if given.dtype != planned.dtype:
        return f"Cast it, array.astype({str(planned.dtype)!r}), or plan with a batch of dtype {given.dtype}."
    if given.shape[1:] != planned.shape[1:] or not given.shape or not planned.shape:
        return (
            "The axes behind the examples are planned for as well: pad or cut them to these sizes, or make a pipeline "
            'with runtime="mpmd", which takes any; evaluate and predict take any sizes.'
        )
    return (
        f"Pad or drop the last examples of an epoch, so that every batch has {planned.shape[0]}, or make a pipeline "
        'with runtime="mpmd", which takes any number; evaluate and predict take any number of examples.'
    )


def check_runtime(runtime: Any) -> Any:
    """Return the runtime; raise ``PartitionError`` if it is none."""
    if runtime not in ("auto", "mpmd", "spmd"):
        raise PartitionError(
            f"runtime={runtime!r}; it must be 'mpmd' (a program for each stage), 'spmd' (one program for all devices) "
            "or 'auto'."
        )
    return runtime


def check_residual(given: Sequence[tuple[int, ...]], expected: Sequence[tuple[int, ...]]) -> None:
    """Raise ``ModelError`` if a state has residuals of another gradient exchange."""
    if list(given) != list(expected):
        raise ModelError(
            f"The state has residuals of a gradient exchange of shapes {list(given)}, this pipeline expects "
            f"{list(expected)}: the exchange, or the number of replicas, is another. Pass the state's variables to "
            "init(key, variables=other.parameters(state))."
        )


def check_state(state: Any, expected: str) -> None:
    """Raise ``ModelError`` if something is no state, or one of another plan or one that was used."""
    if not isinstance(state, TrainState):
        raise ModelError(
            f"state is of type {type(state).__name__}; it must be the TrainState that init, step or restore returned. "
            "The state comes first, then the batch: pipeline.step(state, batch)."
        )
    if state.plan != expected:
        raise ModelError(
            f"The state belongs to the plan {state.plan}, this pipeline has the plan {expected}: variables are placed "
            "differently. Use the pipeline that made the state, or pass its variables to "
            "init(key, variables=other.parameters(state))."
        )
    check_unused(state)


def check_unused(state: TrainState) -> None:
    """Raise ``ModelError`` if a step has donated a state."""
    if state.is_donated:
        raise ModelError(
            "This state was passed to pipeline.step before, which used its memory for the state that it returned. Go "
            "on with that one: state, metrics = pipeline.step(state, batch). To go on from one state twice, save it "
            "with pipeline.save and restore it for each."
        )
