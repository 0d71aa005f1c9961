"""``Target``: a kind of device as data, all that programs and plans for it depend on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxpipe.targets.rates import OTHER, Rates


#: How the steps of a backward pass are kept in order.
#: ``"grouped"``   behind conditionals, where XLA drops barriers and runs operators breadth-first;
#: ``"joined"``    products wait for each other, and kernels between them are left whole;
#: ``"stepwise"``  what a step takes from the stash waits for its cotangent, after the first product.
Order = Literal["grouped", "joined", "stepwise"]


@dataclass(frozen=True)
class Target:
    """A kind of device.

    Attributes:
      name: as users write it, such as ``"H100"``.
      platform: as JAX names it: ``"cpu"``, ``"gpu"``, ``"tpu"``.
      rates: what programs attain there.
      kinds: other names of the kind, as ``jax.Device.device_kind`` has them: all of it, or a word in it.
      memory: bytes of the variant with the least; None where that is not known.
      pool_fraction: the part of them that programs may take unless a variable says otherwise.
      pool_variables: environment variables that say otherwise, the newer one first.
      lowers_for: the platform that programs are written down for; left out, that of the devices.
      topology: by how many devices that are not here, the arguments of ``jax.experimental.topologies`` for them; None:
        it cannot be compiled for.
      extra: the extra of jaxpipe that brings the compiler for those.
      compilers: modules of which one is there if it is installed.
      variables: environment variables with which JAX has to start for that.
      files: patterns of files that there are where the device is here, and the variables are not to be set.
      order: how the steps of a backward pass are kept in order.
      runs_early: XLA runs operators as early as it can, not so that little memory is needed.
      plain_convolutions: convolutions are fast only with dimension numbers in order.
      pads_contractions: matrix products pad contractions that are no multiple of a few numbers, in a copy.
      serial_scatter: a scatter runs one element after the other.
      fuses_into_readers: what several read is computed again for each of them.
      fused_slices: how many slices of an array XLA adds up in one kernel; it writes more of them; 0: any number.
      keeps_checkpoints: XLA does not merge what ``jax.checkpoint`` computes again with the forward pass.
      exact_predictions: bytes that are estimated for stage programs are XLA's, so that plans are not compiled.
      is_host: it is the host itself: its memory and its cores are the host's, and what starts a program that waits for
        other processes waits as well.

    Example:
      >>> from jaxpipe.targets.known import register, target_named
      >>> chip = register(Target("Chip 7", "gpu", Rates(flops=1e14, bytes=1e12), memory=48 << 30))
      >>> target_named("Chip 7").memory == 48 << 30
      True
    """

    name: str
    platform: str
    rates: Rates = OTHER
    kinds: tuple[str, ...] = ()
    memory: int | None = None
    pool_fraction: float = 0.75
    pool_variables: tuple[str, ...] = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    lowers_for: str = ""
    topology: Callable[[int], Mapping[str, Any]] | None = None
    extra: str = ""
    compilers: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)
    order: Order = "joined"
    runs_early: bool = False
    plain_convolutions: bool = False
    pads_contractions: bool = False
    serial_scatter: bool = False
    fuses_into_readers: bool = False
    fused_slices: int = 0
    keeps_checkpoints: bool = True
    exact_predictions: bool = False
    is_host: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "lowers_for", self.lowers_for or self.platform)
