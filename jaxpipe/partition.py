"""``partition``: plan how a model is trained on a mesh."""

import functools
import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxpipe.errors import MemoryBudgetError
from jaxpipe.gradients.block_sparse import BlockSparse
from jaxpipe.graph import Graph, Operator
from jaxpipe.model import BoundModel, UserFunction, bind, check_model, needs_variables
from jaxpipe.network import Network
from jaxpipe.pipeline import checks
from jaxpipe.pipeline.arrange import arrange
from jaxpipe.pipeline.balance import balanced
from jaxpipe.pipeline.exchange import check_exchange, stage_exchange, warn_of_adam
from jaxpipe.pipeline.fit import Fitted, Prices, fit
from jaxpipe.pipeline.guard import OnNonFinite
from jaxpipe.pipeline.initialize import stage_devices
from jaxpipe.pipeline.layout import lay_out
from jaxpipe.pipeline.live import check_live
from jaxpipe.pipeline.objective import Objective, microbatch_shapes, trace_loss
from jaxpipe.pipeline.optimizer import colour_update
from jaxpipe.pipeline.pipeline import Pipeline, Planned
from jaxpipe.pipeline.program import DATA, PAGE, Program
from jaxpipe.pipeline.sections import Section, cut_sections, place, places_to_cut, variable_spans, with_backward
from jaxpipe.pipeline.step import Batching, Update
from jaxpipe.pipeline.swap import exchange_seconds
from jaxpipe.pipeline.words import word_count
from jaxpipe.planning.chunked import chunked
from jaxpipe.planning.layers import partition_layers
from jaxpipe.planning.mapping import best_mapping
from jaxpipe.planning.memory import predict, working_bytes
from jaxpipe.planning.placed import Partition
from jaxpipe.planning.plan import Plan, StagePlan, StashPiece
from jaxpipe.planning.storing.choose import check_solver, raised
from jaxpipe.policy import FAST, Codecs, Policy, parse
from jaxpipe.profile import Profile
from jaxpipe.profiling import roofline
from jaxpipe.profiling.model import Source, profile_objective
from jaxpipe.profiling.roofline import Rates, rates_of
from jaxpipe.schedules import Schedule, simulate
from jaxpipe.schedules.peers import Links
from jaxpipe.stash import stored_bytes
from jaxpipe.units import parse_bytes
from jaxpipe.work import weight


#: Micro-batches for each stage when the caller does not say: the bubble is then below a fifth of the step.
MICROBATCHES_PER_STAGE = 4

#: How much longer a step may be than the shortest, if that makes less to send: profiles are no better than this.
CUT_SLACK = 0.02


