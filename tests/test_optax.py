"""Every public optimizer of optax and optax.contrib: split by stage it gives optax's own update, or is refused by name.

Updates are evaluated operator by operator, stage by stage; what a stage has not got must be among what is exchanged.
Before a release all of them are, with numbers; otherwise of most it is only seen that every stage has what it needs.
"""

import contextlib
import inspect
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jaxpipe import PartitionError
from jaxpipe.models.bind import bind
from jaxpipe.models.traced_update import trace_update, without_frozen
from jaxpipe.runtime import optimizer_by_stage as by_stages
from tests.support.compare import assert_same_bits


contrib = optax.contrib


def product(w, x):
    return x @ w["a"]["kernel"] @ w["b"]["kernel"] + w["a"]["bias"] + w["b"]["bias"]


def layer(seed):
    kernel, bias = jax.random.split(jax.random.key(seed))
    return {"kernel": jax.random.normal(kernel, (8, 8)), "bias": jax.random.normal(bias, (8,))}


MODEL = jax.tree_util.Partial(product, {"a": layer(0), "b": layer(1)})
GRADIENTS = [jax.tree.map(lambda x, k=k: jnp.cos(7 * x + k), MODEL) for k in range(3)]
#: Stages of a's bias and kernel, then of b's.
STAGES = (0, 0, 1, 1)


def is_first(tree):
    """A tree of flags: whether a parameter is of the first layer."""
    return jax.tree.map_with_path(lambda path, _: any(getattr(key, "key", None) == "a" for key in path), tree)


def is_kernel(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def labels(tree):
    return jax.tree.map(lambda first: "first" if first else "second", is_first(tree))


def matrices(tree):
    return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(), tree)


def norm(tree):
    return optax.tree.norm(tree)


#: What works, with arguments; all else is called with 0.1 for each argument that it needs.
GIVEN = {
    "adagrad": lambda make: make(0.1),
    "add_noise": lambda make: make(0.1, 0.5, 0),
    "apply_every": lambda make: make(2),
    "apply_if_finite": lambda make: make(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)), 3),
    "chain": lambda make: make(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
    "conditionally_mask": lambda make: make(optax.adam(0.1), lambda step: step % 2 == 1),
    "conditionally_transform": lambda make: make(optax.adam(0.1), lambda step: step % 2 == 1),
    "freeze": lambda make: make(is_first(MODEL)),
    "galore": lambda make: make(0.1, rank=2),
    "inject_hyperparams": lambda make: make(optax.adamw)(0.1),
    "inject_stateful_hyperparams": lambda make: make(optax.adamw)(0.1),
    "masked": lambda make: make(optax.trace(0.9), is_kernel),
    "mechanize": lambda make: make(optax.adam(0.1)),
    "multi_transform": lambda make: make({"first": optax.sgd(0.1, momentum=0.9), "second": optax.adam(0.1)}, labels),
    "MultiSteps": lambda make: make(
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)), 2
    ).gradient_transformation(),
    "named_chain": lambda make: make(("adam", optax.adam(0.1)), ("clip", optax.clip(0.01))),
    "noisy_sgd": lambda make: make(0.1, key=0),
    "partition": lambda make: make({"first": optax.set_to_zero(), "second": optax.adam(0.1)}, labels),
    "sam": lambda make: make(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.1)), sync_period=2),
    "scale_by_galore": lambda make: make(rank=2),
    "scale_by_muon": lambda make: optax.masked(make(weight_dimension_numbers=matrices), is_kernel),
    "scale_by_schedule": lambda make: make(lambda step: 0.1 / (1 + step)),
    "schedule_free": lambda make: make(optax.sgd(0.1), 0.1),
    "selective_transform": lambda make: make(optax.adam(0.1), freeze_mask=is_first(MODEL)),
    "snapshot": lambda make: make("norm", norm),
    "split_real_and_imaginary": lambda make: make(optax.adam(0.1)),
    "stateless": lambda make: make(lambda updates, params: jax.tree.map(lambda u, p: u * p, updates, params)),
    "stateless_with_tree_map": lambda make: make(lambda update, param: update * param),
    "with_extra_args_support": lambda make: make(optax.adam(0.1)),
}

VALUE = "needs value besides gradients and parameters"
SEARCH = "needs value, grad, and value_fn besides"
EXAMPLES = r"for each example \(optax.contrib.differentially_private_aggregate, dpsgd\)"

