"""Random programs under random legal storage plans; ``jax.vjp`` of the same function gives the expected values.

A program is a list of steps over a growing pool of small arrays. Every expected gradient comes from plain JAX.
Where bits are compared, both sides run operator by operator (``jax.disable_jit``): a fused program may contract a
product and a sum, and then rounds once instead of twice. ``scan``, ``cond`` and ``checkpoint`` stay whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jax import lax

from jaxpipe import memory_encoded, residual_report, without_encoding
from jaxpipe.graph.allowed_codecs import CODECS, parse
from jaxpipe.graph.graph import Graph, is_differentiable, trace
from jaxpipe.graph.primitives import VIEWS
from jaxpipe.residuals import vjp_program
from jaxpipe.residuals.backward_graph import BackwardGraph, build_backward_graph
from jaxpipe.residuals.choose_formats import ResidualPlan, check_plan, fallback, smallest_format
from jaxpipe.residuals.codecs import CSR, Bitmap
from jaxpipe.residuals.codecs.keep import KEEP
from jaxpipe.residuals.stored_formats import Derived, Format
from tests.support.backward_parts import backward_in_parts


Array = jax.Array

#: A step whose result has more elements is left out.
LARGEST = 800


@dataclass
class Scope:
    """The operands of a step besides arrays of the pool. Without ``given``, it records the weights that are read."""

    key: Array
    index: Array
    given: Sequence[Array] | None = None
    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def weight(self, *shape: int) -> Array:
        self.shapes.append(shape)
        return jnp.zeros(shape) if self.given is None else self.given[len(self.shapes) - 1]


Step = Callable[[Scope, Array, Array, int], Array]


def image(x: Array) -> Array:
    """Any array as ``[batch, height, width, channels]``."""
    return x if x.ndim == 4 else x.reshape(x.shape[0], -1, 1, 1)


def flat(x: Array) -> Array:
    """Any array as ``[batch, features]``."""
    return x.reshape(x.shape[0], -1)


def conv(scope: Scope, x: Array, y: Array, n: int) -> Array:
    x = image(x)
    kernel = scope.weight(min(3, x.shape[1]), min(1 + n % 3, x.shape[2]), x.shape[3], 3)
    padding, layout = ("SAME", "VALID")[n // 2 % 2], ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1 + n % 2, 1 + n % 2), padding, dimension_numbers=layout)


def max_pool(scope: Scope, x: Array, y: Array, n: int) -> Array:
    x = image(x)
    height, width = (2 + n % 2, 2 + n // 2 % 2) if n < 6 else (5, 5)
    window = (1, min(height, x.shape[1]), min(width, x.shape[2]), 1)
    strides, padding = (1, 1 + n % 3, 1 + (n + 1) % 3, 1), ("SAME", "VALID")[n // 4]
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)


def mixed_pool(scope: Scope, x: Array, y: Array, n: int) -> Array:
    """Max-pooling over every dimension, with uneven padding."""
    window = [min(size, 1 + (n + k) % 3) for k, size in enumerate(x.shape)]
    padding = [((w - 1) * (n % 2), (w - 1) * (n // 2 % 2)) for w in window]
    return lax.reduce_window(x, -jnp.inf, lax.max, window, [1 + (n + k) % 2 for k in range(x.ndim)], padding)


def batch_norm(scope: Scope, x: Array, y: Array, n: int) -> Array:
    axes = tuple(range(x.ndim - 1))
    unit = (x - x.mean(axes)) * lax.rsqrt(x.var(axes) + 1e-2)
    return unit * scope.weight(x.shape[-1]) + scope.weight(x.shape[-1]) if n % 2 else unit


def layer_norm(scope: Scope, x: Array, y: Array, n: int) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-2) * scope.weight(x.shape[-1])


def dropout(scope: Scope, x: Array, y: Array, n: int) -> Array:
    mask = jax.random.bernoulli(jax.random.fold_in(scope.key, n), 0.75, x.shape)
    return jnp.where(mask, x / 0.75, 0.0)


def attention(scope: Scope, x: Array, y: Array, n: int) -> Array:
    q, k = flat(x), flat(y)
    return jnp.einsum("bc,ci->bi", jax.nn.softmax(jnp.einsum("bi,ci->bc", q, k) * 0.1), k)


def embedding(scope: Scope, x: Array, y: Array, n: int) -> Array:
    rows = flat(x) if n % 2 else scope.weight(4, 3)
    return jnp.take(rows, scope.index % rows.shape[0], axis=0, mode=("fill", "clip")[n // 2 % 2])


def scan(scope: Scope, x: Array, y: Array, n: int) -> Array:
    scale = scope.weight(x.shape[-1])

    def body(carry: Array, row: Array) -> tuple[Array, Array]:
        carry = lax.max(carry * scale, row)
        return carry, carry * row

    last, rows = lax.scan(body, x[0] * 0.5, x)
    return rows if n % 2 else rows * last


def two_results(x: Array, y: Array) -> tuple[Array, Array]:
    return lax.cond(x.sum() > 0, lambda a, b: (a * 2.0, b * b), lambda a, b: (lax.sin(b), a), x, y)


@jax.custom_vjp
def unlike_its_gradient(x: Array) -> Array:
    return x * 2.0


@jax.custom_vjp
def deaf_loss(x: Array) -> Array:
    """A hand-written loss: its gradient does not look at the cotangent."""
    return jnp.square(x).sum()


@jax.custom_jvp
def two_terms(x: Array) -> Array:
    """Its derivative uses the tangent twice."""
    return jnp.where(x > 0, 1.0, -1.0) * x


@jax.custom_jvp
def own_relu(x: Array) -> Array:
    """A function of the form of ``jax.nn.relu``."""
    return lax.max(x, 0.0)


unlike_its_gradient.defvjp(lambda x: (x * 2.0, x > 0.25), lambda keep, g: (jnp.where(keep, g * 3.0, 0.0),))
deaf_loss.defvjp(lambda x: (jnp.square(x).sum(), 2.0 * x), lambda gradient, g: (gradient,))
two_terms.defjvp(lambda x, t: (two_terms(*x), t[0] * x[0] + t[0] * 0.3))
own_relu.defjvp(lambda x, t: (own_relu(*x), lax.select(x[0] > 0, t[0], lax.full_like(t[0], 0))))


def of(function: Callable[..., Array], operands: int = 1) -> Step:
    """A function of arrays alone, as a step."""
    return lambda scope, x, y, n: function(*(x, y)[:operands])


#: Name -> ``(scope, x, y, n) -> result``; ``y`` has the shape of ``x``, and ``n`` in 0..7 picks a variant.
STEPS: dict[str, Step] = {
    "relu": of(jax.nn.relu),
    "own_relu": of(own_relu),
    "relu_max_pool": lambda s, x, y, n: max_pool(s, (own_relu if n % 4 == 3 else jax.nn.relu)(image(x)), y, n),
    "max_pool": max_pool,
    "mixed_pool": mixed_pool,
    "mean_pool": lambda s, x, y, n: lax.reduce_window(x, 0.0, lax.add, (1, 2) * (x.ndim // 2), (1,) * x.ndim, "SAME"),
    "conv": conv,
    "dense": lambda s, x, y, n: flat(x) @ s.weight(flat(x).shape[-1], 3 + n) if n % 2 else x @ s.weight(x.shape[-1], 4),
    "bias": lambda s, x, y, n: x + s.weight(x.shape[-1]),
    "relu6": of(jax.nn.relu6),
    "leaky_relu": of(jax.nn.leaky_relu),
    "maximum": of(lambda x: jnp.maximum(x, 0)),
    "gelu": lambda s, x, y, n: jax.nn.gelu(x, approximate=n % 2 == 0),
    "silu": of(jax.nn.silu),
    "softplus": of(jax.nn.softplus),
    "tanh": of(jnp.tanh),
    "sigmoid": of(jax.nn.sigmoid),
    "exp": of(lambda x: jnp.exp(x * 0.1)),
    "abs": of(jnp.abs),
    "square": lambda s, x, y, n: x * x if n % 2 else jnp.square(x),
    "mul": of(lambda x, y: x * y, 2),
    "add": of(lambda x, y: x + y, 2),
    "sub": of(lambda x, y: x - y, 2),
    "div": of(lambda x, y: x / (1.0 + y * y), 2),
    "batch_norm": batch_norm,
    "layer_norm": layer_norm,
    "softmax": lambda s, x, y, n: jax.nn.softmax(x, axis=n % x.ndim),
    "log_softmax": of(jax.nn.log_softmax),
    "dropout": dropout,
    "where": of(lambda x, y: jnp.where(x > y * 0.5, x, y * 2.0), 2),
    "concatenate": lambda s, x, y, n: jnp.concatenate([x, y], n % x.ndim),
    "slice": lambda s, x, y, n: x[:, n % 2 : 4],
    "pad": lambda s, x, y, n: jnp.pad(x, [(0, 0), (n % 2, 1)] + [(0, 0)] * (x.ndim - 2), constant_values=float(n)),
    "reshape": lambda s, x, y, n: flat(x) if n % 2 else image(x),
    "transpose": lambda s, x, y, n: jnp.swapaxes(x, 1, -1) if n % 2 else jnp.flip(x, 1),
    "reduce_sum": lambda s, x, y, n: x.sum(n % x.ndim, keepdims=True) * 0.5,
    "reduce_mean": lambda s, x, y, n: x - x.mean(n % x.ndim, keepdims=True),
    "reduce_max": lambda s, x, y, n: x - x.max(n % x.ndim, keepdims=True),
    "cumsum": lambda s, x, y, n: jnp.cumsum(x, n % x.ndim),
    "sort": lambda s, x, y, n: jnp.sort(x, n % x.ndim),
    "embedding": embedding,
    "gather": lambda s, x, y, n: jnp.take_along_axis(flat(x), s.index[None, :] % flat(x).shape[1], axis=1),
    "attention": attention,
    "jit": of(jax.jit(lambda x, y: jnp.tanh(x) * y + x), 2),
    "checkpoint": of(jax.checkpoint(lambda x, y: lax.sin(lax.sin(x)) * y), 2),
    "scan": scan,
    "cond": lambda s, x, y, n: lax.cond(x.sum() > 0, lambda a, b: a * b, lambda a, b: lax.sin(a), x, y),
    "two_results": lambda s, x, y, n: two_results(x, y)[n % 2],
    "custom_vjp": of(unlike_its_gradient),
    "deaf_loss": of(lambda x, y: x + deaf_loss(y), 2),
    "custom_jvp": of(two_terms),
    "encoded": of(memory_encoded(lambda x, y: jax.nn.relu(x) * y), 2),
    "constant": lambda s, x, y, n: x * jnp.sin(np.arange(x.shape[-1], dtype=np.float32)),
    "stop_gradient": of(lambda x, y: lax.stop_gradient(x) + y, 2),
}

#: The grammar draws from these; what the fused rules are for comes up often.
NAMES = [*STEPS, *["relu_max_pool"] * 6, *["relu", "max_pool", "conv"] * 2]


@dataclass(frozen=True)
class Case:
    """A program, its data and a storage plan.

    Attributes:
      steps: ``(name, x, y, n)``; ``x`` counts back in the pool, ``y`` among its arrays of the shape of ``x``.
      results: what is returned, counted back in the pool.
      values: how the data is drawn; see ``draw_array``.
      seed: of the data and of the plan.
      parameters: the weights are parameters of the graph.
      typed_key: the random key is of the new kind.
      partly: only some inputs are differentiated.
      recomputed: the share of a plan's tensors that is recomputed.
      codecs: names from ``CODECS``.
    """

    steps: tuple[tuple[str, int, int, int], ...]
    results: tuple[int, ...]
    values: str
    seed: int
    parameters: bool
    typed_key: bool
    partly: bool
    recomputed: float
    codecs: frozenset[str]

    def run(self, scope: Scope, *inputs: Array) -> list[Array]:
        pool = list(inputs)
        for name, x, y, n in self.steps:
            operand = pool[-1 - x % len(pool)]
            alike = [other for other in pool if other.shape == operand.shape]
            value = STEPS[name](scope, operand, alike[-1 - y % len(alike)], n)
            if value.size <= LARGEST:
                pool.append(value)
        return [pool[-1 - k % len(pool)] for k in self.results]

    def function(self, weights: Sequence[Array], x: Array, h: Array, key: Array, index: Array) -> list[Array]:
        """The program, as a user would write it."""
        return self.run(Scope(key, index, weights), x, h)

    def flat_function(self, *leaves: Array) -> list[Array]:
        return self.function(leaves[:-4], *leaves[-4:])

    def arguments(self) -> list[Array]:
        """The weights, two arrays, a random key and indices."""
        rng = np.random.default_rng(self.seed)
        x, h = (jnp.asarray(draw_array(rng, shape, self.values)) for shape in ((2, 6, 6, 3), (2, 8)))
        key = jax.random.key(self.seed) if self.typed_key else jax.random.PRNGKey(self.seed)
        scope = Scope(key, jnp.array(rng.integers(0, 8, 3), jnp.int32))
        jax.eval_shape(lambda: self.run(scope, x, h))
        weights = [jnp.asarray(draw_array(rng, shape, self.values)) * 0.5 for shape in scope.shapes]
        return [*weights, x, h, key, scope.index]

    def moving(self, leaves: Sequence[Array]) -> list[int]:
        """Positions of the arguments to differentiate."""
        rng, floating = np.random.default_rng(self.seed), len(leaves) - 2
        chosen = rng.permutation(floating)[: rng.integers(1, floating + 1)]
        return sorted(chosen.tolist()) if self.partly else list(range(floating))

    def backward_graph(self, leaves: Sequence[Array]) -> BackwardGraph:
        graph = trace(self.flat_function, *leaves)
        if self.parameters:
            graph = graph.with_parameters([k < len(leaves) - 4 for k in range(len(leaves))])
        return build_backward_graph(graph, [graph.inputs[k] for k in self.moving(leaves)], policy=parse(self.codecs))

    def plan(self, backward_graph: BackwardGraph) -> ResidualPlan:
        """A random plan among the legal ones: any operator without side effects may run again."""
        rng, graph = np.random.default_rng(self.seed), backward_graph.graph
        producers = {t: op for op in graph.operators for t in op.outputs}
        known = always_known(graph)
        formats: dict[int, Format] = {}
        pending = list(backward_graph.needs)
        while pending:
            t = pending.pop()
            if t in formats or t in known:
                continue
            op = producers.get(t)
            if op is None or op.has_effects or rng.random() >= self.recomputed:
                formats[t] = smallest_format(graph, t, self.codecs)
            else:
                formats[t] = Derived.ALIAS if op.name in VIEWS else Derived.RECOMPUTE
                pending.extend(op.inputs)
        sparse = [codec for codec in (Bitmap, CSR) if codec.name in self.codecs]
        for t in [t for t in formats if formats[t] == KEEP and t in producers] if sparse else []:
            tensor = graph.tensors[t]
            if is_differentiable(tensor.aval) and rng.random() < 0.7:
                # Room for everything, for nothing, or in between: what does not fit is computed again.
                chosen = sparse[rng.integers(len(sparse))](int(rng.choice([0, tensor.size // 2, tensor.size])))
                formats = with_sparse(graph, formats, t, chosen)
        return ResidualPlan(formats)


def with_sparse(graph: Graph, formats: dict[int, Format], t: int, chosen: Format) -> dict[int, Format]:
    """The formats with a sparse one for ``t`` and the inputs of its overflow path; unchanged without such a path."""
    trial = {**formats, t: chosen}
    known = always_known(graph)
    program, leaves = fallback(graph, t, ResidualPlan(trial), known)
    written = {u for op in program for u in op.outputs}
    lost = {u for op in program for u in op.inputs} - written - known - set(leaves)
    if any(op.has_effects for op in program) or not lost <= set(graph.inputs):
        return formats
    return {**trial, **dict.fromkeys(lost, KEEP)}


def cases(values: Sequence[str]) -> st.SearchStrategy[Case]:
    """Random cases; failures shrink to short programs on their latest arrays."""
    back = st.sampled_from([0, 0, 0, 0, 1, 2, 3, 4])
    step = st.tuples(st.sampled_from(NAMES), back, back, st.integers(0, 7))
    return st.builds(
        Case,
        steps=st.lists(step, min_size=1, max_size=8).map(tuple),
        results=st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), min_size=1, max_size=3).map(tuple),
        values=st.sampled_from(values),
        seed=st.integers(0, 2**16),
        recomputed=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        codecs=st.frozensets(st.sampled_from(sorted(CODECS))),
    )


def draw_array(rng: np.random.Generator, shape: tuple[int, ...], values: str) -> np.ndarray:
    """Data: ``normal``; ``ties`` from few values; ``zero`` maps; ``special`` with NaN, infinities, signed zeros."""
    x = rng.normal(size=shape).astype(np.float32)
    if values == "ties":
        x = np.round(x)
    if values == "zero":
        x = np.where(rng.random(shape[-1:]) < 0.7, np.float32(0), x)
    if values == "special":
        rare = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, -1.0, 3e38, 1e-40], np.float32)
        x = np.where(rng.random(shape) < 0.3, rng.choice(rare, shape), x)
    return x


def always_known(graph: Graph) -> set[int]:
    """Constants, and what follows from parameters and numbers alone."""
    known = set(graph.parameters) | {t for t, value in graph.constants.items() if np.size(value) == 1}
    for op in graph.operators:
        if set(op.inputs) <= known and not op.has_effects:
            known.update(op.outputs)
    return known | set(graph.constants)


def read_in_backward(backward_graph: BackwardGraph, plan: ResidualPlan) -> set[int]:
    """Tensors that some backward step reads, or that a tensor recomputed for one is made of."""
    producers = {t: op for op in backward_graph.graph.operators for t in op.outputs}
    known = always_known(backward_graph.graph)
    read: set[int] = set()

    def visit(t: int) -> None:
        if t not in read and t not in known:
            read.add(t)
            exact = t in plan.codecs and t not in plan.uncertain
            for source in () if exact else producers[t].inputs:
                visit(source)

    for consumer in backward_graph.steps:
        for t in consumer.needs:
            visit(t)
    return read


def plain_vjp(
    case: Case, leaves: Sequence[Array], moving: Sequence[int], cotangents: Sequence[Array | None]
) -> tuple[list[Array], list[Array]]:
    """All outputs, and gradients of those outputs that have a cotangent: traced by ``jax.vjp``, then run eagerly.

    Of the jitted function, because ``jnp`` functions are jitted inside, and inlined when ``function`` is traced but
    not when it is differentiated: that alone changes the order in which JAX sums cotangents.
    """

    def derivative(leaves: Sequence[Array], seeds: Sequence[Array]) -> tuple[list[Array], Sequence[Array]]:
        def function(*some: Array) -> tuple[list[Array], list[Array]]:
            varied = dict(zip(moving, some, strict=True))
            outputs = jax.jit(case.flat_function)(*(varied.get(k, leaf) for k, leaf in enumerate(leaves)))
            return [y for y, ct in zip(outputs, cotangents, strict=True) if ct is not None], outputs

        _, pullback, outputs = jax.vjp(function, *(leaves[k] for k in moving), has_aux=True)
        return outputs, pullback(seeds)

    seeds = [ct for ct in cotangents if ct is not None]
    with without_encoding():
        traced = jax.make_jaxpr(derivative)(leaves, seeds)
    with jax.disable_jit():
        results = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *leaves, *seeds)
    return results[: len(cotangents)], results[len(cotangents) :]


def assert_same_bits(actual: Sequence[Array | None], expected: Sequence[Array]) -> None:
    """Equal bits, the sign of zero included; None stands for zeros.

    Of a NaN only the position counts: which sign and payload come out of ``NaN + NaN`` depends on the order.
    """
    for k, (a, b) in enumerate(zip(actual, expected, strict=True)):
        b = np.asarray(b)
        a = np.zeros(b.shape, b.dtype) if a is None else np.asarray(a)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        different = (a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))
        assert not different.any(), f"array {k}: {a[different][:8]} instead of {b[different][:8]}"


def check_gradients(case: Case) -> None:
    """Gradients, whole or in two parts, have the bits of ``jax.vjp``; the stash has the bytes of the plan."""
    leaves = case.arguments()
    backward_graph = case.backward_graph(leaves)
    built = vjp_program.assemble(backward_graph, case.plan(backward_graph))
    graph, wrt = backward_graph.graph, list(backward_graph.wrt)
    rng = np.random.default_rng(case.seed + 1)
    shapes = [backward_graph.source.tensors[t].shape for t in backward_graph.source.outputs]
    cotangents = [jnp.asarray(draw_array(rng, shape, case.values)) for shape in shapes]
    seeds = [ct if k == 0 or rng.random() < 0.8 else None for k, ct in enumerate(cotangents)]
    parameters = [leaf for t, leaf in zip(graph.inputs, leaves, strict=True) if t in graph.parameters]

    with jax.disable_jit():
        outputs, stash = vjp_program.forward(built, leaves)
        whole = vjp_program.backward(built, parameters, stash, seeds)
        first, second = backward_in_parts(built, parameters, stash, seeds)

    expected_outputs, expected = plain_vjp(case, leaves, case.moving(leaves), seeds)
    assert_same_bits(outputs, expected_outputs)
    assert_same_bits(whole, expected)
    parts = [*built.input_part, *built.weight_part]
    assert sorted(parts) == wrt
    assert_same_bits([(first | second)[t] for t in wrt], expected)
    assert sum(part.nbytes for parts in stash for part in parts) == built.plan.stash_bytes(graph)
    actual = [[(part.shape, part.dtype) for part in parts] for parts in stash]
    assert actual == [[(aval.shape, aval.dtype) for aval in avals] for avals in built.stash_avals]


def check_necessity(case: Case) -> None:
    """Whatever a legal plan stores is read in the backward pass; with one choice less or more it is not legal."""
    backward_graph = case.backward_graph(case.arguments())
    plan = case.plan(backward_graph)
    check_plan(backward_graph, plan)
    read = read_in_backward(backward_graph, plan)
    assert set(plan.stored) <= read
    for t in range(len(backward_graph.graph.tensors)):
        formats = dict(plan.formats)
        if formats.pop(t, None) is None:
            if t in read:  # on the overflow path of a sparse tensor: storing it is legal, and shortens the path
                continue
            formats[t] = KEEP
        with pytest.raises(ValueError, match="storage plan"):
            check_plan(backward_graph, ResidualPlan(formats))


def check_report(case: Case) -> None:
    """A report counts the bytes that ``memory_encoded`` carries from the forward to the backward pass."""
    # What follows from compile-time constants alone is no row of a report.
    case = replace(case, steps=tuple(step for step in case.steps if step[0] != "constant"))
    *weights, x, h, key, index = leaves = case.arguments()
    encoded = memory_encoded(case.function, codecs=case.codecs)
    _, pullback = jax.vjp(lambda *moving: encoded(*moving, key, index), weights, x, h)
    arguments = set(map(id, leaves))
    carried = sum(leaf.nbytes for leaf in jax.tree.leaves(pullback) if id(leaf) not in arguments)
    assert residual_report(encoded, weights, x, h, key, index).total_bytes == carried


def check_compiled(case: Case) -> None:
    """Compiled, encoded and plain gradients agree up to rounding: XLA may fuse the two programs differently."""
    *weights, x, h, key, index = case.arguments()

    def gradient(function: Callable[..., list[Array]]) -> np.ndarray:
        def loss(weights: list[Array], x: Array, h: Array) -> Array:
            return sum(jnp.vdot(y, jnp.cos(jnp.arange(y.size))) for y in function(weights, x, h, key, index))

        leaves = jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1, 2)))(weights, x, h))
        return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in leaves])

    with without_encoding():
        expected = gradient(case.function)
    assume(np.isfinite(expected).all())
    actual = gradient(memory_encoded(case.function, codecs=case.codecs))
    # A few units of the last place (6e-8), times what a dozen operators in a row may make of them.
    assert np.linalg.norm(actual - expected) <= 2e-6 * np.linalg.norm(expected)


#: Check -> examples in the default run, examples in the slow run, kinds of values.
CHECKS = {
    check_gradients: (5, 1500, ["normal", "ties", "zero", "special"]),
    check_necessity: (40, 2000, ["normal"]),
    check_report: (6, 500, ["normal"]),
    check_compiled: (10, 500, ["normal"]),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_property(check: Callable[[Case], None]) -> None:
    examples, _, values = CHECKS[check]
    profile = settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    profile(given(cases(values))(check))()


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_property_at_length(check: Callable[[Case], None]) -> None:
    _, examples, values = CHECKS[check]
    profile = settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    profile(given(cases(values))(check))()
