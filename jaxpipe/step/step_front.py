"""The levels of a whole step: what all of its decorated programs store, from ample to small.

    plain ── reruns 0 ... ── default ── room 1 ... ── smallest        and checkpoints as people place them

At a level with a room no program takes more bytes than that: where programs run one after the other, the largest
decides, and where they are there at once, the largest saves most. Which levels there are, and what they are, does not
depend on a budget.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import jax

from jaxpipe.array_types import Device
from jaxpipe.planning.storage.hand_placed import POLICIES, Placement
from jaxpipe.planning.storage.prices import Prices
from jaxpipe.planning.storage.program_front import RERUN_LEVELS, Front, Point
from jaxpipe.planning.storage.storage_items import stage_items
from jaxpipe.residuals.chosen_storage import DecoratedProgram, Passes, Storage
from jaxpipe.residuals.two_passes import CheckpointedPasses, StoredPasses, checkpointed_blocks
from jaxpipe.targets.building import building_for, current
from jaxpipe.targets.known import target_of
from jaxpipe.targets.target import Target


#: Rooms between default storage and the smallest.
ROOMS = 16

#: What the first levels are called: the step without decorations, and with the storage of ``memory_encoded``.
PLAIN, DEFAULT, SMALLEST = "plain", "default", "smallest"

#: Behind the name of a checkpoint that is JAX's own, and no choice of what the program stores.
BY_JAX = " (jax.checkpoint)"


@dataclass(frozen=True, eq=False)
class StepFront:
    """The fronts of a step's decorated programs, by key, and the target that they are for."""

    fronts: Mapping[str, Front]
    target: Target
    _points: dict[str, dict[str, Point]] = field(default_factory=dict, init=False)

    @cached_property
    def row(self) -> tuple[str, ...]:
        """The levels whose bytes fall from each to the next."""
        with building_for(self.target):
            again = any(front.reruns_products for front in self.fronts.values())
        reruns = [f"reruns {k} of {RERUN_LEVELS}" for k in range(RERUN_LEVELS if again else 0)]
        return *reruns, self.first, *(f"room {k} of {ROOMS}" for k in range(1, ROOMS)), SMALLEST

    @cached_property
    def first(self) -> str:
        """Default storage as the other levels of the row have theirs: on CPUs behind barriers."""
        with building_for(self.target):
            return f"room 0 of {ROOMS}" if current().runs_early else DEFAULT

    def estimate(self, level: str) -> float:
        """Return about how many bytes all programs take at a level, of a room without choosing what they store."""
        kind, number = _parsed(level)
        if kind != "room":
            return self.bytes(level)
        with building_for(self.target):
            room, fronts = self._room(number), self.fronts.values()
            return sum(max(min(room, front.default.bytes), front.smallest.bytes) for front in fronts)

    @cached_property
    def hand_placed(self) -> tuple[str, ...]:
        """The levels that are checkpoints as people place them, those that run the fewest products again first."""
        return tuple(sorted(self._placements, key=lambda name: (self.reruns(name), self.seconds(name))))

    @cached_property
    def _placements(self) -> dict[str, tuple[Placement, bool]]:
        """Checkpoints by level, and whether they are JAX's own, which XLA takes out again on a CPU, but in scans."""
        with building_for(self.target):
            placements = dict.fromkeys(x for front in self.fronts.values() for x in front.hand_placed)
            ours = {x.name: (x, False) for x in placements if x.family is not None}
            if not current().keeps_checkpoints and all(front.held is None for front in self.fronts.values()):
                return ours
        return ours | {x.name + BY_JAX * (x.family is not None): (x, True) for x in placements}

    def is_by_jax(self, level: str) -> bool:
        """Return whether a level is checkpoints of JAX's own."""
        return self._placements.get(level, (None, False))[1]

    def seconds(self, level: str) -> float:
        """Return the estimated seconds of codecs and of what is computed again."""
        return sum(self._runs(key) * point.seconds for key, point in self.points(level).items())

    def reruns(self, level: str) -> int:
        """Return how many products run again, each program counted once, in scans for each iteration."""
        return sum(self._runs(key) * point.reruns for key, point in self.points(level).items())

    def _runs(self, key: str) -> int:
        return self.fronts[key].held or 1

    def bytes(self, level: str) -> float:
        """Return the estimated bytes of all programs together."""
        return sum(point.bytes for point in self.points(level).values())

    def storage(self, level: str) -> dict[str, Storage]:
        """Return the ways in which programs run, by key."""
        with building_for(self.target):
            ways = {key: _stored(point) for key, point in self.points(level).items()}
            if self.is_by_jax(level):
                placement = self._placements[level][0]
                placed = [key for key, front in self.fronts.items() if placement in front.hand_placed]
                ways.update((key, _checkpointed(placement, ways[key])) for key in placed)
        return ways

    def points(self, level: str) -> dict[str, Point]:
        """Return the points of a level, by key; those of a room are chosen when they are first asked for."""
        if level not in self._points:
            with building_for(self.target):
                self._points[level] = {key: self._point(front, level) for key, front in self.fronts.items()}
        return self._points[level]

    def _point(self, front: Front, level: str) -> Point:
        kind, number = _parsed(level)
        if kind == "reruns":
            return front.with_level(number)
        if level == SMALLEST:
            return front.smallest
        if kind == "room":
            room = self._room(number)
            return front.default if room >= front.default.bytes else front.within(room) or front.smallest
        placed = self._placements.get(level)
        return front.default if placed is None else front.hand_placed.get(placed[0], front.default)

    def _room(self, number: int) -> float:
        most = max(front.default.bytes for front in self.fronts.values())
        if not number:
            return most  # without a search for the smallest
        least = max(front.smallest.bytes for front in self.fronts.values())
        return most - (most - least) * number / ROOMS


def _stored(point: Point) -> Storage:
    """Return the storage of a point."""
    plan, sliced = point.plan, point.way.slices > 1
    return lambda program: StoredPasses(program.with_storage(plan, sliced), barriers=True)


def _checkpointed(placement: Placement, otherwise: Storage) -> Storage:
    """Return JAX's checkpoints in some places, or another storage where such places cannot be parted."""
    policy = getattr(jax.checkpoint_policies, POLICIES[placement.saved])

    def way(program: DecoratedProgram) -> Passes:
        blocks = checkpointed_blocks(program, placement.family, placement.every)
        return otherwise(program) if blocks is None else CheckpointedPasses(program, blocks, policy)

    return way


def _parsed(level: str) -> tuple[str, int]:
    """Return the kind of a level and its number among those of its kind."""
    kind, *rest = level.split(" ")
    return kind, int(rest[0]) if kind in ("reruns", "room") else 0


def step_front(programs: Mapping[str, DecoratedProgram], device: Device) -> StepFront:
    """Return the levels of a step on a device."""
    prices = Prices(target_of(device).rates)
    with building_for(device):
        fronts = {key: _front(program, prices) for key, program in programs.items()}
    return StepFront(fronts, target_of(device))


def _front(program: DecoratedProgram, prices: Prices) -> Front:
    """Return the front of a program, without a solver: it takes longer than tracing."""
    items_of = functools.partial(stage_items, prices=prices, held=program.held)
    return Front(program.default, program.sliced, items_of, prices.seconds, program.policy, program.iterations)
