"""The audit of one log, in one pass over its events."""

import os
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from math import isfinite
from pathlib import Path

import msgspec
import numpy as np

from analysis.audit.curves import AuditCurves
from analysis.audit.decision_audit import NEW, NO_OUTCOME, NO_PAGE, DecisionAudit
from analysis.audit.report import AuditReport, Finding, Funnel, HotPrefix, StreamReport
from analysis.audit.residency import milliseconds
from analysis.audit.stream_audit import StreamAudit, settings_of_audits
from indexer.replay import open_beginning
from kv_events.codec import batch_head, stores_with_tokens
from kv_events.decisions import DecisionRecord
from kv_events.errors import RecordRejectedError
from kv_events.http.explanations import BatchPosition
from kv_events.log.event_log import EventLogReader
from kv_events.log.moments import utc_text
from kv_events.log.reader import RecordChunk, scan_log
from kv_events.records import Channel, LogRecord
from kv_events.reservations import (
    CHOICES,
    FOLDERS_BESIDE,
    Progressed,
    ReservationRecord,
    Reserved,
    decode_record,
    singles,
    time_of,
)
from kv_events.runtime.words import count, names, nearest, printable
from kv_events.schema import BATCHES_LOST, ENGINE_UNHEARD
from selection.settings import SelectionSettings

CHURN_S = 10.0
_BESIDE = -1
"""Index of decisions that are in a log of their own: they precede the records of the same millisecond."""


def audit_log(
    folder: Path,
    churn_s: float = CHURN_S,
    on_read: Callable[[int], None] = lambda _: None,
    known_damage: Sequence[str] = (),
    series: AuditCurves | None = None,
    selection: SelectionSettings | None = None,
) -> AuditReport:
    """Audit an event log.

    The log is read twice: for the decisions, then for everything else. Memory is needed for the pages that are held at
    one time and for the distinct pages, about 130 bytes each, and for decisions, of which at most about 1 GiB is in
    memory, but none for records of events. churn_s: seconds for which pages are expected to stay. on_read: called now
    and then with the bytes that were read since. known_damage: what the caller has found, for the report. series:
    collects what happened over time. selection: settings of the service whose choices the log has.

    Raises EventLogError if there is no such log. Damaged parts are named in the report.
    """
    EventLogReader(folder)  # there is such a folder
    beginning = open_beginning(folder, settings_of_audits(), is_bounded=False)
    damage = [*known_damage, *filter(None, [beginning.fault])]
    events = StreamAudit(churn_s, beginning.views, series)
    funnel = DecisionAudit(events, selection or SelectionSettings(), series)
    with closing(SortedDecisions(folder, on_read)) as decisions:
        for chunk in scan_log(folder, lambda error: damage.append(str(error))):
            for row in np.flatnonzero(chunk.channels == Channel.EVENTS).tolist():
                index, record = chunk.first_index + row, chunk.record(row)
                if len(decisions):
                    for decision in decisions.before(_batch_ms(record), index):
                        funnel.take(decision)
                events.apply(index, record)
            on_read(chunk.end - chunk.position)
        for decision in decisions.rest():
            funnel.take(decision)
        report = events.report()
        if series is not None:
            series.finish()
        report.log, report.damage = str(folder), damage + decisions.damage
        if len(decisions):
            report.funnel = funnel.report()
        if decisions.unreadable:
            report.unreadable["decision"] = decisions.unreadable
    add_findings(report)
    return report


def _batch_ms(record: LogRecord) -> int:
    """Return the time of a batch, of which the decisions before it are judged first."""
    head = batch_head(record.payload)
    return milliseconds(head.timestamp) if head is not None and isfinite(head.timestamp) else record.timestamp_ms


