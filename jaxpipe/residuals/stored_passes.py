"""The passes of a decorated program with a stash between them."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxpipe import _compat
from jaxpipe.array_types import Array
from jaxpipe.residuals.residual_labels import labels
from jaxpipe.residuals.vjp_program import VJPProgram, backward, forward


#: Values of parameters, and the parts of each stored tensor.
Kept = tuple[Sequence[Array], Sequence[Sequence[Array]]]


@dataclass(frozen=True, eq=False)
class StoredPasses:
    """Forward and backward program of a storage plan.

    Attributes:
      vjp: the programs.
      barriers: steps run behind barriers, where XLA needs them: a budget says what is stored.
      labelled: whether stored arrays carry labels that say why.
    """

    vjp: VJPProgram
    barriers: bool = False
    labelled: bool = False

    def forward(self, values: Sequence[Array]) -> tuple[Sequence[Array], Kept]:
        """Return outputs, and parameters and stash."""
        vjp, by_input = self.vjp, dict(zip(self.vjp.graph.inputs, values, strict=True))
        outputs, stash = forward(vjp, values)
        if self.labelled:
            label = labels(vjp)
            stash = [
                parts if t in by_input else tuple(checkpoint_name(x, label(t, k)) for k, x in enumerate(parts))
                for t, parts in zip(vjp.plan.stored, stash, strict=True)
            ]
        return outputs, ([by_input[t] for t in vjp.parameters], stash)

    def backward(self, kept: Kept, cotangents: Sequence[Array | None]) -> list[Array | None]:
        """Return gradients."""
        barriers = self.barriers and not any(map(_compat.is_batched, jax.tree.leaves((kept, cotangents))))
        return backward(self.vjp, *kept, cotangents, barriers=barriers)
