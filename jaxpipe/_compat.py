"""Every name that differs between supported JAX versions, and every private one.

jax 0.10 (Python 3.11) and 0.12 (Python 3.12) are both supported. No other file may branch on a version or
reach below the public API.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar, cast

import jax
import jax.extend.core as jex
import jax.extend.source_info_util as source_info
import jax.interpreters.ad as ad
import jax.numpy as jnp
import jaxlib
import numpy as np
from flax import nnx
from jax import core
from jax._src import config as private_config
from jax._src import core as private_core
from jax._src.api_util import fun_signature, resolve_argnums
from jax._src.clusters import ClusterEnv
from jax._src.compiler import get_compile_options
from jax._src.dispatch import jaxpr_has_prim_requiring_devices
from jax._src.distributed import global_state
from jax._src.interpreters.batching import BatchTrace as BatchTrace
from jax._src.interpreters.batching import BatchTracer as BatchTracer
from jax._src.interpreters.partial_eval import DynamicJaxprTrace as DynamicJaxprTrace
from jax._src.interpreters.pxla import _dce_jaxpr, global_aval_to_result_handler
from jax._src.lib import xla_client
from jax._src.mesh import get_concrete_mesh as get_concrete_mesh  # that of jax.set_mesh, while tracing, too
from jax._src.state.discharge import discharge_state
from jax.experimental.layout import Format, Layout
from jax.interpreters.partial_eval import dce_jaxpr

from jaxpipe import array_types
from jaxpipe.array_types import AbstractArray, AnyJaxpr, Array, ArrayLike, Atom, Device, Equation, OpenJaxpr, PyTree
from jaxpipe.targets.building import current


T = TypeVar("T")

#: ``jex.Jaxpr`` of operands that are arrays.
_new_jaxpr = cast(Callable[..., jex.Jaxpr], jex.Jaxpr)

#: The name that JAX's messages give to a program of one equation.
_ONE_EQUATION = jex.DebugInfo("jaxpipe", "operator", None, None)

#: By bytes of an element, the type of its bits.
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])


def open_jaxpr(jaxpr: AnyJaxpr | OpenJaxpr) -> tuple[OpenJaxpr, list[Array]]:
    """Split a traced program into its jaxpr and its constants.

    jax 0.10 has two types, ``ClosedJaxpr`` and ``Jaxpr``; in 0.12 they are one.
    """
    consts: list[Array] = list(getattr(jaxpr, "consts", None) or ())
    return cast(OpenJaxpr, getattr(jaxpr, "jaxpr", jaxpr)), consts


def with_constants(jaxpr: OpenJaxpr, consts: Sequence[Array]) -> jex.ClosedJaxpr:
    """A program with other constants."""
    return jex.ClosedJaxpr(cast(jex.Jaxpr, jaxpr), consts)


def lower(traced: jax.stages.Traced, platform: str) -> jax.stages.Lowered:
    """Lower a traced program, all of whose operands are kept, for a platform.

    jax 0.12 caches by program what remains of it without the operands that it does not read. Where all are kept that is
    the program itself, which would stay for good, with the arrays that it has captured.
    """
    lowered = traced.lower(lowering_platforms=(platform,))
    _dce_jaxpr.evict_weakref(traced.jaxpr)
    return lowered


def evaluate_jaxpr(jaxpr: AnyJaxpr, *args: Array) -> list[Array]:
    """Evaluate a traced program with its own constants."""
    program, consts = open_jaxpr(jaxpr)
    return core.eval_jaxpr(cast(jex.Jaxpr, program), consts, *args)


def inside_transformation() -> bool:
    """Return whether code runs inside ``jit``, ``grad``, ``vmap`` or another transformation."""
    return not private_core.trace_state_clean()


def names_axis(effect: object) -> bool:
    """Return whether an effect is no more than that a collective names an axis."""
    return isinstance(effect, private_core.NamedAxisEffect)


def current_trace() -> object:
    """Return the trace that records operators here; each transformation has one of its own."""
    return private_core.trace_ctx.trace


def is_within(value: object, trace: object) -> bool:
    """Return whether a value is there in a trace: a number, or one that the trace, none inside of it, has computed."""
    return not isinstance(value, core.Tracer) or value._trace is trace


def inputs_read(closed: AnyJaxpr, outputs: Sequence[bool]) -> list[bool]:
    """Return which inputs of a traced program some of its outputs follow from, in loops too."""
    return dce_jaxpr(cast(jex.Jaxpr, open_jaxpr(closed)[0]), list(outputs))[1]


def is_literal(atom: Atom) -> TypeGuard[array_types.Literal]:
    """Return whether an operand of an equation is a literal (0.12 has several literal types)."""
    return hasattr(atom, "val")


def isolate(equation: Equation) -> jex.Jaxpr:
    """A jaxpr of this one equation, with one argument for each operand that is not a literal.

    An operand that occurs twice becomes two arguments, so that its two cotangents stay apart, as they do in JAX.
    """
    invars = [atom if is_literal(atom) else variable(atom.aval) for atom in equation.invars]
    alone = equation.replace(invars=invars)
    arguments = [v for v in invars if not is_literal(v)]
    return _new_jaxpr([], arguments, alone.outvars, [alone], effects=equation.effects, debug_info=_ONE_EQUATION)


def evaluate_equation(equation: Equation, operands: Sequence[Array]) -> list[Array]:
    """Evaluate an equation on the operands that are not literals."""
    return core.eval_jaxpr(isolate(equation), (), *operands)


def without_dead_code(closed: AnyJaxpr, outputs: Sequence[int]) -> tuple[jex.ClosedJaxpr, list[bool]]:
    """Return the part of a program that some of its outputs follow from, in their order, and which inputs it reads."""
    jaxpr, consts = open_jaxpr(closed)
    kept = set(outputs)
    live, used = dce_jaxpr(cast(jex.Jaxpr, jaxpr), [k in kept for k in range(len(jaxpr.outvars))])
    part = cast(OpenJaxpr, live)
    result = dict(zip(sorted(outputs), part.outvars, strict=True))
    return rebuilt(part, part.constvars, consts, part.invars, part.eqns, [result[k] for k in outputs]), used


def without_references(closed: AnyJaxpr) -> AnyJaxpr:
    """Return a program that passes on as values what it keeps in references of its own (``jax.new_ref``)."""
    jaxpr, consts = open_jaxpr(closed)
    inside = private_core.internal_mutable_array_effect in jaxpr.effects
    return discharge_state(with_constants(jaxpr, consts)) if inside else closed


def rebuilt(
    jaxpr: OpenJaxpr,
    constvars: Sequence[Atom],
    consts: Sequence[Array],
    inputs: Sequence[Atom],
    equations: Sequence[Equation],
    outputs: Sequence[Atom],
) -> jex.ClosedJaxpr:
    """Return a program with other constants, inputs, equations and outputs."""
    unnamed = jaxpr.debug_info.with_unknown_names()
    new = _new_jaxpr(constvars, inputs, outputs, equations, effects=jaxpr.effects, debug_info=unnamed)
    return jex.ClosedJaxpr(new, consts)


def is_in_shard_map() -> bool:
    """Return whether code is traced in the body of a ``shard_map``."""
    return bool(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))


def variable(aval: AbstractArray) -> Atom:
    """A new variable of a program."""
    return cast(Atom, jex.Var(aval))


def has_default_sharding(params: dict[str, Any]) -> bool:
    """Return whether a ``jit`` equation asks for nothing that inlining it would lose."""
    unspecified = all(
        type(s).__name__ == "UnspecifiedValue" for key in ("in_shardings", "out_shardings") for s in params.get(key, ())
    )
    layouts = all(x is None for key in ("in_layouts", "out_layouts") for x in params.get(key, ()))
    return unspecified and layouts and not params.get("compiler_options_kvs")


def inner_programs(equation: Equation) -> list[jex.Jaxpr]:
    """The programs among an equation's parameters."""
    return list(jex.jaxprs_in_params(equation.params))


