"""Reads a source: on and on, past its outages, or once from its beginning."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from indexer.sources.base import Source, SourceUnavailableError
from kv_events.records import LogRecord
from kv_events.runtime.outages import Outage, RateLimitedLogger
from kv_events.runtime.supervised import Backoff
from kv_events.schema import ResyncRequest

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 1.0
_PATIENCE_S = 10.0
"""Time without a record after which a source that has more is given up."""


class Opened(NamedTuple):
    """A source that is ready to be read."""

    begins: Mapping[int, int]
    """Partition -> offset of the first record that will be read."""
    ends: Mapping[int, int]
    """Partition -> offset after the newest record."""


class SourceReader:
    """A source that pauses instead of failing."""

    def __init__(self, source: Source, on_read: Callable[[], None] = lambda: None, what: str = "log") -> None:
        """on_read: called after each successful access to the source. what: its name in log lines."""
        self.outage = Outage(logger, f"{what} unreadable", f"{what} readable")
        self._limited_logger = RateLimitedLogger(logger, "resyncs")
        self._source = source
        self._read_at: float | None = None  # seconds since 1970
        self._fetch_failed = False  # the newest one: a right to list offsets is none to read
        self._on_read = on_read
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)

    @property
    def obstacle(self) -> str:
        """Why nothing can be read now, as far as is known, or ""."""
        return str(self.outage) or ("nothing was read yet" if self._read_at is None else "")

    async def start(self, positions: Mapping[int, int]) -> Opened | None:
        """Open the source at some positions. Returns None, after a pause, if it is unavailable."""
        try:
            return Opened(await self._source.start(positions), await self._source.ends())
        except SourceUnavailableError as error:
            await self._pause(error)
            return None

    async def fetch(self) -> Sequence[LogRecord]:
        """Return the next records. Returns none, after a pause, if the source is unavailable."""
        try:
            records = await self._source.fetch()
        except SourceUnavailableError as error:
            self._fetch_failed = True
            await self._pause(error)
            return []
        self._fetch_failed = False
        if records:
            self._note_success()
        return records

    async def ends(self) -> Mapping[int, int] | None:
        """Return partition -> offset after its newest record, or None if the source is unavailable."""
        try:
            ends = await self._source.ends()
        except SourceUnavailableError as error:
            self._note_failure(error)
            return None
        if not self._fetch_failed:
            self._note_success()
        return ends

    async def request(self, request: ResyncRequest) -> bool:
        try:
            await self._source.request(request)
        except SourceUnavailableError as error:
            if self.outage.since is None:
                self._limited_logger.warning("a request is not sent: %s", error)
            return False
        return True

    async def stop(self) -> None:
        await self._source.stop()

    async def _pause(self, error: SourceUnavailableError) -> None:
        self._note_failure(error)
        await self._backoff.pause()

    def _note_failure(self, error: SourceUnavailableError) -> None:
        self.outage.note_failure(error, began=self._read_at)

    def _note_success(self) -> None:
        self.outage.note_success()
        self._read_at = time.time()
        self._backoff.reset()
        self._on_read()


def source_records(source: Source, on_start: Callable[[int], None] = lambda _: None) -> Iterator[LogRecord]:
    """Yield the records of a source, from the oldest one up to the end of each partition as it is at the start.

    on_start: receives the number of these records. Not for use inside an event loop. Raises SourceUnavailableError,
    also if the source does not exist, and LogReplacedError.
    """
    with asyncio.Runner() as runner:
        try:
            positions = dict(runner.run(source.start({})))
            if not positions:
                raise SourceUnavailableError("the topic does not exist; `kvsight doctor` shows what does")
            known = runner.run(source.ends())
            ends = {partition: known[partition] for partition in positions if partition in known}
            on_start(sum(end - positions[partition] for partition, end in ends.items()))
            while any(positions[partition] < end for partition, end in ends.items()):
                for record in runner.run(_next_records(source)):
                    positions[record.partition] = record.offset + 1
                    if record.offset < ends.get(record.partition, 0):
                        yield record
        finally:
            runner.run(source.stop())


async def _next_records(source: Source) -> Sequence[LogRecord]:
    """Return at least one record. A source that is away is noticed by asking it for its ends."""
    give_up = time.monotonic() + _PATIENCE_S
    while not (records := await source.fetch()):
        await source.ends()
        if time.monotonic() > give_up:
            raise SourceUnavailableError(f"no record within {_PATIENCE_S:.0f} s, although the log has more")
    return records
