"""A plan that is run again as it is: checked against a request, and made a program without any search.

a plan with its recipe ──check_request──▶ mesh, schedule ──trace──▶ ──run_plan──▶ the same cuts, devices, storage
"""

# More than 15 of our modules: the parts of a planned step are compared, and put together from a plan.
import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from jax.sharding import Mesh

from jaxpipe.array_types import TensorNumber
from jaxpipe.errors import PartitionError
from jaxpipe.graph.codec import Codec
from jaxpipe.graph.program_text import digests_by, program_text
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.plan import Plan
from jaxpipe.planning.candidate import Candidate, Cut, PlannedStep, make_program
from jaxpipe.planning.check_request import check_runtime_features, settings_of
from jaxpipe.planning.compare_requests import shape_parts
from jaxpipe.planning.cuts.placed_stages import Partition, StageCost
from jaxpipe.planning.given_plan import check_same, made_with, recipe_in
from jaxpipe.planning.refuse_budget import check_budget
from jaxpipe.planning.storage.stage_levels import Fitted, sliced_programs
from jaxpipe.planning.trace_request import Traced
from jaxpipe.recipe import Recipe, StagePrograms
from jaxpipe.residuals import vjp_program
from jaxpipe.residuals.choose_formats import ResidualPlan, refitted
from jaxpipe.residuals.codecs import BUILT_IN, CSR, Bitmap, SparseCodec
from jaxpipe.residuals.stored_formats import Derived, Format
from jaxpipe.runtime.stages import Program, StashSwap, SwapTarget, places_to_cut, with_storage
from jaxpipe.schedules.swap_points import HOST
from jaxpipe.schedules.table import Action, Kind, Schedule, StageNumber
from jaxpipe.sharding.mesh_axes import STAGE
from jaxpipe.text.progress import phase
from jaxpipe.text.stable_text import digest, stable_text
from jaxpipe.text.value_text import listed


#: Tensors of a stage's programs have lower numbers.
MOST_TENSORS = 2**20

_ACTION = re.compile(r"([FBIW])(\d{1,9})(?:'(\d{1,4}))?")
_NUMBERS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?(?:x(\d{1,18}))?")

#: The fields of a recipe that schedules have, too.
OF_SCHEDULES = "stage_of", "versions", "group", "frozen", "keeps_versions"

#: What a plan, and each of its stages, says of the programs, whoever changed it.
FACTS = "replicas", "microbatch_size", "staleness", "frozen", "exchange_bytes", "inner_steps", "per_stage", "axes"
STAGE_FACTS = (
    *("modules", "parameter_bytes", "stash_bytes", "stored", "stored_modules", "recomputed", "sent_bytes"),
    *("in_flight", "away", "away_ticks", "pieces"),
)

#: By name, the codecs that are made with room for so many values.
SPARSE: dict[str, Callable[[int], Codec]] = {codec.name: codec for codec in (Bitmap, CSR)}


def with_recipe(planned: PlannedStep) -> PlannedStep:
    """Return a plan that has all that is needed to make its programs again."""
    traced, schedule = planned.candidate.traced, planned.program.schedule
    asked, graph, numbers = traced.asked[0], traced.objective.graph, schedule.device_numbers
    position = {device: k for k, device in enumerate(asked.mesh.devices.flat)}
    recipe = Recipe(
        made_with=made_with(asked.mesh),
        mesh={**asked.mesh.shape, **asked.submesh.shape},
        devices=tuple(position[device] for device in planned.mesh.devices.flat),
        batch=shape_parts(traced.batch),
        storage=traced.request.policy.codecs_name,
        settings=settings_of(traced.request),
        variables=_variables(traced),
        optimizer=_optimizer(traced),
        program=digest(program_text(graph)),
        modules=_modules(traced.objective),
        scan_groups=traced.model.scan_groups,
        table=tuple(" ".join("+".join(map(str, tick[d])) or "." for tick in schedule.ticks) for d in numbers),
        **{name: getattr(schedule, name) for name in OF_SCHEDULES},
        stages=tuple(_stage_programs(planned.program, s) for s in planned.program.stage_numbers),
    )
    return replace(planned, plan=replace(planned.plan, recipe=recipe))


