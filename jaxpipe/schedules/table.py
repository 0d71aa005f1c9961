"""A schedule: which device works on which micro-batch of which of its stages in which tick."""

import enum
import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, NewType

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.stage_map import StageMap, stage_map
from jaxpipe.text.printed import PlainTable, html_table
from jaxpipe.text.units import whole_number


if TYPE_CHECKING:
    from jaxpipe.schedules.simulate import Seconds, Timeline


#: The number of a stage, in the order of the program.
StageNumber = NewType("StageNumber", int)

#: The position of a device along the stage axis; where several share a stage, of all of them. With several chunks a
#: device has as many stages, and the two numbers differ.
DeviceNumber = NewType("DeviceNumber", int)


class Kind(enum.Enum):
    """The kinds of work on a micro-batch: backward as a whole, or in two parts."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    __hash__ = object.__hash__  # that of Enum hashes a name, and tables of thousands of actions look kinds up


#: The order of actions within a tick.
KINDS = tuple(Kind)

#: Work in one program.
Kinds = tuple[Kind, ...]

#: What the work of each kind is called.
KIND_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, inputs",
    Kind.BACKWARD_WEIGHT: "backward, weights",
}

#: Cells of a table, devices times ticks: 256 devices take 8,192 ticks.
MOST_CELLS = 2**21


class Action(NamedTuple):
    """One piece of work. The stages of a device are its chunks, as ``Schedule.stage_of`` lists them."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}" + (f"'{self.chunk}" if self.chunk else "")


