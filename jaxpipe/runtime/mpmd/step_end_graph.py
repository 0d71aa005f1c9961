"""The end of a step, as a part of its graph: gradients return, the optimizer runs stage by stage.

gradients of parameters that several stages use ──▶ the stage that has them
small values (norms) ──▶ all stages, round by round
sums of gradients, parameters, optimizer state ──▶ the state after the step, counters
"""

import functools
import itertools
from collections import defaultdict

from jaxpipe.array_types import TensorNumber
from jaxpipe.runtime.mpmd.graph_writer import shapes_of
from jaxpipe.runtime.mpmd.microbatch_graph import MicrobatchWriter, put
from jaxpipe.runtime.mpmd.report_tasks import step_counters, total_weight
from jaxpipe.runtime.mpmd.stage_layout import StageLayout
from jaxpipe.runtime.mpmd.step_graph import Arrays, Place, Port, Work
from jaxpipe.runtime.mpmd.update_tasks import StageUpdate, folded_state
from jaxpipe.schedules.table import StageNumber


class StepEndWriter(MicrobatchWriter):
    """A graph with the passes over the micro-batches, and what the optimizer does then."""

    def __init__(self, layout: StageLayout):
        super().__init__(layout)
        self.ends = {s: StageUpdate(layout, s) for s in layout.stages}
        #: By stage, that which borrows a parameter and the parameter, sums of gradients that have come back.
        self._returned: dict[StageNumber, dict[StageNumber, dict[TensorNumber, int]]]
        self._returned = {s: defaultdict(dict) for s in layout.stages}
        #: The weight of the batch and, under a guard, whether the step is stopped: by member.
        self._everywhere: dict[str, dict[Place, int]] = {}
        #: By stage, its parameters and its optimizer state now, of all its members.
        self.held = {s: self._given_state(s) for s in layout.stages}

    def _given_state(self, s: StageNumber) -> Arrays:
        place = self.place(s)
        arrays: Arrays = {"parameters": self.whole[s]["parameters"], "optimizer": {}, "shared": {}}
        for group, k in self.layout.state_paths(s).values():
            arrays[group][k] = self.given(place, group, k)
        names = ("step", "skipped") if self.devices.counts[s] else ("step",)
        return arrays | {name: self.given(place, name) for name in names}

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
        places = self.members_of(s)
        groups = ({group: self.members[place][group] for group in ("sums", "packs", "state")} for place in places)
        arrays = self.held[s] | self.join(list(groups), own=True) | {"returned": dict(self._returned[s])}
        for name, values in self._everywhere.items():
            arrays[name] = self.join([values[place] for place in places], own=False)
        if self.layout.is_guarded:
            arrays["old"] = self._given_state(s) | {"state": self.whole[s]["state"]}
        return arrays

    def fold_state(self) -> None:
        """Give all members of a stage that shares micro-batches the state after all of these."""
        for s in self.layout.stages:
            fold = self.layout.stage(s).fold
            if fold is None:
                continue
            rows = [self.statistics[s, j] for j in range(self.layout.num_microbatches)]
            for place in self.members_of(s):
                state = self.members[place]["state"]
                statistics = [self.send(source, place, arrays) for source, arrays in rows]
                operands = {"state": {t: state[t] for t in fold.state}, "statistics": statistics}
                work = functools.partial(folded_state, self.layout, s)
                state |= self.run(place, f"stage {s}: state", work, operands)["state"]

    def return_gradients(self) -> None:
        """Weigh the batch, and send gradients of borrowed parameters to the stage that has the parameter."""
        home, layout = self.layout.home, self.layout
        if layout.objective.weighted:
            total = self.run(home, "the total weight", total_weight, {"totals": self.gather_totals(1)})
            self._everywhere["weight"] = self.to_everyone(home, total["weight"])
        else:
            self._everywhere["weight"] = {place: self.given(place, "weight") for place in self.every_member}
        for s in self.layout.stages:
            for t in layout.held(s):
                for k in layout.lenders(t):
                    self._returned[s][k][t] = self._return_gradient(s, k, t)

    def _return_gradient(self, s: StageNumber, k: StageNumber, t: TensorNumber) -> int:
        """Send the sums of a parameter's gradients from stage ``k`` to ``s``, which has it."""
        sources, targets = self.members_of(k), self.members_of(s)
        sums = [self.members[place]["sums"][t] for place in sources]
        as_sum = len(sources) != len(targets)
        if as_sum:
            joined = {"sums": {t: self.join(sums, own=True)}}
            total = self.run_whole(k, "sum of gradients", self.ends[k].returned_sum, joined)["mean"][t]
            sources, sums = sources[:1] * len(targets), self.split(k, total)[:1] * len(targets)
        rows = zip(sources, targets, sums, strict=True)
        return self.join([self.send(*row) for row in rows], own=not as_sum)

    def report_step(self) -> None:
        """Make loss and metrics, and under a guard say everywhere whether the step is stopped."""
        home, flags = self.layout.home, []
        if not self.layout.is_guarded:
            self.report()
            return
        for s in self.layout.stages:
            flag = self.look(s)["nonfinite"]
            flags.append(self.send(self.place(s, 0), home, self.split(s, flag)[0]))
        results = self.report(nonfinite=flags)
        self.reports |= {Port(home, "counters", name): results[name] for name in ("nonfinite_stages", "stopped")}
        self._everywhere["stopped"] = self.to_everyone(home, results["stopped"])

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
                    self._tell(s, self.run_whole(s, f"optimizer, round {number}", work))
        for s in stages:
            self.renew(s, "update", self.ends[s].update)
        self.count(1)

    def _tell(self, s: StageNumber, told: Arrays) -> None:
        """Give small values of a stage, which all its members have, to all stages."""
        pairs = list(zip(self.members_of(s), self.split(s, told), strict=True))
        for other in self.layout.stages:
            rows = zip(self.members_of(other), itertools.cycle(pairs), strict=False)
            received = [self.send(source, place, part) for place, (source, part) in rows]
            put(self.held[other], told if other == s else self.join(received, own=False))

    def count(self, updates: int) -> None:
        """Make the step's counters, of so many updates."""
        home, learning_rate = self.layout.home, self.layout.update.by_stage.learning_rate
        held, operands = self.held[home.stage], defaultdict[str, list[int]](list)
        for s in self.layout.stages:
            told = {name: self.held[s][name] for name in ("squares", "had", "unsent") if name in self.held[s]}
            for name, x in self.send(self.place(s, 0), home, self.split(s, told)[0]).items():
                operands[name].append(x)
        overflows = ((place, x) for place, row in self.members.items() for x in row["overflows"].values())
        arrived = {"overflows": [self.send(place, home, x) for place, x in overflows]}
        copied = {} if learning_rate is None else {"learning_rate": held["shared"][learning_rate]}
        copied |= {"skipped": held["skipped"]} if self.layout.update.on_nonfinite == "skip" else {}
        arrays = dict(operands) | arrived | {"copied": self.split(home.stage, copied)[0]}
        work, key = functools.partial(step_counters, updates), ("counters", updates, shapes_of(self.avals(arrays)))
        counters = self.run(home, "counters", work, arrays, key)["counters"]
        self.reports |= {Port(home, "counters", name): x for name, x in counters.items()}

    def state(self) -> dict[Port, int]:
        """The training state that the next step begins with."""
        outputs = {}
        for s in self.layout.stages:
            held, members = self.held[s], [self.members[place] for place in self.members_of(s)]
            renewed = self.layout.renewed_state(s)
            after = {t: self.join([x["state"][t] for x in members], own=False) for t in renewed}
            fields = {field: held.get(field, {}) for field in ("parameters", "optimizer", "residual")}
            fields["variables"] = self.whole[s]["state"] | after | held.get("state", {})
            if self.devices.counts[s]:
                fields |= {"shared": held["shared"]} | {name: {0: held[name]} for name in ("step", "skipped")}
            outputs |= {Port(self.place(s), field, k): x for field, arrays in fields.items() for k, x in arrays.items()}
        return outputs
