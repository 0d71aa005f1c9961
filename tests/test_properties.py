"""Random programs under random legal storage plans; ``jax.vjp`` of the same function gives the expected values.

A program is a list of steps over a growing pool of small arrays. Every expected gradient comes from plain JAX.
Compared bit for bit, both sides run one XLA program for each operator: a fused program may contract a product and a
sum into one operation, and rounds otherwise. ``jax.disable_jit`` does that; ``scan`` and ``cond`` stay operators.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

from jaxpipe import memory_encoded, residual_report, stage, without_encoding
from jaxpipe.demand import Linearization, linearize
from jaxpipe.graph import Graph, trace
from jaxpipe.storage import CODECS, Storage, StoragePlan, check_plan, stored_form
from jaxpipe.work import VIEWS


Array = Any

# --- Programs ---------------------------------------------------------------------------------------------------------

#: A step whose result has more elements is left out.
LARGEST = 800


@dataclass
class Scope:
    """What a step may read besides arrays of the pool. Without ``given``, records the weights that are asked for."""

    key: Array
    index: Array
    given: Sequence[Array] | None = None
    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def weight(self, *shape: int) -> Array:
        self.shapes.append(shape)
        return jnp.zeros(shape) if self.given is None else self.given[len(self.shapes) - 1]


def image(x: Array) -> Array:
    """Any array as ``[batch, height, width, channels]``."""
    return x if x.ndim == 4 else x.reshape(x.shape[0], -1, 1, 1)


def flat(x: Array) -> Array:
    """Any array as ``[batch, features]``."""
    return x.reshape(x.shape[0], -1)


def conv(scope: Scope, x: Array, _: Array, n: int) -> Array:
    x = image(x)
    kernel = scope.weight(min(3, x.shape[1]), min(1 + n % 3, x.shape[2]), x.shape[3], 3)
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (1 + n % 2,) * 2, ("SAME", "VALID")[n // 2 % 2], dimension_numbers=layout
    )


def dense(scope: Scope, x: Array, _: Array, n: int) -> Array:
    x = flat(x) if n % 2 else x
    return x @ scope.weight(x.shape[-1], 3 + n)


def max_pool(_: Scope, x: Array, __: Array, n: int) -> Array:
    x = image(x)
    sides = (2 + n % 2, 2 + n // 2 % 2) if n < 6 else (5, 5)
    window = tuple(min(side, size) for side, size in zip(sides, x.shape[1:], strict=False))
    padding = ("SAME", "VALID")[n // 4 % 2]
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, *window, 1), (1, 1 + n % 3, 1 + (n + 1) % 3, 1), padding)


def mixed_pool(_: Scope, x: Array, __: Array, n: int) -> Array:
    """Max-pooling over every dimension, with uneven padding."""
    window = tuple(min(size, 1 + (n + k) % 3) for k, size in enumerate(x.shape))
    padding = [((w - 1) * (n % 2), (w - 1) * (n // 2 % 2)) for w in window]
    return lax.reduce_window(x, -jnp.inf, lax.max, window, tuple(1 + (n + k) % 2 for k in range(x.ndim)), padding)


def mean_pool(_: Scope, x: Array, __: Array, n: int) -> Array:
    x = image(x)
    window = (1, min(2, x.shape[1]), min(2 + n % 2, x.shape[2]), 1)
    return lax.reduce_window(x, 0.0, lax.add, window, (1, 1 + n % 2, 1, 1), ("SAME", "VALID")[n // 2 % 2]) / 4.0


def batch_norm(scope: Scope, x: Array, _: Array, n: int) -> Array:
    axes = tuple(range(x.ndim - 1))
    y = (x - x.mean(axes)) * lax.rsqrt(x.var(axes) + 1e-2)
    return y * scope.weight(x.shape[-1]) + scope.weight(x.shape[-1]) if n % 2 else y


def layer_norm(scope: Scope, x: Array, _: Array, __: int) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-2) * scope.weight(x.shape[-1])


def dropout(scope: Scope, x: Array, _: Array, n: int) -> Array:
    mask = jax.random.bernoulli(jax.random.fold_in(scope.key, n), 0.75, x.shape)
    return jnp.where(mask, x / 0.75, 0.0)


def attention(_: Scope, x: Array, y: Array, __: int) -> Array:
    q, k = flat(x), flat(y)
    return jnp.einsum("bc,ci->bi", jax.nn.softmax(jnp.einsum("bi,ci->bc", q, k) * 0.1), k)


def embedding(scope: Scope, x: Array, _: Array, n: int) -> Array:
    rows = flat(x) if n % 2 else scope.weight(4, 3)
    return jnp.take(rows, scope.index % rows.shape[0], axis=0, mode=("fill", "clip")[n // 2 % 2])


def gather(scope: Scope, x: Array, _: Array, __: int) -> Array:
    return jnp.take_along_axis(flat(x), scope.index[None, :] % flat(x).shape[1], axis=1)


def scan(scope: Scope, x: Array, _: Array, n: int) -> Array:
    scale = scope.weight(x.shape[-1])

    def body(carry: Array, row: Array) -> tuple[Array, Array]:
        carry = lax.max(carry * scale, row)
        return carry, carry * row

    last, rows = lax.scan(body, x[0] * 0.5, x)
    return rows if n % 2 else rows * last


def cond(_: Scope, x: Array, y: Array, __: int) -> Array:
    return lax.cond(x.sum() > 0, lambda a, b: a * b, lambda a, b: lax.sin(a), x, y)


@jax.custom_vjp
def clipped_gradient(x: Array) -> Array:
    """A user's ``custom_vjp``: not the derivative of what it computes."""
    return x * 2.0


