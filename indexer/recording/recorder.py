"""Copies sources into an event log, without holes and doubles, as far as the disk and the sources allow."""

import asyncio
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from indexer.recording.feed import Feed
from indexer.slices import Interval
from indexer.sources.base import LogReplacedError, SourceUnavailableError
from indexer.sources.reader import Opened, SourceReader
from kv_events.errors import InvalidValueError, KvsightError
from kv_events.log.event_log import SEGMENT_BYTES, DeletedSegment, EventLogError, EventLogWriter, LogRetention
from kv_events.log.format import delete_unfinished, replace_file
from kv_events.records import Channel, LogRecord
from kv_events.runtime.outages import Outage
from kv_events.runtime.supervised import cancel, keep_running
from kv_events.runtime.words import count

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 * 2**20
"""Bound on the memory of offered records that are not written yet."""

_MIN_SEGMENTS = 8
"""Segments in which a bound on the size is kept at least."""

_PROBE_S = 1.0
_UPKEEP_S = 1.0
_POLL_S = 0.05
_RETRY_S = 1.0
_STOP_S = 5.0
_LAST_READ_S = 1.0
"""How long sources are read after the stop. What is not read by then is read after the next start."""
_STUCK_S = 5.0
"""Time for one access to the disk, after which it counts as hanging."""
_POSITIONS_FILE = "positions.json"


