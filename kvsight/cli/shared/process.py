"""The process of a command: its kernels, signals, open files and allocator.

`docs/decisions/allocator.md` has the reasons and the figures of the allocator's settings. Parameters: see mallopt(3).
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from kvsight.cli.shared.console import err, waiting

logger = logging.getLogger(__name__)

T = TypeVar("T")

_OWN_FILES = 128
"""More than a process needs without callers and engines: for logs, snapshots, Kafka, Redis."""
# parameters of mallopt, <malloc.h>
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_KEPT_BYTES = 32 * 2**20
_GROW_BYTES = 2**20
_LARGEST_KEPT_BYTES = 6 * 2**20
"""Larger blocks are tables, of which only the touched pages use memory. Without this limit glibc would soon allocate
them from the heap as well and zero them entirely."""


def load_kernels(load_and_answer: Callable[[], object] | None = None) -> None:
    """Load the numba kernels of the modules that are imported. The first command on a machine compiles all kernels.

    load_and_answer: used in place of `load.load` if kernels must be compiled, by a service that answers meanwhile.
    """
    from kv_events.kernels import load

    if load.is_complete():
        load.load()
    else:
        began = time.perf_counter()
        with waiting(_Progress(load.progress)):
            (load_and_answer or load.load)()
        err.print(f"kernels compiled in {time.perf_counter() - began:.0f} s")
    gc.freeze()  # 150,000 objects that live as long as the process: a collection at its end takes 0.1 s


@contextmanager
def collector_off() -> Iterator[None]:
    """Turn Python's garbage collector off during imports: it would scan all modules again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Progress(NamedTuple):
    """A text that is made each time that it is shown."""

    text: Callable[[], str]

    def __rich__(self) -> str:
        return self.text()


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


def keep_freed_memory() -> bool:
    """Let each allocator arena (busy threads have one each) keep up to 32 MiB of freed memory.

    Returns False if the C library does not support it, or if `MALLOC_` variables are set, which take precedence.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # it is not glibc
        return False
    values = {_TRIM_THRESHOLD: _KEPT_BYTES, _TOP_PAD: _GROW_BYTES, _MMAP_THRESHOLD: _LARGEST_KEPT_BYTES}
    return all(mallopt(parameter, value) == 1 for parameter, value in values.items())


def allow_open_files(connections: int, engines: int = 0) -> int:
    """Let the process open as many files as the system permits. Logs if it may need more.

    connections, engines: files that they may need. Returns how many the engines may use: at least half of all.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # not every system raises it that far
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = sys.maxsize if limit == resource.RLIM_INFINITY else limit
    needed = _OWN_FILES + connections + engines
    if limit < needed:
        advice = "raise the hard limit (LimitNOFILE=, ulimit -Hn) or lower the bounds"
        logger.warning("%d files may be open, but %d may be needed: %s", limit, needed, advice)
    return max(limit - connections - _OWN_FILES, limit // 2)
