"""OverlapIndex: the pages that each worker stream holds, and the longest prefix of a prompt that it holds."""

from collections.abc import Generator, Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from indexer.kernels import apply, holder_sets, prefixes
from indexer.kernels.find import PageLookup, find, sets_of_pages
from indexer.slices import run_at_once
from kv_events.codec import RemovedPages, StoredPages
from kv_events.digest import DIGEST_WORDS, Digest
from kv_events.errors import InvalidValueError, KvsightError
from kv_events.hashing import U64Array
from kv_events.kernels import page_table
from kv_events.kernels.arrays import give_back, zeros
from kv_events.kernels.bundles import pin
from kv_events.kernels.load import load
from kv_events.schema import NUM_MEDIA

SLICE_PAGES = 2048
"""Maximum number of pages per kernel call. A call takes well under a millisecond, so queries wait only briefly."""

_SCAN_ENTRIES = 65_536
_COPY_ENTRIES = 16_384
_SURVEY_ENTRIES = 4096
_LONGEST_TRAIL = 2**17
_STORES_STOP_AT = 7 / 8  # of the holder sets; the rest is reserved for removals, which may need new sets, too
_INT32, _UINT32 = np.dtype(np.int32), np.dtype(np.uint32)
_NO_MARKS = np.zeros(0, np.uint8)

Marks = npt.NDArray[np.uint8]


class IndexFullError(KvsightError):
    """A limit of the index is reached. Raise the setting, or let workers expire."""

    def __init__(self, what: str, bound: int) -> None:
        super().__init__(f"index full: at most {bound} {what}")
        self.what = what
        self.bound = bound


class Matches(msgspec.Struct, frozen=True, gc=False):
    """Answer of `OverlapIndex.find`."""

    streams: npt.NDArray[np.int32]
    """[k] streams that hold the first page on any tier, ascending."""
    pages: npt.NDArray[np.uint32]
    """[streams, 4] row s: leading pages that stream s holds on a tier or a faster one. Other rows are undefined."""


class StreamPages(NamedTuple):
    """Some of the pages that one stream holds."""

    hashes: U64Array
    """[n] sequence hashes."""
    parents: U64Array
    """[n] sequence hash of the parent page; 0 = first page of a prompt, or unknown."""
    tiers: npt.NDArray[np.uint8]
    """[n] bitmask: bit t = held on tier t."""


class IndexImage(NamedTuple):
    """The whole content of an index, as copies. Columns are lists of parts."""

    hashes: list[U64Array]
    """[n] sequence hashes."""
    parents: list[U64Array]
    """[n]"""
    holders: list[npt.NDArray[np.uint32]]
    """[n] row of `sets`."""
    sets: list[U64Array]
    """[s, words_per_set] distinct holder sets, as a sequence of planes; see `kernels.holder_sets`."""
    words_per_set: int
    """4 * width."""
    digests: dict[int, Digest]
    """By stream number."""


