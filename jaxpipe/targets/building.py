"""The target that a program is built for: XLA:CPU needs other programs than a GPU or a TPU does.

It is not that of JAX's default device: a process with a GPU may train on CPU devices, and programs are compiled
ahead of time for devices that a machine does not have.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.core import Tracer

from jaxpipe.array_types import Device
from jaxpipe.targets.known import ANY, target_named, target_of, target_of_platform
from jaxpipe.targets.target import Target


# JAX's tracing caches know of it: a jitted function is traced again for another target.
_chosen = jax.make_user_context(default_value=None)


def current() -> Target:
    """Return the target that the program being traced or planned is for.

    In this order: the innermost ``building_for``, the mesh of an enclosing ``shard_map`` or ``jax.set_mesh``,
    ``jax.default_device``, the first device of the default backend.
    """
    return _chosen.value or _of_mesh(jax.sharding.get_abstract_mesh()) or _default()


@contextlib.contextmanager
def building_for(target: Target | Device | str | None) -> Iterator[None]:
    """Trace and plan for a target, that of a device, or one by its name or platform; None changes nothing.

    Example:
      >>> with building_for("H100"):
      ...     current().platform
      'gpu'
    """
    if isinstance(target, str):
        target = ANY.get(target) or target_named(target)
    elif target is not None and not isinstance(target, Target):
        target = target_of(target)
    with _chosen(target or _chosen.value):
        yield


def target_of_values(values: Iterable[Any]) -> Target | None:
    """Return the target that arrays are on, traced ones included if their sharding has a mesh; None if unknown."""
    for value in values:
        target = None
        if isinstance(value, Tracer):
            target = _of_mesh(jax.typeof(value).sharding.mesh)
        elif isinstance(value, jax.Array):
            target = target_of(next(iter(value.devices())))
        if target:
            return target
    return None


def _of_mesh(mesh: Any) -> Target | None:
    device = getattr(mesh, "abstract_device", None)
    return target_of(device) if device else None


def _default() -> Target:
    config: Any = jax.config
    device = config.jax_default_device
    if device is None:
        device = jax.local_devices()[0]
    return target_of_platform(device) if isinstance(device, str) else target_of(device)