def _variables(traced: Traced) -> str:
    return digest(stable_text([(v.name, v.aval) for v in (*traced.model.parameters, *traced.model.state)]))


def _optimizer(traced: Traced) -> str:
    return digest(stable_text([traced.update.state_avals, traced.update.trained]))


def _modules(objective: MicrobatchProgram) -> dict[str, str]:
    return {path: text[:8] for path, text in digests_by(objective.graph, lambda op: op.path, values=False).items()}


def _stage_programs(program: Program, s: StageNumber) -> StagePrograms:
    stage, formats = program.stages[s], dict[str, dict[TensorNumber, int | None]]()
    for t, form in stage.programs.plan.formats.items():
        name = form.value if isinstance(form, Derived) else form.name
        formats.setdefault(name, {})[t] = form.capacity if isinstance(form, SparseCodec) else None
    texts = {name: _ranges(numbers) for name, numbers in formats.items()}
    if stage.swap is None:
        return StagePrograms(texts)
    targets = tuple((int(target.stage), target.share) for target in stage.swap.targets)
    return StagePrograms(texts, _ranges(dict.fromkeys(stage.swap.tensors)), targets)


def _ranges(numbers: Mapping[TensorNumber, int | None]) -> str:
    """Return numbers in order, each with the room of its codec, runs of equal ones abbreviated."""
    runs: list[tuple[int, int, int | None]] = []
    for t, room in sorted(numbers.items()):
        follows = bool(runs) and runs[-1][1:] == (t - 1, room)
        runs.append((runs.pop()[0] if follows else t, t, room))
    return " ".join(f"{a}" + (f"-{b}" if b > a else "") + ("" if room is None else f"x{room}") for a, b, room in runs)


def _numbers(text: str) -> dict[TensorNumber, int | None]:
    """Return the numbers that ``_ranges`` has written, each with its room."""
    numbers: dict[TensorNumber, int | None] = {}
    for part in text.split():
        match = _NUMBERS.fullmatch(part)
        if match is None or int(match[2] or match[1]) >= MOST_TENSORS:
            raise ValueError(f"recipe.stages has the tensors {part[:40]!r}, which are no numbers.")
        run = range(int(match[1]), int(match[2] or match[1]) + 1)
        numbers |= {TensorNumber(t): int(match[3]) if match[3] else None for t in run}
    return numbers


def _forms(traced: Traced) -> dict[str, Format]:
    """Return by name how a tensor may be stored or derived, codecs of the caller's own included."""
    policies = {traced.request.policy, *(op.policy for op in traced.objective.graph.operators if op.policy is not None)}
    given = {codec for policy in policies for _, codecs in policy.rules for codec in codecs if isinstance(codec, Codec)}
    shared = sorted(name for name, count in Counter(codec.name for codec in given).items() if count > 1)
    if shared:
        raise PartitionError(
            f"plan= tells codecs by their names, and several that differ are called {shared[0]!r}. Give each a name of "
            "its own, and plan again."
        )
    codecs = [*given, *itertools.chain.from_iterable(BUILT_IN.values())]
    return {codec.name: codec for codec in codecs} | {form.value: form for form in Derived}


def _formats(exact: StagePrograms, forms: Mapping[str, Format]) -> ResidualPlan:
    """Return the format of each tensor of a stage."""
    formats: dict[TensorNumber, Format] = {}
    for name, text in exact.formats.items():
        if name not in forms:
            raise ValueError(f"recipe.stages has tensors as {name!r}; there are {', '.join(map(repr, forms))}.")
        for t, room in _numbers(text).items():
            formats[t] = forms[name] if room is None or name not in SPARSE else SPARSE[name](room)
    return ResidualPlan(formats)


