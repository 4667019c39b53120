"""The audit of one log, in one pass over its events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from analysis.audit.curves import AuditCurves
from analysis.audit.decision_audit import DecisionAudit
from analysis.audit.findings import add_findings
from analysis.audit.report import AuditReport
from analysis.audit.residency import milliseconds
from analysis.audit.sorted_decisions import SortedDecisions
from analysis.audit.stream_audit import StreamAudit, settings_of_audits
from indexer.replay import open_beginning
from kv_events.codec import batch_time
from kv_events.log.event_log import EventLogReader
from kv_events.log.reader import scan_log
from kv_events.records import Channel, LogRecord

CHURN_S = 10.0


def audit_log(
    folder: Path,
    churn_s: float = CHURN_S,
    on_chunk: Callable[[int], None] = lambda _: None,
    known_damage: Sequence[str] = (),
    series: AuditCurves | None = None,
) -> AuditReport:
    """Audit an event log.

    The log is read twice: for the decisions, then for everything else. Memory is needed for the pages that are held at
    one time and for the distinct pages, about 130 bytes each, and for decisions, of which at most about 1 GiB is in
    memory, but none for records of events. churn_s: seconds for which pages are expected to stay. on_chunk: called now
    and then with the index of the next record. known_damage: what the caller has found, for the report. series:
    collects what happened over time.

    Raises EventLogError if there is no such log. Damaged parts are named in the report.
    """
    EventLogReader(folder)  # there is such a folder
    beginning = open_beginning(folder, settings_of_audits(), is_bounded=False)
    damage = [*known_damage, *filter(None, [beginning.fault])]
    events = StreamAudit(churn_s, beginning.views, series)
    funnel = DecisionAudit(events, series)
    with closing(SortedDecisions(folder)) as decisions:
        for chunk in scan_log(folder, lambda error: damage.append(str(error))):
            for row in np.flatnonzero(chunk.channels == Channel.EVENTS).tolist():
                index, record = chunk.first_index + row, chunk.record(row)
                if len(decisions):
                    for decision in decisions.before(_batch_ms(record), index):
                        funnel.take(decision)
                events.apply(index, record)
            on_chunk(chunk.next_index)
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
    time_s = batch_time(record.payload)
    return record.timestamp_ms if time_s is None else milliseconds(time_s)
