"""Output, progress bars and input files, for all commands."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from kv_events.errors import KvsightError

out = Console()
"""Standard output: data and tables."""

err = Console(stderr=True, highlight=False, soft_wrap=True)
"""Standard error: progress and messages, never data. Lines are never wrapped."""


T = TypeVar("T")

EXIT_USAGE = 2
"""Exit code for a mistake of the user, and for a service or a broker that does not answer."""


class UsageError(KvsightError):
    """A command cannot do what the user asked. The message is shown without a traceback."""


def at_most_one(flags: Mapping[str, object]) -> str | None:
    """The flag that was given, of several that exclude each other. Raises UsageError if there are two."""
    given = [flag for flag, value in flags.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"give either {given[0]} or {given[1]}, not both")
    return given[0] if given else None


def print_lines(lines: Iterable[str]) -> None:
    """Print lines to stdout as they are: never wrapped, never cut."""
    for line in lines:
        out.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


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


def read_json_object(path: Path) -> dict[str, msgspec.Raw]:
    """Read the fields of a JSON object from a file, or from stdin for `-`. Values stay undecoded.

    Raises UsageError with line and column.
    """
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    try:
        return msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise UsageError(f"{shown(path)}: {error}; a query is an object with model_name and token_ids") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{shown(path)}: {json_fault(data, error)}") from error


def shown(path: Path) -> str:
    """The name of an input file in a message."""
    return "stdin" if str(path) == "-" else str(path)


def json_fault(data: bytes, error: Exception) -> str:
    """What is wrong with JSON, with line and column."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"not JSON: invalid UTF-8{_place(data, error.start)}"
    message, _, position = str(error).removeprefix("JSON is malformed: ").removesuffix(")").partition(" (byte ")
    return f"not JSON: {message}{_place(data, int(position) if position.isdecimal() else len(data))}"


def _place(data: bytes, position: int) -> str:
    before = data[:position]
    return f", line {before.count(10) + 1}, column {len(before) - before.rfind(10)}"


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show a spinner on stderr while the block runs. Shows nothing if stderr is not a terminal."""
    if err.is_terminal:
        with err.status(what):
            yield
    else:
        yield
