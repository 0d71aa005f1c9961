"""A graph as text: equal for equal programs in every process, whatever terminal or log they write to."""

from collections import defaultdict
from collections.abc import Callable

from jaxpipe.graph.derivative_rule import rule_name, rule_of
from jaxpipe.graph.graph import Graph, Operator
from jaxpipe.text.stable_text import digest, writer


def program_text(graph: Graph, values: bool = False) -> str:
    """Return a program as text; with ``values``, also the values of its constants."""
    write = writer(values)
    constants = sorted(graph.constants.items()) if values else sorted(graph.constants)
    lines = [f"{graph.inputs} -> {graph.outputs}; {sorted(graph.parameters)}; {write(constants)}"]
    lines += [f"{op.outputs} = {op.inputs} {_operator_text(op, write)}" for op in graph.operators]
    lines += [f"%{t}: {write(tensor.aval)} {tensor.bits}" for t, tensor in enumerate(graph.tensors)]
    return "\n".join(lines)


def digests_by(graph: Graph, place_of: Callable[[Operator], str], values: bool = True) -> dict[str, str]:
    """Return a digest of the operators of each place of a program, whatever else is before and behind them.

    Where two programs differ, these tell where; with ``values``, also where only their constants do.
    """
    write, lines = writer(values), defaultdict[str, list[str]](list)
    for op in graph.operators:
        operands = [graph.constants.get(t, graph.tensors[t].aval) for t in op.inputs]
        results = [graph.tensors[t].aval for t in op.outputs]
        lines[place_of(op)].append(f"{write(results)} = {write(operands)} {_operator_text(op, write)}")
    return {place: digest("\n".join(texts)) for place, texts in lines.items()}


def _operator_text(op: Operator, write: Callable[[object], str]) -> str:
    context = None if op.equation is None else op.equation.ctx
    rule = rule_name(rule_of(op))
    policy = "" if op.policy is None else f"{op.policy.codecs_name} {op.saved}"
    return f"{op.name} {write(op.params)} {write(op.literals)} {op.path} {write(context)} {policy} {rule}"
