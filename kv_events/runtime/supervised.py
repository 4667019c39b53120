"""Long-lived tasks: for the time of a block, and such that start again after an unexpected error."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from kv_events.errors import KvsightError
from kv_events.runtime.backoff import pause_s
from kv_events.runtime.rate_limited_logger import RateLimitedLogger

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Run `work` during a block, and cancel it at the end. name: of the task."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def keep_running(
    work: Callable[[], Awaitable[None]],
    name: str,
    logger: logging.Logger,
    on_error: Callable[[Exception], None] = lambda _: None,
) -> None:
    """Await `work()` until it returns. After an error and a pause, 0.5 s that doubles up to 10 s, it is called again.

    name: begins the log lines, which show the traceback of an unexpected error at most once in 30 seconds. on_error:
    called after each error, before the pause; must not raise.
    """
    limited_logger = RateLimitedLogger(logger, name)
    num_failures = 0
    while True:
        began = time.monotonic()
        try:
            await work()
        except Exception as error:  # noqa: BLE001  (any error of a task; it is logged)
            if time.monotonic() - began > _LONGEST_PAUSE_S:
                num_failures = 0
            on_error(error)
            unexpected = None if isinstance(error, KvsightError) else error
            limited_logger.warning("failed and starts again: %r", error, error=unexpected)
            await asyncio.sleep(pause_s(num_failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
            num_failures += 1
        else:
            return
