"""The platform that a program is built for: XLA:CPU needs other programs than a GPU does.

It is not ``jax.default_backend()``: a process with a GPU may train on CPU devices, and programs are compiled ahead of
time for GPUs on machines without one.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.core import Tracer


# JAX's tracing caches know of it: a jitted function is traced again for another platform.
_chosen = jax.make_user_context(default_value=None)


def platform() -> str:
    """Return the platform that the program being traced or planned is for, such as ``"cpu"`` or ``"gpu"``.

    In this order: the innermost ``building_for``, the mesh of an enclosing ``shard_map`` or ``jax.set_mesh``,
    ``jax.default_device``, the default backend.
    """
    return _chosen.value or _of_mesh(jax.sharding.get_abstract_mesh()) or _default()


@contextlib.contextmanager
def building_for(name: str | None) -> Iterator[None]:
    """Trace and plan for a platform; None changes nothing.

    Example:
      >>> with building_for("gpu"):
      ...     platform()
      'gpu'
    """
    with _chosen(name or _chosen.value):
        yield


def platform_of(values: Iterable[Any]) -> str | None:
    """Return the platform on which arrays are, traced ones included if their sharding has a mesh; None if unknown."""
    for value in values:
        if isinstance(value, Tracer):
            name = _of_mesh(jax.typeof(value).sharding.mesh)
        else:
            name = next(iter(value.devices())).platform if isinstance(value, jax.Array) else None
        if name:
            return name
    return None


def _of_mesh(mesh: Any) -> str | None:
    device = getattr(mesh, "abstract_device", None)
    return device.platform if device else None


def _default() -> str:
    config: Any = jax.config
    device = config.jax_default_device
    return device if isinstance(device, str) else device.platform if device is not None else jax.default_backend()
