"""What the events of a log show, stream by stream."""

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from analysis.audit.curves import AuditCurves
from analysis.audit.report import AuditReport, Degraded, Rates, Resync, StreamReport
from analysis.audit.residency import BatchTime, ResidencyIndex, bounded, milliseconds
from analysis.stream_history import StreamHistory, batch_position
from indexer.replay import Replay
from indexer.settings import IndexerSettings
from indexer.views import View, ViewCounters, ViewState
from kv_events.codec import DecodedBatch, RemovedPages, StoredPages
from kv_events.http.explanations import BatchPosition
from kv_events.records import LogRecord
from kv_events.schema import BATCHES_LOST, CLOSED, AllBlocksCleared, SnapshotBegin, SnapshotEnd, counted_reason
from kv_events.streams import StreamId

_MOST_RESYNCS = 20
_MOST_PREFIXES = 10
_MAX_PAGES = 2**26
_MAX_STREAMS = 65_536
_MAX_NAMESPACES = 4096
_MOST_SECONDS = 4096
"""Seconds of which pages are counted at one time. Records are not quite in the order of time."""


@dataclass
class _Stream:
    number: int
    namespace: int
    view: View
    report: StreamReport
    history: StreamHistory = field(default_factory=StreamHistory)
    mark: int = 0
    resync: Resync | None = None
    """The one in progress."""
    not_live_since: float | None = None
    degraded: Degraded | None = None
    """The publisher's reason after the last batch."""
    degraded_at: float = 0.0
    num_lost: int = 0
    """Batches that its publisher has reported as lost since it had no reason."""
    is_partial: bool = False
    """Whether the view is incomplete only because of what precedes the log."""


