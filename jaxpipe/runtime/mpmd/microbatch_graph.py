"""The passes of all stages over the micro-batches, as a part of a step's graph.

copies of parameters that several stages use
the schedule's table, tick by tick: work, and what it sends, as soon as it is there
loss and metrics on the device of the last stage
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax

from jaxpipe.array_types import TensorNumber
from jaxpipe.runtime.mpmd.graph_writer import GraphWriter, shapes_of
from jaxpipe.runtime.mpmd.passes import apply_passes
from jaxpipe.runtime.mpmd.report_tasks import batch_results
from jaxpipe.runtime.mpmd.stage_layout import StageLayout
from jaxpipe.runtime.mpmd.stage_tasks import first_sums, leaves_used, run_kinds
from jaxpipe.runtime.mpmd.step_graph import Arrays, Place, Port, StepGraph
from jaxpipe.schedules.joined_work import Kinds, program_kinds
from jaxpipe.schedules.table import KIND_NAMES, Kind, StageNumber


#: Groups of results that stand for what a member had before.
_OF_MEMBERS = {"state", "sums", "packs", "totals", "overflows"}


class MicrobatchWriter(GraphWriter):
    """A graph of the passes over the micro-batches, for a layout."""

    def __init__(self, layout: StageLayout):
        super().__init__(layout)
        self.place, self.members_of = layout.devices.place, layout.devices.members
        self.every_member = [place for s in layout.stages for place in self.members_of(s)]
        self.kinds = {s: program_kinds(layout.schedule, s) for s in layout.stages}
        self.reports: dict[Port, int] = {}
        #: What each stage holds at the beginning, of all its members.
        self.whole = {s: self._given(s) for s in layout.stages}
        #: By stage, its parameters as each member has them.
        self.weights = {s: self.split(s, self.whole[s]["parameters"]) for s in layout.stages}
        #: What each member has now.
        self.members = {place: self._member(place) for place in self.every_member}
        #: What has arrived for work on a micro-batch, or is kept for it: by stage, replica and micro-batch.
        self._kept: dict[tuple[StageNumber, int, int], Arrays] = defaultdict(dict)
        self.results: dict[tuple[int, int, int], tuple[Place, int]] = {}  # by result, replica and micro-batch
        self.statistics: dict[tuple[StageNumber, int], tuple[Place, Arrays]] = {}
        self._sending: list[Callable[[], None]] = []
        self._shapes: dict[tuple[StageNumber, Kinds], Arrays] = {}

    def finish(self, outputs: dict[Port, int]) -> StepGraph:
        """Return the graph that ends with some arrays and the reports, after all passes."""
        if self.reports and len(self.devices.processes) > 1:
            self.reports = self.spread(self.layout.home, self.layout.replicas, self.reports)
        return apply_passes(super().finish(outputs | self.reports), self.layout)

    def _given(self, s: StageNumber) -> Arrays:
        stage, place = self.layout.stage(s), self.place(s)
        groups = {"parameters": ("parameters", stage.parameters), "state": ("variables", stage.state)}
        return {group: {t: self.given(place, field, t) for t in tensors} for group, (field, tensors) in groups.items()}

    def _member(self, place: Place) -> Arrays:
        s, stage = place.stage, self.layout.stage(place.stage)
        return {
            "key": self.given(place, "key"),
            "step": self.given(place, "step"),
            "batch": {k: self.given(place, "batch", k) for k in leaves_used(self.layout, stage)},
            "state": self.split(s, self.whole[s]["state"])[max(place.replica, 0)],
            "lent": {t: self._lent(place, t) for t in stage.borrowed},
            **{group: {} for group in ("sums", "packs", "totals", "overflows")},
        }

    def _lent(self, place: Place, t: TensorNumber) -> int:
        """Send a parameter that several stages use to a member of one that does not have it."""
        home = self.layout.planned.program.placement.home(self.layout.objective)[t]
        sources = self.members_of(home)
        r = place.replica % len(sources)
        return self.send(sources[r], place, self.weights[home][r][t])

    def worker(self, s: StageNumber, r: int, j: int) -> Place:
        """The member of a stage that works on a micro-batch of a replica."""
        return self.place(s, self.devices.member(s, r, j))

    def run_table(self) -> None:
        """Write what the schedule says, tick by tick."""
        schedule = self.layout.schedule
        positions = [itertools.count() for _ in range(schedule.num_devices)]
        done: set[tuple[StageNumber, int, Kind]] = set()
        for tick in schedule.ticks:
            for device, actions in zip(schedule.device_numbers, tick, strict=True):
                for action in actions:
                    position = next(positions[device])
                    s, k = schedule.stage(device, action.chunk), action.microbatch
                    kinds = next(kinds for kinds in self.kinds[s] if action.kind in kinds)
                    if (s, k, kinds[0]) not in done:  # else in one program with work before it
                        done.add((s, k, kinds[0]))
                        for j, r in itertools.product(self.layout.dealt(k), self.layout.replicas):
                            self._run_stage(s, r, j, kinds, position)
                        self.after_round(s, k, kinds)
            for send in self._sending:
                send()
            self._sending.clear()
        for place in self.every_member:  # those that no micro-batch was left for
            for kinds in self.kinds[place.stage]:
                self.start(place, kinds, idle=True)

    def after_round(self, s: StageNumber, k: int, kinds: Kinds) -> None:
        """Do what follows the work on an entry of the table."""

    def weights_for(self, s: StageNumber, j: int, kinds: Kinds) -> list[Arrays]:
        """The parameters of a stage, by member, that work on a micro-batch uses."""
        return self.weights[s]

    def _run_stage(self, s: StageNumber, r: int, j: int, kinds: Kinds, action: int) -> None:
        layout, place = self.layout, self.worker(s, r, j)
        member, kept = self.members[place], self._kept[s, r, j]
        self.start(place, kinds)
        operands = {name: member[name] for name in ("key", "step", "batch", "state")}
        operands |= {
            group: {k: member[group][k] for k in x if k in member[group]} for group, x in self._added(s, kinds).items()
        }
        operands |= {"parameters": self.weights_for(s, j, kinds)[max(place.replica, 0)] | member["lent"]}
        operands |= {"index": self.given(place, "index", j), "arriving": {}, "cotangents": {}} | kept
        label = f"stage {s}: " + " and ".join(KIND_NAMES[kind] for kind in kinds)
        work = functools.partial(run_kinds, layout, s, kinds)
        results = self.run(place, label, work, operands, (kinds, layout.collects), microbatch=j, action=action)
        put(member, {name: x for name, x in results.items() if name in _OF_MEMBERS})
        kept |= {group: results[group] for group in ("stash", "saved") if group in results}
        if Kind.BACKWARD in kinds or Kind.BACKWARD_WEIGHT in kinds:
            del self._kept[s, r, j]
        if "statistics" in results:
            self.statistics[s, j] = place, results["statistics"]
        self.results |= {(k, r, j): (place, number) for k, number in results.get("results", {}).items()}
        if results.get("leaving"):
            self._send_on(place, StageNumber(s + 1), r, j, "arriving", results["leaving"])
        if results.get("returning"):
            self._send_on(place, StageNumber(s - 1), r, j, "cotangents", results["returning"])

    def _send_on(self, source: Place, s: StageNumber, r: int, j: int, group: str, arrays: Arrays) -> None:
        """Send arrays at the end of the tick: a device that takes part in a message may wait for the other one."""
        target = self.worker(s, r, j)

        def send() -> None:
            self._kept[s, r, j][group] = self.send(source, target, arrays)

        if self.devices.at(source) == self.devices.at(target):
            send()
        else:
            self._sending.append(send)

    def start(self, place: Place, kinds: Kinds, idle: bool = False) -> None:
        """Make the zeros that the first micro-batch's work adds to; of an ``idle`` member, all sums."""
        held, avals = self.members[place], self._added(place.stage, kinds)
        if not idle and self.layout.num_microbatches == 1:  # the gradients of a single micro-batch are the sums
            avals = {group: x for group, x in avals.items() if group not in ("sums", "packs")}
        missing = {group: {k: x for k, x in row.items() if k not in held[group]} for group, row in avals.items()}
        if jax.tree.leaves(missing):
            put(held, self.zeros(place, f"stage {place.stage}: zeros", missing))

    def zeros(self, place: Place, label: str, avals: Arrays) -> Arrays:
        """Make zeros of some shapes, or what else sums begin with."""
        work = functools.partial(first_sums, avals, self.layout.objective.overwritten)
        return self.run(place, label, lambda _: work(), {}, (label, shapes_of(avals)))

    def _added(self, s: StageNumber, kinds: Kinds) -> Arrays:
        """Shapes of the arrays that work of some kinds adds to: totals, and sums of the gradients that it computes."""
        if (s, kinds) not in self._shapes:
            given = {t for kind in kinds for t in self.layout.stage(s).differentiated(kind)}
            sums = self.layout.sums(s, [t for t in self.layout.trained(s) if t in given])
            self._shapes[s, kinds] = sums | (self.layout.totals(s) if Kind.FORWARD in kinds else {"totals": {}})
        return self._shapes[s, kinds]

    def gather_totals(self, k: int) -> list[int]:
        """Send a total of all members of the stage that makes it to the last stage."""
        s = next(s for s in self.layout.stages if k in self.layout.stage(s).results)
        return [self.send(x, self.layout.home, self.members[x]["totals"][k]) for x in self.members_of(s)]

    def report(self, **flags: list[int]) -> Arrays:
        """Make loss and metrics of the totals."""
        home, objective = self.layout.home, self.layout.objective
        operands: Arrays = {"totals": [self.gather_totals(k) for k in range(len(objective.results))]} | flags
        results = self.run(home, "loss and metrics", functools.partial(batch_results, objective), operands)
        self.reports[Port(home, "loss")] = results["loss"]
        self.reports |= {Port(home, "metrics", k): x for k, x in enumerate(results["metrics"])}
        return results

    def to_everyone(self, source: Place, tree: Any) -> dict[Place, Any]:
        """Send values to all members of all stages."""
        return {place: self.send(source, place, tree) for place in self.every_member}


def put(held: Arrays, new: Arrays) -> None:
    """Put arrays in the place of those of the same group and key."""
    for group, x in new.items():
        held[group] = {**held.get(group, {}), **x} if isinstance(x, dict) else x