#: What a pipeline cannot run: how it is made, and what the error says.
REFUSED = {
    "differentially_private_aggregate": (lambda make: make(0.1, 0.1, 0), EXAMPLES),
    "dpsgd": (lambda make: make(0.1, 0.1, 0.1, 0), EXAMPLES),
    "flatten": (lambda make: make(optax.adam(0.1)), "concatenate of flatten combines large values of several stages"),
    "hutchinson_estimator_diag_hessian": (lambda make: make(0), "hutchinson_estimator_diag_hessian.*obj_fn must be"),
    "lbfgs": (lambda make: make(), rf"scale_by_zoom_linesearch \(of scale_by_lbfgs, .*{SEARCH}"),
    "lookahead": (lambda make: make(optax.sgd(0.1), 2, 0.5), "lookahead .*has no attribute 'fast'"),
    "measure_with_ema": (lambda make: make(norm, 0.9), "ema returns something else than an update"),
    "momo": (lambda make: make(), f"momo {VALUE}"),
    "momo_adam": (lambda make: make(), f"momo_adam {VALUE}"),
    "monitor": (
        lambda make: make({"norm": norm}),
        "the state of monitor, stateless has 1 arrays after an update and 0 before",
    ),
    "polyak_sgd": (lambda make: make(), f"scale_by_polyak .*{VALUE}"),
    "reduce_on_plateau": (lambda make: make(), f"reduce_on_plateau {VALUE}.*inject_hyperparams"),
    "scale_by_backtracking_linesearch": (lambda make: make(3), f"scale_by_backtracking_linesearch .*{SEARCH}"),
    "scale_by_lbfgs": (lambda make: make(), "scan of scale_by_lbfgs combines large values of several stages"),
    "scale_by_polyak": (lambda make: make(), f"scale_by_polyak .*{VALUE}"),
    "scale_by_zoom_linesearch": (lambda make: make(3), f"scale_by_zoom_linesearch .*{SEARCH}"),
    "sophia": (lambda make: make(0.1), r"hutchinson_estimator_diag_hessian \(of scale_by_sophia.*obj_fn must be"),
}


def makers():
    """Name and function of all that optax makes a transformation with."""
    for module in (optax, contrib):
        for name, make in vars(module).items():
            if name.startswith("_") or not callable(make):
                continue
            with contextlib.suppress(TypeError, ValueError):
                given = inspect.signature(make).return_annotation
                if name in GIVEN or name in REFUSED or "GradientTransformation" in str(given):
                    yield name, make


MAKERS = dict(sorted(makers()))


def made(name):
    """An optimizer by its name; one that is new to this file has to be listed if it needs arguments of its own."""
    make = MAKERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name in REFUSED:
            return REFUSED[name][0](make)
        if name in GIVEN:
            return GIVEN[name](make)
        needed = [p for p in inspect.signature(make).parameters.values() if p.default is p.empty]
        return make(*(0.1 for p in needed if p.kind is not p.VAR_KEYWORD))


@pytest.fixture(scope="module")
def model():
    return bind(MODEL, lambda f, x: f(x).mean(), jax.ShapeDtypeStruct((4, 8), jnp.float32), None)


@pytest.fixture(autouse=True)
def small_values(monkeypatch):
    """Every parameter is too large to be exchanged."""
    monkeypatch.setattr(by_stages, "EXCHANGE_LIMIT", 7)


def by_stage(update, inputs, evaluate=lambda op, values: op.evaluate(*values)):
    """The results of an update, each stage with what it holds and what is exchanged."""
    graph = update.graph
    exchanged = {t for tensors in update.exchanged for t in tensors}
    known = [dict(graph.constants) for _ in range(2)]
    for t, value in zip(graph.inputs, inputs, strict=True):
        for s, env in enumerate(known):
            if update.stage_of.get(t, s) == s:
                env[t] = value

    def read(t, s):
        if t not in known[s]:
            assert t in exchanged, f"stage {s} needs tensor {t}, which nobody sends it"
            known[s][t] = known[update.stage_of[t]][t]
        return known[s][t]

    for op in graph.operators:
        home = {update.stage_of[t] for t in op.outputs if t in update.stage_of}
        for s in home or range(2):
            values = evaluate(op, [read(t, s) for t in op.inputs])
            known[s].update(zip(op.outputs, values, strict=True))
    owner = (*STAGES, *(0 if s is None else s for s in update.state_stage))
    return [read(t, s) for t, s in zip(graph.outputs, owner, strict=True)]


