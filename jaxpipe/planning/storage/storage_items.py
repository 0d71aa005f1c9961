"""A stage's backward pass as a problem of items and events, and a choice as a storage plan.

Items are the tensors that the default plan stores, and those that would be good to start from if one of them is
given up: what products, reductions, windows and lookups make, with what is fused with them, sums of branches, and
masks. All between them is cheap and fuses with what reads it.
"""

# More than 15 of our modules: what a backward pass reads, frees and may store comes together here.
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax.core import ShapedArray

from jaxpipe.array_types import TensorNumber
from jaxpipe.graph.buffer_packing import alive_bytes
from jaxpipe.graph.codec import Codec
from jaxpipe.graph.graph import Graph, Operator, Tensor
from jaxpipe.graph.liveness import lifetimes
from jaxpipe.graph.op_cost import weight
from jaxpipe.graph.reverse_walk import needed
from jaxpipe.planning.storage.prices import Prices
from jaxpipe.planning.storage.storage_problem import NOT_STORED, Item, Option, Problem
from jaxpipe.residuals import choose_formats
from jaxpipe.residuals.backward_graph import BackwardGraph, BackwardOp, divided
from jaxpipe.residuals.choose_formats import ResidualPlan, recomputation
from jaxpipe.residuals.codecs.keep import KEEP
from jaxpipe.residuals.rematerialize import is_heavy, parts
from jaxpipe.residuals.stored_formats import stored_bytes
from jaxpipe.residuals.vjp_program import VJPProgram
from jaxpipe.targets.building import current


#: Events of a problem at most, on a CPU and on a GPU, where an event has several steps; neighbors are joined.
MOST_EVENTS, MOST_GPU_EVENTS = 48, 160

#: On a GPU nothing is written over its result, so that what follows it runs by itself.
_CONVOLUTION = "conv_general_dilated"


@dataclass(frozen=True, eq=False)
class Items:
    """A program and what it may store: a problem without limits.

    Attributes:
      vjp: the forward and backward program, with default storage.
      problem: items and events; unlimited.
      tensors: the tensor of each item.
      formats: the codec that each option of each item stands for.
      default: what the default plan chooses.
      held: inputs that are in memory without being stored.
      seconds: that it takes longer than with the first program's operators as they are, whatever is stored.
      slices: into how many its largest product is cut.
    """

    vjp: VJPProgram
    problem: Problem
    tensors: tuple[TensorNumber, ...]
    formats: tuple[tuple[Codec, ...], ...]
    default: tuple[int, ...]
    held: frozenset[TensorNumber]
    seconds: float = 0.0
    slices: int = 1


def stage_items(
    vjp: VJPProgram,
    prices: Prices,
    held: Iterable[TensorNumber] = (),
    released: Container[TensorNumber] = (),
    sized: BackwardGraph | None = None,
) -> Items:
    """The items and events of a stage.

    Args:
      vjp: its programs with default storage.
      prices: what it takes to run an operator again, and the codecs.
      held: inputs that cost nothing to store.
      released: inputs whose cotangent is gone once it has been made, as it is added to a sum.
      sized: its backward pass with tensors as large as they are on one device, where these share them.
    """
    backward_graph, plan = sized or vjp.backward_graph, vjp.plan
    graph, held = backward_graph.graph, frozenset(held)
    available = graph.derived_from_parameters
    producers = graph.producers
    chosen = {t: codec for t, codec in plan.codecs.items() if t not in held}
    for t in _starting_points(backward_graph, available | held):
        chosen.setdefault(t, _starting_format(backward_graph, t))
    order = {t: k for k, t in enumerate([*graph.inputs, *(t for op in graph.operators for t in op.outputs)])}
    tensors = tuple(sorted(chosen, key=order.__getitem__))
    position = {t: k for k, t in enumerate(tensors)}
    everything = ResidualPlan({**chosen, **dict.fromkeys(held, KEEP)})
    events, base = _events(backward_graph, everything, available, position, released)
    items, formats, stuck = [], [], choose_formats.run_once(backward_graph)
    for t in tensors:
        codecs = (chosen[t],) if chosen[t].fuses else (chosen[t], KEEP)
        tensor, producer = graph.tensors[t], producers.get(t)
        again, sources = None, ()
        if producer is not None:
            program, leaves = recomputation(graph, producer.inputs, everything, available)
            program = [*program, producer]
            if not choose_formats.in_the_way(program, {*leaves, *available}) and stuck.isdisjoint(program):
                again = sum(prices.seconds(vjp.graph, op) for op in program)
                sources = tuple(sorted(position[u] for u in leaves if u in position))
        options = tuple(_option(tensor, codec, prices) for codec in codecs)
        name = tensor_text(tensor, producer, "an input")
        items.append(Item(name, options, events.get(t, ()), tensor.bytes, sources, again))
        formats.append(codecs)
    return Items(
        vjp=vjp,
        problem=Problem(tuple(items), base, float("inf")),
        tensors=tensors,
        formats=tuple(formats),
        default=tuple(0 if t in plan.codecs else NOT_STORED for t in tensors),
        held=held,
    )


