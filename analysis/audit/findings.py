"""The verdict of an audit: its causes by weight, in sentences."""

from collections.abc import Iterator, Sequence

from analysis.audit.decision_audit import NEW, NO_OUTCOME, NO_PAGE
from analysis.audit.report import AuditReport, Finding, Funnel, StreamReport
from kv_events.http.explanations import BatchPosition
from kv_events.log.moments import utc_text
from kv_events.runtime.words import count, names, nearest, printable
from kv_events.schema import BATCHES_LOST, ENGINE_UNHEARD

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