@dataclass(frozen=True, eq=False)
class Request:
    """What the caller of ``partition`` asked for, checked."""

    model: Any
    mesh: Mesh
    loss: UserFunction
    optimizer: optax.GradientTransformation
    budget: int | None
    allow_over_budget: bool
    num_microbatches: int | None
    schedule: checks.ScheduleMaker
    profile: Source | Profile
    network: Network | None
    policy: Policy
    solver: str
    time_limit: float
    exchange: BlockSparse | None
    on_nonfinite: OnNonFinite
    num_stages: int
    replicas: int


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
    allow_over_budget: bool = False,
    num_microbatches: int | None = None,
    schedule: checks.ScheduleMaker | str = "auto",
    profile: Profile | Source | None = None,
    network: Network | None = None,
    storage: Codecs | Literal["auto"] = "auto",
    solver: str = "HIGHS",
    time_limit: float = 10.0,
    gradient_exchange: BlockSparse | Literal["dense"] = "dense",
    on_nonfinite: OnNonFinite = None,
) -> Pipeline:
    """Plan how a model is trained as a pipeline over the ``stage`` axis of a mesh.

    The model is traced and its operators are profiled; a min-max dynamic programme cuts them into as many stages as
    the mesh has. The model itself needs no change: any cut is possible but between two uses of one variable.

    Args:
      model: a Linen module, an NNX module or class, ``jax.tree_util.Partial(f, params)``, or ``f(variables, *args)``.
      mesh: with an axis ``stage``, and perhaps ``data``: replicas of the pipeline.
      batch: arrays or shapes ``[examples, ...]``; left out: planned at ``Pipeline.init(key, batch)``.
      loss: ``loss(model, batch)`` gives a scalar, ``(scalar, metrics)``, or ``(sum, weight, metrics)`` if
        micro-batches weigh unequally; then loss, metrics and gradient are divided by the total weight.
      optimizer: any optax optimizer; gets the gradient of the whole batch.
      evaluate: like ``loss``, or gives metrics alone; without dropout, with running statistics.
      predict: ``predict(model, batch)`` gives arrays ``[examples, ...]``.
      memory: most bytes on a device, as an int or a text such as ``"8GiB"``. If the default storage needs more, an
        integer programme chooses for every tensor whether it is stored, in which form, or computed again.
      allow_over_budget: raise ``memory`` by a tenth at a time if no plan keeps it; the plan tells.
      num_microbatches: of each replica; left out: enough for a bubble below a fifth.
      schedule: ``(num_stages, num_microbatches) -> Schedule``, or the name of one in ``jaxpipe.schedules``; ``"auto"``
        is ``schedules.one_f_one_b``.
      profile: ``"measured"`` (the default) runs operators on the first device, once for a program (see
        ``profile_model``); ``"analytic"`` estimates them; or a ``Profile``.
      network: the links between the devices, in the order of ``mesh.devices.flat``; left out: all alike. It decides
        which device runs which stage: ``pipeline.mesh`` has them in that order.
      storage: the codecs that may be used where a module is not decorated, as ``memory_encoded(codecs=...)`` takes
        them; ``"auto"`` is ``"fast"``, ``()`` stores what ``jax.grad`` does.
      solver: a mixed-integer solver that cvxpy finds, used if there is a budget.
      time_limit: seconds that it may take for each stage.
      gradient_exchange: ``jaxpipe.gradients.block_sparse(...)``: replicas of a stage send each other only the best
        blocks of their gradients. Without replicas, nothing is sent and nothing left out.
      on_nonfinite: what to do if the loss or a gradient is not finite. ``"skip"``: parameters, state and optimizer
        state stay as they are, and the metrics count it. ``"raise"``: so do they, and ``NonFiniteError`` says in which
        stage it began; each step then waits for its result. None: not looked at.

    Raises:
      NetworkError: if the network has another number of devices than the mesh.
      PartitionError: if the mesh, the loss, the optimizer or the number of stages does not fit.
      ModelError: if the model is none of the above.
      BatchError: if the batch cannot be cut into micro-batches.
      MemoryBudgetError: if no plan within ``memory`` is found; it tells the smallest budget that is.
      CodecError: if ``storage`` names an unknown codec.
      ExchangeError: if ``gradient_exchange`` does not fit the parameters.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> model = jax.tree_util.Partial(lambda w, x: x @ w, jnp.ones((3, 1)))
      >>> mesh = jax.make_mesh((1,), ("stage",))
      >>> pipeline = partition(model, mesh, jnp.ones((4, 3)), loss=lambda f, x: f(x).mean(), optimizer=optax.sgd(0.5))
      >>> state, metrics = pipeline.step(pipeline.init(jax.random.key(0)), jnp.ones((4, 3)))
      >>> float(metrics["loss"])
      3.0
    """
    num_stages, replicas = checks.check_mesh(mesh)
    check_model(model)
    profile = "measured" if profile is None else profile
    if not isinstance(profile, Profile) and profile not in ("measured", "analytic"):
        raise checks.PartitionError(f"profile={profile!r}; it must be 'measured', 'analytic' or a jaxpipe.Profile.")
    checks.check_network(network, mesh)
    if on_nonfinite not in (None, "raise", "skip"):
        raise checks.PartitionError(f"on_nonfinite={on_nonfinite!r}; it must be 'raise', 'skip' or None.")
    request = Request(
        model=model,
        mesh=mesh,
        loss=loss,
        optimizer=optimizer,
        budget=None if memory is None else parse_bytes(memory),
        allow_over_budget=allow_over_budget,
        num_microbatches=num_microbatches,
        schedule=checks.schedule_maker(schedule),
        profile=profile,
        network=network,
        policy=FAST if isinstance(storage, str) and storage == "auto" else parse(storage),
        solver=check_solver(solver),
        time_limit=time_limit,
        exchange=check_exchange(gradient_exchange, DATA),
        on_nonfinite=on_nonfinite,
        num_stages=num_stages,
        replicas=replicas,
    )
    batch = None if batch is None else checks.batch_shapes(batch)
    planned = None if batch is None or needs_variables(model) else make_plan(request, batch)
    functions = {"evaluate": evaluate, "predict": predict}
    return Pipeline(mesh, functions, optimizer, functools.partial(make_plan, request), planned, batch)


