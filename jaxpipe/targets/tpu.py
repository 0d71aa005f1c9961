"""Google's TPUs.

Peaks are those of Google Cloud's pages on each version: bfloat16 operations, which a float32 product at JAX's default
precision also is, and memory. Elements are counted as lanes (8 x 128) times slots times clock. Memory is what XLA's
compiler has for a program, as its error for one that is too large says. Of 128 MiB on the chip XLA sets 16 aside for
what a kernel itself needs, and keeps arrays in the rest.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxpipe.targets.rates import attained
from jaxpipe.targets.target import Target


#: From one fused operator to the next; a program is one sequence, which nobody starts piece by piece.
_KERNEL_SECONDS = 5e-7


def _topology(version: str, shapes: Mapping[int, str], **options: str) -> Callable[[int], Mapping[str, Any]]:
    """Return the topologies of a version, by how many chips."""

    def of(count: int) -> Mapping[str, Any]:
        chips = min(n for n in shapes if n >= count)
        return {"platform": "tpu", "topology_name": f"{version}:{shapes[chips]}", **options}

    return of


_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}


#: The compiler asks no machine of Google's cloud what it is, and shares its library with other processes.
_ABSENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def _tpu(
    name: str, kind: str, flops: float, element_flops: float, memory: float, gib: float, on_chip: int, **others: Any
) -> Target:
    """Return a version; ``memory`` is its bytes in a second, ``gib`` how much there is, ``on_chip`` in MiB."""
    return Target(
        name,
        "tpu",
        attained(flops, flops, element_flops, memory, _KERNEL_SECONDS, on_chip << 20),
        kinds=(kind,),
        memory=int(gib * 2**30),
        extra="tpu",
        compilers=("libtpu",),
        files=("/dev/accel*", "/dev/vfio/[0-9]*"),
        variables=_ABSENT,
        order="stepwise",
        fused_slices=4,
        **others,
    )


TPUS = (
    _tpu(
        "v4",
        "TPU v4",
        275e12,
        4.3e12,
        1.2e12,
        30.75,
        128,
        topology=_topology("v4", _CUBES, chip_config_name="megacore"),
    ),
    _tpu("v5e", "TPU v5 lite", 197e12, 6.1e12, 0.819e12, 15.75, 112, topology=_topology("v5e", _FLAT)),
    _tpu("v5p", "TPU v5", 459e12, 14.3e12, 2.765e12, 95.73, 112, topology=_topology("v5p", _CUBES)),
    _tpu("v6e", "TPU v6 lite", 918e12, 7.2e12, 1.64e12, 31.24, 112, topology=_topology("v6e", _FLAT)),
)

#: Any other TPU.
TPU = Target("tpu", "tpu", order="stepwise", fused_slices=4)