def is_forward_mode(value: object) -> bool:
    """Return whether ``value`` is traced by ``jax.jvp`` (reverse mode has a tracer type of its own)."""
    direct = getattr(jax.config, "jax_use_direct_linearize", True)
    return bool(direct) and isinstance(value, ad.JVPTracer)


def without_tangent_of_integers(x: Array) -> Array:
    """Return a result of a ``custom_vjp``; jax 0.10 has tangents of integers, and fails on those that a scan stacks."""
    if JAX_VERSION > (0, 10) or jax.dtypes.issubdtype(x.dtype, np.inexact):
        return x
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jax.random.key_data(x), impl=jax.random.key_impl(x))
    return jax.lax.bitcast_convert_type(x, x.dtype)


def without_scope(equation: Equation) -> Equation:
    """The equation without the ``jax.named_scope`` it was traced under."""
    return equation.replace(source_info=source_info.new_source_info())


def static_arguments(
    function: Callable[..., PyTree], places: int | Sequence[int] | None, names: str | Iterable[str] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the places and names of a function's static arguments, each of which ``jax.jit`` infers from the other."""
    signature = fun_signature(function) if (places is None) != (names is None) else None
    return resolve_argnums(function, signature, None, None, places, names)[2:]


def trace_context() -> Hashable:
    """Return all settings and contexts here on which traced programs depend, such as the default precision."""
    return private_config.trace_context()


def has_mesh_in_context(equation: Equation) -> bool:
    """Return whether an equation was traced in the context of a mesh (``jax.set_mesh``)."""
    return not equation.ctx.cur_abstract_mesh.empty


def in_current_mesh(equation: Equation) -> Equation:
    """The equation as if it had been traced in the context of the mesh, or of none, that is in context now."""
    mesh = jax.sharding.get_abstract_mesh()
    if "ctx_mesh" in equation.params:  # of a call of a jitted function
        equation = equation.replace(params={**equation.params, "ctx_mesh": mesh})
    if equation.ctx.cur_abstract_mesh == mesh:
        return equation
    none = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))  # between meshes of different sizes
    with equation.ctx.manager, none, jax.sharding.use_abstract_mesh(mesh):
        return equation.replace(ctx=type(equation.ctx)())


