"""``@memory_encoded``: a whole module or function as one VJP program behind ``jax.custom_vjp``."""

# More than 15 of our modules: models of three kinds, what they store and what they run on come together here.
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar, cast, overload

import flax.linen as nn
import jax
from flax import nnx
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jaxpipe import _compat
from jaxpipe.array_types import AnyJaxpr, Array, PyTree, TensorNumber
from jaxpipe.errors import DifferentiationError, ModelError
from jaxpipe.graph.allowed_codecs import Codecs, Policy, parse, warn_unused
from jaxpipe.graph.graph import ENCODED_MARK, Graph, read_graph
from jaxpipe.graph.rules import differs_from_jax
from jaxpipe.graph.save_policy import SavePolicy
from jaxpipe.models import purify_linen
from jaxpipe.models.decorated_class import twin_class
from jaxpipe.models.purify_nnx import PureCall, purify, root_scope
from jaxpipe.models.undecorated import undecorated, unless_disabled
from jaxpipe.residuals.chosen_storage import DecoratedProgram, Passes, choosing
from jaxpipe.residuals.encoded_bodies import Held, encoded_bodies, module_paths, run_around
from jaxpipe.residuals.shared_outputs import ForwardRule, counted_once, forward_rule, vmaps_here
from jaxpipe.residuals.two_passes import CheckpointedPasses, StoredPasses
from jaxpipe.targets.building import building_for, current, target_of_values
from jaxpipe.targets.target import Target


#: A class or a function.
T = TypeVar("T")


@overload
def memory_encoded(
    target: None = None, *, codecs: Codecs = "fast", policy: SavePolicy | None = None
) -> Callable[[T], T]: ...


@overload
def memory_encoded(target: T, *, codecs: Codecs = "fast", policy: SavePolicy | None = None) -> T: ...


def memory_encoded(target: object = None, *, codecs: Codecs = "fast", policy: SavePolicy | None = None) -> object:
    """Keep less for the backward pass, with the same gradients.

    Between its forward and its backward pass the decorated module or function keeps 1-bit masks, pooling positions
    and the few tensors that cannot be recomputed cheaply, instead of every feature map; so does each iteration of a
    ``scan`` inside, and each shard of a ``shard_map``, which gathers again what it has gathered from others. Loss,
    gradients and state are those of the undecorated model.

    Works under ``jit``, ``grad``, ``value_and_grad``, ``vmap``, ``scan``, ``shard_map`` and ``remat``; decorated
    modules may nest. Use it under ``jit``: each eager call traces the model anew.

    Args:
      target: a Linen module class, an NNX module class (its ``__call__`` is encoded), a Linen method, or a function
        of arrays, pytrees of arrays, NNX modules and static values. Left out: returns a decorator.
      codecs: ``"fast"`` (no slower on CPUs; on an H100 4 to 20 % of a step, as up to a fifth of the forward pass's
        products run again), ``"smallest"`` (everything there is), or an explicit set of names from ``"mask"`` (booleans
        in 1 bit), ``"index"`` (positions of maxima in their pooling windows in 1, 2 or 4 bits, of sorted elements in 8
        or 16), ``"alias"`` (views of what is stored), ``"recompute"`` (cheap operators run again), ``"bitmap"`` and
        ``"csr"`` (maps with many zeros without the zeros; see ``with_density``), names of sets, and objects of
        ``jaxpipe.Codec``. Or a mapping from patterns of module paths to any of these: the first that fits decides,
        ``{"Encoder_*": "smallest", "Head": {"mask"}}``; what none fits is ``"fast"``. A pattern that fits no module
        gives a ``CodecWarning``. All are lossless.
      policy: what is saved, as ``jax.checkpoint`` takes it: one of ``jax.checkpoint_policies``, or a function of a
        primitive, the shapes of its operands and its parameters. What it saves is not computed again: it is stored,
        encoded if a codec allows, if the backward pass needs it. All else may be computed again, matrix products too,
        where that saves bytes. Names are those of ``jax.ad_checkpoint.checkpoint_name``. What it offloads is stored on
        the device, with a ``CodecWarning``. Decorated parts inside follow their own policies, but in loops and
        branches, where this one decides. A tensor that does not fit the room of ``"bitmap"`` or ``"csr"`` is computed
        again whatever the policy says. Left out: cheap operators run again, as ``codecs`` allows.

    Returns:
      A class or function to be used in place of ``target``. A class is ``target`` in all but what its methods store:
      a subclass of the same name and module, with its ``__init__``, fields, annotations and hooks as other decorators
      left them. Methods that Linen does not wrap (``nn.nowrap``) stay as they are.

    Raises:
      ModelError: if ``target`` is neither a module class nor a function, a codec name is unknown, or ``policy`` is no
        function or returns neither a boolean nor a mark of ``jax.ad_checkpoint``. Or when differentiated, if shapes
        have dimensions of ``jax.export.symbolic_shape``.
      DifferentiationError: on ``jax.jvp``, ``jax.hessian`` and other derivatives than the first in reverse mode, or of
        references (``jax.new_ref``) that come from outside.

    The method: feature-map encoding, after A. Jain et al., "Gist: Efficient data encoding for deep neural network
    training", ISCA 2018; here the demand on every tensor follows from the jaxpr, not from layer names.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> @memory_encoded
      ... class Net(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return nn.Dense(1)(nn.relu(nn.Dense(8)(x)))
      >>> net, x = Net(), jnp.ones((4, 3))
      >>> variables = net.init(jax.random.key(0), x)
      >>> grads = jax.jit(jax.grad(lambda v: net.apply(v, x).sum()))(variables)
    """
    parsed = parse(codecs, saves=policy)
    if target is None:
        return functools.partial(memory_encoded, codecs=codecs, policy=policy)
    if inspect.isclass(target) and issubclass(target, nn.Module):
        return purify_linen.transform_class(target, functools.partial(run_encoded, policy=parsed))
    if inspect.isclass(target) and issubclass(target, nnx.Module):
        return _encode_nnx_class(target, parsed)
    if isinstance(target, (nn.Module, nnx.Module)):
        raise ModelError(
            f"memory_encoded was given an instance of {type(target).__name__}; it decorates classes and functions. "
            f"Decorate the class (memory_encoded({type(target).__name__})), or a function that calls the instance."
        )
    if inspect.isclass(target) or not callable(target):
        what = f"the class {target.__name__}" if inspect.isclass(target) else f"{target!r} ({type(target).__name__})"
        fix = "Decorate the model's class, or wrap the computation in a function."
        if isinstance(target, str):
            fix = f"Codecs are named with codecs=: @memory_encoded(codecs={target!r})."
        raise ModelError(
            f"memory_encoded was given {what}; it decorates a flax.linen.Module class, a flax.nnx.Module class or a "
            f"function. {fix}"
        )
    return _encode_function(target, parsed)


