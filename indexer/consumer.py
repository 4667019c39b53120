"""The loop of the router side: records in, views up to date, and what goes with it over time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager

from indexer.applier import Applier
from indexer.freshness import Freshness
from indexer.namespaces import Namespaces
from indexer.resync import ResyncPlanner
from indexer.settings import IndexerSettings
from indexer.snapshots.base import SnapshotDamagedError, SnapshotStore, SnapshotStoreError
from indexer.snapshots.image import SnapshotParts, take, unpack
from indexer.sources.base import Source, SourceUnavailableError
from indexer.views import View, ViewState
from kv_events.records import LogRecord
from kv_events.streams import StreamId

log = logging.getLogger(__name__)

_SLICE_S = 0.001
_RETRY_S = 0.5
_PLAN_S = 0.1
_PROBE_S = 1.0
_STOP_S = 5.0


class Consumer:
    """Reads a source into views, in one event loop; queries run between two slices of it.

    Life: load the newest snapshot, seek, catch up, then `ready`. After that it asks for resyncs, forgets workers that
    stay silent, and writes snapshots. A source or a store that goes away costs freshness only.
    """

    def __init__(
        self,
        source: Source,
        applier: Applier,
        settings: IndexerSettings,
        store: SnapshotStore | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._source = source
        self._applier = applier
        self._settings = settings
        self._store = store
        self._clock = clock
        self._positions: dict[int, int] = {}
        self._goal: Mapping[int, int] | None = None
        self._planner = ResyncPlanner(settings)
        self._slice_began = 0.0
        self._next_probe = self._next_plan = 0.0
        self._next_snapshot = time.monotonic() + settings.snapshot_interval_s
        self._saving: asyncio.Task[None] | None = None
        self._requesting: asyncio.Task[None] | None = None
        self._to_forget: list[tuple[Collection[StreamId], Mapping[int, int], asyncio.Future[None]]] = []
        self._stopping = False
        self.freshness = Freshness(settings.worker_ttl_s, time.monotonic())
        applier.is_expired = lambda view: self.freshness.state(view) is ViewState.EXPIRED
        self.ready = False
        """Whether everything that was in the log at the start has been applied."""
        self.failure: BaseException | None = None
        """What ended the loop, if it ended by itself."""
        self.source_error: str | None = None
        """Why the source cannot be read now."""
        self.snapshots_written = 0
        self.snapshot_failures = 0

    @property
    def namespaces(self) -> Namespaces:
        """The views."""
        return self._applier.namespaces

    @property
    def applier(self) -> Applier:
        """Counts of records and dead letters."""
        return self._applier

    @property
    def positions(self) -> Mapping[int, int]:
        """Partition -> offset of the next record to apply."""
        return self._positions

    @property
    def resyncs_requested(self) -> int:
        """Requests sent to publishers so far."""
        return self._planner.requested

    def lag(self) -> int | None:
        """Records in the log that are not applied yet, as of the last probe; None before the first."""
        if self._goal is None:
            return None
        return sum(max(0, end - self._positions.get(partition, 0)) for partition, end in self._goal.items())

    def demand_resync(self, view: View) -> None:
        """Ask the view's publisher to name everything again, at the next opportunity."""
        self._planner.demand(view)

    async def forget(self, streams: Collection[StreamId]) -> None:
        """Drop streams with their pages, once everything that is in the log by now has been applied.

        Raises SourceUnavailableError.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._to_forget.append((streams, await self._source.ends(), done))
        await done

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run in the background of a block. Leaving it writes a last snapshot and stops."""
        task = asyncio.create_task(self._run(), name="consumer")
        task.add_done_callback(self._note_end)
        try:
            yield
        finally:
            self._stopping = True
            await asyncio.wait({task}, timeout=_STOP_S)
            is_between_records = task.done() and self.failure is None
            await _cancelled(task, self._requesting)
            if self._saving is not None:
                await self._saving
            if is_between_records and self._goal is not None:
                await self._save(await self._copied())
            await self._source.stop()
            if self._store is not None:
                await self._store.close()
            self._applier.dead_letters.close()

    async def _run(self) -> None:
        await self._load()
        await self._start_source()
        while not self._stopping:
            records = await self._fetch()
            for record in records:
                await self._apply(record)
                if self._stopping:
                    return
            await self._between_records()

    # --- records ---

    async def _start_source(self) -> None:
        while not self._stopping:
            try:
                self._positions = {**self._positions, **await self._source.start(self._positions)}
                self._goal = await self._source.ends()
            except SourceUnavailableError as error:
                self._source_is_away(error)
                await asyncio.sleep(_RETRY_S)
            else:
                return

    async def _fetch(self) -> Sequence[LogRecord]:
        try:
            records = await self._source.fetch()
        except SourceUnavailableError as error:
            self._source_is_away(error)
            await asyncio.sleep(_RETRY_S)
            return []
        if records:
            self._source_is_back()
        return records

    async def _apply(self, record: LogRecord) -> None:
        if record.offset < self._positions.get(record.partition, 0):
            return
        now = self._clock()
        late_s = 0.0 if self.ready else max(0.0, now - record.timestamp_ms / 1000)
        for _ in self._applier.apply(record, now - late_s, time.monotonic() - late_s):
            await self._breathe()
        self._positions[record.partition] = record.offset + 1
        await self._breathe()

    async def _breathe(self) -> None:
        """Let queries through when this slice of work has lasted long enough."""
        if time.perf_counter() - self._slice_began > _SLICE_S:
            await asyncio.sleep(0)
            self._slice_began = time.perf_counter()

    def _source_is_away(self, error: SourceUnavailableError) -> None:
        if self.source_error is None:
            log.warning("source: %s", error)
        self.source_error = str(error)

    def _source_is_back(self) -> None:
        self.source_error = None
        self.freshness.log_is_alive(time.monotonic())

    # --- between records ---

    async def _between_records(self) -> None:
        now = time.monotonic()
        if self._to_forget:
            await self._forget_demanded()
        if not self.ready or now >= self._next_probe:
            self._next_probe = now + _PROBE_S
            await self._probe()
        if self.ready and now >= self._next_plan and (self._requesting is None or self._requesting.done()):
            self._next_plan = now + _PLAN_S
            self._requesting = asyncio.create_task(self._request_resyncs(now), name="resync-requests")
            await self._forget_silent()
        if now >= self._next_snapshot and self._store is not None and (self._saving is None or self._saving.done()):
            self._next_snapshot = now + self._settings.snapshot_interval_s
            self._saving = asyncio.create_task(self._save(await self._copied()), name="snapshot")

    async def _probe(self) -> None:
        if not self.ready and self.lag() == 0:
            self.ready = True
            log.info("caught up after %d records", self._applier.records)
        try:
            ends = await self._source.ends()
        except SourceUnavailableError as error:
            self._source_is_away(error)
            return
        if self.ready:
            self._goal = ends
        self._source_is_back()

    async def _request_resyncs(self, now: float) -> None:
        for request in self._planner.plan(self.namespaces, now):
            try:
                await self._source.request(request)
            except SourceUnavailableError as error:
                self._source_is_away(error)
                return

    async def _forget_silent(self) -> None:
        for view in self.namespaces.views:
            if self.freshness.silence_s(view) > self._settings.forget_after_s:
                log.info("forgetting %s: silent for %.0f s", view.stream.key, self.freshness.silence_s(view))
                await self._forget(view.stream)

    async def _forget_demanded(self) -> None:
        demands, self._to_forget = self._to_forget, []
        for streams, goal, done in demands:
            if any(self._positions.get(partition, 0) < end for partition, end in goal.items()):
                self._to_forget.append((streams, goal, done))
                continue
            for stream in streams:
                if self.namespaces.view(stream) is not None:
                    await self._forget(stream)
            if not done.done():
                done.set_result(None)

    async def _forget(self, stream: StreamId) -> None:
        for _ in self.namespaces.forget(stream):
            await self._breathe()

    # --- snapshots ---

    async def _load(self) -> None:
        if self._store is None:
            return
        try:
            data = await self._store.load()
            if data is None:
                return
            snapshot = unpack(data, self._settings)
        except (SnapshotStoreError, SnapshotDamagedError) as error:
            log.warning("no snapshot loaded, reading the log from its beginning: %s", error)
            return
        self._applier.namespaces = snapshot.namespaces
        self._positions = snapshot.positions
        log.info("snapshot of %d views loaded", len(snapshot.namespaces.views))

    async def _copied(self) -> SnapshotParts:
        """Copy the views, which nobody else changes, letting queries through."""
        copying = take(self.namespaces, self._positions, self._clock())
        while True:
            try:
                next(copying)
            except StopIteration as end:
                parts: SnapshotParts = end.value
                return parts
            await self._breathe()

    async def _save(self, parts: SnapshotParts) -> None:
        if self._store is None:
            return
        try:
            await self._store.save(await asyncio.to_thread(parts.pack))
        except SnapshotStoreError as error:
            self.snapshot_failures += 1
            log.warning("snapshot not written: %s", error)
        else:
            self.snapshots_written += 1

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure, self.ready = error, False
            log.error("the consumer has ended", exc_info=error)


async def _cancelled(*tasks: asyncio.Task[None] | None) -> None:
    """Cancel what still runs, and wait for its end."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
