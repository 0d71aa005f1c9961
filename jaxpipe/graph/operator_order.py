"""The order in which operators are cut into stages, and the places where a cut is not allowed."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from jaxpipe.array_types import TensorNumber
from jaxpipe.graph.graph import Graph, Operator
from jaxpipe.graph.op_cost import weight


def parameter_work_in_place(graph: Graph, everywhere: Iterable[TensorNumber] = ()) -> Graph:
    """Return the same graph, with what depends on parameters alone moved to where those parameters are used.

    Args:
      everywhere: other inputs that every stage has (the random key): what is made of them waits for its reader.

    A scalar made of parameters (the squared norm of a weight decay term in the loss) is computed right after its
    parameter's first use, so that only a scalar travels to the end; a cast or a transpose stays with its reader.
    """
    available = replace(graph, parameters=graph.parameters | set(everywhere)).derived_from_parameters
    consumers: dict[TensorNumber, list[int]] = {}
    for k, op in enumerate(graph.operators):
        for t in op.inputs:
            consumers.setdefault(t, []).append(k)
    free = [not op.has_effects and all(t in available for t in op.outputs) for op in graph.operators]
    end = len(graph.operators)

    def readers(op: Operator) -> list[int]:
        return [c for t in op.outputs for c in consumers.get(t, ())]

    latest = list(range(end))
    early = [False] * end
    made_of = set(graph.parameters)
    for k in reversed(range(end)):
        if free[k]:
            op = graph.operators[k]
            latest[k] = min((latest[c] for c in readers(op)), default=end)
            small = all(graph.tensors[t].size == 1 for t in op.outputs)
            early[k] = small or (bool(readers(op)) and all(early[c] for c in readers(op)))
    for k, op in enumerate(graph.operators):
        if made_of.isdisjoint(op.inputs):
            early[k] = False  # what is not made of parameters waits for its reader
        else:
            made_of.update(op.outputs)

    uses = {t: [latest[c] for c in consumers.get(t, ()) if not early[c]] for t in graph.parameters}
    first_use = {t: min(places, default=0) for t, places in uses.items()}
    rank = list(latest)
    for k, op in enumerate(graph.operators):
        if early[k]:
            rank[k] = min(latest[k], max((first_use.get(t, 0) for t in op.inputs), default=0))
        if free[k]:
            first_use.update((t, rank[k]) for t in op.outputs)
    order = sorted(range(end), key=lambda k: (rank[k], not free[k], k))
    return replace(graph, operators=tuple(graph.operators[k] for k in order))


def in_stage_order(graph: Graph, stage_of: Mapping[TensorNumber, int]) -> Graph:
    """Return the same graph, with its operators in the order of the stages of the inputs that they depend on.

    Args:
      stage_of: by input, its stage. What depends on none of these is computed in the stage of its first reader.
    """
    operators, last = graph.operators, max(stage_of.values(), default=0)
    after = dict(stage_of)
    stages: list[int | None] = []
    for op in operators:
        stages.append(max((after[t] for t in op.inputs if t in after), default=None))
        if stages[-1] is not None:
            after |= dict.fromkeys(op.outputs, stages[-1])
    before: dict[TensorNumber, int] = {}
    order: list[tuple[int, int]] = []
    for k in reversed(range(len(operators))):
        stage = stages[k]
        if stage is None:
            stage = min((before[t] for t in operators[k].outputs if t in before), default=last)
        before |= {t: min(stage, before.get(t, last)) for t in operators[k].inputs}
        order.append((stage, k))
    return replace(graph, operators=tuple(operators[k] for _, k in sorted(order)))


def spans(
    graph: Graph, inputs: Iterable[TensorNumber], together: Mapping[TensorNumber, TensorNumber]
) -> dict[TensorNumber, tuple[int, int]]:
    """Return the first and the last operator that use each input, or make its ``together``; no cut may fall between."""
    wanted = set(inputs)
    ranges: dict[TensorNumber, tuple[int, int]] = {}
    if not wanted:
        return ranges
    for k, op in enumerate(graph.operators):
        for t in wanted.intersection(op.inputs):
            ranges[t] = (ranges.get(t, (k, k))[0], k)
    for t, new in together.items():
        if new in graph.producers:
            k = graph.places[graph.producers[new]]
            low, high = ranges.get(t, (k, k))
            ranges[t] = (min(low, k), max(high, k))
    return ranges


def uses_apart(graph: Graph, parameters: Iterable[TensorNumber]) -> dict[TensorNumber, tuple[tuple[int, int], ...]]:
    """The uses of each parameter, in groups: first and last operator of each.

    Between two groups there is a product (an operator that is worth a stage of its own) with another parameter.
    """
    wanted, available = set(parameters), graph.derived_from_parameters | graph.parameters
    uses: dict[TensorNumber, list[tuple[int, int]]] = {}
    products: list[int] = []
    for k, op in enumerate(graph.operators):
        for t in wanted.intersection(op.inputs):
            groups = uses.setdefault(t, [(k, k)])
            low, high = groups[-1]
            if products and products[-1] > high and t not in graph.operators[products[-1]].inputs:
                groups.append((k, k))
            else:
                groups[-1] = (low, k)
        if weight(op) is None and not available.isdisjoint(op.inputs):
            products.append(k)
    return {t: tuple(groups) for t, groups in uses.items()}


def allowed_cuts(graph: Graph, held_together: Iterable[tuple[int, int]]) -> list[bool]:
    """For each position ``0..len(operators)``, whether a stage may begin there."""
    allowed = [True] * (len(graph.operators) + 1)
    for low, high in held_together:
        allowed[low + 1 : high + 1] = [False] * (high - low)
    return allowed