def _stored(program: Program, traced: Traced, plan: Plan, forms: Mapping[str, Format]) -> Program:
    """Return a program with its largest product in slices and with swaps, where the plan has them."""
    stages, loss = list(program.stages), program.objective.results[0]
    for k, (stage, planned, exact) in enumerate(zip(program.stages, plan.stages, recipe_in(plan).stages, strict=True)):
        vjp, swap = stage.programs, None
        if planned.slices > 1:
            sliced = sliced_programs(program, stage, traced.request.policy)
            if sliced is None or sliced.count != planned.slices:
                raise ValueError(f"stages[{k}].slices is {planned.slices}, here {sliced and sliced.count}.")
            vjp = vjp_program.assemble(sliced.vjp.backward_graph, refitted(_formats(exact, forms), sliced.vjp.graph))
        if exact.targets or exact.swapped:
            if not all(HOST <= s < len(stages) and s != k for s, _ in exact.targets) or not exact.swapped:
                raise ValueError(f"recipe.stages[{k}] swaps {exact.swapped!r} to {exact.targets}, of {len(stages)}.")
            targets = tuple(SwapTarget(StageNumber(s), share) for s, share in exact.targets)
            swap = StashSwap(tuple(_numbers(exact.swapped)), targets)
        if planned.slices > 1 or swap is not None:
            stages[k] = with_storage(stage, vjp, loss, planned.slices, swap)
    return replace(program, stages=tuple(stages))


@phase("plan=")
def run_plan(traced: Traced) -> PlannedStep:
    """Return the step of a request's plan, with its cuts, devices, schedule and storage; nothing is searched for.

    Raises:
      PartitionError: if the plan was made for another program.
      MemoryBudgetError: if it was compiled by other versions or for other devices, and does not keep its budget here.
    """
    request = traced.request
    assert request.plan is not None
    plan, recipe = request.plan, recipe_in(request.plan)
    _check_program(traced, recipe)
    _check_cuts(traced, plan)
    check_same("number of recipe.stages", len(recipe.stages), len(plan.stages))
    schedule, partition, forms = _schedule(plan), _partition(traced, plan), _forms(traced)
    check_runtime_features(request, [schedule])
    try:
        # The default storage of a stage with a sliced product is that of another program.
        storage = tuple(
            None if stage.slices > 1 else _formats(exact, forms)
            for stage, exact in zip(plan.stages, recipe.stages, strict=True)
        )
        cut = Cut(traced, partition, storage=storage)
        program = _stored(make_program(cut, schedule), traced, plan, forms)
    except (ValueError, KeyError) as error:
        raise PartitionError(
            f"plan= does not fit the programs of its stages: {error} It was made with {recipe.made_with}; this is "
            f"{made_with(request.mesh)}. Leave out plan= to plan again."
        ) from None
    candidate = Candidate(cut, partition, program, schedule)
    plan, mesh = _checked(plan, candidate), _recipe_mesh(plan, request.mesh, schedule)
    same = recipe.made_with == made_with(request.mesh)
    if not same:
        plan = replace(plan, compiled_each_device=(), compiled_stage_memory=())
    planned = replace(candidate.planned(program, plan), mesh=mesh)
    if plan.runtime == "mpmd" and (request.options.compile or (plan.budget is not None and not same)):
        planned = planned.with_step()
        check_budget(planned)
    return planned


def _checked(plan: Plan, candidate: Candidate) -> Plan:
    """Return a plan with the devices that it runs on; raise ``PartitionError`` if its programs are not what it says."""
    now = candidate.described(candidate.program, (Fitted(),) * len(plan.stages)).plan
    for name in FACTS:
        check_same(name, getattr(plan, name), getattr(now, name))
    for (k, stage), here in zip(enumerate(plan.stages), now.stages, strict=True):
        for name in STAGE_FACTS:
            check_same(f"stages[{k}].{name}", getattr(stage, name), getattr(here, name))
    pairs = zip(plan.stages, now.stages, strict=True)
    return replace(plan, stages=tuple(replace(stage, device_ids=here.device_ids) for stage, here in pairs))


