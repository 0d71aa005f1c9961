"""Examples of a micro-batch that depend on one another, found in the traced program.

    examples ──sum over examples──▶ statistic ──▶ values of single examples     (normalization)
                                              └──▶ a state variable             (running statistics)
    examples ──product of each with each──▶ similarities                        (contrastive losses)

A loss sums over the examples too, but nothing of single examples comes after that sum. The axes of examples are those
that grow with the micro-batch: the program is traced for another size, if the sums over first axes in it leave it open.
New running statistics and random draws are signs that an evaluation or a prediction runs in training mode.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxpipe.array_types import AnyJaxpr, TensorNumber
from jaxpipe.errors import TrainingModeWarning, warn
from jaxpipe.graph.graph import Graph, Operator, bodies, dependents, equations_in, is_differentiable, live, read_graph
from jaxpipe.graph.primitives import DRAWS
from jaxpipe.graph.split_scan import scan_operands
from jaxpipe.models.check_batch import batch_size
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.text.value_text import listed


#: Fewer examples than this are too few for their mean and variance to say anything of the batch.
FEW_EXAMPLES = 4

#: The axes of examples of a tensor.
Axes = Callable[[TensorNumber], frozenset[int]]


@dataclass(frozen=True)
class Statistics:
    """Statistics over examples, and products of examples with one another.

    Attributes:
      modules: paths where statistics, but those of similarities, enter values of single examples.
      state: positions of the state variables that statistics enter.
      similarities: paths of the modules that multiply each example with each.
      outside: whether statistics of what depends on no parameter enter values of single examples outside of modules.
    """

    modules: tuple[str, ...] = ()
    state: tuple[int, ...] = ()
    similarities: tuple[str, ...] = ()
    outside: bool = False


@dataclass
class _Search:
    """A walk through a program and the programs in it.

    Attributes:
      axes_of: gives the axes of examples of a program, from itself and the same for more examples; None if they differ
        in more than axes.
      guess: whether these are guessed: what is made of a statistic is then one, whatever its axes.
      trained, all: module paths where statistics enter values of single examples, in order: statistics that depend on
        parameters, and all.
      similarities: module paths of products of each example with each.
      outside: as in ``Statistics``.
    """

    axes_of: Callable[[Graph, Graph], Axes | None]
    guess: bool = False
    trained: dict[str, None] = field(default_factory=dict)
    all: dict[str, None] = field(default_factory=dict)
    similarities: dict[str, None] = field(default_factory=dict)
    outside: bool = False


def find_statistics(objective: MicrobatchProgram) -> Statistics:
    """Return the statistics over examples in a program."""
    nothing, rows = Statistics(), batch_size(objective.microbatch)
    if likely_statistics(objective) == nothing:
        return nothing
    # An axis of length 1 is broadcast otherwise than a longer one.
    smaller, larger = objective if rows > 1 else objective.with_examples(2), objective.with_examples(2 * max(rows, 2))
    return nothing if smaller is None or larger is None else _find(smaller, larger, _Search(grown_axes))


def likely_statistics(objective: MicrobatchProgram) -> Statistics:
    """Return what ``find_statistics``, with two traces, may return, from one program; more than that, as a rule."""
    rows = batch_size(objective.microbatch)
    return _find(objective, objective, _Search(lambda graph, _: _likely_axes(graph, rows), guess=True))


def _find(objective: MicrobatchProgram, larger: MicrobatchProgram, search: _Search) -> Statistics:
    # Metrics may be any statistics of a batch.
    graph, other = (
        replace(x.graph, operators=live(x.graph.operators, (*x.results[:1], *x.new_state))) for x in (objective, larger)
    )
    marks = _walk(graph, other, _Marks(set(objective.parameters), set(), set(objective.batch), set()), search)
    states = enumerate(zip(objective.state, objective.new_state, strict=True))
    state = tuple(k for k, (old, new) in states if new != old and new in marks.statistic)
    # A mask's sum weighs examples too; it depends on no parameter, and is kept nowhere.
    modules = tuple(search.all if state else search.trained)
    return Statistics(modules, state, tuple(search.similarities), search.outside)


class _Marks(NamedTuple):
    """Tensors that depend on parameters, that are statistics over examples, that depend on the batch; similarities.

    What is made of one of these is one as well.
    """

    trained: set[TensorNumber]
    statistic: set[TensorNumber]
    given: set[TensorNumber]
    similar: set[TensorNumber]


def _walk(graph: Graph, other: Graph, marks: _Marks, search: _Search) -> _Marks:
    """The marks of all tensors of a program, from those of its inputs; ``other`` is the same for more examples."""
    axes = search.axes_of(graph, other)
    if axes is None:
        return marks
    for op, twin in zip(graph.operators, other.operators, strict=True):
        programs = bodies(op)
        if programs:
            outside = search.outside
            for inner, larger in zip(programs, bodies(twin), strict=True):
                _run(op, inner, larger, marks, search)
            search.outside = outside if op.path else search.outside
            continue
        depends = not marks.trained.isdisjoint(op.inputs)
        for mark in (marks.trained, marks.given, marks.similar):
            mark.update(op.outputs if not mark.isdisjoint(op.inputs) else ())
        if depends and marks.given.issuperset(op.inputs) and _compares(op, axes):
            marks.similar.update(op.outputs)
            search.similarities[op.path] = None
        if marks.statistic.isdisjoint(op.inputs) and not adds_examples(op, axes):
            continue
        marks.statistic.update(t for t in op.outputs if search.guess or not axes(t))
        if examples := [t for t in op.outputs if axes(t)]:
            search.all[op.path] = None
            search.trained.update({op.path: None} if depends and not marks.similar.issuperset(examples) else {})
            floats = any(is_differentiable(graph.tensors[t].aval) for t in examples)
            search.outside |= floats and not depends and not op.path
    return marks


def _run(op: Operator, program: AnyJaxpr, twin: AnyJaxpr, marks: _Marks, search: _Search) -> None:
    """Mark the outputs of an operator that runs a program, until nothing changes from iteration to iteration."""
    inner, larger = read_graph(program), read_graph(twin)
    operands = op.operands
    given = list(zip(inner.inputs, operands[len(operands) - len(inner.inputs) :], strict=True))
    start = _Marks(*({i for i, t in given if t in mark} for mark in marks))
    carried = _carried(op, inner)
    known, end = -1, start
    while known != sum(map(len, start)):
        known = sum(map(len, start))
        end = _walk(inner, larger, _Marks(*map(set, start)), search)
        for before, after in zip(start, end, strict=True):
            before.update(i for i, o in carried if o in after)
    for outer, after in zip(marks, end, strict=True):
        outer.update(t for t, o in zip(op.outputs, inner.outputs, strict=False) if o in after)


def _carried(op: Operator, inner: Graph) -> list[tuple[TensorNumber, TensorNumber]]:
    """The inputs of a loop's body that are its outputs of the iteration before."""
    if op.name == "scan":
        constants, carried, _ = scan_operands(op)
        consts, count = len(constants), len(carried)
    elif op.name == "while":
        consts, count = len(inner.inputs) - len(inner.outputs), len(inner.outputs)
    else:
        return []
    return list(zip(inner.inputs[consts : consts + count], inner.outputs[:count], strict=True))


