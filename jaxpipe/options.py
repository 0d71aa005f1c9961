"""``PlanOptions``: settings of ``partition`` that few need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import PartitionSpec

from jaxpipe.errors import PartitionError
from jaxpipe.model import AxisRules


@dataclass(frozen=True)
class PlanOptions:
    """Hold the settings of ``partition`` that few need.

    Attributes:
      stage_axis, data_axis: names of the mesh axes of stages and of replicas, if they are none of the usual ones.
      devices_per_stage: how many devices of the axis of stages each stage has: one (False), a number for all, or one
        for each stage that add up to all devices, as ``(3, 1)``. True: as many stages and as many devices in each as
        make the step the shortest, by prediction. Micro-batch j goes to device j mod k of a stage with k devices, the
        schedule is a table of such deals (``jaxpipe.schedules.teams``), and gradients are added up within each stage.
      shardings: by name of a variable, or a pattern with ``*``, the partition spec of its dimensions over the mesh axes
        beside those two. It counts instead of the model's own annotations; the first pattern that fits does.
      axis_rules: the mesh axes that logical ones of the model stand for, as ``flax.linen.logical_axis_rules`` takes
        them; left out: the rules in whose context ``partition`` is called.
      batch_axes: mesh axes over which the examples of a micro-batch are split within a stage; left out: ``fsdp``, if
        the mesh has such an axis.
      zero: 1 splits the optimizer state over the replicas of the axis ``data`` (ZeRO-1; Rajbhandari et al., 2020);
        without replicas it changes nothing.

    Raises:
      PartitionError: if a field has a value that is none of these.

    Example:
      >>> PlanOptions(shardings={"*/kernel": PartitionSpec(None, "model")}, zero=1).zero
      1
    """

    stage_axis: str | None = None
    data_axis: str | None = None
    devices_per_stage: bool | int | Sequence[int] = False
    shardings: Mapping[str, Any] = field(default_factory=dict)
    axis_rules: AxisRules = ()
    batch_axes: Sequence[str] | None = None
    zero: int = 0

    def __post_init__(self) -> None:
        if self.zero not in (0, 1):
            raise PartitionError(
                f"PlanOptions(zero={self.zero!r}); it must be 0, or 1 to split the optimizer state over replicas. "
                "Split parameters with shardings= over an axis of their own, such as fsdp."
            )
        for name, spec in self.shardings.items():
            if not isinstance(spec, PartitionSpec):
                raise PartitionError(
                    f"PlanOptions(shardings={{{name!r}: {spec!r}}}); each value must be a jax.sharding.PartitionSpec."
                )
        if isinstance(self.batch_axes, str):
            raise PartitionError(
                f"PlanOptions(batch_axes={self.batch_axes!r}); pass a sequence of names: ({self.batch_axes!r},)."
            )