class SortedDecisions:
    """The decisions, outcomes and reservations of a log, in the order of their times.

    A temporary file keeps their bytes. A router may report a decision long after it was made. So they are read
    before the events.
    """

    def __init__(self, folder: Path, on_read: Callable[[int], None]) -> None:
        """on_read: see `audit_log`."""
        self.unreadable = 0
        """Records that cannot be decoded."""
        self.damage: list[str] = []
        """Parts of the decisions' own log that cannot be read."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (`close` closes it)
        self._num_bytes = 0
        self._places = array("q")
        """Of each record: its time in milliseconds, its index in the log, the byte at which the file has it, and its
        channel."""
        for chunk in scan_log(folder, lambda _: None):  # the audit reads this log again
            self._add_all(chunk)
            on_read(chunk.end - chunk.position)
        for beside in FOLDERS_BESIDE:
            for chunk in scan_log(folder / beside, lambda error: self.damage.append(str(error))):
                self._add_all(chunk, _BESIDE)
        self._file.flush()
        self._ordered = self._in_order()
        self._next = next(self._ordered, None)

    def __len__(self) -> int:
        return len(self._places) // 4

    def before(self, ms: int, index: int) -> Iterator[DecisionRecord | ReservationRecord]:
        """Yield those that precede a record of this time and index, and were not yielded before."""
        while self._next is not None and self._next[:2] < (ms, index):
            yield self._next[2]
            self._next = next(self._ordered, None)

    def rest(self) -> Iterator[DecisionRecord | ReservationRecord]:
        """Yield those that were not yielded before."""
        return self.before(sys.maxsize, 0)

    def close(self) -> None:
        """Delete the temporary file."""
        self._file.close()

    def _add_all(self, chunk: RecordChunk, given: int | None = None) -> None:
        """given: index of all records. None: their own."""
        for row in np.flatnonzero(np.isin(chunk.channels, CHOICES)).tolist():
            record = chunk.record(row)
            for payload in singles(record.payload):
                self._add(chunk.first_index + row if given is None else given, record.channel, payload)

    def _add(self, index: int, channel: int, payload: bytes) -> None:
        try:
            found = decode_record(channel, payload)
        except RecordRejectedError:
            self.unreadable += 1
            return
        time_s = time_of(found) if isinstance(found, Reserved | Progressed) else found.timestamp
        self._places.extend((milliseconds(time_s), index, self._num_bytes, channel))
        self._num_bytes += self._file.write(payload)

    def _in_order(self) -> Iterator[tuple[int, int, DecisionRecord | ReservationRecord]]:
        """Yield (milliseconds, index, record). Those of the same time and index keep the order of reading."""
        places = np.array(self._places).reshape(-1, 4)
        ends = np.append(places[:, 2], self._num_bytes)[1:]
        in_order = np.lexsort((places[:, 1], places[:, 0]))
        for ms, index, begin, channel, end in map(np.ndarray.tolist, np.column_stack((places, ends))[in_order]):
            yield ms, index, decode_record(channel, os.pread(self._file.fileno(), end - begin, begin))


_MOST_CHARACTERS = 32


def with_texts(
    prefixes: Sequence[HotPrefix], chunks: Iterable[RecordChunk], text_of: Callable[[list[int]], str]
) -> list[HotPrefix]:
    """Return prefixes with the beginning of their first page and the end of their last one.

    chunks: the log. It is read up to the last of these pages. text_of: makes a text of tokens.
    """
    wanted = np.unique([page for each in prefixes for page in (each.first_page, each.sequence_hash)]).astype(np.uint64)
    found: dict[int, str] = {}
    for chunk in chunks:
        if len(found) == len(wanted):
            break
        for row in np.flatnonzero(chunk.channels == Channel.EVENTS).tolist():
            with suppress(msgspec.DecodeError, ValueError):  # of records that break the contract
                for event in stores_with_tokens(chunk.record(row).payload):
                    hashes = np.frombuffer(event.sequence_hashes, "<u8")
                    tokens = np.frombuffer(event.token_ids or b"", "<u4").reshape(len(hashes), -1)
                    for place in np.flatnonzero(np.isin(hashes, wanted)).tolist():
                        found.setdefault(int(hashes[place]), " ".join(text_of(tokens[place].tolist()).split()))
    texts = []
    for each in prefixes:
        begin, end = found.get(each.first_page, ""), found.get(each.sequence_hash, "")
        text = f"{begin[:_MOST_CHARACTERS]} … {end[-_MOST_CHARACTERS:]}" if begin or end else ""
        texts.append(msgspec.structs.replace(each, text=text))
    return texts


_LEAST_WEIGHT = 0.001
_MOST_NAMED = 3
_SHORT_S = 0.05
"""Time for which an engine may be unheard: each stream begins so."""
_LEAST_TIES = 20
_LEAST_EARLY = 3
"""Fewer requests may be chance."""
_NO_FAULTS = (NEW, NO_PAGE, NO_OUTCOME)
"""Causes in the funnel that nobody can do anything about."""


def add_findings(report: AuditReport) -> None:
    """Add the findings and the verdict to a report."""
    report.findings = sorted(_findings(report), key=lambda finding: -finding.weight)
    streams = count(len(report.streams), "stream")
    if not report.streams:
        report.verdict = "The log has no batches."
    elif not report.findings:
        report.verdict = f"No fault found: {streams}, every batch arrived, every digest matches."
    else:
        more = len(report.findings) - 1
        report.verdict = report.findings[0].text + (f" ({count(more, 'further cause')} below)" if more else "")


def _findings(report: AuditReport) -> Iterator[Finding]:
    yield from _of_the_log(report)
    yield from _of_the_streams(report)
    yield from _of_the_pages(report)
    yield from _of_the_funnel(report)


def _of_the_log(report: AuditReport) -> Iterator[Finding]:
    if report.damage:
        parts = count(len(report.damage), "part")
        yield Finding(kind="damage", weight=1.0, text=f"{parts} of the log cannot be read: {report.damage[0]}")
    if report.unreadable:
        number = sum(report.unreadable.values())
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(report.unreadable.items()))
        first = report.first_unreadable
        where = "" if first is None else f", the first record of events is {first}"
        text = f"{count(number, 'record')} cannot be decoded ({reasons}){where}"
        yield Finding(kind="unreadable", weight=number / max(1, report.records), text=text)


def _of_the_streams(report: AuditReport) -> Iterator[Finding]:
    streams = report.streams
    bad = [each for each in streams if each.first_bad_batch is not None]
    if bad:
        first = min(bad, key=lambda each: _time(each.first_bad_batch))
        text = (
            f"{len(bad):,} of {count(len(streams), 'stream')} had batches whose digest differs although none was "
            f"lost: the events do not describe the cache. The first is {_placed(first, first.first_bad_batch)}"
        )
        yield Finding(kind="digest", weight=len(bad) / len(streams), text=text)
    gaps = [each for each in streams if each.gaps]
    if gaps:
        first = min(gaps, key=lambda each: _time(each.first_gap))
        lost = sum(each.missing_batches for each in gaps)
        holes = count(sum(each.gaps for each in gaps), "gap")
        text = (
            f"{len(gaps):,} of {count(len(streams), 'stream')} lost batches: {holes}, "
            f"{count(lost, 'batch', 'batches')} missing. The first is before {_placed(first, first.first_gap)}"
        )
        yield Finding(kind="gap", weight=len(gaps) / len(streams), text=text)
    late = [each for each in streams if each.earlier_batches]
    if late:
        earlier = count(sum(each.earlier_batches for each in late), "batch", "batches")
        text = (
            f"the log begins after the first batches of {len(late):,} of {count(len(streams), 'stream')}: {earlier} "
            "before it; pages that were stored in them count as not held"
        )
        yield Finding(kind="before the log", weight=0.0, text=text)
    restarted = sorted((each for each in streams if each.restarts), key=lambda each: -each.restarts)
    if restarted:
        named = names([f"{each.stream} {count(each.restarts, 'time')}" for each in restarted], _MOST_NAMED)
        text = f"{count(len(restarted), 'stream')} restarted, and lost their pages: {named}"
        yield Finding(kind="restart", weight=len(restarted) / len(streams), text=text)
    yield from _of_the_engines(streams)
    not_live = sum(each.not_live_s for each in streams)
    whole = len(streams) * (report.last_time - report.first_time)
    if whole and not_live / whole >= _LEAST_WEIGHT:
        text = f"views were stale, syncing or degraded for {not_live / whole:.1%} of the time"
        yield Finding(kind="not live", weight=min(1.0, not_live / whole), text=text)


def _of_the_engines(streams: Sequence[StreamReport]) -> Iterator[Finding]:
    """Yield what publishers said about their own knowledge."""
    for kind in sorted({kind for each in streams for kind in each.degraded}):
        having = sorted((each for each in streams if kind in each.degraded), key=lambda each: each.degraded[kind].since)
        first = having[0].degraded[kind]
        lasted = sum(each.degraded[kind].seconds for each in having)
        lost = sum(each.engine_losses for each in having) if kind == BATCHES_LOST else 0
        if kind == ENGINE_UNHEARD and lasted < _SHORT_S * len(having):
            continue
        number = f" ({count(lost, 'batch', 'batches')})" if lost else ""
        text = f'{len(having):,} of {count(len(streams), "stream")} reported "{printable(kind)}"{number}'
        text += f" for {lasted:,.1f} s. The first is {printable(having[0].stream)}, {utc_text(first.since)}"
        yield Finding(kind=kind, weight=len(having) / len(streams), text=text)


def _of_the_pages(report: AuditReport) -> Iterator[Finding]:
    totals = {each: sum(counts) for each, counts in report.pages.items()}
    stored, removed = totals["stored"], totals["removed"]
    begins_late = any(each.earlier_batches for each in report.streams)  # so pages that seem unknown may be older
    for kind, whole, text in (
        ("churned", stored, f"{{share}} of the stored pages were evicted within {report.churn_s:g} s"),
        (
            "bounced",
            stored,
            f"{{share}} of the stored pages came back to a tier that they had left within {report.churn_s:g} s",
        ),
        ("double", stored + totals["double"], "{share} of the stores were of pages that the worker held already"),
        ("orphan", stored, "{share} of the stored pages begin a chain under a parent that the worker does not hold"),
        ("unknown", removed + totals["unknown"], "{share} of the removals were of pages that the worker did not hold"),
    ):
        share = totals[kind] / max(1, whole)
        if share >= _LEAST_WEIGHT and not (begins_late and kind in ("orphan", "unknown")):
            found = text.format(share=f"{share:.1%}")
            yield Finding(kind=kind, weight=share, text=f"{found} ({count(totals[kind], 'page')})")
    if report.num_resyncs > len(report.streams):  # the first one of a stream is its beginning
        share = report.resync_pages / max(1, stored + report.resync_pages)
        text = f"{count(report.num_resyncs, 'resync')} sent {count(report.resync_pages, 'page')} again"
        yield Finding(kind="resync", weight=share, text=text)


def _of_the_funnel(report: AuditReport) -> Iterator[Finding]:
    if (funnel := report.funnel) is None:
        return
    known = {each.worker for each in report.streams}
    unknown = sorted(funnel.unknown_workers.items(), key=lambda each: -each[1])
    for worker, number in unknown[: _MOST_NAMED if known else 0]:
        text = f"{count(number, 'request')} went to {printable(worker)}, of which the log has no batch; "
        text += f"the nearest name is {nearest(worker, known)}"
        yield Finding(kind="unknown worker", weight=number / funnel.requests, text=text)
    yield from _of_the_router(funnel)
    for loss in funnel.losses:
        if loss.cause not in _NO_FAULTS and loss.share >= _LEAST_WEIGHT:
            text = f"{loss.share:.1%} of the prompt tokens were not {loss.step}: {loss.cause}"
            text += f" ({count(loss.requests, 'request')})"
            if loss.examples[0].better:
                text += f". Request {printable(loss.examples[0].request_id)}: {loss.examples[0].better}"
            yield Finding(kind=loss.cause, weight=loss.share, text=text)


def _of_the_router(funnel: Funnel) -> Iterator[Finding]:
    num_ties = sum(funnel.ties.values())
    if num_ties >= _LEAST_TIES and len(funnel.ties) == 1:
        text = f"{count(num_ties, 'request')} had several workers with the same best score, and all of them went to "
        text += f"{printable(*funnel.ties)}: a tie should be broken by load or by chance"
        yield Finding(kind="ties", weight=num_ties / funnel.requests, text=text)
    if funnel.early >= _LEAST_EARLY and funnel.early_s:
        text = (
            f"{count(funnel.early, 'request')} reused pages that were stored {funnel.early_s:,.1f} s after the choice, "
        )
        text += "by the router's clock: it is behind those of the engines, so what was held at a choice is not known"
        yield Finding(kind="router's clock", weight=min(1.0, funnel.early / max(1, funnel.outcomes)), text=text)


def _placed(stream: StreamReport, place: BatchPosition | None) -> str:
    assert place is not None
    return f"record {place.index}, {stream.stream}, seq {place.seq}, {utc_text(place.time)}"


def _time(place: BatchPosition | None) -> float:
    assert place is not None
    return place.time
