"""Output and progress bars, for all commands."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from kv_events.errors import KvsightError
from kvsight.extras import require


class _Output(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # not SystemExit(1), as rich does: see `Group.invoke`


out = _Output(markup=False, highlight=False, emoji=False)
"""Standard output: data and tables."""

err = Console(stderr=True, markup=False, highlight=False, emoji=False, soft_wrap=True)
"""Standard error: progress and messages, never data. Lines are never wrapped."""

HtmlReport: TypeAlias = Annotated[Path | None, typer.Option("--html", help="Write a report with plots to one file.")]
Engines: TypeAlias = Annotated[
    list[str] | None, typer.Option("--engine", help="An engine: NAME=tcp://HOST:PORT,... Repeatable.")
]
EngineFile: TypeAlias = Annotated[Path | None, typer.Option("--config", help="File with engines: TOML, or .json.")]
Model: TypeAlias = Annotated[str | None, typer.Option("--model", help="Model of engines that name none.")]

EXIT_USAGE = 2
"""Exit code for a mistake of the user, and for a service or a broker that does not answer."""


class UsageError(KvsightError):
    """A command cannot do what the user asked. The message is shown without a traceback."""


def next_step(error: KvsightError, flag: str = "--url") -> str:
    """What to do about a service that cannot be reached, as the end of the message; empty for other errors.

    flag: has its address.
    """
    import httpx

    return (
        f": start `kvsight serve`, or set {flag} to its address"
        if isinstance(error.__cause__, httpx.ConnectError)
        else ""
    )


def at_most_one(flags: Mapping[str, object]) -> str | None:
    """The flag that was given, of several that exclude each other. Raises UsageError if there are two."""
    given = [flag for flag, value in flags.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"give either {given[0]} or {given[1]}, not both")
    return given[0] if given else None


def print_lines(lines: Iterable[str]) -> None:
    """Print lines to stdout as they are: never wrapped, never cut."""
    for line in lines:
        out.print(line, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value as indented JSON to stdout."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_result(value: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print the result of a command: as JSON, or in lines for people."""
    if as_json:
        print_json(value)
    else:
        print_lines(lines)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a progress bar on stderr until the block ends. Shows nothing if stderr is not a terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        yield progress


@contextmanager
def waiting(what: RenderableType) -> Iterator[None]:
    """Show a spinner on stderr while the block runs. Shows nothing if stderr is not a terminal."""
    if err.is_terminal:
        with err.status(what):
            yield
    else:
        yield


def check_html(path: Path | None, needed_by: str) -> None:
    """Check that a report could be written, before hours of work. Raises MissingExtraError or UsageError."""
    if path is None:
        return
    require("analysis", needed_by)
    if path.is_dir():
        raise UsageError(f"--html: {path} is a folder, expected a file")
    if not path.parent.is_dir():
        raise UsageError(f"--html: {path.parent}: no such folder")


def write_html(path: Path, write: Callable[[Path], int]) -> None:
    """Write a report and print its size. Raises UsageError."""
    try:
        with waiting("plotting"):
            num_bytes = write(path)
    except OSError as error:
        raise UsageError(f"--html: {path}: {error.strerror}") from error
    from analysis.words import size

    err.print(f"{path}: {size(num_bytes)}")
