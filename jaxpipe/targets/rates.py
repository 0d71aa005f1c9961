"""``Rates``: operations and bytes in a second that programs attain on a device."""

import dataclasses
import math
from dataclasses import dataclass

from jaxpipe.errors import PartitionError


@dataclass(frozen=True)
class Rates:
    """Operations and bytes in a second that a program gets out of a device.

    Attributes:
      flops: floating-point operations of products (matrix products, convolutions) of float32 at JAX's default
        precision, which is TF32 on tensor cores that have it, and bfloat16 on TPUs.
      bytes: to and from memory.
      half_flops: operations of products of 16-bit operands; left out, as ``flops``.
      element_flops: operations of everything else, and of products whose precision is ``HIGHEST``; left out, as
        ``flops``.
      kernel_seconds: from the end of one kernel to the work of the next. What XLA fuses is one kernel.
      on_chip: bytes, beside the memory, in which XLA keeps temporaries that are small enough: what is there is neither
        read from memory nor written to it. A program whose residuals fit there needs no memory for them.

    Raises:
      PartitionError: if a rate is not a positive number, or one of the last two is negative.

    Example:
      >>> Rates(flops=1e12, bytes=1e11).half_flops
      1000000000000.0
    """

    flops: float
    bytes: float
    half_flops: float = 0.0
    element_flops: float = 0.0
    kernel_seconds: float = 0.0
    on_chip: float = 0.0

    def __post_init__(self) -> None:
        for name in ("half_flops", "element_flops"):
            object.__setattr__(self, name, getattr(self, name) or self.flops)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and field.name not in ("kernel_seconds", "on_chip")):
                raise PartitionError(
                    f"Rates({field.name}={value!r}): it must be a finite number above zero; kernel_seconds "
                    "and on_chip may be zero."
                )
            object.__setattr__(self, field.name, float(value))


# What programs attain of a data sheet. These are the numbers to set from a measurement; nothing else scales what the
# data sheets say.

#: Share of the peak operations of matrix units that a product of a few thousand rows gets: large ones get three
#: quarters, those of a width of 768 about 0.6.
PRODUCT_SHARE = 0.7

#: Share of the peak memory rate that a kernel gets which reads and writes whole arrays.
MEMORY_SHARE = 0.9


def attained(
    flops: float, half_flops: float, element_flops: float, memory: float, kernel_seconds: float, on_chip: int = 0
) -> Rates:
    """Return the rates that programs attain of the peaks of a data sheet.

    Args:
      flops: of float32 products at JAX's default precision, in a second.
      half_flops: of products of 16-bit operands.
      element_flops: of float32 outside matrix units.
      memory: bytes.
      kernel_seconds: from one kernel to the next, its first and last reads and writes included.
      on_chip: bytes that may stay beside the memory.
    """
    return Rates(
        flops=PRODUCT_SHARE * flops,
        bytes=MEMORY_SHARE * memory,
        half_flops=PRODUCT_SHARE * half_flops,
        element_flops=element_flops,
        kernel_seconds=kernel_seconds,
        on_chip=on_chip,
    )


#: What any other device is taken for, and one CPU core: of the right order for the proportions of operators.
OTHER = Rates(5e10, 1e10)