class OverlapIndex:
    """One index of all worker streams of a namespace. One thread writes and reads; a call never blocks.

    A page takes about 37 bytes, regardless of the number of streams that hold it. A holder set, one for each distinct
    combination of holders, takes about 57 bytes with up to 64 streams; `max_set_bytes` counts the 32 of its bitmask.
    Stores beyond `max_pages` or `max_set_bytes` are refused and counted. Removals and queries continue.
    """

    def __init__(self, max_pages: int = 2**24, max_streams: int = 4096, max_set_bytes: int = 2**30) -> None:
        """max_pages: bound on distinct pages; max_set_bytes: bound on the memory of holder sets. Both reserve address
        space only. max_streams: bound on worker streams.
        """
        load()
        self._max_pages = max_pages
        self._max_streams = max_streams
        self._max_set_bytes = max_set_bytes
        self._width = 1
        self._set_pages(
            apply.Pages(
                table=page_table.make_table(max_pages),
                parents=zeros(max_pages + 1, np.uint64),
                holders=zeros(max_pages + 1, np.uint32),
                sets=holder_sets.make_holder_sets(self._set_capacity(max_pages, 1), 1),
                digests=zeros((max_streams, DIGEST_WORDS), np.uint64),
            )
        )
        self._digests: list[Digest | None] = []  # rows of the matrix; None: the stream is not in use

    # --- streams ---

    def add_stream(self) -> int:
        """Return a number for a new worker stream that holds nothing. Raises IndexFullError beyond `max_streams`."""
        for stream, digest in enumerate(self._digests):
            if digest is None:
                return self._use_stream(stream)
        stream = len(self._digests)
        if stream == self._max_streams:
            raise IndexFullError("worker streams", self._max_streams)
        run_at_once(self.make_room())
        self._digests.append(None)
        return self._use_stream(stream)

    def _use_stream(self, stream: int) -> int:
        digest = self._digests[stream] = self.pages.digests[stream]
        digest[:] = 0
        return stream

    def make_room(self) -> Iterator[None]:
        """Make room for one more stream, in slices, so that `add_stream` takes no time.

        The index must not change before the end. Queries between two slices are answered as before.
        """
        is_full = len(self._digests) == self.most_streams and all(digest is not None for digest in self._digests)
        if is_full and self.most_streams < self._max_streams:
            yield from self._widen(2 * self._width)

    def drop_stream(self, stream: int) -> None:
        """Release the number of a stream. The stream must hold no page (see `sweep`)."""
        if self.digest(stream)[:NUM_MEDIA].any():
            raise InvalidValueError("stream", stream, "a stream that holds no page")
        self._digests[stream] = None

    def digest(self, stream: int) -> Digest:
        """Return the stream's digest, uint64[8]. It is the live array, updated by every change: do not write to it."""
        digest = self._digests[stream] if 0 <= stream < len(self._digests) else None
        if digest is None:
            raise InvalidValueError("stream", stream, "a stream in use")
        return digest

    # --- changes ---

    def new_marks(self) -> Marks:
        """Return marks for a sweep that keeps the pages stored from now on. They need one byte per page."""
        return zeros(self._max_pages + 1, np.uint8)

    def store(
        self, stream: int, event: StoredPages, start: int, stop: int, marks: Marks | None = None
    ) -> tuple[int, int]:
        """Store pages [start, stop) of an event. Returns (pages held already, pages refused: index full)."""
        self.digest(stream)
        kept = _NO_MARKS if marks is None else marks
        pages = event.hashes, event.chain_starts, event.parents
        known, refused = apply.store(self._pinned, kept, *pages, stream, event.medium, start, stop)
        return known, refused

    def remove(
        self, stream: int, event: RemovedPages, start: int, stop: int, marks: Marks | None = None
    ) -> tuple[int, int]:
        """Remove pages [start, stop) of an event.

        Returns (pages that the stream did not hold there, pages that remain because even the holder sets reserved for
        removals are used up).
        """
        self.digest(stream)
        kept = _NO_MARKS if marks is None else marks
        unknown, refused = apply.remove(self._pinned, kept, event.hashes, stream, event.medium, start, stop)
        return unknown, refused

    def sweep(self, stream: int, marks: Marks | None = None) -> Iterator[int]:
        """Remove all pages of a stream except marked ones, in slices. Yields the pages that each slice removed."""
        for start, stop in self._entry_ranges(SLICE_PAGES):
            if not self.digest(stream)[:NUM_MEDIA].any():
                return
            yield apply.sweep(self._pinned, _NO_MARKS if marks is None else marks, stream, start, stop)

    # --- queries ---

    def find(self, hashes: U64Array) -> Matches:
        """Find how far each stream holds a prompt. hashes: uint64[n], C order, sequence hashes from page 0."""
        streams = np.empty(self.most_streams, _INT32)
        pages = np.empty((self.most_streams, NUM_MEDIA), _UINT32)
        return Matches(streams[: find(self.lookup, hashes, streams, pages)], pages)

    @property
    def most_streams(self) -> int:
        """Number of streams that the columns of this index have room for. It grows with the streams."""
        return 64 * self._width

    def tiers_held(self, hashes: U64Array, stream: int) -> npt.NDArray[np.uint8]:
        """Return uint8[n]: for each page, a bitmask of the tiers on which a stream holds it.

        hashes: uint64[n], C order, sequence hashes.
        """
        sets = np.empty(len(hashes), _UINT32)
        sets_of_pages(self.lookup, hashes, sets)
        words = self.pages.sets.words[sets, stream >> 6 :: self._width]
        bits = (words >> np.uint64(stream & 63) & np.uint64(1)).astype(np.uint8)
        return np.packbits(bits, axis=1, bitorder="little")[:, 0]

    def tiers_marked(self, hashes: U64Array, marks: Marks) -> npt.NDArray[np.uint8]:
        """Return uint8[n]: for each page, a bitmask of the tiers on which it was stored since the marks are new.

        hashes: uint64[n], distinct sequence hashes. Takes about a second for 10 million pages.
        """
        order = np.argsort(hashes)
        entries = self.live_entries()
        keys = self.pages.table.keys[entries]
        places = np.searchsorted(hashes, keys, sorter=order)
        tiers = np.zeros(len(hashes), np.uint8)
        if len(hashes):
            found = order[np.minimum(places, len(hashes) - 1)]
            is_asked = hashes[found] == keys
            tiers[found[is_asked]] = marks[entries[is_asked]]
        return tiers

    def shared_prefixes(self, most: int) -> Generator[None, None, list[U64Array]]:
        """Find the prefixes of which most pages are held by several streams, in slices of a fraction of a millisecond.

        A prefix ends where fewer streams hold the next page. Returns the sequence hashes of each, at most `most`, the
        most shared first, then the longest. Takes 5 bytes of memory a page. The index may change between two slices;
        prefixes that are no longer held completely are then left out.
        """
        used = page_table.high_water(self.pages.table)
        depths, is_inner = np.zeros(used, np.uint32), np.zeros(used, np.uint8)
        best, worths = np.full(most, -1, np.int64), np.full(most, -1, np.int64)
        ranges = [(start, min(start + _SURVEY_ENTRIES, used)) for start in range(0, used, _SURVEY_ENTRIES)]
        for start, stop in ranges:
            prefixes.survey(self._pinned, depths, is_inner, start, stop)
            yield
        for start, stop in ranges:
            prefixes.select(self._pinned, depths, is_inner, start, stop, best, worths)
            yield
        found = []
        for number in np.argsort(-worths, kind="stable").tolist():
            if best[number] < 0:
                break
            hashes = np.empty(min(int(depths[best[number]]), _LONGEST_TRAIL), np.uint64)
            if prefixes.trail(self._pinned, int(best[number]), hashes) == len(hashes):
                found.append(hashes)
            yield
        return found

    def stream_pages(self, stream: int) -> Iterator[StreamPages]:
        """Yield all pages of a stream, in slices, in no particular order."""
        self.digest(stream)
        entries = np.empty(_SCAN_ENTRIES, np.int64)
        tiers = np.empty(_SCAN_ENTRIES, np.uint8)
        for start, stop in self._entry_ranges(_SCAN_ENTRIES):
            found = apply.collect(self._pinned, stream, start, stop, entries, tiers)
            if found:
                held = entries[:found]
                yield StreamPages(self.pages.table.keys[held], self.pages.parents[held], tiers[:found].copy())

    def image(self) -> Generator[None, None, IndexImage]:
        """Copy everything for a snapshot, in slices. The index must not change before the end."""
        sets = self.pages.sets
        used = page_table.high_water(sets.table)
        row_of_id = zeros(used, np.uint32)
        digests = {s: digest.copy() for s, digest in enumerate(self._digests) if digest is not None}
        image = IndexImage([], [], [], [], sets.words.shape[1], digests)
        num_rows = 0
        for start in range(0, used, step := holder_sets.slice_rows(sets.words)):
            ids = start + np.flatnonzero(sets.users[start : start + step])
            row_of_id[ids] = np.arange(num_rows, num_rows + len(ids))
            image.sets.append(sets.words[ids])
            num_rows += len(ids)
            yield
        for start, stop in self._entry_ranges(_COPY_ENTRIES):
            live = start + np.flatnonzero(self.pages.holders[start:stop])
            image.hashes.append(self.pages.table.keys[live])
            image.parents.append(self.pages.parents[live])
            image.holders.append(row_of_id[self.pages.holders[live]])
            yield
        yield from give_back(row_of_id)
        return image

    def live_entries(self) -> npt.NDArray[np.int64]:
        """Return the entries of all pages, int64[n], in the order of the columns of `image`."""
        return np.flatnonzero(self.pages.holders[: page_table.high_water(self.pages.table)])

    def restore(self, image: IndexImage) -> None:
        """Load an image into this new, empty index. Raises InvalidValueError if the image is inconsistent."""
        num_sets, words_per_set = sum(map(len, image.sets)), image.words_per_set
        if max(image.digests, default=0) >= self._max_streams or not words_per_set or words_per_set % NUM_MEDIA:
            raise InvalidValueError("image", words_per_set, f"at most {self._max_streams} streams")
        run_at_once(self._widen(words_per_set // NUM_MEDIA))
        self._check_streams(image)
        ids = np.empty(num_sets, np.uint32)
        for hashes, parents, holders in zip(image.hashes, image.parents, image.holders, strict=True):
            if not len(hashes) == len(parents) == len(holders):
                raise InvalidValueError("image", len(hashes), "columns of equal length")
            if len(holders) and int(holders.max()) >= num_sets:
                raise InvalidValueError("image.holders", int(holders.max()), f"less than {num_sets}")
        at = 0
        for sets in image.sets:
            if not apply.restore_sets(self._pinned, sets, ids[at : at + len(sets)]):
                raise InvalidValueError("image.sets", num_sets, "distinct sets, within the bounds of this index")
            at += len(sets)
        for columns in zip(image.hashes, image.parents, image.holders, strict=True):
            if not apply.restore_pages(self._pinned, *columns, ids):
                raise InvalidValueError(
                    "image.hashes", len(columns[0]), "distinct pages, within the bounds of this index"
                )
        self._digests = [None] * (max(image.digests, default=-1) + 1)
        for stream, digest in image.digests.items():
            self.digest(self._use_stream(stream))[:] = digest

    def _check_streams(self, image: IndexImage) -> None:
        """Check that every holder has a digest. Raises InvalidValueError."""
        held = np.zeros(self._width, np.uint64)
        for sets in image.sets:
            held |= np.bitwise_or.reduce(sets.reshape(-1, self._width), axis=0)
        bits = np.unpackbits(held.astype("<u8").view(np.uint8), bitorder="little")
        strangers = set(np.flatnonzero(bits).tolist()) - image.digests.keys()
        if strangers:
            raise InvalidValueError("image.sets", min(strangers), "streams that have a digest")
        if max(image.digests, default=0) >= self.most_streams:
            raise InvalidValueError("image.digests", max(image.digests), f"streams below {self.most_streams}")

    @property
    def has_room(self) -> bool:
        """Whether a refused worker may fit after a resync: a twentieth of the pages and some holder sets are free."""
        return self.num_pages < 0.95 * self.max_pages and self._has_sets

    @property
    def _has_sets(self) -> bool:
        return self.num_sets <= _STORES_STOP_AT * holder_sets.capacity_of(self.pages.sets)

    @property
    def num_pages(self) -> int:
        return page_table.num_live(self.pages.table)

    @property
    def max_pages(self) -> int:
        """The bound on distinct pages."""
        return page_table.capacity(self.pages.table)

    @property
    def is_limited(self) -> bool:
        """Whether `limit_pages` has set a smaller bound than that of this index, and there is room for holder sets."""
        return self.max_pages < self._max_pages and self._has_sets

    def limit_pages(self, bound: int | None) -> None:
        """Change the bound on distinct pages, to at most that of this index. Pages beyond it stay. None: no other."""
        page_table.limit(self.pages.table, self._max_pages if bound is None else min(bound, self._max_pages))

    @property
    def num_sets(self) -> int:
        return holder_sets.num_sets(self.pages.sets)

    @property
    def bytes_used(self) -> int:
        """Bytes in use, over all arrays."""
        entries = page_table.high_water(self.pages.table)
        columns = entries * (self.pages.parents.itemsize + self.pages.holders.itemsize)
        return page_table.bytes_used(self.pages.table) + columns + holder_sets.bytes_used(self.pages.sets)

    def check(self) -> None:
        page_table.check(self.pages.table)
        used = page_table.high_water(self.pages.table)
        live = int(np.count_nonzero(self.pages.holders))
        if live != self.num_pages or np.any(self.pages.holders[used:]):
            raise AssertionError(f"{live} entries have holders, {self.num_pages} are live")
        holder_sets.check(self.pages.sets, self.pages.holders[:used])

    # --- inside ---

    def _entry_ranges(self, step: int) -> Iterator[tuple[int, int]]:
        start = 0
        while start < (used := page_table.high_water(self.pages.table)):
            yield start, min(start + step, used)
            start += step

    def _set_capacity(self, max_pages: int, width: int) -> int:
        """Return the capacity for holder sets. There are never more sets than pages, except for the empty set and the
        reserve for removals.
        """
        bytes_per_set = NUM_MEDIA * width * 8
        return max(64, min(2 * max_pages + 64, self._max_set_bytes // bytes_per_set))

    def _widen(self, width: int) -> Iterator[None]:
        if width != self._width:
            capacity = self._set_capacity(self._max_pages, width)
            old = self.pages.sets.words[: page_table.high_water(self.pages.sets.table)]
            sets = yield from holder_sets.widened(self.pages.sets, capacity, width)
            self._width = width
            self._set_pages(self.pages._replace(sets=sets))
            yield from give_back(old)

    def _set_pages(self, pages: apply.Pages) -> None:
        self.pages = pages
        """The arrays that kernels change. It is another tuple after an array was replaced."""
        self._pinned = pin(pages)
        alive = np.zeros((NUM_MEDIA, self._width), np.uint64)
        self.lookup = pin(PageLookup(pages.table, pages.holders, pages.sets.words, alive))
        """The `PageLookup` of kernels that find prefixes. It is another one after an array was replaced."""
