"""Tensors that a stage stores between its forward and its backward pass, and ways to get the others back.

A plan gives one format to every tensor that the backward pass touches. It is data: the default below sets it, a
planner may set it otherwise, ``jaxpipe.residuals.vjp_program`` runs it.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe import _compat
from jaxpipe.array_types import TensorNumber
from jaxpipe.errors import ModelError
from jaxpipe.graph.allowed_codecs import FAST, Policy
from jaxpipe.graph.codec import Codec, Demand, SavedTensor
from jaxpipe.graph.graph import Graph, Operator, element_bits, is_differentiable, live
from jaxpipe.graph.op_cost import contraction, gpu_product_work, is_product, product_work, rerun_work
from jaxpipe.graph.primitives import ADDITIONS, COMPARISONS, ELEMENTWISE, ORDERINGS, VIEWS
from jaxpipe.graph.reverse_walk import closure
from jaxpipe.residuals.backward_graph import BackwardGraph
from jaxpipe.residuals.codecs import KEEP, SparseCodec, allowed
from jaxpipe.residuals.density import room
from jaxpipe.residuals.minimum_cut import minimum_cut
from jaxpipe.residuals.stored_formats import Derived, Format, stored_bytes
from jaxpipe.targets.building import current


#: A tensor is recomputed only if that reads and writes at most this many elements for each of its own.
RECOMPUTE_WORK_LIMIT = 24

#: On a GPU a function of one element, however long, counts for so much: it does some eighty operations in the time in
#: which it moves an element.
GPU_FUNCTION_WORK = 4

#: All products that may run again together take at most this fraction of the time of all products.
RERUN_SHARE = 0.07

#: On a GPU they take at most this fraction: a quarter of the forward pass, a twelfth of the products of a step.
GPU_RERUN_SHARE = 0.26

#: Of two ways to store as many bytes, one that writes an array more counts as larger by this power of a half.
_ANOTHER_ARRAY = 6

#: A codec that moves elements more often must save at least this fraction of the whole stash, or compiling it is not
#: worth it.
MANY_MOVES, WORTH_A_KERNEL = 8.0, 0.01

#: Why a budget cannot be kept where there are such operators.
KEPT_BY_POLICIES = " What a save policy (policy=) saves is never computed again; one that saves less needs less."

#: A tensor is stored in a form that it may not fit only if then at most this many expensive operators give it back.
FALLBACK_LIMIT = 4


@dataclass(frozen=True)
class ResidualPlan:
    """One format for each tensor that the backward pass touches, by tensor number.

    Tensors that derive from parameters and constants alone need no format: they are always available.
    """

    formats: Mapping[TensorNumber, Format]

    @functools.cached_property
    def codecs(self) -> Mapping[TensorNumber, Codec]:
        """The codecs of the tensors that make up the stash, in the order of the program."""
        return {t: fmt for t, fmt in sorted(self.formats.items()) if isinstance(fmt, Codec)}

    @functools.cached_property
    def stored(self) -> tuple[TensorNumber, ...]:
        """The tensors that make up the stash, in the order of the program."""
        return tuple(self.codecs)

    @functools.cached_property
    def uncertain(self) -> tuple[TensorNumber, ...]:
        """The stored tensors that may not fit their codecs."""
        return tuple(t for t, codec in self.codecs.items() if codec.may_overflow)

    def without_uncertain(self) -> "ResidualPlan":
        """The stored tensors that are sure to be there."""
        uncertain = set(self.uncertain)
        return ResidualPlan({t: fmt for t, fmt in self.formats.items() if t not in uncertain})

    def stash_bytes(self, graph: Graph) -> int:
        """Bytes of the stash, inputs of the graph included if they are stored."""
        return sum(stored_bytes(graph.tensors[t], codec) for t, codec in self.codecs.items())


def smallest_format(
    graph: Graph, t: TensorNumber, codecs: Iterable[str | Codec], capacity: int | None = None, *, certain: bool = False
) -> Codec:
    """The codec of fewest bytes that may store a tensor.

    Args:
      graph: the tensor's graph.
      t: its number.
      codecs: names from ``jaxpipe.graph.allowed_codecs.CODECS``, and objects.
      capacity: how many values a sparse codec has room for; None if the tensor is dense.
      certain: whether the tensor has to fit.
    """
    tensor = graph.tensors[t]
    if any(_compat.split_dimensions(tensor.aval)[min(1, len(tensor.shape) - 1) :]):
        return KEEP  # elements that several devices hold would have to be packed together
    seen = saved_tensor(graph, t, capacity)
    fitted = [codec for form in allowed(codecs) if (codec := _for_tensor(form, seen)) is not None]
    return min((c for c in fitted if not (certain and c.may_overflow)), key=lambda c: stored_bytes(tensor, c))


def _for_tensor(form: Codec, tensor: SavedTensor) -> Codec | None:
    """Return a codec as it is set for a tensor; None if it does not allow it."""
    try:
        return form.for_tensor(tensor)
    except Exception as error:
        raise ModelError(
            f"The codec {form.name!r} raised {type(error).__name__} for {tensor}: {error}. allows gets every "
            "tensor, scalars and booleans among them."
        ) from error


def refitted(plan: ResidualPlan, graph: Graph) -> ResidualPlan:
    """Return a plan with each codec as it is set for the tensors of a graph; room for values stays as it is.

    Raises:
      ValueError: if a codec does not allow a tensor.
    """

    def fitted(t: TensorNumber, form: Format) -> Format:
        if isinstance(form, (Derived, SparseCodec)):
            return form
        codec = _for_tensor(form, saved_tensor(graph, t))
        if codec is None:
            raise ValueError(f"the codec {form.name!r} does not allow {graph.tensors[t].aval.str_short()}.")
        return codec

    return ResidualPlan({t: fitted(t, form) for t, form in plan.formats.items()})


def saved_tensor(graph: Graph, t: TensorNumber, nonzeros: int | None = None) -> SavedTensor:
    """Return a tensor as codecs see it."""
    tensor, producer = graph.tensors[t], graph.producers.get(t)
    demand: Demand = "value"
    if tensor.dtype == np.bool_:
        literals = producer.literals if producer is not None and producer.name in ORDERINGS else []
        demand = "sign" if literals and not np.any(literals[0]) else "predicate"
    elif tensor.bits < element_bits(tensor.aval):
        demand = "window index" if tensor.bits < 8 else "index"
    path, operator = ("", "") if producer is None else (producer.path, producer.label)
    return SavedTensor(tensor.shape, tensor.dtype, demand, path, operator, tensor.bits, nonzeros)


def recomputation(
    graph: Graph, missing: Iterable[TensorNumber], plan: ResidualPlan, known: Iterable[TensorNumber] = ()
) -> tuple[list[Operator], list[TensorNumber]]:
    """The operators that give tensors back, in order, and the stored tensors that they or the caller read.

    Args:
      missing: the tensors wanted; one that is stored is read.
      plan: what is stored.
      known: tensors that are there already.
    """
    known, stored, producers = set(known), plan.codecs, graph.producers

    def sources(tensors: Iterable[TensorNumber]) -> list[TensorNumber | Operator]:
        """The tensors that are stored, and the operators that make others."""
        unknown = [t for t in tensors if t not in known]
        return [t if t in stored else producers[t] for t in unknown if t in stored or t in producers]

    reached = closure(sources(missing), lambda x: sources(x.inputs) if isinstance(x, Operator) else [])
    operators = [op for op in reached if isinstance(op, Operator)]
    return sorted(operators, key=graph.places.__getitem__), [t for t in reached if not isinstance(t, Operator)]


def fallback(
    graph: Graph, t: TensorNumber, plan: ResidualPlan, known: Iterable[TensorNumber]
) -> tuple[list[Operator], list[TensorNumber]]:
    """Return the same for a stored tensor that does not fit: from tensors that always do."""
    producer = graph.producers[t]
    program, leaves = recomputation(graph, producer.inputs, plan.without_uncertain(), known)
    return [*program, producer], leaves


def _viewed(t: TensorNumber, producers: Mapping[TensorNumber, Operator]) -> TensorNumber:
    """Return what a tensor is a view of, itself if of nothing."""
    while t in producers and producers[t].name in VIEWS and len(producers[t].inputs) == 1:
        (t,) = producers[t].inputs
    return t


def sums_of_branches(graph: Graph, given: Container[TensorNumber]) -> frozenset[TensorNumber]:
    """Return the sums that several operators read, of two tensors that are not given: residual connections.

    What was broadcast is no branch, but a bias: whoever has the other tensor adds it again for nothing.
    """
    readers = Counter(t for op in graph.operators for t in op.inputs)

    def joins(op: Operator) -> bool:
        size = graph.tensors[op.outputs[0]].size
        return sum(t not in given and graph.tensors[_viewed(t, graph.producers)].size >= size for t in op.inputs) > 1

    sums = (op for op in graph.operators if op.name in ADDITIONS and readers[op.outputs[0]] > 1)
    return frozenset(op.outputs[0] for op in sums if joins(op))


def in_the_way(program: Sequence[Operator], known: Iterable[TensorNumber]) -> list[TensorNumber] | str:
    """Return why a program cannot run again: it reads inputs that are not known, or has side effects; else nothing."""
    written = {t for op in program for t in op.outputs}
    lost = {t for op in program for t in op.inputs} - written - set(known)
    effects = "an operator with side effects" if any(op.has_effects for op in program) else ""
    return sorted(lost) or effects


def check_plan(backward_graph: BackwardGraph, plan: ResidualPlan) -> None:
    """Raise ``ValueError`` unless the plan gives the backward pass every tensor it needs, and none besides."""
    graph = backward_graph.graph
    producers = graph.producers
    available = graph.derived_from_parameters

    def sources(t: TensorNumber) -> list[TensorNumber]:
        fmt = plan.formats.get(t)
        if fmt is None:
            raise ValueError(f"storage plan: the backward pass needs tensor %{t}, for which there is no choice.")
        if isinstance(fmt, Codec) and not fmt.may_overflow:
            return []
        producer = producers.get(t)
        if producer is None or producer.has_effects:
            raise ValueError(
                f"storage plan: tensor %{t} is to be {'' if t in plan.codecs else 're'}computed, but it is "
                f"{'an input' if producer is None else 'the result of an operator with side effects'}; store it."
            )
        return [] if t in plan.codecs else _sources(producer, available)

    touched = set(closure((t for t in backward_graph.needs if t not in available), sources))
    for t in plan.uncertain:
        program, leaves = fallback(graph, t, plan, available)
        if obstacle := in_the_way(program, {*leaves, *available}):
            raise ValueError(
                f"storage plan: tensor %{t} is stored as {plan.codecs[t]}, but should it not fit, it cannot be "
                f"computed again: {obstacle} is in the way."
            )
        touched.update(leaves)
    extra = set(plan.formats) - touched
    if extra:
        raise ValueError(f"storage plan: nothing in the backward pass reads tensors {sorted(extra)}; drop them.")


def default_plan(
    backward_graph: BackwardGraph,
    policy: Policy = FAST,
    held: Iterable[TensorNumber] = (),
    rerun_share: float = GPU_RERUN_SHARE,
) -> ResidualPlan:
    """The plan with the fewest stored bytes among those that recompute nothing expensive.

    A tensor must be stored or follow, through cheap operators, from tensors that are. Fewest bytes is then a
    minimum vertex cut between what cannot be recomputed and what the backward pass needs; of several minimum cuts
    the one nearest to the backward pass is taken, which recomputes least. The use of a minimum cut for
    recomputation is from H. He and S. Yu, "Transcending runtime-memory tradeoffs in checkpointing by being fusion
    aware", MLSys 2023.

    Args:
      backward_graph: the program and what its backward pass needs.
      policy: the codecs that may be used, by module path; what an operator brought from a decoration of its own
        comes before it.
      held: inputs that cost nothing to store.
      rerun_share: the fraction of the time of all products that those which run again may take on a GPU.
    """
    graph, held = backward_graph.graph, frozenset(held)
    codecs = {t: (op.policy or policy).at(op.path) for op in graph.operators for t in op.outputs}
    cuts = _Cuts(backward_graph, codecs, held, _products_run_again(graph, rerun_share))
    capacities, dense = room(graph), set(held)

    def format_of(t: TensorNumber) -> Codec:
        usable = [c for c in codecs.get(t, policy.at("")) if t not in held or isinstance(c, str)]
        certain = t in dense or t not in codecs
        return smallest_format(graph, t, usable, None if certain else capacities.get(t), certain=certain)

    while True:
        plan = cuts.smallest(functools.cache(format_of))
        unfit = _trifles(graph, plan)
        if not unfit:
            plan, unfit = with_fallbacks(graph, plan, held)
        if not unfit:
            return plan
        dense |= unfit


@dataclass(frozen=True)
class _Cuts:
    """The cuts between what cannot be recomputed cheaply and what a backward pass needs.

    Attributes:
      backward_graph: the program and what its backward pass needs.
      codecs: that may be used, by tensor that an operator makes.
      held: inputs that cost nothing to store.
      products: those that may be run again.
    """

    backward_graph: BackwardGraph
    codecs: Mapping[TensorNumber, frozenset[str | Codec]]
    held: frozenset[TensorNumber]
    products: Container[Operator]

    def smallest(self, format_of: Callable[[TensorNumber], Codec]) -> ResidualPlan:
        """The minimum cut, each stored tensor in its given format.

        Whether a tensor can be recomputed cheaply depends on what is stored before it. The first cut supposes nothing
        stored; the next ones suppose what the last one stored, as long as that saves bytes and its work stays bounded.
        """
        tensors, best, fewest = self.backward_graph.graph.tensors, None, math.inf
        cheap = self._cheap_derivations(frozenset())
        while True:
            plan = self._plan(format_of, cheap)
            price = sum(stored_bytes(tensors[t], codec) for t, codec in plan.codecs.items() if t not in self.held)
            if price >= fewest:
                break
            before, cheap = cheap, self._cheap_derivations(frozenset(plan.stored))
            if any(t not in cheap and t not in plan.codecs for t in plan.formats):
                break
            best, fewest = plan, price
            if cheap == before:  # so would be the plan
                break
        assert best is not None  # the first cut is within bounds
        return best

    def _plan(
        self, format_of: Callable[[TensorNumber], Codec], derivation: Mapping[TensorNumber, Operator]
    ) -> ResidualPlan:
        """The cheapest plan in which the tensors that are not stored are derived as given."""
        graph = self.backward_graph.graph
        available = graph.derived_from_parameters
        needs = [t for t in self.backward_graph.needs if t not in available]
        price = {}
        extra = self._for_the_backward_pass if current().runs_early else _behind_products(graph, available)
        for t in closure(needs, lambda t: _sources(derivation.get(t), available)):
            size = stored_bytes(graph.tensors[t], format_of(t))
            price[t] = 0 if t in self.held else size + (size >> _ANOTHER_ARRAY if t in extra else 0)
        cut = minimum_cut(price, {t: _sources(derivation.get(t), available) for t in price if t in derivation}, needs)
        stored = {_input_seen(t, graph, derivation, price) for t in cut}
        return derived_from(self.backward_graph, {t: format_of(t) for t in stored}, derivation)

    @functools.cached_property
    def _for_the_backward_pass(self) -> set[TensorNumber]:
        """The tensors that the forward pass would write for the backward pass alone: the same work in either."""
        graph = self.backward_graph.graph
        forward = set(live(graph.operators, graph.outputs))
        return {t for op in graph.operators if op not in forward for t in op.outputs}

    def _cheap_derivations(self, roots: frozenset[TensorNumber]) -> dict[TensorNumber, Operator]:
        """The operator that gives each tensor back cheaply, for the tensors that have one.

        The work of a derivation counts every operator in it once, down to ``roots``, to tensors that have no cheap
        derivation and to products. A product may be run again if it is one of those given; on a CPU only if that by
        itself is cheap, too, and if no other product has to be run before it.
        """
        graph, on_cpu = self.backward_graph.graph, current().runs_early
        available = graph.derived_from_parameters
        derivation: dict[TensorNumber, Operator] = {}
        needed_work: dict[TensorNumber, dict[Operator, int]] = {}
        behind_product: set[TensorNumber] = set()
        for op, cost in self._costs.items():
            if op.saved is not None:  # whatever it takes
                derivation.update((t, op) for t in op.outputs if t not in available)
                continue
            sources = _sources(op, available)
            after_product = not behind_product.isdisjoint(sources)
            if is_product(op) and (op not in self.products or (on_cpu and after_product)):
                continue
            is_mask = graph.tensors[op.outputs[0]].bits == 1 and "mask" in self.codecs[op.outputs[0]]
            if after_product and not on_cpu and is_mask:
                continue  # else the product's result would stay until the mask is read
            work = {op: cost}
            for t in sources:
                work |= needed_work.get(t, {})
            for t in op.outputs:
                if t not in available and sum(work.values()) <= RECOMPUTE_WORK_LIMIT * max(1, graph.tensors[t].size):
                    derivation[t] = op
                    if t not in roots:
                        needed_work[t] = {} if is_product(op) else work
                        if is_product(op) or after_product:
                            behind_product.add(t)
        return derivation

    @functools.cached_property
    def _costs(self) -> dict[Operator, int]:
        """The work of the operators that may run again; by a save policy whatever it takes."""
        graph, on_cpu = self.backward_graph.graph, current().runs_early
        kept, costs = run_once(self.backward_graph), dict[Operator, int | None]()
        for op in graph.operators:
            codec = "alias" if op.name in VIEWS else "recompute"
            if not op.has_effects and op not in kept and (op.saved is not None or codec in self.codecs[op.outputs[0]]):
                costs[op] = _rerun_cost(graph, op, on_cpu) if op.saved is None else 0
        return {op: cost for op, cost in costs.items() if cost is not None}


def _behind_products(graph: Graph, available: frozenset[TensorNumber]) -> frozenset[TensorNumber]:
    """Return the tensors that follow, element by element, from the result of one product and from small tensors.

    That result is written to memory in any case, they are not.
    """
    producers = graph.producers
    elementwise: set[TensorNumber] = set()
    for op in graph.operators:
        if op.name not in ELEMENTWISE:
            continue
        least = max(graph.tensors[t].bytes for t in op.outputs) >> 3
        large = {t for t in op.inputs if t not in available and graph.tensors[t].bytes > least}
        if len(large) == 1 and all(t in elementwise or (t in producers and is_product(producers[t])) for t in large):
            elementwise.update(op.outputs)
    return frozenset(elementwise)


def derived_from(
    backward_graph: BackwardGraph, stored: Mapping[TensorNumber, Codec], derivation: Mapping[TensorNumber, Operator]
) -> ResidualPlan:
    """Return the formats given, and the rest by the operators given, as far as the backward pass needs them."""
    available = backward_graph.graph.derived_from_parameters
    needs = (t for t in backward_graph.needs if t not in available)
    touched = closure(needs, lambda t: [] if t in stored else _sources(derivation[t], available))
    ways = {t: Derived.ALIAS if derivation[t].name in VIEWS else Derived.RECOMPUTE for t in touched if t not in stored}
    return ResidualPlan({t: ways[t] if t in ways else stored[t] for t in sorted(touched)})


def _input_seen(
    t: TensorNumber, graph: Graph, derivation: Mapping[TensorNumber, Operator], price: Mapping[TensorNumber, int]
) -> TensorNumber:
    """The input of which a tensor is a view, if it has no more bytes: the caller holds it anyway. Else the tensor."""
    source = _viewed(t, derivation)
    return source if source in graph.inputs and price[source] <= price[t] else t


def _trifles(graph: Graph, plan: ResidualPlan) -> set[TensorNumber]:
    """The tensors with slow codecs that save next to nothing of the whole stash: each takes a dozen kernels."""
    slow = {t: codec for t, codec in plan.codecs.items() if codec.moves > MANY_MOVES}
    saved = {t: graph.tensors[t].bytes - stored_bytes(graph.tensors[t], codec) for t, codec in slow.items()}
    least = WORTH_A_KERNEL * (plan.stash_bytes(graph) + sum(saved.values()))
    return {t for t in saved if saved[t] < least}


def with_fallbacks(
    graph: Graph, plan: ResidualPlan, held: frozenset[TensorNumber]
) -> tuple[ResidualPlan, set[TensorNumber]]:
    """The plan with the held inputs that overflowing tensors are computed from; and the tensors for which that fails.

    Tensors are judged in the order of the program. One whose way back is too long is stored as it is, and so ends
    the way of those behind it.
    """
    available = graph.derived_from_parameters
    everything = ResidualPlan({**dict.fromkeys(held, KEEP), **plan.formats})
    used: set[TensorNumber] = set()
    hopeless: set[TensorNumber] = set()
    uncertain = frozenset(plan.uncertain)
    for t in [t for op in graph.operators for t in op.outputs if t in uncertain]:
        program, leaves = fallback(graph, t, everything, available)
        expensive = sum(rerun_work(op) is None or is_product(op) for op in program)
        shared = any(op.is_collective for op in program)  # only some shards would run it
        if shared or in_the_way(program, {*leaves, *available}) or expensive > FALLBACK_LIMIT:
            hopeless.add(t)
            everything = ResidualPlan({**everything.formats, t: KEEP})
        else:
            used.update(u for u in leaves if u not in plan.formats)
    return ResidualPlan({**plan.formats, **dict.fromkeys(sorted(used), KEEP)}), hopeless


def _sources(op: Operator | None, available: frozenset[TensorNumber]) -> list[TensorNumber]:
    """The tensors that must be there for ``op`` to run in the backward pass."""
    return [] if op is None else [t for t in op.inputs if t not in available]


def kept_by_policies(graph: Graph) -> set[Operator]:
    """Return the operators that save policies keep from running again: all that they save, but views of such."""
    again, kept = set[TensorNumber](), set[Operator]()
    for op in graph.operators:
        if op.saved and (op.name not in VIEWS or not again.isdisjoint(op.inputs)):
            kept.add(op)
        elif not op.saved:
            again.update(op.outputs)
    return kept


def run_once(backward_graph: BackwardGraph) -> set[Operator]:
    """Return the operators that never run again: those that save policies keep, and comparisons of computed numbers.

    A maximum equals one of the numbers that it is of. One of the two computed again, among other operators, may be
    rounded otherwise, and equals it no more. What a derivative rule compares in its backward pass is not made again.
    Where there is a save policy it decides, as in ``jax.checkpoint``.
    """
    graph = backward_graph.graph
    free = {op for op, read in ties(backward_graph).items() if all(graph.producers[t].saved is None for t in read)}
    return kept_by_policies(graph) | free


def ties(backward_graph: BackwardGraph) -> dict[Operator, list[TensorNumber]]:
    """Return where ties matter: comparisons of computed numbers, each with these.

    And the operators that make what a derivative rule compares in its backward pass, each with that. Of a view it is
    what the view is of.
    """
    graph = backward_graph.graph

    def computed(tensors: Iterable[TensorNumber]) -> list[TensorNumber]:
        seen = (_viewed(t, graph.producers) for t in tensors if is_differentiable(graph.tensors[t].aval))
        return [t for t in seen if t in graph.producers and graph.producers[t].inputs]

    pairs = {op: computed(op.inputs) for op in filter(_compares, graph.operators)}
    compared = {op: numbers for op, numbers in pairs.items() if len(numbers) == len(op.inputs)}
    for step in backward_graph.steps:
        needs, views = dict(zip(step.program.inputs, step.needs, strict=False)), step.program.producers
        read = {_viewed(t, views) for op in filter(_compares, step.program.operators) for t in op.inputs}
        compared.update((graph.producers[t], [t]) for t in computed(needs[t] for t in read & needs.keys()))
    return compared


def _compares(op: Operator) -> bool:
    """Return whether an operator compares two numbers; a max-pool compares elements of one array, all made at once."""
    return op.name in COMPARISONS and len(op.inputs) > 1 and not op.label.endswith("max_pool")


def _rerun_cost(graph: Graph, op: Operator, on_cpu: bool) -> int | None:
    """The work to run an operator again; None if it never is. Which products are, is decided elsewhere on a GPU."""
    cost = rerun_work(op)
    if on_cpu or cost is None:
        return cost
    if op.name == "custom_jvp_call":
        return min(cost, GPU_FUNCTION_WORK * max(graph.tensors[t].size for t in op.outputs))
    return 0 if is_product(op) else cost


def _products_run_again(graph: Graph, gpu_share: float) -> set[Operator]:
    """The products that may be run again, as many as a share of the time of all allows.

    On a CPU those with the shortest contractions. A GPU takes those that take it least time for each byte of their
    results; of equals the largest, so that few are run again, and then the first of the program, which are run again
    last, when most else has been freed.
    """
    products, on_cpu = [op for op in graph.operators if is_product(op)], current().runs_early
    work = {op: product_work(op) if on_cpu else gpu_product_work(op) for op in products}
    size = {op: sum(graph.tensors[t].bytes for t in op.outputs) for op in products}

    def rank(op: Operator) -> tuple[float, int]:
        return (contraction(op.equation), 0) if on_cpu else (work[op] / max(1, size[op]), -size[op])

    left = (RERUN_SHARE if on_cpu else gpu_share) * sum(work.values())
    chosen = set()
    for op in sorted(products, key=rank):
        if work[op] <= left:
            left -= work[op]
            chosen.add(op)
        elif on_cpu:
            break
    return chosen
