"""Few tests are repeated in CI, and each says why."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parent
MOST = 40


def uses_of_timing(source: str) -> list[ast.expr | None]:
    """The first argument of each use of the mark `timing`, None where it has none."""
    nodes = list(ast.walk(ast.parse(source)))
    calls = {id(node.func): node.args for node in nodes if isinstance(node, ast.Call)}
    marks = [node for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.timing"]
    return [next(iter(calls.get(id(mark), [])), None) for mark in marks]


def test_few_tests_are_marked_as_depending_on_the_machines_speed_and_each_says_why() -> None:
    uses = [use for path in TESTS.rglob("*.py") for use in uses_of_timing(path.read_text())]
    assert len(uses) <= MOST
    assert all(isinstance(use, ast.Constant) and len(str(use.value)) > 10 for use in uses)


def test_every_use_of_the_mark_is_found() -> None:
    source = "@pytest.mark.timing\ndef test_a(): ...\npytestmark = [pytest.mark.timing('a'), pytest.mark.soak]\n"
    assert [use and ast.unparse(use) for use in uses_of_timing(source)] == [None, "'a'"]
