"""OverlapIndex: which worker streams hold which pages, and how far a prompt is held."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from indexer.errors import IndexFullError
from indexer.kernels import apply, holder_sets
from indexer.kernels.find import find
from kv_events import page_table
from kv_events.codec import RemovedPages, StoredPages
from kv_events.digest import Digest, empty_digest
from kv_events.errors import InvalidValueError
from kv_events.hashing import U64Array
from kv_events.schema import NUM_MEDIA

SLICE_PAGES = 4096
"""Pages that one kernel call touches at most: well under a millisecond, so that queries never wait long."""

_SWEEP_ENTRIES = 65_536
_MIN_SETS = 1024
_NO_MARKS = np.zeros(0, np.uint8)

Marks = npt.NDArray[np.uint8]


class Matches(NamedTuple):
    """Answer of `OverlapIndex.find`."""

    streams: npt.NDArray[np.int32]
    """[k] streams that hold the first page on any tier, ascending."""
    pages: npt.NDArray[np.uint32]
    """[streams, 4] row s: leading pages that stream s holds on a tier or a faster one. Only rows of `streams` count."""


class HeldPages(NamedTuple):
    """Some of the pages that one stream holds."""

    hashes: U64Array
    """[n] sequence hashes."""
    parents: U64Array
    """[n] sequence hash of the page before; 0 = directly below the root, or not known."""
    tiers: npt.NDArray[np.uint8]
    """[n] bitmask: bit t = held on tier t."""


class IndexImage(NamedTuple):
    """Everything an index knows, detached from it."""

    hashes: U64Array
    """[n] sequence hashes."""
    parents: U64Array
    """[n]"""
    holders: npt.NDArray[np.uint32]
    """[n] row of `sets`."""
    sets: U64Array
    """[s, 4 * width] distinct holder sets, plane after plane; see `kernels.holder_sets`."""
    digests: dict[int, Digest]
    """By stream number."""


class OverlapIndex:
    """One index of all worker streams of a namespace. One thread writes and reads; a call never blocks.

    Costs about 37 bytes a page, whatever the number of streams that hold it, and one holder set for each distinct
    combination of (stream, tier) holders. Memory is bounded by `max_pages`: stores beyond it are refused and counted
    in the result, removals and queries go on.
    """

    def __init__(self, max_pages: int = 2**24, max_streams: int = 4096) -> None:
        """max_pages: bound on distinct pages; reserves address space only. max_streams: bound on worker streams."""
        table = page_table.make_table(max_pages)
        self._max_streams = max_streams
        self._width = 1
        self._alive = np.zeros((NUM_MEDIA, 1), np.uint64)  # scratch of find()
        self._set_pages(
            apply.Pages(
                table=table,
                parents=np.zeros(max_pages + 1, np.uint64),
                holders=np.zeros(max_pages + 1, np.uint32),
                sets=holder_sets.make_holder_sets(_MIN_SETS, self._width),
            )
        )
        self._digests: list[Digest | None] = []

    # --- streams ---

    def add_stream(self) -> int:
        """A number for a new worker stream that holds nothing. Raises IndexFullError beyond `max_streams`."""
        for stream, digest in enumerate(self._digests):
            if digest is None:
                self._digests[stream] = empty_digest()
                return stream
        stream = len(self._digests)
        if stream == self._max_streams:
            raise IndexFullError("worker streams", self._max_streams)
        self._digests.append(empty_digest())
        if stream >= 64 * self._width:
            self._resize_sets(len(self._pages.sets.users), 2 * self._width)
        return stream

    def drop_stream(self, stream: int) -> None:
        """Give a stream's number back. It must hold nothing (see `sweep`)."""
        if self.digest(stream)[:NUM_MEDIA].any():
            raise InvalidValueError("stream", stream, "a stream that holds no page")
        self._digests[stream] = None

    def digest(self, stream: int) -> Digest:
        """uint64[8]: what the stream holds now, kept up by every change. The live array; do not write."""
        digest = self._digests[stream] if 0 <= stream < len(self._digests) else None
        if digest is None:
            raise InvalidValueError("stream", stream, "a stream in use")
        return digest

    # --- changes ---

    def new_marks(self) -> Marks:
        """Marks for a sweep that keeps what `store` names from now on. Costs a byte a page while it lives."""
        return np.zeros(page_table.capacity(self._pages.table) + 1, np.uint8)

    def store(
        self, stream: int, event: StoredPages, start: int, stop: int, marks: Marks | None = None
    ) -> tuple[int, int]:
        """Store pages [start, stop) of an event. Returns (pages held already, pages refused: index full)."""
        self._make_room(stop - start)
        known, refused = apply.store(
            *self._arrays,
            self.digest(stream),
            _NO_MARKS if marks is None else marks,
            event.hashes,
            event.chain_starts,
            event.parents,
            stream,
            event.medium,
            start,
            stop,
        )
        return known, refused

    def remove(self, stream: int, event: RemovedPages, start: int, stop: int, marks: Marks | None = None) -> int:
        """Remove pages [start, stop) of an event. Returns how many of them the stream did not hold there."""
        self._make_room(stop - start)
        unknown: int = apply.remove(
            *self._arrays,
            self.digest(stream),
            _NO_MARKS if marks is None else marks,
            event.hashes,
            stream,
            event.medium,
            start,
            stop,
        )
        return unknown

    def sweep(self, stream: int, marks: Marks | None = None) -> Iterator[int]:
        """Remove all that a stream holds, but for marked pages, slice by slice. Yields pages removed by each slice."""
        for start, stop in self._entry_ranges(SLICE_PAGES):
            if not self.digest(stream)[:NUM_MEDIA].any():
                return
            self._make_room(stop - start)
            yield apply.sweep(
                *self._arrays, self.digest(stream), _NO_MARKS if marks is None else marks, stream, start, stop
            )

    # --- questions ---

    def find(self, hashes: U64Array) -> Matches:
        """How far each stream holds a prompt. hashes: uint64[n], C order, sequence hashes from the first page on."""
        streams = np.empty(64 * self._width, np.int32)
        pages = np.empty((64 * self._width, NUM_MEDIA), np.uint32)
        found = find(*self._arrays, hashes, self._alive, streams, pages)
        return Matches(streams[:found], pages)

    def held_pages(self, stream: int) -> Iterator[HeldPages]:
        """Everything a stream holds, slice by slice, in no particular order."""
        self.digest(stream)
        entries = np.empty(_SWEEP_ENTRIES, np.int64)
        tiers = np.empty(_SWEEP_ENTRIES, np.uint8)
        for start, stop in self._entry_ranges(_SWEEP_ENTRIES):
            found = apply.collect(*self._arrays, stream, start, stop, entries, tiers)
            if found:
                held = entries[:found]
                yield HeldPages(self._pages.table.keys[held], self._pages.parents[held], tiers[:found].copy())

    def image(self) -> IndexImage:
        """A copy of everything, for a snapshot."""
        used = page_table.high_water(self._pages.table)
        live = np.flatnonzero(self._pages.holders[:used])
        ids = np.flatnonzero(self._pages.sets.users)
        row_of_id = np.zeros(len(self._pages.sets.users), np.uint32)
        row_of_id[ids] = np.arange(len(ids))
        return IndexImage(
            self._pages.table.keys[live],
            self._pages.parents[live],
            row_of_id[self._pages.holders[live]],
            self._pages.sets.words[ids],
            {stream: digest.copy() for stream, digest in enumerate(self._digests) if digest is not None},
        )

    def restore(self, image: IndexImage) -> None:
        """Take over an image into this new, empty index. Raises InvalidValueError when it does not fit together."""
        num_sets, words_per_set = image.sets.shape
        if len(image.hashes) > self.max_pages or max(image.digests, default=0) >= self._max_streams:
            raise InvalidValueError("image", len(image.hashes), f"at most {self.max_pages} pages")
        if not (len(image.hashes) == len(image.parents) == len(image.holders)) or words_per_set % NUM_MEDIA:
            raise InvalidValueError("image", len(image.hashes), "columns of equal length")
        if len(image.holders) and int(image.holders.max()) >= num_sets:
            raise InvalidValueError("image.holders", int(image.holders.max()), f"less than {num_sets}")
        self._resize_sets(max(_MIN_SETS, 1 << (num_sets + 1).bit_length()), words_per_set // NUM_MEDIA)
        ids = np.empty(num_sets, np.uint32)
        whole = apply.restore(*self._arrays, image.hashes, image.parents, image.holders, image.sets, ids)
        if not whole:
            raise InvalidValueError("image.hashes", len(image.hashes), "distinct hashes")
        self._digests = [image.digests.get(stream) for stream in range(max(image.digests, default=-1) + 1)]

    @property
    def num_pages(self) -> int:
        """Distinct pages held by anybody."""
        return page_table.num_live(self._pages.table)

    @property
    def max_pages(self) -> int:
        """The bound on distinct pages."""
        return page_table.capacity(self._pages.table)

    @property
    def num_sets(self) -> int:
        """Distinct holder sets."""
        return holder_sets.num_sets(self._pages.sets)

    @property
    def bytes_used(self) -> int:
        """Bytes of all arrays, as far as they are used."""
        entries = page_table.high_water(self._pages.table)
        columns = entries * (self._pages.parents.itemsize + self._pages.holders.itemsize)
        return page_table.bytes_used(self._pages.table) + columns + holder_sets.bytes_used(self._pages.sets)

    def check(self) -> None:
        """Recount everything from scratch. Raises AssertionError with both figures."""
        page_table.check(self._pages.table)
        used = page_table.high_water(self._pages.table)
        live = int(np.count_nonzero(self._pages.holders))
        if live != self.num_pages or np.any(self._pages.holders[used:]):
            raise AssertionError(f"{live} entries have holders, {self.num_pages} are live")
        holder_sets.check(self._pages.sets, self._pages.holders[:used])

    # --- inside ---

    def _entry_ranges(self, step: int) -> Iterator[tuple[int, int]]:
        start = 0
        while start < (used := page_table.high_water(self._pages.table)):
            yield start, min(start + step, used)
            start += step

    def _make_room(self, num_pages: int) -> None:
        """Every page touched may need one new holder set, and one more for a moment."""
        needed = num_pages + 1 - holder_sets.room(self._pages.sets)
        if needed > 0:
            wanted = len(self._pages.sets.users) + needed
            self._resize_sets(1 << (wanted - 1).bit_length(), self._width)

    def _resize_sets(self, capacity: int, width: int) -> None:
        self._set_pages(self._pages._replace(sets=holder_sets.grown(self._pages.sets, capacity, width)))
        self._width = width
        self._alive = np.zeros((NUM_MEDIA, width), np.uint64)

    def _set_pages(self, pages: apply.Pages) -> None:
        self._pages = pages
        self._arrays = apply.flat(pages)
