"""The passes of all stages over the micro-batches, as a part of a step's graph.

copies of parameters that several stages use
the schedule's table, tick by tick: work, and what it sends, as soon as it is there
loss and metrics on the device of the last stage
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.runtime.mpmd.graph_writer import GraphWriter
from jaxpipe.runtime.mpmd.instructions import Place
from jaxpipe.runtime.mpmd.passes import apply_passes
from jaxpipe.runtime.mpmd.report_tasks import results_work
from jaxpipe.runtime.mpmd.stage_devices import StageLayout
from jaxpipe.runtime.mpmd.stage_tasks import leaves_used, shape_of, stage_work, zeros_work
from jaxpipe.runtime.mpmd.step_graph import Form, Port, StepGraph, Value
from jaxpipe.runtime.mpmd.trace_task import Arrays, TaskWork
from jaxpipe.schedules.joined_work import Kinds, program_kinds
from jaxpipe.schedules.table import Kind, StageNumber


@dataclass
class _Member:
    """The arrays of a member of a stage while a graph is written, by group; ``started``: what has had its zeros."""

    arrays: Arrays
    index: list[int]  # by micro-batch
    started: set[Kinds] = field(default_factory=set)


#: Groups of results that stand for what a member had before.
_OF_MEMBERS = {"state", "sums", "packs", "totals", "overflows"}


class MicrobatchWriter(GraphWriter):
    """A graph of the passes over the micro-batches, for a layout."""

    def __init__(self, layout: StageLayout):
        super().__init__(layout.devices, layout.traces)
        self.layout, self.context = layout, layout.context
        self.place, self.members_of = layout.devices.place, layout.devices.members
        self.every_member = [self.place(s, r) for s in layout.stages for r in self.members_of(s)]
        self.kinds = {s: program_kinds(layout.schedule, s) for s in layout.stages}
        self.reports: dict[Port, int] = {}
        #: What each stage holds at the beginning, of all its members.
        self.whole = {s: self._given(s) for s in layout.stages}
        #: By stage, its parameters as each member has them.
        self.weights = {s: self.split(s, self.whole[s]["parameters"]) for s in layout.stages}
        self.members = {place: self._member(place) for place in self.every_member}
        self._lend_parameters()
        #: What has arrived for work on a micro-batch, or is kept for it: by stage, replica and micro-batch.
        self._kept: dict[tuple[StageNumber, int, int], Arrays] = defaultdict(dict)
        self._results: dict[tuple[int, int, int], tuple[Place, int]] = {}  # by result, replica and micro-batch
        self.statistics: dict[tuple[StageNumber, int], tuple[Place, Arrays]] = {}
        self._sending: list[Callable[[], None]] = []
        self._shapes: dict[tuple[StageNumber, Kinds], Arrays] = {}

    def finish(self, outputs: dict[Port, int]) -> StepGraph:
        """Return the graph that ends with some arrays and the reports, after all passes."""
        if self.reports and len(self.devices.processes) > 1:
            self.reports = self.spread(self.layout.home, self.layout.replicas, self.reports)
        return apply_passes(super().finish(outputs | self.reports), self.layout)

    def given(self, place: Place, field: str, number: Any, aval: Any, form: Form, j: int = -1) -> int:
        """Return an array that exists at the beginning."""
        return self.input(Port(place, field, number, j), Value(shape_of(aval), place, form))

    def _given(self, s: StageNumber) -> Arrays:
        context, stage, place = self.context, self.context.stages[s], self.place(s)
        groups = {"parameters": ("parameters", stage.parameters), "state": ("variables", stage.state)}
        return {
            group: {t: self.given(place, field, t, context.aval(t), context.form(s, (group, t))) for t in tensors}
            for group, (field, tensors) in groups.items()
        }

    def _member(self, place: Place) -> _Member:
        context, small = self.context, Form("state")
        s, key = place.stage, jax.eval_shape(jax.random.key_data, context.key)
        arrays = {
            "key": self.given(place, "key", 0, key, small),
            "step": self.given(place, "step", 0, jax.ShapeDtypeStruct((), jnp.int32), small),
            "batch": {
                k: self.given(place, "batch", k, context.batch[k], Form("batch"))
                for k in leaves_used(context, context.stages[s])
            },
            "state": self.split(s, self.whole[s]["state"])[max(place.replica, 0)],
            "sums": {},
            "packs": {},
            "totals": {},
            "lent": {},
        }
        pair = jax.ShapeDtypeStruct((2,), jnp.int32)
        index = [self.given(place, "index", 0, pair, small, j) for j in range(context.num_microbatches)]
        return _Member(arrays, index)

    def _lend_parameters(self) -> None:
        """Send parameters that several stages use to those that do not have them."""
        for place in self.every_member:
            for t in self.context.stages[place.stage].borrowed:
                home = self.layout.homes[t]
                r = place.replica % len(self.members_of(home))
                number = self.weights[home][r][t]
                self.members[place].arrays["lent"][t] = self.send(self.place(home, r), place, number)

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
        context, place = self.context, self.worker(s, r, j)
        member, kept = self.members[place], self._kept[s, r, j]
        self.start(place, kinds)
        operands = {name: member.arrays[name] for name in ("key", "step", "batch", "state")}
        operands |= _taken(member.arrays, self._added(s, kinds))
        operands |= {"parameters": self.weights_for(s, j, kinds)[max(place.replica, 0)] | member.arrays["lent"]}
        operands |= {"index": member.index[j], "arriving": {}, "cotangents": {}} | kept
        work, key = stage_work(context, s, kinds), ("stage", s, kinds, id(context.stages[s]), context.collects)
        results = self.run(key, work, place, operands, microbatch=j, action=action)
        put(member.arrays, {name: x for name, x in results.items() if name in _OF_MEMBERS})
        kept |= {group: results[group] for group in ("stash", "saved") if group in results}
        if Kind.BACKWARD in kinds or Kind.BACKWARD_WEIGHT in kinds:
            del self._kept[s, r, j]
        if results.get("statistics"):
            self.statistics[s, j] = place, results["statistics"]
        self._results |= {(k, r, j): (place, number) for k, number in results.get("results", {}).items()}
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
        context, s, member = self.context, place.stage, self.members[place]
        if kinds in member.started:
            return
        member.started.add(kinds)
        avals = self._added(s, kinds)
        if not idle and context.num_microbatches == 1:  # the gradients of a single micro-batch are the sums
            avals = {group: x for group, x in avals.items() if group not in ("sums", "packs")}
        missing = {group: x for group, x in avals.items() if not isinstance(x, dict) and group not in member.arrays}
        for group, shapes in avals.items():
            if isinstance(shapes, dict):
                missing[group] = {k: x for k, x in shapes.items() if k not in member.arrays[group]}
        if jax.tree.leaves(missing):
            work = zeros_work(context, s, "zeros", missing)
            put(member.arrays, self.run_as(shapes_of(missing), s, work, place, {}))

    def _added(self, s: StageNumber, kinds: Kinds) -> Arrays:
        """Shapes of the arrays that work of some kinds adds to: totals, and sums of the gradients that it computes."""
        if (s, kinds) not in self._shapes:
            given = {t for kind in kinds for t in self.context.stages[s].differentiated(kind)}
            sums = self.context.sums(s, [t for t in self.context.trained(s) if t in given])
            self._shapes[s, kinds] = sums | (self.context.totals(s) if Kind.FORWARD in kinds else {"totals": {}})
        return self._shapes[s, kinds]

    def run_as(
        self, what: Hashable, s: StageNumber, work: TaskWork, place: Place, arrays: Arrays, consumes: bool = False
    ) -> Arrays:
        """Run work of a stage; ``what`` it is decides all but the shapes of its operands."""
        key = what, id(self.context.stages[s]), shapes_of(self.avals(arrays))
        return self.run(key, work, place, arrays, consumes)

    def maker(self, k: int) -> StageNumber:
        """The stage that makes a result."""
        return next(s for s in self.layout.stages if k in self.context.stages[s].results)

    def gather_totals(self, k: int) -> list[int]:
        """Send a total of all members of its stage to the last stage."""
        places = [self.place(self.maker(k), r) for r in self.members_of(self.maker(k))]
        return [self.send(place, self.layout.home, self.members[place].arrays["totals"][k]) for place in places]

    def report(self, **flags: list[int]) -> Arrays:
        """Make loss and metrics of the totals."""
        home, objective = self.layout.home, self.context.objective
        operands: Arrays = {"totals": [self.gather_totals(k) for k in range(len(objective.results))]} | flags
        results = self.run_as("results", home.stage, results_work(objective), home, operands)
        self.reports[Port(home, "loss")] = results["loss"]
        self.reports |= {Port(home, "metrics", k): x for k, x in enumerate(results["metrics"])}
        return results

    def gather_results(self, r: int, target: Place) -> list[list[int]]:
        """Send the predictions of a replica to a member of the last stage."""
        microbatches = range(self.context.num_microbatches)
        rows = ([self._results[k, r, j] for j in microbatches] for k in range(len(self.context.objective.results)))
        return [[self.send(place, target, number) for place, number in row] for row in rows]

    def to_everyone(self, source: Place, tree: Any) -> dict[Place, Any]:
        """Send values to all members of all stages."""
        return {place: self.send(source, place, tree) for place in self.every_member}


def put(held: Arrays, new: Arrays) -> None:
    """Put arrays in the place of those of the same group and key."""
    for group, x in new.items():
        held[group] = {**held.get(group, {}), **x} if isinstance(x, dict) else x


def _taken(held: Arrays, wanted: Arrays) -> Arrays:
    """Return the arrays of the groups and keys that are wanted and there."""
    scalars = {group: held[group] for group, x in wanted.items() if not isinstance(x, dict) and group in held}
    groups = ((group, x) for group, x in wanted.items() if isinstance(x, dict))
    return scalars | {group: {k: held[group][k] for k in x if k in held[group]} for group, x in groups}


def shapes_of(avals: Arrays) -> tuple[Any, ...]:
    """Return the structure, shapes and types that decide how work on some arrays is traced."""
    leaves, structure = jax.tree.flatten(avals)
    return structure, *((x.shape, x.dtype) for x in leaves)
