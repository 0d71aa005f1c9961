"""A request and a batch as a traced program, with what its operators cost: the first step of planning."""

# More than 15 of our modules: model, batch, optimizer, profile and links of a request are read here.
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax

from jaxpipe import multihost
from jaxpipe.agreement import agreed
from jaxpipe.array_types import PyTree, Shaped
from jaxpipe.collect_later import collecting_later
from jaxpipe.costs.assumed_links import assumed_links
from jaxpipe.costs.network import Network
from jaxpipe.costs.profile import Profile
from jaxpipe.costs.profile_model import EstimateFor, frozen_names, profile_objective, without_frozen_work
from jaxpipe.costs.sharded_profile import divided, groups_of
from jaxpipe.errors import FewExamplesWarning, JaxpipeWarning, PartitionError, warn
from jaxpipe.graph.allowed_codecs import warn_unused
from jaxpipe.models import check_batch
from jaxpipe.models.batch_statistics import FEW_EXAMPLES, find_statistics, likely_statistics
from jaxpipe.models.bind import bind
from jaxpipe.models.example_state import check_counts
from jaxpipe.models.linen_facade import ReturnsOtherError
from jaxpipe.models.loss_scaling import check_means
from jaxpipe.models.microbatch_program import MicrobatchProgram, with_rows
from jaxpipe.models.traced_update import without_frozen
from jaxpipe.models.variable_shardings import Shardings, shardings_of
from jaxpipe.planning.check_request import Request, check_model_features, check_runtime_features
from jaxpipe.planning.compare_requests import program_parts
from jaxpipe.planning.cut_scans import TracedLayers, trace_layers
from jaxpipe.planning.given_cuts import find_cuts
from jaxpipe.planning.given_plan import plan_profile
from jaxpipe.runtime.executable_plan import Batching
from jaxpipe.runtime.gradient_precision import check_effect
from jaxpipe.schedules import Schedule, StageReplicas, schedule_makers
from jaxpipe.sharding.mesh_axes import joined_mesh
from jaxpipe.targets.known import target_of, target_of_kind
from jaxpipe.targets.rates import Rates
from jaxpipe.text.progress import phase, tell


#: Micro-batches for each stage when the caller does not say: the bubble is then below a fifth of the step.
MICROBATCHES_PER_STAGE = 4


@dataclass(frozen=True, eq=False, kw_only=True)
class Traced(TracedLayers):
    """A model traced for batches of some shapes.

    The network of its request is that of groups of devices that share a stage, ``links`` are those between all devices
    of ``mesh.devices.flat``, ``local`` is one replica's part of the batch, ``asked`` are the arguments of
    ``trace_request`` (without a budget no variables, which nothing needs again), ``trace_seconds`` is how long that
    took, ``notes`` are for the plan, ``cuts`` are the operators at which stages begin because the caller says so.
    """

    request: Request
    profile: Profile
    links: Network
    batch: PyTree
    batching: Batching
    local: Sequence[Shaped]
    shardings: Shardings
    asked: tuple[Request, PyTree, PyTree]
    trace_seconds: float = 0.0
    cuts: Mapping[str, int] = field(default_factory=dict)


def rates_in(profile: Profile) -> Rates:
    """Return the rates of the device that a profile describes."""
    assert profile.rates is not None
    return profile.rates


