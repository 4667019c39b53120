"""The table of a run, or of several: `python -m tests.chaos.report build/chaos/*.json` writes it for the docs."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from tests.chaos.run import Outcome, Report

HEADINGS = (
    "fault",
    "times",
    "converges (median)",
    "(worst)",
    "pages sent again",
    "worst answer",
    "5xx",
    "divergent pages",
    "lies",
)


def rows_of(reports: Sequence[Report]) -> list[list[str]]:
    by_fault: dict[str, list[Outcome]] = defaultdict(list)
    for report in reports:
        for outcome in report.outcomes:
            by_fault[outcome.faults[0] if len(outcome.faults) == 1 else "~"].append(outcome)
    return [_row("two faults at once" if name == "~" else name, each) for name, each in sorted(by_fault.items())]


def _row(name: str, outcomes: list[Outcome]) -> list[str]:
    times = [float("inf") if each.converged_s is None else each.converged_s for each in outcomes]
    return [
        name,
        str(len(outcomes)),
        f"{median(times):.1f} s",
        f"{max(times):.1f} s",
        f"{median(each.resent_pages for each in outcomes):,.0f}",
        f"{max(each.worst_s for each in outcomes) * 1000:.0f} ms",
        str(sum(each.errors for each in outcomes)),
        str(sum(each.divergent_pages for each in outcomes)),
        str(sum(each.lies for each in outcomes)),
    ]


def plain_table(reports: Sequence[Report]) -> str:
    rows = [list(HEADINGS), *rows_of(reports)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def markdown_table(reports: Sequence[Report]) -> str:
    lines = [HEADINGS, ["---", *["---:"] * (len(HEADINGS) - 1)], *rows_of(reports)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(report: Report) -> str:
    ratio = report.faulty_p99_s / report.quiet_p99_s if report.quiet_p99_s else 0.0
    p99 = f"p99 {report.quiet_p99_s * 1000:.1f} ms quiet, {report.faulty_p99_s * 1000:.1f} ms during faults"
    done = f"{len(report.outcomes)} injections in {report.minutes:.1f} min, {report.queries:,} answers"
    return f"seed {report.seed}: {done}; {p99} ({ratio:.1f} times)"


if __name__ == "__main__":
    given = [msgspec.json.decode(Path(name).read_bytes(), type=Report) for name in sys.argv[1:]]
    print(markdown_table(given))
    for each in given:
        print(f"\n* {summary(each)}")
