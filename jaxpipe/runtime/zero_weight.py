"""Weights of a batch that sum to zero: its loss and gradients are 0/0."""

from jaxpipe import _compat
from jaxpipe.array_types import Array
from jaxpipe.errors import JaxpipeWarning, warn


#: The meaning of a total weight of zero.
MEANING = (
    "the weights of its micro-batches, the second of (loss_sum, weight, metrics), sum to zero: its loss and its "
    "gradients are 0/0, nan, as without a pipeline"
)


class WeightWatch:
    """Warns of batches without weight and waits for no device: a weight that is not computed yet is looked at later."""

    def __init__(self) -> None:
        """Begin without a weight."""
        self._last: Array | None = None

    def look(self, weight: Array) -> None:
        """Warn if this weight, or the one before it, is known to be zero."""
        weights, self._last = (self._last, weight.addressable_data(0)), None
        for x in weights:
            if x is None:
                continue
            if not _compat.is_ready(x):
                x.copy_to_host_async()
                self._last = x
            elif not x:
                warn(
                    f"A batch without weight: {MEANING}. Leave such batches out. A step makes all parameters nan, "
                    'unless it is guarded by options=jaxpipe.PlanOptions(on_nonfinite="skip") or "raise".',
                    JaxpipeWarning,
                )