clipped_gradient.defvjp(lambda x: (x * 2.0, x > 0.25), lambda keep, g: (jnp.where(keep, g * 3.0, 0.0),))


@jax.custom_jvp
def smooth_step(x: Array) -> Array:
    """A user's ``custom_jvp``."""
    return jnp.where(x > 0, 1.0, -1.0) * x


smooth_step.defjvp(lambda x, t: (smooth_step(*x), t[0] * (x[0] + 0.5)))


@jax.custom_jvp
def own_relu(x: Array) -> Array:
    """A user's ReLU, of the form of ``jax.nn.relu``."""
    return lax.max(x, 0.0)


own_relu.defjvp(lambda x, t: (own_relu(*x), lax.select(x[0] > 0, t[0], lax.full_like(t[0], 0))))


def step(function: Callable[..., Array], operands: int = 1) -> Callable[[Scope, Array, Array, int], Array]:
    """A function of arrays alone, as a step."""
    return lambda scope, x, y, n: function(*(x, y)[:operands])


#: Name -> ``(scope, x, y, n) -> result``; ``y`` has the shape of ``x``, and ``n`` in 0..7 picks a variant.
STEPS: dict[str, Callable[[Scope, Array, Array, int], Array]] = {
    "relu": step(jax.nn.relu),
    "own_relu": step(own_relu),
    "relu_max_pool": lambda s, x, y, n: max_pool(s, (own_relu if n % 4 == 3 else jax.nn.relu)(image(x)), y, n),
    "max_pool": max_pool,
    "mixed_pool": mixed_pool,
    "mean_pool": mean_pool,
    "conv": conv,
    "dense": dense,
    "bias": lambda s, x, y, n: x + s.weight(x.shape[-1]),
    "relu6": step(jax.nn.relu6),
    "leaky_relu": step(jax.nn.leaky_relu),
    "maximum": step(lambda x: jnp.maximum(x, 0)),
    "gelu": lambda s, x, y, n: jax.nn.gelu(x, approximate=n % 2 == 0),
    "silu": step(jax.nn.silu),
    "tanh": step(jnp.tanh),
    "sigmoid": step(jax.nn.sigmoid),
    "exp": step(lambda x: jnp.exp(x * 0.1)),
    "abs": step(jnp.abs),
    "square": lambda s, x, y, n: x * x if n % 2 else jnp.square(x),
    "cube": step(lambda x: x**3),
    "mul": step(lambda x, y: x * y, 2),
    "add": step(lambda x, y: x + y, 2),
    "sub": step(lambda x, y: x - y, 2),
    "max": step(jnp.maximum, 2),
    "div": step(lambda x, y: x / (1.0 + y * y), 2),
    "batch_norm": batch_norm,
    "layer_norm": layer_norm,
    "softmax": lambda s, x, y, n: jax.nn.softmax(x, axis=n % x.ndim),
    "log_softmax": step(jax.nn.log_softmax),
    "dropout": dropout,
    "where": step(lambda x, y: jnp.where(x > y * 0.5, x, y * 2.0), 2),
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
    "gather": gather,
    "attention": attention,
    "jit": step(jax.jit(lambda x, y: jnp.tanh(x) * y + x), 2),
    "checkpoint": step(jax.checkpoint(lambda x, y: lax.sin(lax.sin(x)) * y), 2),
    "scan": scan,
    "cond": cond,
    "custom_vjp": step(clipped_gradient),
    "custom_jvp": step(smooth_step),
    "encoded": step(memory_encoded(lambda x, y: jax.nn.relu(x) * y), 2),
    "constant": lambda s, x, y, n: x * jnp.sin(np.arange(x.shape[-1], dtype=np.float32)),
    "stop_gradient": step(lambda x, y: lax.stop_gradient(x) + y, 2),
}

