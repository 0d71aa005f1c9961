"""Bytes and seconds of the exchanges between replicas, on a network that is given as data.

Gathers and all-reduces go around a ring, over its slowest link. An exchange that is due in a step holds that step up,
or, with a delay, the one after which its result is used, if it has not arrived by then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

from jaxpipe.array_types import PyTree
from jaxpipe.costs.network import Network
from jaxpipe.errors import PartitionError
from jaxpipe.exchange_plan import ExchangePlan, exchange_table
from jaxpipe.gradients.block_exchange import wire_bytes
from jaxpipe.gradients.block_sparse import BlockSparse
from jaxpipe.gradients.blocks import reduced_itemsize
from jaxpipe.gradients.outer_loop import OuterLoop
from jaxpipe.runtime.executable_plan import Update
from jaxpipe.text.printed import PlainTable, Printed


#: Rounds after which the timeline of an exchange repeats itself.
_ROUNDS = 3


@dataclass(frozen=True)
class Turns:
    """Bytes that a device hands to the collectives in a round of some steps.

    Attributes:
      steps: of a round.
      bytes: by turn, which come at equal intervals, those of gathers and of all-reduces.
      delay: the steps after which a result is used.
    """

    steps: int
    bytes: tuple[tuple[int, int], ...]
    delay: int = 0

    def plan(self, name: str, network: Network, rings: Sequence[Sequence[int]], step_seconds: float) -> ExchangePlan:
        """Return what the exchange costs in a step; all ``rings`` of devices exchange at the same time."""
        seconds = [max(_ring_seconds(network, ring, *turn) for ring in rings) for turn in self.bytes]
        sent = sum(map(sum, self.bytes)) / self.steps
        return ExchangePlan(name, sent, self._longer(seconds, step_seconds))

    def _longer(self, seconds: Sequence[float], step_seconds: float) -> float:
        """Return by how much a step is longer on average, in a round after the first ones; one link has them all."""
        apart, now, free, begin = self.steps // len(seconds), 0.0, 0.0, 0.0
        arrives: dict[int, float] = {}
        for step in range(1, _ROUNDS * self.steps + 1):
            now += step_seconds
            if step % apart == 0:
                free = max(now, free) + seconds[(step // apart - 1) % len(seconds)]
                arrives[step + self.delay] = free
            now = max(now, arrives.pop(step, 0.0))
            if step == (_ROUNDS - 1) * self.steps:
                begin = now
        return max(0.0, (now - begin) / self.steps - step_seconds)  # no less, for sums round


def _ring_seconds(network: Network, ring: Sequence[int], gathered: int, reduced: int) -> float:
    """Return the seconds of a gather and an all-reduce, of so many bytes on each device."""
    link = network.slowest_link(ring)
    gather = (len(ring) - 1) * (link.latency + gathered / link.bandwidth) if gathered else 0.0
    return gather + (link.all_reduce_seconds(reduced, len(ring)) if reduced else 0.0)


@dataclass(frozen=True)
class ExchangeCosts(Printed):
    """Costs of exchanges between replicas in a step, and savings beside the first of them.

    Attributes:
      rows: one for each.
    """

    rows: tuple[ExchangePlan, ...]

    def _printed(self) -> list[PlainTable | str]:
        return [exchange_table(self.rows)]


def compare_exchanges(
    params: PyTree,
    exchanges: Mapping[str, BlockSparse | OuterLoop | Literal["dense"]],
    network: Network,
    step_seconds: float = 0.0,
) -> ExchangeCosts:
    """Compare exchanges between replicas on a network: what each sends in a step, and by how much a step is longer.

    That is the mean over a round of the steps' timeline, in which what an outer loop sends with a ``delay`` overlaps
    with the steps until its result is used. Steps and exchanges are otherwise one after the other.

    Args:
      params: arrays or shapes, those that a replica exchanges.
      exchanges: by name ``"dense"`` (in every step), ``block_sparse(...)`` (after its warm-up) or ``outer_loop(...)``.
      network: one device for each replica.
      step_seconds: of a step without any exchange.

    Raises:
      PartitionError: if the network has no link, or an exchange is none.

    Example:
      >>> import jax
      >>> from jaxpipe.gradients import block_sparse, outer_loop
      >>> params = {"kernel": jax.ShapeDtypeStruct((2500, 5000), "float32")}
      >>> blocks = outer_loop(inner_steps=16, exchange=block_sparse(k=0.01))
      >>> exchanges = {"dense": "dense", "outer loop": outer_loop(inner_steps=16), "blocks": blocks}
      >>> print(compare_exchanges(params, exchanges, Network.uniform(2, 125e6)))
      exchange    sent in a step  seconds   saved  fewer bytes
      ────────────────────────────────────────────────────────
      dense            47.68 MiB   400 ms
      outer loop        2.98 MiB    25 ms  375 ms         16 x
      blocks           30.52 KiB   250 us  400 ms      1,600 x
    """
    if network.num_devices < 2 or not step_seconds >= 0:
        raise PartitionError(
            f"compare_exchanges: a network of {network.num_devices} device(s), step_seconds={step_seconds:g}; there "
            "must be 2 or more, one for each replica, and the seconds may not be negative."
        )
    ring = range(network.num_devices)
    if not are_linked(network, [ring]):
        raise PartitionError("compare_exchanges: network has replicas without a link between them. Give them one.")
    rows = (_turns(params, x).plan(name, network, [ring], step_seconds) for name, x in exchanges.items())
    return ExchangeCosts(tuple(rows))


def are_linked(network: Network, rings: Sequence[Sequence[int]]) -> bool:
    """Return whether there is a link between any two devices of each ring."""
    return all(network.slowest_link(ring).bandwidth for ring in rings)


def _turns(params: PyTree, exchange: object) -> Turns:
    if isinstance(exchange, OuterLoop):
        settings = exchange.settings
        plans, mode = settings.plans(params), settings.exchange.rule.mode
        return Turns(settings.inner_steps, tuple(wire_bytes([plan], mode) for plan in plans), settings.delay)
    if isinstance(exchange, BlockSparse):
        return Turns(1, (wire_bytes([exchange.settings.plans(params)[-1]], exchange.settings.rule.mode),))
    if isinstance(exchange, str) and exchange == "dense":
        leaves = jax.tree.leaves(params)
        return Turns(1, ((0, sum(int(np.prod(x.shape)) * reduced_itemsize(x.dtype) for x in leaves)),))
    raise PartitionError(
        f"compare_exchanges: {exchange!r}; each exchange must be 'dense', jaxpipe.gradients.block_sparse(...) or "
        "jaxpipe.gradients.outer_loop(...)."
    )


def planned_exchanges(
    update: Update, dense_bytes: int, network: Network, rings: Sequence[Sequence[int]], step_seconds: float
) -> tuple[ExchangePlan, ...]:
    """Return what a pipeline's exchange costs beside a dense one; no program of a pipeline overlaps it with steps."""
    choices = {"dense": Turns(1, ((0, dense_bytes),))}
    if update.exchange is not None:
        choices["block_sparse"] = Turns(1, (update.exchange.traffic[-1],))
    steps = update.outer.settings.inner_steps if update.outer is not None else 16
    choices[f"outer_loop({steps})"] = Turns(steps, ((0, dense_bytes),))
    if update.outer is not None:
        is_whole = all(blocks.is_whole for stages in update.outer.plans for plan in stages for blocks in plan)
        name = f"outer_loop({steps}){'' if is_whole else ', blocks'}"
        choices[name] = Turns(steps, tuple(update.outer.traffic))
    return tuple(turns.plan(name, network, rings, step_seconds) for name, turns in choices.items())
