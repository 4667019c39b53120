"""The ledger: what the worker holds, learned from its events alone."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kv_events import page_table
from kv_events.bundles import resident
from kv_events.digest import DIGEST_WORDS, Digest, empty_digest
from kv_events.errors import InvalidValueError
from kv_events.page_table import make_table
from kv_events.schema import NUM_MEDIA
from publisher.blocks import HELD, ON_MEDIA, PAGE, STATE, Blocks, make_blocks, put_down
from publisher.change_kernels import advance_digest
from publisher.change_queue import ChangeQueue
from publisher.event_columns import EventColumns
from publisher.ledger_kernels import (
    COUNT_NAMES,
    FIRST_BLOCK,
    FOUND_BLOCKS,
    PARENT,
    SLICE_PAGES,
    LedgerArrays,
    change_pages,
    find_entry,
)
from publisher.queue_kernels import queue_cleared

__all__ = ["SLICE_PAGES", "Ledger", "LedgerCopy"]

U64Array = npt.NDArray[np.uint64]

_MASK64 = 2**64 - 1


class LedgerCopy(NamedTuple):
    """A copy of what the ledger held at one moment; one row a table entry, free ones among them."""

    hashes: U64Array
    parents: U64Array
    """Sequence hash of the page before; 0: none, or not known."""
    block_hashes: U64Array
    media: npt.NDArray[np.uint8]
    """Bit m: held on medium m. 0: a free entry."""
    digest: Digest


class Ledger:
    """Pages by the engine's name and by the router's, with their media, and the running digest.

    What becomes resident or leaves is queued into the `ChangeQueue` in the same step. Not thread-safe: the publisher's
    lock guards it. `capacity` bounds pages, and blocks where the table is its own; a page beyond it is neither kept nor
    queued, but counted, so that ledger, digest and router agree.
    """

    def __init__(self, capacity: int, change_queue: ChangeQueue) -> None:
        self._arrays = LedgerArrays(
            blocks=make_blocks(capacity),
            pages=make_table(capacity),
            page_media=np.zeros(capacity, np.uint8),
            page_copies=np.zeros((NUM_MEDIA, capacity), np.uint32),
            page_words=np.zeros((capacity, 2), np.uint64),
            page_stored_in=np.zeros(capacity, np.uint32),
            page_changed=np.zeros(-(-capacity // SLICE_PAGES), np.bool_),
            found=np.empty(FOUND_BLOCKS, np.int64),
            digest=empty_digest(),
            counts=np.zeros(len(COUNT_NAMES), np.int64),
        )
        self._queue = change_queue.resident
        self._resident = resident(self._arrays)

    def share(self, blocks: Blocks) -> None:
        """Have blocks in a table of the caller's, a shared one, in place of an own one. A store of a block that he did
        not enter counts as one beyond `capacity`. Raises InvalidValueError while pages are held.
        """
        if self.num_pages:
            raise InvalidValueError("pages held", self.num_pages, "none")
        put_down(blocks)
        self._arrays = self._arrays._replace(blocks=blocks)
        self._resident = resident(self._arrays)

    @property
    def num_pages(self) -> int:
        """Distinct pages held, on whatever medium."""
        return page_table.num_live(self._arrays.pages)

    def digest(self) -> Digest:
        """uint64[8], a copy: what the worker holds now."""
        return self._arrays.digest.copy()

    def counts(self) -> dict[str, int]:
        """Pages ever, by what became of them."""
        return dict(zip(COUNT_NAMES, self._arrays.counts.tolist(), strict=True))

    def change(self, events: EventColumns, extra_key: str | None) -> npt.NDArray[np.bool_]:
        """Take stores and removals in their order. Returns bool[n]: which stored pages became resident on their
        medium, and so were queued. Removals of unknown pages are counted.
        """
        queued = np.zeros(len(events.pages.block_hashes), np.bool_)
        change_pages(self._resident, self._queue, events.kinds, events.pages, namespace_salt(extra_key), queued)
        return queued

    def clear(self) -> None:
        """Nothing is held any more. Costs some 0.6 ms a million pages and medium, and what `put_down` says where
        blocks are shared.
        """
        arrays = self._arrays
        put_down(arrays.blocks)
        arrays.page_media[: self._num_used] = 0
        arrays.page_copies[arrays.digest[:NUM_MEDIA] != 0, : self._num_used] = 0
        page_table.clear(arrays.pages)
        arrays.digest[:] = 0
        queue_cleared(self._queue)

    def sequence_hash(self, block_hash: int, extra_key: str | None) -> int | None:
        """The router's name of a page that is held; block_hash signed or unsigned."""
        blocks = self._arrays.blocks
        entry = find_entry(np.uint64(block_hash & _MASK64) ^ namespace_salt(extra_key), blocks.table)
        if entry < 0 or not blocks.columns[entry, STATE] & ON_MEDIA:
            return None
        return int(self._arrays.pages.keys[blocks.columns[entry, PAGE]])

    # --- copies, slice by slice, so that the engine is kept off for short moments only ------------------------------

    def start_copy(self) -> LedgerCopy:
        """Room for a copy; all slices are stale. One copy at a time."""
        self._arrays.page_changed[:] = True
        capacity = page_table.capacity(self._arrays.pages)
        words = np.empty((capacity, 2), np.uint64)
        return LedgerCopy(
            hashes=np.empty(capacity, np.uint64),
            parents=words[:, PARENT],
            block_hashes=words[:, FIRST_BLOCK],
            media=np.empty(capacity, np.uint8),
            digest=empty_digest(),
        )

    def stale_slices(self) -> list[int]:
        """Slices of the used part that were not copied, or changed since."""
        num_slices = -(-self._num_used // SLICE_PAGES)
        stale: list[int] = np.flatnonzero(self._arrays.page_changed[:num_slices]).tolist()
        return stale

    def copy_slice(self, number: int, held: LedgerCopy) -> None:
        """Copy at most SLICE_PAGES pages, 25 bytes each."""
        arrays = self._arrays
        here = slice(number * SLICE_PAGES, min((number + 1) * SLICE_PAGES, self._num_used))
        held.hashes[here] = arrays.pages.keys[here]
        held.parents[here] = arrays.page_words[here, PARENT]
        held.block_hashes[here] = arrays.page_words[here, FIRST_BLOCK]
        held.media[here] = arrays.page_media[here]
        arrays.page_changed[number] = False

    def finish_copy(self, held: LedgerCopy) -> LedgerCopy:
        """Copy what is stale. Returns the used part: exactly what is held now.

        A clear in between is no special case: every entry handed out after it made its slice stale.
        """
        for number in self.stale_slices():
            self.copy_slice(number, held)
        used = slice(self._num_used)
        return LedgerCopy(
            held.hashes[used], held.parents[used], held.block_hashes[used], held.media[used], self.digest()
        )

    @property
    def _num_used(self) -> int:
        """Entries of pages ever handed out are smaller than this."""
        return page_table.high_water(self._arrays.pages)

    def check(self) -> None:
        """Recount everything from scratch. Raises AssertionError with both figures."""
        arrays = self._arrays
        page_table.check(arrays.blocks.table)
        page_table.check(arrays.pages)
        page_media, page_copies = arrays.page_media[: self._num_used], arrays.page_copies[:, : self._num_used]
        pages, media = arrays.blocks.columns[: page_table.high_water(arrays.blocks.table)].T
        _check_equal("entries", int(np.count_nonzero(media)), page_table.num_live(arrays.blocks.table))
        live = np.flatnonzero(media & ON_MEDIA)
        _check_equal("blocks", len(live), int(arrays.blocks.tally[HELD]))
        _check_equal("pages", int(np.count_nonzero(page_media)), self.num_pages)
        digest = np.zeros(DIGEST_WORDS, np.uint64)
        for medium in range(NUM_MEDIA):
            on_medium = pages[live[media[live] >> medium & 1 == 1]]
            copies = np.bincount(on_medium, minlength=self._num_used)
            _check_equal("copies", copies.tolist(), page_copies[medium].tolist())
            held = np.flatnonzero(page_media >> medium & 1)
            _check_equal("held", held.tolist(), np.flatnonzero(copies).tolist())
            advance_digest(digest, np.full(len(held), medium, np.uint8), arrays.pages.keys[held])
        _check_equal("digest", digest.tolist(), arrays.digest.tolist())


@lru_cache(maxsize=1024)
def namespace_salt(extra_key: str | None) -> np.uint64:
    """What sets the blocks of a namespace apart inside the ledger. "" is a namespace of its own.

    Raises UnicodeEncodeError (a ValueError) for text that has no UTF-8 form.
    """
    return np.uint64(xxhash.xxh3_64_intdigest(extra_key.encode())) if extra_key is not None else np.uint64(0)


def _check_equal(what: str, counted: object, stated: object) -> None:
    if counted != stated:
        raise AssertionError(f"{what}: counted {counted}, stated {stated}")
