"""Output, progress bars and input files, for all commands."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from kv_events.errors import KvsightError

out = Console()
"""Standard output: data and tables."""
_COMPILED_CPU_S = 5.0  # kernels load from the cache in less CPU time, and compile in more

err = Console(stderr=True, highlight=False)
"""Standard error: progress and messages, never data."""


class UsageError(KvsightError):
    """A command cannot do what the user asked. The message is shown without a traceback."""


def print_json(value: Any) -> None:
    """Print a value as indented JSON to stdout."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


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
        raise UsageError(f"{path}: {error}; a query is an object with model_name and token_ids") from error
    except RecursionError as error:
        raise UsageError(f"{path}: nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not JSON: {error}{_line_of(data, str(error))}") from error


def _line_of(data: bytes, message: str) -> str:
    """Line and column for msgspec's `(byte 17)`."""
    digits = message.rpartition("(byte ")[2].rstrip(")")
    if not digits.isdecimal():
        return ""
    before = data[: int(digits)]
    return f", line {before.count(10) + 1}, column {len(before) - before.rfind(10)}"


def compile_kernels(*packages: str) -> None:
    """Load the numba kernels, also those of further packages.

    On a new machine they are compiled, which a spinner shows, and cached on disk.
    """
    began, cpu_began = time.perf_counter(), time.process_time()
    with waiting("loading kernels (compiled once per machine; this can take a minute)"):
        import api.json_kernels  # noqa: F401  (importing compiles)
        import indexer.index  # noqa: F401
        import kv_events.hashing  # noqa: F401
        import publisher  # noqa: F401

        for package in packages:
            import_module(package)
    if time.process_time() - cpu_began > _COMPILED_CPU_S:
        err.print(f"kernels compiled in {time.perf_counter() - began:.0f} s and cached")


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show a spinner on stderr while the block runs. Shows nothing if stderr is not a terminal."""
    if err.is_terminal:
        with err.status(what):
            yield
    else:
        yield
