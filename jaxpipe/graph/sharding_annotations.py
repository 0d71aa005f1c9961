"""Sharding annotations of a model within a stage.

    with_sharding_constraint over axes of the stage's submesh  ──▶ stays
    shard_map over such axes, of their sizes                   ──▶ stays
    with_sharding_constraint over other axes                   ──▶ the value itself
    reshard, out_sharding= (of explicit axes)                  ──▶ as with_sharding_constraint
    shard_map over other axes, of sizes n, m, ...              ──▶ vmap over axes of these sizes, with the same names
    collectives over names that nothing binds                  ──▶ over axes of size 1 (``jaxpipe.graph.axis_names``)

A sharding constraint says where a value lies, not what it is, so that nothing is lost. A ``shard_map`` does change what
is computed: its body runs once for each shard and exchanges with the others. ``vmap`` with a named axis computes the
same without these axes, collectives included. Both hold whatever mesh the model has in mind, of whatever size.
"""

import contextlib
import contextvars
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxpipe import _compat
from jaxpipe.array_types import AbstractArray, AnyJaxpr, Array, Equation, Literal, PyTree, Shaped
from jaxpipe.errors import PartitionError
from jaxpipe.graph.axis_names import NO_AXES, TracedIn, bound, evaluate_alone, names_in, with_names
from jaxpipe.graph.evaluate_otherwise import evaluate_otherwise, with_programs
from jaxpipe.graph.graph import Operator, all_operands, equations_in, replaced, without_literals
from jaxpipe.graph.primitives import BODIES, JITS, MARKS
from jaxpipe.sharding.mesh_axes import Submesh, axes_by_dimension, axis_names, kept_spec


T = TypeVar("T")


@dataclass(frozen=True)
class Annotations:
    """Axes that a program mentions in sharding constraints, and in calls of ``shard_map``, with their sizes."""

    constrained: tuple[str, ...] = ()
    mapped: tuple[tuple[str, int], ...] = ()
    traced_in: TracedIn = NO_AXES

    def notes(self, mesh_axes: Sequence[str], shape: Mapping[str, int]) -> tuple[str, ...]:
        """Return sentences on what a pipeline drops, over ``mesh_axes``, of which those of ``shape`` shard stages."""
        sentences = []
        dropped = [axis for axis in self.constrained if axis not in shape]
        if dropped:
            other = [axis for axis in dropped if axis not in mesh_axes]
            why = f"the mesh has only {', '.join(mesh_axes)}" if other else "a stage has no such axis"
            sentences.append(f"sharding constraints over {', '.join(map(repr, dropped))} are dropped: {why}")
        mapped = ", ".join(f"'{axis}' ({size})" for axis, size in self.mapped if shape.get(axis) != size)
        if mapped:
            sentences.append(f"shard_map over {mapped} runs on each stage's own device, its shards as one vmap")
        if self.traced_in.unbound:
            names = ", ".join(map(repr, self.traced_in.unbound))
            sentences.append(f"collectives over {names} are those of one micro-batch: an axis of size 1")
        return tuple(sentences)


#: Parameters of operators that say how their result is split over explicit axes.
_RESULTS = ("sharding", "out_sharding")

#: Collectives that are typed by the axes they vary over, and those that are not.
_UNTYPED: dict[str, Callable[..., Array]] = {
    "psum_invariant": lambda x, axes, **_: jax.lax.psum(x, axes),
    "all_gather_invariant": lambda x, axis_name, all_gather_dimension, tiled, **_: jax.lax.all_gather(
        x, axis_name, axis=all_gather_dimension, tiled=tiled
    ),
}

#: The mesh in whose context the caller of jaxpipe is.
_callers_mesh: contextvars.ContextVar[AbstractMesh | None] = contextvars.ContextVar("callers_mesh", default=None)


