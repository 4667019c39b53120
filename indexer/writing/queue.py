"""The bounded queue between what makes records, such as decisions, and what keeps them."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeAlias

from kv_events.decisions import DECISIONS_FOLDER
from kv_events.errors import KvsightError
from kv_events.log.event_log import SEGMENT_BYTES, EventLogWriter, LogRetention, WriterThread
from kv_events.records import Channel, LogRecord
from kv_events.reservations import MAX_JOINED, RESERVATIONS_FOLDER, STEPS, joined
from kv_events.runtime.outages import Outage
from kv_events.runtime.supervised import Backoff, cancel, keep_running
from kv_events.runtime.words import count

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 32 * 2**20
_MAX_RECORDS, _MAX_BYTES_AT_ONCE = 1000, 4 * 2**20
"""Bounds on a write, beyond which nothing is added to it: all of it must be written in some seconds."""
_WAITING_BYTES = 384
"""What a record that waits takes in memory beside its key and its payload."""
_JOINED_BYTES = 2**18
"""Bound on the size of records that are joined, of which there are at most `MAX_JOINED`, unless one alone is larger."""
_GATHER_MS = 20
"""Time after the start of a write in which others wait for the next one. Joined records are at most as far apart."""
_MAX_BYTES = 2 * 2**30
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
_STOP_S = 2.0

NO_LOG, QUEUE_FULL = "no log", "queue full"
"""Why records are dropped."""


class Contents(NamedTuple):
    """What a queue is for."""

    channel: Channel
    name: str
    """In log lines and metrics, and of the folder inside that of the event log to which the records belong."""
    kinds: tuple[str, ...]
    """Kinds of its records."""
    are_joined: bool = False
    """Whether one record of a topic may contain several, see `kv_events.reservations.joined`."""


DECISIONS = Contents(Channel.DECISIONS, DECISIONS_FOLDER, ("decision", "outcome"))
RESERVATIONS = Contents(Channel.RESERVATIONS, RESERVATIONS_FOLDER, ("reserved", *STEPS), are_joined=True)


class _Waiting(NamedTuple):
    """Encoded records that follow each other: one, unless they are joined."""

    key: str
    payload: bytes
    num_records: int
    timestamp_ms: int

    @property
    def memory_bytes(self) -> int:
        return _WAITING_BYTES + len(self.key) + len(self.payload)


Write: TypeAlias = Callable[[Sequence[LogRecord]], Awaitable[None]]
"""Appends records of one channel. Raises WriteUnavailableError, perhaps after it has written some of
them. The call is then repeated."""


class WriteUnavailableError(KvsightError):
    """Records cannot be written now. Try again later."""

    retriable: ClassVar[bool] = True


async def _nothing_to_release() -> None:
    pass


class WriteQueue:
    """Takes records without waiting, and writes them in the background.

    Beyond `max_queued_bytes` of memory for records that wait, further ones are dropped and counted.
    """

    def __init__(
        self,
        write: Write | None,
        stop: Callable[[], Awaitable[None]] = _nothing_to_release,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        contents: Contents = DECISIONS,
    ) -> None:
        """write: None: every record is dropped. stop: releases what `write` uses. Both run in one event loop."""
        self.contents = contents
        self.accepted: Counter[str] = Counter(dict.fromkeys(contents.kinds, 0))
        """Kind -> records that were accepted."""
        self.dropped: Counter[str] = Counter({NO_LOG: 0, QUEUE_FULL: 0})
        """Reason -> records that were dropped."""
        self.written = 0
        self.outage = Outage(logger, f"{contents.name} cannot be written", f"{contents.name} are written")
        self._write = write
        self._stop = stop
        self._max_bytes = max_queued_bytes
        self._queue: deque[_Waiting] = deque()
        self.num_queued = 0
        """Records that wait."""
        self._queued_bytes = 0
        self._arrival = asyncio.Event()
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)

    @property
    def has_log(self) -> bool:
        """Whether records are written. Otherwise each one is dropped."""
        return self._write is not None

    def put(self, *records: tuple[str, str, bytes]) -> str | None:
        """Queue encoded records, all or none. Returns why they were dropped, or None. Never waits.

        records: kind, which is one of those of the contents, key and payload. Those with equal keys keep their order.
        """
        if not records:
            return None
        now_ms = int(time.time() * 1000)
        return self._put(
            Counter(kind for kind, _, _ in records), [_Waiting(key, payload, 1, now_ms) for _, key, payload in records]
        )

    def put_joined(self, kinds: Mapping[str, int], key: str, records: bytes) -> str | None:
        """Queue encoded records, which follow each other, all or none. See `put`. kinds: kind -> number of its records.

        key: for a topic with one partition. If there are more, each record goes to its own.
        """
        return self._put(kinds, [_Waiting(key, records, sum(kinds.values()), int(time.time() * 1000))])

    def _put(self, kinds: Mapping[str, int], waiting: Sequence[_Waiting]) -> str | None:
        """kinds: see `put_joined`."""
        num_records, num_bytes = sum(each.num_records for each in waiting), sum(each.memory_bytes for each in waiting)
        if self._write is None or self._queued_bytes + num_bytes > self._max_bytes:
            reason = NO_LOG if self._write is None else QUEUE_FULL
            self.dropped[reason] += num_records
            return reason
        for kind, number in kinds.items():
            self.accepted[kind] += number
        self._queue += waiting
        self.num_queued += num_records
        self._queued_bytes += num_bytes
        self._arrival.set()
        return None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write in the background of a block. Leaving it writes what is queued, for at most two seconds."""
        if self._write is None:
            yield
            return
        name = f"write {self.contents.name}"
        task = asyncio.create_task(keep_running(lambda: self._drain(), name, logger), name=name)
        try:
            yield
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    while self._queue:  # noqa: ASYNC110  (the task has no event for it)
                        await asyncio.sleep(0.01)
            await cancel(task)
            if self._queue:
                missing = count(self.num_queued, self.contents.name.removesuffix("s"))
                logger.warning("not written before the end: %s", missing)
            await self._stop()

    async def _drain(self) -> None:
        assert self._write is not None
        due = 0.0
        while True:
            await self._arrival.wait()
            if self.num_queued < _MAX_RECORDS:
                await asyncio.sleep(due - time.monotonic())
            due = time.monotonic() + _GATHER_MS / 1000
            batch, num_records, num_bytes = list[_Waiting](), 0, 0
            for waiting in self._queue:
                batch.append(waiting)
                num_records, num_bytes = num_records + waiting.num_records, num_bytes + waiting.memory_bytes
                if num_records >= _MAX_RECORDS or num_bytes >= _MAX_BYTES_AT_ONCE:
                    break
            if not batch:
                self._arrival.clear()
                continue
            try:
                await self._write(self._records(batch))
            except WriteUnavailableError as error:
                self.outage.note_failure(error)
                await self._backoff.pause()
                continue
            self.outage.note_success()
            self._backoff.reset()
            for _ in batch:
                self._queue.popleft()
            self._queued_bytes -= num_bytes
            self.num_queued -= num_records
            self.written += num_records

    def _records(self, batch: Iterable[_Waiting]) -> list[LogRecord]:
        """Return a batch as records of the log, joined if the contents may be. Offsets count single records."""
        most, room = (MAX_JOINED, _JOINED_BYTES) if self.contents.are_joined else (1, 0)
        records, part, offset = list[LogRecord](), list[_Waiting](), self.written
        num_records = num_bytes = 0
        for waiting in batch:
            is_full = num_records + waiting.num_records > most or num_bytes + len(waiting.payload) > room
            if part and (is_full or waiting.timestamp_ms > part[0].timestamp_ms + _GATHER_MS):
                records.append(self._record(part, offset))
                part, offset, num_records, num_bytes = [], offset + num_records, 0, 0
            part.append(waiting)
            num_records, num_bytes = num_records + waiting.num_records, num_bytes + len(waiting.payload)
        return [*records, self._record(part, offset)]

    def _record(self, part: Sequence[_Waiting], offset: int) -> LogRecord:
        key, payload, num_records, timestamp_ms = part[0]
        if len(part) > 1 or num_records > 1:
            payload = joined(sum(each.num_records for each in part), b"".join(each.payload for each in part))
        return LogRecord(0, offset, timestamp_ms, key.encode(), payload, self.contents.channel)


class FolderWriter:
    """Creates the folder of the log with the first record.

    Whole files are deleted, oldest first, to keep the log within its bound.
    """

    def __init__(self, folder: Path, *, max_bytes: int = _MAX_BYTES, segment_bytes: int = SEGMENT_BYTES) -> None:
        """max_bytes: bound on the log, at least two segments. segment_bytes: size of a file."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._kept_segment = -1  # index of the newest segment when the bound was enforced last
        self._log = WriterThread(folder, segment_bytes, WriteUnavailableError)
        self._retention: LogRetention | None = None

    async def write(self, records: Sequence[LogRecord]) -> None:
        await self._log.run(partial(self._write, records))

    async def stop(self) -> None:
        await self._log.stop()

    def _write(self, records: Sequence[LogRecord], writer: EventLogWriter) -> None:
        self._retention = self._retention or LogRetention(self._folder, writer, self._max_bytes, None)
        for record in records:
            writer.append(record._replace(offset=writer.next_index))
        writer.flush(sync=False)
        if writer.segment_index != self._kept_segment:
            self._retention.enforce()
            self._kept_segment = writer.segment_index
