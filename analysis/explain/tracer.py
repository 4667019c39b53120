"""Reads a log once: rebuilds the views with the ordinary replay, and follows the asked pages beside it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from analysis.explain.asked_prompt import AskedPrompt
from analysis.explain.hash_rules import Column, HashRule, PromptHashes, RuleFinder, Variant
from analysis.explain.page_history import PageHistory
from analysis.stream_history import StreamHistory, batch_position
from indexer.applier import PlainRun
from indexer.replay import ApplyObserver, Replay
from indexer.views import View, ViewState
from kv_events.codec import DecodedBatch, RemovedPages, StoredPages, decode_batch
from kv_events.errors import RecordRejectedError
from kv_events.hashing import U64Array
from kv_events.http.explanations import BatchPosition
from kv_events.kernels.batches import END_EVENT, EPOCH, FIRST_EVENT, IS_REMOVAL, NUM_PAGES, PAGES, ROW, SEQ
from kv_events.kernels.log_records import OFFSET, PARTITION, TIMESTAMP_MS
from kv_events.log.batch_columns import BatchColumns
from kv_events.log.moments import LogMoment
from kv_events.log.reader import RecordChunk
from kv_events.records import Channel, LogRecord
from kv_events.schema import AllBlocksCleared, SnapshotBegin, SnapshotEnd
from kv_events.streams import StreamId, split_group

History: TypeAlias = Iterable[RecordChunk] | Iterable[tuple[int | None, LogRecord]]
"""All records of a log, as chunks or each with its index; None for records of a topic."""


class BeforeLog(BatchPosition, frozen=True, kw_only=True):
    """The last batch before the log. Only its time, epoch and number are known, from the key frame there."""


class Gap(NamedTuple):
    """Batches that are missing in the log."""

    first_seq: int
    last_seq: int
    before: BatchPosition | None
    """The last batch before the gap. None: the log begins after them."""
    after: BatchPosition


@dataclass
class StreamTrace:
    """What the log shows about one worker stream."""

    stream: StreamId
    block_size: int
    view: View
    first: BatchPosition
    last: BatchPosition
    history: StreamHistory
    page_histories: dict[int, PageHistory] = field(default_factory=dict)
    """Variant number -> what happened to its pages, if any was stored."""
    gaps: list[Gap] = field(default_factory=list)
    """The gaps since the view was last right."""
    degraded_since: BatchPosition | None = None
    """The first batch after which the view was not live, since it last was. None: it is live."""
    resync: BatchPosition | None = None
    """The beginning of the resync in progress."""
    rules: dict[int, HashRule | None] = field(default_factory=dict)
    """Number of a variant of block hashes -> the rule under which the worker hashes its pages. None: not recognised.
    Variants whose pages have the hashes that were asked for are absent."""


class PromptTracer(ApplyObserver):
    """Follows the pages of one prompt through all streams of a log."""

    def __init__(self, prompt: AskedPrompt, views: Replay | None = None) -> None:
        """views: before the first record of the log; they are changed. None: empty ones."""
        self.prompt = prompt
        self.hashes = PromptHashes(prompt)
        self.replay = views or Replay()
        self.replay.applier.on_applied.append(self._note)
        self.replay.forgets = False  # a worker that was silent for long is explained as expired
        self.streams: dict[StreamId, StreamTrace] = {}
        self.by_worker: dict[str, dict[StreamId, StreamTrace]] = {}
        """The same by the name of the worker."""
        self.batches: list[BatchPosition] = []
        """Batches by the numbers that page_histories use. Only those that did something to a page of the prompt."""
        self.first_records: dict[StreamId, tuple[BatchPosition, int]] = {}
        """The first readable record of each stream, before or after the moment, and its block size."""
        self._rule_finder = RuleFinder(self.hashes)
        self._keys: set[bytes] = set()
        self._index: int | None = None
        self._record = LogRecord(0, 0, 0, b"", b"")
        self._columns: BatchColumns | None = None
        self._num_variants = 0
        """Variants that were looked for in these columns."""
        for view in self.replay.namespaces.views:
            if split_group(view.stream.model)[1] is None:
                self._begin_before_log(view)

    def follow(self, records: History, until: LogMoment | None = None) -> None:
        """Read a log and apply its records before a moment."""
        until = until or LogMoment()
        newest = 0.0
        for each in records:
            if isinstance(each, RecordChunk):
                newest = max(newest, self._follow_chunk(each, until))
            elif each[1].channel == Channel.EVENTS:
                newest = max(newest, each[1].timestamp_ms / 1000)
                self._follow_record(*each, until)
        if until.time_s is not None and self.replay.applier.records:
            self.replay.pass_time(min(until.time_s, newest))

    def _follow_record(self, index: int | None, record: LogRecord, until: LogMoment) -> None:
        """Apply a record if it is before the moment."""
        if until.takes(record if until.index is None else record._replace(offset=index or 0)):
            self.take_one(index, record, partial(self.replay.apply, record))
        else:
            self._note_first(index, record)

    def _follow_chunk(self, chunk: RecordChunk, until: LogMoment) -> float:
        """Apply the records of a chunk that are before the moment. Returns the latest time of an event."""
        is_event = chunk.channels == Channel.EVENTS
        wanted = is_event & chunk.before(until)
        self.replay.apply_chunk(chunk, wanted=wanted, observer=self)
        for row in np.flatnonzero(is_event & ~wanted).tolist():
            self._note_first(chunk.first_index + row, chunk.record(row))
        return int(chunk.timestamps_ms[is_event].max(initial=0)) / 1000

    def mark_not_plain(self, columns: BatchColumns) -> None:
        """Let batches with pages of the prompt be applied one by one."""
        self._columns, self._num_variants = columns, len(self.hashes.variants)
        events = columns.arrays.events
        for table in (self.hashes.sequence_table, self.hashes.block_table):
            positions, _ = table.find(columns.arrays.words)
            found = np.searchsorted(events[:, PAGES], positions, "right") - 1
            columns.arrays.plain[events[found, ROW]] = 0

    def take_plain(self, run: PlainRun) -> None:
        """Note batches without pages of the prompt, after which their views are live, as before."""
        for view, row in run.newest():
            trace = self.streams.get(view.stream)
            if trace is not None:
                trace.last = _batch_of(run, row)
                trace.history.seq = trace.last.seq

    def take_one(self, index: int | None, record: LogRecord, apply: Callable[[], None]) -> None:
        """Note a record and apply it."""
        self._note_first(index, record)
        apply()
        if len(self.hashes.variants) != self._num_variants and self._columns is not None:
            self.mark_not_plain(self._columns)

    def later_streams(self) -> dict[StreamId, tuple[BatchPosition, int]]:
        """Return the streams whose first batch comes after the moment, see `first_records`."""
        return {stream: first for stream, first in self.first_records.items() if stream not in self.streams}

    def _note_first(self, index: int | None, record: LogRecord) -> None:
        """Note a record, which may be the first one of its stream. Most need not be decoded for that."""
        self._index, self._record = index, record
        if record.key in self._keys:
            return
        try:
            batch = decode_batch(record.payload)
        except RecordRejectedError:
            return
        self._keys.add(record.key)
        self.first_records.setdefault(batch.stream, (self._batch(batch), batch.block_size))

    def _note(self, view: View, batch: DecodedBatch) -> None:
        if split_group(batch.stream.model)[1] is not None:
            return
        at = self._batch(batch)
        trace = self.streams.get(batch.stream)
        before = None if trace is None else trace.last
        if trace is None or trace.view is not view:
            trace = self._begin_view(trace, view, batch, at)
        change = trace.history.note(view, batch)
        if change.begins_epoch:
            trace.gaps.clear()
        if change.gap is not None or change.is_restart:
            _abandon_resync(trace)
        if change.gap:
            trace.gaps.append(Gap(change.gap.start, change.gap.stop - 1, before, at))
        self._note_steps(trace, batch, at)
        if view.state is ViewState.LIVE:
            trace.gaps.clear()
            trace.degraded_since = None
        elif trace.degraded_since is None:
            trace.degraded_since = at
        if trace.resync is not None and view.state is not ViewState.SYNCING:
            _abandon_resync(trace)  # it took too long
        trace.last = at

    def _batch(self, batch: DecodedBatch) -> BatchPosition:
        return batch_position(self._index, self._record, batch, self._record.timestamp_ms / 1000)

    def _begin_before_log(self, view: View) -> None:
        """Begin the trace of a stream with what it held before the log."""
        block_size = view.block_size
        self.hashes.add_block_size(block_size)
        before = BeforeLog(
            partition=0,
            offset=0,
            time=view.last_batch_at,
            epoch=view.epoch,
            seq=view.next_seq - 1,
            pages_stored=0,
            pages_removed=0,
        )
        trace = StreamTrace(view.stream, block_size, view, before, before, StreamHistory(view))
        trace.degraded_since = None if view.state is ViewState.LIVE else before
        trace.resync = None if view.marks is None else before
        for variant in self.hashes.variants:
            held = view.index.tiers_held(variant.hashes, view.number)
            if variant.column is Column.SEQUENCE and held.any():
                resent = None if view.marks is None else view.index.tiers_marked(variant.hashes, view.marks)
                self._past(trace, variant).begin_with(held, self._number(before), resent)
        self._register(trace)

    def _register(self, trace: StreamTrace) -> None:
        self.streams[trace.stream] = trace
        self.by_worker.setdefault(trace.stream.worker, {})[trace.stream] = trace

    def _begin_view(
        self, before: StreamTrace | None, view: View, batch: DecodedBatch, at: BatchPosition
    ) -> StreamTrace:
        """Begin a trace, or continue one with a new view: the worker has started again with other pages."""
        self.hashes.add_block_size(batch.block_size)
        trace = StreamTrace(batch.stream, batch.block_size, view, at, at, StreamHistory())
        if before is not None:
            trace.history, trace.first, trace.page_histories = before.history, before.first, before.page_histories
            number = self._number(at)
            for past in trace.page_histories.values():
                past.clear(number)
        self._register(trace)
        return trace

    def _note_steps(self, trace: StreamTrace, batch: DecodedBatch, at: BatchPosition) -> None:
        for step in batch.steps:
            match step:
                case StoredPages():
                    for past, pages in self._found(trace, batch, step):
                        past.store(pages, step.medium, self._number(at))
                case RemovedPages():
                    for past, pages in self._found(trace, batch, step):
                        past.remove(pages, step.medium, self._number(at))
                case AllBlocksCleared():
                    for past in trace.page_histories.values():
                        past.clear(self._number(at))
                case SnapshotBegin():
                    trace.resync = at
                    for past in trace.page_histories.values():
                        past.begin_resync()
                case SnapshotEnd():
                    trace.resync = None
                    for past in trace.page_histories.values():
                        past.end_resync(self._number(at))

    def _found(
        self, trace: StreamTrace, batch: DecodedBatch, step: StoredPages | RemovedPages
    ) -> Iterator[tuple[PageHistory, np.ndarray]]:
        """Yield the page_histories that an event touches, with the pages of the prompt in it."""
        for variant, _, pages in self.hashes.find(Column.SEQUENCE, step.hashes):
            yield self._past(trace, variant), pages
        for variant, positions, pages in self.hashes.find(Column.BLOCK, step.block_hashes):
            if isinstance(step, StoredPages) and trace.rules.get(variant.number) is None:
                self._recognise(trace, variant, step.hashes[positions], pages)
            if variant.number in trace.rules:
                yield self._past(trace, variant), pages

    def _recognise(self, trace: StreamTrace, variant: Variant, hashes: U64Array, pages: np.ndarray) -> None:
        """Find out how the worker hashes pages that it stores under the engine's names of the prompt's pages."""
        if not self.hashes.is_known(hashes):
            asked = self.hashes.asked_rule(variant.rule.block_size)._replace(is_bigram=variant.rule.is_bigram)
            trace.rules[variant.number] = self._rule_finder.find(self._record, asked, hashes, pages)

    def _past(self, trace: StreamTrace, variant: Variant) -> PageHistory:
        past = trace.page_histories.get(variant.number)
        if past is None:
            past = trace.page_histories[variant.number] = PageHistory(len(variant.hashes))
            if trace.resync is not None:
                past.begin_resync()
        return past

    def _number(self, batch: BatchPosition) -> int:
        if not self.batches or self.batches[-1] is not batch:
            self.batches.append(batch)
        return len(self.batches) - 1


def _batch_of(run: PlainRun, row: int) -> BatchPosition:
    columns = run.batches.columns
    arrays, record = columns.arrays, columns.rows[row].tolist()
    batch = arrays.batches[row].tolist()
    events = arrays.events[batch[FIRST_EVENT] : batch[END_EVENT]]
    removed = int(events[events[:, IS_REMOVAL] == 1, NUM_PAGES].sum())
    return BatchPosition(
        index=run.batches.first_index + row,
        partition=record[PARTITION],
        offset=record[OFFSET],
        time=record[TIMESTAMP_MS] / 1000,
        epoch=batch[EPOCH],
        seq=batch[SEQ],
        pages_stored=int(events[:, NUM_PAGES].sum()) - removed,
        pages_removed=removed,
    )


def _abandon_resync(trace: StreamTrace) -> None:
    trace.resync = None
    for past in trace.page_histories.values():
        past.abandon_resync()
