"""Storage that keeps every device of a pipeline of stage programs within a memory budget, each stage by itself.

    default storage ──▶ predicted bytes of each device ──within──▶ on GPUs fewer products again, if they fit; done
                               │ over: its own stages only
                               ▼
    problem (``held`` stashes at once, capacity = budget - all else on the device) ──▶ choice ──▶ predicted bytes ...

The integer program knows the stashes and what is computed again; what else a device needs is read off the prediction
for the stage programs, and corrects the capacity until these fit.

The last stage may also run its largest product in slices, logits as a rule, where that is faster within the budget.
"""

# More than 15 of our modules: what a stage stores is priced, chosen and swapped by modules of their own.
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxpipe import _compat, multihost
from jaxpipe.graph.allowed_codecs import FAST, Policy
from jaxpipe.graph.op_cost import is_product
from jaxpipe.graph.sharding_propagation import of_one_device, propagate
from jaxpipe.planning.storage.choose_swaps import Link, Targets, choose_targets
from jaxpipe.planning.storage.fastest_choice import Answer, choose, least_seconds, lowest_peak
from jaxpipe.planning.storage.prices import Prices
from jaxpipe.planning.storage.solver_time import SolverTime
from jaxpipe.planning.storage.storage_items import Items, limited, stage_items, storage_plan
from jaxpipe.planning.storage.storage_problem import NOT_STORED, Option, Outcome, Problem, simulate
from jaxpipe.residuals import vjp_program
from jaxpipe.residuals.backward_graph import BackwardGraph
from jaxpipe.residuals.choose_formats import GPU_RERUN_SHARE, default_plan
from jaxpipe.residuals.vjp_program import VJPProgram
from jaxpipe.runtime.program import Program
from jaxpipe.runtime.stages import Stage, in_slices
from jaxpipe.runtime.stash_swap import StashSwap
from jaxpipe.schedules.joined_work import program_kinds
from jaxpipe.schedules.swap_points import HOST, swap_points
from jaxpipe.schedules.table import DeviceNumber, StageNumber
from jaxpipe.text.progress import tell
from jaxpipe.text.units import bytes_text


#: How often limits are corrected by what the programs really need.
MOST_ROUNDS = 4

#: Peaks with which the smallest plan is looked for: parts of the way from a problem's lowest to that by default. The
#: search for the lowest takes half of the time, and the others the rest.
HIGHER_PEAKS = (0.0, 0.25, 0.5, 0.75)

#: Where memory is left, products that run again may take an eighth less of the time that default storage allows, two
#: eighths less, and so on.
RERUN_LEVELS = 8

#: How far from the best a search may stop: the share of a micro-batch's seconds on the slowest stage that a better
#: choice could save, or of what codecs and recomputation take.
GAP = 0.01

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


@dataclass(frozen=True)
class Solving:
    """A solver, and the time that it has for a plan.

    Attributes:
      solver: for cvxpy.
      time: what is left for them.
      for_smallest: seconds for each solution for the smallest plan.
    """

    solver: str
    time: SolverTime
    for_smallest: float
    _fronts: dict[Problem, list[tuple[float, Answer]]] = field(default_factory=dict)

    def fastest(self, problem: Problem, slack: float) -> tuple[Answer | None, float]:
        """Return the fastest choice but for ``slack`` seconds, and the seconds that it took to find.

        Equal stages have one front: what was the fastest within more bytes, and is within these, is so still.
        """
        front = self._fronts.setdefault(replace(problem, capacity=math.inf), [])
        for capacity, answer in front:
            if answer.outcome.peak_bytes <= problem.capacity <= capacity:
                return answer, 0.0
        answer, spent = self.time.solve(choose, problem, solver=self.solver, gap=GAP, slack=slack)
        if answer is not None:
            front.append((problem.capacity, answer))
        return answer, spent


@dataclass(frozen=True, eq=False)
class _Way:
    """A program of a stage, and what it may store.

    Attributes:
      stage: its forward and backward program.
      items: what it may store.
      seconds: that a micro-batch takes longer than with the stage's operators as they are, whatever is stored.
    """

    stage: Stage
    items: Items
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class _Chosen:
    """An answer for a stage."""

    way: _Way
    answer: Answer

    @property
    def seconds(self) -> float:
        """Seconds of a micro-batch for codecs and recomputation."""
        return self.way.seconds + self.answer.outcome.seconds


#: By stage, what was chosen for it; those with default storage are left out.
Answers = Mapping[StageNumber, _Chosen]


@dataclass(frozen=True, eq=False)
class _Candidate:
    """Answers, their program, and predicted bytes by device."""

    answers: Answers
    program: Program
    needs: Sequence[int]