def _encode_function(function: Callable[..., PyTree], policy: Policy) -> Callable[..., PyTree]:
    run = functools.partial(run_encoded, policy=policy)
    method = purify_linen.transform_method(function, run)

    def encoded(*args: PyTree, **kwargs: PyTree) -> PyTree:
        if args and isinstance(args[0], nn.Module) and args[0].scope is not None:
            return method(*args, **kwargs)
        return run(purify(function, *args, **kwargs))

    return unless_disabled(function, encoded)


def _encode_nnx_class(cls: type[nnx.Module], policy: Policy) -> type[nnx.Module]:
    if not any("__call__" in vars(base) for base in cls.__mro__):
        raise ModelError(
            f"memory_encoded was given the NNX module {cls.__name__}, which has no __call__. Define __call__, or "
            "decorate the method that computes."
        )

    def call(self: nnx.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        with root_scope(cls):
            return cls.__call__(self, *args, **kwargs)

    return twin_class(cls, {"__call__": functools.wraps(cls.__call__)(_encode_function(call, policy))})


def run_encoded(call: PureCall, *, policy: Policy) -> PyTree:
    """Run a pure call now; its derivative, if one is taken, goes through the stash."""
    with choosing(None), undecorated(False):  # decorated parts inside are parts of this program
        closed = jax.make_jaxpr(call.function)(*call.leaves)
    program, consts = _compat.hoist_constants(closed)
    values = [*consts, *call.leaves]
    if any(map(_compat.is_forward_mode, values)):
        raise DifferentiationError(_FORWARD_MODE)
    graph = read_graph(program, policy=policy).with_parameters([False] * len(consts) + list(call.parameters))
    flags = zip(graph.inputs, [True] * len(consts) + list(call.held), strict=True)
    held, target = frozenset(t for t, flag in flags if flag), target_of_values(values)
    paths = tuple(module_paths(graph))

    def run(part: Graph, held: Held, values: Sequence[Array], iterations: int | None = None) -> Sequence[Array]:
        if operators := encoded_bodies(part, held):
            return run_around(operators, part, held, values, iterations, run)
        traced = program
        if part is not graph:
            traced = jax.make_jaxpr(lambda *values: part.evaluate(values))(*(part.tensors[t].aval for t in part.inputs))
        results = _encoded_function(traced, part, held, policy, target, paths, iterations)(*values)
        return list(map(_compat.without_tangent_of_integers, results))

    return call.finish(run(graph, held, values))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["kept", "rule"], meta_fields=["passes", "wrt"])
@dataclass(frozen=True)
class _Residuals:
    """The values between the forward and the backward pass, the inputs that are differentiated, and who maps them."""

    kept: PyTree
    rule: ForwardRule
    passes: Passes
    wrt: tuple[TensorNumber, ...]


