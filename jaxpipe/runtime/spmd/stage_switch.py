"""A conditional over stages in which stages that compute the same share one branch, so that it is compiled once.

    each stage's branch ──trace──▶ program ──form──▶ equal forms: one branch ──▶ lax.switch over what is left

Forms are those of ``jaxpipe.graph.program_form``. The numbers that random keys are folded with may differ: they are
looked up by stage and handed to the shared branch.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe import _compat
from jaxpipe.array_types import Array, ArrayLike, PyTree
from jaxpipe.graph.program_form import shared_program, trace_program


T = TypeVar("T")


def switch(index: ArrayLike, branches: Sequence[Callable[..., T]], *operands: PyTree) -> T:
    """``lax.switch`` in which branches that compute the same are one; without any conditional if all do.

    The branches are not differentiated: derivative rules in them (``custom_jvp``, ``custom_vjp``) are not compared.
    """
    chosen, shared, row = _grouped(index, branches, operands)
    return lax.switch(chosen, shared, row, *operands)


def overwrite(
    index: Array, branches: Sequence[Callable[..., T]], buffers: T, arrays: Sequence[Array], unless: Array | None = None
) -> T:
    """Switch among branches ``(buffers, arrays, turn) -> buffers`` that overwrite their buffers, unless those stay.

    XLA copies what the branch of a conditional changes, and does so when the program begins. It does not copy what a
    loop carries, so each branch is a loop of one turn or of none. XLA takes out of a loop what is computed from
    ``arrays`` alone, in every branch: a branch lets it all depend on the number of the turn.
    """
    chosen, shared, row = _grouped(index, branches, (buffers, arrays, jnp.int32(0)))
    if unless is None and len(shared) == 1:
        # A loop that XLA knows to run once would be taken apart.
        unless = _compat.hidden_zero([*arrays, *jax.tree.leaves(buffers)])
    for number, branch in enumerate(shared):
        turns = chosen == number if unless is None else (chosen == number) & (unless == 0)
        work = functools.partial(branch, row)
        count = jnp.asarray(turns, jnp.int32)
        buffers = lax.fori_loop(0, count, lambda turn, buffers, work=work: work(buffers, arrays, turn), buffers)
    return buffers


def _grouped(
    index: ArrayLike, branches: Sequence[Callable[..., T]], operands: Sequence[PyTree]
) -> tuple[ArrayLike, list[Callable[..., T]], Array]:
    """Return which of the branches that differ it is, these branches, and the numbers that they are given."""
    programs = [trace_program(branch, operands) for branch in branches]
    numbers: dict[Hashable, int] = {}
    place = [numbers.setdefault(program.form, len(numbers)) for program in programs]
    alike = [[p for p, k in zip(programs, place, strict=True) if k == number] for number in numbers.values()]
    most = max(len(program.folds) for program in programs)
    folds = [[value for _, value in p.folds] + [0] * (most - len(p.folds)) for p in programs]
    chosen = index if len(alike) == len(programs) else jnp.asarray(place, jnp.int32)[index]
    return chosen, list(map(shared_program, alike)), jnp.asarray(np.array(folds, np.uint32))[index]
