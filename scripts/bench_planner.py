"""Processor seconds of planning, and how far plans are from bounds: python -m scripts.bench_planner [--out FILE]"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe.costs.network import Network
from jaxpipe.costs.profile import Edge, Profile
from jaxpipe.costs.topology import INFINIBAND_HDR, NVLINK_A100, NVLINK_V100, PCIE_3_X16, Node
from jaxpipe.planning import partition_layers
from scripts.measuring import header


@dataclass(frozen=True)
class Case:
    """One planning problem."""

    name: str
    profile: Profile
    network: Network
    options: dict[str, Any]


def residual_network(blocks: tuple[int, ...], seed: int = 0) -> Profile:
    """A network of bottleneck blocks: operators, skips and proportions as in ResNet, times drawn at random.

    ``(3, 4, 23, 3)`` is the size of ResNet-101: 347 operators.
    """
    r = np.random.default_rng(seed)
    names, seconds, parameters, sizes, edges = [], [], [], [], []

    def add(name: str, cost: float, weights: float, size: float, *reads: int) -> int:
        names.append(f"{name}{len(names)}")
        seconds.append(cost * r.uniform(0.7, 1.3))
        parameters.append(weights)
        sizes.append(size)
        edges.extend(Edge(k, len(names) - 1, sizes[k]) for k in reads)
        return len(names) - 1

    def conv(read: int, cost: float, weights: float, size: float, relu: bool = True) -> int:
        last = add(
            "bn", cost / 8, weights / 500, size, add("conv", cost, weights, size, *([read] if read >= 0 else []))
        )
        return add("relu", cost / 10, 0, size, last) if relu else last

    last = add("pool", 1e-3, 0, 100e6, conv(-1, 5e-3, 40e3, 400e6))
    for stage, count in enumerate(blocks):
        width = 2**stage
        size = 100e6 / width
        for block in range(count):
            weights = 70e3 * width**2 * 4
            inner = conv(conv(last, 3e-3, weights, size), 4e-3, weights, size)
            inner = conv(inner, 3e-3, weights, 4 * size, relu=False)
            skip = last if block else conv(last, 4e-3, weights, 4 * size, relu=False)
            last = add("relu", 5e-4, 0, 4 * size, add("add", 5e-4, 0, 4 * size, inner, skip))
    add("dense", 1e-3, 8e6, 4e5, add("mean", 1e-4, 0, 8e5, last))
    cost = np.array(seconds)
    return Profile(
        tuple(names), tuple(cost / 3), tuple(cost * 2 / 3), tuple(parameters), tuple(sizes), edges=tuple(edges)
    )


def chain(count: int, seed: int = 0) -> Profile:
    """Operators of random cost, one after the other."""
    r = np.random.default_rng(seed)
    cost = r.uniform(1e-3, 1e-2, count)
    sizes = r.uniform(1e6, 1e8, count)
    return Profile.chain(
        [f"op{k}" for k in range(count)], cost / 3, cost * 2 / 3, r.uniform(0, 1e7, count), sizes, sizes
    )


def cases() -> list[Case]:
    """Uniform networks, two-level ones, and one without two devices alike."""
    r = np.random.default_rng(1)
    resnet, long = residual_network((3, 4, 23, 3)), chain(1000)
    matrix = np.triu(r.uniform(1e9, 5e10, (16, 16)), 1)
    unlike = Network(matrix + matrix.T, 1e-5, speed=tuple(r.uniform(1, 2, 16)))
    nodes = Network.from_nodes(
        [
            Node(devices=8, bandwidth_bytes_per_second=NVLINK_A100),
            Node(devices=8, bandwidth_bytes_per_second=PCIE_3_X16),
        ],
        INFINIBAND_HDR,
        5e-6,
    )
    racks = Network.from_nodes([Node(devices=8, bandwidth_bytes_per_second=NVLINK_V100)] * 8, INFINIBAND_HDR, 5e-6)
    uniform16, uniform64 = Network.uniform(16, 1e10), Network.uniform(64, 1e10)
    listed = []
    for model in ("pipedream", "min_max", "throughput", "synchronous"):
        options = {"cost_model": model, "num_microbatches": 64}
        listed.append(Case("ResNet-101 size, 16 devices", resnet, uniform16, options))
        listed.append(Case("1000 operators, 64 devices", long, uniform64, options))
    for model in ("min_max", "synchronous"):
        options = {"cost_model": model, "num_microbatches": 64}
        listed.append(Case("ResNet-101 size, 2 nodes of 8", resnet, nodes, options))
        listed.append(Case("ResNet-101 size, 16 unlike devices", resnet, unlike, options))
        listed.append(Case("1000 operators, 8 nodes of 8", long, racks, options))
        listed.append(Case("ResNet-101 size, 16 unlike, straight", resnet, unlike, {**options, "replicate": False}))
    memory = {"cost_model": "throughput", "num_microbatches": 64, "memory": 40e9}
    listed.append(Case("1000 operators, 64 devices, 40 GB", long, uniform64, memory))
    return listed


def main() -> None:
    """Plan every case once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="cases whose name or model contains this")
    arguments = parser.parse_args()
    rows = []
    for case in cases():
        model = case.options["cost_model"]
        if arguments.only not in f"{case.name} {model}":
            continue
        start = time.process_time()
        partition = partition_layers(case.profile, case.network, **case.options)
        seconds = time.process_time() - start
        row = {
            "case": case.name,
            "cost_model": model,
            "operators": len(case.profile.names),
            "devices": case.network.num_devices,
            "seconds": seconds,
            "objective_seconds": partition.bottleneck_seconds,
            "ratio_to_bound": partition.ratio,
            "stages": [len(stage.devices) for stage in partition.stages],
            "searched": partition.searched,
        }
        rows.append(row)
        print(
            f"{case.name:38s} {model:12s} {seconds:7.2f} s  {partition.ratio:6.3f} of the bound, "
            f"{len(partition.stages)} stages; {partition.searched}",
            flush=True,
        )
    if arguments.out:
        arguments.out.write_text(json.dumps({**header(), "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
