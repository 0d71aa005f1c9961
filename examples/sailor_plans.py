"""Price plans that others have measured: pipelines of OPT-350M on up to 32 nodes of four GH200.

F. Strati et al., "Sailor: Automating distributed training over dynamic, heterogeneous, and geo-distributed clusters",
SOSP 2025, publish plans with the seconds of their steps, and profiles with the seconds of each layer, at
github.com/eth-easl/sailor (MIT License). ``--data`` is a clone of it, or a JSON of some of its files as the tests have.

    python examples/sailor_plans.py --data sailor

Printed are the measured step, the step on paper with messages as long as the published bandwidth between nodes says,
and that of the cut that jaxpipe chooses for the same nodes. Their runtime sends and receives while nothing else runs,
so messages are charged to the stages at both ends.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from jaxpipe import Network, Profile
from jaxpipe.planning import partition_layers
from jaxpipe.schedules import one_f_one_b


#: Bytes of what a layer sends on for one example: 2,048 tokens, 1,024 numbers of 16 bits.
ACTIVATION_BYTES = 2048 * 1024 * 2

#: Bytes in a second between two nodes, each direction, of messages of 32 MiB, by the published coefficients.
BETWEEN_NODES = 21.6e9

_PLANS = "sailor/Planner/simulations/validation/clariden/OPT-350"
_PROFILE = "sailor/Planner/sailor_planner/profiles/OPT-350/GH-96/profile.json"


@dataclass(frozen=True)
class MeasuredPlan:
    """A published plan: the same cut for each replica, each stage on one node."""

    name: str
    stages: tuple[tuple[int, int], ...]  # the first layer of each, and the one behind its last
    replicas: int
    devices_per_stage: int  # over which its tensors are split
    microbatch_size: int
    num_microbatches: int  # of each replica
    seconds: float  # of a step, measured
    exchange_seconds: float  # of these, the all-reduce of gradients


@dataclass(frozen=True)
class LayerSeconds:
    """Measured seconds of each layer: of a micro-batch forward and backward, of its update."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]

    def profile(self, sent_bytes: float) -> Profile:
        """Return the layers as a profile whose cuts send so many bytes; of memory it says nothing."""
        names, nothing = [f"layer {k}" for k in range(len(self.forward))], [0.0] * len(self.forward)
        return Profile.chain(names, self.forward, self.backward, nothing, nothing, [sent_bytes] * len(names))


def read_plan(name: str, text: dict[str, Any]) -> MeasuredPlan:
    """Return a plan of one kind of pipeline, from its JSON."""
    pipeline = text["pipeline_list"][0]
    replicas = pipeline["dp"][0]
    return MeasuredPlan(
        name,
        tuple((layers[0], layers[-1] + 1) for layers in pipeline["layers_per_stage"]),
        replicas,
        pipeline["tmp_per_stage"][0][0][1],
        text["mbs"],
        text["gbs"] // text["mbs"] // replicas,
        text["real"],
        text["red_grads"],
    )


def read_profile(text: dict[str, Any], microbatch_size: int, devices: int) -> LayerSeconds:
    """Return what layers take with a micro-batch on so many devices."""
    layers = text[str(microbatch_size)][str(devices)]
    rows = [layers[str(k)] for k in range(len(layers))]
    return LayerSeconds(*(tuple(column) for column in zip(*rows, strict=True)))


def step_seconds(layers: LayerSeconds, stages: tuple[tuple[int, int], ...], count: int, message: float) -> float:
    """Return the seconds of a step of so many micro-batches in textbook 1F1B, with the longest update behind it."""

    def by_stage(seconds: tuple[float, ...]) -> list[float]:
        return [sum(seconds[first:last]) for first, last in stages]

    ends = [message * ((s > 0) + (s + 1 < len(stages))) for s in range(len(stages))]
    forward = [x + y for x, y in zip(by_stage(layers.forward), ends, strict=True)]
    backward = [x + y for x, y in zip(by_stage(layers.backward), ends, strict=True)]
    timeline = one_f_one_b(len(stages), count).simulate(forward=forward, backward_input=backward, backward_weight=0.0)
    return timeline.makespan + max(by_stage(layers.update))


def chosen_stages(layers: LayerSeconds, plan: MeasuredPlan) -> tuple[tuple[int, int], ...]:
    """Return the cut that jaxpipe chooses for as many stages."""
    network = Network.uniform(len(plan.stages), BETWEEN_NODES)
    profile = layers.profile(plan.microbatch_size * ACTIVATION_BYTES)
    cut = partition_layers(profile, network, replicate=False, num_microbatches=plan.num_microbatches)
    return tuple((stage.operators[0], stage.operators[-1] + 1) for stage in cut.stages)


def read_files(data: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the plans by name and the profile, of a clone or of one file."""
    if data.is_file():
        text = json.loads(data.read_text())
        return text["plans"], text["profile"]
    plans = {path.stem: json.loads(path.read_text()) for path in sorted((data / _PLANS).glob("*/plan_config_*.json"))}
    return plans, json.loads((data / _PROFILE).read_text())


def main(data: Path, microbatch_size: int = 8, console: Console | None = None) -> list[tuple[MeasuredPlan, float]]:
    """Price all plans with a size of micro-batches; smaller ones than 8 are bound by launches, not by their profile."""
    plans, profile = read_files(data)
    table = Table("plan", "stages", "replicas", "micro-batches", "measured", "on paper", "apart", "jaxpipe's cut")
    priced = []
    for name, text in plans.items():
        plan = read_plan(Path(name).stem, text)
        if plan.microbatch_size != microbatch_size:
            continue
        layers = read_profile(profile, plan.microbatch_size, plan.devices_per_stage)
        message = plan.microbatch_size * ACTIVATION_BYTES / BETWEEN_NODES
        on_paper, chosen = (
            step_seconds(layers, stages, plan.num_microbatches, message) + plan.exchange_seconds
            for stages in (plan.stages, chosen_stages(layers, plan))
        )
        priced.append((plan, on_paper))
        sizes = len(plan.stages), plan.replicas, plan.num_microbatches
        apart = f"{on_paper / plan.seconds - 1:+.1%}"
        table.add_row(
            plan.name, *map(str, sizes), f"{plan.seconds:.3f} s", f"{on_paper:.3f} s", apart, f"{chosen:.3f} s"
        )
    (console or Console()).print(table)
    return priced


if __name__ == "__main__":
    tyro.cli(main)
