"""The plan: where each part of a model went, and what that is predicted to cost."""

import dataclasses
import hashlib
import itertools
import json
import math
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from rich.table import Table

from jaxpipe.errors import PartitionError
from jaxpipe.schedules.replicas import StageReplicas
from jaxpipe.schedules.swap_points import HOST
from jaxpipe.text.checked_json import Amount, Count, Positive, read_json
from jaxpipe.text.html_table import html_table
from jaxpipe.text.plain_table import PlainTable, table_text
from jaxpipe.text.units import bytes_text


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
      message_seconds: for one micro-batch, until what it sends on is there, and the cotangents that it sends back; 0
        where the timeline does not count them apart.
      recomputed: products, reductions and other operators of more than cheap arithmetic that the backward pass runs
        again in place of storing their results, by module path and name.
      slices: into how many the largest product is cut, logits as a rule, which are then never whole.
      storage: how it was chosen: ``"default"``, or within a budget ``"optimal"``, ``"gap"``, ``"time limit"``,
        ``"greedy"``, ``"lowest peak"`` or ``"fewer reruns"``.
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
    storage: str = "default"
    added_seconds: float = 0.0
    storage_gap: float = 0.0
    solve_seconds: Amount = 0.0
    weight_seconds: Amount = 0.0
    recomputed: tuple[str, ...] = ()
    slices: Count = 1
    message_seconds: tuple[Amount, Amount] = (0.0, 0.0)


