"""Key frames of a log that another part of the process writes, from a thread of their own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from indexer.replay.log_indexer import LogIndexer

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0
_STOP_S = 5.0


class _StoppedError(Exception):
    """The thread is to end."""


@asynccontextmanager
async def indexing(folder: Path) -> AsyncIterator[None]:
    """Keep the key frames and the time index of a log up to date while a block runs. A failure is only logged.

    The thread shares the interpreter with the block, so do not use this beside a service that answers queries.
    """
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(folder, stop), name="key frames", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        await asyncio.to_thread(thread.join, _STOP_S)


def _follow(folder: Path, stop: threading.Event) -> None:
    def check(_: int) -> None:
        if stop.is_set():
            raise _StoppedError

    try:
        indexer = LogIndexer(folder)
        while not stop.wait(_PAUSE_S):
            indexer.advance(check)
        indexer.advance()
    except _StoppedError:
        return
    except Exception:
        logger.exception("%s: no more key frames; `kvsight log index` writes them later", folder)