class Step(NamedTuple):
    """An action of a device, and what it waits for.

    Attributes:
      device: that does it.
      action: what it does.
      work: the number of its kind of work in its stage, ``4 * stage + KINDS.index(kind)``.
      result: the number of its result, ``work * num_microbatches + microbatch``.
      needs: the results that it reads, each with its way: ``2 * s`` from stage ``s`` to the next, ``2 * s + 1`` back to
        it, -1 on a device.
    """

    device: int
    action: Action
    work: int
    result: int
    needs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Schedule:
    """A table of work.

    All devices walk through the ticks in step. Within a tick a device does at most one action of each kind, forward
    before backward; what a tick sends to a neighbor arrives for the next tick. Kinds that no device does both of in
    one tick share a phase: all devices do the work of a phase at the same time, then the next (``phases``). Run free,
    devices keep the order of their actions and wait for nothing but what they need.

    Attributes:
      name: what it is called.
      num_devices: devices of the pipeline.
      num_microbatches: of a step.
      ticks: ``ticks[t][s]`` are the actions of device ``s`` in tick ``t``.
      num_chunks: stages on each device.
      versions: ``versions[s][j]`` updates are in the weights that stage ``s`` uses for micro-batch ``j``, if updates
        are asynchronous (``jaxpipe.schedules.asynchronous``); None if they come at the end.
      group: micro-batches per update, if updates are asynchronous.
      keeps_versions: backward work uses these weights, too; otherwise the newest.
      frozen: so many stages, the first ones, only work forward: nothing in them is trained, and they keep no stash. A
        device then goes on from forward to backward work in a tick without waiting for others.
      stage_of: ``stage_of[d][c]`` is the stage that is chunk ``c`` of device ``d``; left out: ``c * num_devices + d``.
        Between consecutive stages of one device nothing is sent.

    Raises:
      ScheduleError: if ``stage_of`` does not have every stage once.

    Example:
      >>> from jaxpipe.schedules import one_f_one_b
      >>> print(one_f_one_b(2, 2))
      tick      0  1  2  3  4  5
      device 0  F0 F1    B0    B1
      device 1     F0 B0 F1 B1
    """

    name: str
    num_devices: int
    num_microbatches: int
    ticks: tuple[tuple[tuple[Action, ...], ...], ...]
    num_chunks: int = 1
    versions: tuple[tuple[int, ...], ...] | None = None
    group: int = 1
    frozen: int = 0
    stage_of: StageMap = ()
    keeps_versions: bool = True

    def __post_init__(self) -> None:
        stages = stage_map(self.name, self.stage_of, self.num_devices, self.num_chunks)
        object.__setattr__(self, "stage_of", stages)

    def when(self, stage: int, kind: Kind, chunk: int = 0) -> dict[int, int]:
        """The tick in which a device works on each micro-batch of a chunk."""
        return dict(self._ticks_of.get((stage, kind, chunk), {}))

    @cached_property
    def _ticks_of(self) -> dict[tuple[int, Kind, int], dict[int, int]]:
        """The tick of each micro-batch, by device, kind and chunk."""
        ticks: dict[tuple[int, Kind, int], dict[int, int]] = defaultdict(dict)
        for t, tick in enumerate(self.ticks):
            for device, actions in enumerate(tick):
                for action in actions:
                    ticks[device, action.kind, action.chunk][action.microbatch] = t
        return dict(ticks)

    def stage_ticks(self, stage: int, kind: Kind) -> dict[int, int]:
        """The tick in which a stage works on each micro-batch; none before the first stage and behind the last."""
        return self.when(self.device(stage), kind, self.chunk(stage)) if 0 <= stage < self.total_stages else {}

    @cached_property
    def device_numbers(self) -> tuple[DeviceNumber, ...]:
        """Numbers of the devices."""
        return tuple(map(DeviceNumber, range(self.num_devices)))

    def device(self, stage: int) -> DeviceNumber:
        """Return the device of a stage."""
        return self._places[stage][0]

    def chunk(self, stage: int) -> int:
        """Return which chunk of its device a stage is."""
        return self._places[stage][1]

    @cached_property
    def _places(self) -> tuple[tuple[DeviceNumber, int], ...]:
        """Device and chunk of every stage."""
        places = {s: (DeviceNumber(d), c) for d, row in enumerate(self.stage_of) for c, s in enumerate(row)}
        return tuple(places[s] for s in range(self.total_stages))

    @cached_property
    def apart(self) -> tuple[bool, ...]:
        """By stage but the last, True if the next one is on another device, so that messages go between them."""
        return tuple(before != after for (before, _), (after, _) in itertools.pairwise(self._places))

    def stage(self, device: int, chunk: int) -> StageNumber:
        """Return the stage that is a chunk of a device."""
        return StageNumber(self.stage_of[device][chunk])

    @property
    def takes_turns(self) -> bool:
        """True if stage ``s`` is on device ``s % num_devices``."""
        return self.stage_of == stage_map(self.name, None, self.num_devices, self.num_chunks)

    @property
    def total_stages(self) -> int:
        """Stages on all devices."""
        return self.num_devices * self.num_chunks

    @cached_property
    def phases(self) -> tuple[tuple[Kind, ...], ...]:
        """The kinds of work in a tick, those together that wait for each other at the end only.

        Example:
          >>> from jaxpipe.schedules import one_f_one_b
          >>> [[kind.value for kind in phase] for phase in one_f_one_b(2, 4).phases]
          [['F', 'B']]
        """
        together = [{a.kind for a in actions} for tick in self.ticks for actions in tick]
        used = [kind for kind in KINDS if any(kind in kinds for kinds in together)]
        if self.frozen:
            return (tuple(used),)
        phases: list[list[Kind]] = []
        for kind in used:
            if not phases or any(kind in kinds and not kinds.isdisjoint(phases[-1]) for kinds in together):
                phases.append([])
            phases[-1].append(kind)
        return tuple(map(tuple, phases))

    @property
    def backward_kind(self) -> Kind:
        """The work that hands cotangents on: backward as a whole, or its first part."""
        return Kind.BACKWARD_INPUT if self.splits_backward else Kind.BACKWARD

    @cached_property
    def program_kinds(self) -> list[list[Kinds]]:
        """By stage, which kinds of its work are one program each, where each stage has programs of its own.

        The last stage goes on with the backward pass at once where its device does nothing in between: its stash then
        never leaves the program.
        """
        kinds: list[list[Kinds]] = [
            [(kind,) for kind in self.kinds if self.stage_ticks(s, kind)] for s in range(self.total_stages)
        ]
        device, chunk = self._places[-1]
        order, back = list(self.order(device)), self.backward_kind
        following = dict(zip(order, [*order[1:], None], strict=True))
        forward = (action for action in order if action.kind is Kind.FORWARD and action.chunk == chunk)
        if all(following[action] == action._replace(kind=back) for action in forward):
            kinds[-1][:2] = [(Kind.FORWARD, back)]
        return kinds

    def is_trained(self, device: int, chunk: int = 0) -> bool:
        """True if a stage of a device works backward, too."""
        return self.stage(device, chunk) >= self.frozen

    def order(self, stage: int) -> Iterator[Action]:
        """The actions of a device, one after the other."""
        return (a for tick in self.ticks for a in tick[stage])

    def in_flight(self, stage: int, chunk: int | None = None, since: Kind = Kind.FORWARD) -> int:
        """The most stashes that a device holds at the same time, of all its chunks or of one.

        With ``since=Kind.BACKWARD_INPUT`` those of micro-batches whose backward work for weights waits.
        """
        if not self.has_backward:
            return 0
        last = self.kinds[-1]
        kinds = [a.kind for a in self.order(stage) if chunk in (None, a.chunk) and self.is_trained(stage, a.chunk)]
        return max(itertools.accumulate(((kind is since) - (kind is last) for kind in kinds), initial=0))

    @cached_property
    def most_in_flight(self) -> tuple[int, ...]:
        """By device, the most stashes that it holds at the same time."""
        return tuple(map(self.in_flight, range(self.num_devices)))

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The actions of all devices, each behind what it needs.

        Raises:
          ScheduleError: if an action waits for one behind it.
        """
        orders = [list(self.order(d)) for d in range(self.num_devices)]
        position, ready = [0] * self.num_devices, deque(range(self.num_devices))
        done = bytearray(len(KINDS) * self.total_stages * self.num_microbatches)
        waiting: dict[int, list[int]] = defaultdict(list)
        steps: list[Step] = []
        while ready:
            d = ready.popleft()
            for action in itertools.islice(orders[d], position[d], None):
                step = self._step(d, action)
                missing = next((need for need, _ in step.needs if not done[need]), None)
                if missing is not None:
                    waiting[missing].append(d)
                    break
                done[step.result] = True
                steps.append(step)
                position[d] += 1
                if step.result in waiting:
                    ready += waiting.pop(step.result)
        stuck = next((d for d in range(self.num_devices) if position[d] < len(orders[d])), None)
        if stuck is not None:
            raise ScheduleError(
                f"{self.name}: deadlock: device {stuck} cannot run {orders[stuck][position[stuck]]}, since its "
                "dependency comes later in its own list, or behind an action that waits."
            )
        return tuple(steps)

    def _step(self, device: int, action: Action) -> Step:
        kind, j, chunk = action
        work, m = len(KINDS) * self.stage_of[device][chunk] + KINDS.index(kind), self.num_microbatches
        return Step(device, action, work, work * m + j, tuple((need * m + j, way) for need, way in self._needs[work]))

    @cached_property
    def _needs(self) -> list[list[tuple[int, int]]]:
        """By number of work, the numbers of the work that it needs, each with the way of the result."""
        needs: list[list[tuple[int, int]]] = []
        for stage, kind in itertools.product(range(self.total_stages), KINDS):
            needs.append([])
            for needed, source in needed_work(kind, stage, self.total_stages):
                sent = source != stage and self.apart[min(source, stage)]
                way = 2 * min(source, stage) + (source > stage) if sent else -1
                needs[-1].append((len(KINDS) * source + KINDS.index(needed), way))
        return needs

    @property
    def staleness(self) -> tuple[int, ...]:
        """By device, how many updates its weights lack at most when a gradient is computed with them.

        Where no versions are kept, how many updates there are at most between forward and backward work.
        """
        if self.versions is None:
            return (0,) * self.num_devices
        return tuple(max(j // self.group - v for j, v in enumerate(row)) for row in self.versions)

    @cached_property
    def has_backward(self) -> bool:
        """Return whether it trains, rather than only computes forward."""
        return any(kind is not Kind.FORWARD for _, kind, _ in self._ticks_of)

    @cached_property
    def splits_backward(self) -> bool:
        """Return whether backward work comes in two parts."""
        return any(kind is Kind.BACKWARD_INPUT for _, kind, _ in self._ticks_of)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of work on a micro-batch, in their order."""
        backward = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if self.splits_backward else (Kind.BACKWARD,)
        return (Kind.FORWARD, *(backward if self.has_backward else ()))

    def simulate(
        self,
        *,
        forward: "Seconds",
        backward: "Seconds | None" = None,
        backward_input: "Seconds | None" = None,
        backward_weight: "Seconds | None" = None,
        communication: float | Sequence[tuple[float, float]] = 0.0,
        begins: Mapping[int, float] | None = None,
        lockstep: bool = False,
    ) -> "Timeline":
        """Run it on paper.

        Free, a device begins its next action as soon as it is done with the last and all that the action needs has
        arrived. In step, all devices do the work of one phase of a tick before the next begins (``phases``), so
        that it takes as long as the slowest device that has any; then neighbors exchange what they computed.

        Args:
          forward: seconds of one micro-batch.
          backward: the same, for the whole of the backward work; or
          backward_input, backward_weight: for its two parts. A schedule that does not split takes their sum.
          communication: seconds from one device to another, for all, or for each stage and the next, forward and back.
            A message leaves when its work is done and holds nobody up but whoever waits for it. In step: of the
            exchange after a tick.
          begins: running free, when an action may begin at the earliest, by the number of its result (``Step``).
          lockstep: all devices walk through the ticks in step.

        Raises:
          ScheduleError: if costs do not fit the schedule, or an action waits for one behind it.

        Example:
          >>> from jaxpipe.schedules import one_f_one_b
          >>> one_f_one_b(4, 16).simulate(forward=1, backward=2).makespan
          57.0
        """
        from jaxpipe.schedules.simulate import Timeline, both_parts, run_free, run_in_step, stage_links, stage_seconds

        if (backward_input is None) != (backward_weight is None) or (backward is None) == (backward_input is None):
            raise ScheduleError("simulate takes either backward=, or backward_input= and backward_weight=.")
        whose, given = f"{self.name} has", (forward, backward, backward_input, backward_weight)
        costs = stage_seconds(given, self.total_stages, whose)
        if backward is None:
            costs[Kind.BACKWARD] = both_parts(costs)
        elif self.splits_backward:
            raise ScheduleError(f"{self.name} splits the backward work; pass backward_input= and backward_weight=.")
        if not lockstep:
            spans, after = run_free(self, costs, stage_links(communication, self.total_stages, whose), begins), 0.0
        elif isinstance(communication, Sequence):
            raise ScheduleError(
                "communication= by stage is for devices that run free: pass lockstep=False, or a number."
            )
        else:
            after = communication if self.num_devices > 1 else 0.0
            spans = run_in_step(self, costs, after)
        end = max((span.end for span in spans), default=0.0) + after
        return Timeline(tuple(spans), float(end), self.most_in_flight)

    def validate(self) -> None:
        """Check that every stage does all its work once and that nothing is needed before it is there.

        Raises:
          ScheduleError: naming the stage, the micro-batch and the ticks.
        """
        self._check_ticks()
        self.check_work()
        for stage, kind in itertools.product(range(self.total_stages), self.kinds):
            for needed, source in needed_work(kind, stage, self.total_stages):
                self._check_order(kind, stage, needed, source)
        if self.versions is not None:
            self._check_versions(self.versions)

    def _check_ticks(self) -> None:
        """Check that a tick holds at most one action of each kind for a device, in the order of the kinds."""
        kinds = self.kinds
        for tick in self.ticks:
            if len(tick) != self.num_devices:
                raise ScheduleError(f"{self.name}: a tick has {len(tick)} devices, expected {self.num_devices}.")
            for s, actions in enumerate(tick):
                places = [kinds.index(a.kind) if a.kind in kinds else -1 for a in actions]
                if -1 in places or places != sorted(set(places)):
                    raise ScheduleError(
                        f"{self.name}: device {s} does {' '.join(map(str, actions))} in one tick; a tick holds at most "
                        f"one each of {', '.join(k.value for k in kinds)}, in this order."
                    )

    def check_work(self) -> None:
        """Raise ``ScheduleError`` unless each device does each micro-batch of its stages once, in all kinds of work."""
        if not 0 <= self.frozen < self.total_stages:
            raise ScheduleError(
                f"{self.name}: frozen={self.frozen}; at least the last of {self.total_stages} stages works backward."
            )
        for s, kind in itertools.product(range(self.num_devices), self.kinds):
            done = sorted((action.chunk, action.microbatch) for action in self.order(s) if action.kind is kind)
            working = [c for c in range(self.num_chunks) if kind is Kind.FORWARD or self.is_trained(s, c)]
            if done != list(itertools.product(working, range(self.num_microbatches))):
                chunked = self.num_chunks > 1
                work = f"(chunk, micro-batch) {done}" if chunked else f"micro-batches {[j for _, j in done]}"
                everything = f"each of 0..{self.num_microbatches - 1} once{' in every chunk' if chunked else ''}"
                rule = everything if working else f"none, as the first {self.frozen} stages are frozen"
                raise ScheduleError(f"{self.name}: device {s} does {kind.value} of {work}; it must do {rule}.")

    def _check_versions(self, versions: Sequence[Sequence[int]]) -> None:
        """Weights exist when they are used, and updates follow the order of the micro-batches."""
        if self.num_chunks > 1 or not self.takes_turns or self.splits_backward or not self.has_backward:
            raise ScheduleError(
                f"{self.name}: asynchronous updates need one stage on each device and backward work that is not split, "
                "with stage s on device s."
            )
        if self.group < 1 or self.num_microbatches % self.group:
            raise ScheduleError(f"{self.name}: group={self.group} does not divide {self.num_microbatches}.")
        if [len(row) for row in versions] != [self.num_microbatches] * self.num_devices:
            raise ScheduleError(f"{self.name}: versions must have a number for each stage and micro-batch.")
        for s, row in enumerate(versions):
            forward, backward = self.when(s, Kind.FORWARD), self.when(s, Kind.BACKWARD)
            order = sorted(backward, key=backward.__getitem__)
            if order != sorted(order):
                raise ScheduleError(f"{self.name}: stage {s} updates weights by micro-batches in the order {order}.")
            for j, version in enumerate(row):
                done = sum(tick < forward[j] for tick in backward.values()) // self.group
                if not 0 <= version <= done:
                    raise ScheduleError(
                        f"{self.name}: stage {s} uses weights with {version} updates for micro-batch {j}, but has done "
                        f"{done} when F{j} begins, in tick {forward[j]}."
                    )

    def _check_order(self, kind: Kind, stage: int, needed: Kind, source: int) -> None:
        """Check that a stage's work of one kind comes after another stage's of another kind."""
        earlier, gap = self.stage_ticks(source, needed), int(self.device(stage) != self.device(source))
        for j, tick in self.stage_ticks(stage, kind).items():
            if tick < earlier[j] + gap:
                raise ScheduleError(
                    f"{self.name}: {kind.value} of stage {stage} for micro-batch {j} is in tick {tick}, but it needs "
                    f"{needed.value} of stage {source}, which is in tick {earlier[j]}; it may start in tick "
                    f"{earlier[j] + gap}."
                )

    def _rows(self) -> list[list[str]]:
        """Return the table with a row for each device, and a column for each tick."""
        rows = ([f"device {s}", *(" ".join(map(str, tick[s])) for tick in self.ticks)] for s in range(self.num_devices))
        return [["tick", *map(str, range(len(self.ticks)))], *rows]

    def _repr_html_(self) -> str:
        """Return the table as HTML, for notebooks."""
        first, *rows = self._rows()
        table = PlainTable(*first, title=self.name)
        for row in rows:
            table.add_row(*row)
        return html_table(table)

    def __str__(self) -> str:
        rows = self._rows()
        first = max(len(name) for name, *_ in rows)
        width = max((len(cell) for _, *cells in rows for cell in cells), default=0)
        lines = (" ".join([f"{name:{first + 1}}", *(cell.ljust(width) for cell in cells)]) for name, *cells in rows)
        return "\n".join(map(str.rstrip, lines))


