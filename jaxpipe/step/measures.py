"""The step that is explained, and changes to it that make it need less memory, each compiled for the same device.

Host offload is not among them: XLA compiles it for GPUs and TPUs only, and whether a link hides it is known on the
machine alone. Slices of logits are what ``jaxpipe.jit`` may choose within a budget.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.array_types import PyTree
from jaxpipe.costs.count_products import count_products
from jaxpipe.costs.device_memory import pool_fraction
from jaxpipe.costs.reserved_bytes import reserved_bytes
from jaxpipe.errors import MemoryBudgetError, ModelError
from jaxpipe.planning.bracket_search import straight_lines
from jaxpipe.step.budgeted_jit import jit
from jaxpipe.step.compiled_buffers import compile_with_buffers
from jaxpipe.step.peak import PeakPart, peak_parts
from jaxpipe.step.step_arguments import changed, jitter
from jaxpipe.step.target_device import TargetDevice, placed
from jaxpipe.step.traced_step import Argument, Role, TracedStep, trace_step
from jaxpipe.step.wrapped_modules import CalledModules, observed_modules, wrapped_modules
from jaxpipe.text.progress import tell
from jaxpipe.text.units import bytes_text


#: Batches that are compiled to find the largest that fits.
_MOST_BATCHES = 3

#: The share of the bytes that a measure must save.
LEAST_SAVED = 0.001


@dataclass(frozen=True, eq=False)
class Explained:
    """A step that measures are compared with.

    Attributes:
      jitted: as ``jax.jit`` or ``nnx.jit`` makes it.
      args: its arguments, as shapes on the device.
      step: traced from them.
      called: the modules that it calls.
      target: the device.
      parts: what is in memory at its peak.
      bytes: that it needs.
      bytes_by_batch: that it needs with batches of other sizes, as far as they were compiled.
    """

    jitted: Any
    args: PyTree
    step: TracedStep
    called: CalledModules
    target: TargetDevice
    parts: tuple[PeakPart, ...]
    bytes: int
    bytes_by_batch: dict[int, int] = field(default_factory=dict)

    @property
    def jit(self) -> str:
        """The name of the transformation that compiles it."""
        return "jax.jit" if jitter(self.args) is jax.jit else "nnx.jit"


def compile_step(jitted: Any, args: PyTree, target: TargetDevice) -> Explained:
    """Trace a step and compile it for a device."""
    shapes = placed(args, target)
    with observed_modules(shapes) as (called, named):
        traced = trace_step(jitted, named)
        compiled, allocations = compile_with_buffers(traced.traced.lower())
    parts = peak_parts(allocations, compiled, traced)
    return Explained(jitted, shapes, traced, called, target, parts, reserved_bytes(compiled))


def batch_size(arguments: Sequence[Argument]) -> int | None:
    """Return the length of the first axis of the batch, if all of its arrays have the same."""
    sizes = {a.array.shape[0] for a in arguments if a.role is Role.BATCH and a.array.shape}
    return sizes.pop() if len(sizes) == 1 else None


def bytes_with_batch(explained: Explained, size: int) -> int | None:
    """Return the step's bytes with a batch of another size; None if there is no batch, or the step does not take it.

    Each size is compiled once.
    """
    known, arguments = explained.bytes_by_batch, explained.step.arguments
    batch = [a for a in arguments if a.role is Role.BATCH and a.array.shape]
    if size < 1 or batch_size(arguments) is None or any(a.leaf is None for a in batch):
        return None
    if size not in known:
        others = {id(a.leaf): a.array.update(shape=(size, *a.array.shape[1:])) for a in batch}
        step = trace_step(explained.jitted, changed(explained.args, lambda x: others.get(id(x), x)))
        known[size] = reserved_bytes(step.traced.lower().compile())
    return known[size]


def largest_batch(explained: Explained) -> int | None:
    """Return the most examples whose step is within the pool; None where the memory or the batch is not known.

    Bytes are a straight line but for padding: between two sizes that were compiled the next is interpolated, and the
    answer is one that was compiled and fits. After few programs it may be smaller than the very largest.
    """
    size = batch_size(explained.step.arguments)
    if explained.target.memory is None or size is None:
        return None
    room = int(explained.target.memory * pool_fraction(explained.target.target))
    known = {size: explained.bytes}
    guess = max(1, size // 2)
    for _ in range(_MOST_BATCHES):
        try:
            needed = None if guess in known else bytes_with_batch(explained, guess)
        except Exception:  # a size that the user's step does not take, or too large for the compiler
            needed = None
        if needed is None:
            break
        known[guess] = needed
        batches = straight_lines([(count, batch) for batch, count in known.items()], slope=0.0)
        guess = max(1, int(batches(room)))
    return max((batch for batch, needed in known.items() if needed <= room), default=None)


@dataclass(frozen=True)
class Measure:
    """A change to a step, compiled.

    Attributes:
      name: what it is, in a few words.
      line: what to write.
      bytes: that the step needs with it, per device.
      saved_bytes: so many fewer than without it.
      products: matrix products and convolutions that the step runs more.
      note: what else to know; may be empty.
      devices: on which it runs.
      is_estimated: whether a part of its bytes is added to what was compiled.
    """

    name: str
    line: str
    bytes: int
    saved_bytes: int
    products: int
    note: str = ""
    devices: int = 1
    is_estimated: bool = False


def measures(explained: Explained) -> tuple[tuple[Measure, ...], tuple[str, ...]]:
    """Return the measures that save anything, and the names of those that the step does not allow, with the reason.

    Those that run no product again are first, then the others by bytes for each one. What needs more devices is last,
    and an estimate never first.
    """
    makers: dict[str, Callable[[Explained], Measure | None]] = {
        "donate the state": donate,
        "decorate the model": encode,
        "compute blocks again": rematerialize_blocks,
        "a budget": within_budget,
        "half the batch": half_the_batch,
        "more devices": shard,
    }
    useful, refused = list[Measure](), list[str]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*donated.*")  # of arrays that no result fits
        for name, maker in makers.items():
            tell(f"Compiling the step with a measure: {name}")
            try:
                measure = maker(explained)
            except Exception as error:  # a user's step may refuse any of them, in any way
                refused.append(f"{name} ({type(error).__name__}: {str(error).partition(chr(10))[0][:200]})")
                continue
            if measure is not None and measure.saved_bytes > LEAST_SAVED * explained.bytes:
                useful.append(measure)
    return tuple(sorted(useful, key=_rank)), tuple(refused)


def _rank(x: Measure) -> tuple[bool, bool, bool, float]:
    return x.devices > 1, x.is_estimated, x.products > 0, -x.saved_bytes / max(x.products, 1)


def _measure(explained: Explained, name: str, line: str, needed: int, more: int = 0, **rest: Any) -> Measure:
    return Measure(name, line, needed, explained.bytes - needed, more, **rest)


def donate(explained: Explained) -> Measure | None:
    """Give the memory of the state to the new state."""
    arguments = explained.step.arguments
    positions = {a.position for a in arguments if a.updated and not a.donated and a.position is not None}
    if not positions:
        return None
    chosen = [k for k, a in enumerate(arguments) if a.position in positions or a.donated]
    compiled = _flat(explained.step, donate_argnums=chosen).lower(*(a.array for a in arguments)).compile()
    numbers = sorted({p for k in chosen if (p := arguments[k].position) is not None})
    line = f"{explained.jit}(step{_donating(numbers)})"
    note = "" if explained.jit == "nnx.jit" else "the step overwrites it"
    return _measure(explained, "donate the state", line, reserved_bytes(compiled), note=note)


def _donating(places: Sequence[int]) -> str:
    """Return how arguments in these places are donated, as it is written behind the step."""
    return f", donate_argnums={places[0] if len(places) == 1 else tuple(places)}" if places else ""


def _flat(step: TracedStep, **options: Any) -> Any:
    """Return a traced step as a jitted function of its arrays, with other options than it was jitted with."""
    return jax.jit(jaxpr_as_fun(step.program), **options)


def encode(explained: Explained) -> Measure | None:
    """Run the outermost modules as if their classes were decorated with ``memory_encoded``."""
    classes = [cls.__name__ for cls in explained.called.outermost]
    if not classes:
        return None
    line = f"@jaxpipe.memory_encoded  # above class {', class '.join(classes)}"
    return _measure(explained, "decorate the model", line, *_retraced(explained))


def rematerialize_blocks(explained: Explained) -> Measure | None:
    """Run every block that repeats under ``jax.checkpoint``."""
    blocks = explained.called.blocks()
    if blocks is None:
        return None
    name = blocks.__name__
    if not issubclass(blocks, nnx.Module):
        line = _remat_line(blocks, explained.called)
    elif _takes_arrays_alone(blocks):
        line = f"@nnx.remat  # above {name}.__call__"
    else:
        line = f"nnx.remat(lambda block, x: block(x, ...))(block, x)  # where {name} is called"
    if line is None:
        return None
    count = len(explained.called.inner[blocks])
    return _measure(explained, f"compute each of {count} {name}s again", line, *_retraced(explained, blocks))


def _remat_line(blocks: type, called: CalledModules) -> str | None:
    """Return the line that puts Linen's blocks under ``nn.remat``, whose arguments are positional; None without one."""
    takes, keywords = inspect.signature(blocks.__call__).parameters, called.keywords.get(blocks, set())
    given = [k for k in takes if k in keywords]
    rest = any(p.kind is p.VAR_POSITIONAL for p in takes.values())
    if len(given) < len(keywords) or (given and rest):
        return None
    arguments = called.static_arguments.get(blocks, set())
    static = tuple(sorted({list(takes).index(k) if isinstance(k, str) else k for k in arguments}))
    shown, name = f", static_argnums={static}" if static else "", blocks.__name__
    how = "let it take" if any(takes[k].kind is takes[k].KEYWORD_ONLY for k in given) else "pass"
    last = f"; {how} {' and '.join(given)} by position" if given else ""
    return f"{name} = nn.remat({name}{shown})  # below class {name}{last}"


