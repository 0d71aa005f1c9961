"""CPUs, as XLA:CPU runs programs there; one core."""

from jaxpipe.targets.target import Target


CPU = Target(
    "cpu",
    "cpu",
    pool_fraction=1.0,
    pool_variables=(),
    order="grouped",
    runs_early=True,
    plain_convolutions=True,
    serial_scatter=True,
    fuses_into_readers=True,
    keeps_checkpoints=False,
    exact_predictions=True,
    is_host=True,
    variables={"JAX_PLATFORMS": "cpu"},
)
