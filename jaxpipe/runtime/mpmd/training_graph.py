"""The graphs of a pipeline: a training step, its gradient, and forward passes.

copies of parameters that several stages use
the schedule's table, tick by tick: work, and what it sends, as soon as it is there
loss and metrics on the device of the last stage
the optimizer, stage by stage
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.array_types import TensorNumber
from jaxpipe.runtime.mpmd.graph_writer import GraphWriter
from jaxpipe.runtime.mpmd.instructions import Place
from jaxpipe.runtime.mpmd.passes import apply_passes
from jaxpipe.runtime.mpmd.report_tasks import counters_work, results_work, stack_work, weight_work
from jaxpipe.runtime.mpmd.stage_devices import Layout
from jaxpipe.runtime.mpmd.stage_tasks import leaves_used, shape_of, stage_work
from jaxpipe.runtime.mpmd.step_graph import Form, Port, StepGraph, Value
from jaxpipe.runtime.mpmd.trace_task import Arrays, Work
from jaxpipe.runtime.mpmd.update_tasks import StageUpdate, UpdateContext, fold_work, zeros_work
from jaxpipe.schedules.joined_work import Kinds, program_kinds
from jaxpipe.schedules.table import Kind, StageNumber


def training_graph(layout: Layout, update: UpdateContext) -> StepGraph:
    """Return the graph of a training step.

    Its outputs are the state after it, in the fields of ``TrainState``, and reports at ``layout.home``.
    """
    writer = _UpdateWriter(layout, update)
    writer.run_table()
    if layout.schedule.versions is None:
        writer.fold_state()
        writer.return_gradients()
        writer.report_step()
        writer.update_stages()
    else:
        writer.report_step()
        writer.end_updates()
    return writer.finish(writer.state())


def gradient_graph(layout: Layout, update: UpdateContext) -> StepGraph:
    """Return the graph for loss, metrics and gradients, which are in the field ``gradients`` of their stages."""
    writer = _UpdateWriter(layout, update)
    writer.run_table()
    writer.report()
    writer.return_gradients()
    outputs = {}
    for s in layout.stages:
        means = writer.run_whole(s, writer.ends[s].mean_gradient(), writer.arrays_of(s))["mean"]
        outputs |= {Port(writer.place(s), "gradients", t): number for t, number in means.items()}
    return writer.finish(outputs)


def evaluation_graph(layout: Layout) -> StepGraph:
    """Return the graph for loss and metrics of a forward pass."""
    writer = _Writer(layout)
    writer.run_table()
    writer.report()
    return writer.finish({})


def prediction_graph(layout: Layout) -> StepGraph:
    """Return the graph for predictions, in the field ``predictions`` of a member of the last stage for each replica."""
    writer = _Writer(layout)
    writer.run_table()
    outputs, work = {}, stack_work(layout.context)
    for r in layout.replicas:
        place = writer.worker(layout.home.stage, r, 0)
        predictions = writer.run("predictions", work, place, {"results": writer.gather_results(r, place)})[
            "predictions"
        ]
        if layout.rows_cross:
            predictions = writer.spread(place, [r], predictions)
        outputs |= {Port(place, "predictions", k): number for k, number in enumerate(predictions)}
    return writer.finish(outputs)


@dataclass
class _Member:
    """The arrays of a member of a stage while a graph is written, by group; ``started``: what has had its zeros."""

    arrays: Arrays
    index: list[int]  # by micro-batch
    started: set[Kinds] = field(default_factory=set)


#: Groups of results that stand for what a member had before.
_OF_MEMBERS = {"state", "sums", "packs", "totals", "overflows"}


class _Writer(GraphWriter):
    """A graph of the passes over the micro-batches, for a layout."""

    def __init__(self, layout: Layout):
        super().__init__(layout.devices, layout.traces)
        self.layout, self.context = layout, layout.context
        self.place, self.members_of = layout.devices.place, layout.devices.members
        self.every_member = [self.place(s, r) for s in layout.stages for r in self.members_of(s)]
        self.kinds = {s: program_kinds(layout.schedule, s) for s in layout.stages}
        self.reports: dict[Port, int] = {}
        #: What each stage holds at the beginning, of all its members.
        self.whole = {s: self._given(s) for s in layout.stages}
        #: By stage, the versions of its parameters, each by member; one, unless they are updated during the step.
        self.versions = {s: [self.split(s, self.whole[s]["parameters"])] for s in layout.stages}
        self.members = {place: self._member(place) for place in self.every_member}
        self._lend_parameters()
        #: What has arrived for work on a micro-batch, or is kept for it: by stage, replica and micro-batch.
        self._kept: dict[tuple[StageNumber, int, int], Arrays] = defaultdict(dict)
        self._results: dict[tuple[int, int, int], tuple[Place, int]] = {}  # by result, replica and micro-batch
        self._statistics: dict[tuple[StageNumber, int], tuple[Place, Arrays]] = {}
        self._sending: list[Callable[[], None]] = []
        self._shapes: dict[tuple[StageNumber, Kinds], Arrays] = {}

    def finish(self, outputs: dict[Port, int]) -> StepGraph:
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
                number = self.versions[home][0][r][t]
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

    def weights(self, s: StageNumber, j: int) -> list[Arrays]:
        """The parameters of a stage, by member, that a micro-batch uses."""
        return self.versions[s][0]

    def _run_stage(self, s: StageNumber, r: int, j: int, kinds: Kinds, action: int) -> None:
        context, place = self.context, self.worker(s, r, j)
        member, kept = self.members[place], self._kept[s, r, j]
        self.start(place, kinds)
        operands = {name: member.arrays[name] for name in ("key", "step", "batch", "state")}
        operands |= _taken(member.arrays, self._added(s, kinds))
        operands |= {"parameters": self.weights(s, j)[max(place.replica, 0)] | member.arrays["lent"]}
        operands |= {"index": member.index[j], "arriving": {}, "cotangents": {}} | kept
        work, key = stage_work(context, s, kinds), ("stage", s, kinds, id(context.stages[s]), context.collects)
        results = self.run(key, work, place, operands, microbatch=j, action=action)
        _update(member.arrays, {name: x for name, x in results.items() if name in _OF_MEMBERS})
        kept |= {group: results[group] for group in ("stash", "saved") if group in results}
        if Kind.BACKWARD in kinds or Kind.BACKWARD_WEIGHT in kinds:
            del self._kept[s, r, j]
        if results.get("statistics"):
            self._statistics[s, j] = place, results["statistics"]
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
            _update(
                member.arrays, self.run_as(_shapes(missing), s, zeros_work(context, s, "zeros", missing), place, {})
            )

    def _added(self, s: StageNumber, kinds: Kinds) -> Arrays:
        """What work of some kinds adds to, as shapes: totals, and the sums of gradients that it computes."""
        if (s, kinds) not in self._shapes:
            given = {t for kind in kinds for t in self.context.stages[s].differentiated(kind)}
            sums = self.context.sums(s, [t for t in self.context.trained(s) if t in given])
            self._shapes[s, kinds] = sums | (self.context.totals(s) if Kind.FORWARD in kinds else {"totals": {}})
        return self._shapes[s, kinds]

    def run_as(
        self, what: Hashable, s: StageNumber, work: Work, place: Place, arrays: Arrays, consumes: bool = False
    ) -> Arrays:
        """Run work of a stage; ``what`` it is decides all but the shapes of its operands."""
        key = what, id(self.context.stages[s]), _shapes(self.avals(arrays))
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
        key = "results", jax.tree.structure(operands), id(objective)
        results = self.run(key, results_work(objective), home, operands)
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


class _UpdateWriter(_Writer):
    """A graph with the passes over the micro-batches, and what the optimizer does then."""

    def __init__(self, layout: Layout, update: UpdateContext):
        self.update = update
        self.ends = {s: StageUpdate(update, s) for s in layout.stages}
        super().__init__(layout)
        self.returned: dict[StageNumber, dict[StageNumber, dict[TensorNumber, int]]] = {
            s: defaultdict(dict) for s in layout.stages
        }
        self.weight: dict[Place, int] = {}
        self.stopped: dict[Place, int] = {}
        #: By stage, the optimizer's arrays; and parameters, where they have been updated during the step.
        self.optimizer = {s: self._given_optimizer(s) for s in layout.stages}
        self.initial = {s: dict(held) for s, held in self.optimizer.items()}

    def _given_optimizer(self, s: StageNumber) -> Arrays:
        place, by_stage, context = self.place(s), self.update.by_stage, self.context
        arrays: Arrays = {"parameters": self.whole[s]["parameters"], "optimizer": {}, "shared": {}}
        for t, (group, k) in self.update.state_paths(s).items():
            form = context.form(s, (group, k))
            arrays[str(group)][k] = self.given(place, str(group), k, by_stage.graph.tensors[t], form)
        count = jax.ShapeDtypeStruct((), jnp.int32)
        for name in ("step", "skipped") if context.counts[s] else ("step",):
            arrays[name] = self.given(place, name, 0, count, Form("state"))
        residuals = self.ends[s].residuals.items()
        forms = {t: self.ends[s].form(("residual", t)) for t, _ in residuals}
        arrays["residual"] = {t: self.given(place, "residual", t, aval, forms[t]) for t, aval in residuals}
        if self.layout.schedule.versions is not None:
            zero = zeros_work(context, s, "zero", {"squares": jax.ShapeDtypeStruct((), context.norm_dtype)})
            arrays |= self.run_whole(s, zero, {})
        return arrays

    def after_round(self, s: StageNumber, k: int, kinds: Kinds) -> None:
        schedule = self.layout.schedule
        if schedule.versions is not None and Kind.BACKWARD in kinds and (k + 1) % schedule.group == 0:
            self._update_early(s)

    def weights(self, s: StageNumber, j: int) -> list[Arrays]:
        versions = self.layout.schedule.versions
        if versions is None:
            return super().weights(s, j)
        return self.versions[s][min(versions[s][j], len(self.versions[s]) - 1)]  # frozen stages have one version

    def _update_early(self, s: StageNumber) -> None:
        """Update a stage, whose gradients are then added up from zero again."""
        work = self.ends[s].early_update(self.layout.schedule.group)
        results = self.run_whole(s, work, self.arrays_of(s), consumes=True)
        _update(self.optimizer[s], results)
        self.versions[s].append(self.split(s, self.optimizer[s]["parameters"]))
        for r in self.members_of(s):
            member = self.members[self.place(s, r)]
            member.arrays |= {"sums": {}, "packs": {}}
            member.started.clear()

    def run_whole(self, s: StageNumber, work: Work, arrays: Arrays, consumes: bool = False) -> Arrays:
        """Run work on all members of a stage together."""
        return self.run_as(work.label, s, work, self.place(s), arrays, consumes)

    def _joined_members(self, s: StageNumber, groups: Iterable[str]) -> Arrays:
        members = [self.members[self.place(s, r)].arrays for r in self.members_of(s)]
        return self.join([{group: arrays[group] for group in groups} for arrays in members], own=True)

    def arrays_of(self, s: StageNumber) -> Arrays:
        """The arrays that work at the end of a step may read: gradients, parameters, optimizer state."""
        places, held, stage_end = [self.place(s, r) for r in self.members_of(s)], self.optimizer[s], self.ends[s]
        arrays = held | self._joined_members(s, ("sums", "packs")) | {"returned": dict(self.returned[s])}
        for name, values in (("weight", self.weight), ("stopped", self.stopped)):
            if values:
                arrays[name] = self.join([values[place] for place in places], own=False)
        if stage_end.state:
            arrays["state"] = {
                t: x for t, x in self._joined_members(s, ("state",))["state"].items() if t in stage_end.state
            }
        if self.update.guarded:
            old = {group: self.initial[s][group] for group in ("parameters", "optimizer", "shared")}
            arrays["old"] = old | {"state": self.whole[s]["state"]}
        return arrays

    def fold_state(self) -> None:
        """Give all members of a stage that shares micro-batches the state after all of these."""
        for s in self.layout.stages:
            fold = self.context.stages[s].fold
            for r in self.members_of(s) if fold is not None and self.context.statistics(s) else ():
                assert fold is not None
                place = self.place(s, r)
                rows = (self._statistics[s, j] for j in range(self.context.num_microbatches))
                statistics = [self.send(source, place, arrays) for source, arrays in rows]
                state = self.members[place].arrays["state"]
                work, before = fold_work(self.context, s), {t: state[t] for t in fold.state}
                operands = {"state": before, "statistics": statistics}
                state |= self.run(("fold", s, id(self.context.stages[s])), work, place, operands)["state"]

    def return_gradients(self) -> None:
        """Weigh the batch, and send gradients of borrowed parameters to the stage that has the parameter."""
        home, context = self.layout.home, self.context
        if context.objective.weighted:
            total = self.run("weight", weight_work(), home, {"totals": self.gather_totals(1)})
            self.weight = self.to_everyone(home, total["weight"])
        else:
            aval = jax.ShapeDtypeStruct((), context.weight_dtype)
            self.weight = {place: self.given(place, "weight", 0, aval, Form("state")) for place in self.every_member}
        for s in self.layout.stages:
            for t in context.held(s):
                for k in self.update.lenders(s, t):
                    self.returned[s][k][t] = self._return_gradient(s, k, t)

    def _return_gradient(self, s: StageNumber, k: StageNumber, t: TensorNumber) -> int:
        """Send the sums of a parameter's gradients from stage ``k`` to ``s``, which has it."""
        sums = [self.members[self.place(k, r)].arrays["sums"][t] for r in self.members_of(k)]
        places = [self.place(k, r) for r in self.members_of(k)]
        as_sum = self.update.returns_sum(s, k)
        if as_sum:
            joined = {"sums": {t: self.join(sums, own=True)}}
            total = self.run_whole(k, self.ends[k].returned_sum(t), joined)["mean"][t]
            sums, places = self.split(k, total)[:1] * len(self.members_of(s)), places[:1] * len(self.members_of(s))
        pairs = zip(places, sums, self.members_of(s), strict=True)
        return self.join([self.send(place, self.place(s, r), x) for place, x, r in pairs], own=not as_sum)

    def report_step(self) -> None:
        """Make loss and metrics, and under a guard say everywhere whether the step is stopped."""
        home = self.layout.home
        if not self.update.guarded:
            self.report()
            return
        flags = []
        for s, end in self.ends.items():
            work = end.look() if self.layout.schedule.versions is None else end.look_at_norm()
            flag = self.run_whole(s, work, self.arrays_of(s))["nonfinite"]
            flags.append(self.send(self.place(s, 0), home, self.split(s, flag)[0]))
        results = self.report(nonfinite=flags)
        self.reports |= {Port(home, "counters", name): results[name] for name in ("nonfinite_stages", "stopped")}
        self.stopped = self.to_everyone(home, results["stopped"])

    def update_stages(self) -> None:
        """Run the optimizer."""
        by_stage, stages = self.update.by_stage, self.layout.stages
        if self.update.exchange is not None:
            for s in stages:
                _update(self.optimizer[s], self.run_whole(s, self.ends[s].exchange(), self.arrays_of(s), consumes=True))
                _update(self.optimizer[s], self.run_whole(s, self.ends[s].averages(), self.arrays_of(s)))
        for number, exchanged in enumerate(by_stage.exchanged):
            for s in stages:
                if any(by_stage.stage_of[t] == s for t in exchanged):
                    self._tell(s, self.run_whole(s, self.ends[s].share(number), self.arrays_of(s)))
        for s in stages:
            _update(self.optimizer[s], self.run_whole(s, self.ends[s].update(), self.arrays_of(s), consumes=True))
        self._count(1)

    def _tell(self, s: StageNumber, told: Arrays) -> None:
        """Give small values of a stage, which all its members have, to all stages."""
        parts = self.split(s, told)
        for other in self.layout.stages:
            pairs = [(r % len(parts), self.place(other, r)) for r in self.members_of(other)]
            received = [self.send(self.place(s, k), place, parts[k]) for k, place in pairs]
            _update(self.optimizer[other], told if other == s else self.join(received, own=False))

    def end_updates(self) -> None:
        """End a step whose updates have been made."""
        for s in self.layout.stages:
            _update(self.optimizer[s], self.run_whole(s, self.ends[s].end(), self.arrays_of(s), consumes=True))
        self._count(self.context.num_microbatches // self.layout.schedule.group)

    def state(self) -> dict[Port, int]:
        """The training state that the next step begins with."""
        outputs = {}
        for s in self.layout.stages:
            place, held, context = self.place(s), self.optimizer[s], self.context
            renewed, members = context.renewed_state(s), [self.members[self.place(s, r)] for r in self.members_of(s)]
            after = {t: self.join([x.arrays["state"][t] for x in members], own=False) for t in renewed}
            fields = {field: held[field] for field in ("parameters", "optimizer", "residual")}
            fields["variables"] = self.whole[s]["state"] | after | held.get("state", {})
            if context.counts[s]:
                fields |= {"shared": held["shared"]} | {name: {0: held[name]} for name in ("step", "skipped")}
            outputs |= {Port(place, field, k): x for field, arrays in fields.items() for k, x in arrays.items()}
        return outputs

    def _count(self, updates: int) -> None:
        """Make the step's counters."""
        home, by_stage = self.layout.home, self.update.by_stage
        names = ["squares", *(("had", "unsent") if self.update.exchange is not None else ())]
        operands: Arrays = {name: [] for name in (*names, "overflows")}
        for s in self.layout.stages:
            values = self.send(
                self.place(s, 0), home, self.split(s, {name: self.optimizer[s][name] for name in names})[0]
            )
            for name in names:
                operands[name].append(values[name])
        for place, member in self.members.items():
            if "overflows" in member.arrays:
                operands["overflows"].append(self.send(place, home, member.arrays["overflows"]))
        held = self.optimizer[home.stage]
        copied = {} if by_stage.learning_rate is None else {"learning_rate": held["shared"][by_stage.learning_rate]}
        copied |= {"skipped": held["skipped"]} if self.update.skips else {}
        operands["copied"] = self.split(home.stage, copied)[0]
        key = "counters", updates, jax.tree.structure(operands), id(self.update)
        counters = self.run(key, counters_work(updates), home, operands)["counters"]
        self.reports |= {Port(home, "counters", name): x for name, x in counters.items()}


def _update(held: Arrays, new: Arrays) -> None:
    """Put arrays in the place of those of the same group and key."""
    for group, x in new.items():
        held[group] = {**held.get(group, {}), **x} if isinstance(x, dict) else x


def _taken(held: Arrays, wanted: Arrays) -> Arrays:
    """Return the arrays of the groups and keys that are wanted and there."""
    scalars = {group: held[group] for group, x in wanted.items() if not isinstance(x, dict) and group in held}
    groups = ((group, x) for group, x in wanted.items() if isinstance(x, dict))
    return scalars | {group: {k: held[group][k] for k in x if k in held[group]} for group, x in groups}


def _shapes(avals: Arrays) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(avals)
    return structure, *((x.shape, x.dtype) for x in leaves)
