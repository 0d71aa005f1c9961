"""Cuts that the caller has given: names of modules, and the operators at which stages begin then."""

import difflib
import itertools
import os
import re
from collections.abc import Mapping, Sequence

from jaxpipe import _compat
from jaxpipe.errors import PartitionError
from jaxpipe.graph.graph import Graph, Operator, equations_in
from jaxpipe.graph.primitives import CHECKPOINTS
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.runtime.stages import places_to_cut, variable_spans
from jaxpipe.text.value_text import listed


#: A module and one of its calls, counted from 0; of a module that is called once, None will do.
GivenCut = tuple[str, int | None]

#: How many names an error lists.
MOST_NAMES = 30

#: The layer of a scan in a name: ``layers[12]``, or ``layers[12:24]`` as plans have it.
_LAYER = re.compile(r"(.*)\[(\d+)(?::\d+)?\]")


def check_cuts(cuts: object) -> tuple[GivenCut, ...]:
    """Return the modules of ``cuts=``, with ``/`` between the parts of their names."""
    if cuts is None:
        return ()
    if isinstance(cuts, str) or not isinstance(cuts, Sequence):
        raise PartitionError(f"cuts={cuts!r}; it must be a sequence of names of modules, such as ['Block_1', 'head'].")
    given: list[GivenCut] = []
    for k, cut in enumerate(cuts):
        is_pair = isinstance(cut, tuple) and [*map(type, cut)] == [str, int] and cut[1] >= 0
        name, call = (cut, None) if isinstance(cut, str) else cut if is_pair else ("", None)
        if not name:
            raise PartitionError(
                f"cuts[{k}]={cut!r}; it must be the name of a module as the plan prints it ('Block_1', 'blocks.1'), or "
                "of one that is called several times with the call, counted from 0: ('shared', 1)."
            )
        given.append((name.strip("/"), call))
    twice = next((cut for cut in given if given.count(cut) > 1), None)
    if twice is not None:
        raise PartitionError(f"cuts={cuts!r} has {_shown(twice)} twice; two stages cannot begin at the same operator.")
    return tuple(given)


def layers_of(cuts: Sequence[GivenCut], path: str) -> list[int]:
    """Return the layers of the scan of a module at which cuts are given."""
    matches = (_LAYER.fullmatch(name) for name, _ in cuts)
    return [int(m[2]) for m in matches if m and f"/{path}".endswith(f"/{m[1]}")]


def find_cuts(cuts: Sequence[GivenCut], objective: MicrobatchProgram) -> dict[str, int]:
    """Return the operator at which each given module begins, by its name.

    Args:
      cuts: what ``check_cuts`` has returned.
      objective: the traced program.

    Raises:
      PartitionError: if a name is unknown, or no stage can begin there.
    """
    if not cuts:
        return {}
    calls, allowed = module_calls(objective.graph), places_to_cut(objective)
    named: dict[str, int] = {}
    for name, call in cuts:
        begins = _begins(objective.graph, calls, name if name in dict(_names(calls)) else name.replace(".", "/"))
        if call is None and len(begins) > 1:
            places = ", ".join(f"({name!r}, {k}) at operator {begin}" for k, begin in enumerate(begins))
            raise PartitionError(
                f"cuts=: {name!r} is no single place: the program comes to it {len(begins)} times. Say which one: "
                f"{places}."
            )
        if call is not None and call >= len(begins):
            raise PartitionError(
                f"cuts=: {_shown((name, call))}: the program comes to {name!r} {len(begins)} time(s), counted from 0."
            )
        begin = begins[call or 0]
        if not begin or not allowed[begin]:
            others = [x for x, at in _names(calls) if at[0] and allowed[at[0]] and len(at) == 1]
            raise PartitionError(
                f"cuts=: no stage can begin at {_shown((name, call))}, operator {begin}: "
                f"{_obstacle(objective, begin)} Modules at which one can: {listed(others, MOST_NAMES)}."
            )
        same = next((other for other, at in named.items() if at == begin), None)
        if same is not None:
            raise PartitionError(
                f"cuts=: {same} and {_shown((name, call))} begin with the same operator, {begin}. Leave one out."
            )
        named[_shown((name, call))] = begin
    return dict(sorted(named.items(), key=lambda item: item[1]))


