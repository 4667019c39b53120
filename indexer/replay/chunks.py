"""Applies many records of a log at once: plain batches by a kernel, everything else record by record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from indexer.index import SLICE_PAGES, OverlapIndex
from indexer.kernels.batches import (
    BATCHES,
    DIGEST_DIFFERS,
    MADE_AT,
    NUM_CLOCK_FIELDS,
    NUM_STREAM_FIELDS,
    SPACE,
    PlainStreams,
    apply_batches,
)
from indexer.namespaces import NamespaceKey
from indexer.replay.replay import FORGET_EVERY_MS, Replay
from indexer.views import View, ViewState
from kv_events.codec import decode_batch, read_head
from kv_events.digest import DIGEST_WORDS
from kv_events.kernels.batches import TIME
from kv_events.kernels.bundles import I64Vector
from kv_events.log.batch_columns import BatchColumns, decode_chunk
from kv_events.log.reader import RecordChunk
from kv_events.records import Channel, LogRecord
from kv_events.streams import StreamId

_NO_SPACE = -1
_MOST_NAMES = 65_536
_MOST_PARTITIONS = 4096
_MOST_SEQ = 2**62
_PUNCTUAL_MS = 250  # well below what `indexer.views` takes for late
_NEVER = np.iinfo(np.int64).min

Mask = npt.NDArray[np.bool_]


class PlainRun(NamedTuple):
    """Plain batches that were applied. Their views were live before and after each of them."""

    first_index: int
    """Index of the record of row 0."""
    columns: BatchColumns
    rows: I64Vector
    """The rows of the batches, ascending."""
    numbers: I64Vector
    """[n] a number of its stream, for each row of the columns."""
    views: Mapping[int, View]
    """By these numbers."""

    def newest(self) -> Iterator[tuple[View, int]]:
        """Yield each view and the row of its last batch."""
        numbers, places = np.unique(self.numbers[self.rows[::-1]], return_index=True)
        rows = self.rows[len(self.rows) - 1 - places]
        for number, row in zip(numbers.tolist(), rows.tolist(), strict=True):
            yield self.views[number], row


class ApplyObserver:
    """Receives every record that is applied, in order. This one does nothing with them."""

    def mark_not_plain(self, columns: BatchColumns) -> None:
        """Clear `columns.arrays.plain` of records that are to be applied one by one, before any of them is applied."""

    def take_plain(self, run: PlainRun) -> None:
        """Note plain batches that were applied."""

    def take_one(self, index: int, record: LogRecord, apply: Callable[[], None]) -> None:
        """Apply a record by a call of `apply`, during which `Applier.on_applied` receives the batch."""
        apply()


class ChunkApplier:
    """Applies chunks of records to the views of a replay. The result is that of `Replay.apply` for each record.

    The kernel applies a batch if it is plain and the next one of a view that is live. The state of such views is kept
    in arrays, which are read again after each record that is applied by itself. Nothing else may change the views as
    long as this object is used.
    """

    def __init__(self, replay: Replay, observer: ApplyObserver | None = None) -> None:
        self._replay = replay
        self._observer = observer or ApplyObserver()
        self._numbers: dict[bytes, int] = {}  # encoded names of a stream, with its block size -> its number here
        self._number_of: dict[StreamId, int] = {}  # only streams with a view
        self._views: dict[int, View] = {}
        self._spaces: dict[NamespaceKey, int] = {}
        self._tracked = PlainStreams(
            np.zeros((0, 0), np.uint64),
            np.zeros((0, NUM_STREAM_FIELDS), np.int64),
            np.zeros((0, DIGEST_WORDS), np.uint64),
            np.zeros(0, np.int64),
            np.zeros(_MOST_PARTITIONS, np.int64),
            np.zeros(NUM_CLOCK_FIELDS),
            np.zeros(0, np.uint8),
        )

    def apply(self, chunk: RecordChunk, start: int, stop: int, wanted: Mask | None = None) -> None:
        """Apply the records [start, stop) of a chunk. wanted: bool[stop - start] which of them; default: all."""
        columns = decode_chunk(chunk, start, stop)
        is_event = chunk.channels[start:stop] == Channel.EVENTS
        wanted = is_event if wanted is None else wanted & is_event
        numbers = self._numbered(columns)
        self._observer.mark_not_plain(columns)
        _mark_late(columns, chunk.timestamps_ms[start:stop])
        self._mark_removals(columns, chunk.timestamps_ms[start:stop], wanted)
        first_index, at = chunk.first_index + start, 0
        while at < len(wanted):
            end, digest_differs = self._apply_plain(columns, wanted, numbers, at)
            plain = at + np.flatnonzero(wanted[at : end - digest_differs])
            if len(plain):
                self._observer.take_plain(PlainRun(first_index, columns, plain, numbers, self._views))
            at = end - digest_differs
            if at < len(wanted):
                record, number = chunk.record(start + at), int(numbers[at])
                apply = partial(self._replay.apply, record)
                if digest_differs:
                    apply = partial(self._compare_digest, record, number)
                num_forgotten = self._replay.num_forgotten
                self._observer.take_one(first_index + at, record, apply)
                if self._replay.num_forgotten != num_forgotten:
                    self._forget_streams()
                self._learn(record, number)
                at += 1
        for partition in np.flatnonzero(self._tracked.offsets).tolist():
            offset = int(self._tracked.offsets[partition])
            self._replay.positions[partition] = max(self._replay.positions.get(partition, 0), offset)

    def _mark_removals(self, columns: BatchColumns, times_ms: I64Vector, wanted: Mask) -> None:
        """Let the records before which silent workers are dropped be applied by themselves."""
        if self._replay.forgets:
            now = np.concatenate(([round(self._replay.now * 1000)], np.where(wanted, times_ms, _NEVER)))
            periods = np.maximum.accumulate(now) // FORGET_EVERY_MS
            columns.arrays.plain[periods[1:] > periods[:-1]] = False

    def _numbered(self, columns: BatchColumns) -> I64Vector:
        """Return the number of the stream of each record; -1 if its names are unreadable."""
        if len(self._numbers) > _MOST_NAMES:
            self._numbers.clear()
            self._forget_streams()
        known = self._numbers
        numbers = [-1 if name is None else known.setdefault(name, len(known)) for name in columns.names()]
        if len(known) > len(self._tracked.streams):
            self._grow(2 * len(known))
        return np.array(numbers, np.int64)

    def _grow(self, num_streams: int) -> None:
        """Make room for streams."""
        before = self._tracked
        streams = np.full((num_streams, NUM_STREAM_FIELDS), _NO_SPACE, np.int64)
        digests = np.zeros((num_streams, DIGEST_WORDS), np.uint64)
        streams[: len(before.streams)], digests[: len(before.digests)] = before.streams, before.digests
        self._tracked = before._replace(streams=streams, digests=digests, touched=np.zeros(num_streams, np.int64))

    def _apply_plain(self, columns: BatchColumns, wanted: Mask, numbers: I64Vector, start: int) -> tuple[int, bool]:
        """Apply records up to one that is not plain. Returns (end, whether the digest of the last one differs)."""
        replay, tracked = self._replay, self._tracked
        tracked.clock[:] = *replay.clock, *replay.freshness.longest_pauses_s
        end, num_touched, reason = apply_batches(
            np.frombuffer(columns.data, np.uint8),
            columns.rows,
            columns.arrays,
            wanted,
            numbers,
            tracked,
            start,
            len(wanted),
            SLICE_PAGES,
        )
        now, log_read_at, resumed_at, unbroken_since, *_ = tracked.clock.tolist()
        replay.clock = now, log_read_at, resumed_at, unbroken_since
        touched = tracked.touched[:num_touched]
        made_at = tracked.streams[touched, MADE_AT].view(np.float64).tolist()
        for number, facts, made in zip(touched.tolist(), tracked.streams[touched].tolist(), made_at, strict=True):
            self._update(self._views[number], number, facts, made)
        tracked.streams[touched, BATCHES:] = 0
        return end, reason == DIGEST_DIFFERS

    def _update(self, view: View, number: int, facts: list[int], made_at: float) -> None:
        """Write what the kernel has done to a view. made_at: time of the last batch."""
        _, _, _, next_seq, heard_ms, latest_ms, agreed_ms, _, batches, stored, removed, known, unknown, refused = facts
        view.position = view.position._replace(next_seq=next_seq)
        view.heard_at, view.heard_tick = heard_ms / 1000, max(view.heard_tick, latest_ms / 1000)
        view.lateness.note(made_at, view.heard_at, view.heard_at)
        view.silent_from = max(view.silent_from, latest_ms / 1000)
        if agreed_ms != _NEVER:
            view.agreed_at = agreed_ms / 1000
        view.index.digest(view.number)[:] = self._tracked.digests[number]
        view.count_refused(refused)
        counters = view.counters
        counters.batches += batches
        counters.pages_stored += stored
        counters.pages_removed += removed
        counters.known_stores += known
        counters.unknown_removals += unknown
        self._replay.applier.records += batches

    def _compare_digest(self, record: LogRecord, number: int) -> None:
        """Do what remains to be done after a batch that the kernel applied, and whose digest differs."""
        view, batch = self._views[number], decode_batch(record.payload)
        view.compare_digest(batch)
        for notify in self._replay.applier.on_applied:
            notify(view, batch)

    def _learn(self, record: LogRecord, number: int) -> None:
        """Read the state of a view after a record that was applied by itself. number: of the names of the record."""
        head = read_head(record.payload)
        if head is None:
            return  # no record that an applier accepts
        stream, block_size = head.stream, head.block_size
        before = self._number_of.pop(stream, None)
        if before is not None:
            self._tracked.streams[before, SPACE] = _NO_SPACE
        namespaces = self._replay.namespaces
        if len(self._spaces) > namespaces.num_namespaces:
            self._forget_streams()  # a namespace was dropped
        for namespace in namespaces.find(stream.model, stream.tenant):  # their indices may have other arrays now
            if namespace.key in self._spaces:
                self._tracked.spaces[self._spaces[namespace.key]] = namespace.index.pages
        view = namespaces.view(stream)
        if view is None or number < 0 or view.block_size != block_size or not _is_simple(view):
            return
        self._number_of[stream] = number
        self._views[number] = view
        space = self._space(NamespaceKey(stream.model, stream.tenant, block_size), view.index)
        tracked = self._tracked
        tracked.streams[number] = space, view.number, view.epoch, view.next_seq, 0, _NEVER, _NEVER, 0, 0, 0, 0, 0, 0, 0
        tracked.digests[number] = view.index.digest(view.number)

    def _space(self, key: NamespaceKey, index: OverlapIndex) -> int:
        """Return the row of an index."""
        space = self._spaces.setdefault(key, len(self._spaces))
        if space >= len(self._tracked.spaces):
            spaces = np.zeros((2 * space + 1, len(index.pages)), np.uint64)
            if space:
                spaces[:space] = self._tracked.spaces
            self._tracked = self._tracked._replace(spaces=spaces)
        self._tracked.spaces[space] = index.pages
        return space

    def _forget_streams(self) -> None:
        """Let the next record of each stream be applied by itself."""
        self._tracked.streams[:, SPACE] = _NO_SPACE
        self._number_of.clear()
        self._views.clear()
        self._spaces.clear()


def _mark_late(columns: BatchColumns, times_ms: I64Vector) -> None:
    """Let the batches of a time before their record be applied by themselves."""
    (plain,) = np.nonzero(columns.arrays.plain)
    batch_ms = columns.arrays.batches[plain, TIME].view(np.float64) * 1000
    columns.arrays.plain[plain[np.abs(batch_ms - times_ms[plain]) > _PUNCTUAL_MS]] = False


def _is_simple(view: View) -> bool:
    """Return whether plain batches leave the view live as long as the digests are equal."""
    is_sound = view.state is ViewState.LIVE and not (view.degraded_reason or view.refused_now or view.is_delayed)
    return is_sound and view.lateness.clocks_agree and view.marks is None and view.next_seq < _MOST_SEQ