def bound_axes(sizes: Mapping[str, int]) -> contextlib.AbstractContextManager[object]:
    """A context in which collectives may name axes of these sizes, as in ``vmap``."""
    return private_core.extend_axis_env_nd(list(sizes.items()))


def axes_here() -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Return what makes the named axes of ``vmap`` and ``shard_map`` that are bound here a context elsewhere."""
    sizes, mesh = dict(private_core.get_axis_env().axis_sizes), jax.sharding.get_abstract_mesh()
    is_typed = private_config._check_vma.value

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        none = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))  # between meshes of different sizes
        with bound_axes(sizes), none, jax.sharding.use_abstract_mesh(mesh), private_config._check_vma(is_typed):
            yield

    return context if sizes else contextlib.nullcontext


@contextlib.contextmanager
def explicit_axes(sizes: Mapping[str, int]) -> Iterator[None]:
    """A context of a mesh with explicit axes, those of size 1 left out of the types of arrays."""
    sizes = sizes or {"_": 1}
    types = (jax.sharding.AxisType.Explicit,) * len(sizes)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), types)
    with private_config.remove_size_one_mesh_axis_from_type(True), jax.sharding.use_abstract_mesh(mesh):
        yield


def trace_without_scope(function: Callable[..., PyTree], *avals: PyTree) -> jex.ClosedJaxpr:
    """``jax.make_jaxpr`` whose equations do not carry the caller's ``jax.named_scope``."""
    with outside_scope():
        return jax.make_jaxpr(function)(*avals)


def outside_scope() -> contextlib.AbstractContextManager[None]:
    """A context in which equations carry neither the caller's ``jax.named_scope`` nor its transformations."""
    return source_info.reset_name_stack()


def hoist_constants(closed: jex.ClosedJaxpr) -> tuple[jex.Jaxpr, list[Array]]:
    """Make the constants of a traced program its first arguments; returns the program and the constants."""
    jaxpr, consts = open_jaxpr(closed)
    hoisted = rebuilt(jaxpr, [], [], [*jaxpr.constvars, *jaxpr.invars], jaxpr.eqns, jaxpr.outvars)
    return cast(jex.Jaxpr, open_jaxpr(hoisted)[0]), consts


def named_scope_of(equation: Equation) -> str:
    """The ``jax.named_scope`` path an equation was traced under."""
    return str(equation.source_info.name_stack)


def zeros(aval: AbstractArray) -> Array:
    """Zeros of an abstract value: its shape, dtype, sharding, memory, and the manual mesh axes it varies over."""
    sharding = aval.sharding if any(split_dimensions(aval)) else None
    value = _vary(jax.lax.full(aval.shape, 0, aval.dtype, sharding=sharding), manual_axes(aval))
    return value if aval.memory_space == jax.typeof(value).memory_space else jax.device_put(value, aval.memory_space)


