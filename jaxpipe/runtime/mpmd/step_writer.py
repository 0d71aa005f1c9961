"""Writes the graph of a step: the passes of all stages over the micro-batches, then the end, with the optimizer.

copies of parameters that several stages use
the schedule's table, tick by tick: work, and what it sends, as soon as it is there
loss and metrics on the device of the last stage

gradients of parameters that several stages use ──▶ the stage that has them
small values (norms) ──▶ all stages, round by round
sums of gradients, parameters, optimizer state ──▶ the state after the step, counters
"""

import functools
import itertools
from collections import defaultdict
from typing import cast

import jax

from jaxpipe.array_types import TensorNumber
from jaxpipe.models.check_batch import shape_key
from jaxpipe.runtime.mpmd.graph_writer import GraphWriter
from jaxpipe.runtime.mpmd.passes import apply_passes
from jaxpipe.runtime.mpmd.report_tasks import batch_results, step_counters, total_weight
from jaxpipe.runtime.mpmd.stage_layout import StageLayout
from jaxpipe.runtime.mpmd.stage_tasks import first_sums, leaves_used, run_kinds
from jaxpipe.runtime.mpmd.step_graph import Arrays, Place, Port, StepGraph, Work
from jaxpipe.runtime.mpmd.update_tasks import StageUpdate, folded_state
from jaxpipe.schedules.table import KIND_NAMES, Kind, Kinds, StageNumber


#: Groups of results that stand for what a member had before.
_OF_MEMBERS = {"state", "sums", "totals", "overflows"}


