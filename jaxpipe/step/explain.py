"""``explain``: the memory of one's own training step at its peak, and measures that help."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpipe.array_types import PyTree
from jaxpipe.collect_later import collecting_later
from jaxpipe.costs.count_products import count_products
from jaxpipe.costs.device_memory import pool_fraction
from jaxpipe.errors import PartitionError
from jaxpipe.residuals.equal_blocks import counted, grouped, pattern
from jaxpipe.step.measures import Measure, batch_size, compile_step, largest_batch, measures
from jaxpipe.step.peak import STORED, PeakPart
from jaxpipe.step.target_device import on_several, target_device
from jaxpipe.step.traced_step import jitted
from jaxpipe.text.printed import PlainTable, Printed
from jaxpipe.text.progress import progress, tell
from jaxpipe.text.short_names import cut_middle
from jaxpipe.text.units import bytes_text


#: Causes with less of all bytes are one line.
_FOLDED_SHARE = 0.01

#: Modules that are shown of a cause that has several.
_MOST_NAMES = 6

#: The most characters of a name in a table, which leaves room for the numbers beside it.
_LONGEST_NAME = 50


@dataclass(frozen=True)
class Explanation(Printed):
    """The memory of a training step at its peak, and measures that help. ``str()`` and notebooks show one screen.

    Attributes:
      device: kind of the device that it was compiled for.
      memory: bytes that the device has; None where that is not known.
      pool_fraction: share of them that JAX takes in this process.
      pool_variables: environment variables that change it, the newer one first.
      parts: what is in memory at the peak; their bytes add up to ``total_bytes``.
      products: matrix products and convolutions that the step runs.
      batch: examples in the batch, if all of its arrays have as many rows.
      largest_batch: the most of them that fit; compiled; None where that is not known.
      measures: what would help, the best first.
      refused: measures that the step does not allow, with the reason.
    """

    device: str
    memory: int | None
    pool_fraction: float
    pool_variables: tuple[str, ...]
    parts: tuple[PeakPart, ...]
    products: int
    batch: int | None
    largest_batch: int | None
    measures: tuple[Measure, ...]
    refused: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes that XLA needs on each device: arguments + results + temporaries - aliases."""
        return sum(part.bytes for part in self.parts)

    @property
    def fraction_needed(self) -> float | None:
        """The share of the device's memory that the pool needs for the step alone; None where that is not known."""
        return None if self.memory is None else self.total_bytes / self.memory

    def bytes_by_cause(self) -> dict[str, int]:
        """Return the bytes of each cause, the largest first."""
        groups = grouped(self.parts, lambda part: part.cause)
        sums = {group[0].cause: sum(part.bytes for part in group) for group in groups}
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def to_json(self) -> str:
        """Return all of it as JSON."""
        fields = {"total_bytes": self.total_bytes, "fraction_needed": self.fraction_needed, **dataclasses.asdict(self)}
        return json.dumps(fields, indent=1) + "\n"

    def _printed(self) -> Sequence[PlainTable | str]:
        batch = f", a batch of {self.batch}" if self.batch else ""
        head = f"{bytes_text(self.total_bytes)} at the peak on {self.device}{batch}, {self.products} products."
        refused = [f"Not possible with this step: {text}." for text in self.refused]
        last = [f"The largest batch that fits, as the step is: {self.largest_batch}."] if self.largest_batch else []
        return [head, self._cause_table(), *self._pool_lines(), *self._measure_parts(), *refused, *last]

    def _cause_table(self) -> PlainTable:
        table = PlainTable()
        table.add_numbers("bytes", "share")
        table.add_column("cause, and where")
        small: list[PeakPart] = []
        for cause in self.bytes_by_cause():
            parts = [part for part in self.parts if part.cause == cause]
            if _sum(parts) < _FOLDED_SHARE * self.total_bytes:
                small += parts
                continue
            table.add_row(*self._size(_sum(parts)), cause)
            for name, size in _names(parts) if cause == STORED or len(parts) < _MOST_NAMES else []:
                if name and size >= _FOLDED_SHARE * self.total_bytes:
                    table.add_row("", f"{size / self.total_bytes:.1%}", f"  {cut_middle(name, _LONGEST_NAME)}")
        if small:
            table.add_row(*self._size(_sum(small)), ", ".join(dict.fromkeys(part.cause for part in small)))
        return table

    def _size(self, size: int) -> tuple[str, str]:
        return f"{size:,}", f"{size / self.total_bytes:.1%}"

    def _pool_lines(self) -> list[str]:
        if self.memory is None or self.fraction_needed is None:
            return []
        pool = f"JAX takes {self.pool_fraction:.2f} of the {bytes_text(self.memory)} here"
        needed = math.ceil(100 * self.fraction_needed) / 100  # rounded up: less would not do
        if self.fraction_needed <= self.pool_fraction:
            return [f"The step needs {needed:.2f} of the device's memory; {pool}: it fits."]
        if needed < 1 and self.pool_variables:
            name, *older = self.pool_variables
            fix = f"{name}={min(needed + 0.01, 0.99):.2f} (older JAX: {', '.join(older)}) may make room."
            return [f"The step needs {needed:.2f} of the device's memory; {pool}. {fix}"]
        return [f"The step needs {needed:.2f} times the device's memory, whatever the pool; {pool}."]

    def _measure_parts(self) -> list[PlainTable | str]:
        if not self.measures:
            return ["No measure that was compiled saves anything."]
        table = PlainTable("")
        table.add_numbers("saves", "then needs", "more products")
        table.add_column("measure")
        lines = []
        for number, m in enumerate(self.measures, 1):
            name = f"{m.name} ({m.note})" if m.note else m.name
            more = f"{m.products:+d}" if m.products else "0"
            table.add_row(str(number), bytes_text(m.saved_bytes), bytes_text(m.bytes), more, name)
            lines.append(f"{number}  {m.line}")
        return ["Measures, each compiled by itself, and the line to write:", table, *lines]


