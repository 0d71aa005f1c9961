"""Checkpoints as people place them: ``nn.remat`` of every block or of every second one, with a policy or without.

Blocks are modules that a model has several of: ``Block_0``, ``Block_1``, ... Each choice is one of the same problem
that solvers work on, so that it is simulated, compiled and compared as theirs are.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax

from jaxpipe.array_types import TensorNumber
from jaxpipe.graph.graph import Graph, Operator
from jaxpipe.graph.op_cost import is_product
from jaxpipe.graph.save_policy import is_saved
from jaxpipe.planning.storage.storage_items import Items
from jaxpipe.planning.storage.storage_problem import NOT_STORED, possible
from jaxpipe.residuals.equal_blocks import modules_by_family


#: Families of blocks that have at least this share of a program's products are checkpointed.
LEAST_SHARE = 0.25

#: What checkpoints may save, and the name of JAX's policy for it.
POLICIES = {
    "": "nothing_saveable",
    ", products saved": "dots_saveable",
    ", products without batch saved": "dots_with_no_batch_dims_saveable",
}


@dataclass(frozen=True)
class Placement:
    """Checkpoints around every n-th module of a family, or around a whole program without one.

    Attributes:
      family: such as ``"Net/Block_*"``.
      every: 1, or 2 for every second module.
      saved: what is saved within them, a key of ``POLICIES``.
    """

    family: str | None
    every: int
    saved: str

    @property
    def name(self) -> str:
        """The words for it in a plan."""
        if self.family is None:
            return f"jax.checkpoint of all{self.saved}"
        return f"nn.remat of {'every' if self.every == 1 else 'every second'} {self.family}{self.saved}"


def hand_placed(items: Items) -> dict[Placement, tuple[int, ...]]:
    """Return choices by what a person would write for them; of equal choices the first."""
    graph, choices = items.vjp.graph, dict[tuple[int, ...], Placement]()
    products = {t for op in graph.operators if is_product(op) for t in op.outputs}
    for family, blocks in {**_families(graph), None: dict.fromkeys(graph.operators, 0)}.items():
        for every in (1, 2) if family else (1,):
            block_of = {op: k for op, k in blocks.items() if k % every == 0}
            inner = set(_inner_tensors(graph, block_of))
            for saved in POLICIES:
                policy = getattr(jax.checkpoint_policies, POLICIES[saved])
                kept = {t for op in block_of if is_product(op) and is_saved(policy, op.equation) for t in op.outputs}
                choice = possible(items.problem, _choice(items, inner - kept, products))
                choices.setdefault(choice, Placement(family, every, saved))
    return {placement: choice for choice, placement in choices.items() if choice != items.default}


def _families(graph: Graph) -> Mapping[str | None, dict[Operator, int]]:
    """Return the operators of the modules of each family, by the number of the module."""
    operators, large = graph.operators, {}
    most = sum(map(is_product, operators))
    for name, modules in modules_by_family(op.path for op in operators).items():
        count = sum(is_product(operators[place]) for places in modules.values() for place in places)
        if len(modules) > 1 and count >= LEAST_SHARE * most:
            large[name] = {operators[place]: k for k, places in enumerate(modules.values()) for place in places}
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


def _choice(items: Items, again: set[TensorNumber], products: set[TensorNumber]) -> tuple[int, ...]:
    """Return default storage, but that some tensors are computed again and all products besides are saved."""
    return tuple(
        NOT_STORED if t in again and item.seconds is not None else 0 if t in products else option
        for t, item, option in zip(items.tensors, items.problem.items, items.default, strict=True)
    )
