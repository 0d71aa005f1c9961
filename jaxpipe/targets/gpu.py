"""GPUs of NVIDIA and AMD.

Peaks are those of the data sheets, without sparsity, of NVIDIA's in the SXM variant where a model has several: TF32
(float32 for V100 and T4), 16-bit tensor cores, float32 without tensor cores, memory. ``jax.lax.Precision.DEFAULT`` is
TF32 for float32 products on GPUs that have it. Nothing was compiled for AMD's here.
"""

import functools
from collections.abc import Mapping
from typing import Any

from jaxpipe.targets.rates import Rates, attained
from jaxpipe.targets.target import Target


#: From one kernel of a GPU to the next, its first and last reads and writes included.
_KERNEL_SECONDS = 2e-6

#: An H100 as XLA describes it (openxla/xla#25919): in place of a driver it gives the compiler its properties.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


#: On a machine with a GPU, CUDA_VISIBLE_DEVICES has to be empty besides.
_ABSENT = {"JAX_PLATFORMS": "cuda,cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


def _h100s(count: int) -> Mapping[str, Any]:
    """Return so many in one machine; nothing can be run, so there are no times, and kernels are not tuned."""
    return {"platform": "cuda", "target_config": _H100, "topology": f"1x1x{count}"}


_nvidia = functools.partial(
    Target,
    platform="gpu",
    lowers_for="cuda",
    extra="cuda",
    compilers=("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"),
    variables=_ABSENT,
    pads_contractions=True,
)


def _rates(flops: float, half_flops: float, element_flops: float, memory: float) -> Rates:
    return attained(flops, half_flops, element_flops, memory, _KERNEL_SECONDS)


GPUS = (
    _nvidia("H200", rates=_rates(494e12, 989e12, 67e12, 4.8e12), memory=141 << 30),
    _nvidia("H100", rates=_rates(494e12, 989e12, 67e12, 3.35e12), memory=80 << 30, topology=_h100s),
    _nvidia("A100", rates=_rates(156e12, 312e12, 19.5e12, 1.9e12), memory=40 << 30),
    _nvidia("V100", rates=_rates(15.7e12, 125e12, 15.7e12, 0.9e12), memory=16 << 30),
    _nvidia("L40S", rates=_rates(183e12, 362e12, 91.6e12, 0.864e12), memory=48 << 30),
    _nvidia("L4", rates=_rates(60e12, 121e12, 30.3e12, 0.3e12), memory=24 << 30),
    _nvidia("T4", rates=_rates(8.1e12, 65e12, 8.1e12, 0.32e12), memory=16 << 30),
    Target("MI300X", "gpu", _rates(163.4e12, 1307.4e12, 163.4e12, 5.3e12), memory=192 << 30, lowers_for="rocm"),
)

#: Any other GPU.
GPU = _nvidia("gpu")
