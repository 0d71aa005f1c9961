"""The storage of the stages of a pipeline at fixed levels, from ample to small.

    more bytes, fewer products again ◀── default storage ── less room ──▶ the smallest

A level is a room: bytes that no device may need more of. What a device needs besides what its stages store is taken
off, and each stage takes the fastest point of its front within its share of the rest. Which levels there are does not
depend on a budget: what XLA reserves for one, whatever was predicted, is the same for all budgets.

The last stage may also run its largest product in slices, logits as a rule, where that is faster within its room.
"""

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from jaxpipe.graph.allowed_codecs import Policy
from jaxpipe.graph.sharding_propagation import of_one_device, propagate
from jaxpipe.planning.storage.choose_swaps import Links, Targets, choose_targets
from jaxpipe.planning.storage.prices import Prices
from jaxpipe.planning.storage.program_front import RERUN_LEVELS, Front, Point
from jaxpipe.planning.storage.solving import GAP, Solving
from jaxpipe.planning.storage.storage_items import Items, stage_items
from jaxpipe.residuals.vjp_program import SlicedProgram, VJPProgram, in_slices
from jaxpipe.runtime.stages import Program, Stage, StashSwap, with_storage
from jaxpipe.schedules.swap_points import HOST, swap_points
from jaxpipe.schedules.table import StageNumber
from jaxpipe.sharding.mesh_axes import Specs
from jaxpipe.text.progress import tell
from jaxpipe.text.units import bytes_text


#: Levels between default storage and the smallest that is found without a solver.
ROOMS = 64

#: Levels below that, for devices that are estimated to need more than they do, and for swaps.
LOW_ROOMS = 16

#: Ways to store for other cuts: shares of the way from default storage to the smallest that is found without a solver.
WAYS = (0.0, 0.25, 0.5, 0.75, 1.0)

#: By way and stage the bytes that its device needs, and the seconds that are added to a micro-batch.
Ways = list[list[tuple[float, float]]]

#: Bytes by which a room may be too small because of rounding.
ROUNDING = 1e-3

#: By what share of what they need estimates of devices may be wrong.
INEXACT = 0.2


