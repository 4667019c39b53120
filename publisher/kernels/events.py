"""Events as columns, for the ledger's kernels and for those that translate hashes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kv_events.kernels.bundles import I64Input, U8Input, U64Input
from kv_events.schema import NUM_MEDIA
from kv_events.tokens import U64Array
from publisher.kernels.changes import REMOVAL

_REMOVALS = np.arange(REMOVAL, REMOVAL + NUM_MEDIA, dtype=np.uint8).reshape(NUM_MEDIA, 1)
_NO_PARENT, _HAS_NO_PARENT = np.zeros(1, np.uint64), np.zeros(1, np.uint8)


class PageEvents(NamedTuple):
    """Stores and removals of several events of one namespace, in order."""

    block_hashes: U64Input
    """[n] block hashes of the pages of all events, concatenated."""
    hashes: U64Input
    """[n] sequence hashes. Not used for removals, nor before the bridge has translated the block hashes."""
    lengths: I64Input
    """[m] number of pages of each event."""
    parents: U64Input
    """[m] block hash of the parent of each stored event's first page."""
    has_parent: U8Input
    """[m] 1 if the element of `parents` is valid."""
    kinds: U8Input = np.empty(0, np.uint8)
    """[m] medium for a store, REMOVAL + medium for a removal of all copies, COPY_REMOVAL + medium for that of one.
    Events with other values are skipped. Empty as long as the media are not known."""

    def with_kinds(self, kinds: U8Input) -> PageEvents:
        """Return the same events with other kinds."""
        return PageEvents(*self[:5], kinds)

    def stored_on(self, medium: int) -> PageEvents:
        """Return events that store all pages on one medium."""
        return self.with_kinds(np.full(len(self.lengths), medium, np.uint8))

    @classmethod
    def removed(cls, block_hashes: U64Array, medium: int) -> PageEvents:
        """Return one event that removes all copies of pages from one medium."""
        lengths = np.array([len(block_hashes)], np.int64)
        return cls(block_hashes, block_hashes, lengths, _NO_PARENT, _HAS_NO_PARENT, _REMOVALS[medium])

    @classmethod
    def one(cls, block_hashes: U64Array, kind: int, parent: int | None = None) -> PageEvents:
        """Return one event of this kind. parent: block hash of the page before the first."""
        return cls(
            block_hashes,
            block_hashes,
            np.array([len(block_hashes)], np.int64),
            np.array([parent or 0], np.uint64),
            np.array([parent is not None], np.uint8),
            np.array([kind], np.uint8),
        )

    def part(self, events: slice, pages: slice) -> PageEvents:
        """Return views of some events and of their pages."""
        return PageEvents(
            self.block_hashes[pages],
            self.hashes[pages],
            self.lengths[events],
            self.parents[events],
            self.has_parent[events],
            self.kinds[events],
        )

    def parts(self, max_pages: int) -> Iterator[PageEvents]:
        """Yield the events in parts of at most `max_pages` pages. A longer event is split into several."""
        if len(self.block_hashes) <= max_pages:
            yield self
            return
        whole = self._cut(max_pages)
        ends = np.cumsum(whole.lengths)
        first, first_page = 0, 0
        while first < len(ends):
            last = int(np.searchsorted(ends, first_page + max_pages, "right"))
            yield whole.part(slice(first, last), slice(first_page, int(ends[last - 1])))
            first, first_page = last, int(ends[last - 1])

    def _cut(self, max_pages: int) -> PageEvents:
        """Return the same changes as events of at most `max_pages` pages.

        Each piece of a longer event is the child of the previous piece.
        """
        num_pieces = np.maximum(1, -(-self.lengths // max_pages))
        events = np.repeat(np.arange(len(num_pieces)), num_pieces)
        number = np.arange(len(events)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
        lengths = np.minimum(max_pages, self.lengths[events] - number * max_pages)
        before = np.maximum(0, np.cumsum(lengths) - lengths - 1)  # index of the page before each piece
        is_rest = number > 0
        parents = np.where(is_rest, self.block_hashes[before], self.parents[events])
        has_parent = np.where(is_rest, np.uint8(1), self.has_parent[events])
        return PageEvents(self.block_hashes, self.hashes, lengths, parents, has_parent, self.kinds[events])
