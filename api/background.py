"""Long work beside the event loop, and files that a running service reads again whenever they change."""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from kv_events.errors import InvalidValueError
from kv_events.runtime.supervised import in_background, keep_running

_POLL_S = 1.0

_T = TypeVar("_T")


async def run_in_daemon_thread(work: Callable[[], _T]) -> _T:
    """Call `work` in a thread, and return what it returns. Raises its error.

    A process that ends does not wait for the thread, as it would for one of `asyncio.to_thread`.
    """
    done: Future[_T] = Future()
    done.set_running_or_notify_cancel()  # a task that stops waiting does not cancel it

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  (it is raised by the waiting task)
            done.set_exception(error)

    threading.Thread(target=run, name="daemon-work", daemon=True).start()
    return await asyncio.wrap_future(done)


def following(
    what: str, known: _T, read: Callable[[], _T], use: Callable[[_T], None], logger: logging.Logger
) -> AbstractAsyncContextManager[None]:
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

    return in_background(keep_running(follow, what, logger), what)
