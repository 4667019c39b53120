"""Background tasks: some end with a block, others restart after an unexpected error. Pauses between attempts."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from kv_events.errors import KvsightError
from kv_events.runtime.outages import RateLimitedLogger

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Run `work` during a block, and cancel it at the end. name: of the task."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        await cancel(task)


@asynccontextmanager
async def leaving_together(*blocks: AbstractAsyncContextManager[None]) -> AsyncIterator[None]:
    """Enter blocks in order, and leave them all at once: each may wait for a server that does not answer."""
    entered = [AsyncExitStack() for _ in blocks]
    try:
        for stack, block in zip(entered, blocks, strict=True):
            await stack.enter_async_context(block)
        yield
    finally:
        await asyncio.gather(*(stack.aclose() for stack in entered))


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
    backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    while True:
        began = time.monotonic()
        try:
            await work()
        except Exception as error:  # noqa: BLE001  (any error of a task; it is logged)
            if time.monotonic() - began > _LONGEST_PAUSE_S:
                backoff.reset()
            on_error(error)
            unexpected, what = (None, error) if isinstance(error, KvsightError) else (error, repr(error))
            limited_logger.warning("failed and starts again: %s", what, error=unexpected)
            await backoff.pause()
        else:
            return


async def cancel(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks, as far as there are any, and wait for their ends."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)


_random = random.SystemRandom()


def pause_s(attempt: int, first_s: float, longest_s: float) -> float:
    """Seconds to wait after attempt 0, 1, ...: `first_s`, doubled per attempt, at most `longest_s`.

    Each pause is shortened at random by up to a half, so that clients of one server do not return all at once.
    """
    return min(longest_s, first_s * 2.0 ** min(attempt, 64)) * _random.uniform(0.5, 1.0)


class Backoff:
    """The pauses of one retry loop. Belongs to one task."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self.failed_attempts = 0
        """Since the last success."""

    async def pause(self) -> None:
        pause = pause_s(self.failed_attempts, self._first_s, self._longest_s)
        self.failed_attempts += 1
        await asyncio.sleep(pause)

    def reset(self) -> None:
        self.failed_attempts = 0
