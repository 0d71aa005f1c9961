"""The end of a step, as a part of its graph: gradients return, the optimizer runs stage by stage.

gradients of parameters that several stages use ──▶ the stage that has them
small values (norms) ──▶ all stages, round by round
sums of gradients, parameters, optimizer state ──▶ the state after the step, counters
"""

from collections import defaultdict
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jaxpipe.array_types import TensorNumber
from jaxpipe.runtime.mpmd.instructions import Place
from jaxpipe.runtime.mpmd.microbatch_graph import MicrobatchWriter, put
from jaxpipe.runtime.mpmd.report_tasks import counters_work, weight_work
from jaxpipe.runtime.mpmd.stage_devices import StageLayout
from jaxpipe.runtime.mpmd.step_graph import Form, Port
from jaxpipe.runtime.mpmd.trace_task import Arrays, TaskWork
from jaxpipe.runtime.mpmd.update_tasks import StageUpdate, UpdateContext, fold_work
from jaxpipe.schedules.table import StageNumber


class StepEndWriter(MicrobatchWriter):
    """A graph with the passes over the micro-batches, and what the optimizer does then."""

    def __init__(self, layout: StageLayout, update: UpdateContext):
        super().__init__(layout)
        self.update = update
        self.ends = {s: StageUpdate(update, s) for s in layout.stages}
        #: By stage, that which borrows a parameter and the parameter, sums of gradients that have come back.
        self._returned: dict[StageNumber, dict[StageNumber, dict[TensorNumber, int]]]
        self._returned = {s: defaultdict(dict) for s in layout.stages}
        self._weight: dict[Place, int] = {}
        self._stopped: dict[Place, int] = {}
        #: By stage, its parameters and its optimizer state, of all its members; before the step, and now.
        self.initial = {s: self._given_state(s) for s in layout.stages}
        self.held = {s: dict(arrays) for s, arrays in self.initial.items()}

    def _given_state(self, s: StageNumber) -> Arrays:
        place, by_stage, context = self.place(s), self.update.by_stage, self.context
        arrays: Arrays = {"parameters": self.whole[s]["parameters"], "optimizer": {}, "shared": {}}
        for t, (group, k) in self.update.state_paths(s).items():
            form = context.form(s, (group, k))
            arrays[group][k] = self.given(place, group, k, by_stage.graph.tensors[t], form)
        count = jax.ShapeDtypeStruct((), jnp.int32)
        for name in ("step", "skipped") if context.counts[s] else ("step",):
            arrays[name] = self.given(place, name, 0, count, Form("state"))
        return arrays

    def run_whole(self, s: StageNumber, work: TaskWork, arrays: Arrays, consumes: bool = False) -> Arrays:
        """Run work on all members of a stage together."""
        return self.run_as(work.label, s, work, self.place(s), arrays, consumes)

    def renew(self, s: StageNumber, work: TaskWork) -> None:
        """Run work on all members of a stage that writes over what the stage holds."""
        put(self.held[s], self.run_whole(s, work, self.arrays_of(s), consumes=True))

    def _of_members(self, s: StageNumber, groups: Iterable[str]) -> Arrays:
        members = [self.members[self.place(s, r)].arrays for r in self.members_of(s)]
        return self.join([{group: arrays[group] for group in groups} for arrays in members], own=True)

    def arrays_of(self, s: StageNumber) -> Arrays:
        """The arrays that work at the end of a step may read: gradients, parameters, optimizer state."""
        arrays = self.held[s] | self._of_members(s, ("sums", "packs")) | {"returned": dict(self._returned[s])}
        for name, values in (("weight", self._weight), ("stopped", self._stopped)):
            if values:
                arrays[name] = self.join([values[self.place(s, r)] for r in self.members_of(s)], own=False)
        renewed = self.ends[s].state
        if renewed:
            state = self._of_members(s, ("state",))["state"]
            arrays["state"] = {t: state[t] for t in renewed}
        if self.update.guarded:
            arrays["old"] = self.initial[s] | {"state": self.whole[s]["state"]}
        return arrays

    def fold_state(self) -> None:
        """Give all members of a stage that shares micro-batches the state after all of these."""
        for s in self.layout.stages:
            fold = self.context.stages[s].fold
            if fold is None or not self.context.statistics(s):
                continue
            rows = [self.statistics[s, j] for j in range(self.context.num_microbatches)]
            for place in (self.place(s, r) for r in self.members_of(s)):
                state = self.members[place].arrays["state"]
                statistics = [self.send(source, place, arrays) for source, arrays in rows]
                operands = {"state": {t: state[t] for t in fold.state}, "statistics": statistics}
                state |= self.run_as("fold", s, fold_work(self.context, s), place, operands)["state"]

    def return_gradients(self) -> None:
        """Weigh the batch, and send gradients of borrowed parameters to the stage that has the parameter."""
        home, context = self.layout.home, self.context
        if context.objective.weighted:
            total = self.run_as("weight", home.stage, weight_work(), home, {"totals": self.gather_totals(1)})
            self._weight = self.to_everyone(home, total["weight"])
        else:
            aval = jax.ShapeDtypeStruct((), context.weight_dtype)
            self._weight = {place: self.given(place, "weight", 0, aval, Form("state")) for place in self.every_member}
        for s in self.layout.stages:
            for t in context.held(s):
                for k in self.update.lenders(s, t):
                    self._returned[s][k][t] = self._return_gradient(s, k, t)

    def _return_gradient(self, s: StageNumber, k: StageNumber, t: TensorNumber) -> int:
        """Send the sums of a parameter's gradients from stage ``k`` to ``s``, which has it."""
        places = [self.place(k, r) for r in self.members_of(k)]
        sums = [self.members[place].arrays["sums"][t] for place in places]
        as_sum = self.update.returns_sum(s, k)
        if as_sum:
            joined = {"sums": {t: self.join(sums, own=True)}}
            total = self.run_whole(k, self.ends[k].returned_sum(t), joined)["mean"][t]
            sums, places = self.split(k, total)[:1] * len(self.members_of(s)), places[:1] * len(self.members_of(s))
        rows = zip(places, sums, self.members_of(s), strict=True)
        return self.join([self.send(place, self.place(s, r), x) for place, x, r in rows], own=not as_sum)

    def report_step(self) -> None:
        """Make loss and metrics, and under a guard say everywhere whether the step is stopped."""
        home, flags = self.layout.home, []
        if not self.update.guarded:
            self.report()
            return
        for s in self.layout.stages:
            flag = self.run_whole(s, self.look(s), self.arrays_of(s))["nonfinite"]
            flags.append(self.send(self.place(s, 0), home, self.split(s, flag)[0]))
        results = self.report(nonfinite=flags)
        self.reports |= {Port(home, "counters", name): results[name] for name in ("nonfinite_stages", "stopped")}
        self._stopped = self.to_everyone(home, results["stopped"])

    def look(self, s: StageNumber) -> TaskWork:
        """Return the search of a stage for what is not finite."""
        return self.ends[s].look()

    def update_stages(self) -> None:
        """Run the optimizer."""
        by_stage, stages = self.update.by_stage, self.layout.stages
        for number, exchanged in enumerate(by_stage.exchanged):
            for s in stages:
                if any(by_stage.stage_of[t] == s for t in exchanged):
                    self._tell(s, self.run_whole(s, self.ends[s].share(number), self.arrays_of(s)))
        for s in stages:
            self.renew(s, self.ends[s].update())
        self.count(1)

    def _tell(self, s: StageNumber, told: Arrays) -> None:
        """Give small values of a stage, which all its members have, to all stages."""
        parts = self.split(s, told)
        for other in self.layout.stages:
            pairs = [(r % len(parts), self.place(other, r)) for r in self.members_of(other)]
            received = [self.send(self.place(s, k), place, parts[k]) for k, place in pairs]
            put(self.held[other], told if other == s else self.join(received, own=False))

    def count(self, updates: int) -> None:
        """Make the step's counters, of so many updates."""
        home, learning_rate = self.layout.home, self.update.by_stage.learning_rate
        held, operands = self.held[home.stage], defaultdict[str, list[int]](list)
        for s in self.layout.stages:
            told = {name: self.held[s][name] for name in ("squares", "had", "unsent") if name in self.held[s]}
            for name, x in self.send(self.place(s, 0), home, self.split(s, told)[0]).items():
                operands[name].append(x)
        overflows = ((place, member.arrays.get("overflows")) for place, member in self.members.items())
        arrived = {"overflows": [self.send(place, home, x) for place, x in overflows if x is not None]}
        copied = {} if learning_rate is None else {"learning_rate": held["shared"][learning_rate]}
        copied |= {"skipped": held["skipped"]} if self.update.skips else {}
        arrays = dict(operands) | arrived | {"copied": self.split(home.stage, copied)[0]}
        counters = self.run_as(("counters", updates), home.stage, counters_work(updates), home, arrays)["counters"]
        self.reports |= {Port(home, "counters", name): x for name, x in counters.items()}

    def state(self) -> dict[Port, int]:
        """The training state that the next step begins with."""
        outputs = {}
        for s in self.layout.stages:
            held, members = self.held[s], [self.members[self.place(s, r)] for r in self.members_of(s)]
            renewed = self.context.renewed_state(s)
            after = {t: self.join([x.arrays["state"][t] for x in members], own=False) for t in renewed}
            fields = {field: held.get(field, {}) for field in ("parameters", "optimizer", "residual")}
            fields["variables"] = self.whole[s]["state"] | after | held.get("state", {})
            if self.context.counts[s]:
                fields |= {"shared": held["shared"]} | {name: {0: held[name]} for name in ("step", "skipped")}
            outputs |= {Port(self.place(s), field, k): x for field, arrays in fields.items() for k, x in arrays.items()}
        return outputs
