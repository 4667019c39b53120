"""Pages that have their names -> the publisher: media, hashes that mean several pages, or another one than before."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from bridge.counters import BridgeCounters
from bridge.decoding.runs import MixedRun, Place
from bridge.naming.hash_collisions import Variants
from bridge.naming.hash_translator import NamedPages, Space, SpecialPage, single_pages
from bridge.naming.media import tier_of
from kv_events.errors import shorten
from kv_events.hashing import U64Array
from kv_events.rate_limited_log import RateLimitedLog
from kv_events.schema import NUM_MEDIA, AllBlocksCleared
from publisher.change_kernels import REMOVAL
from publisher.intake import EventColumns, StoredColumns
from publisher.publisher import EventPublisher

_MOST_MEDIA_NAMES = 64
_NOWHERE = 128
"""Kind of an event on an unknown medium, which the ledger passes over."""


class Placer:
    """Publishes stores and removals of one worker stream, once there is a publisher."""

    def __init__(self, counters: BridgeCounters, limited_log: RateLimitedLog) -> None:
        self.publisher: EventPublisher | None = None
        self._counters = counters
        self._limited_log = limited_log
        self._variants = Variants()

    def clear(self) -> None:
        """Nothing is held any more."""
        self._variants.clear()
        if self.publisher is not None:
            self.publisher.publish([AllBlocksCleared()])

    def store(self, named: NamedPages, space: Space, place: Place) -> None:
        """Pages now lie on a medium."""
        tier = self._tier(place, len(named.columns.hashes))
        renamed = [page for page in named.special if page.is_renamed]
        if (
            tier is None and renamed
        ):  # what the hashes meant until now is not there any more, wherever the new pages are
            self._remove_everywhere(np.array([page.block_hash for page in renamed], np.uint64), space.label)
        if tier is None or self.publisher is None or not len(named.columns.hashes):
            return
        for page in named.special:
            if page.base != page.block_hash:
                given_up = self._variants.add(page, space)
                if given_up is not None:
                    self._remove_everywhere(given_up[1], given_up[0])
        self._counters.pages_stored += len(named.columns.hashes)
        if renamed:
            self._store_renamed(self.publisher, named.columns, renamed, space, tier)
        else:
            self.publisher.publish_columns(EventColumns.stored(named.columns, tier), space.label)

    def remove(self, block_hashes: U64Array, space: Space, place: Place) -> None:
        """Pages left a medium."""
        tier = self._tier(place, len(block_hashes))
        if tier is None or self.publisher is None:
            return
        self._counters.pages_removed += len(block_hashes)
        hashes = self._variants.all_of(block_hashes, space)
        self.publisher.publish_columns(EventColumns.removed(hashes, tier), space.label)

    def remove_everywhere(self, block_hashes: U64Array, space: Space) -> None:
        """Pages lie on no medium any more."""
        self._remove_everywhere(block_hashes, space.label)

    def change(self, named: NamedPages, run: MixedRun, space: Space) -> None:
        """Stores and removals of a run, whose pages were named."""
        if named.special or self._variants:
            self._change_in_parts(named, run, space)
        elif self.publisher is not None:
            columns = named.columns
            is_removal, lengths = run.stored.events.is_removal, columns.lengths
            tiers = [_NOWHERE if tier is None else tier for tier in (tier_of(*place) for place in run.media)]
            kinds = np.array(tiers, np.uint8)[run.places] + np.uint8(REMOVAL) * is_removal
            num_pages, num_removed = len(columns.hashes), int(lengths @ is_removal)
            if _NOWHERE in tiers:
                self._count_unknown(run, columns)
                is_somewhere = kinds < _NOWHERE
                num_pages, num_removed = int(lengths @ is_somewhere), int(lengths @ (is_removal & is_somewhere))
            self._counters.pages_stored += num_pages - num_removed
            self._counters.pages_removed += num_removed
            self.publisher.publish_columns(EventColumns(kinds, columns), space.label)

    def _change_in_parts(self, named: NamedPages, run: MixedRun, space: Space) -> None:
        """Event by event: what one of them means may depend on those before it."""
        borders = np.cumsum([0, *named.columns.lengths]).tolist()
        for event, (first, end) in enumerate(pairwise(borders)):
            place = run.media[run.places[event]]
            part = named.columns.part(slice(event, event + 1), slice(first, end))
            if run.stored.events.is_removal[event]:
                self.remove(part.block_hashes, space, place)
            else:
                special = [
                    page._replace(place=page.place - first) for page in named.special if first <= page.place < end
                ]
                self.store(NamedPages(part, special, 0), space, place)

    def _store_renamed(
        self,
        publisher: EventPublisher,
        columns: StoredColumns,
        renamed: list[SpecialPage],
        space: Space,
        tier: int,
    ) -> None:
        """In stretches, because a hash that means another page now has to be taken off right before."""
        places = {page.place for page in renamed}
        for start, stop in pairwise(sorted({0, *places, len(columns.hashes)})):
            if start in places:
                self._remove_everywhere(columns.block_hashes[start : start + 1], space.label)
            part = single_pages(columns.block_hashes[start:stop], columns.hashes[start:stop])
            publisher.publish_columns(EventColumns.stored(part, tier), space.label)

    def _remove_everywhere(self, block_hashes: U64Array, label: str | None) -> None:
        if self.publisher is not None:
            for tier in range(NUM_MEDIA):
                self.publisher.publish_columns(EventColumns.removed(block_hashes, tier), label)

    def _tier(self, place: Place, num_pages: int) -> int | None:
        tier = tier_of(*place)
        if tier is None:
            unknown, medium = self._counters.unknown_media, place.medium
            unknown[medium if medium in unknown or len(unknown) < _MOST_MEDIA_NAMES else "others"] += num_pages
            self._limited_log.warning("pages on medium %s left out: no medium of ours", shorten(medium))
        return tier

    def _count_unknown(self, run: MixedRun, columns: StoredColumns) -> None:
        for number, place in enumerate(run.media):
            self._tier(place, int(columns.lengths @ (run.places == number)))