@phase("trace")
@collecting_later()
def trace_request(request: Request, batch: PyTree, variables: PyTree = None) -> Traced:
    """Trace a model for batches of the given shapes, and profile its operators; raises as ``partition``."""
    asked, start = (request, batch, variables), time.perf_counter()
    request, batching, layers = agreed(
        "jaxpipe.partition", lambda: _trace_programs(*asked), lambda x: program_parts(x[0], x[2], x[1])
    )
    seconds = time.perf_counter() - start
    objective, update = layers.objective, layers.update
    local = jax.tree.leaves(with_rows(batch, check_batch.batch_size(batch) // request.replicas))
    if request.exchange is None or request.replicas == 1:
        update = without_frozen(update)
    objective = objective.training(update.trained)
    shardings = shardings_of(update, objective, request.submesh, request.replicas, request.options)
    profile = replace(_profile(request, objective), scan_groups=objective.model.scan_groups)
    request, profile, links = _for_groups(request, objective, shardings, profile)
    return Traced(
        objective,
        update,
        layers.notes,
        request=request,
        profile=profile,
        links=links,
        batch=batch,
        batching=batching,
        local=local,
        shardings=shardings,
        asked=asked if request.budget is not None else (*asked[:2], None),
        trace_seconds=seconds,
        cuts=find_cuts(request.cuts, objective),
    )


def _trace_programs(request: Request, batch: PyTree, variables: PyTree) -> tuple[Request, Batching, TracedLayers]:
    """Trace a model; return its request with a number of micro-batches, and these."""
    size = check_batch.batch_size(batch)
    m = _default_microbatches(size, request) if request.num_microbatches is None else request.num_microbatches
    check_batch.check_microbatches(batch, request.parts, m)
    if request.num_microbatches is None and not check_batch.has_examples(batch):
        idle = ", so that only one of the stages works at a time" if request.num_devices > 1 else ""
        warn(
            f"num_microbatches=1 was chosen{idle}. {check_batch.ragged_text(batch)} If one micro-batch is meant, pass "
            "num_microbatches=1.",
            JaxpipeWarning,
        )
    check_runtime_features(request, _known_schedules(request, m))
    batching = Batching(check_batch.shared_leaves(batch), request.replicas, m)
    microbatch = with_rows(batch, size // (request.replicas * m))
    layers = _trace_layers(request, microbatch, variables, batch, assumed=request.replica_axis is None)
    warn_unused(request.policy, (op.path for op in layers.objective.graph.operators), "storage")
    enough = _leaving_examples(request, layers.objective, size, m)
    if enough != m:
        return _trace_programs(replace(request, num_microbatches=enough), batch, variables)
    if m > 1:
        check_counts(layers.objective)
    notes = check_means(layers.objective, size, request.replicas, m)
    return request, batching, replace(layers, notes=(*layers.notes, *notes))


def _trace_layers(
    request: Request, microbatch: PyTree, variables: PyTree, batch: PyTree, assumed: bool
) -> TracedLayers:
    """Bind the model and trace it; ``assumed`` as in ``bind``, which is found out by the trace of the loss."""
    submesh, rules = request.submesh.shape, request.options.axis_rules
    model = bind(request.model, request.loss, microbatch, variables, submesh, rules, batch, assumed)
    model = replace(model, replica_axis=request.replica_axis)
    check_model_features(request, model)
    check_effect(request.gradient_dtype, [v.aval.dtype for v in model.parameters])
    with contextlib.suppress(ReturnsOtherError):
        return trace_layers(request, model, microbatch)
    return _trace_layers(request, microbatch, variables, batch, assumed=False)


def _known_schedules(request: Request, num_microbatches: int) -> list[Schedule]:
    """Return the requested tables, as far as their numbers of stages are known before the program is cut."""
    if isinstance(request.devices_per_stage, tuple):
        replicas = StageReplicas(request.devices_per_stage)
        return schedule_makers.make_replicated_schedules(request.schedules, replicas, num_microbatches)
    if request.devices_per_stage or request.schedules is schedule_makers.AUTO:
        return []
    return list(schedule_makers.make_schedules(request.schedules, request.num_devices, num_microbatches))


def _for_groups(
    request: Request, objective: MicrobatchProgram, shardings: Shardings, profile: Profile
) -> tuple[Request, Profile, Network]:
    """Return the request and the profile for groups of devices that share a stage, and the links between groups."""
    links, whole = request.network, joined_mesh(request.mesh, request.submesh)
    if links is None:
        measures = request.profile == "measured" and request.plan is None
        links = assumed_links(whole, rates_in(profile).bytes, measures)
    if request.submesh.size == 1:
        return request, profile, links
    links, within = groups_of(links, whole, request.mesh, request.submesh)
    if request.plan is None:
        profile = divided(profile, objective, shardings.propagated(objective), request.submesh, within)
    return request if request.network is None else replace(request, network=links), profile, links


def _counts(size: int, replicas: int) -> list[int]:
    """The numbers of micro-batches that a batch may be cut into."""
    return [m for m in range(1, size + 1) if size % (replicas * m) == 0]


def _leaving_examples(request: Request, objective: MicrobatchProgram, size: int, num_microbatches: int) -> int:
    """Return a number of micro-batches that leaves enough examples to each if they depend on one another.

    A number that the caller passed stays. There is a ``FewExamplesWarning`` where few examples are left to normalize
    over, where examples are compared with those of their micro-batch only, and where one is compared with every row of
    an array that has a row for each.
    """
    replicas, rows = request.replicas, size // (request.replicas * num_microbatches)
    is_few = rows < FEW_EXAMPLES
    if not check_batch.has_examples(objective.microbatch) or not (is_few or likely_statistics(objective).similarities):
        return num_microbatches
    if rows == 1 < size and _is_broadcast(objective, size):
        if request.num_microbatches is None and replicas == 1:
            return 1
        _warn_broadcast(size, replicas, num_microbatches)
    statistics = find_statistics(objective)
    if is_few and (statistics.modules or statistics.similarities):
        counts = [m for m in _counts(size, request.parts) if m <= num_microbatches]
        enough = [m for m in counts if size // (replicas * m) >= FEW_EXAMPLES]
        fewer = max(enough, default=counts[0])
        if request.num_microbatches is None and fewer < num_microbatches:
            return fewer
        if statistics.modules:
            _warn_few_examples(statistics.modules, size, replicas, num_microbatches, fewer)
    if statistics.similarities and rows < size:
        _warn_own_negatives(statistics.similarities, size, replicas, num_microbatches)
    return num_microbatches


def _is_broadcast(objective: MicrobatchProgram, size: int) -> bool:
    """Return whether a program of one example has an array with a row for each of all, and else runs for all alone."""
    has_rows = any(x.shape[:1] == (size,) for x in objective.graph.tensors)
    return has_rows and objective.with_examples(2 + (size == 2)) is None and objective.with_examples(size) is not None


def _warn_broadcast(size: int, replicas: int, num_microbatches: int) -> None:
    single = "num_microbatches=1" + (" on one replica" if replicas > 1 else "")
    warn(
        f"The loss runs for micro-batches of one example and not of more, and computes with arrays of {size} rows, as "
        f"many as the batch has examples: num_microbatches={num_microbatches} on each of {replicas} replica(s) puts "
        "each example beside every row of these (a mask or a table of positions that is no part of the batch, a carry "
        "made for one size). Make them part of the batch, or as long as the examples that the loss is given "
        f"(x.shape[0]), or use {single}.",
        FewExamplesWarning,
    )


def _warn_few_examples(modules: Sequence[str], size: int, replicas: int, num_microbatches: int, fewer: int) -> None:
    """Warn that a model normalizes over the few examples of a micro-batch; ``fewer`` micro-batches may have more."""
    unit = replicas * num_microbatches
    more = f"num_microbatches={fewer}, of {size // (replicas * fewer)} each, or " if fewer < num_microbatches else ""
    warn(
        f"{_listed(modules)} normalize(s) over the examples of a micro-batch, and a batch of {size} in "
        f"num_microbatches={num_microbatches} on each of {replicas} replica(s) leaves {size // unit} to each. "
        f"Statistics of fewer than {FEW_EXAMPLES} examples are mostly noise (of one example, a dense layer's output "
        f"becomes the same whatever it was). Use {more}a batch of at least {FEW_EXAMPLES * unit} examples.",
        FewExamplesWarning,
    )


def _warn_own_negatives(modules: Sequence[str], size: int, replicas: int, num_microbatches: int) -> None:
    """Warn that the examples of a contrastive loss are compared with those of their own micro-batch only."""
    rows = size // (replicas * num_microbatches)
    single = "num_microbatches=1" + (" on one replica" if replicas > 1 else "")
    warn(
        f"{_listed(modules)} compare(s) examples with one another by products, as contrastive losses do, and a batch "
        f"of {size} is cut into num_microbatches={num_microbatches} on each of {replicas} replica(s). The negatives of "
        f"an example are the other {rows - 1} of its micro-batch, not the other {size - 1} of the batch, and loss and "
        f"gradient are means over micro-batches. Use {single} for all negatives of the batch, fewer micro-batches or a "
        "larger batch for more of them, or two passes, of which the first gives the gradient of all embeddings "
        "(GradCache; the guide on training has an example).",
        FewExamplesWarning,
    )


def _listed(modules: Sequence[str]) -> str:
    return ", ".join(path or "the loss" for path in modules[:3]) + (" and others" if len(modules) > 3 else "")


def _default_microbatches(size: int, request: Request) -> int:
    """The fewest micro-batches, of all counts that divide the batch, that keep the bubble small.

    Where the model normalizes over examples, ``trace_request`` takes fewer, so that each has enough of them.
    """
    counts = _counts(size, request.parts) or [1]
    given = request.devices_per_stage
    widths = given if isinstance(given, tuple) else (1,) * request.num_devices
    wanted = StageReplicas(widths).round_size * (1 if len(widths) == 1 else MICROBATCHES_PER_STAGE * len(widths))
    return next((m for m in counts if m >= wanted), counts[-1])


@phase("profile")
def _profile(request: Request, objective: MicrobatchProgram) -> Profile:
    graph, source, frozen = objective.graph, request.profile, frozen_names(objective)
    if request.plan is not None:
        return plan_profile(request.plan, graph, request.mesh)
    if isinstance(source, Profile):
        count = len(source.names)
        if count != len(graph.operators):
            raise PartitionError(
                f"profile= has {count} operators, the model has {len(graph.operators)}. Profile this very model, with "
                "micro-batches of this size and the same unroll_scans."
            )
        if source.frozen not in ((), frozen):
            other = sorted(set(frozen) ^ set(source.frozen))[0]
            raise PartitionError(
                f"profile= was made with {len(source.frozen)} parameters that are not trained, and optimizer= "
                f"does not train {len(frozen)}; {other} is among one of them only. Pass the same optimizer to "
                "profile_model, or none: a profile with the work for all gradients in it does for any optimizer."
            )
        target = target_of_kind(source.device_kind) or target_of(request.mesh.devices.flat[0])
        return without_frozen_work(replace(source, rates=source.rates or target.rates), objective)
    how = f"estimated for {source.device}" if isinstance(source, EstimateFor) else source
    how = "by a function" if callable(how) else how
    tell(f"Profiling {len(graph.operators)} operators, {how}")
    fresh = request.options.fresh_profile
    profile = multihost.from_first(
        lambda: profile_objective(
            objective, source, multihost.mine(request.mesh.devices.flatten().tolist())[0], fresh=fresh
        )
    )
    return replace(profile, frozen=frozen)
