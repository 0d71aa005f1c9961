"""Storage that keeps every device of a pipeline of stage programs within a memory budget.

    front of each stage ──pick within budget - all else on the device──▶ predicted bytes of each device ──fits──▶ done
                               ▲            all else is what was predicted besides            │ over
                               └──────────────────────────────────────────────────────────────┘

The points of a front know the stashes and what is computed again; what else a device needs is read off the prediction
for the stage programs.

The last stage may also run its largest product in slices, logits as a rule, where that is faster within the budget.
"""

# More than 15 of our modules: what a stage stores is priced, chosen and swapped by modules of their own.
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxpipe.graph.allowed_codecs import FAST, Policy
from jaxpipe.graph.sharding_propagation import of_one_device, propagate
from jaxpipe.planning.storage.choose_swaps import Link, Targets, choose_targets
from jaxpipe.planning.storage.prices import Prices
from jaxpipe.planning.storage.program_front import GAP, HIGHER_PEAKS, Front, Point, Solving, Way
from jaxpipe.planning.storage.storage_items import Items, stage_items
from jaxpipe.residuals.backward_graph import BackwardGraph
from jaxpipe.residuals.sliced_program import in_slices
from jaxpipe.residuals.vjp_program import VJPProgram
from jaxpipe.runtime.program import Program
from jaxpipe.runtime.stages import Stage, with_storage
from jaxpipe.runtime.stash_swap import StashSwap
from jaxpipe.schedules.joined_work import program_kinds
from jaxpipe.schedules.swap_points import HOST, swap_points
from jaxpipe.schedules.table import DeviceNumber, StageNumber
from jaxpipe.text.progress import tell
from jaxpipe.text.units import bytes_text


#: How often points are picked, each time with what the last ones need besides.
MOST_ROUNDS = 4

#: By what share of a budget predictions may be wrong.
INEXACT = 0.1


@dataclass(frozen=True)
class Fitted:
    """The way in which a stage's storage was chosen.

    Attributes:
      status: ``"default"``, or that of an ``Answer``.
      added_seconds: of a micro-batch, over the default plan.
      gap: by what share of the time for codecs and recomputation a better choice may be faster.
      solve_seconds: that all solutions for this stage took.
    """

    status: str = "default"
    added_seconds: float = 0.0
    gap: float = 0.0
    solve_seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class _Picked:
    """A point of each stage, their program, and predicted bytes by device."""

    points: tuple[Point, ...]
    program: Program
    needs: Sequence[int]


