"""The seconds that storage costs a stage: operators that are computed again, codecs, swaps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxpipe.array_types import TensorNumber
from jaxpipe.costs.kernels import operator_seconds
from jaxpipe.graph.graph import Graph, Operator
from jaxpipe.targets.rates import Rates


@dataclass(frozen=True, eq=False)
class Prices:
    """Costs of computing again, of codecs and of swaps.

    Attributes:
      rates: of the profiled device.
      profiled: by the first result and the name of an operator, its seconds as profiled.
      scale: profiled seconds for each estimated one.
      slow: by stage, how many times slower than the profiled device the stage's own is, or are together.
      period: seconds of a micro-batch on the slowest stage, with which swaps overlap.
    """

    rates: Rates
    profiled: Mapping[tuple[TensorNumber, str], float] = field(default_factory=dict)
    scale: float = 1.0
    slow: tuple[float, ...] = ()
    period: float = math.inf

    @property
    def bytes_per_second(self) -> float:
        """The rate of memory."""
        return self.rates.bytes / self.scale if self.scale else self.rates.bytes

    def seconds(self, graph: Graph, op: Operator) -> float:
        """Return the seconds of an operator: as profiled if that is known, else in proportion to an estimate."""
        known = self.profiled.get((op.outputs[0], op.name))
        return self.scale * operator_seconds(op, graph.tensors, self.rates) if known is None else known