class StreamAudit:
    """Applies the records of a log to views, as an indexer does, and notes what happens."""

    def __init__(self, churn_s: float, views: Replay | None = None, series: AuditCurves | None = None) -> None:
        """views: before the first record of the log; they are changed. None: empty ones."""
        self.replay = views or Replay(settings_of_audits())
        self.replay.applier.on_applied.append(self._note)
        self.replay.forgets = False  # a stream that was silent for long is part of the report
        self.book = ResidencyIndex(churn_s)
        self.num_batches = 0
        self._series = series
        self._streams: dict[StreamId, _Stream] = {}
        self._namespaces: dict[tuple[str, str, int], int] = {}
        self._num_pages = 0
        self._pages_by_second: OrderedDict[int, int] = OrderedDict()  # of the last seconds, in the order of the log
        self._peak = (0, 0)  # pages and second of the busiest one
        self._record: tuple[int, LogRecord]
        self._report = AuditReport(log="", churn_s=churn_s)
        self._begin_with_views()

    def _begin_with_views(self) -> None:
        """Note what the streams held before the log. Nothing of before is counted."""
        self.replay.applier.dead_letters.counts.clear()
        before = BatchTime(round((self.replay.now - self._report.churn_s) * 1000) - 1, 0)
        for view in self.replay.namespaces.views:
            view.counters = ViewCounters()
            stream = self._add(view, view.block_size)
            stream.history, stream.report.epochs = StreamHistory(view), 1
            lacks_batches = self.replay.lacks_beginning and view.state is not ViewState.LIVE
            stream.is_partial = lacks_batches or view.state is ViewState.STALE
            if lacks_batches:
                stream.report.earlier_batches = view.next_seq
            if view.marks is not None:
                stream.mark = 1
                began = bounded(view.resync_began)
                stream.resync = Resync(stream=stream.report.stream, reason="began before the log", time=began)
            self.book.begin_with(stream.number, stream.namespace, view, before)
            if self._series is not None:
                self._series.begin_with(stream.report, view)

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

    @property
    def workers(self) -> set[str]:
        """Workers of which there was a batch."""
        return {stream.worker for stream in self._streams}

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
        report.lifetime_p50_s = self.book.median_lifetimes()
        report.untracked = self.book.num_untracked
        report.orphans = self.book.num_orphans(len(self._streams))
        report.rates = self._rates()
        for each in self.book.hottest(_MOST_PREFIXES):
            holders = {
                name.worker
                for name, stream in self._streams.items()
                if self.book.holds(stream.number, each.sequence_hash)
            }
            report.hottest.append(msgspec.structs.replace(each, workers=len(holders)))
        return report

    def _rates(self) -> Rates:
        report = self._report
        seconds = max(1e-3, report.last_time - report.first_time)
        peak, peak_at = max([self._peak, *((pages, second) for second, pages in self._pages_by_second.items())])
        return Rates(
            pages_per_s=self._num_pages / seconds,
            peak_pages_per_s=peak,
            peak_time=float(peak_at) if peak else None,
            records_per_s=report.records / seconds,
            bytes_per_s=report.bytes / seconds,
        )

    # --- one batch that was applied ---------------------------------------------------------------------------------

    def _note(self, view: View, batch: DecodedBatch) -> None:
        stream = self._stream(view, batch)
        self.num_batches += 1
        is_known = stream.history.seq >= 0
        change = stream.history.note(view, batch)
        if change.gap is not None:
            self._note_gap(stream, batch, change.gap, is_known=is_known)
        stream.report.epochs += change.begins_epoch
        stream.report.restarts += change.is_restart
        if change.gap is not None or change.begins_epoch:
            self._end_resync(stream, bounded(batch.timestamp), is_complete=False)  # both cut it off
        self._note_steps(stream, batch, was_swept=change.is_resynced)
        is_bad = change.is_wrong and (change.is_resynced or not stream.is_partial)
        stream.report.digest_mismatches += is_bad
        if is_bad and view.position.first_missing is None and stream.report.first_bad_batch is None:
            stream.report.first_bad_batch = self._place(batch)
        if stream.resync is not None and view.state is not ViewState.SYNCING:
            self._end_resync(stream, bounded(batch.timestamp), is_complete=False)
        self._note_state(stream, bounded(batch.timestamp))
        stream.report.batches += 1
        stream.report.heartbeats += not batch.steps
        stream.report.bytes += len(self._record[1].payload)
        if self._series is not None:
            seen = change._replace(gap=change.gap if is_known else None, is_wrong=is_bad)
            at_ms, is_sound = self._record[1].timestamp_ms, stream.not_live_since is None
            self._series.note_batch(at_ms, stream.report, view, self.book.totals, seen, is_sound=is_sound)

    def _stream(self, view: View, batch: DecodedBatch) -> _Stream:
        found = self._streams.get(view.stream)
        if found is None:
            found = self._add(view, batch.block_size)
        elif found.view is not view:  # a new incarnation with another page size
            self._end(found)
            self.book.sweep(found.number)
            found.namespace = self.namespace_number(view.stream.model, view.stream.tenant, batch.block_size)
            found.view = view
        return found

    def _add(self, view: View, block_size: int) -> _Stream:
        namespace = self.namespace_number(view.stream.model, view.stream.tenant, block_size)
        report = StreamReport(stream=view.stream.key, worker=view.stream.worker)
        found = self._streams[view.stream] = _Stream(len(self._streams), namespace, view, report)
        return found

    def _end(self, stream: _Stream) -> None:
        """Add the counters of a view that gets no more batches."""
        self._end_resync(stream, self._report.last_time, is_complete=False)
        counters, report = stream.view.counters, stream.report
        report.resyncs += counters.resyncs
        report.clears += counters.clears
        report.duplicate_batches += counters.duplicate_batches
        report.old_epoch_batches += counters.old_epoch_batches

    def _note_gap(self, stream: _Stream, batch: DecodedBatch, gap: range, *, is_known: bool) -> None:
        if not is_known:
            stream.report.earlier_batches, stream.is_partial = batch.seq, True
            return
        stream.is_partial = False
        stream.report.gaps += 1
        stream.report.missing_batches += len(gap)
        if stream.report.first_gap is None:
            stream.report.first_gap = self._place(batch)

    def _place(self, batch: DecodedBatch) -> BatchPosition:
        return batch_position(*self._record, batch, bounded(batch.timestamp))

    def _note_steps(self, stream: _Stream, batch: DecodedBatch, *, was_swept: bool) -> None:
        at = BatchTime(milliseconds(batch.timestamp), self.num_batches)
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
                    stream.is_partial = False
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

    def _count_pages(self, at: BatchTime, number: int) -> None:
        second = at.ms // 1000
        self._num_pages += number
        self._pages_by_second[second] = self._pages_by_second.get(second, 0) + number
        if len(self._pages_by_second) > _MOST_SECONDS:
            ended, pages = self._pages_by_second.popitem(last=False)
            self._peak = max(self._peak, (pages, ended))

    def _count_batch(self, resync: Resync) -> None:
        resync.batches += 1
        resync.bytes += len(self._record[1].payload)

    def _end_resync(self, stream: _Stream, at: float, *, is_complete: bool) -> None:
        resync, stream.resync = stream.resync, None
        if resync is not None:
            resync.seconds, resync.is_complete = max(0.0, at - resync.time), is_complete
            report = self._report
            report.num_resyncs += 1
            report.resync_pages += resync.pages
            report.resyncs = sorted([*report.resyncs, resync], key=lambda each: -each.pages)[:_MOST_RESYNCS]

    def _note_state(self, stream: _Stream, at: float) -> None:
        """Sum up the time during which a view is not live, from batch to batch."""
        if stream.not_live_since is not None:
            stream.report.not_live_s += max(0.0, at - stream.not_live_since)
        is_live = stream.view.state is ViewState.LIVE
        stream.is_partial = stream.is_partial and not is_live and stream.resync is None
        has_reason = stream.degraded is not None or stream.view.degraded_reason != ""
        is_degraded = has_reason and self._note_reason(stream, at)
        stream.not_live_since = None if (is_live and not is_degraded) or stream.is_partial else at

    def _note_reason(self, stream: _Stream, at: float) -> bool:
        """Sum up the time of a degraded reason, from batch to batch. Returns whether there is one."""
        text, before = stream.view.degraded_reason, stream.degraded
        if before is not None:
            before.seconds += max(0.0, at - stream.degraded_at)
        stream.degraded, stream.degraded_at = None, at
        if not text or text == CLOSED:
            stream.num_lost = 0
            return False
        kind, number = counted_reason(text)
        now = stream.report.degraded.setdefault(kind, Degraded(text=text, since=at))
        now.times += now is not before
        if kind == BATCHES_LOST:
            stream.report.engine_losses += number - (stream.num_lost if number >= stream.num_lost else 0)
            stream.num_lost = number
        now.text, stream.degraded = text, now
        return True


def settings_of_audits() -> IndexerSettings:
    """Return bounds within which views of an audit have room for whatever a router had room for."""
    return IndexerSettings.ignoring_environment(
        max_pages=_MAX_PAGES, max_streams=_MAX_STREAMS, max_namespaces=_MAX_NAMESPACES
    )
