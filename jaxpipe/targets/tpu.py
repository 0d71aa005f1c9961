"""Google's TPUs.

Peaks are those of Google Cloud's pages on each version: bfloat16 operations, which a float32 product at JAX's default
precision also is, and memory. Elements are counted as lanes (8 x 128) times slots times clock. Memory is what XLA's
compiler has for a program, as its error for one that is too large says. Of 128 MiB on the chip XLA sets 16 aside for
what a kernel itself needs, and keeps arrays in the rest.
"""

from collections.abc import Mapping
from typing import Any

from jaxpipe.targets.rates import Rates, attained
from jaxpipe.targets.target import Target


#: From one fused operator to the next; a program is one sequence, which nobody starts piece by piece.
_KERNEL_SECONDS = 5e-7


#: By how many chips, how they are arranged.
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}


#: The compiler asks no machine of Google's cloud what it is, and shares its library with other processes.
_ABSENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def _rates(flops: float, element_flops: float, memory: float, on_chip: int) -> Rates:
    """Return what is attained of a version's peaks; ``memory`` is its bytes in a second, ``on_chip`` in MiB."""
    return attained(flops, flops, element_flops, memory, _KERNEL_SECONDS, on_chip << 20)


def _tpu(name: str, kind: str, rates: Rates, gib: float, shapes: Mapping[int, str], **options: str) -> Target:
    """Return a version, with so much memory; ``shapes`` and ``options`` make its topologies."""

    def topology(count: int) -> Mapping[str, Any]:
        chips = min(n for n in shapes if n >= count)
        return {"platform": "tpu", "topology_name": f"{name}:{shapes[chips]}", **options}

    return Target(
        name,
        "tpu",
        rates,
        kinds=(kind,),
        memory=int(gib * 2**30),
        pool_fraction=1.0,
        pool_variables=(),
        topology=topology,
        extra="tpu",
        compilers=("libtpu",),
        files=("/dev/accel*", "/dev/vfio/[0-9]*"),
        variables=_ABSENT,
        order="stepwise",
        fused_slices=4,
    )


TPUS = (
    _tpu("v4", "TPU v4", _rates(275e12, 4.3e12, 1.2e12, 128), 30.75, _CUBES, chip_config_name="megacore"),
    _tpu("v5e", "TPU v5 lite", _rates(197e12, 6.1e12, 0.819e12, 112), 15.75, _FLAT),
    _tpu("v5p", "TPU v5", _rates(459e12, 14.3e12, 2.765e12, 112), 95.73, _CUBES),
    _tpu("v6e", "TPU v6 lite", _rates(918e12, 7.2e12, 1.64e12, 112), 31.24, _FLAT),
)

#: Any other TPU.
TPU = Target("tpu", "tpu", order="stepwise", fused_slices=4)