def vary_as(value: Array, like: Array) -> Array:
    """The value, varying over the manual mesh axes that ``like`` varies over (a loop's carry must say so)."""
    return _vary(value, manual_axes(like) - manual_axes(value))


def _vary(value: Array, axes: frozenset[str]) -> Array:
    return jax.lax.pcast(value, tuple(axes), to="varying") if axes else value


def join(values: Sequence[Array], after: Array | None = None) -> list[Array]:
    """Return arrays unchanged, none of them before all have been computed that vary over the same manual mesh axes.

    Nor before ``after``; arrays that do not vary over all of its axes are left alone then, as they would change their
    type. Without this XLA decodes or recomputes in the forward pass what the backward pass needs, and keeps it.
    """
    joined = list(values)
    alike: dict[frozenset[str], list[int]] = {}
    for k, value in enumerate(joined):
        alike.setdefault(manual_axes(value), []).append(k)
    for axes, places in alike.items():
        if after is None or axes >= manual_axes(after):
            awaited = [] if after is None else [_vary(after, axes - manual_axes(after))]
            barred = jax.lax.optimization_barrier([*(joined[k] for k in places), *awaited])
            for k, value in zip(places, barred, strict=False):
                joined[k] = value
    return joined


def wait(value: Array, arrays: Sequence[Array]) -> Array:
    """Return ``value`` unchanged, but not before ``arrays`` have been computed, where XLA does things late.

    XLA:CPU computes everything as early as it can. Inside ``shard_map``, arrays that vary over mesh axes over which
    ``value`` does not are not waited for.
    """
    known = [] if current().runs_early else [vary_as(x, value) for x in arrays if _may_wait(value, x)]
    return jax.lax.optimization_barrier((value, known))[0] if known else value


def _may_wait(value: Array, after: Array) -> bool:
    """Return whether an array varies over all manual mesh axes over which the one that it waits for does."""
    return manual_axes(value) >= manual_axes(after)


def manual_axes(value: Array | AbstractArray) -> frozenset[str]:
    """The manual mesh axes that an array varies over, where JAX keeps track of that."""
    aval = value if isinstance(value, AbstractArray) else jax.typeof(value)
    kind = getattr(aval, "mat", None)
    return frozenset(getattr(aval, "vma", ()) if kind is None else kind.varying)


def disguise(value: Array, after: Array) -> Array:
    """Return ``value`` unchanged, so that XLA takes it for a value that depends on ``after``.

    XLA:CPU up to jax 0.10 drops barriers before it merges equal expressions: what is recomputed from a stored tensor
    then turns into the forward pass's own result, kept alive. Exclusive-or with a zero that only shows at run time
    (the count of leading zeros of a 32-bit word, divided by 64) costs nothing in a fused loop and keeps every bit.
    Bytes, that is packed masks and positions, pass through a conditional on that zero instead: XLA never fuses
    one, so the packing cannot be fused with the unpacking and run from the full map again; the copy is small.
    """
    if barriers_hold() or not _may_wait(value, after):
        return value
    if value.dtype == jnp.uint8:
        return materialize(value, after)
    zero = run_time_zero(after)
    return value if zero is None else flip(value, zero)


def is_absent(device: Device) -> bool:
    """Return whether a device is of a topology that is only compiled for, not one that runs programs."""
    return getattr(device.client, "runtime_type", "") == "compile_only_runtime"


def needs_devices(program: jex.ClosedJaxpr) -> bool:
    """Return whether a traced program can only be lowered for given devices, as one with Python callbacks."""
    return jaxpr_has_prim_requiring_devices(cast(jex.Jaxpr, open_jaxpr(program)[0]))


def barriers_hold() -> bool:
    """Return whether XLA keeps barriers until it has fused operators."""
    return JAX_VERSION >= (0, 11) or not current().runs_early


def barrier(values: T) -> T:
    """Values that XLA does not compute again, or with others, behind this; itself where it drops barriers early."""
    return jax.lax.optimization_barrier(values) if barriers_hold() else values