#: The grammar draws from these; what the fused rules are for comes up often.
NAMES = [*STEPS, *["relu_max_pool"] * 6, *["relu", "max_pool", "conv"] * 2]


@dataclass(frozen=True)
class Case:
    """A program, its data and a storage plan, drawn by ``cases``.

    Attributes:
      steps: ``(name, x, y, n)``; ``x`` counts back in the pool, ``y`` among its arrays of the shape of ``x``.
      results: what is returned, counted back in the pool.
      values: how the data is drawn; see ``draw_array``.
      seed: of the data and of the plan.
      flags: whether the weights are parameters; whether the key is a typed one; whether to differentiate a part of the
        inputs only; whether pooling remembers positions.
      recomputed: how many of a plan's tensors are recomputed.
      codecs: names from ``CODECS``.
    """

    steps: tuple[tuple[str, int, int, int], ...]
    results: tuple[int, ...]
    values: str
    seed: int
    flags: tuple[bool, bool, bool, bool]
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
        key = jax.random.key(self.seed) if self.flags[1] else jax.random.PRNGKey(self.seed)
        index = jnp.array(rng.integers(0, 8, 3), jnp.int32)
        scope = Scope(key, index)
        jax.eval_shape(lambda: self.run(scope, x, h))
        weights = [draw_array(rng, shape, self.values) * np.float32(0.5) for shape in scope.shapes]
        return [*map(jnp.asarray, weights), x, h, key, index]

    def moving(self, leaves: Sequence[Array]) -> list[int]:
        """Positions of the arguments to differentiate: all floating ones, or a part of them."""
        floating = len(leaves) - 2
        rng = np.random.default_rng(self.seed)
        chosen = sorted(rng.permutation(floating)[: rng.integers(1, floating + 1)].tolist())
        return chosen if self.flags[2] else list(range(floating))

    def linearization(self, leaves: Sequence[Array]) -> Linearization:
        graph = trace(self.flat_function, *leaves)
        if self.flags[0]:
            graph = graph.with_parameters([k < len(leaves) - 4 for k in range(len(leaves))])
        return linearize(graph, [graph.inputs[k] for k in self.moving(leaves)], pool_index=self.flags[3])

    def plan(self, linearization: Linearization) -> StoragePlan:
        """A random plan among the legal ones: any operator without side effects may run again."""
        rng = np.random.default_rng(self.seed)
        graph = linearization.graph
        producers = {t: op for op in graph.operators for t in op.outputs}
        known = always_known(graph)
        choices: dict[int, Storage] = {}
        pending = [t for t in linearization.needs if t not in known]
        while pending:
            t = pending.pop()
            if t in choices:
                continue
            op = producers.get(t)
            if op is None or op.has_effects or rng.random() >= self.recomputed:
                choices[t] = stored_form(graph.tensors[t], self.codecs)
            else:
                choices[t] = Storage.ALIAS if op.name in VIEWS else Storage.RECOMPUTE
                pending.extend(u for u in op.inputs if u not in known)
        return StoragePlan(choices)