def segment_bytes_within(max_bytes: int | None) -> int:
    """Return the size of the segments of a log with a bound on its size."""
    return SEGMENT_BYTES if max_bytes is None else max(1, min(SEGMENT_BYTES, max_bytes // _MIN_SEGMENTS))


class Recorder:
    """Writes an event log. Belongs to one event loop, which its writes hold up; `offer` and the counts are for others.

    A disk that is full or fails does not end it. It waits until it can write again; sources are not read during this
    time, so that nothing is lost which they keep.
    """

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        max_bytes: int | None = None,
        max_age_s: float | None = None,
        is_patient: bool = True,
        is_new_run: bool = False,
        on_deleted: Callable[[DeletedSegment], None] = lambda _segment: None,
    ) -> None:
        """max_bytes, max_age_s: see `LogRetention`. is_patient: wait for the disk; otherwise an error of it is raised.

        is_new_run: offsets begin again at 0 with this process, so those in the log mean nothing. on_deleted: called for
        each segment that exceeds a bound.
        """
        self.written = 0
        """Records written by this process."""
        self.lost = 0
        """Records that were not written: too large for the log, offered while too many were waiting or after the end,
        or still waiting for the disk at the end.
        """
        self.outage = Outage(logger, "recording degraded", "recording goes on")
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._bounds = max_bytes, max_age_s
        self._is_patient = is_patient
        self._is_new_run = is_new_run
        self._on_deleted = on_deleted
        self._kept_segment = 0  # index of the newest segment when the bounds were enforced last
        self._lock = threading.Lock()  # guards what is offered
        self._offered: list[LogRecord] = []
        self._offered_bytes = 0
        self._is_ended = False  # nothing is taken any more from what is offered
        self._readers: dict[str, SourceReader] = {}  # by name of the feed
        self._writer: EventLogWriter | None = None
        self._is_flushed = self._is_synced = True
        self._alive_at: float | None = None  # monotonic time of the newest sign of life; None unless the log is open

    @property
    def next_index(self) -> int:
        """Index of the next record of the log. 0 before it is open."""
        return 0 if self._writer is None else self._writer.next_index

    @property
    def degraded_seconds(self) -> float:
        """Time for which the disk has accepted nothing; 0 if it does. For any thread."""
        alive_at = self._alive_at
        silent_s = 0.0 if alive_at is None else time.monotonic() - alive_at
        return max(self.outage.seconds, silent_s if silent_s > _STUCK_S else 0.0)

    @property
    def degraded(self) -> str:
        """Why nothing is recorded now, or "". For any thread."""
        silent_s = self.degraded_seconds
        return str(self.outage) or (
            f"recording degraded: no answer of the disk for {silent_s:.0f} s" if silent_s else ""
        )

    @property
    def obstacle(self) -> str:
        """Why the disk or a source keeps this from recording now, or ""."""
        sources = (f"{name}: {reader.obstacle}" for name, reader in self._readers.items() if reader.obstacle)
        return self.degraded or next(sources, "" if self._readers else "nothing was read yet")

    def offer(self, record: LogRecord) -> None:
        """Record something that no source keeps. Any thread; never waits for the disk."""
        with self._lock:
            if self._is_ended or self._offered_bytes + record.memory_bytes > MAX_WAITING_BYTES:
                self.lost += 1
                return
            self._offered_bytes += record.memory_bytes
            self._offered.append(record)

    def open(self) -> None:
        """Open the log. Raises EventLogError, InvalidValueError, OSError."""
        writer = EventLogWriter(self._folder, segment_bytes=self._segment_bytes, leaves_damage=True)
        try:
            self._retention = LogRetention(self._folder, writer, *self._bounds)
            self._positions = LogPositions(self._folder, writer.next_index, is_empty=self._is_new_run)
        except BaseException:
            writer.close()
            raise
        self._writer = writer

    async def run(self, feeds: Sequence[Feed], stop: asyncio.Event, *, once: bool = False) -> None:
        """Record until `stop` is set, or until every feed has reached the end of its range.

        once: the range of each feed ends at the present end of its source.
        """
        await self._open_patiently(stop)
        upkeep = asyncio.create_task(keep_running(lambda: self._keep_up(stop), "recording", logger), name="recording")
        following = [asyncio.create_task(self._follow(feed, stop, once=once), name=feed.name) for feed in feeds]
        try:
            await _ended(following, stop)
            if not following:
                await stop.wait()
        finally:
            stop.set()
            await cancel(*following)
            await asyncio.gather(upkeep, return_exceptions=True)
            self._close()

    async def _open_patiently(self, stop: asyncio.Event) -> None:
        while self._writer is None and not stop.is_set():
            try:
                self.open()
            except (OSError, EventLogError) as error:
                await self._wait(error, stop)
        if self._writer is not None:
            self.outage.note_success()

    async def _wait(self, error: OSError | EventLogError, stop: asyncio.Event) -> None:
        """Pause after an error of the disk. Raises the error if the recorder is not patient."""
        if not self._is_patient:
            raise error
        self.outage.note_failure(error.strerror if isinstance(error, OSError) else error)
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _RETRY_S)

    # --- copying ----------------------------------------------------------------------------------------------------

    async def _follow(self, feed: Feed, stop: asyncio.Event, *, once: bool) -> None:
        """Copy a source up to the end of its range, or until `stop` is set."""
        reader = self._readers[feed.name] = SourceReader(feed.source, what=f"topic {feed.name}")
        try:
            while not stop.is_set():
                try:
                    return await self._copy(feed, reader, stop, once=once)
                except LogReplacedError as error:
                    logger.warning("%s; it is recorded from its beginning", error)
        finally:
            await reader.stop()

    async def _copy(self, feed: Feed, reader: SourceReader, stop: asyncio.Event, *, once: bool) -> None:
        opened = await self._start(feed, reader, stop, once=once)
        if opened is None:
            return
        read, goal = dict(opened.begins), feed.goal(opened.ends, once=once)
        probe = Interval(_PROBE_S, time.monotonic() + _PROBE_S)
        while not stop.is_set() and (goal is None or any(read.get(part, 0) < end for part, end in goal.items())):
            records = await (feed.source if once else reader).fetch()
            await self._write(list(feed.selected(records)), stop)
            read |= {record.partition: record.offset + 1 for record in records}
            if probe.is_due(time.monotonic()):
                ends = await reader.ends()  # finds a topic or partitions that are created later
                goal = feed.goal(ends, once=False) if goal is None and ends is not None else goal

    async def _start(self, feed: Feed, reader: SourceReader, stop: asyncio.Event, *, once: bool) -> Opened | None:
        """Open a source where its recording ended. None: `stop` was set before."""
        recorded = dict(self._positions.of_topic(feed.channel, feed.name))
        wanted = recorded | {part: max(begin, recorded.get(part, 0)) for part, begin in feed.begins.items()}
        opened = None
        if once:
            opened = Opened(await feed.source.start(wanted), await feed.source.ends())
            if not opened.begins and feed.channel is Channel.EVENTS:
                raise SourceUnavailableError(f"{feed.name}: the topic does not exist; `kvsight doctor` shows what does")
        while not stop.is_set() and opened is None:
            opened = await reader.start(wanted)  # it logs why there is none, and pauses
        if opened is not None:
            self._positions.by_channel[feed.channel] |= opened.begins  # the topic may have been created again
        return opened

    # --- the disk ---------------------------------------------------------------------------------------------------

    async def _write(self, records: Sequence[LogRecord], stop: asyncio.Event) -> int:
        """Append records, and make them visible to readers. Waits for the disk until `stop` is set.

        Returns the number of records that were not appended.
        """
        recorded = self._positions.by_channel
        waiting = deque(each for each in records if each.offset >= recorded[each.channel].get(each.partition, 0))
        while waiting or not self._is_flushed:
            try:
                self._append(waiting)
            except OSError as error:
                if stop.is_set():
                    return len(waiting)
                with suppress(OSError):
                    self._enforce()  # may make room
                await self._wait(error, stop)
            else:
                self.outage.note_success()
        return 0

    def _append(self, waiting: deque[LogRecord]) -> None:
        writer = self._opened()
        self._is_flushed = False
        while waiting:
            record = waiting[0]
            try:
                writer.append(record)
                self.written += 1
            except InvalidValueError as error:
                self.lost += 1
                logger.warning("partition %d offset %d is not recorded: %s", record.partition, record.offset, error)
            self._positions.by_channel[record.channel][record.partition] = record.offset + 1
            waiting.popleft()
        writer.flush(sync=False)
        self._is_flushed, self._is_synced = True, False
        if writer.segment_index != self._kept_segment:
            self._enforce()

    async def _keep_up(self, stop: asyncio.Event) -> None:
        """Write what is offered, and keep the log durable and within its bounds."""
        due = Interval(_UPKEEP_S)
        while not stop.is_set():
            self._alive_at = time.monotonic()
            await self._write_offered(stop)
            if due.is_due(time.monotonic()):
                try:
                    self._tidy()
                except OSError as error:
                    await self._wait(error, stop)
                else:
                    self.outage.note_success()
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _POLL_S)
        await self._write_offered(stop)

    async def _write_offered(self, stop: asyncio.Event) -> None:
        """Write what is offered. After `stop`, this is the last time, and what the disk does not accept is lost."""
        offered = self._take_offered(is_last=stop.is_set())
        num_lost = len(offered) if self._writer is None else await self._write(offered, stop)
        if num_lost:
            self.lost += num_lost
            logger.warning("%s not recorded: the disk took nothing more before the end", count(num_lost, "record"))

    def _take_offered(self, *, is_last: bool) -> list[LogRecord]:
        with self._lock:
            self._is_ended = is_last
            taken = list(self._offered)
            self._offered.clear()
            self._offered_bytes = 0
        return taken

    def _tidy(self) -> None:
        writer = self._opened()
        if not self._is_synced and self._is_flushed:
            writer.flush()
            self._positions.save(writer.next_index)
            self._is_synced = True
        self._enforce()

    def _enforce(self) -> None:
        self._kept_segment = self._opened().segment_index
        for segment in self._retention.enforce():
            self._on_deleted(segment)

    def _close(self) -> None:
        self._alive_at = None
        if self._writer is None:
            return
        try:
            if self._is_flushed:
                self._tidy()
            self._writer.close()
        except OSError as error:
            if not self._is_patient:
                raise
            logger.warning("the end of the recording is not on disk: %s", error)

    def _opened(self) -> EventLogWriter:
        assert self._writer is not None
        return self._writer


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
            self._failure = f"recording failed: {error if isinstance(error, KvsightError) else type(error).__name__}"
            logger.exception("recording has failed; the service goes on without it")
        finally:
            ended.set()

    async def _record(self, stop: asyncio.Event) -> None:
        async with self._beside():
            await self.recorder.run(self._feeds(), stop)


