"""`--html`, which writes a report as one file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvsight.cli.shared.console import UsageError, err
from kvsight.extras import require_analysis

HtmlReport = Annotated[Path | None, typer.Option("--html", help="Write a report with plots to one file.")]


def check_html(path: Path | None, needed_by: str) -> None:
    """Check that a report could be written, before hours of work. Raises MissingExtraError or UsageError."""
    if path is None:
        return
    require_analysis(needed_by)
    if path.is_dir():
        raise UsageError(f"--html: {path} is a folder, expected a file")
    if not path.parent.is_dir():
        raise UsageError(f"--html: {path.parent}: no such folder")


def write_html(path: Path, write: Callable[[Path], int]) -> None:
    """Write a report and print its size. Raises UsageError."""
    try:
        num_bytes = write(path)
    except OSError as error:
        raise UsageError(f"--html: {path}: {error.strerror}") from error
    from analysis.words import size

    err.print(f"{path}: {size(num_bytes)}", markup=False)