def adds_examples(op: Operator, axes: Axes) -> bool:
    """Return whether an operator adds up values of different examples."""
    if op.name == "reduce_sum":
        return not axes(op.inputs[0]).isdisjoint(op.params["axes"])
    if op.name == "psum":  # of a vmap's axis
        return any(not axes(t).isdisjoint(op.params["axes"]) for t in op.inputs)
    if op.name == "dot_general" and len(op.inputs) == 2:
        sides = zip(op.inputs, op.params["dimension_numbers"][0], strict=True)
        return all(not axes(t).isdisjoint(dims) for t, dims in sides)
    return False


def _compares(op: Operator, axes: Axes) -> bool:
    """Return whether an operator multiplies each example of one operand with each of the other."""
    if op.name != "dot_general" or len(op.inputs) != 2:
        return False
    pairs = zip(op.inputs, *op.params["dimension_numbers"], strict=True)
    return all(axes(t) - {*contracted, *batch} for t, contracted, batch in pairs)


def _likely_axes(graph: Graph, rows: int) -> Axes:
    """The first axis of every array, and those as long as the micro-batch: a guess that leaves little out."""
    return lambda t: frozenset(k for k, size in enumerate(graph.tensors[t].shape) if k == 0 or size == rows)


def grown_axes(graph: Graph, larger: Graph) -> Axes | None:
    """The axes in which two graphs of one program differ; None if they differ in more."""
    kinds = [[(op.name, len(op.inputs)) for op in x.operators] for x in (graph, larger)]
    if kinds[0] != kinds[1]:
        return None
    twin = dict(zip(graph.inputs, larger.inputs, strict=True))
    for op, other in zip(graph.operators, larger.operators, strict=True):
        twin.update(zip((*op.inputs, *op.outputs), (*other.inputs, *other.outputs), strict=True))
    if any(len(graph.tensors[a].shape) != len(larger.tensors[b].shape) for a, b in twin.items()):
        return None

    def axes(t: TensorNumber) -> frozenset[int]:
        shapes = graph.tensors[t].shape, larger.tensors[twin[t]].shape
        return frozenset(k for k, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b)

    return axes


def warn_if_training(objective: MicrobatchProgram, name: str) -> None:
    """Give a ``TrainingModeWarning`` if a function draws from the model's random streams, or updates statistics."""
    drawn = random_draws(objective)
    updated = [objective.names[objective.state[k]] for k in find_statistics(objective).state]
    if not drawn and not updated:
        return
    signs = [
        f"{verb} {listed(items, 3)}"
        for verb, items in (("draws random numbers in", drawn), ("computes new batch statistics for", updated))
        if items
    ]
    warn(
        f"{name} {' and '.join(signs)}, as a model in training mode does. Switch the mode in {name}: model.eval() for "
        "NNX, the module's own argument for Linen, such as model(x, train=False) or deterministic=True. If it is meant "
        "so, as for samples, silence this with warnings.simplefilter('ignore', jaxpipe.TrainingModeWarning).",
        TrainingModeWarning,
    )


def random_draws(objective: MicrobatchProgram) -> list[str]:
    """Return the paths of the modules that draw random numbers which follow from the micro-batch's key."""
    operators = objective.graph.operators
    seeded = dependents(operators, [objective.key])
    reading = [op for op in operators if op.equation is not None and not seeded.isdisjoint(op.inputs)]
    drawing = [op for op in reading if any(x.primitive.name in DRAWS for x in equations_in([op.equation]))]
    return list(dict.fromkeys(op.path or op.label for op in drawing))