def _option(tensor: Tensor, codec: Codec, prices: Prices) -> Option:
    """Return a form of a tensor; one that does not fuse with what reads it is unpacked first."""
    seconds, unpacked = codec.moves * tensor.bytes / prices.bytes_per_second, 0 if codec.fuses else tensor.bytes
    return Option(codec.name, stored_bytes(tensor, codec), seconds, unpacked)


def storage_plan(items: Items, choice: Sequence[int]) -> ResidualPlan:
    """The plan that a choice stands for."""
    backward_graph, graph, producers = items.vjp.backward_graph, items.vjp.graph, items.vjp.graph.producers
    stored = dict.fromkeys(items.held, KEEP)
    for t, formats, option in zip(items.tensors, items.formats, choice, strict=True):
        if option != NOT_STORED:
            stored[t] = formats[option]
    while True:
        derived = choose_formats.derived_from(backward_graph, stored, producers)
        plan, hopeless = choose_formats.with_fallbacks(graph, derived, items.held)
        if not hopeless:
            return plan
        stored.update(dict.fromkeys(hopeless, KEEP))


def tensor_text(tensor: Tensor, producer: Operator | None, otherwise: str) -> str:
    """Return a tensor's name: module path and operator, ``otherwise`` without one, then element type and shape."""
    name = otherwise if producer is None else producer.place
    return f"{name} {ShapedArray(tensor.shape, tensor.dtype).str_short(short_dtypes=True)}"


def _starting_format(backward_graph: BackwardGraph, t: TensorNumber) -> Codec:
    """A tensor that is no feature map to be packed: by a user's codec, as it is, or 1 bit for each boolean."""
    graph, producer = backward_graph.graph, backward_graph.graph.producers.get(t)
    policy, path = (backward_graph.policy, "") if producer is None else (producer.policy, producer.path)
    objects = [codec for codec in (policy or backward_graph.policy).at(path) if isinstance(codec, Codec)]
    return choose_formats.smallest_format(graph, t, ["mask", *objects], certain=producer is None)


def _starting_points(backward_graph: BackwardGraph, there: frozenset[TensorNumber]) -> list[TensorNumber]:
    """Tensors from which others can be computed again without looking further back."""
    graph = backward_graph.graph
    producers = graph.producers
    needs = frozenset(backward_graph.needs)
    _, wanted = needed(graph.operators, needs, lambda op: (op.outputs, op.inputs), there)
    sums = choose_formats.sums_of_branches(graph, there)

    def is_one(t: TensorNumber) -> bool:
        op = producers.get(t)
        return op is None or weight(op) is None or t in sums or (t in needs and graph.tensors[t].bits == 1)

    follower = _followers(graph, needs)

    def last(t: TensorNumber) -> TensorNumber:
        while follower.get(t) in wanted:
            t = follower[t]
        return t

    return list(dict.fromkeys(last(t) for t in wanted if is_one(t)))


def _followers(graph: Graph, needs: Container[TensorNumber]) -> dict[TensorNumber, TensorNumber]:
    """Return the tensors cheaply made of a convolution's result and weights where nothing else reads it, step by step.

    Who starts from the result with its bias and its ReLU needs no memory for the result by itself.
    """
    weights = graph.derived_from_parameters
    readers = Counter(t for op in graph.operators for t in op.inputs) + Counter(graph.outputs)
    behind = {op.outputs[0] for op in graph.operators if op.name == _CONVOLUTION}
    follower = {}
    for op in graph.operators:
        others = [t for t in op.inputs if t not in weights]
        if len(others) == 1 and len(op.outputs) == 1 and weight(op) is not None and others[0] in behind:
            (t,), (result,) = others, op.outputs
            if readers[t] == 1 and t not in needs and graph.tensors[result].bytes <= graph.tensors[t].bytes:
                follower[t] = result
                behind.add(result)
    return follower


