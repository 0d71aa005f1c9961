"""Rooms of the package depend only downward."""

import ast
import re
from pathlib import Path

import pytest

from jaxpipe.graph import primitives


ROOT = Path(__file__).parents[1]

#: Top to bottom: a room imports from itself and from those behind it.
ROOMS = (
    "__main__",
    "cli",
    "testing",
    "partition",
    "pipeline",
    "visualize",
    "checkpoint",
    "step",
    "planning",
    "runtime",
    "plan",
    "recipe",
    "exchange_plan",
    "costs",
    "residuals",
    "models",
    "gradients",
    "graph",
    "sharding",
    "schedules",
    "options",
    "agreement",
    "collect_later",
    "context_values",
    "text",
    "multihost",
    "_compat",
    "targets",
    "array_types",
    "errors",
    "_version",
)


def modules():
    return {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in (ROOT / "jaxpipe").rglob("*.py")}


def imported(path):
    """The modules, or names in them, that any statement of a file imports: lazy ones and those for types included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno} is a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


def test_every_module_is_in_a_room():
    rooms = {name.split(".")[1] for name in modules()} - {"__init__"}
    assert sorted(rooms) == sorted(ROOMS)


@pytest.mark.core
def test_rooms_depend_only_downward():
    upward = [
        f"{name}:{line} imports {target}"
        for name, path in modules().items()
        for line, target in imported(path)
        if target.split(".")[0] == "jaxpipe" and name != "jaxpipe.__init__"
        if target == "jaxpipe" or ROOMS.index(target.split(".")[1]) < ROOMS.index(name.split(".")[1])
    ]
    assert upward == []


@pytest.mark.core
def test_one_program_for_all_devices_tells_nothing_of_itself():
    """What it needs besides stages, a schedule and a placement is known to it alone, and where a runtime is chosen."""
    room, chooser = "jaxpipe.runtime.spmd", "jaxpipe.runtime.select_runtime"
    importers = {
        name
        for name, path in modules().items()
        for _, target in imported(path)
        if target.startswith(room) and not name.startswith(room)
    }
    assert importers == {chooser}


def test_files_that_the_tree_of_contributing_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tree = text[text.index("    jaxpipe/\n") :].split("\n\n")[0]
    names = [name for line in tree.splitlines() for name in re.findall(r"\w+\.pyi?\b", line)]
    existing = {path.name for path in (ROOT / "jaxpipe").rglob("*.py*")}
    assert len(names) > 50 and not set(names) - existing


def nodes():
    """Every node of the package's source, with its module."""
    return [(name, node) for name, path in modules().items() for node in ast.walk(ast.parse(path.read_text()))]


def constants(node):
    return [x.value for x in ast.walk(node) if isinstance(x, ast.Constant)]


@pytest.mark.core
def test_nothing_but_targets_asks_for_the_name_of_a_platform():
    asked = [
        f"{name}:{node.lineno}"
        for name, node in nodes()
        if isinstance(node, ast.Compare | ast.Match)
        and not {"cpu", "gpu", "tpu", "cuda", "rocm"}.isdisjoint(constants(node))
    ]
    assert [place for place in asked if not place.startswith("jaxpipe.targets.")] == []


@pytest.mark.core
def test_primitives_are_grouped_in_one_table():
    """No other module has a set of primitives; a rule for each of some primitives is a dictionary."""
    groups = [group for name, group in vars(primitives).items() if name.isupper()]
    table = {name for group in groups for name in group}
    others = [
        f"{name}:{node.lineno}"
        for name, node in nodes()
        if isinstance(node, ast.Set | ast.Tuple | ast.List)
        and name != primitives.__name__
        and len(node.elts) > 1
        and all(isinstance(x, ast.Constant) and x.value in table for x in node.elts)
    ]
    assert len(table) > 100 and others == []
