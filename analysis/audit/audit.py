"""The audit of one log, in one pass over its events."""

import os
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from math import isfinite
from pathlib import Path

import numpy as np

from analysis.audit.curves import AuditCurves
from analysis.audit.decision_audit import DecisionAudit
from analysis.audit.findings import add_findings
from analysis.audit.report import AuditReport
from analysis.audit.residency import milliseconds
from analysis.audit.stream_audit import StreamAudit, settings_of_audits
from indexer.replay import open_beginning
from kv_events.codec import batch_head
from kv_events.decisions import DecisionRecord
from kv_events.errors import RecordRejectedError
from kv_events.log.event_log import EventLogReader
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
