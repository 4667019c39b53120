"""The loop of the router side: reads records, applies them to the views, and runs due tasks between them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from indexer.applier import Applier
from indexer.freshness import NO_HEARTBEAT, Freshness
from indexer.namespaces import Namespaces
from indexer.progress import Progress
from indexer.resync import ResyncPlanner
from indexer.settings import IndexerSettings
from indexer.slices import Interval, Slices
from indexer.snapshots.base import SnapshotStore
from indexer.snapshots.image import SnapshotParts, take
from indexer.snapshots.keeper import SnapshotCounts, SnapshotKeeper
from indexer.sources.base import LogReplacedError, Source
from indexer.sources.reader import SourceReader
from indexer.tenants import TenantLimits
from indexer.views import View
from indexer.worker_log import WorkerLog
from kv_events.errors import KvsightError
from kv_events.records import LogRecord
from kv_events.runtime.outages import Outage
from kv_events.runtime.supervised import cancel, keep_running
from kv_events.runtime.tracing import open_spans
from kv_events.runtime.words import count
from kv_events.schema import ResyncRequest
from kv_events.streams import StreamId

if TYPE_CHECKING:
    from indexer.shards.owned_partitions import OwnedPartitions

logger = logging.getLogger(__name__)

_PROBE_S = 1.0
_PLAN_S = 0.1
_STOP_S = 5.0
_JOIN_WAIT_S = 0.1
_UNTRACED = nullcontext()
_MAX_KEY = 1024
"""Characters of a record's key in a span. Any program may write to the topic."""


class ConsumerStateError(KvsightError):
    """The consumer was run before."""


class _Removal(NamedTuple):
    """Streams to drop once the event log is applied up to a goal."""

    streams: Collection[StreamId]
    goal: Mapping[int, int]
    """Partition -> offset."""
    done: asyncio.Future[None]