def flip(value: Array, bits: Array) -> Array:
    """An array of numbers whose elements are flipped in some bits; with a zero that shows at run time, in none.

    Complex numbers, and those of less than a byte, are returned as they are.
    """
    if not _is_number(value):
        return value
    bits = bits.astype(_WORDS[value.dtype.itemsize])
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(value, bits.dtype) ^ bits, value.dtype)


def materialize(value: Array, after: Array) -> Array:
    """Return numbers unchanged, computed once: XLA:CPU fuses what makes them into each of their readers.

    Barriers do not keep it from that; the conditional of ``disguise`` does. On other devices, where memory is slow
    beside arithmetic, fusing is right.
    """
    if not current().fuses_into_readers or not _may_wait(value, after):
        return value
    zero = run_time_zero(after)
    return value if zero is None else jax.lax.cond(zero == 0, lambda x: x, jax.lax.neg, value)


def computed_once(value: Array) -> Array:
    """Return numbers unchanged, which no reader computes again; XLA:CPU may, of 64 bits, up to jax 0.10."""
    return barrier(value) if barriers_hold() else materialize(value, value)


def _is_number(value: Array) -> bool:
    """Return whether an array is of real numbers of whole bytes each."""
    is_number = any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer))
    return is_number and jax.dtypes.itemsize_bits(value.dtype) == 8 * value.dtype.itemsize


def versions() -> list[str]:
    """Return the versions of what compiles programs."""
    return [jax.__version__, jaxlib.__version__]


