"""Tables of plain text. Nothing in them is ever cut: a table that is too wide leaves out whole columns."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len

from kv_events.runtime.words import printable


class Column(NamedTuple):
    """One column of a table."""

    title: str
    """Of one line, or of as many as the titles of the other columns."""
    cells: Sequence[str | int | None]
    """None is shown as nothing."""
    is_number: bool = False
    """Texts of numbers are aligned to the right, as numbers are."""
    rank: int = 0
    """0: never left out. Otherwise the columns with the highest rank are left out first."""

    def lines(self) -> list[str]:
        """The title and the cells, padded to the width of the column."""
        shown = [*self.title.split("\n"), *("" if cell is None else printable(str(cell)) for cell in self.cells)]
        width = max(map(cell_len, shown))
        is_right = self.is_number or all(isinstance(cell, int | None) for cell in self.cells)
        padded = ((" " * (width - cell_len(text)), text) for text in shown)
        return [pad + text if is_right else text + pad for pad, text in padded]


def table_lines(columns: Iterable[Column], width: int) -> Iterator[str]:
    """Yield the titles and then the rows. width: terminal cells.

    Columns are left out until the lines fit. If the columns of rank 0 alone do not fit, the lines are longer.
    """
    shown = [(column.rank, column.lines()) for column in columns]
    while sum(cell_len(lines[0]) + 2 for _, lines in shown) - 2 > width and (rank := max(rank for rank, _ in shown)):
        shown.remove(next(each for each in reversed(shown) if each[0] == rank))
    for row in zip(*(lines for _, lines in shown), strict=True):
        yield "  ".join(row).rstrip()
