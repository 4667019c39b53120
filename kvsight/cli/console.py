"""Output, progress bars and input files, for all commands."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
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


def compile_kernels(*packages: str) -> None:
    """Load the numba kernels of the index, and those of further packages.

    On a new machine they are compiled by all cores and kept on disk; the log says so.
    """
    import_without_kernels(*packages)()


def import_without_kernels(*packages: str) -> Callable[[], None]:
    """Import the index and further packages, so that settings can be checked before kernels are compiled.

    Returns what `compile_kernels` does then. None of the kernels may be called before.
    """
    from kv_events.kernels import load

    compile_all = load.import_without_kernels("kv_events.hashing", "indexer.index", *packages)

    def load_and_report() -> None:
        with waiting("loading kernels"):
            report_compilation(compile_all)

    return load_and_report


def report_compilation(load: Callable[[], None]) -> None:
    """Load kernels, and print how long it took if they had to be compiled."""
    from kv_events.kernels.load import has_compiled

    began = time.perf_counter()
    load()
    gc.freeze()  # half a million objects that live as long as the process: a collection at its end takes 0.3 s
    if has_compiled():
        err.print(f"kernels compiled in {time.perf_counter() - began:.0f} s")


def stop_signals() -> asyncio.Event:
    """An event of the running loop that the first SIGINT or SIGTERM sets. The second one ends the process at once."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def first() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, first)
    return stop


def run_until_interrupted(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in a loop of its own, and return its result. The first Ctrl-C cancels it, and then raises
    KeyboardInterrupt.

    Without this, KeyboardInterrupt is raised inside whatever the loop runs, such as a task of a Kafka client, and the
    loop logs it with a traceback. The second Ctrl-C ends the process at once.
    """
    before = signal.getsignal(signal.SIGINT)

    async def supervised() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel() -> None:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            task.cancel()

        loop.add_signal_handler(signal.SIGINT, cancel)
        return await work()

    try:
        return asyncio.run(supervised())
    except asyncio.CancelledError:
        before = signal.SIG_DFL
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)  # the end of a loop sets Python's own handler


@contextmanager
def interrupting_loops() -> Iterator[None]:
    """Let Ctrl-C cancel what an `asyncio.Runner` runs while the block lasts, before it raises KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # the runner replaces this one only
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show a spinner on stderr while the block runs. Shows nothing if stderr is not a terminal."""
    if err.is_terminal:
        with err.status(what):
            yield
    else:
        yield
