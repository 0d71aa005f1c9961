"""Which tensors a stage stores between its forward and its backward pass, and how it gets the others back.

A plan gives one choice to every tensor that the backward pass touches. It is data: the default below sets it, a
planner may set it otherwise, ``jaxpipe.stage`` runs it.
"""

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jaxpipe.codecs import bits
from jaxpipe.demand import Linearization
from jaxpipe.graph import Graph, Operator, Tensor, itemsize
from jaxpipe.work import VIEWS, weight


class Storage(enum.Enum):
    """How the backward pass gets a tensor."""

    KEEP = "keep"  # stored as it is
    MASK = "mask"  # stored, 1 bit for each boolean
    POOL_INDEX = "pool index"  # stored, 1, 2 or 4 bits for each window position
    ALIAS = "alias"  # a view of what is stored: no bytes, no work
    RECOMPUTE = "recompute"  # computed again from what is stored

    @property
    def is_stored(self) -> bool:
        """Whether the tensor is part of the stash."""
        return self in (Storage.KEEP, Storage.MASK, Storage.POOL_INDEX)


#: Codec names that ``memory_encoded`` accepts, and the storage each allows.
CODECS = {
    "mask": Storage.MASK,
    "index": Storage.POOL_INDEX,
    "alias": Storage.ALIAS,
    "recompute": Storage.RECOMPUTE,
}

#: Named sets. "smallest" is every codec there is.
CODEC_SETS = {"fast": frozenset(CODECS), "smallest": frozenset(CODECS)}

#: A tensor is recomputed only if that reads and writes at most this many elements for each of its own.
RECOMPUTE_WORK_LIMIT = 24


@dataclass(frozen=True)
class StoragePlan:
    """One choice for each tensor that the backward pass touches, by tensor number.

    Tensors that derive from parameters and constants alone have no choice: they are always at hand.
    """

    choices: Mapping[int, Storage]

    @property
    def stored(self) -> tuple[int, ...]:
        """The tensors that make up the stash, in the order of the program."""
        return tuple(sorted(t for t, choice in self.choices.items() if choice.is_stored))

    def stash_bytes(self, graph: Graph) -> int:
        """Bytes of the stash, inputs of the graph included if they are stored."""
        return sum(stored_bytes(graph.tensors[t], self.choices[t]) for t in self.stored)


def stored_bytes(tensor: Tensor, storage: Storage) -> int:
    """Bytes of one stored tensor."""
    if storage is Storage.KEEP or tensor.bits >= 8:
        return tensor.size * itemsize(tensor.dtype)
    return bits.packed_bytes(tensor.shape, tensor.bits)


def stored_form(tensor: Tensor, codecs: Iterable[str]) -> Storage:
    """The smallest form in which the codecs let a tensor be stored."""
    if tensor.bits == 1 and tensor.dtype == np.bool_:
        return Storage.MASK if "mask" in codecs else Storage.KEEP
    return Storage.POOL_INDEX if tensor.bits < 8 * itemsize(tensor.dtype) else Storage.KEEP


def check_plan(linearization: Linearization, plan: StoragePlan) -> None:
    """Raise ``ValueError`` unless the plan gives the backward pass every tensor it needs, and none besides."""
    graph = linearization.graph
    producers = {t: op for op in graph.operators for t in op.outputs}
    at_hand = graph.derived_from_parameters()
    touched: set[int] = set()
    pending = list(linearization.needs)
    while pending:
        t = pending.pop()
        if t in touched or t in at_hand:
            continue
        touched.add(t)
        choice = plan.choices.get(t)
        if choice is None:
            raise ValueError(f"storage plan: the backward pass needs tensor %{t}, for which there is no choice.")
        if not choice.is_stored:
            producer = producers.get(t)
            if producer is None or producer.has_effects:
                raise ValueError(
                    f"storage plan: tensor %{t} is to be recomputed, but it is "
                    f"{'an input' if producer is None else 'the result of an operator with side effects'}; store it."
                )
            pending.extend(producer.inputs)
    extra = set(plan.choices) - touched
    if extra:
        raise ValueError(f"storage plan: nothing in the backward pass reads tensors {sorted(extra)}; drop them.")


