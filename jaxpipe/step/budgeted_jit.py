"""``jaxpipe.jit``: ``jax.jit`` within a memory budget, for a training step that is the user's own."""

# More than 15 of our modules: a step, its levels, its devices and its errors come together here.
import functools
import math
import time
import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer
from jax.dtypes import result_type
from jax.extend.core import Jaxpr

from jaxpipe import _compat, multihost
from jaxpipe.array_types import Device, PyTree
from jaxpipe.collect_later import collecting_later
from jaxpipe.costs.device_memory import pool_bytes, pool_fraction
from jaxpipe.costs.reserved_bytes import reserved_bytes
from jaxpipe.errors import MemoryBudgetError, ModelError
from jaxpipe.residuals.choose_formats import KEPT_BY_POLICIES, kept_by_policies
from jaxpipe.step.fit_step import fitting_level, smallest
from jaxpipe.step.step_arguments import Call, Compared, is_step, jitter, split_arguments, split_static, without_values
from jaxpipe.step.step_front import DEFAULT, PLAIN
from jaxpipe.step.step_variants import StepVariants, Variant
from jaxpipe.step.target_device import devices_of
from jaxpipe.targets.known import target_of
from jaxpipe.text.printed import PlainTable, Printed
from jaxpipe.text.progress import progress
from jaxpipe.text.units import asked_bytes, bytes_text, device_bytes, seconds_text
from jaxpipe.text.value_text import shown


#: Behind the name of a level of a step whose scans run again whole.
WHOLE_SCANS = ", whole scans"


@dataclass(frozen=True)
class StepPlan(Printed):
    """The way in which a step keeps its budget.

    Attributes:
      budget_bytes: the most bytes of a device.
      needed_bytes: what XLA reserves: arguments, results and temporaries, what is donated once.
      plain_bytes: what it reserves for the step without decorations.
      products: matrix products and convolutions of a step.
      plain_products: those of the step without decorations; the others run again.
      storage: what is stored: that of a level between the plain step and the smallest storage.
      compilations: how often XLA compiled the step to find out.
      compile_seconds, planning_seconds: seconds of these, and of all else.
    """

    budget_bytes: int
    needed_bytes: int
    plain_bytes: int
    products: int
    plain_products: int
    storage: str
    compilations: int
    compile_seconds: float
    planning_seconds: float

    def _printed(self) -> list[PlainTable | str]:
        again, plain = self.products - self.plain_products, self.plain_products
        products = f"{again} of {plain} products run again"
        if again > plain:  # logits in slices, each of which has products of its own
            products = f"{self.products} products run in place of {plain}, those of each slice counted"
        return [
            f"{bytes_text(self.needed_bytes)} of {bytes_text(self.budget_bytes)}, as XLA reserves it; "
            f"{bytes_text(self.plain_bytes)} without a budget\n"
            f"{products}; storage: {self.storage}\n"
            f"planned in {seconds_text(self.planning_seconds)}, and {self.compilations} compilations in "
            f"{seconds_text(self.compile_seconds)}"
        ]


@dataclass(frozen=True, eq=False)
class BudgetedLowered:
    """A step lowered for some arguments, within its budget; all else that ``jax.stages.Lowered`` has, too.

    Attributes:
      plan: how it keeps the budget.
    """

    plan: StepPlan
    _variant: Variant

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Any:
        """Return the compiled step, which XLA has compiled when the budget was checked; with other options, anew.

        Raises:
          MemoryBudgetError: if it needs more with these options. Plans know those that ``jaxpipe.jit`` is given.
        """
        if compiler_options is None:
            return self._variant.compiled
        compiled = self._variant.lowered.compile(compiler_options)
        needed, budget = reserved_bytes(compiled), self.plan.budget_bytes
        if needed > budget:
            raise MemoryBudgetError(
                f"compile(compiler_options={compiler_options}): XLA reserves {needed} bytes ({bytes_text(needed)}) for "
                f"the step with these options, more than its budget of {budget} ({bytes_text(budget)}). Pass them to "
                f"jaxpipe.jit(..., compiler_options={compiler_options}), which plans with them, or a larger memory=."
            )
        return compiled

    @property
    def jaxpr(self) -> Jaxpr:
        """The traced step."""
        return self._variant.jaxpr

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_variant").lowered, name)  # copies ask before it is set