#: Parts of errors that JAX raises for arguments on other devices than those that a step itself or a context names.
_OTHER_DEVICES = ("incompatible devices", "does not match the sharding on the respective arg", "match the aval mesh")


def _sum(parts: Sequence[PeakPart]) -> int:
    return sum(part.bytes for part in parts)


def _names(parts: Sequence[PeakPart]) -> list[tuple[str, int]]:
    """Return the largest parts by name, those of equal blocks together, and the rest as one."""
    groups = grouped(parts, lambda part: (pattern(part.name), part.shape, part.bytes))
    groups.sort(key=_sum, reverse=True)
    names = [(counted([part.name for part in group]), _sum(group)) for group in groups]
    rest = names[_MOST_NAMES - 1 :] if len(names) > _MOST_NAMES else []
    shown = names[: len(names) - len(rest)]
    return [*shown, (f"{len(rest)} more", sum(size for _, size in rest))] if rest else shown


def explain(step: Callable[..., PyTree], *args: PyTree, device: Any = None, **jit_arguments: Any) -> Explanation:
    """Explain the memory of a training step: its peak by cause and module path, and measures that help.

    Compiles the step, and the step with each measure, for the device; nothing runs.

    Args:
      step: the function that computes one training step, jitted (``jax.jit``, ``nnx.jit``) or not.
      *args: its arguments, or their shapes (``jax.ShapeDtypeStruct``). NNX modules and optimizers may be among them.
      device: a ``jax.Device``, or a word of its kind or platform, such as ``"H100"``, ``"v5e"`` or ``"cpu"``; H100s
        and TPUs need not be here. Left out: where the arguments are, else JAX's first device.
      **jit_arguments: as ``jax.jit`` takes them, such as ``donate_argnums``, if the step is not jitted yet.

    Returns:
      An explanation, which prints as one screen.

    Raises:
      ModelError: if ``step`` is no function, or gets no arrays.
      PartitionError: if there is no such device, and none of its kind can be compiled for.

    The bytes are XLA's own buffer assignment, and add up to what ``memory_analysis()`` says; names are JAX's, from the
    metadata of the compiled program.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def step(params, x):
      ...     grads = jax.grad(lambda p: jnp.tanh(x @ p["w"]).sum())(params)
      ...     return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
      >>> shapes = {"w": jax.ShapeDtypeStruct((64, 32), jnp.float32)}, jax.ShapeDtypeStruct((8, 64), jnp.float32)
      >>> explanation = explain(step, *shapes)
      >>> explanation.bytes_by_cause()["parameters"], explanation.products, explanation.batch
      (8192, 2, 8)
    """
    function = jitted(step, args, jit_arguments)
    target = target_device(device, args, jit_arguments)
    with collecting_later(), progress("Compiling the step"):
        try:
            explained = compile_step(function, args, target)
        except ValueError as error:
            if not any(text in str(error) for text in _OTHER_DEVICES):
                raise
            if device is not None:
                raise PartitionError(
                    f"device={device!r}: the step itself says on which devices it runs, by a mesh of jax.shard_map or "
                    "of shardings, or by jax.pmap. Leave device= out, or let the step have a mesh of such devices."
                ) from error
            target = on_several(target.device, f"several x {target.kind}")
            explained = compile_step(function, args, target)
        useful, refused = measures(explained)
        tell("Looking for the largest batch")
        largest = largest_batch(explained)
    return Explanation(
        device=target.kind,
        memory=target.memory,
        pool_fraction=pool_fraction(target.target),
        pool_variables=target.target.pool_variables,
        parts=explained.parts,
        products=count_products(explained.step.program)[0],
        batch=batch_size(explained.step.arguments),
        largest_batch=largest,
        measures=useful,
        refused=refused,
    )
