"""The figures in README.md are those of benchmarks/README.md, rounded to two digits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_ROW = re.compile(r"^\| (?P<name>[^|]+?) \| (?P<median>[\d.,]+) \|.*?\| (?P<unit>[A-Za-z/]+) \|", re.MULTILINE)
_SHOWN = re.compile(r"^\| (?P<name>[^|]+?) \| (?P<figure>[\d.,]+) (?P<unit>[A-Za-z/]+) \|$", re.MULTILINE)


def measured() -> Iterator[tuple[str, tuple[float, str]]]:
    """Yield the name and (median, unit) of each row in the benchmarks' tables."""
    for row in _ROW.finditer((ROOT / "benchmarks" / "README.md").read_text()):
        yield row["name"], (float(row["median"].replace(",", "")), row["unit"])


def test_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    figures = dict(measured())
    shown = list(_SHOWN.finditer((ROOT / "README.md").read_text()))
    assert len(shown) >= 5
    for row in shown:
        assert row["name"] in figures, f"benchmarks/README.md has no row {row['name']!r}"
        median, unit = figures[row["name"]]
        assert (float(row["figure"]), row["unit"]) == (float(f"{median:.2g}"), unit), row["name"]