def default_plan(
    linearization: Linearization, codecs: Iterable[str] = CODEC_SETS["fast"], held: Iterable[int] = ()
) -> StoragePlan:
    """The plan with the fewest stored bytes among those that recompute nothing expensive.

    A tensor must be stored or follow, through cheap operators, from tensors that are. Fewest bytes is then a
    minimum vertex cut between what cannot be recomputed and what the backward pass needs; of several minimum cuts
    the one nearest to the backward pass is taken, which recomputes least. The use of a minimum cut for
    recomputation is from H. He and S. Yu, "Transcending runtime-memory tradeoffs in checkpointing by being fusion
    aware", MLSys 2023.

    Args:
      linearization: the program and what its backward pass needs.
      codecs: names from ``CODECS``.
      held: inputs that cost nothing to store.
    """
    codecs, held = frozenset(codecs), frozenset(held)
    graph = linearization.graph
    at_hand = graph.derived_from_parameters()
    derivation = _cheap_derivations(graph, at_hand, codecs)
    needs = [t for t in linearization.needs if t not in at_hand]
    price = {}
    pending = list(needs)
    while pending:
        t = pending.pop()
        if t not in price:
            form = stored_form(graph.tensors[t], codecs)
            price[t] = 0 if t in held else stored_bytes(graph.tensors[t], form)
            pending.extend(u for u in _sources(derivation.get(t), at_hand))
    stored = _minimum_cut(price, {t: _sources(derivation.get(t), at_hand) for t in price if t in derivation}, needs)

    choices: dict[int, Storage] = {}
    pending = list(needs)
    while pending:
        t = pending.pop()
        if t in choices:
            continue
        if t in stored:
            choices[t] = stored_form(graph.tensors[t], codecs)
        else:
            choices[t] = Storage.ALIAS if derivation[t].name in VIEWS else Storage.RECOMPUTE
            pending.extend(_sources(derivation[t], at_hand))
    return StoragePlan(dict(sorted(choices.items())))


def _sources(op: Operator | None, at_hand: frozenset[int]) -> list[int]:
    """The tensors that must be there for ``op`` to run in the backward pass."""
    return [] if op is None else [t for t in op.inputs if t not in at_hand]


def _cheap_derivations(graph: Graph, at_hand: frozenset[int], codecs: frozenset[str]) -> dict[int, Operator]:
    """The operator that gives each tensor back cheaply, for the tensors that have one.

    The work of a derivation counts every operator in it once, down to tensors that have no cheap derivation.
    """
    derivation: dict[int, Operator] = {}
    needed_work: dict[int, dict[Operator, int]] = {}
    for op in graph.operators:
        cost = weight(op)
        if cost is None or ("alias" if op.name in VIEWS else "recompute") not in codecs:
            continue
        sources = _sources(op, at_hand)
        elements = max((graph.tensors[t].size for t in (*op.outputs, *sources)), default=0)
        work = {op: cost * elements}
        for t in sources:
            work |= needed_work.get(t, {})
        for t in op.outputs:
            if t not in at_hand and sum(work.values()) <= RECOMPUTE_WORK_LIMIT * max(1, graph.tensors[t].size):
                derivation[t] = op
                needed_work[t] = work
    return derivation


def _minimum_cut(price: Mapping[int, int], sources: Mapping[int, list[int]], needs: Iterable[int]) -> set[int]:
    """The cheapest set of tensors from which all ``needs`` follow.

    Each tensor is an edge ``in -> out`` with its price as capacity. ``sources[t]`` are joined to ``t`` without
    limit; a tensor without an entry cannot be derived and hangs on the source node.
    """
    node = {t: k for k, t in enumerate(price)}
    count = len(node)
    origin, sink = 2 * count, 2 * count + 1
    # scipy takes 32-bit capacities; a unit keeps their sum in range.
    unit = max(1, math.ceil(sum(price.values()) / 2**29))
    unlimited = 2**30
    edges: dict[tuple[int, int], int] = {}
    for t, k in node.items():
        edges[2 * k, 2 * k + 1] = -(-price[t] // unit)
        for u in sources.get(t, ()):
            edges[2 * node[u] + 1, 2 * k] = unlimited
        if t not in sources:
            edges[origin, 2 * k] = unlimited
    edges.update({(2 * node[t] + 1, sink): unlimited for t in needs})
    if not edges:
        return set()
    rows, columns = np.array(list(edges), np.int32).T
    capacity = csr_array((np.array(list(edges.values()), np.int32), (rows, columns)), shape=(2 * count + 2,) * 2)
    flow = maximum_flow(capacity, origin, sink).flow
    residual = csr_array(capacity - flow)
    residual.eliminate_zeros()
    near = set(breadth_first_order(csr_array(residual.T), sink, return_predecessors=False).tolist())
    return {t for t, k in node.items() if 2 * k + 1 in near and 2 * k not in near}
