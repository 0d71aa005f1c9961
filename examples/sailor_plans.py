"""Price plans that others have measured: pipelines of OPT-350M on up to 32 nodes of four GH200.

F. Strati et al., "Sailor: Automating distributed training over dynamic, heterogeneous, and geo-distributed clusters",
SOSP 2025, publish plans with the seconds of their steps and the memory of their GPUs, and profiles with the seconds and
bytes of each layer, at github.com/eth-easl/sailor (MIT License). ``--data`` is a clone of it, or a JSON of some of its
files as the tests have.

    python examples/sailor_plans.py --data sailor

Printed are the measured step, the step on paper with messages as long as the published bandwidth between nodes says,
and that of the cut that jaxpipe chooses for the same nodes; then the measured and the expected memory of the fullest
GPU. Their runtime sends and receives while nothing else runs, so messages are charged to the stages at both ends.
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


#: Bytes in a second between two nodes, each direction, of messages of 64 MiB, by the published coefficients.
BETWEEN_NODES = 22.6e9

#: Bytes of a parameter with its gradient, Adam's state and the copies that their runtime makes, as they count them.
PARAMETER_BYTES = 24

#: Bytes that nvidia-smi counts and the runtime does not, as published: kernels, the CUDA context.
RESERVED_BYTES = 5.06e9

_PLANS = "sailor/Planner/simulations/validation/clariden/OPT-350"
_PROFILE = "sailor/Planner/sailor_planner/profiles/OPT-350/GH-96/profile.json"
_LAYERS = "sailor/Planner/llm_info.json"


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
    peak_bytes: float  # of the fullest GPU, measured


@dataclass(frozen=True)
class Layers:
    """Measured costs of each layer, of a micro-batch on one of the devices that share it."""

    forward: tuple[float, ...]  # seconds
    backward: tuple[float, ...]
    update: tuple[float, ...]
    sent_bytes: float  # from one layer to the next
    stored_bytes: tuple[float, ...]  # for the backward pass
    state_bytes: tuple[float, ...]  # parameters and what belongs to them

    def profile(self) -> Profile:
        """Return the layers as a profile."""
        names = [f"layer {k}" for k in range(len(self.forward))]
        state, sent = list(self.state_bytes), [self.sent_bytes] * len(names)
        return Profile.chain(names, self.forward, self.backward, state, list(self.stored_bytes), sent)


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
        text["max_mem"],
    )


def read_layers(seconds: dict[str, Any], sizes: dict[str, Any], microbatch_size: int, devices: int) -> Layers:
    """Return what layers cost with a micro-batch on so many devices."""
    measured, layers = seconds[str(microbatch_size)][str(devices)], sizes[str(devices)]
    numbers = sorted(map(int, measured))
    forward, backward, update = zip(*(measured[str(k)] for k in numbers), strict=True)
    rows = [layers[str(k)] for k in numbers]
    stored = tuple(microbatch_size * row["act_mem_bytes"] for row in rows)
    state = tuple(PARAMETER_BYTES * row["params_floats"] for row in rows)
    return Layers(forward, backward, update, microbatch_size * rows[1]["act_output_bytes"], stored, state)


def on_paper(layers: Layers, stages: tuple[tuple[int, int], ...], count: int) -> tuple[float, float]:
    """Return seconds and bytes of a step of so many micro-batches in textbook 1F1B, with the longest update behind it.

    The bytes are those of the fullest stage: its state, and what it stores for as many micro-batches as are in flight.
    """

    def by_stage(costs: tuple[float, ...]) -> list[float]:
        return [sum(costs[first:last]) for first, last in stages]

    message = layers.sent_bytes / BETWEEN_NODES
    ends = [message * ((s > 0) + (s + 1 < len(stages))) for s in range(len(stages))]
    forward = [x + y for x, y in zip(by_stage(layers.forward), ends, strict=True)]
    backward = [x + y for x, y in zip(by_stage(layers.backward), ends, strict=True)]
    timeline = one_f_one_b(len(stages), count).simulate(forward=forward, backward_input=backward, backward_weight=0.0)
    seconds = timeline.makespan + max(by_stage(layers.update))
    costs = zip(by_stage(layers.state_bytes), by_stage(layers.stored_bytes), timeline.peak_in_flight, strict=True)
    return seconds, RESERVED_BYTES + max(state + stored * number for state, stored, number in costs)


def chosen_stages(layers: Layers, plan: MeasuredPlan) -> tuple[tuple[int, int], ...]:
    """Return the cut that jaxpipe chooses for as many stages."""
    network = Network.uniform(len(plan.stages), BETWEEN_NODES)
    cut = partition_layers(layers.profile(), network, replicate=False, num_microbatches=plan.num_microbatches)
    return tuple((stage.operators[0], stage.operators[-1] + 1) for stage in cut.stages)


def read_files(data: Path) -> tuple[dict[str, Any], ...]:
    """Return the plans by name, the seconds and the sizes of layers, of a clone or of one file."""
    if data.is_file():
        text = json.loads(data.read_text())
        return text["plans"], text["profile"], text["layers"]
    plans = {path.stem: json.loads(path.read_text()) for path in sorted((data / _PLANS).glob("*/plan_config_*.json"))}
    seconds, sizes = (json.loads((data / path).read_text()) for path in (_PROFILE, _LAYERS))
    return plans, seconds, sizes["OPT-350"]


def main(
    data: Path, microbatch_size: int = 8, console: Console | None = None
) -> list[tuple[MeasuredPlan, float, float]]:
    """Price all plans with a size of micro-batches; smaller ones than 8 are bound by launches, not by their profile."""
    plans, seconds, sizes = read_files(data)
    columns = "stages", "replicas", "micro-batches", "measured", "on paper", "", "jaxpipe's cut"
    table = Table("plan", *columns, "GPU, measured", "on paper", "")
    priced = []
    for name, text in plans.items():
        plan = read_plan(Path(name).stem.removeprefix("plan_config_"), text)
        if plan.microbatch_size != microbatch_size:
            continue
        layers, count = read_layers(seconds, sizes, microbatch_size, plan.devices_per_stage), plan.num_microbatches
        step, peak = on_paper(layers, plan.stages, count)
        chosen, _ = on_paper(layers, chosen_stages(layers, plan), count)
        step, chosen = step + plan.exchange_seconds, chosen + plan.exchange_seconds
        priced.append((plan, step, peak))
        table.add_row(
            plan.name,
            *map(str, (len(plan.stages), plan.replicas, count)),
            f"{plan.seconds:.3f} s",
            f"{step:.3f} s",
            f"{step / plan.seconds - 1:+.1%}",
            f"{chosen:.3f} s",
            f"{plan.peak_bytes / 1e9:.1f} GB",
            f"{peak / 1e9:.1f} GB",
            f"{peak / plan.peak_bytes - 1:+.1%}",
        )
    (console or Console()).print(table)
    return priced


if __name__ == "__main__":
    tyro.cli(main)