def hidden_zero(arrays: Iterable[Array]) -> Array | None:
    """A zero made of elements of some arrays, so that XLA cannot know it; None where there are no such elements.

    Of many arrays it is up to 15, spread over all of them, since some may be constants of a larger program.
    """
    traced = [x for x in arrays if isinstance(x, core.Tracer)]
    zeros = [zero for x in traced[:: max(1, len(traced) // 8)] if (zero := run_time_zero(x)) is not None]
    return functools.reduce(jax.lax.bitwise_or, zeros) if zeros else None


def run_time_zero(after: Array) -> Array | None:
    """A zero made of an element of ``after``, so that XLA cannot know it; None where there is no such element."""
    one_piece = not any(split_dimensions(jax.typeof(after)))  # of others no element can be sliced out
    if not _is_number(after) or after.size == 0 or after.dtype.itemsize == 8 or not one_piece:
        return None
    first = jax.lax.reshape(jax.lax.slice(after, [0] * after.ndim, [1] * after.ndim), ())
    seen = jax.lax.bitcast_convert_type(first, _WORDS[after.dtype.itemsize]).astype(jnp.uint32)
    return jax.lax.clz(seen) >> 6


def split_dimensions(aval: AbstractArray) -> list[bool]:
    """By dimension, whether an array is split over an explicit mesh axis."""
    if aval.sharding is None:  # a shape alone
        return [False] * len(aval.shape)
    return [axis is not None for axis in aval.sharding.spec]


def is_in_cluster() -> bool:
    """Return whether JAX can find the other processes of this run: under SLURM, Open MPI, Kubernetes and others."""
    return any(kind.is_env_present() for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method)


def process_number() -> int:
    """Return this process's number, without looking at devices."""
    return global_state.process_id


def num_processes() -> int:
    """Return the number of processes that ``jax.distributed`` has connected, without looking at devices."""
    return global_state.num_processes or 1


def share(key: str, value: bytes) -> None:
    """Let all processes that ``jax.distributed`` has connected know a value under a new key."""
    _client().key_value_set_bytes(key, value)


def shared(key: str, seconds: float) -> bytes | None:
    """Return the value of a key, once a process has shared it; None if none has within some seconds."""
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:  # in short pieces, between which Ctrl-C is seen
            return _client().blocking_key_value_get_bytes(key, round(1000 * min(max(left, 0.001), 2.0)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        if left <= 0:
            return None


def delete_shared(key: str) -> None:
    """Forget the value of a key."""
    _client().key_value_delete(key)


def _client() -> Any:
    return global_state.client


def register_nnx_class(cls: type[nnx.Module], like: type[nnx.Module]) -> None:
    """Let Flax know a subclass of an NNX module class as it knows that class; other hooks are not run."""
    nnx.Pytree.__init_subclass__.__func__(cls, pytree=like._pytree__is_pytree)


def function_name(equation: Equation) -> str | None:
    """The name of the function that a call-like equation wraps, if JAX recorded one."""
    programs = inner_programs(equation)
    info = getattr(open_jaxpr(programs[0])[0], "debug_info", None) if programs else None
    return getattr(info, "func_name", None)


def functions_behind(equation: Equation) -> list[str]:
    """Qualified names of the functions that an equation was traced in, innermost first."""
    traceback = equation.source_info.traceback
    return [] if traceback is None else [frame.function_name for frame in traceback.frames]


def kept_arguments(compiled: jax.stages.Compiled, count: int) -> list[int]:
    """Return the positions of those of so many arguments that a program has: JAX drops those that it does not use."""
    kept = getattr(compiled._executable, "_kept_var_idx", None)
    return list(range(count)) if kept is None else sorted(kept)


def direct_call(compiled: jax.stages.Compiled) -> Callable[..., Sequence[Array]]:
    """Return a function that runs a compiled program on operands that are known to be as it was compiled for.

    ``compiled(*operands)`` compares every operand with what the program was compiled for, which takes a quarter of a
    microsecond for each. Programs with effects, those that look for numbers that are not finite, and those of random
    keys, which are wrapped arrays, are called as they are.
    """
    unsafe = _without_effects(compiled)
    return compiled if unsafe is None else _call(unsafe.xla_executable, unsafe.out_handler.handlers)


def loaded_on(compiled: jax.stages.Compiled, devices: Sequence[Device]) -> list[Callable[..., Sequence[Array]]] | None:
    """Return functions that run a program for one device on others of its kind, without compiling it again.

    None where a program cannot be written out: with effects, or on a platform that does not do so. Nor may it come from
    a persistent compilation cache: XLA:CPU writes out only a part of what it has read in itself.
    """
    unsafe = _without_effects(compiled)
    config: Any = jax.config
    if unsafe is None or unsafe.keepalive or config.jax_compilation_cache_dir:
        return None
    if len({device.device_kind for device in (*devices, *unsafe.xla_executable.local_devices())}) > 1:
        return None
    handler, client = unsafe.out_handler, devices[0].client
    calls = []
    try:
        text = client.serialize_executable(unsafe.xla_executable)
        for device in devices:
            options = get_compile_options(1, 1, device_assignment=np.array([[device.id]]))
            executable = client.deserialize_executable(text, xla_client.DeviceList((device,)), options)
            shardings = [_moved(sharding, device) for sharding in handler.out_shardings]
            pairs = zip(handler.out_avals, shardings, strict=True)
            calls.append(_call(executable, [global_aval_to_result_handler(*pair, True) for pair in pairs]))
    except (jax.errors.JaxRuntimeError, NotImplementedError):  # this platform does not write programs out
        return None
    return calls


def _without_effects(compiled: jax.stages.Compiled) -> Any:
    """Return the function that runs a program, if nothing besides is to be done to run it; else None."""
    config: Any = jax.config
    unsafe = cast(Any, compiled._executable).unsafe_call
    effects = unsafe.ordered_effects or unsafe.has_unordered_effects or unsafe.has_host_callbacks
    avals = jax.tree.leaves(compiled.in_avals)
    drops = len(unsafe.kept_var_idx) < len(avals)
    wrapped = any(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) for aval in avals)
    if effects or drops or wrapped or unsafe.mut is not None or config.jax_debug_nans or config.jax_debug_infs:
        return None
    return unsafe


def _call(executable: Any, handlers: Sequence[Any]) -> Callable[..., Sequence[Array]]:
    execute = executable.execute_sharded
    return lambda *operands: execute(operands).consume_with_handlers(handlers)


def _moved(sharding: Any, device: Device) -> jax.sharding.Sharding:
    """Return the sharding of an array on one device, on another."""
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
    mesh = sharding.mesh
    devices = np.array([device]).reshape(mesh.devices.shape)
    mesh = jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
    return jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def is_ready(x: Array) -> bool:
    """Return whether an array has been computed, without waiting for it."""
    return cast(Any, x).is_ready()


def in_default_layout(x: ArrayLike) -> ArrayLike:
    """Return an array whose elements lie in the order of its axes, as compiled programs expect their operands."""
    if not isinstance(x, jax.Array) or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    layout = x.format.layout  # pyright: ignore[reportAttributeAccessIssue]
    order = tuple(range(x.ndim))
    if layout is None or layout.major_to_minor == order:
        return x
    return jax.device_put(x, Format(Layout(order), x.sharding))