def make_plan(request: Request, batch: Any, variables: Any = None) -> Planned:
    """Trace, profile, cut and lay out a model for batches of the given shapes."""
    size = checks.batch_size(batch)
    m = request.num_microbatches
    if m is None:
        m = _default_microbatches(size, request.replicas, request.num_stages)
    checks.check_microbatches(size, request.replicas, m)
    batching = Batching(tuple(not x.shape for x in jax.tree.leaves(batch)), request.replicas, m)
    one = microbatch_shapes(batch, request.replicas * m)

    model = bind(request.model, request.loss, one, variables)
    objective = trace_loss(model, request.loss, one)
    schedule = checks.check_schedule(request.schedule(request.num_stages, m), request.num_stages, m)
    profile = _profile(request, objective)
    found = _place(request, objective, model, profile, schedule)
    local = [
        x if shared_leaf else _rows(x, size // request.replicas)
        for x, shared_leaf in zip(jax.tree.leaves(batch), batching.shared, strict=True)
    ]

    def laid_out(request: Request, found: Partition) -> Planned:
        return _lay_out(request, objective, model, profile, found, schedule, batch, one, batching, local)

    planned = laid_out(request, found)

    def cut_again(charged: Profile) -> Planned:
        other = _place(request, objective, model, charged, schedule)
        bound = found.lower_bound_seconds
        within = replace(request, budget=planned.plan.budget, allow_over_budget=False)
        return laid_out(within, replace(other, profile=found.profile, lower_bound_seconds=bound))

    if request.budget is None:
        return planned
    best = balanced(planned, cut_again)
    plan = replace(best.plan, raised_from=planned.plan.raised_from)
    return replace(best, plan=plan, may_raise=request.allow_over_budget)


def _lay_out(
    request: Request,
    objective: Objective,
    model: BoundModel,
    profile: Profile,
    found: Partition,
    schedule: Schedule,
    batch: Any,
    one: Any,
    batching: Batching,
    local: Sequence[Any],
) -> Planned:
    """Programs and layouts for some cuts, and storage within the budget.

    Args:
      request: what was asked for.
      objective, model: what is computed for a micro-batch.
      profile: what its operators cost.
      found: the cuts, and a device for each stage.
      schedule: the table.
      batch, one: shapes of the batch and of a micro-batch.
      batching: how the batch is cut.
      local: one replica's part of the batch.
    """
    cuts = (0, *(stage.operators.stop for stage in found.stages))
    count = request.num_stages
    stages = place(objective, cuts)
    sections = with_backward(objective, cut_sections(objective, cuts, stages), request.policy)
    placement = stages.on_devices(count)
    program = Program(
        objective=objective,
        sections=sections,
        schedule=schedule,
        placement=placement,
        parameters=lay_out([[model.parameters[k].aval for k in placement.held_by(d)[0]] for d in range(count)]),
        state=lay_out([[model.state[k].aval for k in placement.held_by(d)[1]] for d in range(count)]),
        replicated=DATA in request.mesh.axis_names,
    )
    if request.budget is not None and schedule.num_chunks == 1:
        found = _map_for_swaps(program, found)
    mesh = arrange(request.mesh, [stage.devices for stage in found.stages[:count]], found.network)
    coloured = colour_update(request.optimizer, model, placement.parameters)
    check_live(schedule, coloured, objective, request.exchange is not None and request.replicas > 1)
    owned = list(zip(coloured.state_avals, coloured.state_stage, strict=True))
    exchange = None
    if request.exchange is not None and request.replicas > 1:
        warn_of_adam(jax.tree.unflatten(coloured.state_tree, coloured.state_avals))
        exchange = stage_exchange(request.exchange, model, placement, program.parameters, request.replicas)
    state_layout = lay_out([[a for a, owner in owned if owner == d] for d in range(count)])
    update = Update(coloured, state_layout, exchange, request.on_nonfinite)
    shared = [a for a, owner in owned if owner is None]
    rows = checks.batch_size(one)

    def memory_of(program: Program) -> dict[str, int]:
        return predict(program, update, shared, local)

    def planned(budget: int | None) -> Planned:
        chosen, fitted = program, (Fitted(),) * len(sections)
        if budget is not None:
            prices = _prices(request, objective, found)
            options = {"solver": request.solver, "time_limit": request.time_limit}
            chosen, fitted = fit(program, memory_of, working_bytes, budget, prices, **options)
        plan = _describe(request, chosen, found, memory_of(chosen), rows, fitted, budget)
        if exchange is not None:
            plan = replace(plan, exchange_bytes=exchange.sent_bytes)
        refit = None if budget is None else planned
        return Planned(
            plan, profile, found, mesh, batch, one, model, chosen, stages, placement, update, batching, refit
        )

    asked = request.budget
    try:
        return planned(asked)
    except MemoryBudgetError as error:
        if asked is None or error.smallest is None or not request.allow_over_budget:
            raise
        higher = planned(raised(asked, error.smallest))
    return replace(higher, plan=replace(higher.plan, raised_from=asked))


def _map_for_swaps(program: Program, found: Partition) -> Partition:
    """The same cuts on the devices with which swaps to peers can do most, if a step takes no longer with them."""
    messages = [4 * n for n in program.message_words]
    stash = [4 * PAGE * n for n in program.stash_pages]
    tick = found.bottleneck_seconds / len(program.schedule.ticks)
    return best_mapping(found, program.schedule, stash, tick, messages)


def _prices(request: Request, objective: Objective, found: Partition) -> Prices:
    """What computing an operator again costs: as profiled where that is known, else in proportion to an estimate."""
    graph, profile = objective.graph, found.profile
    rates = rates_of(request.mesh.devices.flat[0])
    estimated = sum(roofline.seconds([op], graph, rates) for op in graph.operators)
    scale = sum(profile.forward_seconds) / estimated if estimated else 1.0
    known = {
        t: seconds
        for op, seconds in zip(graph.operators, profile.forward_seconds, strict=True)
        for t in op.outputs
        if weight(op) is None
    }

    def seconds(graph: Graph, op: Operator) -> float:
        return known.get(op.outputs[0], scale * roofline.seconds([op], graph, rates))

    slow = tuple(1 / min(found.network.speed[d] for d in stage.devices) for stage in found.stages)
    return Prices(seconds, rates.bytes / scale if scale else rates.bytes, slow, stage_links(found))


def _rows(x: Any, count: int) -> Any:
    return jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype) if x.shape else x


