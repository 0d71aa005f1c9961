"""The plan: where each part of a model went, and what that is predicted to cost."""

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from jaxpipe.errors import PartitionError
from jaxpipe.exchange_plan import ExchangePlan, exchange_table
from jaxpipe.recipe import Recipe
from jaxpipe.schedules.replicas import StageReplicas
from jaxpipe.schedules.swap_points import HOST
from jaxpipe.text.checked_json import Amount, Count, Positive, read_json
from jaxpipe.text.printed import PlainTable, Printed
from jaxpipe.text.short_names import cut_middle, number_ranges, shorten
from jaxpipe.text.units import byte_unit, bytes_text, seconds_text


@dataclass(frozen=True)
class StashPiece:
    """The part of every stash of a stage that one of its peers keeps for it, or the host.

    Attributes:
      stage: the peer; -1 for the memory of the host.
      devices: the peer's, or the stage's own whose host it is; one for each replica.
      bytes: of one stash.
    """

    stage: Annotated[int, msgspec.Meta(ge=HOST)]
    devices: tuple[Count, ...]
    bytes: Count


@dataclass(frozen=True)
class StagePlan:
    """One stage. Seconds are for one micro-batch.

    Attributes:
      operators: the range of the program's operators.
      devices: positions in ``mesh.devices.flat`` of the mesh that was given; one for each replica, or more.
      device_ids: the ``jax.Device.id`` of all its devices, those of further axes of the mesh included.
      modules: paths of the modules in it.
      forward_seconds, backward_seconds: predicted.
      weight_seconds: of the backward work, the part for weights, if the schedule splits it.
      parameter_bytes: its own parameters, without gradients and optimizer state.
      stash_bytes: what one micro-batch keeps for the backward pass.
      in_flight: the most micro-batches that keep a stash at the same time, on each device.
      away: of these, how many are in peers' memory or the host's at most (``jaxpipe.schedules.swap_points``).
      away_ticks: for how many ticks each of them is at most.
      pieces: the slices of one of them, and who keeps them.
      stored: bytes of the stash, by kind of storage.
      stored_modules: the same by path of the module that makes what is stored.
      message_seconds: for one micro-batch, until what it sends on is there, and the cotangents that it sends back; 0
        where the timeline does not count them apart.
      recomputed: products, reductions and other operators of more than cheap arithmetic that the backward pass runs
        again in place of storing their results, by module path and name.
      slices: into how many the largest product is cut, logits as a rule, which are then never whole.
      storage: how it was chosen: ``"default"``, or within a budget ``"optimal"``, ``"gap"``, ``"time limit"``,
        ``"greedy"``, ``"checkpoints"`` (of blocks), ``"lowest peak"`` or ``"fewer reruns"``.
      added_seconds: what computing again and codecs add over the default, in ``backward_seconds``.
      storage_gap: by what share of the time of all codecs and recomputation another choice may be faster.
      solve_seconds: what the solver took for it.
      sent_bytes: what it sends on to the next stage for one micro-batch.
    """

    operators: tuple[Count, Count]
    devices: tuple[Count, ...]
    modules: tuple[str, ...]
    forward_seconds: Amount
    backward_seconds: Amount
    parameter_bytes: Count
    stash_bytes: Count
    in_flight: Count
    sent_bytes: Count
    away: Count = 0
    away_ticks: Count = 0
    pieces: tuple[StashPiece, ...] = ()
    stored: dict[str, Count] = field(default_factory=dict)
    stored_modules: dict[str, Count] = field(default_factory=dict)
    storage: str = "default"
    added_seconds: float = 0.0
    storage_gap: float = 0.0
    solve_seconds: Amount = 0.0
    weight_seconds: Amount = 0.0
    recomputed: tuple[str, ...] = ()
    slices: Count = 1
    message_seconds: tuple[Amount, Amount] = (0.0, 0.0)
    device_ids: tuple[Count, ...] = ()


@dataclass(frozen=True)
class BalanceRound:
    """One round of cutting a program and choosing its stages' storage (``jaxpipe.planning.budget_search``).

    Attributes:
      cuts: the first operator of each stage but the first.
      stage_seconds: of one micro-batch, recomputation and codecs included.
      step_seconds: predicted; of the plan's own cuts, those of the plan.
    """

    cuts: tuple[Count, ...]
    stage_seconds: tuple[Amount, ...]
    step_seconds: Amount

    @property
    def rate(self) -> float:
        """Fastest over slowest stage."""
        return min(self.stage_seconds) / max(self.stage_seconds) if max(self.stage_seconds, default=0.0) else 1.0


