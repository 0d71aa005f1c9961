"""Read published profile graphs of the PipeDream family (D. Narayanan et al., SOSP 2019)."""

import heapq
import os
import re
from collections import Counter, defaultdict
from pathlib import Path

from jaxpipe.costs.profile import Edge, Profile
from jaxpipe.errors import PartitionError
from jaxpipe.text.checked_json import MOST_CHARACTERS


_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NODE = re.compile(r"(\S+) -- (.*?) -- (.*)")
_EDGE = re.compile(r"\t(\S+) -- (\S+)")


def read(path: str | os.PathLike[str]) -> Profile:
    """A profile from a ``graph.txt``.

    A line ``nodeK -- description -- forward_compute_time=ms, backward_compute_time=ms, activation_size=bytes,
    parameter_size=bytes`` is an operator, a tab and ``nodeA -- nodeB`` an edge. An activation of several parts is
    ``[bytes; bytes]``. Nodes whose description starts with ``Input`` cost nothing and are left out. An operator
    keeps its activation for the backward pass.

    Raises:
      PartitionError: naming the file and the line, or why the file cannot be read.
    """
    path = Path(path)
    rows: dict[str, tuple[str, dict[str, float]]] = {}
    arrows: list[tuple[str, str, int]] = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PartitionError(f"{path} is not a text file.") from None
    except OSError as error:
        raise PartitionError(f"{path} cannot be read: {error.strerror or error}.") from error
    if len(text) > MOST_CHARACTERS:
        raise PartitionError(f"{path} has {len(text):,} characters; at most {MOST_CHARACTERS:,} are read.")
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if edge := _EDGE.fullmatch(line.rstrip()):
            arrows.append((edge[1], edge[2], number))
        elif node := _NODE.fullmatch(line.strip()):
            if node[1] in rows:
                raise PartitionError(f"{path}, line {number}: {node[1]} is there twice.")
            rows[node[1]] = (node[2], _costs(node[3], f"{path}, line {number}"))
        else:
            raise PartitionError(
                f"{path}, line {number}: {line[:60]!r} is neither an operator (name -- description -- costs) nor an "
                "edge (a tab, then name -- name)."
            )
    for source, target, number in arrows:
        for name in (source, target):
            if name not in rows:
                raise PartitionError(f"{path}, line {number}: there is no operator {name}.")
    kept = [name for name in rows if not rows[name][0].startswith("Input")]
    edges = list(dict.fromkeys((a, b) for a, b, _ in arrows if a in set(kept) and b in set(kept)))
    order = _sorted(kept, edges, path)
    position = {name: k for k, name in enumerate(order)}
    costs = [rows[name][1] for name in order]
    return Profile(
        names=tuple(f"{name} {rows[name][0]}" for name in order),
        forward_seconds=tuple(1e-3 * row["forward_compute_time"] for row in costs),
        backward_seconds=tuple(1e-3 * row["backward_compute_time"] for row in costs),
        parameter_bytes=tuple(row["parameter_size"] for row in costs),
        residual_bytes=tuple(row["activation_size"] for row in costs),
        edges=tuple(sorted(Edge(position[a], position[b], rows[a][1]["activation_size"]) for a, b in edges)),
        source=path.name,
    )


def _costs(text: str, where: str) -> dict[str, float]:
    given = dict(re.findall(r"(\w+)=(\[.*?\]|[^,]*)", text))
    costs = {}
    for field in _FIELDS:
        try:
            costs[field] = sum(map(float, given.get(field, "").strip("[] ").split(";")))
        except ValueError:
            raise PartitionError(f"{where}: {field} is {given.get(field)!r:.80}, no number or [a; b].") from None
    return costs


def _sorted(names: list[str], edges: list[tuple[str, str]], path: Path) -> list[str]:
    """A topological order; of the operators that are ready, the one with the lowest number comes first."""

    def key(name: str) -> tuple[int, str, str]:
        digits = re.sub(r"[^0-9]", "", name).lstrip("0")
        return len(digits), digits, name  # Python refuses numbers of thousands of digits

    waits, readers = Counter(target for _, target in edges), defaultdict[str, list[str]](list)
    for source, target in edges:
        readers[source].append(target)
    ready, order = sorted(key(name) for name in names if not waits[name]), list[str]()
    while ready:
        order.append(heapq.heappop(ready)[-1])
        for target in readers[order[-1]]:
            waits[target] -= 1
            if not waits[target]:
                heapq.heappush(ready, key(target))
    if len(order) < len(names):
        raise PartitionError(f"{path}: operators {sorted(set(names) - set(order), key=key)[:4]} wait for each other.")
    return order
