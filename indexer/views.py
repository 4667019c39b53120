"""The state of each worker stream: admission of batches, correctness of the view, and time of the last batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from indexer.index import SLICE_PAGES, Marks, OverlapIndex, StreamPages
from indexer.kernels import views as column
from indexer.kernels.views import FAULT_CLOSED, FAULT_DEGRADED, FAULT_NONE, ViewColumns, note_lateness
from indexer.position import START, Admission, Position
from kv_events.codec import DecodedBatch, RemovedPages, Step, StoredPages
from kv_events.digest import digest_bytes, page_counts
from kv_events.kernels.arrays import zeros
from kv_events.schema import CLOSED, ENGINE_UNHEARD, AllBlocksCleared, SnapshotBegin, SnapshotEnd
from kv_events.streams import HEARTBEAT_S, StreamId

INDEX_FULL = "index full"
"""Stale reason of a view whose pages did not all fit. A resync helps only after room has become available."""
TENANT_PAGES = "tenant limit: pages"
"""Stale reason of a view whose pages did not all fit into the bound of its tenant."""
RESYNC_CUT_OFF = "resync cut off"
"""Stale reason of a view whose resync did not end."""

LATE_S = 2 * HEARTBEAT_S + 0.5
"""Silence after which two heartbeats are missing. A batch that is later than this is delayed."""

_NO_LATENESS = (0.0, math.inf, -math.inf, -math.inf, 0.0, math.inf)
"""The lateness of a stream before its first batch, see `note_lateness`."""
_LONGEST_RESYNC_S = 60.0
"""Seconds after which a resync without an end is requested again."""


class ViewState(str, Enum):  # noqa: UP042  (serialised as its value, like the storage media)
    """How far a view can be trusted, in descending order."""

    LIVE = "live"
    """The digest equalled the publisher's at the last batch, and the publisher reported no degradation."""
    SYNCING = "syncing"
    """A resync is being applied; pages held before still count until it ends."""
    STALE = "stale"
    """A gap or a wrong digest was found and a resync is requested, or the publisher reported a degradation."""
    EXPIRED = "expired"
    """Silent for longer than the time-to-live, or closed by its publisher; left out of scores."""


STATES = tuple(ViewState)
_TRUST = STATES.index


def least_trusted(states: Iterable[ViewState]) -> ViewState:
    """Return the least trustworthy of several states. states: at least one."""
    return max(states, key=_TRUST)


@dataclass(slots=True)
class ViewCounters:
    """Counts of events in a stream since this process first read it."""

    batches: int = 0
    pages_stored: int = 0
    pages_removed: int = 0
    known_stores: int = 0
    unknown_removals: int = 0
    refused_pages: int = 0
    duplicate_batches: int = 0
    old_epoch_batches: int = 0
    gaps: int = 0
    restarts: int = 0
    digest_mismatches: int = 0
    resyncs: int = 0
    clears: int = 0


def make_columns(num_streams: int) -> ViewColumns:
    return ViewColumns(
        states=zeros(num_streams, np.uint8),
        faults=zeros(num_streams, np.uint8),
        last_batch_at=zeros(num_streams, np.float64),
        last_batch_tick=zeros(num_streams, np.float64),
        times=zeros((num_streams, column.NUM_TIMES), np.float64),
        numbers=zeros((num_streams, column.NUM_NUMBERS), np.int64),
    )


def _row(values: npt.NDArray[Any]) -> memoryview[Any]:
    """Return a row of a column, whose numbers are read and written faster than those of an array."""
    return memoryview(values)  # type: ignore[arg-type]  # its shape is not known to mypy