def draw_array(rng: np.random.Generator, shape: tuple[int, ...], values: str) -> np.ndarray:
    """Data: ``normal``; ``ties`` from few values; ``zero`` maps; ``special`` with NaN, infinities, signed zeros."""
    x = rng.normal(size=shape).astype(np.float32)
    if values == "ties":
        x = np.round(x)
    if values == "zero":
        x = np.where(rng.random(shape[-1]) < 0.7, np.float32(0), x)
    if values == "special":
        rare = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, -1.0, 3e38, 1e-40], np.float32)
        x = np.where(rng.random(shape) < 0.3, rng.choice(rare, shape), x)
    return x


def cases(values: Sequence[str]) -> st.SearchStrategy[Case]:
    """Random cases; short programs first, so that failures shrink well."""
    back = st.sampled_from([0, 0, 0, 0, 1, 2, 3, 4])
    return st.builds(
        Case,
        steps=st.lists(st.tuples(st.sampled_from(NAMES), back, back, st.integers(0, 7)), min_size=1, max_size=8).map(
            tuple
        ),
        results=st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), min_size=1, max_size=3).map(tuple),
        values=st.sampled_from(values),
        seed=st.integers(0, 2**16),
        flags=st.tuples(*[st.booleans()] * 4),
        recomputed=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        codecs=st.frozensets(st.sampled_from(sorted(CODECS))),
    )


# --- Independent views of a plan and of the derivative ----------------------------------------------------------------


def always_known(graph: Graph) -> set[int]:
    """Constants, and what follows from parameters and numbers alone."""
    known = set(graph.parameters) | {t for t, value in graph.constants.items() if np.size(value) == 1}
    for op in graph.operators:
        if set(op.inputs) <= known and not op.has_effects:
            known.update(op.outputs)
    return known | set(graph.constants)


def read_in_backward(linearization: Linearization, plan: StoragePlan) -> set[int]:
    """Tensors that some backward step reads, or that a tensor recomputed for one is made of."""
    producers = {t: op for op in linearization.graph.operators for t in op.outputs}
    known = always_known(linearization.graph)
    found: set[int] = set()

    def visit(t: int) -> None:
        if t in found or t in known:
            return
        found.add(t)
        if plan.choices[t] in (Storage.RECOMPUTE, Storage.ALIAS):
            for source in producers[t].inputs:
                visit(source)

    for consumer in linearization.backward:
        for t in consumer.needs:
            visit(t)
    return found


def plain_vjp(
    case: Case, leaves: Sequence[Array], moving: Sequence[int], cotangents: Sequence[Array | None]
) -> tuple[list[Array], list[Array]]:
    """All outputs, and the gradients of those that have a cotangent; traced by ``jax.vjp`` and run eagerly."""

    def derivative(leaves: Sequence[Array], seeds: Sequence[Array]) -> tuple[list[Array], Sequence[Array]]:
        def function(*some: Array) -> tuple[list[Array], list[Array]]:
            full = list(leaves)
            for k, value in zip(moving, some, strict=True):
                full[k] = value
            outputs = jax.jit(case.flat_function)(*full)
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
    """Equal bits, the sign of zero included; None stands for zeros. Of a NaN only the position counts: which payload
    survives ``NaN + NaN`` is up to the machine operation.
    """
    for k, (a, b) in enumerate(zip(actual, expected, strict=True)):
        b = np.asarray(b)
        a = np.zeros(b.shape, b.dtype) if a is None else np.asarray(a)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        different = (a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))
        assert not different.any(), f"array {k}: {a[different][:8]} instead of {b[different][:8]}"


# --- Properties -------------------------------------------------------------------------------------------------------