class StageFitter:
    """Storage for a program whose stages are compiled by themselves, within one budget after another."""

    def __init__(
        self,
        program: Program,
        measure: Callable[[Program], Sequence[int]],
        held: Sequence[int],
        prices: Prices,
        solving: Solving,
        period: float = 0.0,
        policy: Policy = FAST,
    ):
        """Nothing is done yet.

        Args:
          program: with default storage.
          measure: predicted bytes of each device along the stage axis.
          held: about what each device needs besides points.
          prices: what choices cost.
          solving: by whom, and how long.
          period: seconds of a micro-batch on the slowest stage, with which swaps overlap.
          policy: the codecs that stages may use.
        """
        self.program, self._measure, self._prices, self._solving = program, measure, prices, solving
        self.beyond = list(held)  # the bytes of each device besides points; then those of the last points
        self._period, self._policy = period, policy
        self._known: dict[tuple[Point, ...], _Picked] = {}
        self._stages: dict[Point, Stage] = {}

    def within(self, budget: int) -> tuple[Program, tuple[Fitted, ...]] | None:
        """Return the program with the fastest storage of predicted bytes within a budget; None if none is found.

        What a device needs besides its points is corrected from round to round, until no more than ``GAP`` of a step
        can be won by it.
        """
        beyond = self.beyond
        if any(beyond[d] + self._least_base(d) > (1 + INEXACT) * budget for d in self.program.device_numbers):
            return None
        targets, time = self._swap_targets(budget), self._solving.time
        slack = GAP * self._period * self.program.num_microbatches
        best, now = None, None
        for number in range(MOST_ROUNDS):
            tell(
                f"{self.program.schedule.name}: choosing what {len(self.program.stages)} stage(s) store within "
                f"{bytes_text(budget)}, round {number + 1}; solvers took {time.spent:.1f} of {time.limit:g} s"
            )
            points = self._points_within([budget - n for n in beyond], targets)
            if best is not None and self._added(points) >= self._added(best.points) - slack:
                break
            now = self._picked(points)
            fits = max(now.needs) <= budget
            if fits and (best is None or self._added(points) < self._added(best.points)):
                best = now
            if fits and self._added(points) + self.most_saved_seconds <= slack:
                break
            needed = self._beyond(now)
            if needed == beyond or (fits and all(map(operator.ge, needed, beyond))):
                break
            # What turns out to be needed besides counts; where all fits, it may also be less than was thought.
            beyond = needed if fits or not number else list(map(max, needed, beyond))
        assert now is not None
        self.beyond = self._beyond(now)
        best = best or self._with_smallest(now, budget)
        return None if best is None else (best.program, self._report(best.points))

    def expected(self, budget: int) -> tuple[Fitted, ...]:
        """Return how storage would be chosen within a budget if ``beyond`` were right; no program is made for it."""
        return self._report(self._points_within([budget - n for n in self.beyond], {}))

    def _beyond(self, picked: _Picked) -> list[int]:
        """Return the bytes that each device needs beyond those of its points."""
        return [need - known for need, known in zip(picked.needs, self._bytes(picked.points), strict=True)]

    @property
    def most_saved_seconds(self) -> float:
        """Seconds by which a step may be shorter than with default storage."""
        seconds = (front.default.seconds for front in self._fronts if front.reruns_products)
        return self.program.num_microbatches * sum(seconds)

    @cached_property
    def smallest(self) -> tuple[Program, tuple[Fitted, ...]]:
        """The program with the least predicted bytes on its fullest device. It does not depend on any budget."""
        tell(f"{self.program.schedule.name}: looking for the smallest plan")
        return self._smallest.program, self._report(self._smallest.points)

    @cached_property
    def _smallest(self) -> _Picked:
        return self._smallest_on(self.program.device_numbers)

    def _smallest_on(self, devices: Sequence[DeviceNumber]) -> _Picked:
        """Return default storage, but on some devices points with as little memory as is found.

        Where the smallest point does not make the program smaller, of which the front knows a part, larger ones may.
        """
        default = self._default
        points, left = list(default.points), list(devices)
        for part in (0.0, *HIGHER_PEAKS):
            stages = [s for d in left for s in self._stages_of(d)]
            tried = self._picked([self._fronts[s].small(part) if s in stages else p for s, p in enumerate(points)])
            smaller = [d for d in left if tried.needs[d] < default.needs[d]]
            for s in (s for d in smaller for s in self._stages_of(d)):
                points[s] = tried.points[s]
            left = [d for d in left if d not in smaller]
            if not left:
                break
        return self._picked(points)

    @cached_property
    def most_smaller(self) -> int:
        """Bytes that a choice without swaps may take less than the smallest plan at most, as the problems count them.

        This is of the device that needs most.
        """
        needs = self._smallest.needs
        stages = self._stages_of(max(self.program.device_numbers, key=lambda d: needs[d]))
        return sum(max(0, self._smallest.points[s].bytes - self._fronts[s].least_bytes) for s in stages)

    def _with_smallest(self, now: _Picked, budget: int) -> _Picked | None:
        """Return the smallest points on the devices that are over the budget, and what is picked on others."""
        over = {d for d in self.program.device_numbers if now.needs[d] > budget}
        smallest = self._smallest_on(sorted(over)).points
        pairs = zip(self.program.stage_numbers, smallest, now.points, strict=True)
        mixed = self._picked([small if self.program.device(s) in over else point for s, small, point in pairs])
        return mixed if max(mixed.needs) <= budget else None

    def _points_within(self, rooms: Sequence[float], targets: Mapping[StageNumber, Targets]) -> list[Point]:
        """Return the fastest point of each stage within the room of its device, or else the smallest.

        The stages of a device share its room as they would by default.
        """
        shared = self._bytes([front.default for front in self._fronts])
        points = []
        for s, front in zip(self.program.stage_numbers, self._fronts, strict=True):
            d = self.program.device(s)
            room = rooms[d] * front.default.bytes / max(1, shared[d])
            points.append(front.within(room, targets.get(s)) or front.small(0.0))
        return points

    def _bytes(self, points: Sequence[Point]) -> list[int]:
        """Return the bytes of the points of each device together: all stashes, and one backward pass at a time."""
        total = []
        for d in self.program.device_numbers:
            here = [points[s] for s in self._stages_of(d)]
            working = max(point.bytes - point.stash_bytes for point in here)
            total.append(sum(point.stash_bytes for point in here) + working)
        return total

    def _least_base(self, d: DeviceNumber) -> int:
        """Return the bytes that the backward passes of a device's stages need at once whatever is stored."""
        return max(min(max(way.items.problem.base) for way in self._fronts[s].ways) for s in self._stages_of(d))

    def _stages_of(self, d: DeviceNumber) -> list[StageNumber]:
        return [s for s in self.program.stage_numbers if self.program.device(s) == d]

    def _swap_targets(self, budget: int) -> dict[StageNumber, Targets]:
        """Find memory elsewhere for the stages of devices that are over the budget by default, the fullest first."""
        program, links = self.program, self._prices.links
        linked = links.host_bytes or any(map(any, links.bandwidth))
        if not linked or not program.stage_replicas.is_single or not program.schedule.has_backward:
            return {}
        needs = self._default.needs
        over = [d for d in program.device_numbers if needs[d] > budget]
        apart = [d for d in program.device_numbers if d not in over]
        rooms = {program.schedule.stage(d, 0): budget - needs[d] for d in apart}
        chosen: dict[StageNumber, Targets] = {}
        for d in sorted(over, key=lambda d: -needs[d]):
            for s in self._stages_of(d):
                points, held = swap_points(program.schedule, s), self._fronts[s].held
                if held is None or held <= points.home:
                    continue
                reach = {t: Link(links.bandwidth[s][t], links.latency[s][t], n) for t, n in rooms.items()}
                if links.host_bytes:
                    reach[HOST] = Link(links.host_bandwidth[s], links.host_latency[s], links.host_bytes)
                targets = choose_targets(reach, points.away, (needs[d] - budget) / (held - points.home))
                if targets is None:
                    continue
                chosen[s] = targets
                size = min(targets.most_bytes, self._fronts[s].default.answer.outcome.stash_bytes)
                for target in targets.targets:
                    if target.stage != HOST:
                        rooms[target.stage] -= int(points.away * size * target.share)
        return chosen

    @cached_property
    def _fronts(self) -> tuple[Front, ...]:
        """The front of each stage."""
        return tuple(map(self._front, self.program.stage_numbers))

    def _front(self, s: StageNumber) -> Front:
        program = self.program
        stays_apart = len(program_kinds(program.schedule, s)[0]) == 1  # its stash leaves its forward program
        held = program.in_flight(program.device(s), s // program.num_devices)
        return Front(
            ways=self._ways(s),
            items_of=functools.partial(self._items, program.stages[s]),
            held=held if stays_apart else None,
            home=swap_points(program.schedule, s).home if stays_apart else 0,
            period=self._period,
            slack=GAP * self._period / self._prices.slow[s],
            solving=self._solving,
            policy=self._policy,
        )

    def _ways(self, s: StageNumber) -> tuple[Way, ...]:
        """Return a stage's program as it is, and of the last stage with its largest product in slices if it can be."""
        stage, program = self.program.stages[s], self.program
        assert stage.vjp is not None
        way = Way(stage.vjp, self._items(stage, stage.vjp))
        is_last, on_one_device = s == len(program.stages) - 1, program.specs.submesh.size == 1
        if not is_last or not on_one_device or not stage.is_trained or stage.fold is not None:
            return (way,)
        wrt, loss = stage.vjp.backward_graph.wrt, program.objective.results[0]
        sliced = in_slices(stage.graph, wrt, policy=self._policy, held=stage.used, seeds=[loss])
        if sliced is None:
            return (way,)
        again = sum(self._prices.seconds(stage.graph, op) for op in sliced.operators)
        return way, Way(sliced.vjp, self._items(stage, sliced.vjp), again, sliced.count)

    def _items(self, stage: Stage, built: VJPProgram) -> Items:
        """Return the tensors that a program of a stage may store, on one of its devices."""
        prices = self._prices
        price = functools.partial(prices.seconds, built.backward_graph.graph)
        summed = {*stage.parameters, *stage.borrowed}
        sized = self._of_one_device(built.backward_graph)
        items = stage_items(sized, built.plan, price, prices.bytes_per_second, stage.used, released=summed)
        return replace(items, backward_graph=built.backward_graph)

    def _of_one_device(self, backward_graph: BackwardGraph) -> BackwardGraph:
        """A stage's program with tensors as large as their parts on one of its devices."""
        specs, graph = self.program.specs, backward_graph.graph
        if specs.submesh.size == 1:
            return backward_graph
        given = {t: specs.of_tensor(t) for t in graph.inputs}
        split, shape = propagate(graph, given, specs.submesh.shape).specs, specs.submesh.shape
        return replace(backward_graph, graph=of_one_device(graph, split, shape))

    @property
    def _default(self) -> _Picked:
        """Default storage."""
        return self._picked([front.default for front in self._fronts])

    def _picked(self, points: Sequence[Point]) -> _Picked:
        """Return the program with some points; of the same points the same one."""
        key = tuple(points)
        if key not in self._known:
            is_default = all(point is front.default for point, front in zip(points, self._fronts, strict=True))
            stages = tuple(map(self._stage_with, self.program.stages, points))
            program = self.program if is_default else replace(self.program, stages=stages)
            self._known[key] = _Picked(key, program, self._measure(program))
        return self._known[key]

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

    def _added(self, points: Sequence[Point]) -> float:
        """Return the seconds that storage adds to a step: those of the slowest device for all micro-batches."""
        added = [0.0] * self.program.num_devices
        for s, fitted in zip(self.program.stage_numbers, self._report(points), strict=True):
            added[self.program.device(s)] += fitted.added_seconds * self._prices.slow[s]
        return self.program.num_microbatches * max(added)

    def _report(self, points: Sequence[Point]) -> tuple[Fitted, ...]:
        """Return how the storage of each stage was chosen."""
        return tuple(
            Fitted(point.answer.status, point.seconds - front.default.seconds, point.answer.gap, sum(front.spent))
            if point is not front.default
            else Fitted()
            for point, front in zip(points, self._fronts, strict=True)
        )
