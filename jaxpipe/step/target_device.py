"""The device that a step is explained for: one that is here, or a kind that is only compiled for."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxpipe import _compat
from jaxpipe.array_types import Device, PyTree
from jaxpipe.costs.device_memory import memory_of
from jaxpipe.errors import PartitionError
from jaxpipe.models.purify_nnx import is_array
from jaxpipe.step.step_arguments import changed, without_values
from jaxpipe.targets.absent import absent_devices
from jaxpipe.targets.known import known_targets, target_of
from jaxpipe.targets.target import Target


#: The most devices over which a step may be sharded.
_MOST_SHARDS = 8


@dataclass(frozen=True)
class TargetDevice:
    """A device, and its memory.

    Attributes:
      device: of JAX; None if the arguments are on several.
      others: devices of its kind, itself first; a step may be sharded over them.
      kind: its name.
      memory: bytes that it has; None where that is not known, as of a CPU.
      target: what is known of its kind.
    """

    device: Any
    others: tuple[Any, ...]
    kind: str
    memory: int | None
    target: Target


def target_device(device: Any, args: PyTree, options: Mapping[str, Any]) -> TargetDevice:
    """Return the device to compile for.

    Args:
      device: a ``jax.Device``; or a word of its kind or platform, such as ``"H100"``; None: where ``args`` are.
      args: the arguments of the step.
      options: of ``jax.jit``.

    Raises:
      PartitionError: if there is no such device, and none of its kind can be compiled for, or arguments are on several.
    """
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
    if device is not None and any(getattr(sharding, "num_devices", 1) > 1 for sharding in shardings):
        text = f"device={device!r} is one device, and arguments are split over several."
        raise PartitionError(f"{text} Leave device= out, or pass arguments without shardings.")
    if isinstance(device, str):
        return _of_kind(device)
    if device is None:
        devices = devices_of(jax.tree.leaves(args), options)
        if len(devices) > 1:
            return on_several(devices[0], f"{len(devices)} x {devices[0].device_kind}")
        device = devices[0]
    if not hasattr(device, "device_kind"):
        raise PartitionError(f"device={device!r}; it must be a jax.Device, or the name of a kind, such as 'H100'.")
    return _present(device)


def on_several(device: Device, kind: str) -> TargetDevice:
    """Return the target of a step on several devices like one: its arguments, or the step itself, say on which."""
    return replace(_target(device), device=None, others=(), kind=kind)


def devices_of(leaves: Sequence[Any], options: Mapping[str, Any]) -> list[Device]:
    """Return the devices that a step is for, in the order of their numbers.

    Args:
      leaves: of its arguments; they decide if they have shardings, but for those that name axes of a mesh alone.
      options: of ``jax.jit``, which decide else; the mesh in context and the default of JAX, if they do not.

    Raises:
      PartitionError: if shardings are over abstract meshes, and nothing has devices.
    """
    shardings = [*jax.tree.leaves(options.get("in_shardings")), *(getattr(leaf, "sharding", None) for leaf in leaves)]
    known = [s for s in shardings if not isinstance(getattr(s, "mesh", None), jax.sharding.AbstractMesh)]
    devices = {d for sharding in known for d in getattr(sharding, "device_set", ())}
    if devices := devices or set(filter(None, _compat.get_concrete_mesh().devices.flat)):
        return sorted(devices, key=lambda d: d.id)
    if len(known) < len(shardings):
        raise PartitionError("Shardings over an abstract mesh are not on devices. Call it with jax.set_mesh(mesh).")
    config: Any = jax.config
    default = options.get("device") or options.get("backend") or config.jax_default_device
    return [jax.devices(default)[0] if default is None or isinstance(default, str) else default]


def _of_kind(kind: str) -> TargetDevice:
    present = [*jax.devices(), *_devices("cpu")]
    for device in present:
        if kind.lower() in (device.platform.lower(), *re.findall(r"\w+", device.device_kind.lower())):
            return _present(device)
    absent = {target.name.lower(): target for target in known_targets() if target.topology is not None}
    if (target := absent.get(kind.lower())) is not None:
        try:
            devices = absent_devices(target, _MOST_SHARDS)
        except Exception as error:  # whatever kind of error a backend that does not start raises
            variables = " ".join(f"{name}={value}" for name, value in target.variables.items())
            text = (str(error) or type(error).__name__).splitlines()[0][:120]
            raise PartitionError(
                f"device={kind!r} is not here, and compiling for an absent one failed ({text}). It needs "
                f"its compiler, which pip install 'jaxpipe[{target.extra}]' brings, and, before JAX starts, "
                f"{variables}, which the command `jaxpipe explain` sets by itself."
            ) from error
        return replace(_target(*devices), kind=f"{devices[0].device_kind} (absent)", target=target)
    kinds = ", ".join(dict.fromkeys(repr(device.device_kind) for device in present))
    names = ", ".join(repr(target.name) for target in absent.values())
    raise PartitionError(
        f"device={kind!r}: no such device is here ({kinds}), and of absent ones {names} can be compiled for. Pass one "
        "of these, or a jax.Device."
    )


def _present(device: Any) -> TargetDevice:
    alike = (d for d in _devices(device.platform) if d != device and d.device_kind == device.device_kind)
    return _target(device, *alike)


def _target(*devices: Any) -> TargetDevice:
    device, target = devices[0], target_of(devices[0])
    memory = None if target.is_host else memory_of(device)
    return TargetDevice(device, devices[:_MOST_SHARDS], device.device_kind, memory, target)


def _devices(platform: str) -> list[Any]:
    """Return the devices of a platform; none where JAX_PLATFORMS leaves it out, or it is that of a topology."""
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []


def placed(args: PyTree, target: TargetDevice) -> PyTree:
    """Return the shapes of arguments, on a device; whatever is no array stays."""
    if target.device is None:
        return without_values(args)
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh([target.device], "device"), jax.sharding.PartitionSpec())

    def shape(x: Any) -> Any:
        weak = getattr(x, "weak_type", False)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=weak) if is_array(x) else x

    return changed(args, shape)