@dataclass(frozen=True)
class BalanceRound:
    """One round of cutting a program and choosing its stages' storage (``jaxpipe.planning.balance_stages``).

    Attributes:
      cuts: the first operator of each stage but the first.
      stage_seconds: of one micro-batch, recomputation and codecs included.
      step_seconds: predicted.
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
class Plan:
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
        its warm-up; None if gradients are exchanged whole.
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
      compiled_each_device: bytes that XLA reserves on each device, once stage programs have been compiled.
      compiled_stage_memory: by stage, the same of its first device by component.
      axes: the mesh axes over which each stage is sharded, and their sizes. The devices of a stage are then the first
        ones of its groups.

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
    measured: str = dataclasses.field(default="", compare=False)

    @property
    def schedule_gap(self) -> float | None:
        """Return the share by which the step is over the bound for its schedule; None if there is no bound."""
        bound = self.schedule_bound_seconds
        return max(0.0, self.step_seconds / bound - 1) if bound else None  # no less, for their sums round apart

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
        file = read_json(text, _File, "The plan")
        plan = cls(**{field.name: getattr(file, field.name) for field in dataclasses.fields(cls)})
        counts = [len(stage.devices) for stage in plan.stages]
        if not counts or min(counts) < plan.replicas:
            raise PartitionError(
                f"the plan: replicas={plan.replicas} and stages on {counts} devices; there must be a stage, and every "
                "stage must have a device for each replica."
            )
        return plan

    def __str__(self) -> str:
        return table_text(self.__rich__())

    def _repr_html_(self) -> str:
        """Return what notebooks show."""
        return html_table(self.__rich__())

    def __rich__(self) -> Table:
        widths = self.stage_replicas.per_stage
        size = f"{self.replicas} replicas" if set(widths) <= {1} else f"{' + '.join(map(str, widths))} devices"
        size += "".join(f" x {axis} {count}" for axis, count in self.axes.items())
        title = (
            f"{len(self.stages)} stages x {size}, {self.num_microbatches} micro-batches of {self.microbatch_size}, "
            f"{self.schedule}"
        )
        table = PlainTable(title=title, title_justify="left", caption_justify="left")
        table.add_column("stage", justify="right")
        table.add_column("devices")
        prefix, modules = short_modules(self)
        table.add_column("modules")
        for name in ("forward", "backward", "parameters", "stash", "in flight", "sends on"):
            table.add_column(name, justify="right")
        for k, stage in enumerate(self.stages):
            table.add_row(
                str(k),
                ", ".join(map(str, stage.devices)),
                shorten(modules[k]),
                f"{1e3 * stage.forward_seconds:.2f} ms",
                f"{1e3 * stage.backward_seconds:.2f} ms",
                bytes_text(stage.parameter_bytes),
                bytes_text(stage.stash_bytes),
                f"{stage.in_flight}, {stage.away} away" if stage.away else str(stage.in_flight),
                bytes_text(stage.sent_bytes),
            )
        table.caption = "\n".join(_caption(self, prefix))
        return table


@dataclass(frozen=True)
class _File(Plan):
    """A plan as JSON has it."""

    predicted_bytes: int = 0  # type: ignore[assignment]


def _caption(plan: Plan, prefix: str) -> list[str]:
    """Return the lines below the table of a plan, whose modules are named inside ``prefix``."""
    limit = "" if plan.budget is None else f" of {bytes_text(plan.budget)}"
    limit += "" if plan.raised_from is None else f" (raised from {bytes_text(plan.raised_from)})"
    profile = f"{plan.profile} {plan.measured}" if plan.measured else f"{plan.profile} profile"
    gap = plan.schedule_gap
    than = "" if gap is None else f", at most {gap:.1%} longer than with any other order of the same work"
    lines = [
        f"step {1e3 * plan.step_seconds:.1f} ms ({profile}), bubble {plan.bubble_fraction:.1%}{than}",
        *(['one program for all devices (runtime="spmd")'] if plan.runtime == "spmd" else []),
        *_memory_lines(plan, limit),
        *_device_lines(plan),
    ]
    if prefix:
        lines.append(f"modules are named inside {prefix}")
    if plan.rates:
        lines.append(f"at the rates of {plan.rates}")
    if plan.host is not None:
        used = f"{bytes_text(plan.host.bytes)} of {bytes_text(plan.host.budget)} in the host's memory for each device"
        lines.append(f"the host's memory is not used: {plan.host.refused}" if plan.host.refused else used)
    if plan.frozen is not None:
        lines.append(_frozen_text(plan.frozen))
    if plan.exchange_bytes is not None:
        dense = bytes_text(max(plan.memory.get(name, 0) for name in ("parameters", "gradients")))
        lines.append(f"block-sparse exchange: {bytes_text(plan.exchange_bytes)} of {dense} sent in a step")
    if plan.staleness:
        behind = ", ".join(map(str, plan.staleness))
        lines.append(f"asynchronous updates: each stage is at most {behind} updates behind")
    if plan.per_stage:
        lines.append("the optimizer looks at each stage apart: other cuts give other updates")
    return [*lines, *plan.notes, *_storage_lines(plan)]


def _parts_text(memory: dict[str, int]) -> str:
    return ", ".join(f"{name} {bytes_text(n)}" for name, n in memory.items())


def _memory_lines(plan: Plan, limit: str) -> list[str]:
    """Return the bytes of a device: those that XLA reserves where the step is compiled, and those predicted."""
    predicted = f"{bytes_text(plan.predicted_bytes)}{limit} {plan.where}: {_parts_text(plan.memory)}"
    if plan.compiled_bytes is None:
        return [predicted]
    largest = max(plan.compiled_stage_memory, key=lambda memory: sum(memory.values()), default=None)
    parts = "" if largest is None else f": {_parts_text(largest)}"
    compiled = f"{bytes_text(plan.compiled_bytes)}{limit} {plan.where}, compiled{parts}"
    return [compiled, f"before it was compiled, {bytes_text(plan.predicted_bytes)} were predicted"]


def _device_lines(plan: Plan) -> list[str]:
    """Return a line for the devices of each stage, or of several on one, if they do not all need the same."""
    each, by_stage = plan.each_device, plan.stage_memory
    if plan.compiled_bytes is not None:
        each, by_stage = plan.compiled_each_device, plan.compiled_stage_memory
    if len(set(each)) < 2 or len(by_stage) < len(plan.stages):
        return []
    stages: dict[int, list[int]] = {}
    for k, stage in enumerate(plan.stages):
        stages.setdefault(stage.devices[0], []).append(k)
    rows = [(", ".join(map(str, numbers)), by_stage[numbers[0]]) for numbers in stages.values()]
    return [f"stage {listed}: {bytes_text(sum(memory.values()))}: {_parts_text(memory)}" for listed, memory in rows]


def _storage_lines(plan: Plan) -> list[str]:
    """Return what each stage stores under a budget, and what it keeps elsewhere; nothing by default."""
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

    A module that is itself this path keeps its last part.
    """
    distinct = {path for stage in plan.stages for path in stage.modules}
    levels = zip(*(path.split("/") for path in distinct), strict=False) if len(distinct) > 1 else ()
    shared = [names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, levels)]

    def short(path: str) -> str:
        parts = path.split("/")
        return "/".join(parts[len(shared) :]) or parts[-1]

    return "/".join(shared), tuple(tuple(map(short, stage.modules)) for stage in plan.stages)


def shorten(modules: tuple[str, ...], most: int = 4) -> str:
    """The first and the last modules of a long list."""
    if len(modules) <= most:
        return ", ".join(modules)
    first = max(1, most - 2)
    return f"{', '.join(modules[:first])}, ... ({len(modules) - first - 1} more), {modules[-1]}"
