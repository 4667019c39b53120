"""Reads a log once: rebuilds the views with the ordinary replay, and follows the asked pages beside it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from analysis.explain.asked_prompt import AskedPrompt
from analysis.explain.decisions import RecentDecisions
from analysis.explain.hash_rules import Column, HashRule, PromptHashes, RuleFinder, Variant
from analysis.explain.page_history import PageHistory, partings
from analysis.stream_history import StreamHistory, batch_position
from indexer.applier import PlainRun
from indexer.replay import ApplyObserver, Replay
from indexer.views import View, ViewState
from kv_events.codec import DecodedBatch, RemovedPages, StoredPages, batch_or_none, stores_with_tokens
from kv_events.hashing import U64Array
from kv_events.http.explanations import BatchPosition
from kv_events.kernels.batches import END_EVENT, EPOCH, FIRST_EVENT, IS_REMOVAL, NUM_PAGES, PAGES, ROW, SEQ
from kv_events.kernels.log_records import OFFSET, PARTITION, PAYLOAD, TIMESTAMP_MS
from kv_events.log.moments import LogMoment
from kv_events.log.reader import BatchColumns, RecordChunk
from kv_events.records import Channel, LogRecord
from kv_events.reservations import CHOICES
from kv_events.schema import AllBlocksCleared, SnapshotBegin, SnapshotEnd
from kv_events.streams import StreamId, split_group

History: TypeAlias = Iterable[RecordChunk] | Iterable[tuple[int | None, LogRecord]]
"""All records of a log, as chunks or each with its index; None for records of a topic."""

_REPLACED_S = 1.0
_MOST_PARTINGS = 16


class BeforeLog(BatchPosition, frozen=True, kw_only=True):
    """The last batch before the log. Only its time, epoch and number are known, from the key frame there."""


class Gap(NamedTuple):
    """Batches that are missing in the log."""

    first_seq: int
    last_seq: int
    before: BatchPosition | None
    """The last batch before the gap. None: the log begins after them."""
    after: BatchPosition


class Replacement(NamedTuple):
    """What took the place of evicted pages: the next pages that the worker stored, at most a second later."""

    batch: BatchPosition
    first_hash: int
    pages_before: int
    """Pages that the worker held before the eviction."""
    pages_after: int
    """Pages that it held after the store."""


class Evicted(NamedTuple):
    """A batch that removed pages of the prompt."""

    number: int
    batch: BatchPosition
    pages_before: int
    pages_after: int


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
    resync_gap: Gap | None = None
    """The gap before the resync in progress."""
    gaps_before: dict[int, Gap] = field(default_factory=dict)
    """Number of the batch that ended a resync -> the gap before it."""
    evicted: Evicted | None = None
    """The last batch that removed pages of the prompt, until the worker stores something."""
    replacements: dict[int, Replacement] = field(default_factory=dict)
    """Number of a batch that removed pages of the prompt -> what took their place."""
    later: dict[int, BatchPosition] = field(default_factory=dict)
    """Page that is missing at the moment -> the batch that stores it later."""
    partings: dict[int, dict[int, int]] = field(default_factory=dict)
    """Page -> hash of another page that was stored in its place -> leading tokens that both have in common."""
    has_tokens: bool = False
    """Whether the log has tokens of the worker, and so the names of adapters and salts."""
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
        self.decisions = RecentDecisions()
        self._by_key: dict[bytes, StreamTrace] = {}
        self._awaited: dict[bytes, tuple[BatchPosition, int, int]] = {}
        """Key of a stream -> its last batch of the moment, the first page that is missing then, and its hash."""
        self.first_records: dict[StreamId, tuple[BatchPosition, int]] = {}
        """The first readable record of each stream, before or after the moment, and its block size."""
        self._rule_finder = RuleFinder(self.hashes)
        self._keys: set[bytes] = set()
        self._index: int | None = None
        self._record = LogRecord(0, 0, 0, b"", b"")
        self._columns: BatchColumns | None = None
        self._num_evicted = 0
        """Streams that evicted pages of the prompt, and stored nothing since."""
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
            elif each[1].channel in CHOICES:
                self.decisions.take(each[1].channel, each[1].payload)
            elif each[1].channel == Channel.EVENTS:
                newest = max(newest, each[1].timestamp_ms / 1000)
                index, record = each
                if until.takes(record if until.index is None else record._replace(offset=index or 0)):
                    self.take_one(index, record, partial(self.replay.apply, record))
                else:
                    self._note_later(index, record)
        if until.time_s is not None and self.replay.applier.records:
            self.replay.pass_time(min(until.time_s, newest))

    def _follow_chunk(self, chunk: RecordChunk, until: LogMoment) -> float:
        """Apply the records of a chunk that are before the moment. Returns the latest time of an event."""
        is_event = chunk.channels == Channel.EVENTS
        is_before = chunk.before(until)
        wanted = is_event & is_before
        self.decisions.take_chunk(chunk, is_before)
        self.replay.apply_chunk(chunk, wanted=wanted, observer=self)
        for row in np.flatnonzero(is_event & ~wanted).tolist():
            self._note_later(chunk.first_index + row, chunk.record(row))
        return int(chunk.timestamps_ms[is_event].max(initial=0)) / 1000

    def mark_not_plain(self, columns: BatchColumns) -> None:
        """Let batches with pages of the prompt be applied one by one."""
        self._columns, self._num_variants = columns, len(self.hashes.variants)
        events = columns.arrays.events
        for table in (self.hashes.sequence_table, self.hashes.block_table):
            positions, _ = table.find(columns.arrays.words)
            found = np.searchsorted(events[:, PAGES], positions, "right") - 1
            columns.arrays.plain[events[found, ROW]] = 0
        for first_page in self.hashes.first_pages():
            at = columns.data.find(first_page)
            while at >= 0:
                row = int(np.searchsorted(columns.rows[:, PAYLOAD], at, "right")) - 1
                columns.arrays.plain[max(row, 0)] = 0
                at = columns.data.find(first_page, at + 1)

    def take_plain(self, run: PlainRun) -> None:
        """Note batches without pages of the prompt, after which their views are live, as before."""
        for number, view in run.views.items() if self._num_evicted else ():
            trace = self.streams.get(view.stream)
            if trace is not None and trace.evicted is not None:
                rows = run.rows[run.batches.arrivals.streams[run.rows] == number]
                self._find_replacement(trace, run, rows.tolist())
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

    def _find_replacement(self, trace: StreamTrace, run: PlainRun, rows: list[int]) -> None:
        arrays = run.batches.columns.arrays
        for row in rows:
            first, end = arrays.batches[row, FIRST_EVENT], arrays.batches[row, END_EVENT]
            for event in arrays.events[first:end].tolist():
                if not event[IS_REMOVAL] and event[NUM_PAGES]:
                    self._replace(trace, _batch_of(run, row), int(arrays.words[event[PAGES]]))
                    return

    def _replace(self, trace: StreamTrace, at: BatchPosition, first_hash: int) -> None:
        """Note the first pages that a worker stores with or after an eviction."""
        evicted, trace.evicted = trace.evicted, None
        self._num_evicted -= evicted is not None
        if evicted is not None and at.time - evicted.batch.time <= _REPLACED_S:
            is_same = at.seq == evicted.batch.seq
            after = evicted.pages_after if is_same else evicted.pages_after + at.pages_stored - at.pages_removed
            trace.replacements[evicted.number] = Replacement(at, first_hash, evicted.pages_before, after)

    def _note_later(self, index: int | None, record: LogRecord) -> None:
        """Note a record after the moment, which may store a page that is missing."""
        self._note_first(index, record)
        trace = self._by_key.get(record.key)
        if trace is None:
            return
        last, page, missing = self._awaited.get(record.key, (None, 0, 0))
        if last is not trace.last:
            asked = self.hashes.asked(trace.block_size)
            past = trace.page_histories.get(asked.number)
            page = 0 if past is None else past.prefix
            missing = int(asked.hashes[page]) if page < len(asked.hashes) else 0
            self._awaited[record.key] = trace.last, page, missing
        if missing and page not in trace.later and missing.to_bytes(8, "little") in record.payload:
            batch = batch_or_none(record.payload)
            if batch is not None and any(
                isinstance(step, StoredPages) and missing in step.hashes for step in batch.steps
            ):
                trace.later[page] = self._batch(batch)

    def _note_first(self, index: int | None, record: LogRecord) -> None:
        """Note a record, which may be the first one of its stream. Most need not be decoded for that."""
        self._index, self._record = index, record
        if record.key in self._keys:
            return
        if (batch := batch_or_none(record.payload)) is not None:
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
        if change.gap is not None or change.begins_epoch:
            _abandon_resync(trace)
        if change.gap:
            trace.gaps.append(Gap(change.gap.start, change.gap.stop - 1, before, at))
        if at.pages_stored:
            self._note_tokens(trace, batch)
        self._note_steps(trace, batch, at)
        if trace.evicted is not None:
            stores = (step for step in batch.steps if isinstance(step, StoredPages) and len(step.hashes))
            if (first := next(stores, None)) is not None:
                self._replace(trace, at, int(first.hashes[0]))
        if view.state is ViewState.LIVE:
            trace.gaps.clear()
        if view.state is ViewState.LIVE and not view.degraded_reason:
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
        trace.degraded_since = None if view.state is ViewState.LIVE and not view.degraded_reason else before
        trace.resync = None if view.marks is None else before
        for variant in self.hashes.variants:
            held = view.index.tiers_held(variant.hashes, view.number)
            if variant.column is Column.SEQUENCE and held.any():
                resent = None if view.marks is None else view.index.tiers_marked(variant.hashes, view.marks)
                self._past(trace, variant).begin_with(held, self._number(before), resent)
        self._register(trace)

    def _register(self, trace: StreamTrace) -> None:
        self.streams[trace.stream] = self._by_key[trace.stream.key.encode()] = trace
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
                        after = sum(trace.view.num_pages)
                        self._num_evicted += trace.evicted is None
                        before = after + at.pages_removed - at.pages_stored
                        trace.evicted = Evicted(self._number(at), at, before, after)
                case AllBlocksCleared():
                    for past in trace.page_histories.values():
                        past.clear(self._number(at))
                case SnapshotBegin():
                    trace.resync, trace.resync_gap = at, trace.gaps[-1] if trace.gaps else None
                    for past in trace.page_histories.values():
                        past.begin_resync()
                case SnapshotEnd():
                    if trace.resync is not None and trace.resync_gap is not None:
                        trace.gaps_before[self._number(at)] = trace.resync_gap
                    trace.resync = None
                    for past in trace.page_histories.values():
                        past.end_resync(self._number(at))

    def _note_tokens(self, trace: StreamTrace, batch: DecodedBatch) -> None:
        """Note the names in a record, and where other prompts part from this one, if the record has tokens."""
        tokens, size = self.prompt.tokens, batch.block_size
        if tokens is None:
            return
        stores = stores_with_tokens(self._record.payload)
        trace.has_tokens |= bool(stores)
        self.hashes.add_names((event.extra_key for event in stores if event.extra_key), size)
        for event in stores:
            for page, other, num_common in partings(event, tokens, self.hashes.asked(size).hashes, size):
                found = trace.partings.setdefault(page, {})
                if len(found) < _MOST_PARTINGS:
                    found[other] = num_common

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
