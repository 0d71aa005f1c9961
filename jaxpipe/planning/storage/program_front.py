"""The front of a program (a stage, a decorated function): points of bytes and seconds, from ample to small.

    fewer products again ◀── more bytes ── default storage ── fewer bytes ──▶ choices of the integer program

A point is made when a room in memory is first asked for, and kept. Equal programs share what is solved.
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from jaxpipe.array_types import TensorNumber
from jaxpipe.graph.allowed_codecs import Policy
from jaxpipe.graph.graph import Graph, Operator
from jaxpipe.graph.op_cost import is_product
from jaxpipe.planning.storage.choose_swaps import Targets
from jaxpipe.planning.storage.fastest_choice import Answer, greedy_choice, least_seconds
from jaxpipe.planning.storage.greedy import give_up_all
from jaxpipe.planning.storage.hand_placed import Placement, hand_placed
from jaxpipe.planning.storage.solving import Solving
from jaxpipe.planning.storage.storage_items import Items, storage_plan
from jaxpipe.planning.storage.storage_problem import NOT_STORED, Option, Problem, outcome_of
from jaxpipe.residuals import vjp_program
from jaxpipe.residuals.choose_formats import GPU_RERUN_SHARE, ResidualPlan, default_plan
from jaxpipe.residuals.vjp_program import SlicedProgram, VJPProgram
from jaxpipe.targets.building import current


#: Where memory is left, products that run again may take an eighth less of the time that default storage allows, two
#: eighths less, and so on.
RERUN_LEVELS = 8


@dataclass(frozen=True, eq=False)
class Point:
    """A way to store, with its bytes and seconds.

    Attributes:
      way: a form of the program; its items have swaps if there are targets.
      answer: what is stored.
      held: how many stashes are there besides what is counted by event.
      targets: memory elsewhere for what is swapped.
    """

    way: Items
    answer: Answer
    held: int
    targets: Targets | None = None

    @property
    def stash_bytes(self) -> int:
        """The bytes of all stashes, which are there whatever stage of the device is at work."""
        outcome = self.answer.outcome
        return self.held * (outcome.stash_bytes - outcome.swapped_bytes)

    @property
    def bytes(self) -> int:
        """The most bytes of all stashes and of a backward pass at once."""
        return self.answer.outcome.peak_bytes

    @property
    def seconds(self) -> float:
        """Seconds of a micro-batch for codecs and recomputation."""
        return self.way.seconds + self.answer.outcome.seconds

    @cached_property
    def reruns(self) -> int:
        """The number of products that run again; of one in slices, once for all of them."""
        return len(rerun_products(self.way.vjp, self.plan)) + (self.way.slices > 1)

    @property
    def swapped(self) -> tuple[TensorNumber, ...]:
        """The tensors that are in other memory between the passes."""
        options = zip(self.way.tensors, self.way.problem.items, self.answer.choice, strict=True)
        return tuple(t for t, item, k in options if k != NOT_STORED and item.options[k].held is not None)

    @cached_property
    def plan(self) -> ResidualPlan:
        """The format of each tensor."""
        way, choice = self.way, self.answer.choice
        return way.vjp.plan if choice == way.default else storage_plan(way, choice)

    @cached_property
    def vjp(self) -> VJPProgram:
        """The programs with this storage."""
        same = self.plan is self.way.vjp.plan
        return self.way.vjp if same else vjp_program.assemble(self.way.vjp.backward_graph, self.plan)


@dataclass(frozen=True, eq=False)
class Front:
    """The points of one program.

    Attributes:
      vjp: the program as it is.
      sliced: with its largest product in slices, if it can be.
      items_of: gives the items of programs.
      price: gives the seconds of an operator that runs again.
      policy: the codecs that it may use.
      held: its stashes at once; None where forward and backward pass are one program, whose only stash goes piece by
        piece. Other stashes are arrays that are there until the backward pass that reads them is done.
      home: its stashes at once on its device where stashes are swapped.
      period: seconds of a micro-batch on the slowest stage, with which swaps overlap.
      slack: seconds of a micro-batch that count for nothing.
      solving: by whom, and how long; None for greedy choices alone.
    """

    vjp: VJPProgram
    sliced: SlicedProgram | None
    items_of: Callable[[VJPProgram], Items]
    price: Callable[[Graph, Operator], float]
    policy: Policy
    held: int | None = None
    home: int = 0
    period: float = math.inf
    slack: float = 0.0
    solving: Solving | None = None
    spent: list[float] = field(default_factory=list)  # seconds of solvers
    _points: dict[tuple[VJPProgram, tuple[int, ...], Targets | None], Point] = field(default_factory=dict)
    _levels: dict[int, Point] = field(default_factory=dict)

    @cached_property
    def ways(self) -> tuple[Items, ...]:
        """The program as it is, and in slices."""
        way, sliced = self.items_of(self.vjp), self.sliced
        if sliced is None:
            return (way,)
        again = sum(self.price(self.vjp.graph, op) for op in sliced.operators)
        return way, replace(self.items_of(sliced.vjp), seconds=again, slices=sliced.count)

    @cached_property
    def default(self) -> Point:
        """Default storage."""
        return self._by_default(self.ways[0], "default")

    @cached_property
    def hand_placed(self) -> dict[Placement, Point]:
        """Checkpoints as people place them."""
        way, points = self.ways[0], {}
        for placement, choice in hand_placed(way).items():
            points[placement] = self._point(way, self._chosen(way, choice, "checkpoints"))
        return points

    @cached_property
    def reruns_products(self) -> bool:
        """True if products run again with default storage, as many as a GPU may."""
        return reruns_products(self.vjp)

    def within(self, room: float, targets: Targets | None = None, *, exact: bool = True) -> Point | None:
        """Return the fastest point of no more bytes than a room; None if no point is small enough.

        A way that can not be faster than what was found is not solved. Checkpoints as people place them count, too. If
        it need not be ``exact``, no solver is asked.
        """
        if room >= self.default.bytes:
            return self._with_fewer_reruns(room)
        placed = (point for point in self.hand_placed.values() if point.bytes <= room)
        best = min(placed, key=lambda point: point.seconds, default=None)
        for way in self.ways:
            way = way if targets is None else self._with_swaps(way, targets)
            problem = self._problem(way, room)
            if best is not None and best.seconds <= way.seconds + least_seconds(problem):
                continue
            if exact and self.solving is not None:
                answer, spent = self.solving.fastest(problem, self.slack)
                self.spent.append(spent)
            else:
                answer = greedy_choice(problem)
            if answer is not None and (best is None or way.seconds + answer.outcome.seconds < best.seconds):
                best = self._point(way, answer, targets)
        return best

    @cached_property
    def smallest(self) -> Point:
        """The smallest point that is found without a solver, whatever it costs."""
        outcomes = ((way, give_up_all(self._problem(way, math.inf)).tidied()) for way in self.ways)
        way, outcome = min(outcomes, key=lambda pair: pair[1].peak_bytes)
        return self._point(way, Answer(outcome, "lowest peak", 0.0))

    def _with_fewer_reruns(self, room: float) -> Point:
        """Return default storage, but that as few products run again as fit, where that is faster."""

        def is_within(level: int) -> bool:
            return self.with_level(level).bytes <= room

        few = 0 if is_within(0) else bisect.bisect_left(range(RERUN_LEVELS), True, 1, key=is_within)  # 0 as a rule
        point = self.with_level(few)
        return point if point.seconds < self.default.seconds else self.default

    def with_level(self, level: int) -> Point:
        """Return default storage where fewer products may run again."""
        if level == RERUN_LEVELS or not self.reruns_products:
            return self.default
        if level not in self._levels:
            backward_graph, held = self.vjp.backward_graph, self.ways[0].held
            plan = default_plan(backward_graph, self.policy, held, GPU_RERUN_SHARE * level / RERUN_LEVELS)
            vjp = vjp_program.assemble(backward_graph, plan)
            self._levels[level] = self._by_default(self.items_of(vjp), "fewer reruns")
        return self._levels[level]

    def _by_default(self, way: Items, status: str) -> Point:
        """Return the default storage of a way."""
        return Point(way, self._chosen(way, way.default, status), self.held or 0)

    def _chosen(self, way: Items, choice: tuple[int, ...], status: str) -> Answer:
        """Return a choice that no solver has made."""
        outcome = outcome_of(self._problem(way, math.inf), choice)
        assert outcome is not None
        return Answer(outcome, status, outcome.seconds)

    def _point(self, way: Items, answer: Answer, targets: Targets | None = None) -> Point:
        """Return the point of an answer; of equal choices the same, whose programs are built once."""
        return self._points.setdefault((way.vjp, answer.choice, targets), Point(way, answer, self.held or 0, targets))

    def _problem(self, way: Items, capacity: float) -> Problem:
        return replace(way.problem, capacity=capacity, held=self.held or 0, frees=self.held is None)

    def _with_swaps(self, way: Items, targets: Targets) -> Items:
        """Return a way of which all items may also be in other memory between the passes."""

        def swapped(option: Option) -> Option:
            seconds = option.bytes / targets.bandwidth
            return replace(option, name=f"swap {option.name}", held=self.home, link_seconds=seconds)

        overlap = max(0.0, self.period - targets.latency)
        widened = [replace(item, options=(*item.options, *map(swapped, item.options))) for item in way.problem.items]
        problem = replace(way.problem, items=tuple(widened), most_swapped=targets.most_bytes, overlap=overlap)
        return replace(way, problem=problem, formats=tuple((*formats, *formats) for formats in way.formats))


def reruns_products(vjp: VJPProgram) -> bool:
    """Return whether a program with default storage runs products again, as many as a GPU may."""
    return not current().runs_early and bool(rerun_products(vjp, vjp.plan))


def rerun_products(vjp: VJPProgram, plan: ResidualPlan) -> list[Operator]:
    """Return the products that the backward pass runs again under a plan."""
    again = {t for t in plan.formats if t not in plan.codecs}
    return [op for op in vjp.graph.operators if is_product(op) and not again.isdisjoint(op.outputs)]
