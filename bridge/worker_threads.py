"""Threads for the bridge's work on bytes.

Its kernels let the interpreter go, so engines are worked for side by side, and the event loop has time for others.
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

_MOST_THREADS = 4
_SMALL_BYTES = 16 * 1024
"""Work on less is done before a thread would have begun."""
_NICENESS = 10
"""Of the threads, on top of the process's: what they make waits for the event loop, and callers wait for that, too."""


class Workers:
    """A few threads, made when they are needed."""

    def __init__(self) -> None:
        num_threads = min(_MOST_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="bridge", initializer=_step_back)

    async def run(self, num_bytes: int, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call it, in a thread if there are many bytes to work on. Does not return before the call has, not even when
        it is cancelled."""
        if num_bytes <= _SMALL_BYTES:
            return work(*args, **kwargs)
        working = asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*args, **kwargs))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait([working])
            raise

    def close(self) -> None:
        """When nobody calls any more."""
        self._pool.shutdown(wait=False)


def _step_back() -> None:
    """Let the event loop's thread go first where both want a processor."""
    if sys.platform == "linux":  # elsewhere a thread has no niceness of its own
        own = threading.get_native_id()
        with suppress(OSError):  # a sandbox may refuse it, and then it has to do without
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICENESS)
