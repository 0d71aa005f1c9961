"""The memory that a stage's stash may use elsewhere: peers with room, and the host's, over several links at once."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from jaxpipe.costs.network import Network
from jaxpipe.runtime.stages import SwapTarget
from jaxpipe.schedules.swap_points import HOST
from jaxpipe.schedules.table import StageNumber


#: Most targets of a stage's swaps, the host among them.
MOST_TARGETS = 4


@dataclass(frozen=True)
class SwapLink:
    """A link from a stage's device to other memory.

    Attributes:
      bandwidth: bytes per second, in each direction.
      latency: seconds.
      room: bytes that are free there.
    """

    bandwidth: float
    latency: float
    room: float


@dataclass(frozen=True)
class Links:
    """Direct links between the devices of stages, and to their host's memory; of several replicas the slowest.

    Attributes:
      network: of all devices.
      devices: those of each stage.
      has_peers: whether stashes may go to other stages' devices.
      host_bytes: that each device may use of its host's memory; 0 if stashes must not go there.
    """

    network: Network
    devices: tuple[tuple[int, ...], ...]
    has_peers: bool = True
    host_bytes: int = 0

    def reach(self, s: StageNumber, rooms: Mapping[StageNumber, float]) -> dict[StageNumber, SwapLink]:
        """Return the links of a stage to the peers that have room, and to its host's memory."""
        network, here = self.network, self.devices[s]
        peers = rooms if self.has_peers else {}
        links = {t: SwapLink(*network.slowest_link(here, self.devices[t]), room) for t, room in peers.items()}
        if self.host_bytes:
            rate = min(network.host_bandwidth_bytes_per_second[d] for d in here)
            links[HOST] = SwapLink(rate, max(network.host_latency_seconds[d] for d in here), self.host_bytes)
        return links


@dataclass(frozen=True)
class Targets:
    """Targets for the stashes of a stage.

    Attributes:
      targets: with the shares of their bandwidths.
      bandwidth: bytes per second of all links together.
      latency: of the slowest one, seconds.
      most_bytes: of each stash, as many as fit the room of every target.
    """

    targets: tuple[SwapTarget, ...]
    bandwidth: float
    latency: float
    most_bytes: float


def choose_targets(links: Mapping[StageNumber, SwapLink], away: int, needed: float) -> Targets | None:
    """Return the fastest targets with room for the bytes that have to leave, else those with most room.

    Args:
      links: by stage, or ``HOST``; those without bandwidth or room are not used.
      needed: bytes of each stash that have to leave.

    Returns:
      None if there are no targets.

    Example:
      >>> from jaxpipe.schedules.swap_points import HOST
      >>> links = {2: SwapLink(2e9, 0.0, 100), 3: SwapLink(1e9, 0.0, 100), HOST: SwapLink(5e8, 0.0, float("inf"))}
      >>> [target.stage for target in choose_targets(links, 2, 60).targets]
      [2, 3, -1]
      >>> [target.stage for target in choose_targets(links, 2, 1000).targets]
      [-1]
    """
    usable = [t for t, link in links.items() if link.bandwidth > 0 and link.room > 0]
    candidates = []
    for count in range(1, min(MOST_TARGETS, len(usable)) + 1):
        for stages in itertools.combinations(usable, count):
            candidates.append(_together({t: links[t] for t in stages}, away))
    if not candidates:
        return None
    enough = [targets for targets in candidates if targets.most_bytes >= needed]
    if enough:
        return max(enough, key=lambda targets: (targets.bandwidth, -len(targets.targets)))
    return max(candidates, key=lambda targets: (targets.most_bytes, targets.bandwidth))


def _together(links: Mapping[StageNumber, SwapLink], away: int) -> Targets:
    """Slices in proportion to bandwidth, so that all links take as long."""
    total = sum(link.bandwidth for link in links.values())
    targets = tuple(SwapTarget(t, link.bandwidth / total) for t, link in links.items())
    most = min(links[target.stage].room / (max(1, away) * target.share) for target in targets)
    return Targets(targets, total, max(link.latency for link in links.values()), most)