async def _ended(following: Sequence[asyncio.Task[None]], stop: asyncio.Event) -> None:
    """Wait until all have ended, or for a second after `stop`. Raises the first error."""
    ended, stopped = asyncio.gather(*following), asyncio.create_task(stop.wait())
    ended.add_done_callback(lambda done: done.cancelled() or done.exception())  # if this is cancelled, nobody asks
    both: set[asyncio.Future[Any]] = {ended, stopped}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
    await asyncio.wait({ended}, timeout=_LAST_READ_S)
    if ended.done():
        ended.result()


class _Saved(msgspec.Struct):
    index: int
    """Index of the first record of the log that is not counted."""
    positions: dict[int, dict[int, int]]
    topics: dict[int, str] = {}
    """Channel -> topic of its positions."""


class LogPositions:
    """Channel -> partition -> offset after its newest record.

    A file beside the segments spares a restart from reading the whole log. It may be old or missing.
    """

    def __init__(self, folder: Path, next_index: int, *, is_empty: bool = False) -> None:
        """Read the file, and the records since it was written. Raises OSError.

        next_index: of the log. is_empty: read nothing, because the offsets of before mean nothing.
        """
        self._path = folder / _POSITIONS_FILE
        self.by_channel: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """Channel -> partition -> offset of the next record."""
        self._topics: dict[int, str] = {}
        delete_unfinished(folder, _POSITIONS_FILE)
        if is_empty:
            return
        from kv_events.log.reader import scan_log  # loads a kernel

        start, saved = 0, self._read()
        if saved is not None and saved.index <= next_index:
            self.by_channel.update(saved.positions)
            self._topics, start = saved.topics, saved.index
        for chunk in scan_log(folder, lambda _damage: None, start):  # what is damaged needs no position
            new = chunk._replace(rows=chunk.rows[max(0, start - chunk.first_index) :])
            for channel in np.unique(new.channels).tolist():
                self.by_channel[channel] |= {partition: last + 1 for partition, _, last in new.offsets(channel)}

    def of_topic(self, channel: int, topic: str) -> dict[int, int]:
        """Return the positions of a channel. Raises EventLogError if they are those of another topic."""
        positions = self.by_channel[channel]
        if positions and (known := self._topics.get(channel, topic)) != topic:
            folder = self._path.parent
            raise EventLogError(f"{folder}: it has records of topic {known}, not of {topic}: give another folder")
        self._topics[channel] = topic
        return positions

    def save(self, index: int) -> None:
        """Write the file. index: of the next record of the log; those before it are on disk. Raises OSError."""
        replace_file(self._path, [msgspec.json.encode(_Saved(index, self.by_channel, self._topics))])

    def _read(self) -> _Saved | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Saved)
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            return None