def module_calls(graph: Graph) -> dict[str, list[int]]:
    """Return, for each module path, the operators at which the program comes to it from outside."""
    calls: dict[str, list[int]] = {}
    before: set[str] = set()
    for k, op in enumerate(graph.operators):
        now = set(itertools.accumulate(op.path.split("/") if op.path else [], "{}/{}".format))
        for path in sorted(now - before):
            calls.setdefault(path, []).append(k)
        before = now
    return calls


def _root(calls: Mapping[str, object]) -> str:
    """Return the path that all modules lie in."""
    inner = [path for path in calls if not any(other.startswith(f"{path}/") for other in calls)]
    return os.path.commonpath([os.path.dirname(x) for x in inner]) if inner and all("/" in x for x in inner) else ""


def _names(calls: Mapping[str, list[int]]) -> list[tuple[str, list[int]]]:
    """Return the modules by their names inside the path that they all lie in."""
    root = _root(calls)
    return [(path.removeprefix(f"{root}/"), at) for path, at in calls.items() if not f"{root}/".startswith(f"{path}/")]


def _begins(graph: Graph, calls: Mapping[str, list[int]], name: str) -> list[int]:
    """Return the operators at which the calls of a module begin."""
    parents = ["", *(f"{path}/" for path in itertools.accumulate(_root(calls).split("/"), "{}/{}".format) if path)]
    layer = _LAYER.fullmatch(name) or (name, name, 0)  # a scan that is cut begins with its first layer
    for parent in parents:
        if f"{parent}{name}" in calls:
            return calls[f"{parent}{name}"]
        groups = [path for path in calls if path.startswith(f"{parent}{layer[1]}[{layer[2]}:")]
        if groups:
            return calls[groups[0]]
    level = name.split("/")[:-1]
    names = dict(_names(calls))
    while level and "/".join(level) not in names:
        level.pop()
    above = "/".join(level)
    whole = [op for op in graph.operators if op.name == "scan" and _inside(name, op.path, parents)]
    if whole:
        raise PartitionError(
            f"cuts=: {name!r}: {whole[0].path} is a scan over layers that is one operator: no stage begins inside it. "
            "Cut it with PlanOptions(unroll_scans=...), the layers that are one; names are then like 'layers[12:24]'."
        )
    checkpoints = [op for op in graph.operators if op.name in CHECKPOINTS and _runs(op, name)]
    if checkpoints:
        raise PartitionError(
            f"cuts=: {name!r} is inside a checkpoint, which is one operator: no stage begins inside it. Name a module "
            "around it, or take jax.checkpoint (nn.remat, nnx.remat) out of the model: memory= decides what runs again."
        )
    if not names:
        raise PartitionError(
            f"cuts=: there is no {name!r}: the operators of this model are in no modules. Name the parts of a function "
            "with jax.named_scope('name')."
        )
    near = difflib.get_close_matches(name, names, cutoff=0.5)
    here = [x for x in names if x.count("/") == len(level) and x.startswith(f"{above}/" if above else "")]
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    where = f"in {above}" if above else f"in {_root(calls) or 'the model'}"
    raise PartitionError(f"cuts=: there is no module {name!r}.{hint} Modules {where}: {listed(here, MOST_NAMES)}.")


def _inside(name: str, path: str, parents: Sequence[str]) -> bool:
    """Return whether a name would be inside of a path, or of one of its layers."""
    return bool(path) and any(f"{p}{name}".startswith((f"{path}/", f"{path}[")) for p in parents)


def _runs(op: Operator, name: str) -> bool:
    """Return whether a program that an operator holds comes to a module."""
    return any(f"/{name}/" in f"/{_compat.named_scope_of(eqn)}/" for eqn in equations_in([op.equation]))


def _obstacle(objective: MicrobatchProgram, begin: int) -> str:
    """Return why no stage begins at an operator."""
    if not begin:
        return "it is the first of the program, and stage 0 begins there anyway."
    spans = [(low, high, t) for t, groups in variable_spans(objective).items() for low, high in groups]
    low, high, t = next(span for span in spans if span[0] < begin <= span[1])
    return (
        f"variable {objective.names[t]} is used from operator {low} to operator {high}, and its uses stay in one "
        "stage, with all that is between them."
    )


def _shown(cut: GivenCut) -> str:
    return repr(cut[0] if cut[1] is None else cut)
