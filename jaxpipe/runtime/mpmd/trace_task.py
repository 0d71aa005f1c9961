"""Functions over trees of arrays, traced as tasks: operands that are read, results that are new."""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import jax

from jaxpipe import _compat
from jaxpipe.array_types import Atom, PyTree, PyTreeDef
from jaxpipe.graph.program_form import TracedProgram
from jaxpipe.runtime.mpmd.step_graph import Form, Path, Task


#: Arrays by group, such as ``"parameters"``, and in a group by tensor number or the like. Of values, their numbers.
Arrays: TypeAlias = dict[str, Any]

#: Work that is traced: arrays in, arrays out.
Work: TypeAlias = Callable[[Arrays], Arrays]

#: Groups of arrays that belong to one micro-batch: a result may be one of these, without a copy.
OF_MICROBATCH = {"arriving", "leaving", "cotangents", "returning", "stash", "saved", "statistics", "results"}

#: The order of a stage's results, by which XLA orders what it computes: what is sent and small values, then sums.
_ORDER = ("leaving", "state", "totals", "overflows", "statistics", "results", "stash", "returning", "saved", "sums")


class Traced(NamedTuple):
    """A task, and how its operands and its results stand in trees."""

    task: Task
    operands: PyTreeDef
    reads: tuple[int, ...]  # positions among all operands
    tree: PyTreeDef  # of the results
    sources: tuple[int, ...]  # by leaf of this tree, the position among the written results, or ~position of an operand


#: Tasks by what decides them.
Traces: TypeAlias = dict[Hashable, Any]


def trace_task(
    label: str, work: Work, form: Callable[[Path], Form], operands: Arrays, consumes: bool = False
) -> Traced:
    """Trace work, a function of arrays by group that returns such, on operands of some shapes.

    ``form`` gives the form of each result.

    A result that is an operand of the same path, or an array of one micro-batch, is not written anew.
    """
    closed, shapes = jax.make_jaxpr(work, return_shape=True)(operands)
    jaxpr, _ = _compat.open_jaxpr(closed)
    given, results = _paths(operands), _paths(shapes)
    position = {v: k for k, v in enumerate(jaxpr.invars)}
    written: dict[Atom, int] = {}
    writes: list[int] = []  # positions among the results
    sources: dict[int, int] = {}
    for n in sorted(range(len(results)), key=lambda n: _rank(results[n])):
        atom = jaxpr.outvars[n]
        if not _compat.is_literal(atom):
            k = position.get(atom)
            if k is not None and (given[k] == results[n] or given[k][0] in OF_MICROBATCH):
                sources[n] = ~k
                continue
            if atom in written and results[writes[written[atom]]][0] in OF_MICROBATCH:
                sources[n] = written[atom]
                continue
            written[atom] = len(writes)
        sources[n] = len(writes)
        writes.append(n)
    program, reads = _part(closed, writes)
    names = tuple(results[n] for n in writes)
    forms = tuple(map(form, names))
    task = Task(label, program, tuple(given[k] for k in reads), names, forms, consumes)
    tree = jax.tree.structure(shapes)
    return Traced(task, jax.tree.structure(operands), reads, tree, tuple(sources[n] for n in range(len(results))))


def trim_task(task: Task, writes: Collection[int]) -> tuple[Task, tuple[int, ...]]:
    """Return the task with some of its results, and the positions of the operands that it then reads."""
    kept = sorted(writes)
    program, reads = _part(task.program.closed, kept)
    names, forms = tuple(task.writes[k] for k in kept), tuple(task.forms[k] for k in kept)
    return replace(
        task, program=program, reads=tuple(task.reads[k] for k in reads), writes=names, forms=forms, estimate={}
    ), reads


def _part(closed: Any, writes: Sequence[int]) -> tuple[TracedProgram, tuple[int, ...]]:
    """Return the part of a program that makes some of its results, and which operands it reads."""
    part, used = _compat.without_dead_code(closed, writes)
    return TracedProgram(part, jax.tree.structure((0,) * len(writes))), tuple(
        k for k, is_used in enumerate(used) if is_used
    )


def _rank(path: Path) -> int:
    return _ORDER.index(path[0]) if path[0] in _ORDER else len(_ORDER)


def _paths(tree: PyTree) -> list[Path]:
    """Return the keys that lead to each leaf."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path) for path, _ in leaves]