@dataclass(slots=True)
class View:
    """One worker stream's radix view: its part of the namespace's index, and its state.

    The state is in the columns of the namespace. After the view is dropped, its row belongs to another stream, so that
    a dropped view must not be read.
    """

    stream: StreamId
    block_size: int
    index: OverlapIndex
    number: int
    """The stream's number in the index."""
    columns: ViewColumns
    """The columns of its namespace, which hold the state and the times of this view."""
    stale_reason: str = "new"
    marks: Marks | None = None
    """Pages stored since the beginning of the resync in progress. None if there is no resync."""
    resync_began: float = 0.0
    """`last_batch_tick` at the beginning of the resync in progress."""
    missing_batches: int = 0
    """Batches that gaps skipped since the digests were last equal."""
    partition: int = 0
    """Partition of the newest batch in the log."""
    is_delayed: bool = False
    """Whether the newest batch was delayed, or is being applied after a silence."""
    _is_new_epoch: bool = False
    """Whether the engine has restarted if it is heard: a bridge begins an epoch also when it gives an engine up."""
    _degraded_reason: str = ""
    _first_missing: int | None = None
    _times: memoryview[float] = field(init=False, repr=False)
    numbers: memoryview[int] = field(init=False, repr=False)
    """Its row of `ViewColumns.numbers`: epoch, position and counts."""

    def __post_init__(self) -> None:
        self._times, self.numbers = _row(self.columns.times[self.number]), _row(self.columns.numbers[self.number])
        self.last_batch_at, self.last_batch_tick, self.silent_from, self.agreed_at = 0.0, -math.inf, -math.inf, 0.0
        self.lateness = _NO_LATENESS
        self.position, self.counters, self.refused_now = START, ViewCounters(), 0
        self.state, self.degraded_reason = ViewState.STALE, ""

    @property
    def state(self) -> ViewState:
        """LIVE, STALE or SYNCING, from the batches alone. `freshness` adds silence and degradation."""
        return STATES[self.columns.states.item(self.number)]

    @state.setter
    def state(self, state: ViewState) -> None:
        self.columns.states[self.number] = _TRUST(state)

    @property
    def last_batch_at(self) -> float:
        """Seconds since 1970, by the reader's clock: the newest batch of a publisher in contact with its engine."""
        return self.columns.last_batch_at.item(self.number)

    @last_batch_at.setter
    def last_batch_at(self, at: float) -> None:
        self.columns.last_batch_at[self.number] = at

    @property
    def last_batch_tick(self) -> float:
        """Time up to which the view is known to be right, on the clock of `Freshness`.

        It is the arrival of the newest batch, minus its lateness, of which at most LATE_S counts.
        """
        return self.columns.last_batch_tick.item(self.number)

    @last_batch_tick.setter
    def last_batch_tick(self, tick: float) -> None:
        self.columns.last_batch_tick[self.number] = tick

    @property
    def silent_from(self) -> float:
        """Time from which on a silence counts, on the clock of `Freshness`.

        It is the arrival of the newest batch, or later the moment from which its partition is read here.
        """
        return self._times[column.SILENT_FROM]

    @silent_from.setter
    def silent_from(self, tick: float) -> None:
        self._times[column.SILENT_FROM] = tick

    @property
    def agreed_at(self) -> float:
        """`last_batch_at` of the newest batch after which the digests were equal. 0: there is none yet."""
        return self._times[column.AGREED_AT]

    @agreed_at.setter
    def agreed_at(self, at: float) -> None:
        self._times[column.AGREED_AT] = at

    @property
    def lateness(self) -> tuple[float, ...]:
        """What is known of the publisher's clock, see `note_lateness`: the columns SECONDS to STEADY_SECONDS.

        At first, both clocks are believed to be right: the first batch may be late as well. After an outage, a
        publisher first sends the batches that have waited, which are right about a time that has passed. A batch whose
        time is before that of its predecessor shows that a clock was set back. So does a lateness that stays the same
        for some seconds.
        """
        return tuple(self._times[: column.SILENT_FROM])

    @lateness.setter
    def lateness(self, seconds: tuple[float, ...]) -> None:
        self.columns.times[self.number, : column.SILENT_FROM] = seconds

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.next_seq, self._first_missing)

    @position.setter
    def position(self, position: Position) -> None:
        self.numbers[column.EPOCH], self.numbers[column.LAST_SEQ] = position.epoch, position.next_seq - 1
        self._first_missing = position.first_missing

    @property
    def counters(self) -> ViewCounters:
        return ViewCounters(*self.numbers[column.BATCHES :])

    @counters.setter
    def counters(self, counters: ViewCounters) -> None:
        self.columns.numbers[self.number, column.BATCHES :] = astuple(counters)

    @property
    def refused_now(self) -> int:
        """Pages refused since the last resync or clear. The digest cannot match before the next one."""
        return self.numbers[column.REFUSED_NOW]

    @refused_now.setter
    def refused_now(self, num_pages: int) -> None:
        self.numbers[column.REFUSED_NOW] = num_pages

    @property
    def degraded_reason(self) -> str:
        """Why the publisher called its stream incomplete with the newest batch. A resync would not help."""
        return self._degraded_reason

    @degraded_reason.setter
    def degraded_reason(self, reason: str) -> None:
        self._degraded_reason = reason
        self._note_fault()

    @property
    def epoch(self) -> int:
        """Epoch of the publisher that is followed. -1 until the first batch."""
        return self.numbers[column.EPOCH]

    @property
    def next_seq(self) -> int:
        return self.numbers[column.LAST_SEQ] + 1

    @property
    def reason(self) -> str:
        """Why the view cannot be fully trusted, or "" if it can."""
        return CLOSED if self.is_closed else self.stale_reason or self.degraded_reason

    @property
    def is_closed(self) -> bool:
        """Whether the publisher has said with its last batch that no other follows."""
        return self.degraded_reason == CLOSED

    @property
    def num_pages(self) -> list[int]:
        """Pages held per medium, in the order of `schema.MEDIA`."""
        return page_counts(self.index.digest(self.number))

    def all_pages(self) -> StreamPages:
        """Return all pages, in no particular order."""
        none = StreamPages(np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, np.uint8))
        return StreamPages(*map(np.concatenate, zip(none, *self.index.stream_pages(self.number), strict=True)))

    def admit(self, batch: DecodedBatch, *, is_silent: bool) -> bool:
        """Return whether a batch is to be applied, see `Position`. is_silent: see `Freshness`."""
        if batch.seq == self.next_seq and batch.epoch == self.epoch:  # what `Position` says of nearly all batches
            self.numbers[column.LAST_SEQ] = batch.seq
            return True
        before = self.position
        admission, self.position = before.after(batch.epoch, batch.seq, is_silent=is_silent)
        if admission is Admission.OLD_EPOCH:
            self.numbers[column.OLD_EPOCHS] += 1
        elif admission is Admission.DUPLICATE:
            self.numbers[column.DUPLICATES] += 1
        elif admission.begins_epoch:
            self._begin_epoch(batch, is_restart=before.epoch >= 0)
        if admission.misses_batches:
            self.numbers[column.GAPS] += 1
            expected = 0 if admission.begins_epoch else before.next_seq
            self.missing_batches += max(0, batch.seq - expected)
            self.mark_stale("gap")
        return admission.is_applied

    def note_arrival(self, batch: DecodedBatch, at: float, tick: float) -> None:
        """Record the arrival of an admitted batch. If its publisher has no contact with its engine, the age of the view
        does not change.
        """
        if batch.degraded_reason != ENGINE_UNHEARD or self.last_batch_at == 0.0:
            self.last_batch_at = at
        was_late = tick - self.last_batch_tick > LATE_S
        note_lateness(self._times, batch.timestamp, at, tick)  # type: ignore[arg-type]  # faster than an array
        late_s = self._times[column.SECONDS]
        self.last_batch_tick = max(self.last_batch_tick, tick - min(late_s, LATE_S))
        self.silent_from = max(self.silent_from, tick)
        self.is_delayed = was_late or late_s > LATE_S
        self._note_fault()

    def apply(self, batch: DecodedBatch) -> Iterator[None]:
        """Apply an admitted batch in slices. Queries can run between two slices."""
        self.numbers[column.BATCHES] += 1
        for step in batch.steps:
            yield from self._apply_step(step)

    def compare_digest(self, batch: DecodedBatch) -> None:
        """Compare the digests after a batch. If they are equal, the view is correct regardless of earlier errors."""
        self.is_delayed = self._times[column.SECONDS] > LATE_S
        self.degraded_reason = batch.degraded_reason
        if self._is_new_epoch and batch.degraded_reason != ENGINE_UNHEARD:
            self._is_new_epoch = False
            self.numbers[column.RESTARTS] += 1
        if self.marks is not None:
            if self.last_batch_tick - self.resync_began > _LONGEST_RESYNC_S:
                self.mark_stale(RESYNC_CUT_OFF)
            return
        if digest_bytes(self.index.digest(self.number)) == batch.digest.tobytes():  # faster than comparing arrays
            self.state, self.stale_reason = ViewState.LIVE, ""
            self.agreed_at, self.missing_batches = self.last_batch_at, 0
            if batch.steps and isinstance(batch.steps[-1], SnapshotEnd):
                self._first_missing = None  # what was missing has been sent again
            return
        self.numbers[column.MISMATCHES] += 1
        if self.refused_now:
            self.mark_stale(TENANT_PAGES if self.index.is_limited else INDEX_FULL)
        elif self.state is ViewState.LIVE:
            self.mark_stale("digest")

    def clear(self) -> Iterator[None]:
        """Remove every page, in slices."""
        for removed in self.index.sweep(self.number):
            self.numbers[column.REMOVED] += removed
            yield

    def mark_stale(self, reason: str) -> None:
        """Mark the view as stale until a digest matches. A resync in progress is abandoned."""
        self.marks = None
        self.state, self.stale_reason = ViewState.STALE, reason

    def count_refused(self, num_pages: int) -> None:
        self.numbers[column.REFUSED] += num_pages
        self.refused_now += num_pages

    def _note_fault(self) -> None:
        if self.is_closed:
            fault = FAULT_CLOSED
        else:
            fault = FAULT_DEGRADED if self.degraded_reason or self.is_delayed else FAULT_NONE
        self.columns.faults[self.number] = fault

    def _begin_epoch(self, batch: DecodedBatch, *, is_restart: bool) -> None:
        if is_restart:
            self._is_new_epoch = True
            self.mark_stale("restart")
        if batch.seq == 0 and not (batch.steps and isinstance(batch.steps[0], SnapshotBegin)):
            batch.steps.insert(0, AllBlocksCleared())  # a new incarnation without a resync holds nothing

    def _apply_step(self, step: Step) -> Iterator[None]:
        match step:
            case StoredPages() | RemovedPages():
                yield from self._change(step)
            case AllBlocksCleared():
                self.numbers[column.CLEARS] += 1
                self.refused_now = 0
                yield from self.clear()
            case SnapshotBegin():
                self.refused_now = 0
                self.marks = self.index.new_marks()
                self.resync_began = self.last_batch_tick
                self.state = ViewState.SYNCING
            case SnapshotEnd():
                yield from self._end_snapshot()

    def _change(self, event: StoredPages | RemovedPages) -> Iterator[None]:
        is_store, numbers = isinstance(event, StoredPages), self.numbers
        done, without_effect = (column.STORED, column.KNOWN) if is_store else (column.REMOVED, column.UNKNOWN)
        for start in range(0, len(event.hashes), SLICE_PAGES):
            stop = min(start + SLICE_PAGES, len(event.hashes))
            if isinstance(event, StoredPages):
                known, refused = self.index.store(self.number, event, start, stop, self.marks)
            else:
                known, refused = self.index.remove(self.number, event, start, stop, self.marks)
            numbers[without_effect] += known
            self.count_refused(refused)
            numbers[done] += stop - start - known - refused
            yield

    def _end_snapshot(self) -> Iterator[None]:
        if self.marks is None:
            return  # the beginning of the resync was lost; the gap was detected already
        for removed in self.index.sweep(self.number, self.marks):
            self.numbers[column.REMOVED] += removed
            yield
        self.marks = None
        self.state, self.stale_reason = ViewState.STALE, "digest"  # until `compare_digest` finds equal digests
        self.numbers[column.RESYNCS] += 1
