"""``Partition``: stages on devices, what they cost, and how sure it is that nothing is better."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from jaxpipe.costs.network import Network, NetworkFile
from jaxpipe.costs.profile import Profile, ProfileFile
from jaxpipe.errors import PartitionError
from jaxpipe.plan import Plan
from jaxpipe.planning.cuts.cost_models import CostModel, Layout, Synchronous
from jaxpipe.planning.cuts.cut_space import CutSpace
from jaxpipe.text.checked_json import Amount, Count, read_json
from jaxpipe.text.printed import PlainTable, Printed
from jaxpipe.text.short_names import cut_middle
from jaxpipe.text.units import bytes_text, seconds_text


@dataclass(frozen=True)
class StageCost:
    """One stage. Seconds are for one micro-batch; replicas share the micro-batches.

    Attributes:
      operators: a range of ``Partition.order``.
      devices: numbers in the network; each has a copy of the parameters.
      compute_seconds: forward and backward, divided by the replicas, on the slowest of them.
      communication_seconds: of the slower of its two boundaries, there and back.
      sent_bytes: what crosses the boundary behind it, one way.
      parameter_bytes, residual_bytes: of the stage; the latter of one micro-batch.
      in_flight: micro-batches a replica holds, by the model's count.
      memory_bytes: what each device holds of both.
    """

    operators: range
    devices: tuple[Count, ...]
    compute_seconds: Amount
    communication_seconds: Amount
    sent_bytes: Amount
    parameter_bytes: Amount
    residual_bytes: Amount
    in_flight: Count
    memory_bytes: Amount


@dataclass(frozen=True)
class Partition(Printed):
    """A program cut into stages, on the devices of a network.

    Attributes:
      stages: first to last.
      order: the operators of the profile, in the order that the stages are ranges of.
      bottleneck_seconds: what the cost model makes small: the costliest stage or link; for ``"synchronous"`` the
        whole step.
      lower_bound_seconds: nothing can be better than that; with ``reorder=False``, nothing in the given order.
      ties: how many answers are as good, exchanges of like devices not counted; 1 if they were not counted.
      searched: which cuts and placements were looked at.
      cost_model, num_microbatches, memory, replicate, num_stages, reorder, slack, profile, network, idle, starts: what
        was asked.
    """

    stages: tuple[StageCost, ...]
    order: tuple[Count, ...]
    bottleneck_seconds: Amount
    lower_bound_seconds: Amount
    ties: Count
    searched: str
    cost_model: str
    num_microbatches: Count | None
    memory: tuple[Amount | None, ...]
    replicate: bool | Count | tuple[Count, ...]
    num_stages: Count | None
    reorder: bool
    slack: Amount
    profile: Profile
    network: Network
    idle: bool = True
    starts: tuple[Count, ...] = ()

    @property
    def ratio(self) -> float:
        """Return how many times the lower bound this is; 1 is proven to be the best."""
        return self.bottleneck_seconds / self.lower_bound_seconds if self.lower_bound_seconds else 1.0

    @property
    def cuts(self) -> tuple[Count, ...]:
        """Return where stages end in the order."""
        return tuple(stage.operators.stop for stage in self.stages)

    def to_json(self) -> str:
        """The partition with all that it was made from, as JSON."""
        data = asdict(self)
        for row in data["stages"]:
            row["operators"] = [row["operators"].start, row["operators"].stop]
        data["profile"], data["network"] = (json.loads(part.to_json()) for part in (self.profile, self.network))
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Partition":
        """The partition that ``to_json`` has written.

        Raises:
          PartitionError: naming the line, if it is not JSON; or what is missing or wrong in it.
        """
        file = read_json(text, _File, "The partition")
        partition = cls(**{**vars(file), "profile": file.profile.profile(), "network": file.network.network()})
        count = len(partition.profile.names)
        if sorted(partition.order) != list(range(count)):
            raise PartitionError(f"the partition.order has not each of {count} operators once.")
        for k, stage in enumerate(partition.stages):
            ends = stage.operators
            if not 0 <= ends.start < ends.stop <= count:
                raise PartitionError(f"the partition.stages[{k}].operators is {ends}; it must be within 0..{count}.")
            if not stage.devices or not all(0 <= d < partition.network.num_devices for d in stage.devices):
                raise PartitionError(
                    f"the partition.stages[{k}].devices is {list(stage.devices)[:8]}; they must be of the network's "
                    f"0..{partition.network.num_devices - 1}."
                )
        return partition

    def _printed(self) -> list[PlainTable | str]:
        used = len({device for stage in self.stages for device in stage.devices})
        title = f"{len(self.stages)} stages on {used} of {self.network.num_devices} devices, {self.cost_model}"
        table = PlainTable("stage", "operators", "devices", title=title)
        table.add_numbers("compute", "sending", "sends on", "parameters", "residuals", "in flight", "memory")
        for k, stage in enumerate(self.stages):
            first, last = (self.profile.names[self.order[stage.operators[end]]] for end in (0, -1))
            table.add_row(
                str(k),
                f"{len(stage.operators)}, {_module(first)} to {_module(last)}",
                ", ".join(self.network.names[d].removeprefix("device ") for d in stage.devices),
                seconds_text(stage.compute_seconds),
                seconds_text(stage.communication_seconds),
                bytes_text(stage.sent_bytes),
                bytes_text(stage.parameter_bytes),
                bytes_text(stage.residual_bytes),
                str(stage.in_flight),
                bytes_text(stage.memory_bytes),
            )
        what = "step" if self.cost_model == "synchronous" else "bottleneck"
        ties = f", {self.ties} answers as good" if self.ties > 1 else ""
        lines = (
            f"{what} {seconds_text(self.bottleneck_seconds)}, {self.ratio:.3f} of the lower bound "
            f"{seconds_text(self.lower_bound_seconds)}{ties}\nsearched: {self.searched}"
        )
        return [table, lines]


def stage_speeds(partition: Partition) -> list[float]:
    """Return the speed of the slowest device of each stage."""
    return [min(partition.network.speed[d] for d in stage.devices) for stage in partition.stages]


def on_devices(partition: Partition, groups: Sequence[tuple[int, ...]], network: Network) -> Partition:
    """Return the stages on other devices, those of a network, with what they send as it was."""
    stages = (replace(stage, devices=group) for stage, group in zip(partition.stages, groups, strict=True))
    placed = replace(partition, stages=tuple(stages), network=network)
    speeds = zip(placed.stages, stage_speeds(partition), stage_speeds(placed), strict=True)
    stages = (replace(stage, compute_seconds=stage.compute_seconds * old / new) for stage, old, new in speeds)
    return replace(placed, stages=tuple(stages))


def stage_work(partition: Partition) -> list[list[float]]:
    """Return the seconds of a micro-batch by stage on its own device, forward and backward."""
    profile = partition.profile
    stages = list(zip(partition.stages, stage_speeds(partition), strict=True))
    return [
        [sum(seconds[stage.operators.start : stage.operators.stop]) / speed for stage, speed in stages]
        for seconds in (profile.forward_seconds, profile.backward_seconds)
    ]


def plan_bound(partition: Partition) -> float:
    """Return a lower bound of a step's seconds on a partition's devices, with as many replicas of a stage at most."""
    most = max(len(stage.devices) for stage in partition.stages)
    return step_bound(partition.profile, partition.network, partition.num_microbatches or 1, most_replicas=most)


def step_bound(
    profile: Profile, network: Network, num_microbatches: int, num_devices: int | None = None, most_replicas: int = 1
) -> float:
    """Return the bound, for stages on at most ``most_replicas`` devices each and ``num_devices`` in all.

    All devices are busy all the time; those of the longest operator are; or one micro-batch goes through all operators
    forward, and back through the longest one. Calls, messages and sums of gradients are left out.
    """
    speeds = np.sort(network.speed)[::-1][:num_devices]
    longest = max(profile.seconds) / min(most_replicas, len(speeds))
    once = sum(profile.forward_seconds) + max(profile.backward_seconds)
    busy = num_microbatches * max(sum(profile.seconds) / float(speeds.sum()), longest / float(speeds[0]))
    return max(busy, once / float(speeds[0]))


def as_planned(placed: Partition, plan: Plan) -> Partition:
    """Return a partition with a plan's numbers in place of those that cuts were compared by."""
    sent = [stage.message_seconds for stage in plan.stages]
    boundaries = [0.0, *(ahead[0] + behind[1] for ahead, behind in itertools.pairwise(sent)), 0.0]
    memory = [sum(parts.values()) for parts in plan.stage_memory] or [plan.predicted_bytes] * len(plan.stages)
    stages = [
        replace(
            cost,
            compute_seconds=(stage.forward_seconds + stage.backward_seconds) / (len(stage.devices) * speed),
            communication_seconds=max(around),
            sent_bytes=stage.sent_bytes,
            parameter_bytes=stage.parameter_bytes,
            residual_bytes=stage.stash_bytes,
            in_flight=stage.in_flight,
            memory_bytes=memory[k % len(memory)],  # of the device, where it has several stages
        )
        for k, (cost, stage, speed, around) in enumerate(
            zip(placed.stages, plan.stages, stage_speeds(placed), itertools.pairwise(boundaries), strict=True)
        )
    ]
    return replace(
        placed, stages=tuple(stages), bottleneck_seconds=plan.step_seconds, lower_bound_seconds=plan.lower_bound_seconds
    )