def _takes_arrays_alone(cls: type) -> bool:
    """Return whether ``nnx.remat`` can decorate the call of a class: it takes arrays, by position."""
    return not any(
        p.kind is p.KEYWORD_ONLY or isinstance(p.default, bool) or p.annotation in (bool, "bool", "bool | None")
        for p in [*inspect.signature(cls.__call__).parameters.values()][1:]
    )


def _retraced(explained: Explained, blocks: type | None = None) -> tuple[int, int]:
    """Return the bytes of the step with its modules wrapped, and the products that it runs more."""
    with wrapped_modules(explained.args, blocks) as args:
        step = trace_step(explained.jitted, args)
        more = count_products(step.program)[0] - count_products(explained.step.program)[0]
        return reserved_bytes(step.traced.lower().compile()), more


def within_budget(explained: Explained) -> Measure | None:
    """Keep a budget with the outermost modules decorated: the pool's bytes where the step needs more, else a half."""
    if not explained.called.outermost or not _trained(explained):
        return None
    memory = explained.target.memory
    pool = explained.bytes if memory is None else int(memory * pool_fraction(explained.target.target))
    donated = sorted({a.position for a in explained.step.arguments if a.donated and a.position is not None})

    def step(*args: PyTree) -> PyTree:
        return explained.jitted(*args)

    with wrapped_modules(explained.args) as args:
        untraced = (k for k in range(len(args)) if all(a.position != k for a in explained.step.arguments))
        options = {"static_argnums": [k for k in untraced if jax.tree.leaves(args[k])], "donate_argnums": donated}
        budget = pool if pool < explained.bytes else explained.bytes // 2
        try:
            plan = jit(step, memory=budget, **options).lower(*args).plan
        except MemoryBudgetError as error:
            if error.smallest is None:
                raise
            budget = error.smallest
            plan = jit(step, memory=budget, **options).lower(*args).plan
        except ModelError:  # a step that calls none of these modules but by other methods
            return None
    line = f"step = jaxpipe.jit(step, memory={budget}{_donating(donated)})  # with the model decorated"
    name, more = f"a budget of {bytes_text(budget)}, decorated", plan.products - plan.plain_products
    return _measure(explained, name, line, plan.needed_bytes, more)


