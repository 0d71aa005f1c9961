"""An absent GPU to compile for: a description in place of a driver gives the compiler its properties.

Needs ``pip install '.[cuda]'``, on any machine, and ``JAX_PLATFORMS=cuda,cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1``; with
a GPU, CUDA_VISIBLE_DEVICES has to be empty. Nothing can be run, so there are no times, and kernels are not tuned.
"""

from jax.experimental import topologies


#: An H100 as XLA describes it (openxla/xla#25919).
H100 = """
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


def h100s(count: int) -> topologies.TopologyDescription:
    """The topology of so many in one machine."""
    return topologies.get_topology_desc(platform="cuda", target_config=H100, topology=f"1x1x{count}")
