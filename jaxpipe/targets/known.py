"""Known targets, by what JAX or a user calls them."""

import functools
import glob
import importlib.util
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from jaxpipe.errors import PartitionError
from jaxpipe.targets.cpu import CPU
from jaxpipe.targets.gpu import GPU, GPUS
from jaxpipe.targets.target import Target
from jaxpipe.targets.tpu import TPU, TPUS


if TYPE_CHECKING:  # profiles are read without JAX, and the command sets variables before JAX starts
    from jaxpipe.array_types import Device


#: Kinds of devices whose rates are known, and what any other device of a platform is.
_KINDS: dict[str, Target] = {}
ANY = {"gpu": GPU, "tpu": TPU}


def register(target: Target) -> Target:
    """Make a target known by its names; returns it.

    Args:
      target: a kind of device; in place of one that has its name.

    Example:
      >>> from jaxpipe.targets.rates import Rates
      >>> chip = register(Target("Chip 9", "gpu", Rates(flops=1e14, bytes=1e12)))
      >>> target_named("Chip 9") is chip
      True
    """
    _KINDS[target.name] = target
    target_of_kind.cache_clear()
    return target


def known_targets() -> tuple[Target, ...]:
    """Return all targets with a name of their own."""
    return tuple(_KINDS.values())


def target_named(name: str) -> Target:
    """Return the target of a name, in any case: ``"H100"``, ``"v5e"``, ``"cpu"``.

    Raises:
      PartitionError: if no target has it.

    Example:
      >>> target_named("h100").platform
      'gpu'
    """
    by_name = {known.lower(): target for known, target in _KINDS.items()}
    if name.lower() not in by_name:
        raise PartitionError(
            f"device={name!r}: its peak rates are not known, only those of {', '.join(_KINDS)}. Use the nearest of "
            "them and edit the profile, give a jax.Device, or make it known: jaxpipe.targets.register(...)."
        )
    return by_name[name.lower()]


@functools.cache  # called for each operator of a program
def target_of_kind(kind: str) -> Target | None:
    """Return the target of a device kind, as JAX names it: all of it, or a word in it; None for an unknown one.

    Example:
      >>> target_of_kind("NVIDIA H100 80GB HBM3").name, target_of_kind("TPU v5 lite").name
      ('H100', 'v5e')
    """
    return _first(t for t in _KINDS.values() if kind in (t.name, *t.kinds)) or _first(
        _KINDS[word] for word in re.findall(r"\w+", kind) if word in _KINDS
    )


def target_of(device: "Device") -> Target:
    """Return the target of a device."""
    return target_of_kind(device.device_kind) or target_of_platform(device.platform)


def target_of_platform(platform: str) -> Target:
    """Return the target that stands for devices of a platform whose kind is unknown."""
    return _KINDS.get(platform) or ANY.get(platform, GPU)


def variables_for(name: str) -> Mapping[str, str]:
    """Return the environment variables with which JAX has to start to compile for a target, by its name.

    None for one whose compiler is not installed, or that may be here.
    """
    target = _first(target for target in _KINDS.values() if target.name.lower() == name.lower())
    if target is None or any(map(glob.glob, target.files)):
        return {}
    return target.variables if not target.compilers or any(map(_is_installed, target.compilers)) else {}


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def _first(targets: Iterable[Target]) -> Target | None:
    return next(iter(targets), None)


for _target in (*GPUS, *TPUS, CPU):
    register(_target)
