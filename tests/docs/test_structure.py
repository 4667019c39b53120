"""docs/structure.md names files and functions that exist, in few steps, and the packages' real imports."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.import_rules import MAY_IMPORT

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "structure.md").read_text()
WAYS = {"page": 20, "query": 15}
"""The two ways through the code, and the most files that each may name in its steps."""
_START = re.search(r"^## Where to start.*?(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
assert _START is not None
WHERE_TO_START = _START[0]
NAMED = re.findall(r"`([\w/]+\.py)`((?:,? `[\w.]+(?<!\.py)`)*)", PAGE.replace(WHERE_TO_START, ""))
PACKAGES = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]*) \|$", PAGE.partition("## The way")[0], re.MULTILINE))


def definitions(file: Path) -> set[str]:
    """Return `name` of each function and class of a module, and `Class.name` of each method."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{each.name}" for each in methods}
    return found


@pytest.mark.parametrize(("way", "most_files"), WAYS.items())
def test_a_way_has_few_steps_and_files(way: str, most_files: int) -> None:
    section = PAGE.partition(f"## The way of a {way}\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^\| (\d+) \| (.*?) \| (.*) \|$", section, re.MULTILINE)
    assert [int(number) for number, _, _ in steps] == list(range(1, len(steps) + 1))
    assert 5 <= len(steps) <= 12
    for _, function, _ in steps:
        assert re.fullmatch(r"`[\w/]+\.py`(,? `[\w.]+`)+", function), function
    files = {path for _, function, text in steps for path in re.findall(r"`([\w/]+\.py)`", function + text)}
    assert len(files) <= most_files


@pytest.mark.parametrize(("path", "names"), sorted(set(NAMED)))
def test_named_files_and_functions_exist(path: str, names: str) -> None:
    assert (ROOT / path).is_file()
    assert set(re.findall(r"`([\w.]+)`", names)) <= definitions(ROOT / path)


def test_files_to_start_with_exist() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", WHERE_TO_START, re.MULTILINE)
    assert {package for package, _ in rows} == set(MAY_IMPORT)
    for package, named in rows:
        for path in re.findall(r"`([\w/]+(?:\.py)?)`", named):
            assert (ROOT / package / path).exists(), f"{package}/{path}"


def test_packages_import_what_the_page_says() -> None:
    assert set(PACKAGES) == set(MAY_IMPORT)
    for package, said in PACKAGES.items():
        if said != "all, on demand":
            assert set(re.findall(r"`(\w+)`", said)) == MAY_IMPORT[package], package
