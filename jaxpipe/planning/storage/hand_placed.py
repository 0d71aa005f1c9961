"""Checkpoints as people place them: ``nn.remat`` of every block or of every second one, with a policy or without.

Blocks are modules that a model has several of: ``Block_0``, ``Block_1``, ... Each choice is one of the same problem
that solvers work on, so that it is simulated, compiled and compared as theirs are.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from jaxpipe.array_types import TensorNumber
from jaxpipe.graph.graph import Graph, Operator
from jaxpipe.graph.op_cost import is_product
from jaxpipe.planning.storage.storage_items import Items
from jaxpipe.planning.storage.storage_problem import NOT_STORED


#: Families of blocks that have at least this share of a program's products are checkpointed.
LEAST_SHARE = 0.25

#: A module's number at the end of its name: the 3 of ``Block_3`` and of ``blocks/3``.
_NUMBERED = re.compile(r"(.*?)\d+")


def hand_placed(items: Items) -> dict[str, tuple[int, ...]]:
    """Return choices by what a person would write for them."""
    graph = items.backward_graph.graph
    choices = {}
    for family, blocks in _families(graph).items():
        for every, which in ((1, "every"), (2, "every second")):
            block_of = {op: k for op, k in blocks.items() if k % every == 0}
            inner = set(_inner_tensors(graph, block_of))
            products = {t for op in block_of if is_product(op) for t in op.outputs}
            for name, saved in (("", set[TensorNumber]()), (", products saved", products)):
                choices[f"nn.remat of {which} {family}{name}"] = _choice(items, inner - saved, saved)
    return {name: choice for name, choice in choices.items() if choice != items.default}


def _families(graph: Graph) -> Mapping[str, dict[Operator, int]]:
    """Return the operators of the modules of each family, by the number of the module."""
    families: dict[str, dict[str, list[Operator]]] = defaultdict(lambda: defaultdict(list))
    for op in graph.operators:
        parts = op.path.split("/")
        for depth, part in enumerate(parts):
            named = _NUMBERED.fullmatch(part)
            if named is not None:
                name = "/".join([*parts[:depth], f"{named[1]}*"])
                families[name]["/".join(parts[: depth + 1])].append(op)
    most = sum(map(is_product, graph.operators))
    large = {}
    for name, modules in families.items():
        count = sum(is_product(op) for operators in modules.values() for op in operators)
        if len(modules) > 1 and count >= LEAST_SHARE * most:
            large[name] = {op: k for k, operators in enumerate(modules.values()) for op in operators}
    return large


def _inner_tensors(graph: Graph, block_of: Mapping[Operator, int]) -> Iterator[TensorNumber]:
    """Yield what is made in a block, and read there alone."""
    readers = defaultdict(list)
    for op in graph.operators:
        for t in op.inputs:
            readers[t].append(block_of.get(op))
    outputs = set(graph.outputs)
    for op, block in block_of.items():
        for t in op.outputs:
            if t not in outputs and all(reader == block for reader in readers[t]):
                yield t


def _choice(items: Items, again: set[TensorNumber], saved: set[TensorNumber]) -> tuple[int, ...]:
    """Return default storage, but that some tensors are computed again and others are saved."""
    return tuple(
        NOT_STORED if t in again and item.seconds is not None else 0 if t in saved else option
        for t, item, option in zip(items.tensors, items.problem.items, items.default, strict=True)
    )
