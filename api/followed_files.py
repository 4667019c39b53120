"""Files that a running service reads again whenever they change."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from api.daemon_threads import run_in_daemon_thread
from kv_events.errors import InvalidValueError
from kv_events.runtime.supervised import keep_running

_POLL_S = 1.0

_Content = TypeVar("_Content")


@asynccontextmanager
async def following(
    what: str, known: _Content, read: Callable[[], _Content], use: Callable[[_Content], None], logger: logging.Logger
) -> AsyncIterator[None]:
    """Call `use` with each new content, in the background of a block. It looks once a second.

    what: the plural of what the files contain, for log lines. known: the content that is in use. read, use: may raise
    InvalidValueError; everything stays as it is then, and the log has one line.
    """

    async def follow() -> None:
        nonlocal known
        failure = ""
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                content = await run_in_daemon_thread(read)  # a disk may hang
                if content != known:
                    use(content)
                    known = content
            except InvalidValueError as error:
                if str(error) != failure:
                    logger.error("the %s stay as they are: %s", what, error)  # noqa: TRY400  (its text says all)
                failure = str(error)
            else:
                failure = ""

    task = asyncio.create_task(keep_running(follow, what, logger), name=what)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
