"""Threads for decoding and translating large messages.

The kernels release the GIL, so several engines are processed in parallel while the event loop stays responsive.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_MAX_THREADS = 4
_SMALL_BYTES = 16 * 1024
"""Less than this is processed faster than a thread can be woken."""
_NICENESS = 10
"""Added to the process's own. Everything that the threads produce waits for the event loop, so the loop goes first."""


class WorkerThreads:
    """A thread pool of at most four threads, which start on demand."""

    def __init__(self) -> None:
        num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="bridge", initializer=_lower_priority)

    async def run(self, num_bytes: int, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call `work`: on a thread if `num_bytes` is large, else at once.

        Returns only after the call has returned, even if this task is cancelled while it runs.
        """
        if num_bytes <= _SMALL_BYTES:
            return work(*args, **kwargs)
        working = asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*args, **kwargs))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait([working])
            raise

    def close(self) -> None:
        """Release the threads. `run` must not be called afterwards."""
        self._pool.shutdown(wait=False)


def _lower_priority() -> None:
    """Let the event loop's thread win where both compete for a processor."""
    if sys.platform == "linux":  # elsewhere threads have no niceness of their own
        own = threading.get_native_id()
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICENESS)