def _default_microbatches(size: int, replicas: int, num_stages: int) -> int:
    """The fewest micro-batches, of all counts that divide the batch, that keep the bubble small."""
    counts = [m for m in range(1, size + 1) if size % (replicas * m) == 0]
    if num_stages == 1 or not counts:
        return 1
    return next((m for m in counts if m >= MICROBATCHES_PER_STAGE * num_stages), counts[-1])


def _profile(request: Request, objective: Objective) -> Profile:
    graph = objective.graph
    if isinstance(request.profile, Profile):
        count = len(request.profile.names)
        if count != len(graph.operators):
            raise checks.PartitionError(
                f"profile= has {count} operators, the model has {len(graph.operators)}. Profile this very model, with "
                "micro-batches of this size."
            )
        return request.profile
    return profile_objective(objective, request.profile, stage_devices(request.mesh, 0)[0])


def _place(
    request: Request, objective: Objective, model: BoundModel, profile: Profile, schedule: Schedule
) -> Partition:
    """Stages and their devices: the shortest step with the operators in this order."""
    network = request.network
    if network is None:
        # Nothing is known of the links: they count, but little.
        rate = rates_of(request.mesh.devices.flat[0]).bytes
        network = Network.uniform(request.mesh.devices.size, rate)
    tied = variable_spans(objective)
    profile = replace(profile, together=tuple(tied.values()))
    places = sum(places_to_cut(objective)[1:-1])
    if schedule.total_stages > places + 1:
        raise checks.PartitionError(
            f"{schedule.total_stages} stages were asked for, but the model has {len(profile.names)} operators with "
            f"{places} places where it may be cut, so it makes between 1 and {places + 1} stages. "
            f"{_widest(objective, model)}".rstrip()
        )
    asked = {
        "replicate": request.replicas,
        "num_microbatches": schedule.num_microbatches * request.replicas,
        "reorder": False,
        "slack": CUT_SLACK,
    }
    found = partition_layers(profile, network, num_stages=request.num_stages, **asked)
    return found if schedule.num_chunks == 1 else chunked(found, schedule.num_chunks, **asked)


