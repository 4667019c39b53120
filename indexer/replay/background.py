"""Key frames of a log that another part of the process writes, from a process of their own."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from indexer.replay.frames import settings_of_views
from indexer.settings import IndexerSettings
from kv_events.runtime.helper_process import helper_results
from kv_events.runtime.supervised import keep_running

logger = logging.getLogger(__name__)


@asynccontextmanager
async def indexing(folder: Path, settings: IndexerSettings | None = None) -> AsyncIterator[None]:
    """Keep the key frames and the time index of a log up to date while a block runs. A failure is only logged.

    A process of a low priority does it, because a replay in a thread would delay the block. It needs the memory of
    the views once more. If it ends, it is started again. settings: of the views; default: from `KVSIGHT_*` variables.
    """
    bounds = msgspec.json.encode(settings_of_views(settings or IndexerSettings())).decode()
    task = asyncio.create_task(keep_running(lambda: _index(folder, bounds), "key frames", logger), name="key frames")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _index(folder: Path, settings: str) -> None:
    async for _ in helper_results("key frames", "indexer.replay", str(folder), settings):
        pass