def _recipe_mesh(plan: Plan, mesh: Mesh, schedule: Schedule) -> Mesh:
    """Return the devices of a mesh in the order of a recipe; raise ``PartitionError`` if stages have others."""
    recipe, axis = recipe_in(plan), mesh.axis_names.index(STAGE)
    numbers = {d: k for k, d in enumerate(sorted(recipe.devices))}  # in the mesh without devices that are left out
    places = np.array([numbers[d] for d in recipe.devices]).reshape(mesh.devices.shape)
    ends = itertools.accumulate(len(plan.stages[row[0]].devices) for row in schedule.stage_of)
    groups = np.split(np.moveaxis(places, axis, 0).flatten(), list(ends)[:-1])
    for k, stage in enumerate(plan.stages):
        group = groups[schedule.device(StageNumber(k))]
        check_same(f"stages[{k}].devices", sorted(stage.devices), sorted(group.tolist()))
    return Mesh(mesh.devices.flatten()[places], mesh.axis_names, axis_types=mesh.axis_types)


def _check_cuts(traced: Traced, plan: Plan) -> None:
    """Raise ``PartitionError`` unless the stages of a plan follow each other, and may begin where they do."""
    allowed, ranges = places_to_cut(traced.objective), [stage.operators for stage in plan.stages]
    ends = [0, *(last for _, last in ranges)]
    if ends[-1] != len(allowed) - 1 or ranges != list(itertools.pairwise(ends)) or not all(a < b for a, b in ranges):
        raise PartitionError(
            f"plan=: stages have the operators {ranges}; they must follow each other, of {len(allowed) - 1}."
        )
    if not all(allowed[end] for end in ends):
        raise PartitionError(f"plan=: stages have the operators {ranges}, which cut between two uses of one variable.")


def _check_program(traced: Traced, recipe: Recipe) -> None:
    """Raise ``PartitionError`` with the modules in which a traced program is not that of a recipe."""
    planned, now = recipe.modules, _modules(traced.objective)
    changed = [path or "the loss" for path in {**planned, **now} if planned.get(path) != now.get(path)]
    where = f" in {listed(changed)}" if changed else ""
    check_same("variables of the model", recipe.variables, _variables(traced))
    check_same(f"program of model and loss{where}", recipe.program, digest(program_text(traced.objective.graph)))
    check_same("optimizer's state", recipe.optimizer, _optimizer(traced))


def _partition(traced: Traced, plan: Plan) -> Partition:
    """Return the stages of a plan on their devices; what they cost is in the plan."""
    stages = [StageCost(range(*x.operators), x.devices, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0.0) for x in plan.stages]
    return Partition(
        stages=tuple(stages),
        order=tuple(range(len(traced.objective.graph.operators))),
        bottleneck_seconds=plan.step_seconds,
        lower_bound_seconds=plan.lower_bound_seconds,
        ties=1,
        searched="nothing: given as plan=",
        cost_model="synchronous",
        num_microbatches=plan.num_microbatches * plan.replicas,
        memory=(None,) * traced.links.num_devices,
        replicate=False,
        num_stages=len(stages),
        reorder=False,
        slack=0.0,
        profile=traced.profile,
        network=traced.request.network or traced.links,
    )


def _schedule(plan: Plan) -> Schedule:
    """Return the table of a plan; raises ``ScheduleError`` if it is not valid."""
    recipe = recipe_in(plan)
    rows = [[tuple(map(_action, filter(".".__ne__, cell.split("+")))) for cell in row.split()] for row in recipe.table]
    if len({len(row) for row in rows}) != 1 or len(rows) != len(recipe.stage_of):
        raise PartitionError("plan=: recipe.table must have a row for each device, and as many ticks in each.")
    rounds, num_chunks = plan.stage_replicas.rounds(plan.num_microbatches), len(recipe.stage_of[0])
    given = {name: getattr(recipe, name) for name in OF_SCHEDULES}
    schedule = Schedule(plan.schedule, len(rows), rounds, tuple(zip(*rows, strict=True)), num_chunks, **given)
    if schedule.total_stages != len(plan.stages):
        raise PartitionError(f"plan=: recipe.stage_of has {schedule.total_stages} stages, the plan {len(plan.stages)}.")
    schedule.validate()
    return schedule


def _action(text: str) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None:
        raise PartitionError(f"plan=: recipe.table has {text[:40]!r}; an action is F, B, I or W and a micro-batch.")
    return Action(Kind(match[1]), int(match[2]), int(match[3] or 0))