def _events(
    backward_graph: BackwardGraph,
    everything: ResidualPlan,
    available: frozenset[TensorNumber],
    position: Mapping[TensorNumber, int],
    released: Container[TensorNumber],
) -> tuple[dict[TensorNumber, tuple[int, ...]], tuple[int, ...]]:
    """Return the events that read each item, and the bytes in each of cotangents and of what a step needs besides."""
    chains = _chains(backward_graph.steps[::-1], available)
    graph = backward_graph.graph
    leaves = (
        {t for step in chain for t in recomputation(graph, step.needs, everything, available)[1]} for chain in chains
    )
    items = [frozenset(position.keys() & each) for each in leaves]
    readable = {*everything.formats, *available}
    reads, base = list[frozenset[TensorNumber]](), list[int]()
    for here, size in zip(items, _base_bytes(backward_graph, chains, items, readable, released), strict=True):
        if reads and ((not here and size <= base[-1]) or here == reads[-1]):
            base[-1] = max(base[-1], size)
        else:
            reads.append(here)
            base.append(size)
    most = MOST_EVENTS if current().runs_early else MOST_GPU_EVENTS
    per_event = max(1, -(-len(reads) // most))
    uses = defaultdict[TensorNumber, list[int]](list)
    total: list[int] = []
    for e in range(0, len(reads), per_event):
        for t in sorted(frozenset().union(*reads[e : e + per_event])):
            uses[t].append(len(total))
        total.append(max(base[e : e + per_event]))
    return {t: tuple(events) for t, events in uses.items()}, tuple(total) or (0,)


def _chains(steps: Sequence[BackwardOp], available: frozenset[int]) -> list[list[BackwardOp]]:
    """Return the steps that run as one: each by itself on a CPU; on a GPU a product with the steps before the next.

    There a convolution makes the gradient of its kernel first, and those behind it run apart from it, but as one.
    """
    chains: list[list[BackwardOp]] = []
    for step in steps:
        in_parts = current().order == "joined" and step.name == _CONVOLUTION
        for part in filter(None, divided(step, available) if in_parts else (step,)):
            if not chains or current().runs_early or is_heavy(part) or chains[-1][-1].name == _CONVOLUTION:
                chains.append([])
            chains[-1].append(part)
    return chains


def _base_bytes(
    backward_graph: BackwardGraph,
    chains: Sequence[Sequence[BackwardOp]],
    reads: Sequence[frozenset[TensorNumber]],
    readable: Container[TensorNumber],
    released: Container[TensorNumber],
) -> Iterator[int]:
    """Yield the bytes of cotangents and workspace of each chain of steps, of which ``reads`` are the items.

    On a GPU a matrix product is followed by steps element by element: their cotangents are there behind it. What they
    make of an item that is read last is written over it.
    """
    tensors, kept = backward_graph.source.tensors, backward_graph.graph.tensors
    last_read = {t: e for e, items in enumerate(reads) for t in items}
    unread = Counter(t for chain in chains for step in chain for t in step.cotangents_in)
    cotangents, last = set[TensorNumber](), ""
    for e, chain in enumerate(chains):
        before, running = set(cotangents), 0
        for step in chain:
            cotangents.update(step.cotangents_in)
            given = sum(tensors[t].bytes for t in cotangents)
            cotangents.update(step.cotangents_out)
            if len(chain) == 1 or is_heavy(step):
                after = sum(tensors[t].bytes for t in cotangents)
                running = max(running, after, given + _while_running(backward_graph.graph, step, readable))
                before = set(cotangents)
            unread.subtract(step.cotangents_in)
            cotangents -= {t for t in step.cotangents_in if t not in backward_graph.wrt and not unread[t]}
            cotangents = {t for t in cotangents if t not in released}
        left = sum(tensors[t].bytes for t in cotangents)
        if not is_heavy(chain[0]) and last == _CONVOLUTION:
            running = max(running, sum(tensors[t].bytes for t in before | cotangents))
        last = chain[-1].name
        fresh = Counter((tensors[t].shape, tensors[t].dtype) for t in cotangents - before)
        ending = [kept[t] for t in reads[e] if last_read[t] == e]
        over = fresh & Counter((tensor.shape, tensor.dtype) for tensor in ending)
        sizes = {(tensor.shape, tensor.dtype): tensor.bytes for tensor in ending}
        yield max(running, left - sum(sizes[kind] * n for kind, n in over.items()))


def _while_running(graph: Graph, step: BackwardOp, there: Container[TensorNumber]) -> int:
    """Bytes that a product's step needs besides what it is given: operands recalled or turned around, its results."""
    if not is_heavy(step):
        return 0
    return max(
        sum(graph.tensors[t].bytes for t in part.needs if t not in there) + alive_bytes(lifetimes(part.program))
        for part in parts(step)
    )
