"""Python calls only kernels. Their functions have no wrapper for Python: the process would crash."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("kv_events", "publisher", "indexer", "bridge", "api")
OF_KERNELS = {"array_helper", "array_function"}


def decorators(node: ast.FunctionDef) -> set[str]:
    called = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    return {each.id for each in called if isinstance(each, ast.Name)}


def test_python_calls_no_functions_of_kernels() -> None:
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
            if isinstance(function, ast.FunctionDef) and decorators(function) & {*OF_KERNELS, "array_kernel", "njit"}
            for node in ast.walk(function)
        }
        called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call) and node not in compiled]
        wrong += [f"{path}: {each.id}" for each in called if isinstance(each, ast.Name) and each.id in here]
    assert not wrong
