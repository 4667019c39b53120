"""The part of the log that one member of a group reads: takes over and gives up partitions with their views."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from indexer.applier import Applier
from indexer.index import SLICE_PAGES, IndexFullError, StreamPages
from indexer.namespaces import Namespaces
from indexer.progress import Progress
from indexer.settings import IndexerSettings
from indexer.slices import Slices
from indexer.snapshots.base import SnapshotStore
from indexer.snapshots.image import Snapshot, SnapshotParts, take
from indexer.snapshots.keeper import SnapshotCounts, SnapshotKeeper
from indexer.sources.base import SourceUnavailableError
from indexer.views import LATE_S, View
from kv_events.codec import StoredPages
from kv_events.runtime.words import count
from kv_events.schema import NUM_MEDIA

if TYPE_CHECKING:
    from indexer.shards.membership import Membership
    from indexer.sources.kafka import KafkaSource

logger = logging.getLogger(__name__)

_NO_HASHES = np.zeros(0, np.uint64)


class OwnedPartitions:
    """Follows the assignment of partitions to this member. The consumer calls it between two records."""

    def __init__(
        self,
        membership: Membership,
        source: KafkaSource,
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
        if self.membership.may_be_replaced:
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
        logger.info("partition %d: snapshot of %s loaded", partition, count(len(views), "view"))
        return snapshot.positions.get(partition, 0)

    async def _give_up(self, partition: int) -> None:
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


def copy_views(views: Iterable[View], target: Namespaces, partition: int) -> Iterator[None]:
    """Copy views with their pages, in slices. Streams that the target knows already are left out.

    views: they must not change before the end. Views that do not fit are left out: their publishers send
    everything again. partition: that of the copies.
    """
    for view in views:
        if target.view(view.stream) is None:
            try:
                copy = yield from _copy(view, target)
                copy.partition = partition
            except IndexFullError as error:
                logger.warning("%s is not copied: %s", view.stream.key, error)


def _copy(view: View, target: Namespaces) -> Generator[None, None, View]:
    yield from target.make_room(view.stream, view.block_size)
    copy = target.add_view(view.stream, view.block_size)
    for held in view.index.stream_pages(view.number):
        for event in _events(held):
            for start in range(0, len(event.hashes), SLICE_PAGES):
                stop = min(start + SLICE_PAGES, len(event.hashes))
                _, refused = copy.index.store(copy.number, event, start, stop)
                copy.count_refused(refused)
                yield
    copy.position, copy.counters = view.position, view.counters
    copy.state, copy.stale_reason, copy.degraded_reason = view.state, view.stale_reason, view.degraded_reason
    copy.last_batch_at, copy.last_batch_tick = view.last_batch_at, view.last_batch_tick
    copy.agreed_at, copy.silent_from = view.agreed_at, view.silent_from
    return copy


def _events(held: StreamPages) -> Iterator[StoredPages]:
    """Yield one store for each tier that holds some of the pages. Each page names its own parent."""
    for medium in range(NUM_MEDIA):
        is_held = (held.tiers >> np.uint8(medium) & np.uint8(1)).astype(np.bool_)
        if is_held.any():
            hashes = held.hashes[is_held]
            chain_starts = np.full(-(-len(hashes) // 8), 0xFF, np.uint8)
            yield StoredPages(medium, hashes, _NO_HASHES, chain_starts, held.parents[is_held])
