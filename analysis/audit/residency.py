"""The book of an audit: which pages each stream holds, on which media, and since when."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from analysis.audit.report import HotPrefix
from analysis.kernels import residency as residency_kernels
from analysis.kernels.residency import (
    COUNT_NAMES,
    DOUBLING,
    NUM_LIFETIMES,
    UNTRACKED,
    KnownPages,
    PageArrays,
    Residencies,
)
from indexer.views import View
from kv_events.codec import RemovedPages, StoredPages
from kv_events.hashing import U64Array
from kv_events.kernels import page_table
from kv_events.kernels.bundles import pin
from kv_events.kernels.page_table import make_table
from kv_events.kernels.prefix_order import prefix_order
from kv_events.schema import NUM_MEDIA

CAPACITY = 2**25
_SPREAD = 0x9E3779B97F4A7C15
_MASK64 = 2**64 - 1
_LATEST_S = 2.0**38
"""Times beyond it come from a broken clock or a forged record, and count as this one."""


def bounded(seconds: float) -> float:
    """Return a time of a record within bounds."""
    return min(max(seconds, -_LATEST_S), _LATEST_S)


def milliseconds(seconds: float) -> int:
    """Return a time of a record in milliseconds, within bounds."""
    return int(bounded(seconds) * 1000)


class BatchTime(NamedTuple):
    """When something happened, for the book."""

    ms: int
    """Milliseconds since 1970."""
    batch: int
    """Number of the batch, counted over all streams."""


class ResidencyIndex:
    """Follows stores and removals of all streams. A stream has a number, and so has each namespace."""

    def __init__(self, churn_s: float, capacity: int = CAPACITY) -> None:
        """churn_s: seconds for which a page is expected to stay. capacity: most pages held, and most distinct pages."""
        self._book = PageArrays(
            Residencies(
                make_table(capacity),
                hashes=np.zeros(capacity, np.uint64),
                parents=np.zeros(capacity, np.uint64),
                streams=np.zeros(capacity, np.uint16),
                media=np.zeros(capacity, np.uint8),
                since=np.zeros((capacity, NUM_MEDIA), np.uint32),
                began=np.zeros(capacity, np.uint32),
                marks=np.zeros(capacity, np.uint16),
                seen=np.zeros(capacity, np.uint8),
            ),
            KnownPages(
                make_table(capacity),
                hashes=np.zeros(capacity, np.uint64),
                parents=np.zeros(capacity, np.uint32),
                depths=np.zeros(capacity, np.uint32),
                stores=np.zeros(capacity, np.uint32),
                requests=np.zeros(capacity, np.uint32),
            ),
            np.zeros(UNTRACKED + 1, np.int64),
            np.zeros((NUM_MEDIA, NUM_LIFETIMES), np.int64),
        )
        self._pinned = pin(self._book)
        self._facts = np.zeros(9, np.int64)
        self._facts[8] = int(churn_s * 1000)

    def store(
        self, stream: int, namespace: int, step: StoredPages, at: BatchTime, mark: int, *, is_resync: bool
    ) -> None:
        """Note pages that were stored. mark: number of the stream's resync."""
        self._state(stream, namespace, step.medium, at)
        self._facts[6:8] = mark & 0xFFFF, is_resync
        residency_kernels.store(self._pinned, step.hashes, step.chain_starts, step.parents, self._facts)

    def begin_with(self, stream: int, namespace: int, view: View, at: BatchTime) -> None:
        """Note what a stream held before the log, which is counted nowhere. at: a time long before the log."""
        pages = view.all_pages()
        order = prefix_order(pages.hashes, pages.parents)
        hashes, parents, tiers = pages.hashes[order], pages.parents[order], pages.tiers[order]
        resent = np.zeros_like(tiers) if view.marks is None else view.index.tiers_marked(hashes, view.marks)
        for medium in range(NUM_MEDIA):
            for mark, of_mark in ((0, tiers & ~resent), (1, tiers & resent)):
                held = np.flatnonzero(of_mark >> medium & 1)
                each_alone = np.full(len(held), 255, np.uint8)
                self._state(stream, namespace, medium, at)
                self._facts[6:8] = mark, True
                residency_kernels.store(self._pinned, hashes[held], each_alone, parents[held], self._facts)
        self._book.counts[:UNTRACKED] = 0
        self._book.known.stores[:] = 0

    def remove(self, stream: int, step: RemovedPages, at: BatchTime) -> None:
        """Note pages that were removed."""
        self._state(stream, 0, step.medium, at)
        residency_kernels.remove(self._pinned, step.hashes, self._facts)

    def sweep(self, stream: int, mark: int | None = None) -> None:
        """Drop the pages of a stream that a resync has not named, or all pages."""
        residency_kernels.sweep(self._pinned, stream, -1 if mark is None else mark & 0xFFFF)

    def first_lost(self, stream: int, hashes: U64Array, start: int, stop: int, since: int = -1) -> int:
        """See the kernel."""
        return int(residency_kernels.first_lost(self._pinned, _key(stream, 1), hashes, start, stop, since))

    def note_request(self, namespace: int, hashes: U64Array) -> int:
        """See the kernel."""
        return int(residency_kernels.note_request(self._pinned, _key(namespace, 2), hashes))

    def holds(self, stream: int, page: int) -> bool:
        """Return whether a stream holds a page now."""
        return self.first_lost(stream, np.array([page], np.uint64), 0, 1) == 1

    def stored_after(self, stream: int, page: int, ms: int) -> int | None:
        """Return the milliseconds from a time to the store of a page that a stream holds now.

        None: it does not hold the page, or held it before. Looks through all pages.
        """
        held, end = self._book.held, page_table.high_water(self._book.held.table)
        is_it = (held.hashes[:end] == page) & (held.streams[:end] == stream) & (held.media[:end] & 15 != 0)
        for entry in np.flatnonzero(is_it).tolist():
            since = [int(held.since[entry, tier]) for tier in range(NUM_MEDIA) if held.media[entry] >> tier & 1]
            after = min((each - ms) & 0xFFFFFFFF for each in since)
            return after if after < 2**31 else None
        return None

    def counts(self) -> dict[str, list[int]]:
        """Return name -> pages for each medium."""
        rows = self._book.counts[:UNTRACKED].reshape(len(COUNT_NAMES), NUM_MEDIA)
        return dict(zip(COUNT_NAMES, rows.tolist(), strict=True))

    def median_lifetimes(self) -> list[float | None]:
        """Return how many seconds, within 3%, half of the removed pages were held on each medium; None without any."""
        return list(map(median_lifetime, self._book.lifetimes))

    def take_lifetimes(self, medium: int) -> npt.NDArray[np.int64]:
        """Return [NUM_LIFETIMES], what was removed from a medium since the last call, by the time that it was held."""
        taken: npt.NDArray[np.int64] = self._book.lifetimes[medium].copy()
        self._book.lifetimes[medium] = 0
        return taken

    @property
    def totals(self) -> npt.NDArray[np.int64]:
        """[names * media] the pages of `counts`. They go on counting."""
        return self._book.counts[:UNTRACKED]

    @property
    def num_untracked(self) -> int:
        """Pages that could not be followed, because the book was full."""
        return int(self._book.counts[UNTRACKED])

    def num_orphans(self, num_streams: int) -> int:
        """Return how many held pages have a parent that their stream does not hold."""
        keys = np.array([_signed_key(stream, 1) for stream in range(num_streams)], np.int64)
        return int(residency_kernels.count_orphans(self._pinned, keys))

    def hottest(self, most: int) -> list[HotPrefix]:
        """Return the prefixes that were requested, or without any requests stored, most often, weighted by length.

        A prefix ends where its pages are no longer used equally often. Those that were used once are left out. Which
        workers hold them now is not known here.
        """
        known = self._book.known
        num_known = page_table.high_water(known.table)
        requests, stores = known.requests[:num_known], known.stores[:num_known]
        weights = requests if requests.any() else stores
        parents = known.parents[:num_known].astype(np.int64) - 1
        is_end = weights > 1
        is_end[parents[(parents >= 0) & (weights[parents] == weights)]] = False  # a page of equal weight follows
        ends = np.flatnonzero(is_end)
        worth = (weights[ends].astype(np.int64) - 1) * known.depths[ends]
        best = ends[np.argsort(-worth, kind="stable")[:most]]
        return [
            HotPrefix(
                sequence_hash=int(known.hashes[entry]),
                pages=int(known.depths[entry]),
                requests=int(known.requests[entry]),
                stores=int(known.stores[entry]),
                first_page=self._first_page(entry),
            )
            for entry in best.tolist()
        ]

    def _first_page(self, entry: int) -> int:
        while above := int(self._book.known.parents[entry]):
            entry = above - 1
        return int(self._book.known.hashes[entry])

    def _state(self, stream: int, namespace: int, medium: int, at: BatchTime) -> None:
        facts = self._facts
        facts[0], facts[1] = _signed_key(stream, 1), _signed_key(namespace, 2)
        facts[2], facts[3], facts[4], facts[5] = stream, medium, at.ms & 0xFFFFFFFF, at.batch & 0xFFFFFFFF


def median_lifetime(classes: npt.NDArray[np.int64]) -> float | None:
    """Return the seconds that half of some lifetimes do not exceed, within 3%. classes: [NUM_LIFETIMES] numbers."""
    total = np.cumsum(classes)
    found = int(np.searchsorted(total, total[-1] / 2))
    shift = max(0, found // DOUBLING - 1)
    return (found - shift * DOUBLING + 0.5) * 2**shift / 1000 if total[-1] else None


@lru_cache(maxsize=2**17)
def _signed_key(number: int, kind: int) -> int:
    """The same as a signed number, for arrays of them."""
    return int(_key(number, kind).view(np.int64))


def _key(number: int, kind: int) -> np.uint64:
    """The key of a stream or a namespace, which is mixed into the hashes of its pages."""
    x = ((number * 4 + kind) * _SPREAD) & _MASK64
    x ^= x >> 29
    return np.uint64((x * _SPREAD) & _MASK64)
