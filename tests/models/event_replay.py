"""Replays the events of a cache as a router would and checks every rule about their order and content.

`PageNames` computes the expected content of events, recursively over the tokens, with hashlib and xxhash. `Replay`
holds the pages that the events leave on each medium.
"""

from functools import cache as memoize
from itertools import pairwise
from typing import Any, NamedTuple

from kv_events.schema import AllBlocksCleared, BlockStored, StorageMedium
from tests.models.page_names import block_name, sequence_hash


class PageFacts(NamedTuple):
    """The fields of a `BlockStored` for one page, except its block hash."""

    parent: int | None
    sequence_hash: int
    token_ids: list[Any]


class PageNames:
    """Computes the hashes of the last page of a prefix `(namespace, raw tokens)` as events carry them."""

    def __init__(self, page_size, is_bigram):
        self.page_size, self.is_bigram = page_size, is_bigram

    def prefixes(self, tokens, extra_key=None):
        """Return every prefix of whole pages, shortest first."""
        pages = max(0, len(tokens) - self.is_bigram) // self.page_size
        ends = (n * self.page_size + self.is_bigram for n in range(1, pages + 1))
        return [(extra_key, tuple(tokens[:end])) for end in ends]

    def named(self, prefix):
        """Return the key and value of the page in `Replay.pages`."""
        return _named(*prefix, self.page_size, self.is_bigram)


@memoize
def _named(extra_key, raw, page_size, is_bigram):
    names = [block_name(r, page_size, is_bigram) if len(r) > is_bigram else None for r in (raw, raw[:-page_size])]
    page = raw[-page_size - is_bigram :]
    tokens = list(pairwise(page)) if is_bigram else list(page)
    return (extra_key, names[0]), PageFacts(names[1], sequence_hash(raw, page_size, is_bigram, extra_key), tokens)


class Replay:
    """Applies events. Fails on a page that is stored twice, removed while absent, or out of order.

    ordered: media on which the held pages always form prefixes. Parents are stored first and removed last, except that
    the pages of one node are removed consecutively in page order.
    """

    def __init__(self, page_size, ordered=frozenset({StorageMedium.GPU})):
        # per medium: (namespace, block hash) -> PageFacts
        self.pages: dict[StorageMedium, dict[Any, Any]] = {medium: {} for medium in StorageMedium}
        self._page_size, self._ordered = page_size, ordered
        self._orphans = []  # children of the page that was removed last

    def apply(self, event):
        if isinstance(event, AllBlocksCleared):
            assert not self._orphans
            for pages in self.pages.values():
                pages.clear()
            return
        (block_hash,) = event.block_hashes
        page, pages = (event.extra_key, block_hash), self.pages[event.medium]
        assert self._orphans in ([], [(event.medium, page)]), f"{self._orphans} are left below a page that went"
        self._orphans = []
        if isinstance(event, BlockStored):
            self._store(event, page, pages)
        else:
            assert page in pages, f"{page} removed from {event.medium}, but not there"
            del pages[page]
            if event.medium in self._ordered:
                below = [other for other, facts in pages.items() if (other[0], facts.parent) == page]
                self._orphans = [(event.medium, other) for other in below]

    def _store(self, event, page, pages):
        assert page not in pages, f"{page} stored twice on {event.medium}"
        assert len(event.token_ids) == event.block_size == self._page_size
        parent = event.parent_block_hash
        if event.medium in self._ordered:
            assert parent is None or (event.extra_key, parent) in pages, f"{page} before its parent on {event.medium}"
        sequence = int.from_bytes(event.sequence_hashes, "little")
        pages[page] = PageFacts(parent, sequence, list(event.token_ids))


class GroupReplay(Replay):
    """The same for the events of a group, which contain hashes only and arrive in any order."""

    def __init__(self, page_size):
        super().__init__(page_size, ordered=frozenset())

    def _store(self, event, page, pages):
        """Keep the sequence hash of the page."""
        assert page not in pages, f"{page} stored twice on {event.medium}"
        assert (event.parent_block_hash, event.token_ids, event.block_size) == (None, [], self._page_size)
        pages[page] = int.from_bytes(event.sequence_hashes, "little")
