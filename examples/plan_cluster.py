"""Plan a training run on paper: sixteen GPUs of two kinds in three nodes, none of which is here.

An OverFeat, whose dense layers hold nearly all parameters, is traced from shapes alone and priced by the peak rates of
an A100. Where should it be cut, which GPUs should run which part, and how far from the best possible is that? A picture
of the plan with one GPU for each stage, and the better of two plans as JSON, are written to ``--out``.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import tyro

import jaxpipe
from examples.models.overfeat import OverFeat
from jaxpipe import Network, Node, topology
from jaxpipe.planning import partition_layers
from jaxpipe.visualize.pictures import draw_stages


@dataclass(frozen=True)
class Options:
    """The plan to make.

    Attributes:
      microbatch_size: examples of a micro-batch.
      num_microbatches: of a step.
      between_nodes: bandwidth of the network between nodes, bytes in a second each way.
      out: folder for pictures and JSON.
    """

    microbatch_size: int = 32
    num_microbatches: int = 64
    between_nodes: float = topology.ETHERNET_25G
    out: Path = Path("out")


def cluster(options: Options) -> Network:
    """Two nodes with four A100 on NVLink, and an older one with eight V100 on PCIe, two and two joined by NVLink."""
    new = Node(devices=4, bandwidth_bytes_per_second=topology.NVLINK_A100, memory_bytes=40e9, name="new")
    old = Node(
        devices=8,
        bandwidth_bytes_per_second=topology.PCIE_3_X16,
        links={(k, k + 1): topology.NVLINK_V100 for k in range(0, 8, 2)},
        speed=0.3,
        memory_bytes=16e9,
        name="old",
    )
    return Network.from_nodes([new, new, old], options.between_nodes, latency_seconds=10e-6)


def loss(model, batch):
    """Cross-entropy of images and labels."""
    logits = model(batch["image"], train=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def main(options: Options) -> jaxpipe.planning.Partition:
    """Profile, plan twice, print, draw; returns the better plan."""
    size = options.microbatch_size
    batch = {
        "image": jax.ShapeDtypeStruct((size, 231, 231, 3), jnp.float32),
        "label": jax.ShapeDtypeStruct((size,), jnp.int32),
    }
    profile = jaxpipe.profile_model(OverFeat(), batch, loss=loss, source="analytic", device="A100")
    network = cluster(options)
    print(network, end="\n\n")
    plans = [
        partition_layers(profile, network, replicate=replicate, num_microbatches=options.num_microbatches)
        for replicate in (False, True)
    ]
    for name, plan in zip(("One device for each stage", "Any number of devices for each stage"), plans, strict=True):
        print(f"{name}:\n{plan}\n")
    best = min(plans, key=lambda plan: plan.bottleneck_seconds)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "partition.json").write_text(best.to_json())
    draw_stages(plans[0]).savefig(options.out / "stages.png", bbox_inches="tight")
    print(f"partition.json and stages.png are in {options.out}/")
    return best


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
