"""The device that a step is explained for: one that is here, or a kind that is only compiled for."""

import re
from dataclasses import dataclass
from typing import Any

import jax

from jaxpipe.array_types import PyTree
from jaxpipe.costs.absent_gpu import H100, h100s
from jaxpipe.costs.device_memory import memory_of
from jaxpipe.errors import PartitionError
from jaxpipe.models.purify_nnx import is_array


@dataclass(frozen=True)
class TargetDevice:
    """A device, and its memory.

    Attributes:
      device: of JAX; None if the arguments are on several.
      others: devices of its kind, itself first; a step may be sharded over them.
      kind: its name.
      memory: bytes that it has; None where that is not known, as of a CPU.
    """

    device: Any
    others: tuple[Any, ...]
    kind: str
    memory: int | None


def target_device(device: Any, args: PyTree) -> TargetDevice:
    """Return the device to compile for.

    Args:
      device: a ``jax.Device``; or a word of its kind or platform, such as ``"H100"``; None: where ``args`` are.
      args: the arguments of the step.

    Raises:
      PartitionError: if there is no such device, and none of its kind can be compiled for.
    """
    if isinstance(device, str):
        return _of_kind(device)
    if device is None:
        shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(args)]
        devices = {d for sharding in shardings if sharding is not None for d in sharding.device_set}
        if len(devices) > 1:
            first = min(devices, key=lambda d: d.id)
            return TargetDevice(None, (), f"{len(devices)} x {first.device_kind}", _memory(first))
        config: Any = jax.config
        device = next(iter(devices), config.jax_default_device or jax.devices()[0])
        if isinstance(device, str):  # a platform
            return _of_kind(device)
    if not hasattr(device, "device_kind"):
        raise PartitionError(
            f"device={device!r} ({type(device).__name__}); it must be a jax.Device, or the name of a kind, such as "
            "'H100' or 'cpu'."
        )
    return TargetDevice(device, _alike(device), device.device_kind, _memory(device))


def _of_kind(kind: str) -> TargetDevice:
    present = [*jax.devices(), *_cpus()]
    for device in present:
        words = {device.platform.lower(), *re.findall(r"\w+", device.device_kind.lower())}
        if kind.lower() in words:
            return TargetDevice(device, _alike(device), device.device_kind, _memory(device))
    if kind.lower() == "h100":
        try:
            devices = h100s(8).devices
        except Exception as error:  # whatever kind of error a backend that does not start raises
            raise PartitionError(
                f"device={kind!r} is not here, and compiling for an absent one failed ({_first_line(error)}). It needs "
                "CUDA's compiler, which pip install 'jaxpipe[cuda]' brings, and, before JAX starts, "
                "JAX_PLATFORMS=cuda,cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 and, on a machine with a GPU, "
                "CUDA_VISIBLE_DEVICES= (the command `jaxpipe explain` sets them)."
            ) from error
        memory = int(re.search(r"device_memory_size: (\d+)", H100)[1])  # type: ignore[index]
        return TargetDevice(devices[0], tuple(devices), "NVIDIA H100 80GB HBM3 (absent)", memory)
    kinds = ", ".join(dict.fromkeys(repr(device.device_kind) for device in present))
    raise PartitionError(
        f"device={kind!r}: no such device is here ({kinds}), and of absent ones only 'H100' can be compiled for. Pass "
        "one of these, or a jax.Device."
    )


def _cpus() -> list[Any]:
    try:
        return jax.devices("cpu")
    except RuntimeError:  # JAX_PLATFORMS leaves them out
        return []


def _alike(device: Any) -> tuple[Any, ...]:
    try:
        others = jax.devices(device.platform)
    except RuntimeError:  # of a topology
        return (device,)
    return (device, *(d for d in others if d != device and d.device_kind == device.device_kind))


def _memory(device: Any) -> int | None:
    return None if device.platform == "cpu" else memory_of(device)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120]


def placed(args: PyTree, target: TargetDevice) -> PyTree:
    """Return the shapes of arguments, on a device; whatever is no array stays."""
    if target.device is None:
        return args
    mesh = jax.sharding.Mesh([target.device], "device")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if is_array(x) else x, args)
