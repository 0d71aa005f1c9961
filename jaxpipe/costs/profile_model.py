"""``profile_model``: profile what ``partition`` would cut."""

# More than 15 of our modules: a profile takes the arguments of partition and traces them.
from dataclasses import dataclass, replace
from typing import Literal

import jax
import optax

from jaxpipe.array_types import Device, PyTree, TensorNumber
from jaxpipe.costs import profile_cache as kept
from jaxpipe.costs.given_seconds import SecondsOf, with_given_seconds
from jaxpipe.costs.measured_seconds import measure
from jaxpipe.costs.profile import Profile
from jaxpipe.costs.roofline import analytic
from jaxpipe.errors import BatchError, PartitionError
from jaxpipe.graph.sharding_annotations import outside_mesh, without_annotations
from jaxpipe.models import check_batch
from jaxpipe.models.bind import bind
from jaxpipe.models.bound_model import Model, UserFunction
from jaxpipe.models.check_arguments import check_function
from jaxpipe.models.microbatch_program import MicrobatchProgram, trace_loss, with_rows
from jaxpipe.models.traced_update import trace_update, without_frozen
from jaxpipe.models.unroll_layers import Groups, check_groups, groups_of, unroll
from jaxpipe.residuals.backward_graph import BackwardGraph, build_backward_graph
from jaxpipe.targets.known import target_named, target_of
from jaxpipe.targets.rates import OTHER
from jaxpipe.text.units import whole_number


#: Where the seconds of a profile come from.
Source = Literal["measured", "analytic"]


@dataclass(frozen=True)
class EstimateFor:
    """Seconds are estimated for a kind of device, such as ``"H100"``, that need not be the mesh's."""

    device: str


