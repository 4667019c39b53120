"""What happened to the pages of a prompt in one stream: when each was stored on a medium, and how it left.

If records have tokens, also where other prompts part from the one that is asked about.
"""

from collections.abc import Iterator
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kv_events.hashing import U32Array, U64Array
from kv_events.schema import NUM_MEDIA, PackedStored

NEVER = -1
"""Batch number: it has not happened."""

Pages = npt.NDArray[np.int64]


class RemovalKind(IntEnum):
    """How a page left a medium."""

    NONE = 0
    REMOVED = 1
    CLEARED = 2
    RESYNCED = 3
    """It was not among the pages that a resync sent."""


def leading(held: npt.NDArray[np.uint8]) -> int:
    """Return the number of pages before the first one that is not held."""
    return int(np.argmin(held != 0)) if len(held) and not held.all() else len(held)


class PageHistory:
    """The state of n pages after a number of batches. Batches are numbered in the order of the log.

    The rules are those of `indexer.views.View`: storing a page twice and removing an unknown page change nothing.
    """

    def __init__(self, num_pages: int) -> None:
        self.held = np.zeros(num_pages, np.uint8)
        """[n] bitmask of the media on which a page is held."""
        self.stored = np.full(num_pages, NEVER, np.int64)
        """[n] batch since which a page is held on any medium, or was held the last time."""
        self.stored_on = np.full((num_pages, NUM_MEDIA), NEVER, np.int64)
        """[n, 4] the same for each medium."""
        self.left = np.full(num_pages, NEVER, np.int64)
        """[n] batch after which a page was held on no medium, the last time."""
        self.leaving = np.zeros(num_pages, np.uint8)
        """[n] `RemovalKind`"""
        self.left_from = np.zeros(num_pages, np.uint8)
        """[n] the last medium that held it."""
        self.left_on = np.full((num_pages, NUM_MEDIA), NEVER, np.int64)
        """[n, 4] batch that removed a page from a medium, the last time."""
        self.times_stored = np.zeros(num_pages, np.int64)
        """[n] times that a page came to be held."""
        self._marks: npt.NDArray[np.uint8] | None = None

    @property
    def prefix(self) -> int:
        """Pages before the first one that is not held."""
        return leading(self.held)

    def begin_with(self, held: npt.NDArray[np.uint8], batch: int, resent: npt.NDArray[np.uint8] | None) -> None:
        """Begin with pages that are held already. held: [n] bitmask of media. batch: stands for those that stored them.

        resent: [n] bitmask of the media on which the resync in progress has sent a page; None: there is none.
        """
        self.held[:] = held
        self.stored[held != 0] = batch
        self.times_stored[held != 0] = 1
        self.stored_on[(held[:, None] >> np.arange(NUM_MEDIA) & 1) != 0] = batch
        self._marks = resent

    def store(self, pages: Pages, medium: int, batch: int) -> None:
        """Store pages on a medium."""
        bit = np.uint8(1 << medium)
        new = pages[self.held[pages] & bit == 0]
        first = new[self.held[new] == 0]
        moved = self.left[first] == batch  # a batch may remove from one medium before it stores on another
        fresh = first[~moved]
        self.stored[fresh] = batch
        self.times_stored[fresh] += 1
        self.left[first[moved]], self.leaving[first[moved]] = NEVER, RemovalKind.NONE
        self.stored_on[new, medium] = batch
        self.held[new] |= bit
        if self._marks is not None:
            self._marks[pages] |= bit

    def remove(self, pages: Pages, medium: int, batch: int) -> None:
        """Remove pages from a medium."""
        if self._marks is not None:
            self._marks[pages] &= ~np.uint8(1 << medium)
        self._leave(pages, medium, batch, RemovalKind.REMOVED)

    def clear(self, batch: int) -> None:
        """Remove all pages from all media."""
        for medium in range(NUM_MEDIA):
            self._leave(np.arange(len(self.held)), medium, batch, RemovalKind.CLEARED)

    def begin_resync(self) -> None:
        """Keep only what is stored from now on, at the end of the resync."""
        self._marks = np.zeros(len(self.held), np.uint8)

    def abandon_resync(self) -> None:
        """Keep everything."""
        self._marks = None

    def end_resync(self, batch: int) -> None:
        """Remove the pages that were not stored since the beginning of the resync, if its beginning is known."""
        marks, self._marks = self._marks, None
        if marks is not None:
            for medium in range(NUM_MEDIA):
                self._leave(np.flatnonzero(marks >> medium & 1 == 0), medium, batch, RemovalKind.RESYNCED)

    def _leave(self, pages: Pages, medium: int, batch: int, leaving: RemovalKind) -> None:
        bit = np.uint8(1 << medium)
        gone = pages[self.held[pages] & bit != 0]
        self.held[gone] &= ~bit
        self.left_on[gone, medium] = batch
        last = gone[self.held[gone] == 0]
        self.left[last], self.leaving[last], self.left_from[last] = batch, leaving, medium


def partings(event: PackedStored, tokens: U32Array, asked: U64Array, block_size: int) -> Iterator[tuple[int, int, int]]:
    """Yield where a store parts from a prompt. asked: uint64[pages] sequence hashes of the prompt's pages.

    Yields (page of the prompt, sequence hash of the page that was stored in its place, leading tokens that both pages
    have in common: at least one, and not all).
    """
    hashes, own = np.frombuffer(event.sequence_hashes, "<u8"), np.frombuffer(event.token_ids or b"", "<u4")
    if len(own) != len(hashes) * block_size:  # of pairs of tokens
        return
    starts = np.unpackbits(np.frombuffer(event.chain_starts, np.uint8), count=len(hashes), bitorder="little")
    before = np.concatenate((hashes[:1], hashes[:-1]))
    before[starts == 1] = np.frombuffer(event.parents, "<u8")
    follows = (np.isin(before, asked) | (before == 0)) & ~np.isin(hashes, asked)
    for place in np.flatnonzero(follows).tolist():
        page = int(np.argmax(asked == before[place])) + 1 if before[place] else 0
        wanted = tokens[page * block_size : (page + 1) * block_size]
        other = own[place * block_size : place * block_size + len(wanted)]
        common = int(np.argmin(np.append(other == wanted, [False])))
        if 0 < common < block_size:
            yield page, int(hashes[place]), common
