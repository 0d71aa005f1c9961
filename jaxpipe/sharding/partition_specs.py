"""Partition specs of a stage's arrays, over the axes of its submesh."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import TensorNumber
from jaxpipe.sharding.submesh import Submesh, axis_names


@dataclass(frozen=True, eq=False)
class Specs:
    """Partition specs of the arrays that a plan names: by tensor of the objective, by leaf of the optimizer state."""

    submesh: Submesh = field(default_factory=Submesh)
    tensors: Mapping[TensorNumber, P] = field(default_factory=dict)
    optimizer: tuple[P, ...] = ()

    def of_tensor(self, t: TensorNumber) -> P:
        """Return the spec of a tensor."""
        return self.tensors.get(t, P())

    def of_leaf(self, k: int) -> P:
        """Return the spec of a leaf of the optimizer state."""
        return self.optimizer[k] if self.optimizer else P()


def side_by_side(spec: P, axis: str) -> P:
    """Return the spec of arrays of all groups along ``axis``, side by side along their first dimension.

    Example:
      >>> side_by_side(P("model"), "data"), side_by_side(P(), "data")
      (P(('data', 'model'),), P('data',))
    """
    first, *rest = spec or (None,)
    axes = (axis, *axis_names(first))
    return P(axes if len(axes) > 1 else axis, *rest)
