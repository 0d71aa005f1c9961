"""The library stays as small as it is."""

import ast
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parents[1] / "jaxpipe"

#: Lines of code that the library may have; whoever needs more takes away others, or says here why there are more.
BUDGET = 28_105


def code_lines(text: str) -> int:
    """Lines of a file that are neither blank nor comments nor of a docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds) and ast.get_docstring(node) is not None
    ]
    docstrings = {k for node in nodes for k in range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and k not in docstrings for k, line in lines)


@pytest.mark.core
def test_lines_of_code_are_within_the_budget():
    assert sum(code_lines(path.read_text()) for path in PACKAGE.rglob("*.py")) <= BUDGET


def test_lines_by_hand():
    text = '"""A\n\nB"""\n\n# comment\nx = 1  # code\n\n\ndef f():\n    """Doc."""\n    return """\n# text\n"""\n'
    assert code_lines(text) == 4  # x, def, return and the end of its text; a line of text with # counts as a comment


def test_no_file_is_longer_than_one_concept_takes():
    files = [*PACKAGE.rglob("*.py"), *Path(__file__).parent.rglob("*.py")]
    lengths = {path.name: len(path.read_text().splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > 600} == {}
