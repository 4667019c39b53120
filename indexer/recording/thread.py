"""A recorder in a thread of its own, beside an event loop that it must never hold up."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress

from indexer.recording.feed import Feed
from indexer.recording.recorder import Recorder

logger = logging.getLogger(__name__)

_STOP_S = 5.0


class RecordingThread:
    """Runs a recorder. The process neither waits for it nor ends with it: a disk may hang."""

    def __init__(
        self,
        recorder: Recorder,
        feeds: Callable[[], Sequence[Feed]] = list,
        beside: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        """feeds: makes the sources, in the thread, because they belong to its event loop. beside: what runs there
        meanwhile.
        """
        self.recorder = recorder
        self._feeds = feeds
        self._beside = beside
        self._failure = ""

    @property
    def degraded(self) -> str:
        """Why records may be missing from the log now, or "" if none are."""
        return self.recorder.degraded or self._failure

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Record in the background of a block. Leaving it writes what is waiting, for at most five seconds."""
        loop, stop, ended = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
        threading.Thread(target=self._run, args=(loop, stop, ended), name="recording", daemon=True).start()
        try:
            yield
        finally:
            with suppress(RuntimeError):  # the recording has ended, and its loop is closed
                loop.call_soon_threadsafe(stop.set)
            if not await asyncio.to_thread(ended.wait, _STOP_S):
                logger.warning("the recording does not end; its last records may be missing until the next start")

    def _run(self, loop: asyncio.AbstractEventLoop, stop: asyncio.Event, ended: threading.Event) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._record(stop))
        except Exception as error:
            self._failure = f"recording failed: {type(error).__name__}"
            logger.exception("recording has failed; the service goes on without it")
        finally:
            ended.set()

    async def _record(self, stop: asyncio.Event) -> None:
        async with self._beside():
            await self.recorder.run(self._feeds(), stop)
