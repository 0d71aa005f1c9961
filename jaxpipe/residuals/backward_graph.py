"""The backward pass of a graph, operator by operator, and the residuals that each operator reads.

For every operator on a path from a differentiated input to an output, its own VJP is traced and cut in two:

    forward values ──▶ [ residual operators ] ──▶ needs ──┐
                                                          ├──▶ [ cotangent program ] ──▶ input cotangents
                              output cotangents ──────────┘

Whatever does not depend on a cotangent joins the forward graph; ``needs`` are the tensors that cross the cut.
ReLU then needs a boolean tensor, ``exp`` its output, a convolution the values of its input, ``reshape`` nothing:
nobody lists these demands by name, they are what is left of the derivative that JAX itself would run. A few
operators have a cheaper derivative than JAX's own (``jaxpipe/graph/rules``, and those that users register).
"""

from collections import Counter
from collections.abc import Collection, Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jaxpipe import _compat
from jaxpipe.array_types import AbstractArray, Array, TensorNumber
from jaxpipe.graph import rules
from jaxpipe.graph.allowed_codecs import FAST, Policy
from jaxpipe.graph.derivative_rule import registered, rule_of
from jaxpipe.graph.graph import Graph, GraphBuilder, Operator, behind_rules, is_differentiable, live, ordered
from jaxpipe.graph.operator_vjp import Halves, Wanted, policy_within, writes_zeros
from jaxpipe.graph.program_form import bits_of, is_hashable
from jaxpipe.graph.reverse_walk import needed
from jaxpipe.targets.building import current


@dataclass(frozen=True, eq=False)
class BackwardOp:
    """The program from the cotangents of one operator's outputs to those of its inputs.

    Attributes:
      name, path: the operator.
      label: a name for it that a person recognizes.
      needs: tensors of the forward graph that ``program`` reads.
      cotangents_in: tensors whose cotangents it reads (numbers of the graph that was linearized).
      cotangents_out: tensors that receive one cotangent each, in the order in which JAX adds them up.
      program: ``(*needs, *cotangents_in) -> cotangents_out``.
    """

    name: str
    path: str
    label: str
    needs: tuple[TensorNumber, ...]
    cotangents_in: tuple[TensorNumber, ...]
    cotangents_out: tuple[TensorNumber, ...]
    program: Graph


def step_ends(step: BackwardOp) -> tuple[tuple[TensorNumber, ...], tuple[TensorNumber, ...]]:
    """Return the tensors whose cotangents a step reads, and those whose cotangents it makes."""
    return step.cotangents_in, step.cotangents_out


@dataclass(frozen=True, eq=False)
class BackwardGraph:
    """A graph together with the backward program of each of its operators.

    Attributes:
      source: the graph that was linearized; its tensor numbers key the cotangents.
      graph: the forward graph with the residual operators added; keeps the numbers of ``source``.
      steps: in forward order; the backward pass walks it in reverse.
      wrt: inputs (tensor numbers) that receive a cotangent.
      policy: the codecs that may be used, by module path.
    """

    source: Graph
    graph: Graph
    steps: tuple[BackwardOp, ...]
    wrt: tuple[TensorNumber, ...]
    policy: Policy = FAST

    @property
    def needs(self) -> tuple[TensorNumber, ...]:
        """Every tensor that some backward program reads."""
        return tuple(ordered(t for step in self.steps for t in step.needs))


def build_backward_graph(
    graph: Graph, wrt: Iterable[TensorNumber], *, policy: Policy = FAST, seeds: Iterable[TensorNumber] | None = None
) -> BackwardGraph:
    """Trace the backward pass of a graph, operator by operator.

    Args:
      wrt: tensor numbers of the inputs that receive cotangents.
      policy: where max-pooling may remember window positions instead of its input (codec ``"index"``).
      seeds: the outputs that will be given a cotangent; all if left out.
    """
    wrt, seeds = tuple(wrt), tuple(graph.outputs if seeds is None else seeds)
    operators = rules.matched(graph, lambda op: "index" in (op.policy or policy).at(op.path))
    builder = GraphBuilder(graph.tensors, graph.constants)
    stand_in: dict[TensorNumber, TensorNumber] = {}  # an output that is another tensor unchanged: that tensor
    backward: list[BackwardOp] = []
    for op, halves in _operator_vjps(graph, operators, wrt, seeds):
        operands, needs = [stand_in.get(t, t) for t in op.inputs], list[TensorNumber]()
        if op.equation is None:
            stand_in.update(zip(op.outputs, operands, strict=True))
        elif halves is None:
            for part in op.covers if isinstance(op, rules.Match) else (op,):
                read = tuple(stand_in.get(t, t) for t in part.inputs)
                builder.operators.append(part if read == part.inputs else replace(part, inputs=read))
        else:
            needs = _place(halves, builder, op, operands, stand_in)
        if halves is not None and halves.cotangents_in:
            received = tuple(op.outputs[k] for k in halves.cotangents_in)
            given = tuple(op.inputs[k] for k in halves.cotangents_out)
            backward.append(BackwardOp(op.name, op.scope, op.label, tuple(needs), received, given, halves.program))

    steps = _merge_masks(needed(backward, seeds, step_ends)[0], {*graph.outputs, *wrt}, builder)
    results = tuple(stand_in.get(t, t) for t in graph.outputs)
    forward = replace(
        graph,
        tensors=tuple(builder.tensors),
        operators=live(builder.operators, [*results, *(t for step in steps for t in step.needs)]),
        outputs=results,
        constants=builder.constants,
    )
    return BackwardGraph(graph, forward, steps, wrt, policy)


