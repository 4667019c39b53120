"""Translated pages -> the publisher: media become tiers, and ambiguous hashes are resolved."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from bridge.counters import BridgeCounters
from bridge.decoding.events import UNKNOWN, Medium, PageRun
from bridge.hashes.hash_memory import AmbiguousPage, HashNamespace, TranslatedPages, single_pages
from kv_events.errors import shorten
from kv_events.hashing import U64Array
from kv_events.runtime.rate_limited_logger import RateLimitedLogger
from kv_events.schema import NUM_MEDIA, AllBlocksCleared
from publisher.event_columns import EventColumns, StoredColumns
from publisher.kernels.changes import COPY_REMOVAL, REMOVAL
from publisher.publisher import EventPublisher

_MAX_MEDIA_NAMES = 64


class PagePublisher:
    """Publishes the stores and removals of one worker stream. Does nothing until `publisher` is set."""

    def __init__(self, counters: BridgeCounters, limited_logger: RateLimitedLogger, *, counts_copies: bool) -> None:
        """counts_copies: whether a repeated store adds a copy, so that a removal takes only one away.

        Copies are counted for events that name an attention group, which vLLM sends for each of its blocks, and on the
        device. Elsewhere, engines keep one copy and may repeat its store.
        """
        self.publisher: EventPublisher | None = None
        self._is_clear = False  # whether nothing was stored since the last clear
        self._counts_copies = counts_copies
        self._counters = counters
        self._limited_logger = limited_logger
        self._collisions = HashCollisions()

    def clear(self) -> None:
        """Publish that the worker holds no pages."""
        self._collisions.clear()
        if self.publisher is not None and not self._is_clear:
            self._is_clear = True
            self.publisher.publish([AllBlocksCleared()])

    def store(self, pages: TranslatedPages, namespace: HashNamespace, medium: Medium) -> None:
        """Publish pages that were stored on a medium."""
        tier = self._tier(medium, len(pages.columns.hashes))
        reassigned = [page for page in pages.ambiguous if page.is_reassigned]
        if tier is None and reassigned:  # the hashes' former pages are removed, wherever the new ones are
            self._remove_everywhere(np.array([page.block_hash for page in reassigned], np.uint64), namespace.label)
        if tier is None or self.publisher is None or not len(pages.columns.hashes):
            return
        for page in pages.ambiguous:
            if page.engine_hash != page.block_hash:
                dropped = self._collisions.add(page, namespace)
                if dropped is not None:
                    self._remove_everywhere(dropped[1], dropped[0])
        self._counters.pages_stored += len(pages.columns.hashes)
        self._is_clear = False
        if reassigned:
            self._store_reassigned(self.publisher, pages.columns, reassigned, namespace, tier)
        else:
            self.publisher.publish_columns(EventColumns.stored(pages.columns, tier), namespace.label)

    def remove(self, block_hashes: U64Array, namespace: HashNamespace, medium: Medium, *, names_group: bool) -> None:
        """Publish that the engine removed pages from a medium. names_group: whether its event names a group."""
        is_copy = self._counts_copies and (names_group or medium.is_device)
        self._remove(block_hashes, namespace, medium, is_copy)

    def remove_all(self, block_hashes: U64Array, namespace: HashNamespace, medium: Medium) -> None:
        """Publish that no copies of pages are left on a medium."""
        self._remove(block_hashes, namespace, medium, is_copy=False)

    def _remove(self, block_hashes: U64Array, namespace: HashNamespace, medium: Medium, is_copy: bool) -> None:
        tier = self._tier(medium, len(block_hashes))
        if tier is None or self.publisher is None:
            return
        self._counters.pages_removed += len(block_hashes)
        hashes = self._collisions.all_of(block_hashes, namespace)
        self.publisher.publish_columns(EventColumns.removed(hashes, tier, is_copy=is_copy), namespace.label)

    def remove_everywhere(self, block_hashes: U64Array, namespace: HashNamespace) -> None:
        """Publish pages that were removed from all media."""
        self._remove_everywhere(block_hashes, namespace.label)

    def change(self, pages: TranslatedPages, run: PageRun, namespace: HashNamespace) -> None:
        """Publish the stores and removals of a mixed run. pages: those of the run, translated."""
        if pages.ambiguous or self._collisions:
            self._change_one_by_one(pages, run, namespace)
        elif self.publisher is not None:
            columns, kinds = pages.columns, run.events.kinds
            is_removal, lengths = kinds & REMOVAL > 0, columns.lengths
            num_pages, num_removed = len(columns.hashes), int(lengths @ is_removal)
            if any(medium.tier is None for medium in run.media):
                for index, medium in enumerate(run.media):
                    self._tier(medium, int(lengths @ (kinds & ~np.uint8(REMOVAL) == UNKNOWN + index)))
                num_pages, num_removed = (int(lengths @ each) for each in (kinds < UNKNOWN, kinds // REMOVAL == 1))
            if self._counts_copies:
                is_copy = is_removal if run.attention_group is not None else kinds == REMOVAL
                kinds = kinds + np.uint8(COPY_REMOVAL - REMOVAL) * is_copy
            self._counters.pages_stored += num_pages - num_removed
            self._counters.pages_removed += num_removed
            self._is_clear = False
            self.publisher.publish_columns(EventColumns(kinds, columns), namespace.label)

    def _change_one_by_one(self, pages: TranslatedPages, run: PageRun, namespace: HashNamespace) -> None:
        """Publish event by event, because the meaning of an ambiguous hash may depend on the events before."""
        borders = np.cumsum([0, *pages.columns.lengths]).tolist()
        for event, (first, end) in enumerate(pairwise(borders)):
            part, medium = pages.columns.part(slice(event, event + 1), slice(first, end)), run.medium_at(event)
            if run.events.kinds[event] & REMOVAL:
                self.remove(part.block_hashes, namespace, medium, names_group=run.attention_group is not None)
            else:
                ambiguous = [
                    page._replace(position=page.position - first)
                    for page in pages.ambiguous
                    if first <= page.position < end
                ]
                self.store(TranslatedPages(part, ambiguous, 0), namespace, medium)

    def _store_reassigned(
        self,
        publisher: EventPublisher,
        columns: StoredColumns,
        reassigned: list[AmbiguousPage],
        namespace: HashNamespace,
        tier: int,
    ) -> None:
        """Publish in parts: a reassigned hash must be removed directly before its new page is stored."""
        positions = {page.position for page in reassigned}
        for start, stop in pairwise(sorted({0, *positions, len(columns.hashes)})):
            if start in positions:
                self._remove_everywhere(columns.block_hashes[start : start + 1], namespace.label)
            part = single_pages(columns.block_hashes[start:stop], columns.hashes[start:stop])
            publisher.publish_columns(EventColumns.stored(part, tier), namespace.label)

    def _remove_everywhere(self, block_hashes: U64Array, label: str | None) -> None:
        if self.publisher is not None:
            for tier in range(NUM_MEDIA):
                self.publisher.publish_columns(EventColumns.removed(block_hashes, tier), label)

    def _tier(self, medium: Medium, num_pages: int) -> int | None:
        """The tier of a medium. None if it is unknown: `num_pages` are then left out."""
        if medium.tier is None:
            unknown, name = self._counters.unknown_media, medium.name
            unknown[name if name in unknown or len(unknown) < _MAX_MEDIA_NAMES else "others"] += num_pages
            self._limited_logger.warning("pages on medium %s left out: the medium is unknown", shorten(name))
        return medium.tier


_MOST = 65_536
"""Engine hashes that are kept. Beyond, the pages of the oldest one are dropped."""


class HashCollisions:
    """Engine hash -> the other hashes under which the ledger may hold its pages. True if there are any."""

    def __init__(self) -> None:
        self._hashes: dict[tuple[str | None, int], set[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def add(self, page: AmbiguousPage, namespace: HashNamespace) -> tuple[str | None, U64Array] | None:
        """Add a page. If another hash had to make room, returns the namespace and hashes to remove from all media."""
        self._hashes.setdefault((namespace.label, page.engine_hash), set()).add(page.block_hash)
        if len(self._hashes) <= _MOST:
            return None
        oldest = next(iter(self._hashes))
        return oldest[0], np.array(sorted(self._hashes.pop(oldest)), np.uint64)

    def all_of(self, block_hashes: U64Array, namespace: HashNamespace) -> U64Array:
        """Ledger hashes of all pages with these engine hashes.

        A removal does not say which it means, so it means all.
        """
        if not self._hashes:
            return block_hashes
        others = [other for known in block_hashes.tolist() for other in self._hashes.get((namespace.label, known), ())]
        return np.concatenate((block_hashes, np.array(others, np.uint64))) if others else block_hashes

    def clear(self) -> None:
        """Forget all collisions."""
        self._hashes.clear()
