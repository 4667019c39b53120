"""Key frames of a log that another part of the process writes, from a process of their own."""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from indexer.replay.frames import settings_of_views
from indexer.settings import IndexerSettings
from kv_events.errors import KvsightError
from kv_events.runtime.supervised import keep_running

logger = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-P", "-m", "indexer.replay")
_STOP_S = 2.0


class _EndedError(KvsightError):
    """The process has ended, although it should run."""


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
    """Run the process and log what it says. Raises _EndedError when it has ended."""
    process = await asyncio.create_subprocess_exec(
        *_COMMAND, str(folder), settings, stdin=PIPE, stdout=DEVNULL, stderr=PIPE,
        start_new_session=True,  # Ctrl-C in a terminal is for this process, whose end ends the other one
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        async for line in process.stderr:
            logger.warning("key frames: %s", line.decode(errors="replace").strip())
        raise _EndedError(f"the process of the key frames ended with {await process.wait()}")
    finally:
        process.stdin.close()  # which ends it
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
