"""``Rates``: operations and bytes in a second that programs attain on a device; the known kinds of devices."""

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpipe.errors import PartitionError


if TYPE_CHECKING:  # profiles are read without JAX
    from jaxpipe.array_types import Device


@dataclass(frozen=True)
class Rates:
    """Operations and bytes in a second that a program gets out of a device.

    Attributes:
      flops: floating-point operations of products (matrix products, convolutions) of float32 at JAX's default
        precision, which is TF32 on tensor cores that have it.
      bytes: to and from memory.
      half_flops: operations of products of 16-bit operands; left out, as ``flops``.
      element_flops: operations of everything else, and of products whose precision is ``HIGHEST``; left out, as
        ``flops``.
      kernel_seconds: from the end of one kernel to the work of the next. What XLA fuses is one kernel.

    Raises:
      PartitionError: if a rate is not a positive number, or ``kernel_seconds`` is negative.

    Example:
      >>> Rates(flops=1e12, bytes=1e11).half_flops
      1000000000000.0
    """

    flops: float
    bytes: float
    half_flops: float = 0.0
    element_flops: float = 0.0
    kernel_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("half_flops", "element_flops"):
            object.__setattr__(self, name, getattr(self, name) or self.flops)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and field.name != "kernel_seconds"):
                raise PartitionError(
                    f"Rates({field.name}={value!r}): it must be a finite number above zero; kernel_seconds may be zero."
                )
            object.__setattr__(self, field.name, float(value))


# What programs attain of a data sheet. These are the three numbers to set from a measurement; nothing else scales what
# the data sheets say.

#: Share of the peak operations of tensor cores that a product of a few thousand rows gets: large ones get three
#: quarters, those of a width of 768 about 0.6.
PRODUCT_SHARE = 0.7

#: Share of the peak memory rate that a kernel gets which reads and writes whole arrays.
MEMORY_SHARE = 0.9

#: From one kernel of a GPU to the next, its first and last reads and writes included.
KERNEL_SECONDS = 2e-6


def _gpu(flops: float, half_flops: float, element_flops: float, memory: float) -> Rates:
    """Return the rates of a GPU from its data sheet."""
    return Rates(
        flops=PRODUCT_SHARE * flops,
        bytes=MEMORY_SHARE * memory,
        half_flops=PRODUCT_SHARE * half_flops,
        element_flops=element_flops,
        kernel_seconds=KERNEL_SECONDS,
    )


#: What any other device is taken for, and one CPU core: of the right order for the proportions of operators.
OTHER = Rates(5e10, 1e10)

#: Known devices, by the word in a device kind that names the model. The arguments are those of NVIDIA's data sheets, of
#: the SXM variant where a model has several, without sparsity: TF32 (float32 for V100 and T4), 16-bit
#: tensor cores, float32 without tensor cores, memory. ``jax.lax.Precision.DEFAULT`` is TF32 for float32 products on
#: GPUs that have it.
RATES = {
    "H200": _gpu(494e12, 989e12, 67e12, 4.8e12),
    "H100": _gpu(494e12, 989e12, 67e12, 3.35e12),
    "A100": _gpu(156e12, 312e12, 19.5e12, 1.9e12),
    "V100": _gpu(15.7e12, 125e12, 15.7e12, 0.9e12),
    "L40S": _gpu(183e12, 362e12, 91.6e12, 0.864e12),
    "L4": _gpu(60e12, 121e12, 30.3e12, 0.3e12),
    "T4": _gpu(8.1e12, 65e12, 8.1e12, 0.32e12),
    "cpu": OTHER,
}


def known_rates(kind: str) -> Rates | None:
    """Return the rates of a kind of device whose name has a known word in it, else None.

    Example:
      >>> known_rates("NVIDIA H100 80GB HBM3") == RATES["H100"]
      True
    """
    return next((RATES[word] for word in re.findall(r"\w+", kind) if word in RATES), None)


def rates_of(device: "Device") -> Rates:
    """Return the rates of a device, by its kind."""
    return known_rates(device.device_kind) or OTHER


def rates_of_kind(kind: str) -> Rates:
    """Return the rates of the devices of a kind, such as ``"H100"`` or ``"cpu"``.

    Example:
      >>> rates_of_kind("V100").element_flops
      15700000000000.0
    """
    if kind not in RATES:
        raise PartitionError(
            f"device={kind!r}: its peak rates are not known, only those of {', '.join(RATES)}. Use the nearest of them "
            "and edit the profile, or give a jax.Device."
        )
    return RATES[kind]
