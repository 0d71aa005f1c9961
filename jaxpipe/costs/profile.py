"""``Profile``: what each operator of a program costs in time, memory and communication."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from jaxpipe.errors import PartitionError
from jaxpipe.targets.rates import Rates
from jaxpipe.text.checked_json import LARGEST, read_json


#: A spread of repeated measurements above this share of their median is wide: other programs run on the machine.
WIDE = 0.2


class Edge(NamedTuple):
    """One operator reads a result of another. A stage receives each ``output`` once, however many read it."""

    source: int
    target: int
    bytes: float
    output: int = 0


@dataclass(frozen=True)
class Measurement:
    """The circumstances of a measurement.

    Attributes:
      time: when it ended, UTC: ``"2026-11-25 13:20"``.
      load: processes that ran or waited for a processor, on the average of the minute before; 0 where not known.
      cores: of the machine.
      spread: half the range between the quartiles of repeated measurements, as a share of the time of all operators.
      kept: whether it was read from the user's cache folder.
    """

    time: str
    load: float
    cores: int
    spread: float
    kept: bool = dataclasses.field(default=False, compare=False)

    def __str__(self) -> str:
        spread = f", spread {self.spread:.0%}" if self.spread > WIDE else ""
        return f"{self.time}{', kept' if self.kept else ''}{spread}"


@dataclass(frozen=True)
class Profile:
    """Costs of one micro-batch, operator by operator, in an order in which they can run.

    Attributes:
      names: of the operators.
      forward_seconds, backward_seconds: time of each.
      parameter_bytes: parameters that each is the first to read.
      residual_bytes: what the backward pass keeps of each one's results.
      edges: (producer, consumer) pairs. Parameters and the batch's arrays are available everywhere and have no edge.
      together: groups of operators that must be in one stage, because they share a parameter.
      forward_spread, backward_spread: half the range between the quartiles of repeated measurements, seconds; empty
        if nothing was measured.
      forward_flops: floating-point operations of each; empty if unknown.
      source: where the seconds come from: ``"measured"``, ``"analytic"``, ``"given"`` or a file's name.
      device_kind: what they were measured on or estimated for.
      rates: of that device. ``partition`` charges with them whatever a step takes besides its operators: messages,
        stashes, sums of gradients, recomputation, codecs. None if they are not known: those of ``device_kind`` count
        then, or of the mesh's devices, and the plan says so.
      frozen: names of the parameters that are not trained: the work for their gradients is not in it.
      scan_groups: where scans over layers are cut, so that each group is an operator: for each length of a scan the
        first layers of its groups, and the length.
      measurement: when and under what load the seconds were measured, and how steady they were; None if they were not.

    Raises:
      PartitionError: if lengths differ, a number is negative or not finite, or an edge leads backwards.

    Example:
      >>> profile = Profile.chain(["conv", "dense"], [1, 2], [2, 4], [36, 40], [8, 8], [16, 4])
      >>> profile.seconds, profile.edges
      ((3.0, 6.0), (Edge(source=0, target=1, bytes=16.0, output=0),))
      >>> Profile.from_json(profile.to_json()) == profile
      True
    """

    names: tuple[str, ...]
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    residual_bytes: tuple[float, ...]
    edges: tuple[Edge, ...] = ()
    together: tuple[tuple[int, ...], ...] = ()
    forward_spread: tuple[float, ...] = ()
    backward_spread: tuple[float, ...] = ()
    forward_flops: tuple[float, ...] = ()
    source: str = "given"
    device_kind: str = ""
    rates: Rates | None = None
    frozen: tuple[str, ...] = ()
    scan_groups: tuple[tuple[int, ...], ...] = ()
    measurement: Measurement | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(map(str, self.names)))
        if not self.names:
            raise PartitionError("The profile has no operators; there is nothing to plan.")
        for field in NUMBERS:
            values = tuple(getattr(self, field))
            if len(values) != len(self.names) and (values or field in REQUIRED):
                raise PartitionError(f"{field} has {len(values)} entries, names has {len(self.names)}; give one each.")
            _check_costs(values, lambda k, field=field: f"{field}[{k}] ({self.names[k]})")
            object.__setattr__(self, field, tuple(map(float, values)))
        _check_costs((edge[2] for edge in self.edges), lambda k: f"edges[{k}].bytes")
        edges = []
        for k, edge in enumerate(self.edges):
            source, target, size, *output = edge
            if not 0 <= source < target < len(self.names):
                raise PartitionError(
                    f"edges[{k}] leads from operator {source} to {target}; an edge leads from an operator to a later "
                    f"one, of 0..{len(self.names) - 1}. Sort the operators so that each comes after those it reads."
                )
            edges.append(Edge(int(source), int(target), float(size), int(output[0]) if output else 0))
        object.__setattr__(self, "edges", tuple(edges))
        groups = tuple(tuple(sorted(set(map(int, group)))) for group in self.together)
        for k, group in enumerate(groups):
            if any(not 0 <= v < len(self.names) for v in group):
                raise PartitionError(f"together[{k}] is {group}; operators are numbered 0..{len(self.names) - 1}.")
        object.__setattr__(self, "together", tuple(group for group in groups if len(group) > 1))

    @property
    def seconds(self) -> tuple[float, ...]:
        """Forward and backward together."""
        return tuple(f + b for f, b in zip(self.forward_seconds, self.backward_seconds, strict=True))

    @classmethod
    def chain(
        cls,
        names: Sequence[str],
        forward_seconds: Sequence[float],
        backward_seconds: Sequence[float],
        parameter_bytes: Sequence[float],
        residual_bytes: Sequence[float],
        boundary_bytes: Sequence[float],
    ) -> "Profile":
        """Operators of which each reads the one before it.

        Args:
          names, forward_seconds, backward_seconds, parameter_bytes, residual_bytes: one entry for each operator.
          boundary_bytes: what each sends to the next; an entry for the last operator may be given and is not used.

        Raises:
          PartitionError: if lengths differ or a number is negative or not finite.
        """
        columns: list[Any] = [names, forward_seconds, backward_seconds, parameter_bytes, residual_bytes]
        for name, values in zip((*REQUIRED, "boundary_bytes"), (*columns, boundary_bytes), strict=True):
            if not hasattr(values, "__len__"):
                raise PartitionError(f"{name}={values!r}; it must be a sequence with one entry for each operator.")
        count = len(names)
        if len(boundary_bytes) not in (count, count - 1):
            raise PartitionError(
                f"boundary_bytes has {len(boundary_bytes)} entries for {count} operators; give one for each operator "
                "that has another after it."
            )
        edges = tuple(Edge(k, k + 1, boundary_bytes[k]) for k in range(count - 1))
        return cls(*map(tuple, columns), edges=edges)

    @classmethod
    def from_pipedream(cls, path: str | os.PathLike[str]) -> "Profile":
        """Read a published profile graph; see ``jaxpipe.costs.pipedream_profiles.read``."""
        from jaxpipe.costs.pipedream_profiles import read

        return read(path)

    def to_json(self) -> str:
        """The profile as JSON, one operator on a line, to be read, edited and given to ``partition``."""
        columns = {field: getattr(self, field) for field in ("names", *NUMBERS) if getattr(self, field)}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        head = {name: getattr(self, name) for name in ("source", "device_kind", "together")}
        known = "rates", "measurement", "frozen", "scan_groups"
        head |= {name: value for name in known if (value := getattr(self, name))}
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in msgspec.to_builtins(head).items()]
        for key, entries in (("operators", rows), ("edges", self.edges)):
            listed = ",\n  ".join(map(json.dumps, entries))
            lines.append(f' "{key}": [\n  {listed}\n ]' if entries else f' "{key}": []')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> "Profile":
        """The profile that ``to_json`` has written.

        Raises:
          PartitionError: naming the line, if it is not JSON; or what is missing or wrong in it.
        """
        return read_json(text, ProfileFile, "The profile").profile()


@dataclass(frozen=True)
class _Operator:
    """An operator as JSON has it."""

    names: str
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: float
    residual_bytes: float
    forward_spread: float | None = None
    backward_spread: float | None = None
    forward_flops: float | None = None


@dataclass(frozen=True)
class ProfileFile:
    """A profile as JSON has it: a row for each operator."""

    operators: tuple[_Operator, ...]
    edges: tuple[Edge, ...]
    together: tuple[tuple[int, ...], ...] = ()
    source: str = "given"
    device_kind: str = ""
    rates: Rates | None = None
    frozen: tuple[str, ...] = ()
    scan_groups: tuple[tuple[int, ...], ...] = ()
    measurement: Measurement | None = None

    def profile(self) -> Profile:
        """Return the profile."""
        columns: dict[str, Any] = {}
        for field in ("names", *NUMBERS):
            column = tuple(getattr(row, field) for row in self.operators)
            if None in column and column.count(None) < len(column):
                raise PartitionError(f"operators[{column.index(None)}] lacks {field!r}, which others have.")
            columns[field] = () if None in column else column
        rest = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[1:]}
        return Profile(**columns, **rest)


#: Fields that every profile has.
REQUIRED = ("names", "forward_seconds", "backward_seconds", "parameter_bytes", "residual_bytes")

#: Fields with one number for each operator.
NUMBERS = (*REQUIRED[1:], "forward_spread", "backward_spread", "forward_flops")


def _check_costs(values: Iterable[Any], name: Callable[[int], str]) -> None:
    for k, value in enumerate(values):
        try:
            good = 0 <= value < LARGEST
        except TypeError:
            good = False
        if not good:
            raise PartitionError(
                f"{name(k)} is {value!r}; it must be a finite number that is not negative, below 2**63."
            )