@dataclass(frozen=True)
class _File(Partition):
    """A partition as JSON has it."""

    profile: ProfileFile  # type: ignore[assignment]
    network: NetworkFile  # type: ignore[assignment]


def model_of(partition: Partition) -> Synchronous:
    """Return the cost model of a partition whose stages make steps of 1F1B."""
    memory = tuple(math.inf if size is None else size for size in partition.memory)
    return Synchronous(partition.network, partition.num_microbatches, memory, bool(partition.profile.frozen))


def cut_at(partition: Partition, model: CostModel, space: CutSpace, cuts: np.ndarray, layout: Layout) -> Partition:
    """Return a partition with the stages between other cuts of its order, or on other devices."""
    seconds = model.objective(space, cuts, layout)
    return replace(partition, stages=cost_stages(model, space, cuts, layout), bottleneck_seconds=seconds)


def in_order_of_stages(space: CutSpace, cuts: np.ndarray) -> tuple[int, ...]:
    """Return the operators in an order of which stages are ranges."""
    stage_of = sum((~space.holds(cut)).astype(int) for cut in cuts)
    return tuple(np.argsort(stage_of, kind="stable").tolist())


def cost_stages(model: CostModel, space: CutSpace, cuts: np.ndarray, layout: Layout) -> tuple[StageCost, ...]:
    """Return the cost of each stage between some cuts."""
    parameters, residuals, work = (
        np.maximum(np.diff(sums[cuts]), 0.0) for sums in (space.parameters, space.residuals, space.seconds)
    )
    stops = [int(space.holds(cut).sum()) for cut in cuts]
    sent, in_flight = space.crossing[cuts], model.in_flight(layout)
    seconds, memory = work / model.rates(layout), model.memory_bytes(residuals, parameters, np.array(in_flight))
    pairs = enumerate(itertools.pairwise(layout), 1)
    ways = [0.0, *(2 * float(model.transfer_seconds(sent[[k]], *pair)[0]) for k, pair in pairs), 0.0]
    return tuple(
        StageCost(
            operators=range(stops[s], stops[s + 1]),
            devices=tuple(sorted(devices)),
            compute_seconds=float(seconds[s]),
            communication_seconds=max(ways[s], ways[s + 1]),
            sent_bytes=float(sent[s + 1]),
            parameter_bytes=float(parameters[s]),
            residual_bytes=float(residuals[s]),
            in_flight=in_flight[s],
            memory_bytes=float(memory[s]),
        )
        for s, devices in enumerate(layout)
    )


def _module(name: str) -> str:
    """The module of an operator, or what it is where it has none."""
    where, _, what = name.rpartition(" ")
    return cut_middle(where or what)
