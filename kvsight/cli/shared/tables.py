"""Tables of plain text. Nothing in them is ever cut: a table that is too wide leaves out whole columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len

_MS_PER_S, _S_PER_MINUTE, _S_PER_HOUR = 1000, 60, 3600
_MOST_NAMES = 5
_UNSEEN = re.compile(
    "^ +$|[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Texts of spaces, and characters without a shape that count as printable."""


class Column(NamedTuple):
    """One column of a table."""

    title: str
    cells: Sequence[str]
    is_number: bool = False
    """Numbers are aligned to the right."""
    rank: int = 0
    """0: never left out. Otherwise the columns with the highest rank are left out first."""

    @property
    def width(self) -> int:
        """Terminal cells."""
        return max(map(cell_len, (self.title, *map(printable, self.cells))))

    def lines(self) -> Iterator[str]:
        """Yield the title and the cells, padded to the width of the column."""
        width = self.width
        for text in (self.title, *self.cells):
            shown = printable(text)
            padding = " " * (width - cell_len(shown))
            yield padding + shown if self.is_number else shown + padding


def table_lines(columns: Sequence[Column], width: int) -> Iterator[str]:
    """Yield the titles and then the rows. width: terminal cells.

    Columns are left out until the lines fit. If the columns of rank 0 alone do not fit, the lines are longer.
    """
    shown = list(columns)
    while sum(column.width + 2 for column in shown) - 2 > width and (rank := max(column.rank for column in shown)):
        shown.remove(next(column for column in reversed(shown) if column.rank == rank))
    for row in zip(*(column.lines() for column in shown), strict=True):
        yield "  ".join(row).rstrip()


def printable(text: str) -> str:
    """The text, with control characters and what cannot be seen escaped: names come from other machines and must not
    steer a terminal, or look like another name or like none.
    """
    shown = text if text.isprintable() else repr(text)[1:-1]
    return _UNSEEN.sub(
        lambda found: "".join(f"\\x{ord(c):02x}" if c == " " else ascii(c)[1:-1] for c in found[0]), shown
    )


def natural_order(name: str) -> list[tuple[int, str]]:
    """A sort key by which `worker-2` precedes `worker-10`."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part) if part[:1].isdigit() else -1, part) for part in parts]


def duration(ms: int) -> str:
    """A duration in its most readable unit."""
    seconds = ms / _MS_PER_S
    if seconds < 2 * _S_PER_MINUTE:
        return f"{seconds:.1f} s"
    if seconds < 2 * _S_PER_HOUR:
        return f"{seconds / _S_PER_MINUTE:.0f} min"
    return f"{seconds / _S_PER_HOUR:.0f} h"


def names(several: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(several) - _MOST_NAMES} more" if len(several) > _MOST_NAMES else ""
    return ", ".join(map(printable, several[:_MOST_NAMES])) + more


def count(number: int, noun: str) -> str:
    """`1 page`, `2 pages`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
