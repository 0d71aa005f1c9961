"""Derivative rules that users register: gradients are JAX's, the bytes stored are those of the rule."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jaxpipe
from jaxpipe import ModelError, memory_encoded, residual_report
from jaxpipe.graph import DerivativeRule, register_rule, unregister_rule
from tests.support.compare import assert_same_bits


@pytest.fixture
def register():
    """``register_rule`` for one test."""
    primitives = []

    def registered(primitive, rule, **options):
        register_rule(primitive, rule, **options)
        primitives.append(primitive)

    yield registered
    for primitive in primitives:
        unregister_rule(primitive)


def which_is_greatest(equation, operands, results):
    return [operand == results[0] for operand in operands]


def to_the_greatest(equation, kept, cotangents):
    assert equation.primitive is lax.max_p
    shares = (jnp.where(wins, 1.0, 0.0) / jnp.where(other, 2.0, 1.0) for wins, other in (kept, kept[::-1]))
    return [share * cotangents[0] for share in shares]


MAX = DerivativeRule(which_is_greatest, to_the_greatest)
X = jnp.array([-1.0, 0.0, -0.0, 2.0, jnp.nan, jnp.inf, 3.0, -jnp.inf] * 8)


def greatest(x, y):
    return jnp.sum(jnp.maximum(2 * x, 3 * y) * jnp.arange(64.0))


@pytest.mark.core
def test_a_rule_for_a_primitive_of_jax(register):
    y = X[::-1].at[:8].set(2 * X[:8] / 3)  # some are equal
    expected, before = jax.grad(greatest, (0, 1))(X, y), residual_report(memory_encoded(greatest), X, y).total_bytes
    register(lax.max_p, MAX)
    assert_same_bits(jax.grad(memory_encoded(greatest), (0, 1))(X, y), expected)
    assert_same_bits(jax.jit(jax.grad(memory_encoded(greatest), (0, 1)))(X, y), expected)
    assert residual_report(memory_encoded(greatest), X, y).total_bytes == 2 * 64 // 8
    assert before == 4 * 64 // 8  # JAX's derivative compares for each operand anew
    unregister_rule(lax.max_p)
    assert residual_report(memory_encoded(greatest), X, y).total_bytes == before


def test_a_number_in_the_program_is_an_operand_without_a_cotangent(register):
    def clipped(x):
        return jnp.sum(lax.max(2 * x, 0.5) ** 2)

    expected = jax.grad(clipped)(X)
    register(lax.max_p, MAX)
    assert_same_bits(jax.grad(memory_encoded(clipped))(X), expected)


def test_a_rule_applies_to_some_operators_alone(register):
    expected = jax.grad(greatest)(X, X[::-1])
    register(lax.max_p, DerivativeRule(MAX.keep, MAX.backward, applies=lambda op: op.equation.invars[0].aval.ndim > 1))
    assert residual_report(memory_encoded(greatest), X, X[::-1]).total_bytes == 4 * 64 // 8
    assert_same_bits(jax.grad(memory_encoded(greatest))(X, X[::-1]), expected)


def sine(x):
    return jnp.sin(x) * 2


waves = Primitive("waves")
waves.def_impl(sine)
waves.def_abstract_eval(lambda x: x)
mlir.register_lowering(waves, mlir.lower_fun(sine, multiple_results=False))
WAVES = DerivativeRule(
    lambda equation, operands, results: [jnp.cos(operands[0])],
    lambda equation, kept, cotangents: [cotangents[0] * 2 * kept[0]],
)


def test_a_rule_for_a_primitive_of_one_s_own(register):
    x = jax.random.normal(jax.random.key(0), (64,))
    loss = memory_encoded(lambda x: waves.bind(x * x).sum())
    with pytest.raises(NotImplementedError):  # JAX has no derivative of it
        jax.grad(loss)(x)
    register(waves, WAVES)
    assert_same_bits(jax.grad(loss)(x), jax.grad(lambda x: sine(x * x).sum())(x))


def test_rules_of_built_in_functions_are_rules_too():
    with pytest.raises(ModelError, match=r"gather, which has one \(jaxpipe\.graph\.rules\.pick.*replace=True"):
        register_rule(lax.gather_p, MAX)


def test_a_second_rule_must_be_asked_for(register):
    register(lax.max_p, DerivativeRule(lambda *_: [], lambda *_: [None, None]))
    assert not jax.grad(memory_encoded(greatest))(X, X).any()
    with pytest.raises(ModelError, match=r"max, which has one .* replace=True"):
        register(lax.max_p, MAX)
    register(lax.max_p, MAX, replace=True)
    assert_same_bits(jax.grad(memory_encoded(greatest))(X, X), jax.grad(greatest)(X, X))


@pytest.mark.parametrize(
    ("keep", "backward", "message"),
    [
        (lambda *_: [], lambda *_: [None], r"backward returned 1 cotangents for 2 operands; None"),
        (
            lambda *_: [],
            lambda *_: [jnp.ones(3), None],
            r"backward returned f(loat)?32\[3\] as the cotangent of operand 0, .*\[64\]",
        ),
        (
            lambda *_: [],
            lambda e, k, cts: [None, cts[0].astype(jnp.bfloat16)],
            r"backward returned bf(loat)?16\[64\] .* operand 1, f",
        ),
        (lambda e, operands, r: operands[0], lambda *_: [None, None], r"keep returned .* a list of arrays"),
        (lambda *_: [], lambda e, kept, cts: cts[0], r"backward returned .* a list of arrays"),
    ],
)
def test_what_a_rule_returns_is_checked(register, keep, backward, message):
    register(lax.max_p, DerivativeRule(keep, backward))
    with pytest.raises(ModelError, match=r"The derivative rule of max: " + message):
        jax.grad(memory_encoded(greatest))(X, X)


@pytest.mark.parametrize("arguments", [("max", MAX), (lax.max_p, to_the_greatest), (jnp.maximum, MAX)])
def test_what_is_registered_is_checked(arguments):
    with pytest.raises(ModelError, match=r"register_rule was given .*register_rule\(jax\.lax\.tanh_p"):
        jaxpipe.graph.register_rule(*arguments)


def test_an_integer_has_no_cotangent(register):
    def looked_up(table, places):
        return table.at[places].get(mode="clip").sum()

    table, places = jnp.arange(6.0), jnp.array([1, 1, 4])
    rule = DerivativeRule(lambda e, operands, r: [operands[1]], lambda e, kept, cts: [jnp.zeros(6), kept[0]])
    saved = dict(jaxpipe.graph.derivative_rule.registered())[lax.gather_p]
    register_rule(lax.gather_p, rule, replace=True)
    try:
        with pytest.raises(ModelError, match=r"cotangent of operand 1, i(nt)?32.*, whose cotangent is None"):
            jax.grad(memory_encoded(looked_up))(table, places)
    finally:
        register_rule(lax.gather_p, saved, replace=True)


def test_a_result_that_nothing_differentiable_reads_has_no_cotangent(register):
    given = []

    def backward(equation, kept, cotangents):
        given.append([ct is None for ct in cotangents])
        return [jnp.zeros_like(cotangents[0]).at[kept[0]].set(cotangents[0]), None]

    def smallest_first(x):
        values, places = lax.sort((x, jnp.arange(8)), num_keys=1)
        return jnp.sum(values * jnp.arange(8.0)) + lax.stop_gradient(places[0])

    x = jax.random.normal(jax.random.key(0), (8,))
    expected = jax.grad(smallest_first)(x)
    register(lax.sort_p, DerivativeRule(lambda equation, operands, results: [results[1]], backward))
    assert_same_bits(jax.grad(memory_encoded(smallest_first))(x), expected)
    assert given == [[False, True]]


def test_a_rule_may_apply_by_module_path(register):
    def twice(equation, kept, cotangents):
        return [2 * jnp.cos(kept[0]) * cotangents[0]]

    def loss(x, y):
        with jax.named_scope("A"):
            first = jnp.sin(x)
        with jax.named_scope("B"):
            return jnp.sum(first + jnp.sin(y))

    register(lax.sin_p, DerivativeRule(lambda equation, operands, results: operands, twice, lambda op: "A" in op.path))
    x = jnp.linspace(0.1, 1.0, 8)
    gradients = jax.grad(memory_encoded(loss), (0, 1))(x, x)
    assert_same_bits(gradients, (2 * jnp.cos(x), jnp.cos(x)))


def test_a_rule_that_cannot_be_hashed_is_refused(register):
    class Kept:
        __hash__ = None

        def __call__(self, equation, operands, results):
            return operands

    with pytest.raises(ModelError, match="has no hash"):
        register(lax.sin_p, DerivativeRule(Kept(), lambda equation, kept, cotangents: cotangents))