def _widest(objective: Objective, model: BoundModel) -> str:
    """Which variable keeps most operators in one stage."""
    found = variable_spans(objective)
    if not found:
        return ""
    t = max(found, key=lambda t: found[t][1] - found[t][0])
    names = dict(zip((*objective.parameters, *objective.state), (*model.parameters, *model.state), strict=True))
    low, high = found[t]
    if high - low < 2:
        return ""
    path = objective.graph.operators[low].path, objective.graph.operators[high].path
    return (
        f"Variable {names[t].name} is used from operator {low} ({path[0]}) to operator {high} ({path[1]}), and a "
        "variable lives in one stage, with all that is between its uses. Untie it, or use fewer stages."
    )


def _describe(
    request: Request,
    program: Program,
    found: Partition,
    memory: dict[str, int],
    microbatch_size: int,
    fitted: Sequence[Fitted],
    budget: int | None,
) -> Plan:
    graph, profile = program.objective.graph, found.profile
    splits, rates = program.schedule.splits_backward, rates_of(request.mesh.devices.flat[0])
    stages = []
    for s, section in enumerate(program.sections):
        placed = found.stages[s]
        operators = slice(placed.operators.start, placed.operators.stop)
        backward = sum(profile.backward_seconds[operators]) + fitted[s].added_seconds
        stages.append(
            StagePlan(
                operators=(placed.operators.start, placed.operators.stop),
                devices=placed.devices,
                modules=_modules(op.path for op in graph.operators[operators]),
                forward_seconds=sum(profile.forward_seconds[operators]),
                backward_seconds=backward,
                weight_seconds=backward * _weight_share(section, rates) if splits else 0.0,
                added_seconds=fitted[s].added_seconds,
                storage=fitted[s].status,
                storage_gap=fitted[s].gap,
                solve_seconds=fitted[s].solve_seconds,
                stored=_stored_bytes(section),
                parameter_bytes=sum(4 * word_count(a) for a in program.avals(section.parameters)),
                stash_bytes=sum(4 * word_count(a) for a in program.stash_avals(section)),
                in_flight=program.schedule.in_flight(program.device(s), s // program.num_devices),
                **_away(program, found, s),
                sent_bytes=sum(4 * word_count(a) for a in program.avals(section.leaving)),
            )
        )
    speed = [min(found.network.speed[d] for d in stage.devices) for stage in found.stages]
    exchange = _exchange_seconds(found, [4 * n for n in program.message_words])
    exchange += exchange_seconds(program) / len(program.schedule.ticks)
    timeline = simulate(
        program.schedule,
        forward=[stage.forward_seconds / s for stage, s in zip(stages, speed, strict=True)],
        backward_input=[(t.backward_seconds - t.weight_seconds) / s for t, s in zip(stages, speed, strict=True)],
        backward_weight=[t.weight_seconds / s for t, s in zip(stages, speed, strict=True)],
        communication=exchange,
    )
    described = re.sub(r"0x[0-9a-f]+", "", f"{graph}{program.parameters.buffers}{program.state.buffers}")
    return Plan(
        stages=tuple(stages),
        replicas=request.replicas,
        num_microbatches=program.schedule.num_microbatches,
        microbatch_size=microbatch_size,
        schedule=program.schedule.name,
        profile=profile.source,
        step_seconds=timeline.makespan,
        bubble_fraction=timeline.bubble_fraction,
        lower_bound_seconds=found.lower_bound_seconds,
        budget=budget,
        memory=memory,
        staleness=program.schedule.staleness if program.schedule.versions is not None else (),
        fingerprint=hashlib.sha256(described.encode()).hexdigest()[:16],
    )


def _weight_share(section: Section, rates: Rates) -> float:
    """The part for weights of a stage's backward work, by estimate."""
    assert section.stage is not None
    parts = section.stage.input_steps, section.stage.weight_steps
    first, second = (
        sum(roofline.seconds(step.program.operators, step.program, rates) for step in steps) for steps in parts
    )
    return second / (first + second) if second else 0.0


def _stored_bytes(section: Section) -> dict[str, int]:
    """Bytes of one micro-batch's stash, by storage."""
    assert section.stage is not None
    graph, forms = section.stage.graph, section.stage.storage.forms
    found: dict[str, int] = {}
    for t in section.stashed:
        name = forms[t].storage.value
        found[name] = found.get(name, 0) + stored_bytes(graph.tensors[t], forms[t])
    return found


def _away(program: Program, found: Partition, s: int) -> dict[str, Any]:
    """What the plan says of a stage's stashes that are away."""
    swaps, transport = program.swaps, program.transport
    if swaps is None or transport is None or not swaps.ticks[s]:
        return {}
    pieces = zip(swaps.slices[s], transport.pages[s], strict=True)
    return {
        "away": swaps.guests[s],
        "away_ticks": swaps.ticks[s],
        "pieces": tuple(StashPiece(one.target, found.stages[one.target].devices, 4 * PAGE * n) for one, n in pieces),
    }


def stage_links(found: Partition) -> Links:
    """The direct links between the devices of two stages, in pages of the arena; of all replicas the slowest."""
    network = found.network
    places = [np.ix_(one.devices, two.devices) for one in found.stages for two in found.stages]
    shape = len(found.stages), len(found.stages)
    bandwidth = np.array([network.bandwidth[place].min() for place in places]).reshape(shape) / (4 * PAGE)
    latency = np.array([network.latency[place].max() for place in places]).reshape(shape)
    return Links(tuple(map(tuple, bandwidth.tolist())), tuple(map(tuple, latency.tolist())))


def _exchange_seconds(found: Partition, messages: Sequence[float]) -> float:
    """What sending a message forward and one back takes over the slowest link between neighbours."""
    stages = itertools.pairwise(found.stages)
    links = [link for one, two in stages for link in itertools.product(one.devices, two.devices)]
    return sum(max((found.network.seconds(*link, size) for link in links), default=0.0) for size in messages)


def _modules(paths: Any) -> tuple[str, ...]:
    """Module paths in order of appearance, without those that only contain others."""
    seen = [p for p in dict.fromkeys(paths) if p]
    return tuple(p for p in seen if not any(q.startswith(p + "/") for q in seen))
