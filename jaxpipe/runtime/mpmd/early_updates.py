"""Updates during a step: stages of an asynchronous schedule renew their weights as soon as they have a gradient.

Schedules say which version of the weights a micro-batch uses (``jaxpipe.schedules.asynchronous``); each version is
there until the last backward pass that reads it.
"""

import functools

import jax
import jax.numpy as jnp

from jaxpipe.runtime.mpmd.stage_layout import StageLayout
from jaxpipe.runtime.mpmd.step_graph import Arrays
from jaxpipe.runtime.mpmd.step_writer import StepEndWriter, put
from jaxpipe.runtime.mpmd.update_tasks import StageUpdate, chosen, in_groups, value_at
from jaxpipe.schedules.table import Kind, Kinds, StageNumber


class EarlyUpdateWriter(StepEndWriter):
    """A graph in which stages are updated after every group of micro-batches."""

    def __init__(self, layout: StageLayout):
        super().__init__(layout)
        assert layout.schedule.versions is not None
        self._used, self._group = layout.schedule.versions, layout.schedule.group
        self._versions = {s: [whole["parameters"]] for s, whole in self.whole.items()}
        squares = {"squares": jax.ShapeDtypeStruct((), layout.norm_dtype)}
        for s in layout.stages:
            put(self.held[s], self.zeros(self.place(s), f"stage {s}: zero", squares))

    def weights_for(self, s: StageNumber, j: int, kinds: Kinds) -> Arrays:
        """Return the version of a stage's parameters that work on a micro-batch uses."""
        if Kind.FORWARD not in kinds and not self.layout.schedule.keeps_versions:
            return self._versions[s][-1]
        return self._versions[s][min(self._used[s][j], len(self._versions[s]) - 1)]  # frozen stages have one version

    def after_round(self, s: StageNumber, k: int, kinds: Kinds) -> None:
        """Update a stage that has the gradient of a group, and add up from zero again."""
        if Kind.BACKWARD not in kinds or (k + 1) % self._group:
            return
        work = functools.partial(_early_update, self.ends[s], self._group * self.devices.replicas)
        self.renew(s, f"early update of {self._group}", work)
        self._versions[s].append(self.held[s]["parameters"])
        for place in self.members_of(s):
            self.members[place]["sums"] = {}

    def look(self, s: StageNumber) -> Arrays:
        """Return whether any gradient was not finite: the sum of their squares is not, either."""

        def work(arrays: Arrays) -> Arrays:
            return {"nonfinite": (~jnp.isfinite(arrays["squares"])).astype(jnp.int32)}

        return self.run_whole(s, "look for a norm that is not finite", work)

    def update_stages(self) -> None:
        """End a step whose updates have been made."""
        for s in self.layout.stages:
            self.renew(s, "end of the step", functools.partial(_end, self.ends[s]))
        self.count(self.layout.num_microbatches // self._group)


def _early_update(end: StageUpdate, count: int, arrays: Arrays) -> Arrays:
    """Update by the mean gradient of so many micro-batches; adds up its squared norm."""
    results, squares = end.new_values(arrays | {"weight": jnp.float32(count)}, None, True)
    return results | {"squares": arrays["squares"] + squares}


def _end(end: StageUpdate, arrays: Arrays) -> Arrays:
    """Return the end of a step: state of all replicas, numbers of steps if the stage counts.

    Under a guard also parameters and optimizer state, those from before the step if it is stopped.
    """
    stopped, renewed = arrays.get("stopped"), end.renewed.values() if "old" in arrays else ()
    new = {path: chosen(stopped, value_at(arrays["old"], path), value_at(arrays, path)) for path in renewed}
    return in_groups(new) | end.state_after(arrays)