@contextlib.contextmanager
def outside_mesh() -> Iterator[None]:
    """Leave the mesh that the caller has put in context (``jax.set_mesh``); ``with_axes`` remembers it.

    A pipeline says itself on which devices each of its programs runs, and it is compiled: ``jax_disable_jit`` is left,
    too. Also a decorator.
    """
    with contextlib.ExitStack() as stack:
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            stack.enter_context(jax.disable_jit(False))
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.empty:
            stack.callback(_callers_mesh.reset, _callers_mesh.set(mesh))
            stack.enter_context(jax.set_mesh(None))  # type: ignore[arg-type]
        yield


def with_axes(function: Callable[[], T], shape: Mapping[str, int] | None = None) -> tuple[T, TracedIn]:
    """Call a function that traces a model, in a context that has every axis the model mentions.

    It is the caller's mesh, or none, with the axes over which stages are sharded (``shape``), and has further axes of
    size 1 as JAX misses them: in the mesh, and of collectives. Where the model needs explicit mesh axes, all have the
    size 1.

    Returns:
      What the function returns, and the axes that had to be made.
    """
    unbound, explicit = list[str](), list[str]()
    result = _in_mesh(lambda: with_names(function, unbound), shape, explicit)
    return result, TracedIn(tuple(unbound), tuple(explicit))


def _in_mesh(function: Callable[[], T], shape: Mapping[str, int] | None, explicit: list[str]) -> T:
    """Call a function in the context of a mesh of automatic axes, or of ``explicit`` ones if it needs them."""
    mesh = _callers_mesh.get()
    axes, device = {**({} if mesh is None else mesh.shape), **(shape or {})}, getattr(mesh, "abstract_device", None)
    if not explicit:
        try:
            return _with_missing(function, dict(axes), lambda known: _in_context(known, device))
        except ValueError as error:
            if not any(text in str(error) for text in _NEEDS_EXPLICIT):
                raise
    axes = dict.fromkeys(explicit or axes, 1)
    result = _with_missing(function, axes, _compat.explicit_axes)
    explicit[:] = axes
    return result


def _with_missing(
    function: Callable[[], T],
    axes: dict[str, int],
    context: Callable[[dict[str, int]], contextlib.AbstractContextManager[object]],
) -> T:
    """Call a function in a context of axes, to which others of size 1 are added as JAX misses them."""
    without_mesh = False
    while True:
        try:
            with context(axes):
                return function()
        except (RuntimeError, ValueError) as error:
            refused = next((why for text, why in _REFUSED.items() if text in str(error)), None)
            if refused is not None:
                raise PartitionError(refused) from error
            if axes and not without_mesh and any(text in str(error) for text in _FINE_WITHOUT_MESH):
                axes.clear()
                without_mesh = True
                continue
            missing = _missing_axis(error)
            if missing is None or missing in axes:
                raise
            axes[missing] = 1


#: Parts of errors that models raise only in the context of a mesh: Flax's own layers for annotations of kernels that
#: they flatten, and ``shard_map`` for a mesh of other devices.
_FINE_WITHOUT_MESH = ("is only valid for values of rank at least", "should match the mesh passed to shard_map")

#: Parts of errors of JAX about explicit shardings where mesh axes are automatic, or there is no mesh.
_NEEDS_EXPLICIT = ("axis names that are of type Auto or Manual", "when you are not under a mesh context")

_OTHER_MESH = (
    "The model has explicit shardings (out_sharding=, jax.sharding.reshard), and JAX cannot type this part of it for a "
    "stage, which is on another mesh. If they are NamedShardings, pass their PartitionSpecs alone; else use "
    "jax.lax.with_sharding_constraint there. Both are kept over a stage's own axes, and dropped over others."
)

#: Answers to errors that JAX raises while it traces a model, by their words.
_REFUSED = {
    "context mesh cannot be empty": (
        "The model calls jax.shard_map without a mesh, and there is none in context, so that the number of shards is "
        "not known. Pass shard_map its mesh=, or call jaxpipe under `with jax.set_mesh(mesh):`."
    ),
    "should match the mesh of sharding": _OTHER_MESH,
    "should match the aval mesh": _OTHER_MESH,
    "Mesh for all inputs should be equal": _OTHER_MESH,
}