class MicrobatchWriter(GraphWriter):
    """A graph of the passes over the micro-batches, for a layout."""

    def __init__(self, layout: StageLayout):
        super().__init__(layout)
        self.place, self.members_of = layout.devices.place, layout.devices.members
        self.kinds = layout.schedule.program_kinds
        self.reports: dict[Port, int] = {}
        self._homes = layout.planned.program.placement.home(layout.objective)
        #: What each stage has of the training state at the beginning, by field.
        self.whole = {s: self._given(s) for s in layout.stages}
        #: What each member has now.
        self.members = {place: self._member(place) for s in layout.stages for place in self.members_of(s)}
        #: What has arrived for work on a micro-batch, or is kept for it: by stage, replica and micro-batch.
        self._kept: dict[tuple[StageNumber, int, int], Arrays] = defaultdict(dict)
        self.results: dict[tuple[int, int, int], int] = {}  # by result, replica and micro-batch
        self.statistics: dict[tuple[StageNumber, int], Arrays] = {}
        self._sending: list[tuple[Place, Arrays]] = []  # arrays, and where they are needed
        self._shapes: dict[tuple[StageNumber, Kinds], Arrays] = {}

    def finish(self, outputs: dict[Port, int]) -> StepGraph:
        """Return the graph that ends with some arrays and the reports, after all passes."""
        if self.reports and len(self.devices.processes) > 1:
            self.reports = self.spread(self.layout.home, self.layout.replicas, self.reports)
        return apply_passes(super().finish(outputs | self.reports), self.layout)

    def _given(self, s: StageNumber) -> Arrays:
        ports = [x.port for arrays in self.layout.state_arrays.values() for x in arrays if x.port.place.stage == s]
        arrays: Arrays = {field: {} for field in self.layout.state_arrays}
        for port in ports:
            arrays[port.field][port.number] = self.given(port.place, port.field, cast(int, port.number))
        return arrays

    def _member(self, place: Place) -> Arrays:
        stage = self.layout.stage(place.stage)
        return {
            "key": self.given(place, "key"),
            "step": self.given(place, "step"),
            "batch": {k: self.given(place, "batch", k) for k in leaves_used(self.layout, stage)},
            "state": self.whole[place.stage]["variables"],
            "lent": self.at(place, {t: self.whole[self._homes[t]]["parameters"][t] for t in stage.borrowed}),
            **{group: {} for group in ("sums", "totals", "overflows")},
        }

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
            for place, arrays in self._sending:
                self.at(place, arrays)
            self._sending.clear()
        for place in self.members:  # those that no micro-batch was left for
            for kinds in self.kinds[place.stage]:
                self.start(place, kinds, idle=True)

    def after_round(self, s: StageNumber, k: int, kinds: Kinds) -> None:
        """Do what follows the work on an entry of the table."""

    def weights_for(self, s: StageNumber, j: int, kinds: Kinds) -> Arrays:
        """The parameters of a stage that work on a micro-batch uses."""
        return self.whole[s]["parameters"]

    def _run_stage(self, s: StageNumber, r: int, j: int, kinds: Kinds, action: int) -> None:
        layout, place = self.layout, self.worker(s, r, j)
        member, kept = self.members[place], self._kept[s, r, j]
        self.start(place, kinds)
        operands = {name: member[name] for name in ("key", "step", "batch", "state")}
        added = self._added(s, kinds).items()
        operands |= {group: {k: member[group][k] for k in x if k in member[group]} for group, x in added}
        operands |= {"parameters": self.weights_for(s, j, kinds) | member["lent"]}
        operands |= {"index": self.given(place, "index", j), "arriving": {}, "cotangents": {}} | kept
        label = f"stage {s}: " + " and ".join(KIND_NAMES[kind] for kind in kinds)
        work = functools.partial(run_kinds, layout, s, kinds)
        results = self.run(place, label, work, operands, layout.stage(s), microbatch=j, action=action)
        put(member, {name: x for name, x in results.items() if name in _OF_MEMBERS})
        kept |= {group: results[group] for group in ("stash", "saved") if group in results}
        if Kind.BACKWARD in kinds or Kind.BACKWARD_WEIGHT in kinds:
            del self._kept[s, r, j]
        if "statistics" in results:
            self.statistics[s, j] = results["statistics"]
        self.results |= {(k, r, j): number for k, number in results.get("results", {}).items()}
        for group, next_group, other in (("leaving", "arriving", s + 1), ("returning", "cotangents", s - 1)):
            if results.get(group):
                # Sent at the end of the tick: a device that takes part in a message may wait for the other one.
                self._kept[StageNumber(other), r, j][next_group] = results[group]
                self._sending.append((self.worker(StageNumber(other), r, j), results[group]))

    def start(self, place: Place, kinds: Kinds, idle: bool = False) -> None:
        """Make the zeros that the first micro-batch's work adds to; of an ``idle`` member, all sums."""
        held, avals = self.members[place], self._added(place.stage, kinds)
        if not idle and self.layout.num_microbatches == 1:  # the gradients of a single micro-batch are the sums
            avals = {group: x for group, x in avals.items() if group != "sums"}
        missing = {group: {k: x for k, x in row.items() if k not in held[group]} for group, row in avals.items()}
        if jax.tree.leaves(missing):
            put(held, self.zeros(place, f"stage {place.stage}: zeros", missing))

    def zeros(self, place: Place, label: str, avals: Arrays) -> Arrays:
        """Make zeros of some shapes, or what else sums begin with."""
        work = functools.partial(first_sums, avals, self.layout.objective.overwritten)
        return self.run(place, label, lambda _: work(), {}, shape_key(avals))

    def _added(self, s: StageNumber, kinds: Kinds) -> Arrays:
        """Shapes of the arrays that work of some kinds adds to: totals, and sums of the gradients that it computes."""
        if (s, kinds) not in self._shapes:
            given = {t for kind in kinds for t in self.layout.stage(s).differentiated(kind)}
            sums = {x.tensors[0]: x.aval for t, x in self.layout.sums[s].items() if t in given}
            totals = self.layout.totals(s) if Kind.FORWARD in kinds else {"totals": {}}
            self._shapes[s, kinds] = {"sums": sums, **totals}
        return self._shapes[s, kinds]

    def gather_totals(self, k: int) -> list[int]:
        """Return a total of all members of the stage that makes it."""
        s = next(s for s in self.layout.stages if k in self.layout.stage(s).results)
        return [self.members[place]["totals"][k] for place in self.members_of(s)]

    def report(self, **flags: list[int]) -> Arrays:
        """Make loss and metrics of the totals."""
        home, objective = self.layout.home, self.layout.objective
        operands: Arrays = {"totals": [self.gather_totals(k) for k in range(len(objective.results))]} | flags
        results = self.run(home, "loss and metrics", functools.partial(batch_results, objective), operands)
        self.reports[Port(home, "loss")] = results["loss"]
        self.reports |= {Port(home, "metrics", k): x for k, x in enumerate(results["metrics"])}
        return results


