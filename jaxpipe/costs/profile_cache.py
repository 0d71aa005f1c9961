"""Measured profiles on disk, so that a program is measured once on a kind of device and always cut the same.

A profile is a JSON file (``jaxpipe.text.kept_files``), which may be deleted at any time.
"""

import dataclasses
import json
import os
import platform
import warnings
from collections.abc import Iterable
from pathlib import Path

import jax

from jaxpipe import _compat
from jaxpipe._version import __version__
from jaxpipe.array_types import Device, TensorNumber
from jaxpipe.costs.profile import Profile
from jaxpipe.errors import PartitionError
from jaxpipe.graph.program_text import program_text
from jaxpipe.residuals.backward_graph import BackwardGraph
from jaxpipe.residuals.density import room
from jaxpipe.targets.known import target_of
from jaxpipe.text.kept_files import FOLDER, kept_path, write_whole


#: Fields of a profile that measurements give.
MEASURED = ("forward_seconds", "backward_seconds", "forward_spread", "backward_spread", "source", "measurement")

#: No operator of a micro-batch is measured for longer.
MOST_SECONDS = 86_400.0


def versions_for(device: Device) -> list[str]:
    """Return the versions of all that makes programs for a device, and runs them."""
    return [*_compat.versions(), __version__, device.client.platform_version]


def profile_path(backward_graph: BackwardGraph, device: Device, held: Iterable[TensorNumber] = ()) -> Path:
    """Return the file for all that a measurement depends on.

    That is the program with its shapes, dtypes and codecs, what of it is differentiated, the kind of device, and the
    versions of everything that compiles and runs it; on a CPU also how many cores this process may use.
    """
    machine = [device.platform, device.device_kind, *dataclasses.astuple(target_of(device).rates)]
    if target_of(device).is_host:
        affinity = getattr(os, "sched_getaffinity", None)
        machine += [platform.machine(), platform.processor(), len(affinity(0)) if affinity else os.cpu_count()]
    options = [os.environ.get("XLA_FLAGS", ""), str(getattr(jax.config, "jax_default_matmul_precision", ""))]
    program = [program_text(backward_graph.source), program_text(backward_graph.graph), backward_graph.wrt, list(held)]
    steps = [(step.needs, step.cotangents_in, step.cotangents_out) for step in backward_graph.steps]
    capacities = sorted(room(backward_graph.graph).items())
    settings = [versions_for(device), machine, options, program, steps, capacities]
    return kept_path("profiles", json.dumps(settings))


def load(path: Path, estimate: Profile) -> Profile | None:
    """Return a kept profile or None; warn of one that is damaged, or differs from an estimate in more than seconds."""
    try:
        if path.exists() and not path.is_file():  # a pipe or a device would be waited for
            raise PartitionError("it is no regular file")
        profile = Profile.from_json(path.read_text(encoding="utf-8"))
        _check_same_program(profile, estimate)
        if profile.measurement is None:  # written by an older version
            return None
        return dataclasses.replace(profile, measurement=dataclasses.replace(profile.measurement, kept=True))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (PartitionError, OSError, UnicodeDecodeError) as error:
        warnings.warn(f"The kept profile {path} cannot be used ({error}); measuring again.", stacklevel=2)
        return None


def _check_same_program(profile: Profile, estimate: Profile) -> None:
    """Raise ``PartitionError`` unless a profile differs from an estimate in its seconds only, and has sensible ones."""
    for field in dataclasses.fields(Profile):
        if field.name not in MEASURED and getattr(profile, field.name) != getattr(estimate, field.name):
            raise PartitionError(f"its {field.name} are those of another program or device")
    slowest = max(profile.seconds)
    if slowest > MOST_SECONDS:
        raise PartitionError(f"an operator takes {slowest:g} s in it")


def save(path: Path, profile: Profile) -> None:
    """Keep a profile: other processes see all of the file or none. A folder that cannot be written is a warning."""
    try:
        write_whole(path, profile.to_json())
    except OSError as error:
        warnings.warn(f"The profile cannot be kept in {path.parent} ({error}); set {FOLDER}.", stacklevel=2)