def _in_context(axes: Mapping[str, int], device: AbstractDevice | None) -> contextlib.AbstractContextManager[object]:
    if not axes:
        return contextlib.nullcontext()
    sizes, types = tuple(axes.values()), (AxisType.Auto,) * len(axes)
    return jax.sharding.use_abstract_mesh(AbstractMesh(sizes, tuple(axes), types, abstract_device=device))


def _missing_axis(error: Exception) -> str | None:
    """The axis that a mesh in context would need, as JAX and Flax tell it; None for other errors.

    Where they want any mesh at all, an axis that no model mentions.
    """
    text = str(error)
    if "requires a non-empty mesh in context" in text or "mesh context or metadata is required" in text:
        return "_"
    named = re.match(r"Resource axis: (\S+) of .* is not found in mesh", text)
    return named and named[1]


def trace(
    function: Callable[..., PyTree], *avals: Shaped, shape: Mapping[str, int] | None = None
) -> tuple[ClosedJaxpr, Annotations]:
    """Trace a function that may mention axes of any mesh; annotations of others than those of ``shape`` are dropped."""
    closed, traced_in = with_axes(lambda: jax.make_jaxpr(function)(*avals), shape)
    mentioned = annotations_of(closed)
    _check_shards(mentioned, traced_in.explicit)
    return _within_stage(closed, shape or {}, traced_in), replace(mentioned, traced_in=traced_in)


def _check_shards(mentioned: Annotations, explicit: Sequence[str]) -> None:
    """Raise ``PartitionError`` if shards were mapped over explicit axes, whose sizes a stage does not know."""
    mesh = _callers_mesh.get()
    shards = [axis for axis, size in mentioned.mapped if axis in explicit and mesh and mesh.shape.get(axis, 1) != size]
    if shards:
        raise PartitionError(
            f"The model calls jax.shard_map over {', '.join(map(repr, shards))} without a mesh, and has explicit "
            "shardings (out_sharding=, jax.sharding.reshard), for which a stage has axes of size 1. Pass shard_map its "
            "mesh=, or use jax.lax.with_sharding_constraint instead of explicit shardings."
        )


def rule_within_stage(
    name: str, derive: Callable[[], Sequence[ClosedJaxpr]], shape: Mapping[str, int], traced_in: TracedIn
) -> list[ClosedJaxpr]:
    """Return the programs of an operator's derivative, as ``derive`` traces them, with a stage's annotations alone.

    ``traced_in``: the axes in whose context the operator was traced.
    """
    try:
        with bound(traced_in.unbound):
            programs = _derived(derive, shape, list(traced_in.explicit))
        return [_within_stage(closed, shape, traced_in) for closed in programs]
    except NameError as error:  # JAX does not know the axes of a vmap in a derivative rule
        if "unbound axis name" not in str(error):
            raise
        raise PartitionError(
            f"The derivative rule of {name} is called in a jax.shard_map and exchanges with other shards. A stage has "
            f"no such axis, so that the shards run there as one jax.vmap, in which JAX cannot apply it: {error} Call "
            "shard_map in the rule, not the rule in shard_map, or compute this part of the model without shard_map. "
            "The same holds for rules that exchange with other replicas (PlanOptions(axis_name=)): leave that out."
        ) from error


def _derived(derive: Callable[[], T], shape: Mapping[str, int], explicit: list[str]) -> T:
    """Trace a derivative; of a model with explicit axes with a stage's automatic ones, unless a rule needs explicit."""
    if explicit:
        mesh = jax.sharding.use_abstract_mesh(Submesh(shape).abstract()) if shape else contextlib.nullcontext()
        with contextlib.suppress(ValueError), mesh:
            return derive()
    return _in_mesh(derive, shape, explicit)