def half_the_batch(explained: Explained) -> Measure | None:
    """Run half of the batch at a time, and add up the gradients of both halves."""
    size = (batch_size(explained.step.arguments) or 0) // 2
    gradients = sum(a.bytes for a in _trained(explained))
    needed = bytes_with_batch(explained, size) if gradients else None
    if needed is None:
        return None
    needed += 2 * gradients  # sums before and after; where they are donated, XLA copies them for their condition
    line = f"tx = optax.MultiSteps(tx, 2)  # and batches of {size}"
    note = "compiled at half of it; gradients are added"
    return _measure(explained, "half the batch, twice per update", line, needed, note=note, is_estimated=True)


def _trained(explained: Explained) -> list[Argument]:
    """Return the parameters that the step updates, or whose gradients it returns."""
    return [a for a in explained.step.arguments if a.role is Role.PARAMETERS and a.updated]


def shard(explained: Explained) -> Measure | None:
    """Shard state and batch over several devices of the same kind, each array along its largest axis."""
    devices = explained.target.others
    size = batch_size(explained.step.arguments)
    if len(devices) < 2 or not size or size % len(devices):
        return None
    mesh = Mesh(devices, "data")
    arguments = explained.step.arguments
    shapes = [jax.ShapeDtypeStruct(a.array.shape, a.array.dtype, sharding=_sharding(a, mesh)) for a in arguments]
    by_kind: Mapping[Any, Any] = {
        (x.shape, x.dtype): x.sharding for a, x in zip(arguments, shapes, strict=True) if a.role is not Role.BATCH
    }
    results = [by_kind.get((x.shape, x.dtype)) for x in jax.tree.leaves(explained.step.traced.out_info)]
    donated = [k for k, a in enumerate(arguments) if a.donated]
    flat = _flat(explained.step, out_shardings=results, donate_argnums=donated)
    needed = reserved_bytes(flat.lower(*shapes).compile())
    line = 'jax.device_put(array, NamedSharding(mesh, P("data")))  # of state and batch'
    note = "along the largest axis of each array"
    return _measure(explained, f"shard over {len(devices)} devices", line, needed, note=note, devices=len(devices))


def _sharding(argument: Argument, mesh: Mesh) -> NamedSharding:
    count, shape = mesh.size, argument.array.shape
    if argument.role is Role.BATCH and shape:
        return NamedSharding(mesh, PartitionSpec("data"))
    axes = [k for k, length in enumerate(shape) if length >= count and length % count == 0]
    if not axes or not (argument.updated or argument.role in (Role.PARAMETERS, Role.OPTIMIZER)):
        return NamedSharding(mesh, PartitionSpec())
    largest = max(axes, key=lambda k: shape[k])
    return NamedSharding(mesh, PartitionSpec(*[None] * largest, "data"))
