"""AMD's GPUs. Peaks are those of AMD's data sheets, without sparsity; nothing was compiled for them here."""

from jaxpipe.targets.rates import attained
from jaxpipe.targets.target import Target


#: From one kernel of a GPU to the next, its first and last reads and writes included.
_KERNEL_SECONDS = 2e-6

MI300X = Target(
    "MI300X",
    "gpu",
    attained(163.4e12, 1307.4e12, 163.4e12, 5.3e12, _KERNEL_SECONDS),
    memory=192 << 30,
    pool_fraction=0.75,
    pool_variables=("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"),
    lowers_for="rocm",
)