@outside_mesh()
def profile_model(
    model: Model,
    batch: PyTree,
    *,
    loss: UserFunction,
    optimizer: optax.GradientTransformation | None = None,
    source: Source | SecondsOf = "measured",
    device: Device | str | None = None,
    num_microbatches: int = 1,
    variables: PyTree = None,
    cache: bool = True,
    unroll_scans: int | Groups = False,
) -> Profile:
    """Find out what each operator of one micro-batch costs, forward and backward.

    The profile is that of the program which ``partition`` cuts for micro-batches of this size: it can be written as
    JSON, edited, and handed to ``partition(profile=...)``.

    Args:
      model: as for ``partition``. Its variables are not read, only their shapes.
      batch: arrays or shapes ``[examples, ...]``.
      loss: as for ``partition``.
      optimizer: leaves out the work for gradients of parameters that it does not train; without one, all gradients are
        in the profile, and ``partition`` leaves out what its optimizer does not need.
      source: ``"measured"`` compiles and runs the operators in groups, with random operands; ``"analytic"`` estimates
        them from peak rates, and needs no device; or a function of an operator (``jaxpipe.Work``) that gives its
        seconds, forward and backward.
      device: a ``jax.Device``, by default the first; for an estimate also the name of a kind of device, ``"H100"``.
      num_microbatches: into how many the batch is cut, those of all replicas counted.
      variables: needed if the model is a function of variables: their values or shapes.
      cache: whether a measurement may be read from, and is kept on disk (in ``$JAXPIPE_CACHE_DIR``, or the user's cache
        folder), under a hash of the program, the kind of device and all versions.
      unroll_scans: as for ``partition``, but by default no scan is cut; or the ``scan_groups`` of another profile.

    Raises:
      PartitionError: if the source or the kind of device is not known.
      ModelError, BatchError, PartitionError: as ``partition``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> model = jax.tree_util.Partial(lambda w, x: x @ w, jnp.ones((3, 1)))
      >>> batch, loss = jnp.ones((4, 3)), lambda f, x: f(x).mean()
      >>> profile = profile_model(model, batch, loss=loss, source="analytic", device="H100")
      >>> profile.names, profile.forward_flops[0], profile.parameter_bytes[0]
      (('dot_general', 'reduce_sum', 'div'), 24.0, 12.0)
    """
    if not callable(source) and source not in ("measured", "analytic"):
        raise PartitionError(f"source={source!r}; it must be 'measured', 'analytic' or a function of an operator.")
    check_function(loss, "loss")
    if isinstance(device, str) and source != "analytic":
        raise PartitionError(
            f"device={device!r} is the name of a kind of device; to measure, pass a jax.Device, or source='analytic'."
        )
    if isinstance(device, str):
        target_named(device)  # before anything is traced
    shapes = check_batch.batch_shapes(batch)
    num_microbatches = whole_number(num_microbatches, "num_microbatches", BatchError)
    size = check_batch.batch_size(shapes)
    check_batch.check_microbatches(shapes, 1, num_microbatches)
    microbatch = with_rows(shapes, size // num_microbatches)
    unrolling = check_groups(unroll_scans)
    objective = trace_loss(bind(model, loss, microbatch, variables), loss, microbatch)
    if unrolling:
        objective = trace_loss(unroll(objective, groups_of(objective, unrolling)), loss, microbatch)
    if optimizer is not None:
        objective = objective.training(without_frozen(trace_update(optimizer, objective.model)).trained)
    profiled = EstimateFor(device) if isinstance(device, str) else source
    described = None if isinstance(device, str) else device or jax.devices()[0]
    profile = profile_objective(objective, profiled, described, cache=cache)
    return replace(profile, frozen=frozen_names(objective), scan_groups=objective.model.scan_groups)


def frozen_names(objective: MicrobatchProgram) -> tuple[str, ...]:
    """Names of the parameters that are not trained."""
    return tuple(name for t, name in objective.names.items() if t in objective.frozen)


def profile_objective(
    objective: MicrobatchProgram,
    source: Source | EstimateFor | SecondsOf,
    device: Device | None,
    *,
    cache: bool = True,
    fresh: bool = False,
) -> Profile:
    """Profile a traced micro-batch, measured on a device or estimated for it or for another kind.

    A measurement is kept if there may be a ``cache``, and read from there unless it is to be ``fresh``.
    """
    backward_graph, held = _program(objective)
    if isinstance(source, EstimateFor):
        return analytic(backward_graph, target_named(source.device).rates, held=held, device_kind=source.device)
    assert device is not None
    estimate = analytic(backward_graph, target_of(device).rates, held=held, device_kind=device.device_kind)
    if source == "analytic":
        return estimate
    if callable(source):
        return with_given_seconds(estimate, objective.graph, source)
    path = kept.profile_path(backward_graph, device, held)
    profile = kept.load(path, estimate) if cache and not fresh else None
    if profile is None:
        profile = measure(backward_graph, device, estimate, held)
        if cache:
            kept.save(path, profile)
    return profile


def without_frozen_work(profile: Profile, objective: MicrobatchProgram) -> Profile:
    """A profile of a program that is trained as a whole, less the work and the residuals of frozen parameters.

    They are left out in proportion to an estimate, operator by operator.
    """
    if profile.frozen == frozen_names(objective):
        return profile
    (whole, held), (less, _) = _program(replace(objective, frozen=frozenset())), _program(objective)
    rates = profile.rates or OTHER
    everything, rest = (analytic(part, rates, held=held) for part in (whole, less))

    def left(field: str, like: str) -> tuple[float, ...]:
        parts = zip(getattr(profile, field), getattr(rest, like), getattr(everything, like), strict=True)
        return tuple(x * min(1.0, a / b) if b else x for x, a, b in parts)

    return replace(
        profile,
        backward_seconds=left("backward_seconds", "backward_seconds"),
        backward_spread=left("backward_spread", "backward_seconds") if profile.backward_spread else (),
        residual_bytes=left("residual_bytes", "residual_bytes"),
        frozen=frozen_names(objective),
    )


def _program(objective: MicrobatchProgram) -> tuple[BackwardGraph, tuple[TensorNumber, ...]]:
    """Return a micro-batch's program of one device with its derivative, and the inputs that every stage has."""
    graph = objective.graph
    if graph.stage_shape:
        avals = [tensor.aval for tensor in graph.tensors]
        operators = (without_annotations(op, [avals[t] for t in op.inputs]) for op in graph.operators)
        graph = replace(graph, operators=tuple(operators), stage_shape={})
    return build_backward_graph(graph, objective.differentiated, seeds=[objective.results[0]]), objective.given
