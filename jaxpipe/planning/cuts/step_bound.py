"""A bound that no step is below, whatever its cuts, its placement and its schedule."""

import numpy as np

from jaxpipe.costs.network import Network
from jaxpipe.costs.profile import Profile


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
