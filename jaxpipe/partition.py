"""``partition``: plan how a model is trained on a mesh."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import optax
from jax.sharding import Mesh

from jaxpipe import multihost
from jaxpipe.costs.assumed_links import assumed_links, slowest_used
from jaxpipe.costs.device_rates import known_rates, rates_of
from jaxpipe.costs.network import Network
from jaxpipe.costs.profile import Profile
from jaxpipe.costs.profile_cache import program_text
from jaxpipe.costs.profile_model import Source, frozen_names, profile_objective, without_frozen_work
from jaxpipe.costs.sharded_profile import divided, groups_of
from jaxpipe.errors import BatchError, PartitionError, ScheduleError
from jaxpipe.gradients.block_sparse import BlockSparse
from jaxpipe.graph.codec_policy import FAST, Codecs, parse, warn_unused
from jaxpipe.graph.sharding_annotations import outside_mesh
from jaxpipe.models import check_arguments, check_batch
from jaxpipe.models.batch_statistics import FEW_EXAMPLES, find_statistics
from jaxpipe.models.bound_model import BoundModel, UserFunction, bind, check_model, needs_variables
from jaxpipe.models.microbatch_program import MicrobatchProgram, microbatch_shapes, trace_results, with_rows
from jaxpipe.models.traced_update import trace_update
from jaxpipe.models.trained_parameters import without_frozen
from jaxpipe.models.unroll_layers import check_unroll, scanned_variables, trace_unrolled
from jaxpipe.models.variable_shardings import Shardings, check_exchanged, shardings_of
from jaxpipe.options import PlanOptions
from jaxpipe.pipeline import Pipeline
from jaxpipe.planning import check_request
from jaxpipe.planning.arrange_devices import stay
from jaxpipe.planning.assemble_plan import (
    Candidate,
    Traced,
    build_candidate,
    choose,
    frozen_stages,
    stage_replicas_of,
    stages_for,
)
from jaxpipe.planning.choose_runtime import check_runtime_features
from jaxpipe.planning.cuts.interleaved_cuts import chunked
from jaxpipe.planning.cuts.partition_layers import partition_layers
from jaxpipe.planning.cuts.placed_stages import Partition
from jaxpipe.planning.describe_plan import least_seconds, rates_in
from jaxpipe.planning.planned_step import PlannedStep
from jaxpipe.planning.request import Request
from jaxpipe.planning.searched_schedules import searched_candidates
from jaxpipe.planning.storage.choose_storage import check_solver
from jaxpipe.planning.storage.host_memory import check_host_memory
from jaxpipe.runtime.executable_plan import Batching
from jaxpipe.runtime.gradient_precision import check_effect, check_gradient_dtype
from jaxpipe.runtime.replica_exchange import check_exchange
from jaxpipe.runtime.stages import Placement, Stage, places_to_cut, variable_spans
from jaxpipe.schedules import Schedule, schedule_makers
from jaxpipe.schedules.replicas import StageReplicas
from jaxpipe.schedules.table import without_backward
from jaxpipe.sharding.mesh_axes import DATA, with_own_names
from jaxpipe.sharding.submesh import joined_mesh, split_mesh
from jaxpipe.target import building_for
from jaxpipe.text.progress import progress, tell
from jaxpipe.text.units import parse_bytes, whole_number


#: Micro-batches for each stage when the caller does not say: the bubble is then below a fifth of the step.
MICROBATCHES_PER_STAGE = 4

#: How much longer a step may be than the shortest, if that makes less to send: profiles are no better than this.
CUT_SLACK = 0.02


@outside_mesh()
def partition(
    model: Any,
    mesh: Mesh,
    batch: Any = None,
    *,
    loss: UserFunction,
    optimizer: optax.GradientTransformation,
    evaluate: UserFunction | None = None,
    predict: UserFunction | None = None,
    memory: int | str | None = None,
    num_microbatches: int | None = None,
    schedule: schedule_makers.ScheduleMaker | str = "auto",
    profile: Profile | Source | None = None,
    network: Network | None = None,
    storage: Codecs | Literal["auto"] = "auto",
    gradient_exchange: BlockSparse | Literal["dense"] = "dense",
    runtime: Literal["auto", "mpmd", "spmd"] = "auto",
    options: PlanOptions | None = None,
) -> Pipeline:
    """Plan how a model is trained as a pipeline over the ``stage`` axis of a mesh.

    The model is traced and its operators are profiled; a min-max dynamic program cuts them into as many stages as
    the mesh has. The model itself needs no change: any cut is possible but between two uses of one variable.

    Several processes (``jax.distributed``) call it alike, with a mesh of all their devices; the first one measures and
    chooses for all.

    Args:
      model: a Linen module, an NNX module or class, ``jax.tree_util.Partial(f, params)``, or ``f(variables, *args)``.
      mesh: with an axis ``stage``, and perhaps ``data``: replicas of the pipeline. Axes called ``pp``, ``pipe``,
        ``pipeline`` or ``stages`` and ``dp``, ``batch``, ``replica`` or ``replicas`` are taken for them;
        ``Pipeline.mesh`` has the names ``stage`` and ``data``. Any other axis shards within a stage: each stage of a
        replica is on a submesh of these axes, over which the model's own annotations split parameters and activations
        (``nn.with_partitioning``, logical axes, ``nnx`` metadata, ``with_sharding_constraint``, ``shard_map``), or
        ``PlanOptions.shardings``.
      batch: arrays or shapes ``[examples, ...]``, of the whole batch if there are several processes; left out:
        planned at ``Pipeline.init(key, batch)``. A list of trees of one structure are batches of several sizes
        (lengths of sequences, a smaller last batch): it is planned for the first, and the first step compiles all of
        them. Sizes that are not listed are compiled when they are met. One program (``"spmd"``) takes one size.
      loss: ``loss(model, batch)`` gives a scalar, ``(scalar, metrics)``, or ``(sum, weight, metrics)`` if
        micro-batches weigh unequally (padded tokens); then loss, metrics and gradient are divided by the total weight
        of the batch. ``metrics`` is a tree of arrays that are reduced over the examples. They are averaged over
        micro-batches and replicas, or divided by the total weight; those in ``jaxpipe.Sum(...)`` are added up.
        Integers are refused where they would be averaged, and so are arrays with an axis of examples.
      optimizer: any optax optimizer that needs gradients, parameters and its own state, and nothing else; gets the
        gradient of the whole batch. A parameter whose gradient no part of the update reads is frozen
        (``optax.set_to_zero`` in a ``multi_transform``, ``selective_transform``, ``freeze``): no gradient of it is
        computed or kept, there is no backward pass below the first trained one, and the plan says what that saves. An
        optimizer that looks at all gradients (clipping by the global norm in front of the mask), and an exchange of
        gradients that is not dense, need them all.
      evaluate: like ``loss``, or gives metrics alone. It sets the mode itself, as a plain evaluation would:
        ``model.eval()`` in it for NNX (the module is a copy), ``model(x, train=False)`` or whatever the module calls
        it for Linen. If it draws random numbers all the same, a ``TrainingModeWarning`` says so.
      predict: ``predict(model, batch)`` gives arrays ``[examples, ...]``; it sets the mode as ``evaluate`` does.
      memory: most bytes on a device, as an int or a text such as ``"8GiB"``. If the default storage needs more, an
        integer program chooses for every tensor whether it is stored, in which form, or computed again.
      num_microbatches: per replica. None: enough for a bubble below a fifth, and, for a model that normalizes over
        examples (BatchNorm), few enough that each has at least 4. Fewer raise a ``FewExamplesWarning``.
      schedule: ``(num_stages, num_microbatches) -> Schedule``, or the name of one in ``jaxpipe.schedules``, in any
        common spelling (``"1f1b"``, ``"GPipe"``, ``"zb"``). ``"auto"``: the one whose step is predicted to be the
        shortest within the budget. With a program for each stage these are the textbook's 1F1B, interleaved,
        zero-bubble, GPipe, and, where over 1 % shorter, an order that is searched for with the seconds of the stages
        (``jaxpipe.schedules.list_schedule``); of those within 2 %, the one that keeps the fewest bytes of stashes. In
        one program they are 1F1B (in pair ticks, the textbook's, interleaved) and zero-bubble. It never chooses an
        asynchronous schedule.
      profile: ``"measured"`` (the default) runs operators on one device, once for a program (see
        ``profile_model``); ``"analytic"`` estimates them; or a ``Profile``.
      network: the links between the devices, in the order of ``mesh.devices.flat``. It decides which device runs which
        stage: ``pipeline.mesh`` has them in that order. Left out: the mesh stays as it is; links within a process are
        as fast as the devices' memory, and with ``profile="measured"`` one link between processes is measured and
        taken for all of them.
      storage: the codecs that may be used where a module is not decorated, as ``memory_encoded(codecs=...)`` takes
        them; ``"auto"`` is ``"fast"``, ``()`` stores what ``jax.grad`` does.
      gradient_exchange: ``jaxpipe.gradients.block_sparse(...)``: replicas of a stage send each other only the best
        blocks of their gradients. Without replicas, nothing is sent and nothing left out.
      runtime: ``"mpmd"``: a compiled program for each stage, which the host dispatches; a device needs the memory of
        its own stage. ``"spmd"``: one program for all devices, each of which needs the memory of the largest stage.
        Asynchronous schedules, several devices in a stage, ``memory``, the host's memory and batches of several
        sizes need ``"mpmd"``. ``"auto"``: the one that supports the request; if both do, ``"spmd"`` only if the
        longest stage's work on a micro-batch is shorter than the host's calls and sends for it (25 and 40 us each)
        and its step is predicted to be shorter. The plan says which, and why.
      options: ``jaxpipe.PlanOptions(...)``: devices per stage, scans over layers, the host's memory, steps that are not
        finite, the solver, shardings within a stage, ZeRO-1, names of mesh axes.

    Raises:
      PartitionError: if the mesh, the network, the loss, the optimizer, the gradient exchange or the number of stages
        does not fit, the host's memory cannot be used, or ``gradient_dtype`` is no type for sums of gradients.
      ScheduleError: if the schedule is not valid, or does not exist for this size.
      ModelError: if the model is none of the above, or ``storage`` names an unknown codec.
      BatchError: if the batch cannot be cut into micro-batches.
      MemoryBudgetError: if no plan within ``memory`` is found; its ``smallest`` is a budget that is kept.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> model = jax.tree_util.Partial(lambda w, x: x @ w, jnp.ones((3, 1)))
      >>> mesh = jax.make_mesh((1,), ("stage",))
      >>> pipeline = partition(model, mesh, jnp.ones((4, 3)), loss=lambda f, x: f(x).mean(), optimizer=optax.sgd(0.5))
      >>> state, metrics = pipeline.step(pipeline.init(jax.random.key(0)), jnp.ones((4, 3)))
      >>> float(metrics["loss"])
      3.0
    """
    options = PlanOptions() if options is None else options
    if not isinstance(options, PlanOptions):
        raise PartitionError(f"options={options!r}; pass jaxpipe.PlanOptions(...), or leave it out.")
    mesh = with_own_names(mesh, options.stage_axis, options.data_axis)
    num_stages, replicas = check_request.check_mesh(mesh)
    check_model(model)
    check_arguments.check_optimizer(optimizer)
    for function, name in ((loss, "loss"), (evaluate, "evaluate"), (predict, "predict")):
        if function is not None or name == "loss":
            check_arguments.check_function(function, name)
    check_arguments.check_flag(options.allow_over_budget, "allow_over_budget")
    check_arguments.check_seconds(options.time_limit, "time_limit")
    check_solver(options.solver)
    if num_microbatches is not None:
        num_microbatches = whole_number(num_microbatches, "num_microbatches", BatchError)
    profile = "measured" if profile is None else profile
    if not isinstance(profile, Profile) and profile not in ("measured", "analytic"):
        raise PartitionError(f"profile={profile!r}; it must be 'measured', 'analytic' or a jaxpipe.Profile.")
    check_request.check_network(network, mesh)
    mesh, submesh = split_mesh(mesh)
    if options.on_nonfinite not in (None, "raise", "skip"):
        raise PartitionError(f"on_nonfinite={options.on_nonfinite!r}; it must be 'raise', 'skip' or None.")
    exchange = check_exchange(gradient_exchange, DATA)
    devices_per_stage = check_request.check_devices_per_stage(
        options.devices_per_stage, num_stages, mesh, exchange is not None
    )
    budget = None if memory is None else parse_bytes(memory)
    batch, *others = [None if x is None else check_batch.batch_shapes(x) for x in check_batch.listed_batches(batch)]
    check_exchanged(exchange is not None, submesh, options)
    request = Request(
        model=model,
        mesh=mesh,
        loss=loss,
        optimizer=optimizer,
        budget=budget,
        num_microbatches=num_microbatches,
        schedules=check_request.schedule_makers(schedule),
        profile=profile,
        network=network,
        policy=FAST if isinstance(storage, str) and storage == "auto" else parse(storage, "storage"),
        exchange=exchange,
        unroll_scans=check_unroll(options.unroll_scans, gradient_exchange != "dense"),
        num_stages=num_stages,
        replicas=replicas,
        devices_per_stage=devices_per_stage,
        host=check_host_memory(options.host_memory, budget, mesh, devices_per_stage),
        gradient_dtype=check_gradient_dtype(options.gradient_dtype),
        runtime=check_request.check_runtime(runtime),
        several_sizes=bool(others),
        submesh=submesh,
        options=options,
    )
    planned = None if batch is None or needs_variables(model) else make_plan(request, batch)
    functions = {"evaluate": evaluate, "predict": predict}
    plan = functools.partial(make_plan, request)
    return Pipeline(joined_mesh(mesh, submesh), functions, optimizer, plan, planned, (batch, *others))


@progress("Tracing the model")
def make_plan(request: Request, batch: Any, variables: Any = None) -> PlannedStep:
    """Trace, profile, cut and lay out a model for batches of the given shapes, and show how far that is."""
    with building_for(request.mesh.devices.flat[0].platform):
        return _make_plan(request, batch, variables)


def _make_plan(request: Request, batch: Any, variables: Any) -> PlannedStep:
    size = check_batch.batch_size(batch)
    m = request.num_microbatches
    if m is None:
        m = _default_microbatches(size, request)
    check_batch.check_microbatches(size, request.replicas, m)
    schedules = []
    if isinstance(request.devices_per_stage, tuple):
        schedules = schedule_makers.make_replicated_schedules(
            request.schedules, StageReplicas(request.devices_per_stage), m
        )
    elif not request.devices_per_stage:
        schedules = schedule_makers.make_schedules(request.schedules, request.num_stages, m)
    check_runtime_features(request, schedules)
    batching = Batching(tuple(not x.shape for x in jax.tree.leaves(batch)), request.replicas, m)
    microbatch = microbatch_shapes(batch, request.replicas * m)

    model = bind(request.model, request.loss, microbatch, variables, request.submesh.shape, request.options.axis_rules)
    check_effect(request.gradient_dtype, [v.aval.dtype for v in model.parameters])
    model, objective = trace_unrolled(model, request.loss, microbatch, request.unroll_scans)
    warn_unused(request.policy, (op.path for op in objective.graph.operators), "storage")
    enough = _leaving_examples(request, model, objective, microbatch, size, m)
    if enough != m:
        return make_plan(replace(request, num_microbatches=enough), batch, variables)
    multihost.agree("The program", program_text(objective.graph))
    local = [
        x if shared_leaf else _rows(x, size // request.replicas)
        for x, shared_leaf in zip(jax.tree.leaves(batch), batching.shared, strict=True)
    ]
    update = trace_update(request.optimizer, model)
    if request.exchange is None or request.replicas == 1:
        update = without_frozen(update)
    objective = objective.training(update.trained)
    shardings = shardings_of(model, update, objective, request.submesh, request.replicas, request.options)
    profile = _profile(request, objective, frozen_names(model, update.trained))
    request, profile, links = _for_groups(request, objective, shardings, profile)
    traced = Traced(objective, model, update, profile, links, batch, microbatch, batching, local, shardings)

    def cut_again(before: Candidate, charged: Profile) -> Candidate:
        schedule, stage_replicas = before.schedule, before.program.stage_replicas
        other = _place(
            request,
            traced,
            charged,
            schedule.num_chunks,
            False if stage_replicas.is_single else stage_replicas.per_stage,
        )
        bound = before.partition.lower_bound_seconds
        other = replace(other, profile=traced.profile, lower_bound_seconds=bound)
        return build_candidate(request, traced, other, schedule, *stages_for(request, traced, other), before.maker)

    ways = (request.devices_per_stage,) if request.devices_per_stage is not True else (False, True)
    candidates: list[Candidate] = []
    errors: list[PartitionError | ScheduleError] = []
    for replicate in ways:
        tell(f"Cutting {len(objective.graph.operators)} operators into stages, on {request.mesh.devices.size} devices")
        try:
            candidates += _candidates(request, traced, replicate)
        except (PartitionError, ScheduleError) as error:  # another way will do
            errors.append(error)
    if not candidates:
        raise errors[0]
    planned = choose(request, traced, candidates, cut_again)
    multihost.agree("The plan", planned.plan.to_json())
    return planned


def _for_groups(
    request: Request, objective: MicrobatchProgram, shardings: Shardings, profile: Profile
) -> tuple[Request, Profile, Network]:
    """Return the request and the profile for groups of devices that share a stage, and the links between groups."""
    links, whole = request.network, joined_mesh(request.mesh, request.submesh)
    if links is None:
        links = assumed_links(whole, rates_in(profile).bytes, request.profile == "measured")
    if request.submesh.size == 1:
        return request, profile, links
    links, within = groups_of(links, whole, request.mesh, request.submesh)
    profile = divided(profile, objective, shardings.propagated(objective), request.submesh, within)
    return request if request.network is None else replace(request, network=links), profile, links


def _candidates(request: Request, traced: Traced, replicate: bool | tuple[int, ...]) -> list[Candidate]:
    """A program for each schedule that may be the fastest, with stages on one device each or on several."""
    m = traced.batching.num_microbatches

    @functools.cache
    def placed(num_chunks: int) -> Partition:
        return _place(request, traced, traced.profile, num_chunks, replicate)

    @functools.cache
    def stages(num_chunks: int) -> tuple[Placement, tuple[Stage, ...]]:
        return stages_for(request, traced, placed(num_chunks))

    def candidates_of(makers: Sequence[schedule_makers.ScheduleMaker]) -> list[Candidate]:
        if replicate:
            schedules = schedule_makers.make_replicated_schedules(makers, stage_replicas_of(placed(1), request), m)
        else:
            schedules = schedule_makers.make_schedules(makers, request.num_stages, m)
        return _of_schedules(request, traced, schedules, placed, stages)

    if replicate and stage_replicas_of(placed(1), request).is_single:
        return []
    if request.schedules is schedule_makers.AUTO and request.runtime != "spmd":
        # Devices that run free have schedules of their own; where one program is better, it has its own too.
        candidates = candidates_of(schedule_makers.AUTO_FREE)
        if candidates and candidates[0].runtime.name == "mpmd":
            candidates = [candidate for candidate in candidates if candidate.runtime.name == "mpmd"]
            if request.num_stages == 1 or replicate:
                return candidates
            sources = list(candidates)
            # Interleaved 1F1B may lose to zero-bubble where an order with a split backward pass, on its cuts, does not.
            if all(candidate.schedule.num_chunks == 1 for candidate in candidates):
                free = schedule_makers.make_schedules(schedule_makers.AUTO_FREE, request.num_stages, m)
                chunked_tables = [schedule for schedule in free if schedule.num_chunks > 1]
                with contextlib.suppress(PartitionError):  # too few operators for so many stages
                    sources += _of_schedules(request, traced, chunked_tables, placed, stages)
            return candidates + searched_candidates(traced, candidates, sources)
    return candidates_of(request.schedules)


def _of_schedules(
    request: Request,
    traced: Traced,
    schedules: Sequence[Schedule],
    placed: Callable[[int], Partition],
    stages: Callable[[int], tuple[Placement, tuple[Stage, ...]]],
) -> list[Candidate]:
    """A program for each of some schedules that may be faster than those before it."""
    candidates: list[Candidate] = []
    for schedule in schedules:
        v, least = schedule.num_chunks, 0.0
        try:
            if candidates:
                trimmed = without_backward(schedule, frozen_stages(traced, stages(v)[1]))
                free = candidates[0].runtime.name == "mpmd"
                least = least_seconds(trimmed, placed(v), stage_replicas_of(placed(v), request), lockstep=not free)
        except PartitionError:  # too few operators for so many stages; others will do
            continue
        if not candidates or least < min(earlier.seconds for earlier in candidates):
            tell(f"{schedule.name}: {request.num_stages * v} stages with default storage")
            candidates.append(build_candidate(request, traced, placed(v), schedule, *stages(v)))
    return candidates


def _rows(x: Any, count: int) -> Any:
    return jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype) if x.shape else x


def _counts(size: int, replicas: int) -> list[int]:
    """The numbers of micro-batches that a batch may be cut into."""
    return [m for m in range(1, size + 1) if size % (replicas * m) == 0]


def _leaving_examples(
    request: Request, model: BoundModel, objective: MicrobatchProgram, microbatch: Any, size: int, num_microbatches: int
) -> int:
    """Return a number of micro-batches that leaves enough examples to each if the model normalizes over them.

    A number that the caller passed stays. Where few examples are left, it gives a ``FewExamplesWarning``.
    """
    rows = size // (request.replicas * num_microbatches)
    if rows >= FEW_EXAMPLES:
        return num_microbatches

    def trace(rows: int) -> MicrobatchProgram:
        return trace_results(model, request.loss, with_rows(microbatch, rows))[0]

    modules = find_statistics(objective, rows, trace).modules
    if not modules:
        return num_microbatches
    counts = [m for m in _counts(size, request.replicas) if m <= num_microbatches]
    enough = [m for m in counts if size // (request.replicas * m) >= FEW_EXAMPLES]
    fewer = max(enough, default=counts[0])
    if request.num_microbatches is None and fewer < num_microbatches:
        return fewer
    check_request.warn_few_examples(modules, size, request.replicas, num_microbatches, fewer)
    return num_microbatches


def _default_microbatches(size: int, request: Request) -> int:
    """The fewest micro-batches, of all counts that divide the batch, that keep the bubble small.

    Where the model normalizes over examples, ``make_plan`` takes fewer, so that each has enough of them.
    """
    counts = _counts(size, request.replicas)
    num_stages, round_size = request.num_stages, 1
    if isinstance(request.devices_per_stage, tuple):
        num_stages, round_size = len(request.devices_per_stage), StageReplicas(request.devices_per_stage).round_size
    if not counts:
        return 1
    wanted = round_size * (1 if num_stages == 1 else MICROBATCHES_PER_STAGE * num_stages)
    return next((m for m in counts if m >= wanted), counts[-1])


def _profile(request: Request, objective: MicrobatchProgram, frozen: tuple[str, ...]) -> Profile:
    graph = objective.graph
    if isinstance(request.profile, Profile):
        count = len(request.profile.names)
        if count != len(graph.operators):
            raise PartitionError(
                f"profile= has {count} operators, the model has {len(graph.operators)}. Profile this very model, with "
                "micro-batches of this size."
            )
        if request.profile.frozen not in ((), frozen):
            other = sorted(set(frozen) ^ set(request.profile.frozen))[0]
            raise PartitionError(
                f"profile= was made with {len(request.profile.frozen)} parameters that are not trained, and optimizer= "
                f"does not train {len(frozen)}; {other} is among one of them only. Pass the same optimizer to "
                "profile_model, or none: a profile with the work for all gradients in it does for any optimizer."
            )
        profile = with_rates(request.profile, request.mesh.devices.flat[0])
        return without_frozen_work(profile, objective, frozen)
    source = request.profile
    tell(f"Profiling {len(graph.operators)} operators, {source}")
    profile = multihost.from_first(
        lambda: profile_objective(objective, source, multihost.mine(request.mesh.devices.flatten().tolist())[0])
    )
    return replace(profile, frozen=frozen)


def with_rates(profile: Profile, device: Any) -> Profile:
    """The profile with rates: its own, those of the kind of device that it names, or those of a device."""
    return replace(profile, rates=profile.rates or known_rates(profile.device_kind) or rates_of(device))


def _place(
    request: Request, traced: Traced, profile: Profile, num_chunks: int, replicate: bool | tuple[int, ...]
) -> Partition:
    """Stages and their devices: the shortest step with the operators in this order."""
    network, objective = request.network, traced.objective
    if network is None:
        network = slowest_used(traced.links, request.mesh)
    tied = variable_spans(objective)
    profile = replace(profile, together=tuple(itertools.chain.from_iterable(tied.values())))
    places = sum(places_to_cut(objective)[1:-1])
    stages = len(replicate) if isinstance(replicate, tuple) else 1 if replicate else request.num_stages * num_chunks
    if stages > places + 1:
        raise PartitionError(
            f"The plan needs {stages} stages, but the model has {len(profile.names)} "
            f"operators with {places} places where it may be cut, so it makes between 1 and {places + 1} stages. "
            f"{_scan(request, objective) or _widest(objective, traced.model)}".rstrip()
        )
    asked = {
        "num_microbatches": traced.batching.num_microbatches * request.replicas,
        "reorder": False,
        "slack": CUT_SLACK,
    }
    if replicate:
        return partition_layers(profile, network, replicate=replicate, idle=False, **asked)
    asked["replicate"] = request.replicas
    placed = partition_layers(profile, network, num_stages=request.num_stages, **asked)
    if request.network is None:
        placed = replace(stay(placed, request.mesh), network=traced.links)
    return placed if num_chunks == 1 else chunked(placed, num_chunks, **asked)


def _scan(request: Request, objective: MicrobatchProgram) -> str:
    """Return how to cut layers that are one operator."""
    lengths = () if request.unroll_scans else scanned_variables(objective).values()
    fix = "PlanOptions(unroll_scans=True) cuts between them"
    return f"Its {max(lengths)} layers are one scan: {fix}." if lengths else ""


def _widest(objective: MicrobatchProgram, model: BoundModel) -> str:
    """Return which variable keeps most operators in one stage."""
    tied = variable_spans(objective)
    if not tied:
        return ""
    spans = [(high - low, t, low, high) for t, groups in tied.items() for low, high in groups]
    _, t, low, high = max(spans)
    names = dict(zip((*objective.parameters, *objective.state), (*model.parameters, *model.state), strict=True))
    if high - low < 2:
        return ""
    path = objective.graph.operators[low].path, objective.graph.operators[high].path
    return (
        f"Variable {names[t].name} is used from operator {low} ({path[0]}) to operator {high} ({path[1]}), and a "
        "variable lives in one stage, with all that is between its uses. Untie it, or use fewer stages."
    )
