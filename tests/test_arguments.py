"""No function takes, and no call passes, a long row of positional arguments: what belongs together is one value."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "kv_events", "engine_cache", "publisher", "bridge", "indexer", "analysis", "api", "simulation", "kvsight",
    "benchmarks", "examples", "tests",
)  # fmt: skip
MOST = 12


def offences(source: str) -> Iterator[tuple[int, str]]:
    """(line, what is too long) of declarations and calls."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            count = len(node.args.posonlyargs) + len(node.args.args)
            if count > MOST:
                yield node.lineno, f"{count} positional parameters"
        elif isinstance(node, ast.Call) and len(node.args) > MOST:
            yield node.lineno, f"{len(node.args)} positional arguments"


@pytest.mark.parametrize("package", PACKAGES)
def test_argument_lists_are_short(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {what}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, what in offences(path.read_text())
    ]
    assert found == []


def test_long_lists_are_found_wherever_they_stand() -> None:
    names = ", ".join(f"a{i}" for i in range(MOST + 1))
    source = f"class A:\n  async def f({names}): pass\nx = [f({names}, *y, z=1)]\nlambda {names}: 0\nf(*[{names}])\n"
    assert [line for line, _ in sorted(offences(source))] == [2, 3, 4]