class Consumer:
    """Reads a source into views, in one event loop. Queries run between two slices of its work.

    The consumer loads the newest snapshot, seeks, catches up, and then is ready. After that it also requests resyncs,
    forgets silent workers and writes snapshots. If a source or a store is unavailable, only freshness suffers.
    """

    def __init__(
        self,
        source: Source,
        applier: Applier,
        settings: IndexerSettings,
        store: SnapshotStore | None = None,
        clock: Callable[[], float] = time.time,
        *,
        limits: TenantLimits | None = None,
        owned: Callable[[Progress, Slices, SnapshotCounts], OwnedPartitions] | None = None,
    ) -> None:
        """clock: seconds since 1970. limits: those to which the applier holds tenants. owned: creates the
        partitions of a member of a group; None: reads everything.
        """
        now = time.monotonic()
        self.applier = applier
        """Counts of records and dead letters."""
        self.tenant_limits = limits
        self.freshness = Freshness(settings.worker_ttl_s, now, time.monotonic)
        self.progress = Progress()
        self.failure: Exception | None = None
        """The newest error of the loop, which starts again. None after records are read again."""
        self._source = source
        self._reader = SourceReader(source, on_read=lambda: self.freshness.note_log_read(time.monotonic()))
        self._clock = clock
        self._slices = Slices()
        self._spans = open_spans()
        self.snapshot_counts = SnapshotCounts()
        self.owned = None if owned is None else owned(self.progress, self._slices, self.snapshot_counts)
        """The partitions that this member of a group keeps. None: it is in no group and keeps all."""
        is_behind = (lambda _: False) if self.owned is None else self.owned.is_behind
        self.resyncs = ResyncPlanner(settings, self.freshness, is_behind=is_behind)
        """Chooses whose publishers are asked to send everything again."""
        self._plan_interval = Interval(_PLAN_S)
        self._requesting: asyncio.Task[None] | None = None
        self._forget_after_s = settings.forget_after_s
        self._removals: list[_Removal] = []
        self._snapshots = SnapshotKeeper(store, settings, now, self.snapshot_counts)
        self._probe_interval = Interval(_PROBE_S)
        self._probing: asyncio.Task[None] | None = None
        self._has_run = False
        self._stopping = False
        self.worker_log = WorkerLog(self.freshness)
        """The life of the workers. Its `on_change` receives each change."""
        applier.on_applied.append(lambda view, _batch: self.worker_log.note(view))
        self.freshness.is_catching_up = True
        applier.freshness = self.freshness

    @property
    def namespaces(self) -> Namespaces:
        return self.applier.namespaces

    @property
    def ready(self) -> bool:
        """Whether everything that was in the event log at the start has been applied, and the loop runs."""
        return self.progress.is_caught_up and self.failure is None

    @property
    def log_outage(self) -> Outage:
        """Whether the event log can be read."""
        return self._reader.outage

    def why_not_ready(self) -> str:
        """Return why views may lack what is in the event log, or "" if they do not."""
        if self.failure is not None:
            return f"the consumer has failed: {type(self.failure).__name__}"
        if self.log_outage.since is not None:
            return str(self.log_outage)
        if self.ready:
            return ""
        if self.owned is not None and not self.owned.membership.is_assigned:
            return f"waiting for consumer group {self.owned.membership.group}"
        lag = self.lag()
        return "the log is not opened yet" if lag is None else f"catching up: {lag} records of the log to apply"

    def reason(self, view: View) -> str:
        reason = self.freshness.reason(view)
        return str(self.log_outage) or reason if reason == NO_HEARTBEAT else reason

    def now(self) -> float:
        """Return the wall clock's time in seconds since 1970, at which the views are shown."""
        return self._clock()

    def lag(self) -> int | None:
        """Records in the event log that are not applied yet, as of the last probe. None if it is unknown."""
        return self.progress.lag() if self.log_outage.since is None else None

    async def forget(self, streams: Collection[StreamId]) -> None:
        """Drop streams with their pages, once everything that is in the event log now has been applied. Raises
        SourceUnavailableError.
        """
        removal = _Removal(streams, await self._source.ends(), asyncio.get_running_loop().create_future())
        self._removals.append(removal)
        await removal.done

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run in the background of a block, once. Leaving it writes a last snapshot and stops.

        Raises ConsumerStateError if it was run before. Two loops would share one position in the log: a record that one
        of them is still applying would count as applied after the other has applied a later one.
        """
        if self._has_run:
            raise ConsumerStateError("the consumer was already run")
        self._has_run = True
        task = asyncio.create_task(keep_running(self._run, "consumer", logger, self._note_failure), name="consumer")
        try:
            yield
        finally:
            self._stopping = True
            await asyncio.wait({task}, timeout=_STOP_S)
            is_between_records = task.done() and self.failure is None
            await cancel(task)
            await self._stop_probing()
            await cancel(self._requesting)
            is_complete = is_between_records and self.progress.is_started
            await self._snapshots.close(self._copy if is_complete else None)
            if self.owned is not None:
                await self.owned.close(with_snapshots=is_complete)
            await self._reader.stop()
            self.applier.dead_letters.close()

    async def _run(self) -> None:
        if not self.progress.is_started:
            await (self._load_snapshot() if self.owned is None else self._join(self.owned))
        await self._start_reading()
        while not self._stopping:
            try:
                await self._read_some()
            except LogReplacedError as error:
                await self._start_over(error)
            self.failure = None

    async def _read_some(self) -> None:
        for record in await self._reader.fetch():
            await self._apply(record)
            if self._stopping:
                return
        await self._between_records(time.monotonic())

    async def _start_over(self, error: LogReplacedError) -> None:
        """Open the log that there is now. Records may be lost, so every publisher must send everything."""
        logger.warning("%s; all workers are resynchronised", error)
        for view in self.namespaces.views:
            view.mark_stale("log replaced")
        await self._start_reading()

    async def _load_snapshot(self) -> None:
        snapshot = await self._snapshots.load(self._clock())
        if snapshot is not None:
            self.applier.namespaces = snapshot.namespaces
            self.progress.positions = snapshot.positions
            logger.info("snapshot of %s loaded", count(len(snapshot.namespaces.views), "view"))

    async def _join(self, owned: OwnedPartitions) -> None:
        while not (owned.membership.is_assigned or self._stopping):
            await owned.membership.wait(_JOIN_WAIT_S)
        await owned.follow()

    async def _start_reading(self) -> None:
        await self._stop_probing()
        await self._reader.stop()  # of a run that failed
        while not self._stopping:
            opened = await self._reader.start(self.progress.positions)
            if opened is not None:
                self.progress.start(opened.begins, opened.ends)
                if self.owned is not None:
                    self.owned.note_start(opened.begins)
                return

    async def _apply(self, record: LogRecord) -> None:
        if self.progress.is_applied(record) or not (self.owned is None or self.owned.has(record.partition)):
            return
        now = self._clock()
        # while catching up, a record counts as received when it was written
        is_past = not self.ready or self.progress.is_behind(record.partition)
        late_s = max(0.0, now - record.timestamp_ms / 1000) if is_past else 0.0
        with self._traced(record):
            await self._slices.run(self.applier.apply(record, now - late_s, time.monotonic() - late_s))
        self.progress.advance(record)
        await self._slices.yield_if_due()

    def _traced(self, record: LogRecord) -> AbstractContextManager[object]:
        """Continue the trace of a record's publisher. A restart reads old records again: they are not traced again."""
        if not record.headers or self._spans is None or not self.ready or not self._spans.is_context(record.headers):
            return _UNTRACED
        attributes: dict[str, str | int] = {
            "kvsight.stream": record.key.decode(errors="replace")[:_MAX_KEY],
            "messaging.destination.partition.id": str(record.partition),
            "messaging.kafka.offset": record.offset,
            "messaging.message.body.size": len(record.payload),
        }
        return self._spans.span("apply", "consumer", attributes, record.headers)

    async def _between_records(self, now: float) -> None:
        await self._forget_demanded()
        if self.owned is not None:
            await self.owned.follow()
        if not self.ready:
            await self._probe()
        elif self._probing is not None and self._probing.done():
            probed, self._probing = self._probing, None
            probed.result()
        elif self._probing is None and self._probe_interval.is_due(now):
            self._probing = asyncio.create_task(self._probe(), name="log-probe")
        is_requesting = self._requesting is not None and not self._requesting.done()
        if self.ready and not is_requesting and self._plan_interval.is_due(now):
            requests = self.resyncs.plan(self.namespaces, now)  # here, so that its error ends the consumer
            self._requesting = asyncio.create_task(self._request_resyncs(requests), name="resync-requests")
            await self._forget_silent()
        await self._slices.run(self.worker_log.look(self.namespaces.views, now))
        await self._snapshots.save_when_due(now, self._copy)
        if self.owned is not None:
            await self.owned.save_when_due(now)

    async def _request_resyncs(self, requests: Sequence[ResyncRequest]) -> None:
        """Send the requests that are due. A task of its own, so that a slow source does not delay records."""
        for request in requests:
            if not await self._reader.request(request):
                return

    async def _forget_demanded(self) -> None:
        """Drop the streams of calls of `forget` whose goal has been reached."""
        for removal in [each for each in self._removals if self.progress.has_reached(each.goal)]:
            self._removals.remove(removal)
            for stream in removal.streams:
                if self.namespaces.view(stream) is not None:
                    await self._slices.run(self.namespaces.forget(stream))
            if not removal.done.done():
                removal.done.set_result(None)

    async def _forget_silent(self) -> None:
        """Drop workers that have been silent for too long, and refused ones that have expired."""
        self.namespaces.drop_refused(self.freshness.expired_before())
        for view in self.namespaces.views:
            if self.freshness.silence_s(view) > self._forget_after_s:
                await self._slices.run(self.namespaces.forget(view.stream))

    async def _probe(self) -> None:
        """Ask the event log for its ends. Once ready, this happens beside reading: a broker that holds back the answer
        to a fetch until a record comes holds back those to later requests as well."""
        if self.progress.catches_up():
            self.freshness.is_catching_up = False
            logger.info("caught up after %s", count(self.applier.records, "record"))
        positions = dict(self.progress.positions)  # records may be applied during the probe
        ends = await self._reader.ends()
        if ends is None:
            return
        if any(positions.get(partition, 0) > end for partition, end in ends.items()):
            raise LogReplacedError("the event log ends before the last record that was read")
        self.progress.update_ends(ends)

    async def _stop_probing(self) -> None:
        probing, self._probing = self._probing, None
        await cancel(probing)

    async def _copy(self) -> SnapshotParts:
        """Copy the views in slices. The loop waits for the copy, so nothing changes the views during this time."""
        parts: SnapshotParts = await self._slices.run(take(self.namespaces, self.progress.positions, self._clock()))
        return parts

    def _note_failure(self, error: Exception) -> None:
        self.failure = error