def _operator_vjps(
    graph: Graph, operators: Iterable[Operator], wrt: Iterable[TensorNumber], seeds: Iterable[TensorNumber]
) -> Iterator[tuple[Operator, Halves | None]]:
    """Trace the VJP of every operator that lies between ``wrt`` and ``seeds``; equal operators are traced once.

    Yields:
      The operator and its VJP, if it has varied operands, which depend on ``wrt``, and useful results, on which
      ``seeds`` depend.
    """
    varied_tensors = set(wrt)
    useful_tensors = needed([*filter(_passes_cotangents, graph.operators)], seeds, Operator.ends)[1]
    ruled = graph.ruled | behind_rules(graph.operators)
    known: dict[Hashable, Halves]  # by operator, and by what operators compute
    known = graph.derived.setdefault((current(), registered()), {})
    for op in operators:
        halves = None
        avals = [graph.tensors[t].aval for t in op.inputs]
        varied = tuple(k for k, t in enumerate(op.inputs) if t in varied_tensors and is_differentiable(avals[k]))
        useful = tuple(k for k, t in enumerate(op.outputs) if t in useful_tensors)
        if op.equation is None:
            halves = _pass_through(avals, varied)
        elif varied and useful:
            behind = tuple(k for k in varied if op.inputs[k] in ruled)
            wanted = Wanted(varied, useful, behind, graph.stage_shape, graph.traced_in)
            if (op, wanted) not in known:
                key = equality_key(op, avals), wanted, policy_within(op), rule_of(op)
                if key not in known:
                    known[key] = rules.derive(op, avals, wanted)
                known[op, wanted] = known[key]
            halves = known[op, wanted]
        if halves is not None:
            varied_tensors.update(op.outputs[k] for k in halves.cotangents_in)
        yield op, halves


def _passes_cotangents(op: Operator) -> bool:
    """Return whether operands may get a cotangent: a loop behind others need not have a derivative in reverse mode."""
    if op.equation is None:
        return True
    return op.name != "stop_gradient" and any(is_differentiable(out.aval) for out in op.equation.outvars)


def equality_key(op: Operator, avals: Sequence[AbstractArray]) -> Hashable:
    """Equal for operators that compute the same; unique where the operator's parameters cannot be hashed."""
    literals = tuple(
        (k, bits_of(atom.val), atom.aval) for k, atom in enumerate(op.equation.invars) if _compat.is_literal(atom)
    )
    key = (op.name, tuple(sorted(op.params.items())), literals, tuple(avals), op.equation.ctx)
    return key if is_hashable(key) else op


def _place(
    halves: Halves,
    builder: GraphBuilder,
    op: Operator,
    operands: Sequence[TensorNumber],
    stand_in: dict[TensorNumber, TensorNumber],
) -> list[TensorNumber]:
    """Add the first half of a VJP to the forward graph; returns the numbers of its needs."""
    primal, count = halves.primal, len(op.outputs)
    number = dict(zip(primal.inputs, operands, strict=True))
    results = list(zip(primal.outputs[:count], op.outputs, strict=True))
    for local, out in results:
        if local in primal.producers:
            number.setdefault(local, out)
    for local, value in primal.constants.items():
        number[local] = builder.constant(value)
    for part in primal.operators:
        for t in part.outputs:
            if t not in number:
                number[t] = builder.tensor(primal.tensors[t].aval, primal.tensors[t].bits)
        read, written = tuple(number[t] for t in part.inputs), tuple(number[t] for t in part.outputs)
        builder.operators.append(Operator(part.equation, read, written, op.path, op.label, op.policy))
    stand_in.update((out, number[local]) for local, out in results if number[local] != out)
    return [number[t] for t in primal.outputs[count:]]