WORKING = [name for name in MAKERS if name not in REFUSED]


@pytest.mark.core
@pytest.mark.parametrize("name", WORKING)
def test_every_stage_has_what_its_part_of_the_update_needs(name, model):
    traced = without_frozen(trace_update(made(name), model))
    update = by_stages.partition_update(traced, model, STAGES)
    inputs = [traced.graph.tensors[t].aval for t in traced.graph.inputs]
    new = by_stage(update, inputs, lambda op, _: [traced.graph.tensors[t].aval for t in op.outputs])
    before = [*jax.tree.leaves(MODEL), *traced.state_avals]
    assert [jnp.shape(x) for x in new] == [x.shape for x in before]


#: What is not only run before a release: what has conditionals, masks, norms over stages, or numbers of no parameter.
QUICK = {"apply_if_finite", "conditionally_mask", "freeze", "masked", "multi_transform", "sam", "snapshot"}

#: Last bits, of the largest number. Optax compiles parts of an update (a moment, a bias correction) as one function, in
#: which XLA contracts products and sums, so that they round once and not twice; here every operation stands alone.
LAST_BITS = 16
#: Singular vectors and the iteration for a polar factor magnify what they are given by the condition of the matrix;
#: estimates of a distance are differences of sums that nearly cancel.
MAGNIFIED = {"galore": 4096, "muon": 4096, "scale_by_galore": 4096, "scale_by_muon": 4096}
MAGNIFIED |= {"dadapt_adamw": 256, "prodigy": 256}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in WORKING])
def test_split_by_stage_it_gives_the_update_of_optax(name, model):
    optimizer = made(name)
    traced = without_frozen(trace_update(optimizer, model))
    update = by_stages.partition_update(traced, model, STAGES)
    plain, plain_state = MODEL, optimizer.init(MODEL)
    parameters, state = jax.tree.leaves(MODEL), jax.tree.leaves(plain_state)
    for gradients in GRADIENTS:
        updates, plain_state = optimizer.update(gradients, plain_state, plain)
        plain = optax.apply_updates(plain, updates)
        read = [g for g, kept in zip(jax.tree.leaves(gradients), traced.trained, strict=True) if kept]
        new = by_stage(update, [*parameters, *read, *state])
        parameters, state = new[:4], new[4:]
    expected = [*jax.tree.leaves(plain), *jax.tree.leaves(plain_state)]
    for result, value in zip([*parameters, *state], expected, strict=True):
        if isinstance(result, bool) or not jax.dtypes.issubdtype(result.dtype, np.floating):
            assert_same_bits(jnp.asarray(result), jnp.asarray(value))
        else:
            last = np.finfo(np.float32).eps * np.max(np.abs(value), initial=np.finfo(np.float32).tiny)
            assert np.max(np.abs(result - value), initial=0) <= MAGNIFIED.get(name, LAST_BITS) * last


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused_by_name(name, model):
    with pytest.raises(PartitionError, match=re.compile(f"^optimizer: .*{REFUSED[name][1]}", re.DOTALL)):
        by_stages.partition_update(without_frozen(trace_update(made(name), model)), model, STAGES)


def test_every_name_of_the_lists_is_still_in_optax():
    assert {*GIVEN, *REFUSED} <= set(MAKERS)
    assert len(MAKERS) > 100


def test_lbfgs_is_refused_without_its_line_search_too(model):
    traced = trace_update(optax.lbfgs(0.1, linesearch=None), model)
    with pytest.raises(PartitionError, match="scan of scale_by_lbfgs combines large values"):
        by_stages.partition_update(traced, model, STAGES)


def test_an_optimizer_of_another_tree_is_refused_with_what_optax_says(model):
    optimizer = optax.multi_transform({"first": optax.adam(0.1)}, labels)
    with pytest.raises(PartitionError, match=r"partition .*Some parameters have no corresponding transformation"):
        trace_update(optimizer, model)


# State of masked parameters


def test_masks_that_stand_for_whole_branches(model):
    branch = {"a": "first", "b": "second"}
    optimizer = optax.multi_transform(
        {"first": optax.adam(0.1), "second": optax.sgd(0.1, momentum=0.9)},
        lambda tree: jax.tree.unflatten(jax.tree.structure(MODEL, is_leaf=lambda x: x is not MODEL), [(branch,), {}]),
    )
    assert sorted(trace_update(optimizer, model).owner, key=str) == [0, 0, 1, 1, 2, 3, None]