def needed_work(kind: Kind, stage: int, num_stages: int) -> tuple[tuple[Kind, int], ...]:
    """Return the work of the same micro-batch, by kind and stage, that work of a stage needs."""
    if kind is Kind.FORWARD:
        return ((kind, stage - 1),) if stage else ()
    if kind is Kind.BACKWARD_WEIGHT:
        return ((Kind.BACKWARD_INPUT, stage),)
    return ((Kind.FORWARD, stage), *(((kind, stage + 1),) if stage + 1 < num_stages else ()))


def without_backward(schedule: Schedule, frozen: int) -> Schedule:
    """Leave out of a schedule the backward work of the first ``frozen`` stages.

    One whose weights change between micro-batches stays as it is: the work is empty then, but an update follows it.

    Example:
      >>> from jaxpipe.schedules import one_f_one_b
      >>> print(without_backward(one_f_one_b(3, 2), 2))
      tick      0  1  2  3  4  5
      device 0  F0 F1
      device 1     F0 F1
      device 2        F0 B0 F1 B1
    """
    if not frozen or schedule.versions is not None:
        return schedule
    trimmed = replace(schedule, frozen=frozen)
    ticks = (
        tuple(
            tuple(a for a in actions if a.kind is Kind.FORWARD or trimmed.is_trained(device, a.chunk))
            for device, actions in enumerate(tick)
        )
        for tick in schedule.ticks
    )
    return replace(trimmed, ticks=tuple(tick for tick in ticks if any(tick)))


def check_cells(name: str, num_devices: int, num_ticks: int) -> None:
    """Raise ``ScheduleError`` if a table of this size has more than ``MOST_CELLS``."""
    if num_devices * num_ticks > MOST_CELLS:
        raise ScheduleError(
            f"{name}: {num_devices} devices times {num_ticks} ticks are {num_devices * num_ticks} cells; a schedule "
            f"has at most {MOST_CELLS}. Use fewer micro-batches."
        )


def check_size(num_devices: int, num_microbatches: int) -> None:
    """Raise ``ScheduleError`` unless both are whole numbers above 0."""
    for name, value in (("num_devices", num_devices), ("num_microbatches", num_microbatches)):
        whole_number(value, name, ScheduleError)
    if num_devices < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"A schedule got num_devices={num_devices}, num_microbatches={num_microbatches}; both must be at least 1."
        )
