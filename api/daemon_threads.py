"""Long work beside the event loop that does not delay the end of the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress


async def run_in_daemon_thread(work: Callable[[], None]) -> None:
    """Call `work` in a thread, and wait for its end. Raises its error.

    A process that ends does not wait for the thread, as it would for one of `asyncio.to_thread`.
    """
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def run() -> None:
        error = None
        try:
            work()
        except BaseException as raised:  # noqa: BLE001  (it is raised by the waiting task)
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, error)

    def finish(error: BaseException | None) -> None:
        if ended.cancelled():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    threading.Thread(target=run, name="daemon-work", daemon=True).start()
    await ended