def test_labels_by_a_function_that_takes_nothing_but_the_tree(model):
    leaves, tree = jax.tree.flatten(MODEL)

    def by_position(given):
        assert len(jax.tree.leaves(given)) == len(leaves)
        return jax.tree.unflatten(tree, ["first", "first", "second", "second"])

    transforms = {"first": optax.set_to_zero(), "second": optax.adam(0.1)}
    traced = trace_update(optax.multi_transform(transforms, by_position), model)
    assert traced.owner == (None, 2, 3, 2, 3)

    def by_path(given):
        assert jax.tree.leaves(given)
        return jax.tree.map_with_path(lambda path, _: "first" if path[-1].key == "bias" else "second", given)

    assert trace_update(optax.multi_transform(transforms, by_path), model).owner == (None, 1, 3, 1, 3)


# Which gradients are needed


def behind(*transforms):
    return lambda: optax.chain(*transforms)


ZERO = optax.masked(optax.set_to_zero(), is_first)
NEEDED = {
    "no mask": (lambda: optax.adam(0.1), "abcd"),
    "a group set to zero": (lambda: GIVEN["partition"](optax.partition), "cd"),
    "a mask behind adam": (behind(optax.adam(0.1), ZERO), "cd"),
    "a mask in front of adam": (behind(ZERO, optax.adam(0.1)), "cd"),
    "freeze": (lambda: GIVEN["freeze"](optax.freeze), "cd"),
    "several steps": (lambda: optax.MultiSteps(GIVEN["partition"](optax.partition), 2).gradient_transformation(), "cd"),
    "updates that are not finite": (lambda: optax.apply_if_finite(GIVEN["partition"](optax.partition), 3), "abcd"),
    "the norm of all": (behind(optax.clip_by_global_norm(1.0), GIVEN["partition"](optax.partition)), "abcd"),
    "the norm of what is left": (behind(ZERO, optax.clip_by_global_norm(1.0), optax.sgd(0.1)), "cd"),
    "a norm that is looked at": (behind(optax.snapshot("norm", norm), ZERO, optax.sgd(0.1)), "abcd"),
    "weight decay alone": (behind(ZERO, optax.add_decayed_weights(0.1)), "cd"),
    "nothing": (optax.set_to_zero, ""),
    "a rate of zero": (lambda: optax.sgd(0.0), "abcd"),
}


@pytest.mark.core
@pytest.mark.parametrize("name", NEEDED)
def test_a_gradient_is_needed_if_what_is_kept_depends_on_it(name, model):
    make, needed = NEEDED[name]
    traced = without_frozen(trace_update(make(), model))
    assert traced.trained == tuple(letter in needed for letter in "abcd")


def test_a_parameter_with_an_update_of_zero_is_handed_on_as_it_is(model):
    graph = without_frozen(trace_update(GIVEN["partition"](optax.partition), model)).graph
    assert graph.outputs[:2] == graph.inputs[:2]
    decayed = without_frozen(trace_update(NEEDED["weight decay alone"][0](), model)).graph
    assert not {*decayed.outputs[:2]} & {*decayed.inputs}


def test_moments_that_nobody_reads_stay_as_they_were(model):
    optimizer = NEEDED["a mask behind adam"][0]()
    traced = without_frozen(trace_update(optimizer, model))
    update = by_stages.partition_update(traced, model, STAGES)
    leaves, state = jax.tree.leaves(MODEL), jax.tree.leaves(optimizer.init(MODEL))
    new = by_stage(update, [*leaves, *jax.tree.leaves(GRADIENTS[0])[2:], *state])[4:]
    expected = jax.tree.leaves(optimizer.update(GRADIENTS[0], optimizer.init(MODEL), MODEL)[1])
    for result, value, owner in zip(new, expected, traced.owner, strict=True):
        assert_same_bits(result, jnp.zeros_like(value) if owner in (0, 1) else value)


def test_conditionals_of_one_parameter_stay(model):
    names = [op.name for op in trace_update(made("galore"), model).graph.operators]
    assert names.count("cond") == 2
    assert "cond" not in [op.name for op in trace_update(made("apply_if_finite"), model).graph.operators]
