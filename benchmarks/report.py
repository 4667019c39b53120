"""The output of all benchmarks: a table with spread and machine, and JSON."""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table


class Figure(NamedTuple):
    """One measured quantity."""

    name: str
    unit: str
    median: float
    low: float
    """First decile. The median itself if there is only one value."""
    high: float
    """Last decile."""
    goal: str = ""
    nodes: float | None = None
    """Mean number of tree nodes that the operation visited."""


def figure(name: str, unit: str, values: Iterable[float], goal: str = "", nodes: float | None = None) -> Figure:
    """Return the figure of the measured values."""
    values = sorted(values)
    if len(values) == 1:
        return Figure(name, unit, values[0], values[0], values[0], goal, nodes)
    deciles = quantiles(values, n=10, method="inclusive")
    return Figure(name, unit, deciles[4], deciles[0], deciles[8], goal, nodes)


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the value below which so many percent of the values are."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))]


def timed(run: Callable[..., object], *arguments: object) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - began


def machine() -> dict[str, str]:
    """Return the date, the machine and the versions."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cores": str(os.cpu_count()),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "numba": version("numba"),
        "numpy": version("numpy"),
    }


def show(title: str, figures: list[Figure]) -> None:
    """Print the table of one benchmark."""
    table = Table(title=f"{title} ({', '.join(f'{k} {v}' for k, v in machine().items())})")
    table.add_column("what")
    for column in ("median", "10%", "90%"):
        table.add_column(column, justify="right")
    table.add_column("unit")
    table.add_column("goal")
    table.add_column("nodes", justify="right")
    for each in figures:
        spread = [f"{value:,.4g}" for value in (each.median, each.low, each.high)]
        table.add_row(each.name, *spread, each.unit, each.goal, "" if each.nodes is None else f"{each.nodes:,.3g}")
    Console(width=150).print(table)


def as_json(benchmarks: dict[str, list[Figure]]) -> dict[str, Any]:
    """Return everything in the form of `--json`."""
    return {"machine": machine(), **{name: [f._asdict() for f in figures] for name, figures in benchmarks.items()}}


def main(title: str, run: Callable[[], list[Figure]]) -> None:
    """Run the command line of one benchmark: `[--json FILE]`."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    figures = run()
    show(title, figures)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json({title: figures}), indent=2) + "\n")
