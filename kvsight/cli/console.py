"""What all commands share: where words go, progress bars, reading a prompt's file."""

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
"""Data and tables."""
_COMPILED_S = 3.0  # loading from the cache is faster, compiling slower

err = Console(stderr=True, highlight=False)
"""Progress and words; never data."""


class UsageError(KvsightError):
    """A command cannot do what it was told; its text is all the user needs."""


def print_json(value: Any) -> None:
    """Nothing but data on stdout."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr that is gone when it is done; on anything but a terminal, nothing."""
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
    """The fields of a JSON object from a file, or from stdin for `-`: their values are JSON text still.

    Raises UsageError naming line and column.
    """
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    try:
        return msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}; a question is an object with model_name and token_ids") from error
    except RecursionError as error:
        raise UsageError(f"{path}: nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not JSON: {error}{_line_of(data, str(error))}") from error


def _line_of(data: bytes, message: str) -> str:
    """msgspec says `(byte 17)`; people want lines."""
    digits = message.rpartition("(byte ")[2].rstrip(")")
    if not digits.isdecimal():
        return ""
    before = data[: int(digits)]
    return f", line {before.count(10) + 1}, column {len(before) - before.rfind(10)}"


def compile_kernels(*packages: str) -> None:
    """Load the numba kernels, those of further packages, too; the first time on a machine they are compiled, which is
    shown and kept on disk.
    """
    began = time.perf_counter()
    with waiting("loading kernels (compiled once on a new machine, up to half a minute)"):
        import api.json_kernels  # noqa: F401  (importing compiles)
        import indexer.index  # noqa: F401
        import kv_events.hashing  # noqa: F401
        import publisher  # noqa: F401

        for package in packages:
            import_module(package)
    took = time.perf_counter() - began
    if took > _COMPILED_S:
        err.print(f"kernels compiled in {took:.0f} s; they are kept for next time")


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner on a terminal; elsewhere nothing."""
    if err.is_terminal:
        with err.status(what):
            yield
    else:
        yield
