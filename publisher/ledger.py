"""The ledger: the record of what the worker holds, built from its events alone."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kv_events.digest import DIGEST_WORDS, Digest, empty_digest
from kv_events.kernels import page_table
from kv_events.kernels.arrays import zeros
from kv_events.kernels.bundles import pin
from kv_events.kernels.page_table import make_table
from kv_events.kernels.prefix_order import prefix_order
from kv_events.schema import NUM_MEDIA
from publisher.change_queue import ChangeQueue
from publisher.kernels import ledger as kernels
from publisher.kernels.blocks import HELD, ON_MEDIA, PAGE, STATE, BlockTable
from publisher.kernels.changes import PageChanges, advance_digest
from publisher.kernels.events import PageEvents
from publisher.kernels.ledger import SLICE_PAGES as SLICE_PAGES

U64Array = npt.NDArray[np.uint64]

_MASK64 = 2**64 - 1


class LedgerCopy(NamedTuple):
    """A copy of what the ledger held at one moment, with one row per table entry, including free entries."""

    hashes: U64Array
    parents: U64Array
    """Sequence hash of the parent. 0 if there is none or it is unknown."""
    block_hashes: U64Array
    media: npt.NDArray[np.uint8]
    """Bit m is set if the page is held on medium m. 0 marks a free entry."""
    digest: Digest


class Ledger:
    """Pages by block hash and by sequence hash, with their media and the running digest.

    Each page that becomes resident or is removed is queued in the `ChangeQueue` in the same step. Not thread-safe: the
    publisher's lock guards it. Pages beyond `capacity`, and blocks for which `blocks` has no room, are only counted,
    neither kept nor queued, so that ledger, digest and indexer agree.
    """

    def __init__(self, capacity: int, change_queue: ChangeQueue, blocks: BlockTable) -> None:
        """capacity: most pages. blocks: for this ledger alone from now on; an earlier ledger may have used it."""
        blocks.clear_residency()
        self._blocks = blocks
        self._arrays = kernels.LedgerArrays(
            blocks=blocks.arrays,
            pages=make_table(capacity),
            page_media=zeros(capacity, np.uint8),
            page_copies=zeros((NUM_MEDIA, capacity), np.uint32),
            page_words=zeros((capacity, 2), np.uint64),
            page_stored_in=zeros(capacity, np.uint32),
            page_changed=np.zeros(-(-capacity // SLICE_PAGES), np.bool_),
            num_groups=np.ones(1, np.int64),
            found=np.empty(kernels.FOUND_BLOCKS, np.int64),
            digest=empty_digest(),
            counts=np.zeros(len(kernels.COUNT_NAMES), np.int64),
            queue=change_queue.arrays,
        )
        self._left_out = 0  # until the last clear
        self._pinned = pin(self._arrays)

    @property
    def num_pages(self) -> int:
        if self._arrays.num_groups[0] > 1:  # the table also has pages that only some groups hold
            return int(np.count_nonzero(self._arrays.page_media[: self._num_used]))
        return page_table.num_live(self._arrays.pages)

    @property
    def is_incomplete(self) -> bool:
        """Whether pages were left out since the last clear, because there was no room."""
        return bool(self._arrays.counts[kernels.NUM_LEFT_OUT] != self._left_out)

    def digest(self) -> Digest:
        """Return a copy of the current digest, uint64[8]."""
        return self._arrays.digest.copy()

    def counts(self) -> dict[str, int]:
        return dict(zip(kernels.COUNT_NAMES, self._arrays.counts.tolist(), strict=True))

    def change(self, events: PageEvents, extra_key: str | None) -> npt.NDArray[np.bool_]:
        """Apply stores and removals in order.

        Returns bool[n], True for each stored page that became resident on its medium and was queued. Removals of
        unknown pages are counted.
        """
        queued = np.zeros(len(events.block_hashes), np.bool_)
        salt = namespace_salt(extra_key)
        kernels.change_pages(self._pinned, events, salt, queued)
        return queued

    def require_groups(self, num_groups: int) -> None:
        """Require that so many blocks carry a page, one for each attention group. The number never falls.

        Pages that fewer blocks carry are removed. Costs a few ms per million pages.
        """
        self._arrays.num_groups[0] = num_groups
        kernels.require_groups(self._pinned, self._num_used)

    def clear(self) -> None:
        """Remove all pages.

        Costs about 0.6 ms per million pages and medium, and what `clear_residency` of the blocks costs.
        """
        arrays = self._arrays
        self._blocks.clear_residency()
        arrays.page_media[: self._num_used] = 0
        is_used = arrays.digest[:NUM_MEDIA] != 0 if arrays.num_groups[0] == 1 else slice(None)
        arrays.page_copies[is_used, : self._num_used] = 0
        page_table.clear(arrays.pages)
        arrays.digest[:] = 0
        self._left_out = int(arrays.counts[kernels.NUM_LEFT_OUT])
        kernels.queue_cleared(self._pinned)

    def sequence_hash(self, block_hash: int, extra_key: str | None) -> int | None:
        """Return the sequence hash of a page, or None if it is not held. block_hash: signed or unsigned."""
        blocks = self._arrays.blocks
        entry = kernels.find_entry(np.uint64(block_hash & _MASK64) ^ namespace_salt(extra_key), blocks.table)
        if entry < 0 or not blocks.columns[entry, STATE] & ON_MEDIA:
            return None
        return int(self._arrays.pages.keys[blocks.columns[entry, PAGE]])

    # --- copies, slice by slice, so that the engine is blocked for short moments only -------------------------------

    def start_copy(self) -> LedgerCopy:
        """Allocate a copy and mark all slices as stale. Only one copy can be in progress."""
        self._arrays.page_changed[:] = True
        capacity = page_table.capacity(self._arrays.pages)
        words = np.empty((capacity, 2), np.uint64)
        return LedgerCopy(
            hashes=np.empty(capacity, np.uint64),
            parents=words[:, kernels.PARENT],
            block_hashes=words[:, kernels.FIRST_BLOCK],
            media=np.empty(capacity, np.uint8),
            digest=empty_digest(),
        )

    def stale_slices(self) -> list[int]:
        """Return the slices of the used part that were not copied yet or have changed since."""
        num_slices = -(-self._num_used // SLICE_PAGES)
        stale: list[int] = np.flatnonzero(self._arrays.page_changed[:num_slices]).tolist()
        return stale

    def copy_slice(self, number: int, held: LedgerCopy) -> None:
        """Copy one slice: at most SLICE_PAGES pages of 25 bytes each."""
        arrays = self._arrays
        here = slice(number * SLICE_PAGES, min((number + 1) * SLICE_PAGES, self._num_used))
        held.hashes[here] = arrays.pages.keys[here]
        held.parents[here] = arrays.page_words[here, kernels.PARENT]
        held.block_hashes[here] = arrays.page_words[here, kernels.FIRST_BLOCK]
        held.media[here] = arrays.page_media[here]
        arrays.page_changed[number] = False

    def finish_copy(self, held: LedgerCopy) -> LedgerCopy:
        """Copy the stale slices. Returns the used part, which is exactly what is held now.

        A clear during the copy needs no special case, because each entry assigned after it made its slice stale.
        """
        for number in self.stale_slices():
            self.copy_slice(number, held)
        used = slice(self._num_used)
        return LedgerCopy(
            held.hashes[used], held.parents[used], held.block_hashes[used], held.media[used], self.digest()
        )

    @property
    def _num_used(self) -> int:
        """Upper bound of the page entries assigned since the last clear. All are smaller."""
        return page_table.high_water(self._arrays.pages)

    def check(self) -> None:
        arrays = self._arrays
        page_table.check(arrays.blocks.table)
        page_table.check(arrays.pages)
        page_media, page_copies = arrays.page_media[: self._num_used], arrays.page_copies[:, : self._num_used]
        num_groups = int(arrays.num_groups[0])
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
            _check_equal("held", held.tolist(), np.flatnonzero(copies >= num_groups).tolist())
            advance_digest(digest, np.full(len(held), medium, np.uint8), arrays.pages.keys[held])
        _check_equal("digest", digest.tolist(), arrays.digest.tolist())


def resync_changes(held: LedgerCopy) -> PageChanges:
    """Return stores of all pages held, ordered by medium, with parents before children.

    The order of the walk down the prefixes keeps the number of chains small.
    """
    live = np.flatnonzero(held.media)
    order = live[prefix_order(held.hashes[live], held.parents[live])]
    media = held.media[order]
    on_medium = [order[media >> medium & 1 == 1] for medium in range(NUM_MEDIA)]
    kinds = np.repeat(np.arange(NUM_MEDIA, dtype=np.uint8), [len(entries) for entries in on_medium])
    rows = np.concatenate(on_medium)
    spans = np.zeros(len(rows), np.uint32)
    return PageChanges(kinds, held.hashes[rows], held.block_hashes[rows], held.parents[rows], spans)


@lru_cache(maxsize=1024)
def namespace_salt(extra_key: str | None) -> np.uint64:
    """Return the salt that keeps the blocks of a namespace apart in the ledger. "" is a separate namespace. Raises
    UnicodeEncodeError (a ValueError) for text that cannot be encoded in UTF-8.
    """
    return np.uint64(xxhash.xxh3_64_intdigest(extra_key.encode())) if extra_key is not None else np.uint64(0)


def _check_equal(what: str, counted: object, stated: object) -> None:
    if counted != stated:
        raise AssertionError(f"{what}: counted {counted}, stated {stated}")
