"""Conventions that no linter knows: Python calls only kernels, and few tests are repeated in CI, each with a reason."""

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PACKAGES = ("kv_events", "publisher", "indexer", "bridge", "api")
MOST_TIMED = 40
"""Tests that CI may repeat."""
OF_KERNELS = {"helper", "inline_helper"}


def decorators(node: ast.FunctionDef) -> set[str]:
    called = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    return {each.id for each in called if isinstance(each, ast.Name)}


def test_python_calls_no_functions_of_kernels() -> None:
    """These functions have no wrapper for Python: the process would crash."""
    trees = {path: ast.parse(path.read_text()) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    functions = {
        (path.stem, node.name)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and decorators(node) & OF_KERNELS
    }
    assert len(functions) > 100
    wrong = []
    for path, tree in trees.items():
        here = {name for stem, name in functions if stem == path.stem}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                stem = node.module.rpartition(".")[2]
                here |= {each.asname or each.name for each in node.names if (stem, each.name) in functions}
        compiled = {
            node
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef) and decorators(function) & {*OF_KERNELS, "kernel", "njit"}
            for node in ast.walk(function)
        }
        called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call) and node not in compiled]
        wrong += [f"{path}: {each.id}" for each in called if isinstance(each, ast.Name) and each.id in here]
    assert not wrong


def uses_of_timing(source: str) -> list[ast.expr | None]:
    """The first argument of each use of the mark `timing`, None where it has none."""
    nodes = list(ast.walk(ast.parse(source if "timing" in source else "")))
    calls = {id(node.func): node.args for node in nodes if isinstance(node, ast.Call)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "timing"]
    marks = [node for node in attributes if ast.unparse(node) == "pytest.mark.timing"]
    return [next(iter(calls.get(id(mark), [])), None) for mark in marks]


def test_few_tests_are_marked_as_depending_on_the_machines_speed_and_each_says_why() -> None:
    uses = [use for path in TESTS.rglob("*.py") for use in uses_of_timing(path.read_text())]
    assert len(uses) <= MOST_TIMED
    assert all(isinstance(use, ast.Constant) and len(str(use.value)) > 10 for use in uses)


def test_every_use_of_the_mark_is_found() -> None:
    source = "@pytest.mark.timing\ndef test_a(): ...\npytestmark = [pytest.mark.timing('a'), pytest.mark.soak]\n"
    assert [use and ast.unparse(use) for use in uses_of_timing(source)] == [None, "'a'"]