def _within_stage(closed: ClosedJaxpr, shape: Mapping[str, int], traced_in: TracedIn) -> ClosedJaxpr:
    """Return a traced program with the annotations of a stage alone, over axes of ``shape``; itself if it has none."""
    jaxpr, consts = _compat.open_jaxpr(closed)
    if traced_in != NO_AXES or _is_annotated(jaxpr.eqns) or any(map(_is_on_mesh, consts)):
        return _Rewriter(shape, frozenset(traced_in.unbound), traced_in.explicit).program(closed)
    return closed


def without_annotations(op: Operator, avals: Sequence[AbstractArray]) -> Operator:
    """The operator as it runs on one device; itself if it has no annotations."""
    if op.name == "sharding_constraint":
        return replace(op, equation=None)
    if op.equation is None or not _is_annotated([op.equation]):
        return op

    def run(*operands: Array) -> Sequence[Array]:
        return _Rewriter({}).apply(op.equation, all_operands(op.equation, operands))

    (equation,) = _compat.open_jaxpr(jax.make_jaxpr(jax.jit(run))(*avals))[0].eqns
    return replace(op, equation=equation)


def annotations_of(closed: ClosedJaxpr) -> Annotations:
    """The mesh axes that a traced program mentions, those of the programs in it included."""
    constrained, mapped = set[str](), set[tuple[str, int]]()
    for eqn in equations_in(_compat.open_jaxpr(closed)[0].eqns):
        if eqn.primitive.name == "shard_map":
            sizes = dict(eqn.params["mesh"].shape)
            mapped.update((axis, sizes[axis]) for axis in _manual_axes(eqn))
        for sharding in _shardings(eqn):
            constrained.update(_mentioned(sharding.spec))
    return Annotations(tuple(sorted(constrained)), tuple(sorted(mapped)))


def _is_annotated(equations: Iterable[Equation]) -> bool:
    return any(map(_annotates, equations_in(equations)))


def _annotates(eqn: Equation) -> bool:
    return (
        eqn.primitive.name in {"shard_map", *MARKS}
        or _compat.has_mesh_in_context(eqn)
        or any(_shardings(eqn))
        or not _compat.has_default_sharding(eqn.params)
    )


def _is_on_mesh(x: Array) -> bool:
    """Return whether a constant of a model is an array on a mesh whose values this process can read."""
    typed = isinstance(x, jax.Array) and not jax.typeof(x).sharding.mesh.empty
    return typed and x.is_fully_addressable and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)


def _shardings(eqn: Equation) -> list[jax.sharding.NamedSharding]:
    """The shardings that an equation asks for, of its operands or its results."""
    values = [x for value in eqn.params.values() for x in (value if isinstance(value, (tuple, list)) else (value,))]
    return [x for x in values if isinstance(x, jax.sharding.NamedSharding)]


