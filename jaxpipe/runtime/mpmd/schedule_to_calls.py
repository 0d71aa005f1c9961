"""The lists of a pipeline: a training step, its gradient, and forward passes.

copies of parameters that several stages use
the schedule's table, tick by tick: work, and what it sends, as soon as it is there
loss and metrics on the device of the last stage
the optimizer, stage by stage
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

from jaxpipe.runtime.mpmd.call_list import CallList, ListBuilder
from jaxpipe.runtime.mpmd.compile_work import TracedWork, trace_work
from jaxpipe.runtime.mpmd.instructions import Key, Place
from jaxpipe.runtime.mpmd.report_work import copied_counters, counters_work, results_work, stack_work, weight_work
from jaxpipe.runtime.mpmd.stage_placement import Layout
from jaxpipe.runtime.mpmd.stage_work import INDEX, KEY, OVERFLOWS, STEP, Name, Role, Work, shape_of, stage_work
from jaxpipe.runtime.mpmd.swap_instructions import StashMover
from jaxpipe.runtime.mpmd.update_work import (
    HAD,
    NONFINITE,
    SKIPPED,
    SQUARES,
    STOPPED,
    UNSENT,
    WEIGHT,
    StageUpdate,
    UpdateContext,
    fold_work,
    older,
    reported,
    value_avals,
    zeros_work,
)
from jaxpipe.schedules.joined_work import Kinds, program_kinds
from jaxpipe.schedules.table import Kind, StageNumber


def training_list(layout: Layout, update: UpdateContext) -> CallList:
    """Return the list of a training step.

    Its outputs are new parameters, state and optimizer state by stage (as the inputs), and reports at ``layout.home``.
    """
    writer = _Writer(layout)
    ends = [StageUpdate(update, s) for s in layout.stages]
    if layout.schedule.versions is not None:
        writer.run_table(update, ends)
        writer.write_early_results(update, ends)
        return writer.finish([*writer.write_ends(update, ends), *writer.reports])
    writer.run_table()
    writer.fold_state()
    writer.write_results(update, ends)
    return writer.finish([*writer.write_updates(update, ends), *writer.reports])


def gradient_list(layout: Layout, update: UpdateContext) -> CallList:
    """Return the list for loss, metrics and gradients; these are reports of their stages."""
    writer = _Writer(layout)
    ends = [StageUpdate(update, s) for s in layout.stages]
    writer.run_table()
    writer.write_results(None, ends)
    writer.return_gradients(update, ends)
    outputs = []
    for s in layout.stages:
        held = layout.context.held(s)
        if held:
            writer.call_whole(ends[s].mean_gradient(), s)
            outputs += [Key(writer.place(s), Name(Role.MEAN, t)) for t in held]
    return writer.finish([*outputs, *writer.reports])


def evaluation_list(layout: Layout) -> CallList:
    """Return the list for loss and metrics of a forward pass."""
    writer = _Writer(layout)
    writer.run_table()
    writer.write_results(None, ())
    return writer.finish(writer.reports)


def prediction_list(layout: Layout) -> CallList:
    """Return the list for predictions, reports of each replica of the last stage."""
    writer = _Writer(layout)
    writer.run_table()
    writer.gather_results()
    number = writer.program(trace_work(stack_work(layout.context)))
    outputs = []
    names = [Name(Role.REPORT, k) for k in range(len(layout.context.objective.results))]
    for r in layout.replicas:
        place = writer.gatherer(r)
        writer.call(number, layout.home.stage, place.replica)
        outputs += [Key(place, name) for name in names]
    if layout.rows_cross:
        for r in layout.replicas:
            writer.spread(writer.gatherer(r), [r], names)
    return writer.finish(outputs)


class _Writer(ListBuilder):
    """A list that is being written, for a layout."""

    def __init__(self, layout: Layout):
        super().__init__(layout.devices, layout.context)
        self.layout = layout
        self.place, self.members = layout.devices.place, layout.devices.members
        self.every_member = [self.place(s, r) for s in layout.stages for r in self.members(s)]
        self.reports: list[Key] = []
        self._programs = {s: self._trace(s) for s in layout.stages}
        self._started: set[tuple[Place, Kinds]] = set()
        self._leaving: list[Callable[[], None]] = []
        self._zeros: dict[tuple[StageNumber, tuple[Name, ...]], int] = {}
        self._weights: dict[StageNumber, list[dict[Key, int]]] = {}
        self._mover = StashMover(self, layout)
        self._give_inputs()

    def finish(self, outputs: Iterable[Key]) -> CallList:
        if self.reports and len(self.devices.processes) > 1:
            self.spread(self.layout.home, self.layout.replicas, [key.name for key in self.reports])
        return super().finish(outputs)

    def _trace(self, s: StageNumber) -> dict[Kinds, int]:
        """Trace a stage's programs, from the last to the first: what nobody reads is not made."""
        wanted = {Name(Role.ACTIVATION, t) for t in self.context.stages[s].leaving}

        def is_wanted(name: Name) -> bool:
            return name.role not in (Role.ACTIVATION, Role.STASH, Role.SAVED) or name in wanted

        traced: list[tuple[Kinds, TracedWork]] = []
        for kinds in reversed(program_kinds(self.layout.schedule, s)):
            key = s, kinds, id(self.context.stages[s])
            if key not in self.layout.traces:  # the work holds on to the stage, so that its number stays its own
                self.layout.traces[key] = trace_work(stage_work(self.context, s, kinds), is_wanted)
            program = self.layout.traces[key]
            wanted |= set(program.read_names)
            traced.append((kinds, program))
        return {kinds: self.program(program) for kinds, program in reversed(traced)}

    def _give_inputs(self) -> None:
        """Take note of what is there before the step, and share it among replicas and stages."""
        context = self.context
        for s in self.layout.stages:
            stage, whole = context.stages[s], self.place(s)
            held = [Name(Role.PARAMETER, t) for t in stage.parameters]
            held += [Name(Role.STATE, t) for t in stage.state]
            for name in held:
                self.given(whole, name, context.aval(name.tensor))
                self.split(s, name)
        for place in self.every_member:
            self._give_step_inputs(place)
        for s in self.layout.stages:
            for t in context.stages[s].borrowed:
                name, home = Name(Role.PARAMETER, t), self.layout.homes[t]
                for r in self.members(s):
                    owner = self.place(home, r % len(self.members(home)))
                    self.send(owner, self.place(s, r), [(name, name)])

    def _give_step_inputs(self, place: Place) -> None:
        context = self.context
        programs = [self.programs[k].traced for k in self._programs[place.stage].values()]
        avals = {
            name: aval for traced in programs for name, aval in zip(traced.read_names, traced.read_avals, strict=True)
        }
        for name, aval in avals.items():
            if name in (KEY, STEP) or name.role is Role.BATCH:
                self.given(place, name, aval, keep=name != STEP)
            elif name == INDEX:
                for j in range(context.num_microbatches):
                    self.given(place, name, aval, j, keep=True)

    def run_table(self, update: UpdateContext | None = None, ends: Sequence[StageUpdate] = ()) -> None:
        """Write what the schedule says, tick by tick; with ``update``, weights change during the step."""
        if update is not None:
            self._begin_updates(update)
        done: set[tuple[StageNumber, int, Kind]] = set()
        schedule = self.layout.schedule
        positions = [itertools.count() for _ in range(schedule.num_devices)]
        for tick in schedule.ticks:
            for device, actions in zip(schedule.device_numbers, tick, strict=True):
                for action in actions:
                    self._mover.begin_returns(device, next(positions[device]))
                    s, k = schedule.stage(device, action.chunk), action.microbatch
                    kinds = next(kinds for kinds in self._programs[s] if action.kind in kinds)
                    if (s, k, kinds[0]) in done:  # in one program with work before it
                        continue
                    done.add((s, k, kinds[0]))
                    self._use_weights(s, k)
                    for j in self.layout.dealt(k):
                        for r in self.layout.replicas:
                            self._run(s, r, j, kinds)
                    if update is not None and Kind.BACKWARD in kinds and (k + 1) % schedule.group == 0:
                        self._update_early(s, ends[s])
            self._send_messages()
        for place in self.every_member if update is None else ():  # those that no micro-batch was left for
            for kinds in self._programs[place.stage]:
                if (place, kinds) not in self._started:
                    self._start(place, kinds, idle=True)

    def _begin_updates(self, update: UpdateContext) -> None:
        """Give every stage its optimizer; the first version of its weights is what the step begins with."""
        for s in self.layout.stages:
            self._give_optimizer(update, s)
            self.call_whole(zeros_work(f"stage {s}: zero", value_avals(self.context, [SQUARES])), s)
            for name in update.renewed_names(s).values():
                key = self.key(self.place(s), name)
                self.now[key._replace(name=older(name))] = self.now[key]
            self._weights[s] = [self._newest_weights(s)]

    def _newest_weights(self, s: StageNumber) -> dict[Key, int]:
        """The registers of a stage's parameters in every replica."""
        names = [Name(Role.PARAMETER, t) for t in self.context.stages[s].parameters]
        places = [self.place(s, r) for r in self.members(s)]
        keys = [Key(place, name) for place in places for name in names]
        return {key: self.now[key] for key in keys}

    def _use_weights(self, s: StageNumber, j: int) -> None:
        """Let a stage read the version of its weights that a micro-batch uses."""
        if self._weights:
            versions = self.layout.schedule.versions
            assert versions is not None
            weights = self._weights[s]
            self.now |= weights[min(versions[s][j], len(weights) - 1)]  # frozen stages have one version

    def _update_early(self, s: StageNumber, end: StageUpdate) -> None:
        """Update a stage, whose gradients are then added up from zero again."""
        whole, places = self.place(s), {self.place(s, r) for r in self.members(s)}
        self.now |= self._weights[s][-1]
        program = self.call_whole(end.early_update(self.layout.schedule.group), s, consumes=True)
        for name in program.written_names:
            if name.role is Role.PARAMETER:
                self.split(s, name)
        self._weights[s].append(self._newest_weights(s))
        gradients = [key for key in self.now if key.place in {whole, *places} and key.name.role is Role.GRADIENT]
        for key in gradients:
            del self.now[key]
        self._started = {(place, kinds) for place, kinds in self._started if place not in places}

    def _run(self, s: StageNumber, r: int, j: int, kinds: Kinds) -> None:
        stage, place = self.context.stages[s], self._worker(s, r, j)
        if (place, kinds) not in self._started:
            self._started.add((place, kinds))
            self._start(place, kinds)
        self.call(self._programs[s][kinds], s, place.replica, j)
        if kinds == (Kind.FORWARD,):
            self._mover.leave(place, j)
        stages = self.layout.stages
        if Kind.FORWARD in kinds and s + 1 < len(stages):
            names = [Name(Role.ACTIVATION, t) for t in stage.leaving]
            self._leave(place, self._worker(stages[s + 1], r, j), names, j)
        if s and (Kind.BACKWARD in kinds or Kind.BACKWARD_INPUT in kinds):
            names = [Name(Role.COTANGENT, t) for t in stage.returning]
            self._leave(place, self._worker(stages[s - 1], r, j), names, j)

    def _worker(self, s: StageNumber, r: int, j: int) -> Place:
        """The member of a stage that works on a micro-batch of a replica."""
        return self.place(s, self.devices.member(s, r, j))

    def _leave(self, source: Place, target: Place, names: Sequence[Name], j: int) -> None:
        """Send arrays at the end of the tick: a device that takes part in a message may wait for the other one."""
        message = functools.partial(self.send, source, target, [(name, name) for name in names], j)
        if self.devices.at(source) == self.devices.at(target):
            message()
        else:
            self._leaving.append(message)

    def _send_messages(self) -> None:
        for message in self._leaving:
            message()
        self._leaving.clear()

    def _start(self, place: Place, kinds: Kinds, idle: bool = False) -> None:
        """Make the zeros that the first micro-batch's work adds to; of an idle member, all sums."""
        s = place.stage
        traced = self.programs[self._programs[s][kinds]].traced
        needed = {*traced.written_names, *traced.same} if idle else {*traced.read_names, *traced.same.values()}
        given = traced.work.operands | (self.context.sums(s, self.context.trained(s)) if idle else {})
        sums = {
            name: aval
            for name, aval in given.items()
            if name.role in (Role.GRADIENT, Role.TOTAL) and name in needed and not self.has(place, name)
        }
        if sums:
            key = s, tuple(sums)
            if key not in self._zeros:
                work = zeros_work(f"stage {s}: zeros", sums, self.context.objective.overwritten)
                self._zeros[key] = self.program(trace_work(work))
            self.call(self._zeros[key], s, place.replica)

    def write_results(self, update: UpdateContext | None, ends: Sequence[StageUpdate]) -> None:
        """Make loss and metrics of the totals; under ``update`` everything that an update waits for."""
        self._gather_totals()
        if update is not None:
            self._weigh()
            self.return_gradients(update, ends)
            if update.guarded:
                self._look([end.look() for end in ends])
        self._report(update is not None and update.guarded)

    def write_early_results(self, update: UpdateContext, ends: Sequence[StageUpdate]) -> None:
        """Make loss and metrics of the totals; the weights have been updated."""
        for s in self.layout.stages:
            self.now |= self._weights[s][-1]
        self._gather_totals()
        if update.guarded:
            self._look([end.look_at_norm() for end in ends])
        self._report(update.guarded)

    def _maker(self, k: int) -> StageNumber:
        return next(s for s in self.layout.stages if k in self.context.stages[s].results)

    def _gather_totals(self) -> None:
        context, home = self.context, self.layout.home
        for k in range(len(context.objective.results)):
            maker = self._maker(k)
            for r in self.members(maker):
                name = Name(Role.TOTAL, k)
                self.send(self.place(maker, r), home, [(name, Name(Role.TOTAL, k, r))])

    def _look(self, works: Sequence[Work]) -> None:
        """Tell the last stage which stages have gradients that are not finite."""
        for s, work in zip(self.layout.stages, works, strict=True):
            self.call_whole(work, s)
            self.split(s, NONFINITE)
            self.send(self.place(s, 0), self.layout.home, [(NONFINITE, reported(NONFINITE, s))])

    def _report(self, guarded: bool) -> None:
        context, home = self.context, self.layout.home
        members = [len(self.members(self._maker(k))) for k in range(len(context.objective.results))]
        work = results_work(context, members, len(self.layout.stages), guarded)
        self.call(self.program(trace_work(work)), home.stage, 0)
        self.reports += [Key(home, Name(Role.REPORT, k)) for k in range(len(context.objective.results) - 1)]
        if guarded:
            self.reports += [Key(home, NONFINITE), Key(home, STOPPED)]
            self._spread(home, [STOPPED])

    def gather_results(self) -> None:
        """Send the predictions of each replica to a member of the last stage."""
        for k in range(len(self.context.objective.results)):
            name, maker = Name(Role.RESULT, k), self._maker(k)
            for r in self.layout.replicas:
                for j in range(self.context.num_microbatches):
                    self.send(self._worker(maker, r, j), self.gatherer(r), [(name, Name(Role.RESULT, k, j))], j, -1)

    def gatherer(self, r: int) -> Place:
        """The member of the last stage that puts the predictions of a replica together."""
        return self._worker(self.layout.home.stage, r, 0)

    def fold_state(self) -> None:
        """Give all members of a stage that shares micro-batches the state after all of these."""
        for s in self.layout.stages:
            statistics = self.context.statistics(s)
            if not statistics:
                continue
            for j, target in itertools.product(range(self.context.num_microbatches), self.members(s)):
                names = [(Name(Role.STATISTIC, t), Name(Role.STATISTIC, t, j)) for t in statistics]
                self.send(self._worker(s, 0, j), self.place(s, target), names, j, -1)
            number = self.program(trace_work(fold_work(self.context, s)))
            for r in self.members(s):
                self.call(number, s, r)

    def _weigh(self) -> None:
        context, home = self.context, self.layout.home
        if not context.objective.weighted:
            for place in self.every_member:
                self.given(place, WEIGHT, value_avals(context, [WEIGHT])[WEIGHT], keep=True)
            return
        number = self.program(trace_work(weight_work(context, len(self.members(self._maker(1))))))
        self.call(number, home.stage, 0)
        self._spread(home, [WEIGHT])

    def _spread(self, source: Place, names: Sequence[Name]) -> None:
        for target in self.every_member:
            if target != source:
                self.send(source, target, [(name, name) for name in names])

    def return_gradients(self, update: UpdateContext, ends: Sequence[StageUpdate]) -> None:
        """Send gradients of borrowed parameters to the stage that has the parameter."""
        if not self.has(self.place(self.layout.stages[0], 0), WEIGHT):
            self._weigh()
        for s in self.layout.stages:
            for t in self.context.held(s):
                for k in update.lenders(s, t):
                    name, sums = update.returned(s, k, t), update.returns_sum(s, k)
                    if sums:
                        self.call_whole(ends[k].returned_sum(s, t), k)
                        self.split(k, name)
                    pair = name if sums else Name(Role.GRADIENT, t), name
                    for r in self.members(s):
                        self.send(self.place(k, 0 if sums else r), self.place(s, r), [pair])

    def write_updates(self, update: UpdateContext, ends: Sequence[StageUpdate]) -> list[Key]:
        """Run the optimizer; returns what the next step begins with."""
        by_stage, stages = update.by_stage, self.layout.stages
        for s in stages:
            self._give_optimizer(update, s)
        if update.exchange is not None:
            for s in stages:
                self.call_whole(ends[s].exchange(), s, consumes=True)
                self.call_whole(ends[s].averages(), s)
        for number, exchanged in enumerate(by_stage.exchanged):
            for s in stages:
                if any(by_stage.stage_of[t] == s for t in exchanged):
                    for name in self.call_whole(ends[s].share(number), s).written_names:
                        self._spread_whole(self.place(s), name)
        for s in stages:
            self.call_whole(ends[s].update(), s, consumes=True)
        self._count(update, 1)
        return self._state(update)

    def write_ends(self, update: UpdateContext, ends: Sequence[StageUpdate]) -> list[Key]:
        """End a step whose updates have been made; returns what the next step begins with."""
        for s in self.layout.stages:
            self.call_whole(ends[s].end(), s, consumes=True)
        self._count(update, self.context.num_microbatches // self.layout.schedule.group)
        return self._state(update)

    def _state(self, update: UpdateContext) -> list[Key]:
        outputs = []
        for s in self.layout.stages:
            stage, place, counts = self.context.stages[s], self.place(s), self.context.counts[s]
            names = [name for name in update.renewed_names(s).values() if counts or name.role is not Role.SHARED]
            names += [STEP, SKIPPED] if counts else []
            names += [Name(Role.PARAMETER, t) for t in stage.parameters]
            names += [Name(Role.STATE, t) for t in stage.state]
            for t in stage.state:
                if not self.has(place, Name(Role.STATE, t)):
                    self.join(s, Name(Role.STATE, t), self.context.aval(t), own=False)
            if update.exchange is not None:
                names += [Name(Role.RESIDUAL, t) for t in self.context.held(s)]
            outputs += [self.key(place, name) for name in names]
        return list(dict.fromkeys(outputs))

    def _count(self, update: UpdateContext, updates: int) -> None:
        home = self.layout.home
        for s in self.layout.stages:
            names = [SQUARES, *([HAD, UNSENT] if update.exchange is not None else [])]
            for name in names:
                self.split(s, name)
            self.send(self.place(s, 0), home, [(name, reported(name, s)) for name in names])
        sparse = [place for place in self.every_member if OVERFLOWS in self.context.totals(place.stage)]
        for k, place in enumerate(sparse):
            self.send(place, home, [(OVERFLOWS, reported(OVERFLOWS, k))])
        for name in copied_counters(update).values():
            self.split(home.stage, name)
        traced = trace_work(counters_work(update, len(sparse), updates))
        self.call(self.program(traced), home.stage, 0)
        self.reports += [Key(home, name) for name in traced.written_names]

    def _give_optimizer(self, update: UpdateContext, s: StageNumber) -> None:
        """Take note of optimizer state, residuals and numbers of steps at the devices of a stage."""
        by_stage = update.by_stage
        place, keep = self.place(s), not self.context.counts[s]
        for k, (t, owner) in enumerate(zip(by_stage.state, by_stage.state_stage, strict=True)):
            if owner in (s, None):
                name = Name(Role.OPTIMIZER if owner == s else Role.SHARED, k)
                self.given(place, name, shape_of(by_stage.graph.tensors[t]), keep=keep and owner is None)
        for name in (STEP, SKIPPED):
            self.given(place, name, value_avals(self.context, [name])[name], keep=keep)
        if update.exchange is not None:
            for name, aval in update.residual_avals(s).items():
                self.given(place, name, aval)
        for t in self.context.renewed_state(s):
            key = self.key(place, Name(Role.STATE, t))
            self.now[self.key(place, Name(Role.STATE, t, 1))] = self.inputs[key]
            if len(self.members(s)) > 1:
                self.now.pop(key)  # the members' own are put together again

    def call_whole(self, work: Work, s: StageNumber, consumes: bool = False) -> TracedWork:
        """Run work on all members of a stage together, if it writes anything."""
        key, traces = (work.label, tuple(work.operands)), self.layout.traces
        traced = traces[key] = traces[key] if key in traces else trace_work(work)
        if traced.written_names:
            self.call(self.program(traced, len(self.members(s)) > 1, consumes), s)
        return traced

    def _spread_whole(self, source: Place, name: Name) -> None:
        """Send a small value that all members of a stage have to all others."""
        count = len(self.members(source.stage))
        self.split(source.stage, name)
        for target in self.every_member:
            if target.stage != source.stage:
                self.send(self.place(source.stage, target.replica % count), target, [(name, name)])
