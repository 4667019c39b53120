"""What the events of a log show, stream by stream."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from heapq import nlargest
from typing import NamedTuple

from analysis.audit.book import Moment, PageBook, bounded, milliseconds
from analysis.audit.report import AuditReport, HotPrefix, Place, Rates, Resync, StreamReport
from analysis.audit.series import AuditSeries
from indexer.replay import Replay
from indexer.settings import IndexerSettings
from indexer.views import View, ViewState
from kv_events.codec import DecodedBatch, RemovedPages, StoredPages
from kv_events.records import LogRecord
from kv_events.schema import AllBlocksCleared, SnapshotBegin, SnapshotEnd
from kv_events.streams import StreamId

_MOST_RESYNCS = 20
_MOST_PREFIXES = 10
_MAX_PAGES = 2**26
_MAX_STREAMS = 65_536
_MAX_SECONDS = 2**20
"""Distinct seconds of which pages are counted, 12 days. Forged times may have more."""


class _Counts(NamedTuple):
    """Counters of a view after a batch."""

    gaps: int
    restarts: int
    resyncs: int
    digest_mismatches: int


_NONE = _Counts(0, 0, 0, 0)


@dataclass
class _Stream:
    """One stream while the log is read."""

    number: int
    namespace: int
    view: View
    report: StreamReport
    before: _Counts = _NONE
    epoch: int = -1
    seq: int = -1
    mark: int = 0
    resync: Resync | None = None
    """The one in progress."""
    not_live_since: float | None = None
    is_partial: bool = False
    """Whether the view is only in doubt because the log begins after the first batches."""


class EventAudit:
    """Applies the records of a log to views, as an indexer does, and notes what happens."""

    def __init__(self, churn_s: float, series: AuditSeries | None = None) -> None:
        settings = IndexerSettings.ignoring_environment(
            max_pages=_MAX_PAGES, max_streams=_MAX_STREAMS, max_namespaces=4096
        )
        self.replay = Replay(settings)
        self.replay.applier.on_applied.append(self._note)
        self.book = PageBook(churn_s)
        self.num_batches = 0
        self._series = series
        self.resyncs: list[Resync] = []
        self._streams: dict[StreamId, _Stream] = {}
        self._namespaces: dict[tuple[str, str, int], int] = {}
        self._num_pages = 0
        self._pages_by_second: Counter[int] = Counter()
        self._record: tuple[int, LogRecord]
        self._report = AuditReport(log="", churn_s=churn_s)

    def apply(self, index: int, record: LogRecord) -> None:
        """Apply one record of events."""
        report = self._report
        time_s = record.timestamp_ms / 1000
        if not report.records:
            report.first_time = report.last_time = time_s
        report.first_time, report.last_time = min(report.first_time, time_s), max(report.last_time, time_s)
        report.records += 1
        report.bytes += len(record.payload)
        self._record = index, record
        letters = self.replay.applier.dead_letters.counts
        before = letters.total()
        self.replay.apply(record)
        if letters.total() > before and report.first_unreadable is None:
            report.first_unreadable = index

    def stream_number(self, stream: StreamId) -> int | None:
        """Return the number of a stream in the book, or None if it is unknown."""
        found = self._streams.get(stream)
        return None if found is None else found.number

    def namespace_number(self, model: str, tenant: str, block_size: int) -> int:
        """Return the number of a namespace in the book."""
        return self._namespaces.setdefault((model, tenant, block_size), len(self._namespaces))

    def report(self) -> AuditReport:
        """Return what was found. Called once, at the end."""
        report, replay = self._report, self.replay
        for stream in self._streams.values():
            self._end(stream)
            stream.report.pages_held = sum(stream.view.num_pages)
            report.streams.append(stream.report)
        report.unreadable = dict(replay.applier.dead_letters.counts)
        report.pages = self.book.counts()
        report.untracked = self.book.num_untracked
        report.orphans = self.book.num_orphans(len(self._streams))
        report.num_resyncs = len(self.resyncs)
        report.resync_pages = sum(each.pages for each in self.resyncs)
        report.resyncs = nlargest(_MOST_RESYNCS, self.resyncs, key=lambda each: each.pages)
        report.rates = self._rates()
        report.hottest = [
            HotPrefix(
                sequence_hash=each.sequence_hash,
                pages=each.pages,
                requests=each.requests,
                stores=each.stores,
                workers=len(
                    {
                        name.worker
                        for name, stream in self._streams.items()
                        if self.book.holds(stream.number, each.sequence_hash)
                    }
                ),
            )
            for each in self.book.hottest(_MOST_PREFIXES)
        ]
        return report

    def _rates(self) -> Rates:
        report = self._report
        seconds = max(1e-3, report.last_time - report.first_time)
        peak_at, peak = max(self._pages_by_second.items(), key=lambda item: item[1], default=(0, 0))
        return Rates(
            pages_per_s=self._num_pages / seconds,
            peak_pages_per_s=peak,
            peak_time=float(peak_at),
            records_per_s=report.records / seconds,
            bytes_per_s=report.bytes / seconds,
        )

    # --- one batch that was applied ---------------------------------------------------------------------------------

    def _note(self, view: View, batch: DecodedBatch) -> None:
        stream = self._stream(view, batch)
        self.num_batches += 1
        now, before = view.counters, stream.before
        after = _Counts(now.gaps, now.restarts, now.resyncs, now.digest_mismatches)
        if after.gaps > before.gaps:
            self._note_gap(stream, batch)
        if batch.epoch != stream.epoch:
            stream.report.epochs += 1
        if after.gaps > before.gaps or after.restarts > before.restarts:
            self._end_resync(stream, bounded(batch.timestamp), is_complete=False)  # a gap and a restart cut it off
        self._note_steps(stream, batch, was_swept=after.resyncs > before.resyncs)
        is_bad = after.digest_mismatches > before.digest_mismatches and view.position.first_missing is None
        if is_bad and stream.report.first_bad_batch is None:
            stream.report.first_bad_batch = self._place(batch)
        if stream.resync is not None and view.state is not ViewState.SYNCING:
            self._end_resync(stream, bounded(batch.timestamp), is_complete=False)
        self._note_state(stream, bounded(batch.timestamp))
        stream.report.batches += 1
        stream.report.heartbeats += not batch.steps
        stream.report.bytes += len(self._record[1].payload)
        stream.epoch, stream.seq, stream.before = batch.epoch, batch.seq, after
        if self._series is not None:
            record = self._record[1]
            self._series.note_batch(
                record.timestamp_ms,
                stream.report,
                view,
                self.book.totals,
                num_bytes=len(record.payload),
                is_sound=stream.not_live_since is None,
            )

    def _stream(self, view: View, batch: DecodedBatch) -> _Stream:
        found = self._streams.get(view.stream)
        if found is None:
            namespace = self.namespace_number(view.stream.model, view.stream.tenant, batch.block_size)
            report = StreamReport(stream=view.stream.key, worker=view.stream.worker)
            found = self._streams[view.stream] = _Stream(len(self._streams), namespace, view, report)
        elif found.view is not view:  # a new incarnation with another page size
            self._end(found)
            self.book.sweep(found.number)
            found.namespace = self.namespace_number(view.stream.model, view.stream.tenant, batch.block_size)
            found.view, found.before = view, _NONE
        return found

    def _end(self, stream: _Stream) -> None:
        """Add the counters of a view that gets no more batches."""
        self._end_resync(stream, self._report.last_time, is_complete=False)
        counters, report = stream.view.counters, stream.report
        report.digest_mismatches += counters.digest_mismatches
        report.resyncs += counters.resyncs
        report.clears += counters.clears
        report.duplicate_batches += counters.duplicate_batches
        report.old_epoch_batches += counters.old_epoch_batches

    def _note_gap(self, stream: _Stream, batch: DecodedBatch) -> None:
        if stream.seq < 0:
            stream.report.earlier_batches, stream.is_partial = batch.seq, True
            return
        stream.is_partial = False
        stream.report.gaps += 1
        expected = stream.seq + 1 if batch.epoch == stream.epoch else 0
        stream.report.missing_batches += max(0, batch.seq - expected)
        if stream.report.first_gap is None:
            stream.report.first_gap = self._place(batch)

    def _place(self, batch: DecodedBatch) -> Place:
        index, record = self._record
        return Place(
            index=index,
            partition=record.partition,
            offset=record.offset,
            time=bounded(batch.timestamp),
            epoch=batch.epoch,
            seq=batch.seq,
        )

    def _note_steps(self, stream: _Stream, batch: DecodedBatch, *, was_swept: bool) -> None:
        at = Moment(milliseconds(batch.timestamp), self.num_batches)
        if stream.resync is not None:
            self._count_batch(stream.resync)
        for step in batch.steps:
            match step:
                case StoredPages():
                    is_resync = stream.resync is not None
                    self.book.store(stream.number, stream.namespace, step, at, stream.mark, is_resync=is_resync)
                    self._count_pages(at, len(step.hashes))
                    if stream.resync is not None:
                        stream.resync.pages += len(step.hashes)
                case RemovedPages():
                    self.book.remove(stream.number, step, at)
                    self._count_pages(at, len(step.hashes))
                case AllBlocksCleared():
                    self.book.sweep(stream.number)
                case SnapshotBegin():
                    self._end_resync(stream, bounded(batch.timestamp), is_complete=False)
                    stream.mark += 1
                    stream.resync = Resync(
                        stream=stream.report.stream, reason=step.reason, time=bounded(batch.timestamp)
                    )
                    self._count_batch(stream.resync)
                case SnapshotEnd():
                    if was_swept and stream.resync is not None:
                        self.book.sweep(stream.number, stream.mark)
                        self._end_resync(stream, bounded(batch.timestamp), is_complete=True)

    def _count_pages(self, at: Moment, number: int) -> None:
        second = at.ms // 1000
        self._num_pages += number
        if second in self._pages_by_second or len(self._pages_by_second) < _MAX_SECONDS:
            self._pages_by_second[second] += number

    def _count_batch(self, resync: Resync) -> None:
        resync.batches += 1
        resync.bytes += len(self._record[1].payload)

    def _end_resync(self, stream: _Stream, at: float, *, is_complete: bool) -> None:
        resync, stream.resync = stream.resync, None
        if resync is not None:
            resync.seconds, resync.is_complete = max(0.0, at - resync.time), is_complete
            self.resyncs.append(resync)

    def _note_state(self, stream: _Stream, at: float) -> None:
        """Sum up the time during which a view is not live, from batch to batch."""
        if stream.not_live_since is not None:
            stream.report.not_live_s += max(0.0, at - stream.not_live_since)
        is_live = stream.view.state is ViewState.LIVE
        stream.is_partial = stream.is_partial and not is_live and stream.resync is None
        stream.not_live_since = None if is_live or stream.is_partial else at