def without_mesh(aval: AbstractArray) -> jax.ShapeDtypeStruct:
    """The shape and the element type of an array, whatever mesh it was traced for."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def evaluate(eqn: Equation, operands: Sequence[Array], shape: Mapping[str, int]) -> list[Array]:
    """Evaluate an equation on the operands that are not literals; in the context of a mesh, as if traced in it."""
    if jax.sharding.get_abstract_mesh().empty:
        return _compat.evaluate_equation(eqn, operands)
    return list(_Rewriter(shape).apply(eqn, all_operands(eqn, operands)))


@dataclass(frozen=True)
class _Rewriter:
    """Evaluates programs with the annotations over the axes of ``shape`` alone, and without axes of size 1."""

    shape: Mapping[str, int]
    unbound: frozenset[str] = frozenset()
    explicit: tuple[str, ...] = ()

    def program(self, program: AnyJaxpr) -> ClosedJaxpr:
        """Trace a program again."""
        avals = [without_mesh(v.aval) for v in _compat.open_jaxpr(program)[0].invars]
        return jax.make_jaxpr(lambda *values: self.run(program, values))(*avals)

    def run(self, program: AnyJaxpr, values: Sequence[Array]) -> list[Array]:
        """Evaluate a program."""
        jaxpr, consts = _compat.open_jaxpr(program)
        known = [cast(Array, np.asarray(x)) if _is_on_mesh(x) else x for x in consts]
        alone = _compat.with_constants(jaxpr, known)
        return evaluate_otherwise(alone, values, self.apply, _without_mesh)

    def apply(self, eqn: Equation, values: Sequence[Array]) -> Sequence[Array]:
        """Evaluate an equation."""
        name, params = eqn.primitive.name, eqn.params
        if not self.unbound.isdisjoint(names_in(eqn)):
            return evaluate_alone(eqn, values, self.unbound, replace(self, unbound=frozenset()).apply)
        if name == "sharding_constraint" and self.shape:
            spec = kept_spec(params["sharding"].spec, self.shape)
            if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:  # in the derivative of an operator
                return [jax.sharding.reshard(values[0], spec)]
            return [jax.lax.with_sharding_constraint(values[0], jax.sharding.NamedSharding(self._mesh, spec))]
        if name == "reshard":
            return self._placed(values[:1], params["dst_sharding"])
        if name in MARKS:
            return values[:1]
        if name == "device_put" and _shardings(eqn):
            return values
        asked = {key: params[key] for key in _RESULTS if isinstance(params.get(key), jax.sharding.NamedSharding)}
        if asked:
            plain = eqn.replace(params={**params, **dict.fromkeys(asked)})
            return self._placed(self.apply(plain, values), *asked.values())
        if name in _UNTYPED:
            return [_UNTYPED[name](*values, **params)]
        if name == "shard_map":
            return self._run_shards(eqn, values)
        if name in JITS and not _compat.has_default_sharding(params):
            return self.run(params["jaxpr"], values)
        if name == "custom_jvp_call" and self.explicit:
            return self._with_rule(eqn, values)
        if name in BODIES:
            params = {key: with_programs(value, self.program) for key, value in params.items()}
        operands = [_compat.variable(atom.aval) for atom in eqn.invars]
        alone = _compat.in_current_mesh(eqn.replace(params=params, invars=operands))
        return _compat.evaluate_equation(alone, values)

    def _with_rule(self, eqn: Equation, values: Sequence[Array]) -> Sequence[Array]:
        """Evaluate a call of a ``jax.custom_jvp`` function, whose rule knows the types of explicit axes."""
        varied = [k for k, x in enumerate(values) if jnp.issubdtype(x.dtype, jnp.inexact)]

        @jax.custom_jvp
        def function(*operands: Array) -> list[Array]:
            return list(replace(self, explicit=()).apply(eqn, operands))

        @function.defjvp
        def rule(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[list[Array], list[Array]]:
            def derivative(*operands: Array) -> tuple[list[Array], list[Array]]:
                def primal(*changed: Array) -> list[Array]:
                    given = replaced(operands[: len(values)], varied, changed)
                    return _compat.evaluate_equation(eqn, without_literals(eqn, given))

                return jax.jvp(primal, [operands[k] for k in varied], list(operands[len(values) :]))

            operands = [*primals, *(tangents[k] for k in varied)]
            with _compat.explicit_axes(dict.fromkeys(self.explicit, 1)):
                closed = jax.make_jaxpr(derivative)(*(without_mesh(jax.typeof(x)) for x in operands))
            results = self.run(closed, operands)
            return results[: len(eqn.outvars)], results[len(eqn.outvars) :]

        return function(*values)

    def _placed(self, values: Sequence[Array], sharding: jax.sharding.NamedSharding) -> list[Array]:
        """Values as an explicit sharding splits them over axes that are kept, if it does."""
        spec = kept_spec(sharding.spec, self.shape)
        if not _mentioned(spec):
            return list(values)
        return [jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(self._mesh, spec)) for x in values]

    @property
    def _mesh(self) -> AbstractMesh:
        return Submesh(self.shape).abstract()

    def _run_shards(self, eqn: Equation, values: Sequence[Array]) -> list[Array]:
        """The results of a ``shard_map``: over axes that are kept as it is, all shards of others as one ``vmap``."""
        params = eqn.params
        all_sizes = {axis: params["mesh"].shape[axis] for axis in _manual_axes(eqn)}
        kept = {axis for axis, size in all_sizes.items() if self.shape.get(axis) == size}
        sizes = {axis: size for axis, size in all_sizes.items() if axis not in kept}
        inside = replace(self, unbound=self.unbound - set(all_sizes))

        def shard(*blocks: Array) -> list[Array]:
            return inside.run(params["jaxpr"], blocks)

        function: Callable[..., list[Array]] = shard
        if kept:
            inputs, outputs = ([kept_spec(spec, kept) for spec in params[side]] for side in ("in_specs", "out_specs"))
            function = jax.shard_map(
                shard, mesh=self._mesh, in_specs=tuple(inputs), out_specs=outputs, axis_names=kept, check_vma=False
            )
        for axis in reversed(sizes):
            split = tuple(0 if sizes[axis] > 1 and axis in _mentioned(spec) else None for spec in params["in_specs"])
            function = jax.vmap(function, in_axes=split, out_axes=0, axis_name=axis, axis_size=sizes[axis])
        blocks = [_blocks(x, spec, sizes) for x, spec in zip(values, params["in_specs"], strict=True)]
        try:
            results = function(*blocks)
        except PartitionError:
            raise
        except Exception as error:
            axes = ", ".join(f"'{axis}' ({size})" for axis, size in sizes.items())
            raise PartitionError(
                f"The model calls jax.shard_map over the mesh axes {axes}, over which stages are not sharded. The "
                f"shards run there as one jax.vmap with these axis names, which JAX cannot do here: {error} Compute "
                "this part of the model without shard_map when it is in a pipeline."
            ) from error
        return [_whole(x, spec, sizes) for x, spec in zip(results, params["out_specs"], strict=True)]


def _blocks(x: Array, spec: jax.sharding.PartitionSpec, sizes: Mapping[str, int]) -> Array:
    """``[N, ...] -> [n, N / n, ...]``: one block for each shard, the axes of the mesh first and in its order."""
    shape: list[int] = []
    place: dict[str, int] = {}
    kept = []
    for length, axes in zip(x.shape, axes_by_dimension(spec, x.ndim), strict=True):
        mine = [axis for axis in axes if sizes.get(axis, 1) > 1]
        place.update((axis, len(shape) + k) for k, axis in enumerate(mine))
        kept.append(len(shape) + len(mine))
        counts = [sizes[axis] for axis in mine]
        shape += [*counts, length // math.prod(counts)]
    order = [*(place[axis] for axis in sizes if axis in place), *kept]
    return jax.lax.transpose(jax.lax.reshape(x, shape), order) if place else x


def _whole(x: Array, spec: jax.sharding.PartitionSpec, sizes: Mapping[str, int]) -> Array:
    """``[n, ..., N / n, ...] -> [N, ...]``; of axes that the result does not vary over, the first shard's."""
    mentioned = [axis for axis in sizes if axis in _mentioned(spec) and sizes[axis] > 1]
    x = x[tuple(slice(None) if axis in mentioned else 0 for axis in sizes)]
    order: list[int] = []
    shape = []
    for k, axes in enumerate(axes_by_dimension(spec, x.ndim - len(mentioned))):
        mine = [mentioned.index(axis) for axis in axes if axis in mentioned] + [len(mentioned) + k]
        order += mine
        shape.append(math.prod(x.shape[d] for d in mine))
    return jnp.reshape(jnp.transpose(x, order), shape)


def _manual_axes(eqn: Equation) -> list[str]:
    """The axes over which a ``shard_map`` maps, in the order of its mesh."""
    return [axis for axis in eqn.params["mesh"].axis_names if axis in eqn.params["newly_manual_axes"]]


def _mentioned(spec: jax.sharding.PartitionSpec) -> set[str]:
    return {axis for axes in spec for axis in axis_names(axes)}


def _without_mesh(literal: Literal) -> Array:
    """The value of a literal; its type may name the mesh in whose context it was traced, that of a copy does not."""
    return literal.val.copy() if isinstance(literal.val, np.ndarray) else literal.val