class StepEndWriter(MicrobatchWriter):
    """A graph with the passes over the micro-batches, and what the optimizer does then."""

    def __init__(self, layout: StageLayout):
        super().__init__(layout)
        self.ends = {s: StageUpdate(layout, s) for s in layout.stages}
        #: By stage, that which borrows a parameter and the parameter, sums of gradients that have come back.
        self._returned = {s: defaultdict[StageNumber, dict[TensorNumber, int]](dict) for s in layout.stages}
        #: Of a weighted batch its weight; under a guard, whether the step is stopped.
        self._everywhere: dict[str, int] = {}
        #: By stage, its parameters and its optimizer state now, of all its members.
        self.held = {s: self._given_state(s) for s in layout.stages}

    def _given_state(self, s: StageNumber) -> Arrays:
        place, shared = self.place(s), self.layout.update.by_stage.leaves_of(None)
        names = ("step", "skipped") if self.devices.counts[s] else ("step",)
        everywhere = {"shared": {k: self.given(place, "shared", k) for k in shared}}
        return self.whole[s] | everywhere | {name: self.given(place, name) for name in names}

    def run_whole(
        self, s: StageNumber, what: str, work: Work, arrays: Arrays | None = None, consumes: bool = False
    ) -> Arrays:
        """Run work on all members of a stage together; left out, on all arrays that it may read."""
        arrays = self.arrays_of(s) if arrays is None else arrays
        return self.run(self.place(s), f"stage {s}: {what}", work, arrays, consumes=consumes)

    def renew(self, s: StageNumber, what: str, work: Work) -> None:
        """Run work on all members of a stage that writes over what the stage holds."""
        put(self.held[s], self.run_whole(s, what, work, consumes=True))

    def arrays_of(self, s: StageNumber) -> Arrays:
        """The arrays that work at the end of a step may read: gradients, parameters, optimizer state."""
        groups = [{group: self.members[place][group] for group in ("sums", "state")} for place in self.members_of(s)]
        arrays: Arrays = {"weight": self.given(self.place(s), "weight"), "returned": dict(self._returned[s])}
        arrays |= self.held[s] | self.join(s, groups, own=True) | self._everywhere
        if self.layout.is_guarded:
            arrays["old"] = self._given_state(s) | {"state": self.whole[s]["variables"]}
        return arrays

    def fold_state(self) -> None:
        """Give all members of a stage that shares micro-batches the state after all of these."""
        for s in self.layout.stages:
            fold = self.layout.stage(s).fold
            if fold is None:
                continue
            rows = [self.statistics[s, j] for j in range(self.layout.num_microbatches)]
            for place in self.members_of(s):
                work = functools.partial(folded_state, self.layout, s)
                operands = {"state": {t: self.members[place]["state"][t] for t in fold.state}, "statistics": rows}
                put(self.members[place], self.run(place, f"stage {s}: state", work, operands))

    def return_gradients(self) -> None:
        """Weigh the batch, and send gradients of borrowed parameters to the stage that has the parameter."""
        home, layout = self.layout.home, self.layout
        if layout.objective.weighted:
            total = self.run(home, "the total weight", total_weight, {"totals": self.gather_totals(1)})
            self._everywhere["weight"] = total["weight"]
        for s in layout.stages:
            for t in layout.held(s):
                for k in layout.lenders(t):
                    self._returned[s][k][t] = self._return_gradient(s, k, t)

    def _return_gradient(self, s: StageNumber, k: StageNumber, t: TensorNumber) -> int:
        """Give the sums of a parameter's gradients in stage ``k`` to stage ``s``, which has it."""
        sums = [self.members[place]["sums"][t] for place in self.members_of(k)]
        if len(sums) == len(self.members_of(s)):
            return self.join(s, sums, own=True)
        joined = {"sums": {t: self.join(k, sums, own=True)}}
        return self.run_whole(k, "sum of gradients", self.ends[k].returned_sum, joined)["mean"][t]

    def report_step(self) -> None:
        """Make loss and metrics, and under a guard say everywhere whether the step is stopped."""
        if not self.layout.is_guarded:
            self.report()
            return
        results = self.report(nonfinite=[self.look(s)["nonfinite"] for s in self.layout.stages])
        for name in ("nonfinite_stages", "stopped"):
            self.reports[Port(self.layout.home, "counters", name)] = results[name]
        self._everywhere["stopped"] = results["stopped"]

    def look(self, s: StageNumber) -> Arrays:
        """Search a stage for what is not finite."""
        return self.run_whole(s, "look for what is not finite", self.ends[s].look)

    def update_stages(self) -> None:
        """Run the optimizer."""
        by_stage, stages = self.layout.update.by_stage, self.layout.stages
        for number, exchanged in enumerate(by_stage.exchanged):
            for s in stages:
                if any(by_stage.stage_of[t] == s for t in exchanged):
                    work = functools.partial(self.ends[s].share, number)
                    told = self.run_whole(s, f"optimizer, round {number}", work)
                    for other in stages:
                        put(self.held[other], told)
        for s in stages:
            self.renew(s, "update", self.ends[s].update)
        self.count(1)

    def count(self, updates: int) -> None:
        """Make the step's counters, of so many updates."""
        home, learning_rate = self.layout.home, self.layout.update.by_stage.learning_rate
        held, rows = self.held[home.stage], list(self.held.values())
        arrays = {name: [row[name] for row in rows if name in row] for name in ("squares", "had", "unsent")}
        arrays |= {"overflows": [x for row in self.members.values() for x in row["overflows"].values()]}
        copied = {} if learning_rate is None else {"learning_rate": held["shared"][learning_rate]}
        copied |= {"skipped": held["skipped"]} if self.layout.update.on_nonfinite == "skip" else {}
        arrays |= {"copied": copied}
        work = functools.partial(step_counters, updates)
        counters = self.run(home, "counters", work, arrays, updates)["counters"]
        self.reports |= {Port(home, "counters", name): x for name, x in counters.items()}

    def state(self) -> dict[Port, int]:
        """The training state that the next step begins with."""
        outputs = {}
        for s in self.layout.stages:
            held, members = self.held[s], [self.members[place] for place in self.members_of(s)]
            renewed = self.layout.renewed_state(s)
            after = {t: self.join(s, [x["state"][t] for x in members], own=False) for t in renewed}
            fields = {field: held[field] for field in self.layout.state_arrays}
            fields["variables"] = held["variables"] | after | held.get("state", {})
            if self.devices.counts[s]:
                fields |= {"shared": held["shared"]} | {name: {0: held[name]} for name in ("step", "skipped")}
            outputs |= {Port(self.place(s), field, k): x for field, arrays in fields.items() for k, x in arrays.items()}
        return outputs


def put(held: Arrays, new: Arrays) -> None:
    """Put arrays in the place of those of the same group and key."""
    for group, x in new.items():
        held[group] = {**held.get(group, {}), **x} if isinstance(x, dict) else x
