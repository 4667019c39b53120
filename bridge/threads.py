"""Threads for decoding and translating large messages.

The kernels release the GIL, so several engines are processed in parallel while the event loop stays responsive. Work is
done in steps. Engines take turns on the threads, and work that is no longer wanted ends after a step.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

_T = TypeVar("_T")

_MAX_THREADS = 4
_SMALL_BYTES = 16 * 1024
"""Less than this is processed faster than a thread can be woken."""
_TURN_S, _TURN_AT_ONCE_S = 0.01, 0.002
_NICENESS = 10
"""Added to the process's own. Everything that the threads produce waits for the event loop, so the loop goes first."""


class DecodeThreads:
    """A thread pool of at most four threads, which start on demand."""

    def __init__(self) -> None:
        num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="bridge", initializer=_lower_priority)

    async def run(self, num_bytes: int, work: Generator[None, None, _T]) -> _T:
        """Do work, which yields after each step, and return its result. num_bytes: how much it is.

        Little work is done at once, as far as it takes little time. Steps may run on several threads. If
        this task is cancelled, its current steps still end; the rest is left out.
        """
        if num_bytes <= _SMALL_BYTES and (result := _some_steps(work, _TURN_AT_ONCE_S)):
            return result[0]
        while True:
            turn = asyncio.get_running_loop().run_in_executor(self._pool, _some_steps, work, _TURN_S)
            try:
                result = await asyncio.shield(turn)
            except asyncio.CancelledError:
                await asyncio.wait([turn])
                raise
            if result:
                return result[0]

    def close(self) -> None:
        """Release the threads. `run` must not be called afterwards."""
        self._pool.shutdown(wait=False)


def _some_steps(work: Generator[None, None, _T], turn_s: float) -> tuple[_T] | None:
    """Do a step, and more until `turn_s` has passed. Returns the result in a tuple, or None if work is left."""
    until = time.monotonic() + turn_s
    try:
        next(work)
        while time.monotonic() < until:
            next(work)
    except StopIteration as end:
        return (end.value,)
    return None


def _lower_priority() -> None:
    """Let the event loop's thread win where both compete for a processor."""
    if sys.platform == "linux":  # elsewhere threads have no niceness of their own
        own = threading.get_native_id()
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICENESS)