def check_gradients(case: Case) -> None:
    """Gradients, whole or in two parts, have the bits of ``jax.vjp``; the stash has the bytes of the plan."""
    leaves, moving = (arguments := case.arguments()), case.moving(arguments)
    linearization = case.linearization(leaves)
    built = stage.assemble(linearization, case.plan(linearization))
    wrt, graph = linearization.wrt, linearization.graph
    rng = np.random.default_rng(case.seed + 1)
    avals = [linearization.source.tensors[t].aval for t in linearization.source.outputs]
    cotangents = [draw_array(rng, aval.shape, case.values) for aval in avals]
    seeds = [jnp.asarray(ct) if k == 0 or rng.random() < 0.8 else None for k, ct in enumerate(cotangents)]
    parameters = [leaf for t, leaf in zip(graph.inputs, leaves, strict=True) if t in graph.parameters]

    with jax.disable_jit():
        outputs, stash = stage.forward(built, leaves)
        whole = stage.backward(built, parameters, stash, seeds)
        first, saved = stage.backward_input(built, parameters, stash, seeds)
        second = stage.backward_weight(built, parameters, stash, saved)

    expected_outputs, expected = plain_vjp(case, leaves, moving, seeds)
    assert_same_bits(outputs, expected_outputs)
    assert_same_bits(whole, expected)
    assert sorted([*built.input_part, *built.weight_part]) == sorted(wrt)
    parts = dict(zip([*built.input_part, *built.weight_part], [*first, *second], strict=True))
    assert_same_bits([parts[t] for t in wrt], expected)
    assert sum(leaf.nbytes for leaf in stash) == built.storage.stash_bytes(graph)
    assert [(leaf.shape, leaf.dtype) for leaf in stash] == [(aval.shape, aval.dtype) for aval in built.stash_avals]


def check_necessity(case: Case) -> None:
    """Whatever a legal plan stores is read in the backward pass; with one choice less or more it is not legal."""
    linearization = case.linearization(case.arguments())
    plan = case.plan(linearization)
    check_plan(linearization, plan)
    assert set(plan.stored) <= read_in_backward(linearization, plan)
    for t in plan.choices:
        with pytest.raises(ValueError, match="storage plan"):
            check_plan(linearization, StoragePlan({u: c for u, c in plan.choices.items() if u != t}))
    for t in set(range(len(linearization.graph.tensors))) - set(plan.choices):
        with pytest.raises(ValueError, match="storage plan"):
            check_plan(linearization, StoragePlan({**plan.choices, t: Storage.KEEP}))


def check_report(case: Case) -> None:
    """A report counts the bytes that ``memory_encoded`` carries from the forward to the backward pass."""
    # What follows from compile-time constants alone is no row of a report.
    case = replace(case, steps=tuple(s for s in case.steps if s[0] != "constant"))
    *weights, x, h, key, index = leaves = case.arguments()
    encoded = memory_encoded(case.function, codecs=case.codecs)
    _, pullback = jax.vjp(lambda *moving: encoded(*moving, key, index), weights, x, h)
    arguments = set(map(id, leaves))
    carried = sum(leaf.nbytes for leaf in jax.tree.leaves(pullback) if id(leaf) not in arguments)
    assert residual_report(encoded, weights, x, h, key, index).total_bytes == carried


def check_compiled(case: Case) -> None:
    """Compiled, encoded and plain gradients agree up to rounding: XLA may fuse the two programs differently."""
    *weights, x, h, key, index = case.arguments()

    def gradients(function: Callable[..., list[Array]]) -> list[Array]:
        def loss(weights: list[Array], x: Array, h: Array) -> Array:
            return sum(jnp.vdot(y, jnp.cos(jnp.arange(y.size))) for y in function(weights, x, h, key, index))

        return jax.jit(jax.grad(loss, (0, 1, 2)))(weights, x, h)

    actual = flatten(gradients(memory_encoded(case.function, codecs=case.codecs)))
    with without_encoding():
        expected = flatten(gradients(case.function))
    assume(np.isfinite(expected).all())
    assert np.linalg.norm(actual - expected) <= 2e-6 * np.linalg.norm(expected)


def flatten(tree: Any) -> np.ndarray:
    """All arrays of a tree as one, in float64."""
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


#: Check -> examples in the default run, examples in the slow run, kinds of values.
CHECKS = {
    check_gradients: (40, 1500, ["normal", "ties", "zero", "special"]),
    check_necessity: (40, 2000, ["normal"]),
    check_report: (15, 500, ["normal"]),
    check_compiled: (10, 500, ["normal"]),
}


@pytest.mark.parametrize("check", CHECKS)
def test_property(check: Callable[[Case], None]) -> None:
    count, _, values = CHECKS[check]
    profile = settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    profile(given(cases(values))(check))()


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_property_at_length(check: Callable[[Case], None]) -> None:
    _, count, values = CHECKS[check]
    profile = settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    profile(given(cases(values))(check))()
