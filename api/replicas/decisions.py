"""The decisions that routers report to any process of a service, read from their topic by each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

from indexer.slices import Interval, Slices
from indexer.sources.base import LogReplacedError, Source
from indexer.sources.reader import SourceReader
from kv_events.decisions import DecisionRecord, decode_decision
from kv_events.errors import RecordRejectedError
from kv_events.records import LogRecord
from kv_events.supervised import keep_running

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


class DecisionReader:
    """Follows the topic from the moment on at which the process starts."""

    def __init__(self, source: Source, take: Callable[[DecisionRecord], None]) -> None:
        """take: receives each record, in the event loop."""
        self._reader = SourceReader(source, what="topic of decisions")
        self._take = take
        self._slices = Slices()
        self._look = Interval(_LOOK_S)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read in the background of a block."""
        task = asyncio.create_task(keep_running(self._follow, "decisions", logger), name="decision-reader")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._reader.stop()

    async def _follow(self) -> None:
        while True:
            await self._reader.stop()  # of a run that failed
            found = await self._reader.start({})
            if found is None:
                continue
            await self._reader.stop()
            if await self._reader.start(found.ends) is None:
                continue
            try:
                while True:
                    await self._slices.run(self._taken(await self._reader.fetch()))
                    if self._look.is_due(time.monotonic()):
                        await self._reader.ends()  # finds a topic or partitions that were created in the meantime
            except LogReplacedError as error:
                logger.warning("%s", error)

    def _taken(self, records: Sequence[LogRecord]) -> Iterator[None]:
        for record in records:
            try:
                self._take(decode_decision(record.payload))
            except RecordRejectedError:
                logger.debug("a record of the decisions' topic is not one")
            yield
