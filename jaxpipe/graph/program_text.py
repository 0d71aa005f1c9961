"""A graph as text: equal for equal programs in every process, whatever terminal or log they write to."""

from collections import defaultdict
from collections.abc import Callable, Hashable

from jaxpipe.graph.derivative_rule import rule_name, rule_of
from jaxpipe.graph.graph import Graph, Operator
from jaxpipe.graph.program_form import is_hashable
from jaxpipe.text.stable_text import digest, writer


def program_text(graph: Graph, values: bool = False) -> str:
    """Return a program as text; with ``values``, also the values of its constants."""
    write = writer(values)
    describe = _operator_writer(write)
    constants = sorted(graph.constants.items()) if values else sorted(graph.constants)
    lines = [f"{graph.inputs} -> {graph.outputs}; {sorted(graph.parameters)}; {write(constants)}"]
    lines += [f"{op.outputs} = {op.inputs} {describe(op)}" for op in graph.operators]
    lines += [f"%{t}: {write(tensor.aval)} {tensor.bits}" for t, tensor in enumerate(graph.tensors)]
    return "\n".join(lines)


def digests_by(graph: Graph, place_of: Callable[[Operator], str], values: bool = True) -> dict[str, str]:
    """Return a digest of the operators of each place of a program, whatever else is before and behind them.

    Where two programs differ, these tell where; with ``values``, also where only their constants do.
    """
    write, lines = writer(values), defaultdict[str, list[str]](list)
    describe = _operator_writer(write)
    for op in graph.operators:
        operands = [graph.constants.get(t, graph.tensors[t].aval) for t in op.inputs]
        results = [graph.tensors[t].aval for t in op.outputs]
        lines[place_of(op)].append(f"{write(results)} = {write(operands)} {describe(op)}")
    return {place: digest("\n".join(texts)) for place, texts in lines.items()}


def _operator_writer(write: Callable[[object], str]) -> Callable[[Operator], str]:
    """Return a function that writes an operator without its operands; what equal operators share is written once."""
    known = dict[Hashable, tuple[str, str]]()

    def text(op: Operator) -> str:
        context, rule = None if op.equation is None else op.equation.ctx, rule_of(op)
        policy = "" if op.policy is None else f"{op.policy.codecs_name} {op.saved}"
        sight: Hashable = op.name, tuple(op.params.items()), context, policy, rule
        if not is_hashable(sight):  # a parameter of it is not
            sight = op
        if sight not in known:
            known[sight] = f"{op.name} {write(op.params)}", f"{write(context)} {policy} {rule_name(rule)}"
        what, how = known[sight]
        return f"{what} {write(op.literals)} {op.path} {how}"

    return text
