"""Translated pages -> the publisher. Ambiguous hashes are resolved on the way."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from bridge.context import EngineContext
from bridge.decoding.events import tier_of
from bridge.decoding.kernels.columns import UNKNOWN
from bridge.hashes.hash_memory import AmbiguousPage, HashNamespace, TranslatedPages, single_pages
from kv_events.errors import shorten
from kv_events.hashing import U64Array
from kv_events.schema import NUM_MEDIA, AllBlocksCleared
from publisher.kernels.changes import COPY_REMOVAL, REMOVAL
from publisher.kernels.events import PageEvents
from publisher.publisher import EventPublisher

_MAX_MEDIA_NAMES = 64
_MAX_COLLISIONS = 65_536
"""Engine hashes that are kept. Beyond, the pages of the oldest one are dropped."""
_KINDS = np.arange(2 * NUM_MEDIA, dtype=np.uint8)  # stores on each tier, then removals
_OF_COPIES = np.where(_KINDS >= REMOVAL, _KINDS + np.uint8(COPY_REMOVAL - REMOVAL), _KINDS)
"""Kind -> the same, with removals of one copy in place of removals of all."""
_OF_COPIES_ON_DEVICE = np.where(_KINDS == REMOVAL, _OF_COPIES, _KINDS)


class PagePublisher:
    """Publishes the stores and removals of one worker stream. Does nothing until `publisher` is set.

    If the engine's copies count, a repeated store adds one, and a removal takes only one away. They count for events
    that name an attention group, which vLLM sends for each of its blocks, and on the device. Elsewhere, engines keep
    one copy and may repeat its store.
    """

    def __init__(self, context: EngineContext) -> None:
        self.publisher: EventPublisher | None = None
        self._is_clear = False  # whether nothing was stored since the last clear
        self._counts_copies = context.defaults.count_copies
        self._counters, self._limited_logger = context.counters, context.limited_logger
        self._collisions: dict[tuple[str | None, int], set[int]] = {}
        """Namespace and engine hash -> the other hashes under which the ledger may hold its pages."""

    def clear(self) -> None:
        self._collisions.clear()
        if self.publisher is not None and not self._is_clear:
            self._is_clear = True
            self.publisher.publish([AllBlocksCleared()])

    def publish(
        self,
        pages: TranslatedPages,
        namespace: HashNamespace,
        *,
        names_group: bool = False,
        is_mixed: bool = False,
        medium: str = "",
    ) -> None:
        """Publish events of stores and removals in order. names_group: whether the engine's events name a group.

        is_mixed: whether the events are of several kinds. medium: the engine's name of the medium if it is unknown:
        `columns` then contain no other. The pages are left out, but hashes that came to mean other pages are removed
        from all tiers.
        """
        columns = pages.columns
        if not len(columns.hashes):
            return
        kind = int(columns.kinds[0])
        if kind >= UNKNOWN:
            self._count_unknown(medium, len(columns.hashes))
            self._remove_everywhere(_hashes(page for page in pages.ambiguous if page.is_reassigned), namespace.label)
        elif self.publisher is not None:
            kinds = columns.kinds
            num_removed = len(columns.hashes) if kind & REMOVAL else 0
            if is_mixed:
                num_removed = int(columns.lengths @ (kinds & REMOVAL > 0))
            self._counters.pages_stored += len(columns.hashes) - num_removed
            self._counters.pages_removed += num_removed
            self._is_clear = self._is_clear and num_removed == len(columns.hashes)
            if self._counts_copies and num_removed:
                columns = columns.with_kinds((_OF_COPIES if names_group else _OF_COPIES_ON_DEVICE)[kinds])
            if pages.ambiguous or self._collisions:
                self._publish_ambiguous(self.publisher, columns, pages.ambiguous, namespace)
            else:
                self.publisher.publish_columns(columns, namespace.label)

    def remove_all(self, block_hashes: U64Array, namespace: HashNamespace, medium: str | None) -> None:
        """Publish that no copies of pages are left on a medium, or on any if it is None."""
        tier = UNKNOWN if medium is None else tier_of(medium)
        if medium is None:
            self._remove_everywhere(block_hashes, namespace.label)
        elif tier == UNKNOWN:
            self._count_unknown(medium, len(block_hashes))
        elif self.publisher is not None:
            self._counters.pages_removed += len(block_hashes)
            hashes = self._all_of(block_hashes, namespace)
            self.publisher.publish_columns(PageEvents.removed(hashes, tier), namespace.label)

    def _publish_ambiguous(
        self,
        publisher: EventPublisher,
        columns: PageEvents,
        ambiguous: Sequence[AmbiguousPage],
        namespace: HashNamespace,
    ) -> None:
        """Publish removals one by one and stores between them together.

        The meaning of an ambiguous hash may depend on the events before. A reassigned hash must be removed directly
        before its new page is stored.
        """
        ends = np.cumsum([0, *columns.lengths]).tolist()
        is_removal = columns.kinds & REMOVAL > 0  # that of one copy has the bit, too
        is_border = is_removal[1:] | is_removal[:-1]
        for start, stop in pairwise([0, *(np.flatnonzero(is_border) + 1).tolist(), len(is_removal)]):
            first, end = ends[start], ends[stop]
            part = columns.part(slice(start, stop), slice(first, end))
            if is_removal[start]:
                hashes = self._all_of(part.block_hashes, namespace)
                publisher.publish_columns(PageEvents.one(hashes, int(part.kinds[0])), namespace.label)
                continue
            here = [page for page in ambiguous if first <= page.position < end]
            for page in here:
                if page.engine_hash != page.block_hash:
                    self._note_collision(page, namespace)
            reassigned = {page.position - first for page in here if page.is_reassigned}
            if not reassigned:
                publisher.publish_columns(part, namespace.label)
                continue
            kinds = np.repeat(part.kinds, part.lengths)
            for at, until in pairwise(sorted({0, *reassigned, end - first})):
                if at in reassigned:
                    self._remove_everywhere(part.block_hashes[at : at + 1], namespace.label)
                pages = single_pages(part.block_hashes[at:until], part.hashes[at:until], kinds[at:until])
                publisher.publish_columns(pages, namespace.label)

    def _note_collision(self, page: AmbiguousPage, namespace: HashNamespace) -> None:
        self._collisions.setdefault((namespace.label, page.engine_hash), set()).add(page.block_hash)
        if len(self._collisions) > _MAX_COLLISIONS:
            label, engine_hash = next(iter(self._collisions))
            others = sorted(self._collisions.pop((label, engine_hash)))
            self._remove_everywhere(np.array(others, np.uint64), label)

    def _all_of(self, block_hashes: U64Array, namespace: HashNamespace) -> U64Array:
        """Ledger hashes of all pages with these engine hashes: a removal does not say which it means."""
        if not self._collisions:
            return block_hashes
        known = [(namespace.label, engine_hash) for engine_hash in block_hashes.tolist()]
        others = [other for key in known for other in self._collisions.get(key, ())]
        return np.concatenate((block_hashes, np.array(others, np.uint64))) if others else block_hashes

    def _remove_everywhere(self, block_hashes: U64Array, label: str | None) -> None:
        if self.publisher is not None and len(block_hashes):
            for tier in range(NUM_MEDIA):
                self.publisher.publish_columns(PageEvents.removed(block_hashes, tier), label)

    def _count_unknown(self, medium: str, num_pages: int) -> None:
        unknown = self._counters.unknown_media
        unknown[medium if medium in unknown or len(unknown) < _MAX_MEDIA_NAMES else "others"] += num_pages
        self._limited_logger.warning("pages on medium %s left out: the medium is unknown", shorten(medium))


def _hashes(pages: Iterable[AmbiguousPage]) -> U64Array:
    return np.array([page.block_hash for page in pages], np.uint64)