def _encoded_function(
    program: AnyJaxpr,
    graph: Graph,
    held: Held,
    policy: Policy,
    target: Target | None,
    paths: Sequence[str],
    iterations: int | None,
) -> Callable[..., Sequence[Array]]:
    """Return a traced program whose derivative goes through the stash, built for a platform if it is known.

    Args:
      held: inputs that are kept alive anyway.
      paths: of all modules that the policy may name.
      iterations: of scans around it.
    """

    def body(*values: Array) -> Sequence[Array]:
        return _compat.evaluate_jaxpr(program, *values)

    # The name tells an enclosing `memory_encoded` or `partition` that it may look inside.
    body.__name__ = ENCODED_MARK + policy.name

    choices, axes, vmaps = choosing.value, _compat.axes_here(), vmaps_here()

    @functools.cache
    def passes_for(perturbed: tuple[bool, ...]) -> tuple[Passes, tuple[TensorNumber, ...]]:
        warn_unused(policy, paths, "codecs")
        named = {str(size) for tensor in graph.tensors for size in tensor.shape if not isinstance(size, int)}
        if named:
            raise ModelError(_NAMED_SIZES.format(", ".join(sorted(named))))
        wrt = tuple(t for t, moves in zip(graph.inputs, perturbed, strict=True) if moves)
        kept = held | {*graph.inputs} - {*wrt}
        differentiated = DecoratedProgram(program, graph, wrt, policy, kept, iterations, axes)
        return (_default_passes if choices is None else choices.passes)(differentiated), wrt

    @jax.custom_vjp
    def encoded(*values: Array) -> Sequence[Array]:
        return jax.jit(body)(*values)

    @building_for(target)
    def encoded_forward(*primals: CustomVJPPrimal) -> tuple[Sequence[Array], _Residuals]:
        values = list(map(_value, primals))
        with axes():  # of a scan or a checkpoint, JAX calls this elsewhere
            passes, wrt = passes_for(tuple(p.perturbed for p in primals))
            outputs, kept = passes.forward(values)
        outputs = [_first_order(jax.numpy.asarray(y)) for y in outputs]
        rule = forward_rule([x for x, p in zip(values, primals, strict=True) if p.perturbed], outputs, vmaps)
        return outputs, _Residuals(kept, rule, passes, wrt)

    @building_for(target)
    def encoded_backward(residuals: _Residuals, cotangents: Sequence[Array | SymbolicZero]) -> tuple[Array | None, ...]:
        seeds = [None if isinstance(ct, SymbolicZero) else ct for ct in cotangents]
        with axes():
            passed = counted_once(residuals.rule, residuals.passes.backward, residuals.kept, seeds)
        gradients = dict(zip(residuals.wrt, passed, strict=True))
        return tuple(gradients.get(t) for t in graph.inputs)

    encoded.defvjp(encoded_forward, encoded_backward, symbolic_zeros=True)
    return encoded


def _value(primal: CustomVJPPrimal) -> Array:
    """Return the value of an argument, which may be a Python number, or a reference that is not differentiated."""
    if not isinstance(primal.value, jax.Ref):
        return jax.numpy.asarray(primal.value)
    if primal.perturbed:
        raise DifferentiationError(_REFERENCE)
    return cast(Array, primal.value)


def _default_passes(program: DecoratedProgram) -> Passes:
    """Return passes with default storage, or JAX's own where XLA keeps all that these save beside the memory."""
    by_jax = not any(map(differs_from_jax, program.graph.operators))
    if by_jax and _plain_bytes(program) <= current().rates.on_chip:
        return CheckpointedPasses(program, (), jax.checkpoint_policies.everything_saveable)
    return StoredPasses(program.default, labelled=True)


def _plain_bytes(program: DecoratedProgram) -> int:
    """Return about the bytes that JAX saves of a program: all that its backward pass reads, as it is."""
    graph = program.backward_graph.graph
    available = graph.derived_from_parameters | program.held
    return sum(graph.tensors[t].bytes for t in program.backward_graph.needs if t not in available)


@jax.custom_jvp
def _first_order(x: Array) -> Array:
    """The identity; to differentiate it means to differentiate the encoded derivative."""
    return x


@_first_order.defjvp
def _first_order_jvp(primals: tuple[Array], tangents: tuple[Array]) -> NoReturn:
    raise DifferentiationError(_SECOND_ORDER)


_FORWARD_MODE = (
    "Forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize of a jvp) was asked of a memory_encoded module "
    "or function. What it stores is planned for one reverse pass, so only jax.grad, jax.value_and_grad and jax.vjp "
    "apply. Use the undecorated model here, or call it under `with jaxpipe.without_encoding():`."
)
_SECOND_ORDER = (
    "A second derivative (jax.hessian, jax.grad of jax.grad) was asked of a memory_encoded module or function. What "
    "it stores is planned for the first derivative in reverse mode only. Use the undecorated model here, or call it "
    "under `with jaxpipe.without_encoding():`. An inner gradient that is a constant of the outer one, as of "
    "first-order MAML, is taken where nothing is differentiated: jax.grad(loss)(jax.lax.stop_gradient(params))."
)
_REFERENCE = (
    "A memory_encoded module or function reads or writes a reference (jax.new_ref) that was made in the function which "
    "is differentiated, so that gradients would go through it. Make the reference outside of that function, or in the "
    "decorated one, or pass its value in and return the new one."
)
_NAMED_SIZES = (
    "A memory_encoded module or function was differentiated with sizes of jax.export.symbolic_shape in it ({}). What "
    "it stores is planned by bytes, which are not known then. Export the derivative for shapes of numbers, or under "
    "`with jaxpipe.without_encoding():`."
)
