"""Long work beside the event loop that does not delay the end of the process."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

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
