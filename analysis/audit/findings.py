"""The verdict of an audit: its causes by weight, in sentences."""

from collections.abc import Iterator

from analysis.audit.decision_audit import NEW, NO_OUTCOME, NO_PAGE
from analysis.audit.report import AuditReport, Finding, StreamReport
from analysis.words import count
from kv_events.http.explanations import BatchPosition
from kv_events.log.moments import utc_text

_LEAST_WEIGHT = 0.001
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
    restarts = sum(max(0, each.epochs - 1) for each in streams)
    if restarts:
        restarted = sum(each.epochs > 1 for each in streams)
        text = f"{count(restarted, 'stream')} restarted, {count(restarts, 'time')} in total, and lost their pages"
        yield Finding(kind="restart", weight=restarted / len(streams), text=text)
    not_live = sum(each.not_live_s for each in streams)
    whole = len(streams) * (report.last_time - report.first_time)
    if whole and not_live / whole >= _LEAST_WEIGHT:
        text = f"views were stale or syncing for {not_live / whole:.1%} of the time"
        yield Finding(kind="not live", weight=min(1.0, not_live / whole), text=text)


def _of_the_pages(report: AuditReport) -> Iterator[Finding]:
    totals = {name: sum(counts) for name, counts in report.pages.items()}
    stored, removed = totals["stored"], totals["removed"]
    begins_late = any(each.earlier_batches for each in report.streams)  # so pages that seem unknown may be older
    for name, whole, text in (
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
        share = totals[name] / max(1, whole)
        if share >= _LEAST_WEIGHT and not (begins_late and name in ("orphan", "unknown")):
            found = text.format(share=f"{share:.1%}")
            yield Finding(kind=name, weight=share, text=f"{found} ({count(totals[name], 'page')})")
    if report.num_resyncs > len(report.streams):  # the first one of a stream is its beginning
        share = report.resync_pages / max(1, stored + report.resync_pages)
        text = f"{count(report.num_resyncs, 'resync')} sent {count(report.resync_pages, 'page')} again"
        yield Finding(kind="resync", weight=share, text=text)


def _of_the_funnel(report: AuditReport) -> Iterator[Finding]:
    for loss in report.funnel.losses if report.funnel is not None else ():
        if loss.cause not in _NO_FAULTS and loss.share >= _LEAST_WEIGHT:
            text = f"{loss.share:.1%} of the prompt tokens were not {loss.step}: {loss.cause}"
            yield Finding(kind=loss.cause, weight=loss.share, text=f"{text} ({count(loss.requests, 'request')})")


def _placed(stream: StreamReport, place: BatchPosition | None) -> str:
    assert place is not None
    return f"record {place.index}, {stream.stream}, seq {place.seq}, {utc_text(place.time)}"


def _time(place: BatchPosition | None) -> float:
    assert place is not None
    return place.time
