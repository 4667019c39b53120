"""The part of the log that one member of a group reads: takes over and gives up partitions with their views."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from indexer.applier import Applier
from indexer.namespaces import Namespaces
from indexer.progress import Progress
from indexer.settings import IndexerSettings
from indexer.shards.copies import copy_views
from indexer.slices import Slices
from indexer.snapshots.base import SnapshotStore
from indexer.snapshots.image import Snapshot, SnapshotParts, take
from indexer.snapshots.keeper import SnapshotCounts, SnapshotKeeper
from indexer.sources.base import DivisibleSource, SourceUnavailableError
from indexer.views import LATE_S, View

if TYPE_CHECKING:
    from indexer.shards.membership import Membership

logger = logging.getLogger(__name__)


class OwnedPartitions:
    """Follows the assignment of partitions to this member. The consumer calls it between two records."""

    def __init__(
        self,
        membership: Membership,
        source: DivisibleSource,
        applier: Applier,
        settings: IndexerSettings,
        store: Callable[[int], SnapshotStore | None],
        progress: Progress,
        slices: Slices,
        counts: SnapshotCounts,
    ) -> None:
        """store: creates the store of the snapshots of a partition, if there are any."""
        self.membership = membership
        self._settings = settings
        self._store = store
        self._keepers: dict[int, SnapshotKeeper] = {}  # by partition
        self._counts = counts
        self._source = source
        self._applier = applier
        self._progress = progress
        self._slices = slices
        self._begun: frozenset[int] | None = None  # partitions that the source reads; None: it has not been told yet

    def owned(self) -> dict[int, bool]:
        """Return the partitions that this member answers for -> whether their views are up to date with the log."""
        if self.membership.is_doubtful:
            return {}
        is_ready = self._progress.is_caught_up
        return {
            partition: is_ready and partition in (self._begun or ()) and not self._progress.is_behind(partition)
            for partition in self.membership.wanted
        }

    def is_behind(self, view: View) -> bool:
        """Return whether the view belongs to a partition that is being taken over."""
        return self._progress.is_behind(view.partition)

    def has(self, partition: int) -> bool:
        """Return whether records of a partition are to be applied."""
        return partition in self._progress.positions

    async def follow(self) -> None:
        """Give up the partitions that are no longer wanted, and take over those that are."""
        wanted, positions = self.membership.wanted, self._progress.positions
        for partition in positions.keys() - wanted:
            await self._give_up(partition)
        new = sorted(wanted - positions.keys())
        # at once, because a store that hangs is waited for
        for partition, snapshot in zip(new, await asyncio.gather(*map(self._load, new)), strict=True):
            positions[partition] = 0 if snapshot is None else await self._take_over(partition, snapshot)
        self.membership.held = sorted(positions)
        if self._begun != wanted:
            await self._begin()

    def note_start(self, begins: Mapping[int, int]) -> None:
        """Record that the source was started. begins: see `Source.start`."""
        self._begun = frozenset(begins)

    async def _begin(self) -> None:
        try:
            begins = await self._source.read_only(self._progress.positions, self._progress.positions)
            new = begins.keys() - (self._begun or frozenset())
            ends = await self._source.ends() if new else {}
        except SourceUnavailableError:
            return  # the reader notes the outage, and this is tried again
        for partition in new:
            self._progress.positions[partition] = begins[partition]
            self._progress.add(partition, ends.get(partition, 0))
            self._progress.catch_up(partition)
        self._begun = frozenset(begins)

    async def _load(self, partition: int) -> Snapshot | None:
        keeper = SnapshotKeeper(self._store(partition), self._settings, time.monotonic(), self._counts)
        self._keepers[partition] = keeper
        return await keeper.load(time.time())

    async def _take_over(self, partition: int, snapshot: Snapshot) -> int:
        """Restore the views of a partition from its snapshot. Returns the offset of the first record to apply."""
        views, now = snapshot.namespaces.views, time.monotonic()
        for view in views:  # late, but neither expired nor silent before the log was read
            view.last_batch_tick, view.silent_from = max(view.last_batch_tick, now - LATE_S), now
        await self._slices.run(copy_views(views, self._applier.namespaces, partition))
        logger.info("partition %d: snapshot of %d views loaded", partition, len(views))
        return snapshot.positions.get(partition, 0)

    async def _give_up(self, partition: int) -> None:
        """Drop the views of a partition."""
        self._progress.remove(partition)
        await self._close(partition)
        for view in self._views(partition):
            await self._slices.run(self._applier.namespaces.forget(view.stream))

    async def save_when_due(self, now: float) -> None:
        """Write the snapshots that are due. now: monotonic seconds."""
        for partition in self.membership.own & self._keepers.keys():
            if not self._progress.is_behind(partition):
                await self._keepers[partition].save_when_due(now, partial(self._copy, partition))

    async def close(self, *, with_snapshots: bool) -> None:
        """Write the last snapshots, from which the next members take over, and close their stores."""
        for partition in list(self._keepers):
            is_own = partition in self.membership.own and not self._progress.is_behind(partition)
            await self._close(partition, partial(self._copy, partition) if with_snapshots and is_own else None)

    async def _close(self, partition: int, copy: Callable[[], Awaitable[SnapshotParts]] | None = None) -> None:
        await self._keepers.pop(partition).close(copy)

    async def _copy(self, partition: int) -> SnapshotParts:
        """Copy the views of a partition in slices, between two records."""
        copies = Namespaces(self._settings)
        position = self._progress.positions[partition]
        await self._slices.run(copy_views(self._views(partition), copies, partition))
        parts: SnapshotParts = await self._slices.run(take(copies, {partition: position}, time.time()))
        return parts

    def _views(self, partition: int) -> list[View]:
        return [view for view in self._applier.namespaces.views if view.partition == partition]
