"""The part of the log that one member of a group reads: takes over and gives up partitions with their views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from indexer.applier import Applier
from indexer.progress import Progress
from indexer.slices import Slices
from indexer.sources.base import DivisibleSource, SourceUnavailableError
from indexer.views import View

if TYPE_CHECKING:
    from indexer.shards.membership import Membership


class Share:
    """Follows the assignment of partitions to this member. The consumer calls it between two records."""

    def __init__(
        self, membership: Membership, source: DivisibleSource, applier: Applier, progress: Progress, slices: Slices
    ) -> None:
        self.membership = membership
        self._source = source
        self._applier = applier
        self._progress = progress
        self._slices = slices
        self._begun: set[int] = set()  # partitions that the source reads

    def claims(self) -> dict[int, bool]:
        """Return the partitions that this member answers for -> whether their views are up to date with the log."""
        is_ready = self._progress.is_caught_up
        return {
            partition: is_ready and partition in self._begun and not self._progress.is_behind(partition)
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
        for partition in sorted(wanted - positions.keys()):
            positions[partition] = 0
        self.membership.held = sorted(positions)
        if self._begun != wanted:
            await self._begin()

    def note_start(self, begins: Mapping[int, int]) -> None:
        """Record that the source was started. begins: see `Source.start`."""
        self._begun = set(begins)

    async def _begin(self) -> None:
        try:
            begins = await self._source.read_only(self._progress.positions, self._progress.positions)
            new = begins.keys() - self._begun
            ends = await self._source.ends() if new else {}
        except SourceUnavailableError:
            return  # the reader notes the outage, and this is tried again
        for partition in new:
            self._progress.positions[partition] = begins[partition]
            self._progress.add(partition, ends.get(partition, 0))
            self._progress.catch_up(partition)
        self._begun = set(begins)

    async def _give_up(self, partition: int) -> None:
        """Drop the views of a partition."""
        self._progress.remove(partition)
        for view in self._applier.namespaces.views:
            if view.partition == partition:
                await self._slices.run(self._applier.namespaces.forget(view.stream))