@dataclass(frozen=True)
class Fitted:
    """The way in which a stage's storage was chosen, as ``StagePlan`` has it."""

    storage: str = "default"
    added_seconds: float = 0.0
    storage_gap: float = 0.0
    solve_seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class StageLevels:
    """The levels of a program whose stages are compiled by themselves.

    Attributes:
      program: with default storage.
      besides: what each device needs besides points.
      fronts: the points of each stage.
      links: between the devices of stages, and to their host's memory if stashes may go there.
      solving: by whom, and how long.
    """

    program: Program
    besides: tuple[int, ...]
    fronts: tuple[Front, ...]
    links: Links
    solving: Solving
    _stages: dict[Point, Stage] = field(default_factory=dict, init=False)
    _programs: dict[tuple[Point, ...], Program] = field(default_factory=dict, init=False)

    @cached_property
    def rooms(self) -> tuple[float, ...]:
        """The bytes of each level, the most first: no device is estimated to need more."""
        default, least = float(max(self.default_bytes)), self.least
        ample = {self._total([front.with_level(k) for front in self.fronts]) for k in range(RERUN_LEVELS)}
        floor = (1 - INEXACT) * least
        if self._has_links:
            stages = zip(self.besides, self.program.schedule.stage_of, strict=True)
            at_once = [min(max(way.problem.base) for way in front.ways) for front in self.fronts]  # whatever is stored
            floor = max(besides + max(at_once[s] for s in here) for besides, here in stages)
        rooms = sorted((room for room in ample if room > default), reverse=True)
        rooms += [default - (default - least) * k / ROOMS for k in range(ROOMS + 1)]
        return *rooms, *(least - (least - floor) * k / LOW_ROOMS for k in range(1, LOW_ROOMS + 1) if floor < least)

    @cached_property
    def least(self) -> float:
        """The bytes of the smallest points that are found without a solver, on the fullest device."""
        return self._total([front.smallest for front in self.fronts])

    @property
    def default_place(self) -> int:
        """The place of the level with default storage."""
        return self.rooms.index(float(max(self.default_bytes)))

    @property
    def default_bytes(self) -> list[int]:
        """About what each device needs with default storage."""
        return list(map(sum, zip(self.besides, self._bytes(self._default), strict=True)))

    @cached_property
    def lowest_place(self) -> int:
        """The place of the level with the least bytes: with swaps, the lowest at which every stage has a point."""
        first = self.default_place + ROOMS if self._has_links else len(self.rooms) - 1
        points = functools.partial(self._found, exact=False)
        return bisect.bisect_left(self.rooms, True, first + 1, key=lambda room: None in points(room)) - 1

    def program_at(self, place: int) -> tuple[Program, tuple[Fitted, ...]]:
        """Return the program of a level, and how the storage of each stage was chosen."""
        room, solving = self.rooms[place], self.solving
        tell(
            f"{self.program.schedule.name}: choosing what {len(self.program.stages)} stage(s) store within "
            f"{bytes_text(room)}; solvers took {solving.spent:.1f} of {solving.limit:.1f} s"
        )
        points = self._within(room)
        if points not in self._programs:
            stages = tuple(map(self._stage_with, self.program.stages, points))
            unchanged = all(stage is other for stage, other in zip(stages, self.program.stages, strict=True))
            self._programs[points] = self.program if unchanged else replace(self.program, stages=stages)
        return self._programs[points], self._report(points)

    def alike(self, place: int, program: Program) -> range:
        """Return the places from a level on whose rooms hold what its program stores, which is what they have, too."""
        if self._has_links:  # what goes elsewhere depends on the room
            return range(place, place + 1)
        points = next(points for points, known in self._programs.items() if known is program)

        def is_smaller(room: float) -> bool:
            rows = zip(points, self.fronts, self._shares(room), strict=True)
            return any(point.bytes > share and point is not front.smallest for point, front, share in rows)

        return range(place, bisect.bisect_left(self.rooms, True, place + 1, key=is_smaller))

    def expected(self, room: float) -> tuple[Fitted, ...]:
        """Return about how storage would be chosen within a room; no solver is asked, and no program made."""
        return self._report(self._within(room, exact=False))

    @property
    def most_saved_seconds(self) -> float:
        """Seconds by which a step may be shorter than with default storage."""
        seconds = (front.default.seconds for front in self.fronts if front.reruns_products)
        return self.program.num_microbatches * sum(seconds)

    def besides_of(self, needs: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes that devices need besides points, if they need so many in all with default storage."""
        return tuple(n - size for n, size in zip(needs, self._bytes(self._default), strict=True))

    @cached_property
    def ways(self) -> Ways:
        """By stage the bytes that its device needs and the seconds that are added, for some ways to store."""
        ways = []
        for share in WAYS:
            rooms = [x.default.bytes - share * (x.default.bytes - x.smallest.bytes) for x in self.fronts]
            points = [x.within(room, exact=False) or x.smallest for x, room in zip(self.fronts, rooms, strict=True)]
            needs = [*map(sum, zip(self.besides, self._bytes(points), strict=True))]
            rows = zip(self.program.stage_numbers, points, self.fronts, strict=True)
            ways.append([(needs[self.program.device(s)], x.seconds - front.default.seconds) for s, x, front in rows])
        return ways

    def _within(self, room: float, *, exact: bool = True) -> tuple[Point, ...]:
        """Return the fastest point of each stage within a room of every device, or else the smallest.

        The stages of a device share its room as they would by default.
        """
        points = zip(self._found(room, exact=exact), self.fronts, strict=True)
        return tuple(front.smallest if point is None else point for point, front in points)

    def _found(self, room: float, *, exact: bool = True) -> list[Point | None]:
        targets = self._swap_targets(room)
        rows = zip(self.program.stage_numbers, self.fronts, self._shares(room), strict=True)
        return [front.within(share, targets.get(s), exact=exact) for s, front, share in rows]

    def _shares(self, room: float) -> list[int]:
        """Return what each stage may take of a room of its device."""
        shared, devices = self._bytes(self._default), map(self.program.device, self.program.stage_numbers)
        return [
            math.floor((room - self.besides[d]) * front.default.bytes / max(1, shared[d]) + ROUNDING)
            for d, front in zip(devices, self.fronts, strict=True)
        ]

    def _total(self, points: Sequence[Point]) -> float:
        """Return about what the fullest device needs with some points."""
        return float(max(map(sum, zip(self.besides, self._bytes(points), strict=True))))

    def _bytes(self, points: Sequence[Point]) -> list[int]:
        """Return the bytes of the points of each device together: all stashes, and one backward pass at a time."""
        total = []
        for stages in self.program.schedule.stage_of:
            here = [points[s] for s in stages]
            working = max(point.bytes - point.stash_bytes for point in here)
            total.append(sum(point.stash_bytes for point in here) + working)
        return total

    @property
    def _has_links(self) -> bool:
        """True if there is memory elsewhere, for stashes that leave their device."""
        program, links = self.program, self.links
        linked = links.has_peers or links.host_bytes > 0
        return linked and program.stage_replicas.is_single and program.schedule.has_backward

    def _swap_targets(self, room: float) -> dict[StageNumber, Targets]:
        """Find memory elsewhere for the stages of devices that need more than a room by default, the fullest first."""
        if not self._has_links:
            return {}
        program = self.program
        needs = [a + b for a, b in zip(self.besides, self._bytes(self._default), strict=True)]
        rooms = {program.schedule.stage(d, 0): room - needs[d] for d in program.device_numbers if needs[d] <= room}
        over = [d for d in program.device_numbers if needs[d] > room]
        chosen: dict[StageNumber, Targets] = {}
        for d in sorted(over, key=lambda d: -needs[d]):
            for s in map(StageNumber, program.schedule.stage_of[d]):
                points, held = swap_points(program.schedule, s), self.fronts[s].held
                if held is None or held <= points.home:
                    continue
                needed = (needs[d] - room) / (held - points.home)
                targets = choose_targets(self.links.reach(s, rooms), points.away, needed)
                if targets is None:
                    continue
                chosen[s] = targets
                size = min(targets.most_bytes, self.fronts[s].default.answer.outcome.stash_bytes)
                for target in targets.targets:
                    if target.stage != HOST:
                        rooms[target.stage] -= int(points.away * size * target.share)
        return chosen

    @cached_property
    def _default(self) -> tuple[Point, ...]:
        return tuple(front.default for front in self.fronts)

    def _stage_with(self, stage: Stage, point: Point) -> Stage:
        """Return a stage with the storage of a point; of the same point the same one."""
        if point.vjp is stage.vjp and point.targets is None:
            return stage
        if point not in self._stages:
            targets, tensors = point.targets, point.swapped
            swap = StashSwap(tensors, targets.targets) if targets is not None and tensors else None
            loss = self.program.objective.results[0]
            self._stages[point] = with_storage(stage, point.vjp, loss, point.way.slices, swap)
        return self._stages[point]

    def _report(self, points: Sequence[Point]) -> tuple[Fitted, ...]:
        """Return how the storage of each stage was chosen."""
        return tuple(
            Fitted(point.answer.status, point.seconds - front.default.seconds, point.answer.gap, sum(front.spent))
            if point is not front.default
            else Fitted()
            for point, front in zip(points, self.fronts, strict=True)
        )


def stage_levels(
    program: Program, besides: Sequence[int], prices: Prices, links: Links, solving: Solving, policy: Policy
) -> StageLevels:
    """Return the levels of a program with default storage; nothing is chosen yet.

    Args:
      program: with default storage.
      besides: what each device needs besides points.
      prices: what choices cost.
      links: between the devices of stages, and to their host's memory if stashes may go there.
      solving: by whom, and how long.
      policy: the codecs that stages may use.
    """
    fronts = []
    for s, stage in zip(program.stage_numbers, program.stages, strict=True):
        stays_apart = len(program.schedule.program_kinds[s][0]) == 1  # its stash leaves its forward program
        front = Front(
            vjp=stage.programs,
            sliced=sliced_programs(program, stage, policy),
            items_of=functools.partial(_items, program.specs, stage, prices, solving.items),
            price=prices.seconds,
            policy=policy,
            held=program.in_flight(s) if stays_apart else None,
            home=swap_points(program.schedule, s).home if stays_apart else 0,
            period=prices.period,
            slack=GAP * prices.period / prices.slow[s],
            solving=solving,
        )
        fronts.append(front)
    return StageLevels(program, tuple(besides), tuple(fronts), links, solving)


def sliced_programs(program: Program, stage: Stage, policy: Policy) -> SlicedProgram | None:
    """Return the programs of the last stage with its largest product in slices, if that can be."""
    is_last, on_one_device = stage is program.stages[-1], program.specs.submesh.size == 1
    if not (is_last and on_one_device and stage.is_trained and stage.fold is None):
        return None
    wrt, loss = stage.programs.backward_graph.wrt, program.objective.results[0]
    return in_slices(stage.graph, wrt, policy=policy, held=stage.used, seeds=[loss])


def _items(specs: Specs, stage: Stage, prices: Prices, known: dict[VJPProgram, Items], vjp: VJPProgram) -> Items:
    """Return the tensors that a program of a stage may store, as large as their parts on one of its devices."""
    if vjp in known:
        return known[vjp]
    graph, sized, shape = vjp.graph, None, specs.submesh.shape
    if specs.submesh.size > 1:
        split = propagate(graph, {t: specs.of_tensor(t) for t in graph.inputs}, shape).specs
        sized = replace(vjp.backward_graph, graph=of_one_device(graph, split, shape))
    known[vjp] = stage_items(vjp, prices, stage.used, {*stage.parameters, *stage.borrowed}, sized)
    return known[vjp]