class BudgetedFunction:
    """A function as ``jax.jit`` returns it, whose program needs at most so many bytes of each device."""

    def __init__(self, step: Callable[..., Any], memory: int | str, options: dict[str, Any]):
        """Nothing is traced yet; arguments as ``jit`` has them."""
        functools.update_wrapper(self, step)
        self._step, self._memory, self._options = step, memory, options
        self._lowered: dict[Any, BudgetedLowered] = {}
        self._variants: dict[Any, StepVariants] = {}  # of the first of equal shards, by kind of device

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Run the step. The first call for arguments of some shapes plans and compiles."""
        return self.lower(*args, **kwargs)._variant.jitted(*args, **kwargs)

    def __reduce__(self) -> Any:
        return BudgetedFunction, (self._step, self._memory, self._options)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """Return the step bound to the object whose method it is, as functions and those of ``jax.jit`` do."""
        return self if owner is None else types.MethodType(self, owner)

    def lower(self, *args: PyTree, **kwargs: PyTree) -> BudgetedLowered:
        """Return the step within its budget for some arguments, arrays or shapes (``jax.ShapeDtypeStruct``).

        Raises:
          MemoryBudgetError: if no choice of what is stored keeps the budget; its ``smallest`` does.
          ModelError: if nothing in the step is decorated and differentiated, and it needs more as it is.
        """
        static, dynamic = split_static(self._step, self._options, args, kwargs)
        structure, leaves = split_arguments(dynamic)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            raise ModelError(
                f"{self._name} was called inside another transformation (jax.jit, jax.grad, jax.vmap, ...), where it "
                "is a part of a larger program, whose bytes its budget does not limit. Call it outside, or give "
                "jaxpipe.jit the outer function."
            )
        same = Compared((structure, static)), _compat.trace_context()
        signatures = tuple(map(_signature, leaves))
        key = same, _compat.get_concrete_mesh(), signatures
        if key not in self._lowered:
            shards = tuple((x, x if at is None else at.shard_shape(x), kind) for x, kind, _, at in signatures)
            self._lowered[key] = self._planned(args, kwargs, leaves, (same, shards))
        return self._lowered[key]

    def trace(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Return the step within its budget for some arguments as ``jax.jit`` traces it; raises what ``lower`` does."""
        return self.lower(*args, **kwargs)._variant.traced

    def clear_cache(self) -> None:
        """Forget what was planned and compiled, as the ``clear_cache`` of a ``jax.jit`` does."""
        self._lowered.clear()
        self._variants.clear()

    def _cache_size(self) -> int:
        """Return how many programs there are, as that of a ``jax.jit`` does."""
        return len(self._lowered)

    def eval_shape(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Return shapes and types of the results."""
        return jitter((args, kwargs))(self._step, **self._options).eval_shape(*args, **kwargs)

    @property
    def _name(self) -> str:
        return f"jaxpipe.jit({getattr(self._step, '__name__', 'step')})"

    @collecting_later()
    @progress("Planning the step")
    def _planned(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], leaves: list[Any], alike: Hashable
    ) -> BudgetedLowered:
        start, device = time.perf_counter(), devices_of(leaves, self._options)[0]
        of_device = self._memory == "device"
        budget = multihost.from_first(lambda: pool_bytes(device)) if of_device else device_bytes(self._memory)
        shapes, named_shapes = without_values((args, kwargs))
        call = Call(self._step, self._options, shapes, named_shapes, device)
        alike = alike, device.device_kind
        variants = StepVariants(call, self._variants.get(alike))
        self._variants.setdefault(alike, variants)
        tried, level = _fitted(variants, budget)
        if level is None:
            raise self._refusal(variants, min(map(smallest, tried)).bytes, budget, device)
        chosen = tried[-1]
        needed, plain = chosen.known[level], variants.known[PLAIN]
        compiling = sum(x.seconds for x in tried)
        plan = StepPlan(
            budget_bytes=budget,
            needed_bytes=needed.bytes,
            plain_bytes=plain.bytes,
            products=needed.products,
            plain_products=plain.products,
            storage=level + WHOLE_SCANS * (chosen is not variants),
            compilations=sum(x.compilations for x in tried),
            compile_seconds=compiling,
            planning_seconds=time.perf_counter() - start - compiling,
        )
        return BudgetedLowered(plan, chosen.variant(level))

    def _refusal(self, variants: StepVariants, least: int, budget: int, device: Device) -> Exception:
        """Return the error for a budget that no level keeps."""
        plain = variants.needs(PLAIN).bytes
        asked = asked_bytes(self._memory, budget)
        target = target_of(device)
        if self._memory == "device" and target.pool_variables:
            fraction, variable = pool_fraction(target), target.pool_variables[0]
            asked += f", which is what JAX's pool takes of the {device.device_kind} ({variable}={fraction:g})"
        head = f"{self._name}, {asked}: XLA reserves {plain} bytes ({bytes_text(plain)}) for this step as it is"
        if not variants.programs:
            return ModelError(
                f"{head}, and nothing in it that is differentiated is decorated with jaxpipe.memory_encoded: there is "
                "nothing to store otherwise. Decorate the loss that jax.grad gets, "
                "loss = jaxpipe.memory_encoded(loss), or the model's class; where nothing is differentiated, a smaller "
                "batch needs less."
            )
        sizes, decorated = variants.plain.compiled.memory_analysis(), variants.needs(DEFAULT).bytes
        state = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        donates = "" if sizes.alias_size_in_bytes else " Nothing is donated: donate_argnums=0 saves a second state."
        kept = any(kept_by_policies(program.graph) for program in variants.programs.values())
        policy = KEPT_BY_POLICIES if kept else ""
        return MemoryBudgetError(
            f"{head}, {decorated} as decorated, and {least} ({bytes_text(least)}) with the least storage that was "
            f"found, of which arguments and results are {bytes_text(state)}.{donates}{policy} Pass memory={least} or "
            "more, a smaller batch, or decorate more of the step (the loss as well as the model); of blocks under "
            f"nn.remat, decorate the block.\n    memory={least}",
            least,
        )


def jit(step: Callable[..., Any] | None = None, *, memory: int | str, **jit_arguments: Any) -> Any:
    """Compile a training step as ``jax.jit`` does, for at most so many bytes of each device.

    The step is any function: of a ``TrainState``, of NNX modules and optimizers (which it may change, as under
    ``nnx.jit``), with ``optax``, gradient accumulation, ``lax.scan`` over micro-batches, sharded arguments. Nothing in
    it changes but what functions and modules decorated with ``memory_encoded`` store for the backward pass: what plain
    JAX does where that fits, else whatever computes least again. Values are those of the plain step.

    Args:
      step: the function; left out: returns a decorator.
      memory: most bytes of a device for arguments, results and temporaries, as XLA states them for the compiled step;
        what is donated counts once. A number, a text such as ``"20GiB"``, or ``"device"`` for what JAX's pool may hold.
      jit_arguments: as ``jax.jit`` takes them: ``donate_argnums``, ``static_argnames``, ``in_shardings``, ...

    Returns:
      A function like that of ``jax.jit``. Its first call for arguments of some shapes plans: it compiles the step as it
      is, and where that needs more, other choices. ``lower(*args)`` plans without running, with arrays or shapes, which
      may name devices that this machine does not have; it has ``plan``, which prints, and ``compile()``.

    Raises:
      MemoryBudgetError: when called, if no choice keeps the budget; its ``smallest`` is a budget that is kept. Or at
        once, if ``memory`` is no size.
      TypeError, ValueError: at once, as ``jax.jit`` raises them for its arguments.
      ModelError: when called, if the step needs more and nothing in it is decorated; or under another transformation.

    The method: tensors are given up that give most bytes for a second, in the problem of Z. Jain et al., "Checkmate:
    Breaking the memory wall with optimal tensor rematerialization", MLSys 2020; of such choices, and of checkpoints as
    people place them, the one with the fewest products that XLA compiles to no more than the budget.

    Example:
      >>> import jax, jax.numpy as jnp, jaxpipe
      >>> @jaxpipe.memory_encoded
      ... def loss(params, x):
      ...     for w in params:
      ...         x = jnp.tanh(x @ w)
      ...     return (x**2).mean()
      >>> def step(params, x):
      ...     gradients = jax.grad(loss)(params, x)
      ...     return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)
      >>> params, x = [jnp.ones((64, 64)) / 64 for _ in range(8)], jnp.ones((4096, 64))
      >>> step = jaxpipe.jit(step, memory="8MiB", donate_argnums=0)
      >>> step.lower(params, x).plan.needed_bytes <= 8 * 2**20
      True
      >>> params = step(params, x)
    """
    if memory != "device":
        device_bytes(memory)
    if step is None:
        return functools.partial(jit, memory=memory, **jit_arguments)
    if not is_step(step):
        raise ModelError(f"jaxpipe.jit was given {shown(step)}. Pass a function: jaxpipe.jit(step, memory='20GiB').")
    try:  # so that wrong options are found here, not when the step is called
        jax.jit(step, **jit_arguments)
    except (TypeError, ValueError):
        nnx.jit(step, **jit_arguments)  # which takes the shardings of states, and options of its own
    return BudgetedFunction(step, memory, jit_arguments)


def _fitted(variants: StepVariants, budget: int) -> tuple[list[StepVariants], str | None]:
    """Return the levels that were tried, those of the step with the fewest products last, and its level; or None.

    What iterations of a scan store is there until its backward pass; a whole scan may run again.
    """
    level = _level_within(variants, budget)
    if level == PLAIN or all(program.iterations is None for program in variants.programs.values()):
        return [variants], level
    others, fewest = variants.with_whole_scans, math.inf if level is None else variants.known[level].products
    if others is None or others.variant(DEFAULT).products >= fewest:
        return [variants], level
    other = _level_within(others, budget)
    if other is None or others.known[other].products >= fewest:
        return [others, variants], level
    return [variants, others], other


def _level_within(variants: StepVariants, budget: int) -> str | None:
    """Return the level that keeps a budget, compiled; what is known from disk is checked once more."""
    while (level := fitting_level(variants, budget)) is not None:
        if "compiled" in vars(variants.variant(level)) or variants.compile(level).bytes <= budget:
            break
    return level


def _signature(leaf: Any) -> Any:
    """Return an argument's shape, type and sharding, on which a program depends; a number is a scalar of weak type."""
    try:
        return leaf.shape, leaf.dtype, leaf.weak_type, leaf.sharding if leaf.committed else None
    except AttributeError:  # no array of JAX: a shape, an array of NumPy, a number
        number, is_typed = isinstance(leaf, int | float | complex), hasattr(leaf, "dtype")
        kind = leaf.dtype if is_typed else result_type(leaf) if number else type(leaf)
        sharding = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
        return getattr(leaf, "shape", ()), kind, getattr(leaf, "weak_type", not is_typed), sharding
