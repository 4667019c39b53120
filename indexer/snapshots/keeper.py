"""Loads the newest snapshot at the start and writes new ones in the background."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from indexer.settings import IndexerSettings
from indexer.slices import Interval
from indexer.snapshots.base import SnapshotDamagedError, SnapshotStore, SnapshotStoreError
from indexer.snapshots.image import Snapshot, SnapshotParts, unpack

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SnapshotCounts:
    """Counts of all keepers of a process."""

    written: int = 0
    failures: int = 0
    """Snapshots that could not be written."""


class SnapshotKeeper:
    """Owns the store and the task that writes to it. If the store fails, only freshness suffers."""

    def __init__(
        self, store: SnapshotStore | None, settings: IndexerSettings, now: float, counts: SnapshotCounts | None = None
    ) -> None:
        """store: None keeps nothing. now: monotonic seconds; the first snapshot is due one interval later."""
        self.counts = counts or SnapshotCounts()
        self._store = store
        self._settings = settings
        self._interval = Interval(settings.snapshot_interval_s, now + settings.snapshot_interval_s)
        self._saving: asyncio.Task[None] | None = None

    async def load(self, now: float) -> Snapshot | None:
        """Return the newest snapshot, or None if there is none that can be read.

        now: seconds since 1970. Its views are as old as they were heard.
        """
        if self._store is None:
            return None
        tick = time.monotonic()
        try:
            data = await self._store.load()
            if data is None:
                return None
            snapshot = await asyncio.to_thread(unpack, data, self._settings)
        except (SnapshotStoreError, SnapshotDamagedError) as error:
            logger.warning("no snapshot loaded, reading the log from its beginning: %s", error)
            return None
        for view in snapshot.namespaces.views:
            view.last_batch_tick = tick - max(0.0, now - view.last_batch_at)
        return snapshot

    async def save_when_due(self, now: float, copy: Callable[[], Awaitable[SnapshotParts]]) -> None:
        """Copy the views and start to write them if an interval has passed and the last snapshot is complete."""
        is_busy = self._saving is not None and not self._saving.done()
        if self._store is not None and not is_busy and self._interval.is_due(now):
            self._saving = asyncio.create_task(self._save(self._store, await copy()), name="snapshot")

    async def close(self, copy: Callable[[], Awaitable[SnapshotParts]] | None) -> None:
        """Finish the snapshot that is being written, write a last one unless `copy` is None, and close the store."""
        if self._saving is not None:
            await self._saving
        if self._store is not None:
            if copy is not None:
                await self._save(self._store, await copy())
            await self._store.close()

    async def _save(self, store: SnapshotStore, parts: SnapshotParts) -> None:
        try:
            await store.save(await asyncio.to_thread(parts.pack))
        except SnapshotStoreError as error:
            self.counts.failures += 1
            logger.warning("snapshot not written: %s", error)
        except Exception:
            self.counts.failures += 1
            logger.exception("snapshot not written")
        else:
            self.counts.written += 1