def _pass_through(avals: Sequence[AbstractArray], varied: tuple[int, ...]) -> Halves:
    """The VJP of a call boundary."""
    builder = GraphBuilder()
    numbers = [builder.tensor(avals[k], bits=0) for k in varied]
    program = builder.build(numbers, numbers)
    return Halves(program, varied, varied, program)


def _merge_masks(
    steps: Sequence[BackwardOp], visible: Collection[TensorNumber], builder: GraphBuilder
) -> tuple[BackwardOp, ...]:
    """Make one step of steps that do nothing but set a cotangent to zero by a mask, each straight after the other.

    ``where(x > 1, 1, where(x < -1, -1, x))`` then needs one mask instead of two; the operator that joins them is added
    to ``builder``. Only a cotangent that is neither ``visible`` outside nor a sum may disappear.
    """
    zeros = {t for op in builder.operators if writes_zeros(op) for t in op.outputs}
    summands = Counter(t for step in steps for t in step.cotangents_out)
    merged: list[BackwardOp] = []
    masking: dict[TensorNumber, int] = {}  # by tensor, the place in ``merged`` of the step that masks its cotangent
    for step in steps:
        place = None
        if _mask(step, zeros) is not None:
            (source,), (result,) = step.cotangents_in, step.cotangents_out
            place = masking.get(result) if summands[result] == 1 and result not in visible else None
            masking[source] = len(merged) if place is None else place
        if place is None:
            merged.append(step)
        else:
            merged[place] = _merge(merged[place], step, zeros, builder)
    return tuple(merged)


def _merge(first: BackwardOp, second: BackwardOp, zeros: Collection[TensorNumber], builder: GraphBuilder) -> BackwardOp:
    """The first of two masking steps, with a mask that does what the second does as well."""
    masks = [mask for step in (first, second) if (mask := _mask(step, zeros)) is not None]
    (mask, zero_if), (other, other_zero_if) = masks

    def join(a: Array, b: Array) -> Array:
        b = b if other_zero_if == zero_if else ~b
        return a | b if zero_if else a & b

    closed = _compat.trace_without_scope(join, *(builder.tensors[t].aval for t in (mask, other)))
    policy = next((op.policy for op in builder.operators if mask in op.outputs), None)
    (both,) = builder.read(closed, [mask, other], path=first.path, policy=policy)
    needs = tuple(both if t == mask else t for t in first.needs)
    return replace(first, needs=needs, cotangents_in=second.cotangents_in)


def _mask(step: BackwardOp, zeros: Collection[TensorNumber]) -> tuple[TensorNumber, bool] | None:
    """The mask by which a step sets a cotangent to zero, and the value of it that does; None for other steps."""
    program = step.program
    if [op.name for op in program.operators] != ["select_n"] or len(program.operators[0].inputs) != 3:
        return None
    predicate, *cases = program.operators[0].inputs
    number, seed = dict(zip(program.inputs, step.needs, strict=False)), program.inputs[-1]
    if seed not in cases or program.tensors[predicate].shape != program.tensors[seed].shape:
        return None
    zero_if = cases[0] == seed
    return (number[predicate], zero_if) if number.get(cases[zero_if]) in zeros else None


def divided(step: BackwardOp, tensors: Container[TensorNumber]) -> tuple[BackwardOp | None, BackwardOp | None]:
    """The parts of a step that make cotangents of some tensors, and of others; None for a part that makes nothing."""
    within = [k for k, t in enumerate(step.cotangents_out) if t in tensors]
    others = [k for k, t in enumerate(step.cotangents_out) if t not in tensors]
    return restricted(step, within) if within else None, restricted(step, others) if others else None


def restricted(step: BackwardOp, positions: Sequence[int]) -> BackwardOp:
    """The part of a step that makes the cotangents at some of its positions."""
    if len(positions) == len(step.cotangents_out):
        return step
    program = step.program
    outputs = [program.outputs[k] for k in positions]
    operators = live(program.operators, outputs)
    read = {*outputs, *(t for op in operators for t in op.inputs)}
    needs, seeds = program.inputs[: len(step.needs)], program.inputs[len(step.needs) :]
    inputs = tuple(t for t in program.inputs if t in read)
    return replace(
        step,
        needs=tuple(t for t, inner in zip(step.needs, needs, strict=True) if inner in read),
        cotangents_in=tuple(t for t, inner in zip(step.cotangents_in, seeds, strict=True) if inner in read),
        cotangents_out=tuple(step.cotangents_out[k] for k in positions),
        program=replace(program, operators=operators, inputs=inputs, outputs=tuple(outputs)),
    )