class StageFitter:
    """Storage for a program whose stages are compiled by themselves, within one budget after another."""

    def __init__(
        self,
        program: Program,
        measure: Callable[[Program], Sequence[int]],
        prices: Prices,
        solving: Solving,
        period: float = 0.0,
        policy: Policy = FAST,
    ):
        """Nothing is done yet.

        Args:
          program: with default storage.
          measure: predicted bytes of each device along the stage axis.
          prices: what choices cost.
          solving: by whom, and how long.
          period: seconds of a micro-batch on the slowest stage, with which swaps overlap.
          policy: the codecs that stages may use.
        """
        self.program, self._measure, self._prices, self._solving = program, measure, prices, solving
        self._period, self._policy = period, policy
        self._built: dict[tuple[StageNumber, _Way, tuple[int, ...]], VJPProgram] = {}
        self._programs: dict[tuple[tuple[StageNumber, _Way, tuple[int, ...], StashSwap | None], ...], _Candidate] = {}
        self._spent: dict[StageNumber, float] = {}
        self._swaps: dict[StageNumber, Targets] = {}
        self._rerunning: dict[tuple[StageNumber, int], _Chosen] = {}

    def within(self, budget: int) -> tuple[Program, tuple[Fitted, ...]] | None:
        """Return the program with the fastest storage of predicted bytes within a budget; None if none is found."""
        default = self._candidate({})
        over = [d for d in self.program.device_numbers if default.needs[d] > budget]
        self._swaps = self._swap_targets(default, over, budget)
        best = self._refined(default, over, budget) if over else self._with_fewer_reruns(budget)
        return None if best is None else (best.program, self._report(best.answers))

    def _refined(self, default: _Candidate, over: Sequence[DeviceNumber], budget: int) -> _Candidate | None:
        """Return the fastest storage within a budget that is found for devices that are over it by default.

        What a device needs besides what the problems of its stages know is corrected from round to round, until no more
        than ``GAP`` of a step can be won by it.
        """
        beyond = {d: self._beyond(default, d) for d in over}
        if any(self._least_base(d) > budget - beyond[d] + INEXACT * budget for d in over):
            return None
        now, best = default, None
        for number in range(MOST_ROUNDS):
            tell(
                f"{self.program.schedule.name}: choosing what "
                f"{sum(len(self._stages_of(d)) for d in over)} stage(s) store "
                f"within {bytes_text(budget)}, round {number + 1}; solvers took {self._solving.time.spent:.1f} of "
                f"{self._solving.time.limit:g} s"
            )
            answers = {s: a for d in over for s, a in self._solved(d, budget - beyond[d]).items()}
            slack = GAP * self._period * self.program.num_microbatches
            if best is not None and self._added(answers) >= self._added(best.answers) - slack:
                break
            now = self._candidate(answers)
            fits = max(now.needs) <= budget
            if fits and (best is None or self._added(answers) < self._added(best.answers)):
                best = now
            needed = {d: self._beyond(now, d) for d in over}
            # What turns out to be needed besides counts; where all fits, it may also be less than was thought.
            corrected = needed if fits else {d: max(needed[d], beyond[d]) for d in over}
            if corrected == beyond or (fits and all(needed[d] >= beyond[d] for d in over)):
                break
            beyond = corrected
        return best or self._with_smallest(now, budget)

    def _least_base(self, d: DeviceNumber) -> int:
        """Return the bytes that the problems of a device's stages need whatever is chosen."""
        return sum(min(max(way.items.problem.base) for way in self._ways[s]) for s in self._stages_of(d))

    def _with_fewer_reruns(self, budget: int) -> _Candidate:
        """Return default storage within a budget, but that each device runs as few products again as fit.

        Stages of a device have the same level, so that what fits is tried together.
        """
        stages = zip(self.program.stage_numbers, self.program.stages, strict=True)
        levels = {s: (-1, RERUN_LEVELS) for s, stage in stages if reruns_products(stage)}  # too few reruns, and enough
        while any(enough - few > 1 for few, enough in levels.values()):
            tried = {s: 0 if few < 0 else (few + enough) // 2 for s, (few, enough) in levels.items()}
            needs = self._with_reruns(tried).needs
            for s, level in tried.items():
                few, enough = levels[s]
                fits = needs[self.program.device(s)] <= budget
                levels[s] = (few, level) if fits else (level, enough)
        return self._with_reruns({s: enough for s, (_, enough) in levels.items()})

    def _with_reruns(self, levels: Mapping[StageNumber, int]) -> _Candidate:
        """Return default storage, but that some stages run fewer products again, where that is faster."""
        chosen = {s: self._with_rerun_level(s, level) for s, level in levels.items() if level < RERUN_LEVELS}
        return self._candidate({s: other for s, other in chosen.items() if other.seconds < self._default(s).seconds})

    def _with_rerun_level(self, s: StageNumber, level: int) -> _Chosen:
        """Return default storage of a stage where fewer products may run again."""
        stage = self.program.stages[s]
        if (s, level) not in self._rerunning:
            assert stage.vjp is not None
            backward_graph = stage.vjp.backward_graph
            plan = default_plan(backward_graph, self._policy, stage.used, GPU_RERUN_SHARE * level / RERUN_LEVELS)
            other = replace(stage, vjp=vjp_program.assemble(backward_graph, plan))
            items = self._items(other)
            outcome = simulate(self._without_swaps(s, math.inf, items), items.default)
            assert outcome is not None
            answer = Answer(items.default, outcome, "fewer reruns", outcome.seconds)
            self._rerunning[s, level] = _Chosen(_Way(other, items), answer)
        return self._rerunning[s, level]

    @property
    def most_saved_seconds(self) -> float:
        """Seconds by which a step may be shorter than with default storage."""
        stages = zip(self.program.stage_numbers, self.program.stages, strict=True)
        return self.program.num_microbatches * sum(
            self._default(s).seconds for s, stage in stages if reruns_products(stage)
        )

    @functools.cached_property
    def smallest(self) -> tuple[Program, tuple[Fitted, ...]]:
        """The program with the least predicted bytes on its fullest device. It does not depend on any budget."""
        return self._smallest.program, self._report(self._smallest.answers)

    @functools.cached_property
    def _smallest(self) -> _Candidate:
        tell(f"{self.program.schedule.name}: looking for the smallest plan")
        return self._candidate(self._smallest_on(self.program.device_numbers))

    def _smallest_on(self, devices: Sequence[DeviceNumber]) -> Answers:
        """Return answers for the stages of devices with as little memory as is found; none where default needs less.

        Where the lowest peak of a problem does not make the program smaller, of which the problem knows a part, higher
        ones may.
        """
        default = self._candidate({})
        least, answers = list(default.needs), dict[StageNumber, _Chosen]()
        for part in HIGHER_PEAKS:
            larger = [d for d in devices if least[d] >= default.needs[d]]
            small = {s: self._small(s, part) for d in larger for s in self._stages_of(d)}
            candidate = self._candidate({s: chosen for s, chosen in small.items() if chosen is not None})
            for d in larger:
                if candidate.needs[d] < least[d]:
                    least[d] = candidate.needs[d]
                    answers |= {s: a for s, a in candidate.answers.items() if self.program.device(s) == d}
        return answers

    @functools.cached_property
    def most_smaller(self) -> int:
        """Bytes that a choice without swaps may take less than the smallest plan at most, as the problems count them.

        This is of the device that needs most.
        """
        needs = self._smallest.needs
        fullest = max(self.program.device_numbers, key=lambda d: needs[d])
        saved = 0
        for s in self._stages_of(fullest):
            answers = [answer for way in self._ways[s] if (answer := self._lowest_peak(s, way))]
            chosen = self._smallest.answers.get(s)
            peak = (self._default(s) if chosen is None else chosen.answer.outcome).peak_bytes
            saved += max(0, peak - min((answer.least_bytes for answer in answers), default=0))
        return saved

    def _lowest_peak(self, s: StageNumber, way: _Way) -> Answer | None:
        """Return the answer with the lowest peak for one way of a stage."""
        problem = self._without_swaps(s, math.inf, way.items)
        options = {"solver": self._solving.solver, "gap": GAP, "time_limit": self._solving.for_smallest / 2}
        return multihost.from_first(functools.partial(lowest_peak, problem, **options))

    def _small(self, s: StageNumber, part: float) -> _Chosen | None:
        """Return a stage's answer with the lowest peak, or the fastest within one higher by a part of the way back."""
        seconds = self._solving.for_smallest / 2
        options = {"solver": self._solving.solver, "gap": GAP}
        answers = []
        for way in self._ways[s]:
            answer = self._lowest_peak(s, way)
            if answer is not None and part:
                problem, lowest = self._without_swaps(s, math.inf, way.items), answer.outcome.peak_bytes
                higher = replace(problem, capacity=lowest + part * (self._default(s).peak_bytes - lowest))
                each = seconds / (len(HIGHER_PEAKS) - 1)
                answer = multihost.from_first(functools.partial(choose, higher, time_limit=each, **options))
            if answer is not None:
                answers.append(_Chosen(way, answer))
        return min(answers, key=lambda chosen: chosen.answer.outcome.peak_bytes, default=None)

    def _with_smallest(self, now: _Candidate, budget: int) -> _Candidate | None:
        """A candidate with the smallest storage on the devices that are over the budget; None if they still are."""
        over = [d for d in self.program.device_numbers if now.needs[d] > budget]
        kept = {s: a for s, a in now.answers.items() if self.program.device(s) not in over}
        mixed = self._candidate({**kept, **self._smallest_on(over)})
        return mixed if max(mixed.needs) <= budget else None

    def _solved(self, d: DeviceNumber, room: float) -> dict[StageNumber, _Chosen]:
        """Answers for the stages of a device, within a room that they share as they would by default."""
        peaks = {s: self._default(s).peak_bytes for s in self._stages_of(d)}
        answers: dict[StageNumber, _Chosen] = {}
        for s, peak in peaks.items():
            chosen = self._fastest(s, room * peak / max(1, sum(peaks.values()))) or self._small(s, 0.0)
            if chosen is not None:
                answers[s] = chosen
        return answers

    def _fastest(self, s: StageNumber, capacity: float) -> _Chosen | None:
        """The fastest answer for a stage; a way that can not be faster than what was found is not solved."""
        best: _Chosen | None = None
        for way in self._ways[s]:
            problem = self._problem(s, capacity, way.items)
            if best is not None and best.seconds <= way.seconds + least_seconds(problem):
                continue
            slack = GAP * self._period / self._prices.slow[s]
            answer, spent = self._solving.fastest(problem, slack)
            self._spent[s] = self._spent.get(s, 0.0) + spent
            if answer is not None and (best is None or way.seconds + answer.outcome.seconds < best.seconds):
                best = _Chosen(way, answer)
        return best

    def _beyond(self, candidate: _Candidate, d: DeviceNumber) -> float:
        """Return the bytes that a device needs beyond those that the problems of its stages know."""
        outcomes = [
            candidate.answers[s].answer.outcome if s in candidate.answers else self._default(s)
            for s in self._stages_of(d)
        ]
        return candidate.needs[d] - sum(outcome.peak_bytes for outcome in outcomes)

    def _stages_of(self, d: DeviceNumber) -> list[StageNumber]:
        return [s for s in self.program.stage_numbers if self.program.device(s) == d]

    def _swap_targets(
        self, default: _Candidate, over: Sequence[DeviceNumber], budget: int
    ) -> dict[StageNumber, Targets]:
        """Find memory elsewhere for the stages of devices that are over the budget, the fullest first."""
        program, links = self.program, self._prices.links
        if not program.stage_replicas.is_single or not program.schedule.has_backward:
            return {}
        apart = [d for d in program.device_numbers if d not in over]
        rooms = {program.schedule.stage(d, 0): budget - default.needs[d] for d in apart}
        chosen: dict[StageNumber, Targets] = {}
        for d in sorted(over, key=lambda d: -default.needs[d]):
            for s in self._stages_of(d):
                points = swap_points(program.schedule, s)
                fewer = self._held(s) - points.home
                if fewer <= 0 or not self._stays_apart(s):
                    continue
                reach = {t: Link(links.bandwidth[s][t], links.latency[s][t], n) for t, n in rooms.items()}
                if links.host_bytes:
                    reach[HOST] = Link(links.host_bandwidth[s], links.host_latency[s], links.host_bytes)
                targets = choose_targets(reach, points.away, (default.needs[d] - budget) / fewer)
                if targets is None:
                    continue
                chosen[s] = targets
                size = min(targets.most_bytes, self._default(s).stash_bytes)
                for target in targets.targets:
                    if target.stage != HOST:
                        rooms[target.stage] -= int(points.away * size * target.share)
        return chosen

    def _stays_apart(self, s: StageNumber) -> bool:
        """Return whether a stage's stash leaves its forward program."""
        return len(program_kinds(self.program.schedule, s)[0]) == 1

    def _held(self, s: StageNumber) -> int:
        """The most stashes of a stage at once."""
        return self.program.in_flight(self.program.device(s), s // self.program.num_devices)

    def _with_swaps(self, s: StageNumber, items: Items) -> Items:
        """The items of a stage, all of which may also be in other memory between the passes."""
        targets = self._swaps.get(s)
        if targets is None:
            return items
        home, problem = swap_points(self.program.schedule, s).home, items.problem

        def swapped(option: Option) -> Option:
            seconds = option.bytes / targets.bandwidth
            return replace(option, name=f"swap {option.name}", held=home, link_seconds=seconds)

        widened = [replace(item, options=(*item.options, *map(swapped, item.options))) for item in problem.items]
        overlap = max(0.0, self._period - targets.latency)
        problem = replace(problem, items=tuple(widened), most_swapped=targets.most_bytes, overlap=overlap)
        return replace(items, problem=problem, formats=tuple((*formats, *formats) for formats in items.formats))

    def _swap(self, s: StageNumber, chosen: _Chosen) -> StashSwap | None:
        """The swaps that a choice stands for."""
        items = self._with_swaps(s, chosen.way.items)
        options = zip(items.tensors, items.problem.items, chosen.answer.choice, strict=True)
        tensors = [t for t, item, k in options if k != NOT_STORED and item.options[k].held is not None]
        return StashSwap(tuple(tensors), self._swaps[s].targets) if tensors else None

    @functools.cached_property
    def _ways(self) -> list[list[_Way]]:
        """By stage, its program as it is, and with its largest product in slices if it can be."""
        ways = [[_Way(stage, self._items(stage))] for stage in self.program.stages]
        last, stage = ways[-1], self.program.stages[-1]
        sliced = None
        if stage.is_trained and stage.fold is None and self.program.specs.submesh.size == 1:
            sliced = in_slices(stage, self.program.objective.results[0], self._policy)
        if sliced is not None:
            other, looped = sliced
            again = sum(self._prices.seconds(stage.graph, op) for op in looped)
            last.append(_Way(other, self._items(other), again))
        return ways

    def _items(self, stage: Stage) -> Items:
        """Return the tensors that a stage may store, on one of its devices."""
        assert stage.vjp is not None
        built, prices = stage.vjp, self._prices
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

    def _problem(self, s: StageNumber, capacity: float, items: Items) -> Problem:
        """A stage's problem, with swaps."""
        return self._without_swaps(s, capacity, self._with_swaps(s, items))

    def _without_swaps(self, s: StageNumber, capacity: float, items: Items) -> Problem:
        """A stage's problem.

        Where forward and backward pass are one program, its only stash goes piece by piece. Other stashes are arrays
        that are there until the backward pass that reads them is done.
        """
        if not self._stays_apart(s):
            return limited(items, capacity, frees=True)
        return limited(items, capacity, held=self._held(s), frees=False)

    def _default(self, s: StageNumber) -> Outcome:
        """The outcome of a stage's default storage."""
        items = self._ways[s][0].items
        outcome = simulate(self._without_swaps(s, math.inf, items), items.default)
        assert outcome is not None
        return outcome

    def _candidate(self, answers: Answers) -> _Candidate:
        """The program with some answers; the same one for the same choices."""
        swaps = {s: self._swap(s, chosen) for s, chosen in answers.items()}
        choices = tuple((s, answers[s].way, answers[s].answer.choice, swaps[s]) for s in sorted(answers))
        if choices not in self._programs:
            stages = list(self.program.stages)
            for s, way, choice, swap in choices:
                items = self._with_swaps(s, way.items)
                if (s, way, choice) not in self._built:
                    built = vjp_program.assemble(items.backward_graph, storage_plan(items, choice))
                    self._built[s, way, choice] = built
                stages[s] = replace(way.stage, vjp=self._built[s, way, choice], swap=swap)
            program = replace(self.program, stages=tuple(stages)) if choices else self.program
            self._programs[choices] = _Candidate(answers, program, self._measure(program))
        return self._programs[choices]

    def _added(self, answers: Answers) -> float:
        """Seconds that storage adds to a step: those of the slowest device for all micro-batches."""
        added = [0.0] * self.program.num_devices
        for s, fitted in zip(self.program.stage_numbers, self._report(answers), strict=True):
            added[self.program.device(s)] += fitted.added_seconds * self._prices.slow[s]
        return self.program.num_microbatches * max(added)

    def _report(self, answers: Answers) -> tuple[Fitted, ...]:
        """Return how the storage of each stage was chosen."""
        reports = [Fitted()] * len(self.program.stages)
        for s, chosen in answers.items():
            added = chosen.seconds - self._default(s).seconds
            reports[s] = Fitted(chosen.answer.status, added, chosen.answer.gap, self._spent.get(s, 0.0))
        return tuple(reports)


def reruns_products(stage: Stage) -> bool:
    """Return whether a stage with default storage runs products again, as many as a GPU may."""
    if _compat.runs_breadth_first() or stage.vjp is None:
        return False
    formats, operators = stage.vjp.plan.formats, stage.vjp.graph.operators
    again = {t for t, saved in formats.items() if not saved.format.is_stored}
    return any(is_product(op) and not again.isdisjoint(op.outputs) for op in operators)
