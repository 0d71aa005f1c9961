"""Several stages on each device: cuts for all of them, over devices in an order that was found for one on each."""

from dataclasses import replace
from typing import Any

import numpy as np

from jaxpipe.costs.network import Network
from jaxpipe.planning.cuts.partition_layers import partition_layers
from jaxpipe.planning.cuts.placed_stages import Partition


#: Bytes per second from a device to itself.
NO_LINK = 1e12


def chunked(whole: Partition, num_chunks: int, **asked: Any) -> Partition:
    """Stages for ``num_chunks`` rounds over the devices of a partition: stage ``s`` of ``p`` is where its ``s % p`` is.

    Cuts are those for devices that are all alike, as every device has stages from each part of the program.

    Args:
      asked: further arguments of ``partition_layers``.
    """
    p, network = len(whole.stages), whole.network
    count = p * num_chunks
    rates = network.bandwidth[np.isfinite(network.bandwidth) & (network.bandwidth > 0)]
    copies = Network.uniform(count * len(whole.stages[0].devices), float(rates.min()) if rates.size else NO_LINK)
    chunks = partition_layers(whole.profile, copies, num_stages=count, **asked)
    stages = []
    for s, stage in enumerate(chunks.stages):
        devices = whole.stages[s % p].devices
        slowest = min(network.speed[d] for d in devices)
        stages.append(replace(stage, devices=devices, compute_seconds=stage.compute_seconds / slowest))
    return replace(chunks, stages=tuple(stages), network=network)