@dataclass(frozen=True)
class HostPlan:
    """The use of the host's memory, if ``host_memory`` was passed.

    Attributes:
      budget: bytes for each device that stashes may use.
      bytes: that they do use; none of them are among those of the device.
      refused: why the devices cannot use any, if so.
    """

    budget: Count
    bytes: Count
    refused: str = ""


@dataclass(frozen=True)
class FrozenPlan:
    """Parameters whose gradients the optimizer does not read, and what that saves.

    Attributes:
      parameters: their names.
      trained: how many others there are.
      bytes: of all of them.
      gradient_bytes: of buffers of gradients that each device does without.
      stages: those without backward work.
    """

    parameters: tuple[str, ...]
    trained: Count
    bytes: Count
    gradient_bytes: Count
    stages: tuple[Count, ...]


@dataclass(frozen=True)
class Plan(Printed):
    """A way to train a model on a mesh, predicted from shapes and the costs of operators.

    With one program for all devices each reserves the largest of every component over the stages. With a program for
    each stage a device needs what its own stages do, and ``memory`` is that of the fullest.

    Attributes:
      stages: in order.
      replicas: copies of the pipeline, along the data axis.
      num_microbatches: of each replica, in one step.
      microbatch_size: examples of one micro-batch.
      schedule: name of the table.
      profile: where the seconds come from, ``"measured"`` or ``"analytic"``.
      measured: when they were measured, UTC, and whether that was kept from then: ``"2026-11-25 13:20, kept"``.
      step_seconds: predicted time of a step, without the optimizer.
      lower_bound_seconds: no cut and placement of this profile has a shorter step.
      schedule_bound_seconds: no order of these stages' work on these devices has a shorter step with as many stashes in
        flight, whether it splits the backward pass or not; 0 where this is not computed, with one program for all.
      bubble_fraction: share of the stages' time in which they wait.
      budget: bytes on each device at most, if the caller gave it; more, if it was raised.
      memory: predicted bytes on each device, by component; where devices differ, on the fullest.
      fingerprint: of the program that the plan is for.
      rounds: how cuts and storage were found together, if there is a budget.
      exchange_bytes: what each device hands to the collectives of a block-sparse gradient exchange in a step after
        its warm-up, or of an outer loop in a step on average; None if gradients are exchanged whole.
      inner_steps: of an outer loop; 0 without one.
      exchanges: if a network was given, what this exchange between replicas costs on it, and others.
      staleness: by stage, how many updates its weights lack at most when a gradient is computed with them, if they
        change while micro-batches are in flight; a step then makes one update for each group of micro-batches.
      per_stage: whether the optimizer looks at the gradients of each stage apart (``jaxpipe.gradients.per_stage``), so
        that what it does depends on where the model is cut.
      raised_from: the requested budget, if no plan kept it and the caller allowed a larger one.
      host: the use of the host's memory, if it was requested.
      rates: whose rates messages, stashes, sums of gradients and recomputation are charged at, if the profile is not of
        the mesh's kind of device or has none.
      notes: one sentence each on annotations left out, types of sums, and scans over layers, cut or not.
      frozen: the parameters that the optimizer does not train, if there are any.
      runtime: ``"mpmd"``, a program for each stage, or ``"spmd"``, one for all devices.
      each_device: predicted bytes of each device, where they differ, in the order of ``mesh.devices.flat``.
      stage_memory: by stage, the same of its first device by component.
      fullest_in: by stage, the call in which its first device holds most, as compiled if the step is.
      compiled_each_device: bytes that XLA reserves on each device, once stage programs have been compiled.
      compiled_stage_memory: by stage, the same of its first device by component.
      axes: the mesh axes over which each stage is sharded, and their sizes. The devices of a stage are then the first
        ones of its groups.
      recipe: what ``partition(plan=)`` needs besides to make the same programs again; None in older plans.
      search: how the plan was found, a sentence for each step: what was compared, its seconds and bytes.

    Example:
      >>> stage = StagePlan((0, 2), (0,), ("dense",), 1e-3, 2e-3, 36, 8, 1, 0)
      >>> plan = Plan((stage,), 1, 4, 2, "1f1b", "analytic", 12e-3, 12e-3, 0.0, None, {"parameters": 36}, "")
      >>> Plan.from_json(plan.to_json()) == plan
      True
    """

    stages: tuple[StagePlan, ...]
    replicas: Positive
    num_microbatches: Positive
    microbatch_size: Positive
    schedule: str
    profile: str
    step_seconds: Amount
    lower_bound_seconds: Amount
    bubble_fraction: float
    budget: Count | None
    memory: dict[str, Count]
    fingerprint: str
    rounds: tuple[BalanceRound, ...] = ()
    raised_from: Count | None = None
    exchange_bytes: Count | None = None
    inner_steps: Count = 0
    exchanges: tuple[ExchangePlan, ...] = ()
    staleness: tuple[Count, ...] = ()
    per_stage: bool = False
    host: HostPlan | None = None
    rates: str = ""
    notes: tuple[str, ...] = ()
    frozen: FrozenPlan | None = None
    runtime: str = "mpmd"
    each_device: tuple[Count, ...] = ()
    stage_memory: tuple[dict[str, Count], ...] = ()
    schedule_bound_seconds: Amount = 0.0
    compiled_each_device: tuple[Count, ...] = ()
    compiled_stage_memory: tuple[dict[str, Count], ...] = ()
    axes: dict[str, Count] = dataclasses.field(default_factory=dict)
    fullest_in: tuple[str, ...] = ()
    recipe: Recipe | None = dataclasses.field(default=None, repr=False)
    measured: str = dataclasses.field(default="", compare=False)
    search: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def schedule_gap(self) -> float | None:
        """Return the share by which the step is over the bound for its schedule; None if there is no bound."""
        bound = self.schedule_bound_seconds
        return max(0.0, self.step_seconds / bound - 1) if bound else None  # no less, for their sums round apart

    @property
    def exchange_name(self) -> str:
        """Return the exchange between replicas that is not dense, in words."""
        return f"outer loop of {self.inner_steps} steps" if self.inner_steps else "block-sparse exchange"

    @property
    def predicted_bytes(self) -> int:
        """Bytes on each device; where devices differ, on the fullest."""
        return sum(self.memory.values())

    @property
    def compiled_bytes(self) -> int | None:
        """Bytes that XLA reserves on the fullest device, once stage programs have been compiled."""
        return max(self.compiled_each_device, default=None)

    @property
    def where(self) -> str:
        """Return the devices that ``memory`` is of, in words."""
        return "on the fullest device" if self.each_device else "on each device"

    @property
    def device_bytes(self) -> tuple[int, ...]:
        """Predicted bytes of each device, in the order of ``mesh.devices.flat``."""
        devices = {d for stage in self.stages for d in stage.devices}
        return self.each_device or (self.predicted_bytes,) * (len(devices) * math.prod(self.axes.values()))

    @property
    def stage_replicas(self) -> StageReplicas:
        """Return how many devices of each replica every stage has."""
        return StageReplicas(tuple(len(stage.devices) // self.replicas for stage in self.stages))

    @property
    def identity(self) -> str:
        """A short name that only an equal placement has."""
        where = [self.fingerprint, [[stage.operators, stage.devices] for stage in self.stages], self.runtime, self.axes]
        return hashlib.sha256(json.dumps(where).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The plan as JSON; ``predicted_bytes`` is written for the reader."""
        return json.dumps({**dataclasses.asdict(self), "predicted_bytes": self.predicted_bytes}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that ``to_json`` has written.

        Raises:
          PartitionError: naming the line, if it is not JSON; or what is missing or wrong in it.
        """
        plan = read_json(text, cls, "The plan", beside=("predicted_bytes",))
        counts = [len(stage.devices) for stage in plan.stages]
        if not counts or min(counts) < plan.replicas:
            raise PartitionError(
                f"the plan: replicas={plan.replicas} and stages on {counts} devices; there must be a stage, and every "
                "stage must have a device for each replica."
            )
        return plan

    def _printed(self) -> list[PlainTable | str]:
        prefix, modules = short_modules(self)
        parts = [
            _headline(self),
            _work_table(self, modules),
            f"modules are named inside {prefix}" if prefix else "",
            _memory_text(self),
            _memory_table(self),
            _stored_table(self, prefix),
            exchange_table(self.exchanges) if self.exchanges else "",
            *_remarks(self),
        ]
        return [part for part in parts if part]


def _headline(plan: Plan) -> str:
    """Return the size of a plan, and the seconds of a step."""
    widths = plan.stage_replicas.per_stage
    copies = f" x {plan.replicas} replicas" if plan.replicas > 1 else ""
    copies = f" x {' + '.join(map(str, widths))} devices" if set(widths) > {1} else copies
    copies += "".join(f" x {axis} {count}" for axis, count in plan.axes.items())
    stages, batches = _counted(len(plan.stages), "stage"), _counted(plan.num_microbatches, "micro-batch", "es")
    text = f"{stages}{copies}, {batches} of {plan.microbatch_size}, {plan.schedule}\n"
    measured = f" {plan.measured}" if plan.measured else " profile"
    text += f"step {seconds_text(plan.step_seconds)} ({plan.profile}{measured}"
    text += f", at the rates of {plan.rates})" if plan.rates else ")"
    if len(plan.stages) > 1:
        text += f", bubble {plan.bubble_fraction:.1%}"
    gap = plan.schedule_gap
    if gap is not None and len(plan.stages) > 1:
        text += f"; another order of the same work saves at most {gap / (1 + gap):.1%}"
    return text + ('\none program for all devices (runtime="spmd")' if plan.runtime == "spmd" else "")


def _work_table(plan: Plan, modules: Sequence[Sequence[str]]) -> PlainTable:
    """Return the table of each stage's work on a micro-batch."""
    table = PlainTable("stage", "devices", "modules")
    table.add_numbers("forward", "backward", "stash", "sends on")
    for k, stage in enumerate(plan.stages):
        away = f", {stage.away} away" if stage.away else ""
        table.add_row(
            str(k),
            number_ranges(stage.device_ids or stage.devices),
            shorten(modules[k]),
            seconds_text(stage.forward_seconds),
            seconds_text(stage.backward_seconds),
            f"{stage.in_flight} x {bytes_text(stage.stash_bytes)}{away}" if stage.stash_bytes else "-",
            bytes_text(stage.sent_bytes) if stage.sent_bytes else "-",
        )
    return table


def _memory_text(plan: Plan) -> str:
    """Return the bytes of the fullest device: those that XLA reserves if the step is compiled, else predicted."""
    limit = "" if plan.budget is None else f" of {bytes_text(plan.budget)}"
    limit += "" if plan.raised_from is None else f" (raised from {bytes_text(plan.raised_from)})"
    text = f"{bytes_text(plan.compiled_bytes or plan.predicted_bytes)}{limit} {plan.where}"
    compiled = f"compiled ({bytes_text(plan.predicted_bytes)} were predicted)"
    return f"{text}, {'predicted' if plan.compiled_bytes is None else compiled}{_fullest_text(plan)}"


def _memory_by_device(plan: Plan) -> list[tuple[list[int], dict[str, int], str]]:
    """Return the stages on each device, its bytes by component, and the call in which it holds most.

    Where all devices are alike there is one entry, of no stages.
    """
    compiled = plan.compiled_bytes is not None and plan.compiled_stage_memory
    by_stage = plan.compiled_stage_memory if compiled else plan.stage_memory
    if not by_stage:
        return [([], plan.memory, "")]
    stages: dict[int, list[int]] = {}
    for k, stage in enumerate(plan.stages[: len(by_stage)]):
        stages.setdefault(stage.devices[0], []).append(k)
    calls = dict(enumerate(plan.fullest_in))
    return [(numbers, by_stage[numbers[0]], calls.get(numbers[0], "")) for numbers in stages.values()]


#: A call whose temporaries have the stash inside.
_BOTH = "forward and backward"

#: Components that have a column, however small they are, if they are there; of others those of a tenth of the bytes.
_ALWAYS = ("parameters", "gradients", "optimizer", "stash", "temporaries")


def _memory_table(plan: Plan) -> PlainTable:
    """Return the bytes of each device at its fullest, in one unit."""
    rows = _memory_by_device(plan)
    fullest = max(sum(parts.values()) for _, parts, _ in rows)
    names = list(dict.fromkeys(name for _, parts, _ in rows for name in parts))
    large = {name for _, parts, _ in rows for name, size in parts.items() if size >= 0.1 * fullest > 0}
    apart = [name for name in names if name in large or (name in _ALWAYS and any(p.get(name) for _, p, _ in rows))]
    scale, unit = byte_unit(fullest / 10)
    table = PlainTable("stage")
    table.add_numbers(unit, *apart, *(["other"] if len(apart) < len(names) else []))
    for numbers, parts, call in rows:
        sizes = [sum(parts.values()), *(parts.get(name, 0) for name in apart)]
        cells = [_scaled(size, scale) for size in (*sizes, sizes[0] - sum(sizes[1:]))]
        if "stash" in apart and _BOTH in call and parts.get("stash") == 0:
            cells[1 + apart.index("stash")] = "inside"
        table.add_row(number_ranges(numbers) or "all", *cells[: len(table.columns) - 1])
    return table


def _scaled(size: int, scale: int) -> str:
    return f"{size:,}" if scale == 1 or not size else "<0.1" if size < 0.05 * scale else f"{size / scale:,.1f}"


def _fullest_text(plan: Plan) -> str:
    """Return the calls in which devices hold most, with their stages."""
    stages: dict[str, list[int]] = {}
    for numbers, _, call in _memory_by_device(plan):
        if call:
            stages.setdefault(call.split(": ")[-1], []).extend(numbers)
    if not stages:
        return ""
    calls = [call if len(stages) == 1 else f"{call} ({number_ranges(numbers)})" for call, numbers in stages.items()]
    inside = ", with the stash inside its temporaries" if any(_BOTH in call for call in stages) else ""
    return f"\nfullest during {', '.join(calls)}{inside}"


def _stored_table(plan: Plan, prefix: str, most: int = 6) -> PlainTable | None:
    """Return the table of a single stage's stored bytes, equal blocks in one row; None for several stages."""
    if len(plan.stages) != 1 or not plan.stages[0].stored_modules:
        return None
    alike: dict[str, list[int]] = {}
    for path, size in plan.stages[0].stored_modules.items():
        alike.setdefault(re.sub(r"\d+", "*", path.removeprefix(f"{prefix}/")), []).append(size)
    rows = sorted(alike.items(), key=lambda row: -sum(row[1]))
    rest = [size for _, sizes in rows[most:] for size in sizes]
    table = PlainTable("stored for the backward pass")
    table.add_numbers("modules", "bytes")
    for path, sizes in [*rows[:most], *([("others", rest)] if rest else [])]:
        table.add_row(cut_middle(path), str(len(sizes)), bytes_text(sum(sizes)))
    return table


#: A stage has no work to speak of below this share of the longest stage's.
IDLE = 0.01


def idle_stages(stages: Sequence[StagePlan]) -> list[int]:
    """Return the stages without parameters and with next to no work, if others have some."""
    work = [stage.forward_seconds + stage.backward_seconds for stage in stages]
    return [k for k, s in enumerate(stages) if not s.parameter_bytes and work[k] < IDLE * max(work)]


def _idle_text(plan: Plan) -> list[str]:
    """Return a sentence about devices without work, with advice."""
    idle = idle_stages(plan.stages)
    used = {d for k, stage in enumerate(plan.stages) if k not in idle for d in stage.devices}
    devices = sorted({d for k in idle for d in plan.stages[k].devices} - used)
    if not devices:
        return []
    left = _counted(len(plan.stages) - len(idle), "stage")
    return [
        f"next to no work in stage {number_ranges(idle)}: {left} would do, on a mesh with "
        f"{_counted(len(devices), 'device')} fewer"
    ]


def _counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{plural if count != 1 else ''}"


def _remarks(plan: Plan) -> list[str]:
    """Return sentences about what few plans have."""
    lines = [*_idle_text(plan)]
    if plan.host is not None:
        used = f"{bytes_text(plan.host.bytes)} of {bytes_text(plan.host.budget)} in the host's memory for each device"
        lines.append(f"the host's memory is not used: {plan.host.refused}" if plan.host.refused else used)
    if plan.frozen is not None:
        lines.append(_frozen_text(plan.frozen))
    if plan.exchange_bytes is not None:
        dense = bytes_text(max(plan.memory.get(name, 0) for name in ("parameters", "gradients")))
        lines.append(f"{plan.exchange_name}: {bytes_text(plan.exchange_bytes)} of {dense} sent in a step")
    if plan.staleness:
        behind = ", ".join(map(str, plan.staleness))
        lines.append(f"asynchronous updates: each stage is at most {behind} updates behind")
    if plan.per_stage:
        lines.append("the optimizer looks at each stage apart: other cuts give other updates")
    return [*lines, *plan.notes, *_storage_lines(plan)]


def _storage_lines(plan: Plan) -> list[str]:
    """Return lines on what each stage stores under a budget, and what it keeps elsewhere; none by default."""
    lines = []
    if any(stage.storage != "default" or stage.away for stage in plan.stages):
        lines.append("storage chosen within the budget:")
        lines += [f"stage {k}: {_storage_text(stage)}" for k, stage in enumerate(plan.stages)]
        if plan.rounds:
            rates = ", ".join(f"{r.rate:.2f} ({1e3 * r.step_seconds:.1f} ms)" for r in plan.rounds)
            lines.append(f"fastest over slowest stage, round by round: {rates}")
    return lines + [_away_text(k, stage) for k, stage in enumerate(plan.stages) if stage.away]


def _storage_text(stage: StagePlan) -> str:
    parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in stage.stored.items())
    share = stage.added_seconds / max(1e-30, stage.forward_seconds + stage.backward_seconds - stage.added_seconds)
    again = f", {len(stage.recomputed)} computed again" if stage.recomputed else ""
    sliced = f", largest product in {stage.slices} slices" if stage.slices > 1 else ""
    return f"{parts or 'nothing'}{again}{sliced}; {share:+.1%} time ({_status_text(stage)})"


#: How a stage's storage was chosen, in words; of the others a plan says how much time a better choice may save.
_STATUS = {
    "lowest peak": "as little memory as was found, whatever time that takes",
    "optimal": "optimal",
    "fewer reruns": "default, but fewer products again",
}
_SEARCHED = {
    "gap": "nearly optimal",
    "time limit": "the best that the solver found in its time",
    "greedy": "chosen by a greedy rule, as the solver found nothing better in the time_limit",
    "checkpoints": "nn.remat of blocks; nothing faster was found",
}


def _status_text(stage: StagePlan) -> str:
    if stage.storage not in _SEARCHED:
        return _STATUS.get(stage.storage, stage.storage)
    rest = f"at most {stage.storage_gap:.1%} of what codecs and recomputation take could be saved"
    return f"{_SEARCHED[stage.storage]}; {rest if stage.storage_gap < 0.995 else 'how near to the best is not known'}"


def _away_text(k: int, stage: StagePlan) -> str:
    kinds = " and ".join(sorted({"the host's" if piece.stage == HOST else "peers'" for piece in stage.pieces}))
    pieces = ", ".join(
        f"{bytes_text(piece.bytes)} with {'the host' if piece.stage == HOST else f'stage {piece.stage}'} "
        f"(device {', '.join(map(str, piece.devices))})"
        for piece in stage.pieces
    )
    stashes = f"{stage.away} stashes, each for up to {stage.away_ticks} ticks: {pieces}"
    return f"in {kinds} memory: of stage {k} {stashes}"


def _frozen_text(frozen: FrozenPlan) -> str:
    count, total = len(frozen.parameters), len(frozen.parameters) + frozen.trained
    stages = ", ".join(map(str, frozen.stages))
    where = f"; no backward work in stage {stages}" if frozen.stages else ""
    return (
        f"{count} of {total} parameters are frozen ({bytes_text(frozen.bytes)}): "
        f"{bytes_text(frozen.gradient_bytes)} of gradients less on each device{where}"
    )


def short_modules(plan: Plan) -> tuple[str, tuple[tuple[str, ...], ...]]:
    """Return the path that all modules of a plan lie in, and the modules of each stage by the rest of their paths.

    A module that one stage has as a whole stands for those in it. A module that is itself the path keeps its last part.
    """
    distinct = {path for stage in plan.stages for path in stage.modules}
    levels = zip(*(path.split("/") for path in distinct), strict=False) if len(distinct) > 1 else ()
    shared = [names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, levels)]
    stages_of: dict[str, set[int]] = {}
    for k, stage in enumerate(plan.stages):
        for outer in itertools.chain.from_iterable(_within(path, len(shared)) for path in stage.modules):
            stages_of.setdefault(outer, set()).add(k)

    def short(path: str, k: int) -> str:
        outer = _within(path, len(shared))
        return next((name for name in outer if stages_of[name] == {k}), outer[-1])

    names = (dict.fromkeys(short(path, k) for path in stage.modules) for k, stage in enumerate(plan.stages))
    return "/".join(shared), tuple(map(tuple, names))


def _within(path: str, depth: int) -> list[str]:
    """Return the modules that a path lies in, outermost first, and itself, without its first parts."""
    parts = path.split("/")[depth:] or path.split("/")[-1:]
    return ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
