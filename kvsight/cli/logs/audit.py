"""`kvsight audit`"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from kv_events.runtime.words import count, duration, local_time, natural_order, printable
from kvsight.cli.logs.reading import EXIT_DAMAGED, LogFolder, LogInput, byte_progress
from kvsight.cli.shared.console import HtmlReport, check_html, out, print_result, write_html
from kvsight.cli.shared.flags import BOOK, AsJson, with_flags
from kvsight.cli.shared.process import load_kernels
from kvsight.cli.shared.streams import MEDIA
from kvsight.cli.shared.tables import Column, table_lines
from kvsight.extras import require

if TYPE_CHECKING:
    from analysis.audit.report import AuditReport, Example, Funnel, Loss

_MOST_ROWS = 10
_MOST_DAMAGE = 20
_LONGEST_NAME = 200


@with_flags(BOOK)
def audit(
    log: LogFolder,
    churn: Annotated[float, typer.Option(help="Seconds for which pages are expected to stay.", min=0.001)] = 10.0,
    examples: Annotated[Path | None, typer.Option(help="Write prompts for `kvsight explain` here.")] = None,
    tokenizer_file: Annotated[
        Path | None, typer.Option(help="The model's tokenizer.json: show prefixes as text, if the log has tokens.")
    ] = None,
    html: HtmlReport = None,
    as_json: AsJson = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Say what went wrong, and where cached tokens were lost.

    First the verdict, then its causes by weight, then streams, pages, resyncs and the prefixes that are used most. If
    routers report their decisions, the funnel follows: from the tokens of prompts to those that the engines found in
    their caches, with the cause of each loss and examples for `kvsight explain`.

    The exit code is 1 if parts of the log cannot be read. The rest of it is audited.
    """
    require("serve", "kvsight audit")
    check_html(html, "kvsight audit --html")
    source = LogInput(log)
    source.find_torn_tail()
    known_damage = [str(source.tail)] if source.tail else []
    from analysis.audit.audit import audit_log, with_texts
    from analysis.audit.curves import AuditCurves
    from api.prompts.local import LocalTokenizer
    from selection.settings import SelectionSettings

    tokenizer = None if tokenizer_file is None else LocalTokenizer(tokenizer_file, 1)
    load_kernels()
    series = None if html is None else AuditCurves()
    with byte_progress("auditing", 2 * source.num_bytes) as show:  # it reads the log twice
        report = audit_log(log, churn, show, known_damage, series, SelectionSettings.from_flags(**flags))
    if tokenizer is not None:
        report.hottest = with_texts(report.hottest, LogInput(log).chunks("reading tokens"), tokenizer.text_of)
    if examples is not None and report.funnel is not None:
        _write_examples(examples, report.funnel)
    if html is not None and series is not None:
        from analysis.html.audit_page import write_audit_page

        write_html(html, lambda path: write_audit_page(path, report, series))
    print_result(report, _lines(report, examples, out.width), as_json=as_json)
    raise typer.Exit(EXIT_DAMAGED if report.damage else 0)


def _write_examples(folder: Path, funnel: Funnel) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for each in funnel.losses:
        for example in each.examples:
            _prompt_file(folder, example).write_bytes(msgspec.json.encode(example.query))


def _prompt_file(folder: Path, example: Example) -> Path:
    """Names of requests come from other machines, so they are quoted."""
    return folder / f"{quote(example.request_id, safe='')[:_LONGEST_NAME]}.json"


def _lines(report: AuditReport, examples: Path | None, width: int) -> Iterator[str]:
    yield f"verdict: {report.verdict}"
    yield from (f"  {finding.weight:6.1%}  {finding.text}" for finding in report.findings)
    yield ""
    yield from _span_lines(report)
    yield from _stream_lines(report, width)
    yield from _page_lines(report, width)
    yield from _resync_lines(report, width)
    yield from _prefix_lines(report, width)
    if report.funnel is not None:
        yield from _funnel_lines(report.funnel, width)
        yield from _example_lines(report.log, report.funnel, examples)


def _span_lines(report: AuditReport) -> Iterator[str]:
    first, last = local_time(report.first_time), local_time(report.last_time)
    size = f"{count(report.records, 'record')}, {report.bytes:,} bytes"
    of_streams = f"{report.log}: {size} of {count(len(report.streams), 'stream')}"
    times = f", {first} to {last}" if report.records else ""
    yield of_streams + (times if report.records or report.damage else ": the log is empty")
    rates = report.rates
    if report.records:
        peak = ""
        if rates.peak_time is not None:
            peak = f", at most {rates.peak_pages_per_s:,} in one second, {local_time(rates.peak_time)}"
        yield f"{rates.pages_per_s:,.0f} pages/s stored and removed{peak}; {rates.records_per_s:,.1f} records/s"
    yield from (f"damage: {text}" for text in report.damage[:_MOST_DAMAGE])
    if len(report.damage) > _MOST_DAMAGE:
        yield f"and {len(report.damage) - _MOST_DAMAGE} more"


def _stream_lines(report: AuditReport, width: int) -> Iterator[str]:
    worst = sorted(report.streams, key=lambda each: ([-number for number in each.trouble], natural_order(each.stream)))
    shown = worst[:_MOST_ROWS]
    yield ""
    of_all = f", {len(shown)} of {len(worst)}" if len(shown) < len(worst) else ""
    yield f"streams{of_all}, the worst first"
    first_bad = [each.first_bad_batch for each in shown]
    columns = [
        Column("stream", [each.stream for each in shown]),
        Column("batches", [each.batches for each in shown], rank=3),
        Column("restarts", [each.restarts for each in shown], rank=2),
        Column("gaps", [each.gaps for each in shown]),
        Column("lost", [each.lost_batches for each in shown], rank=2),
        Column("wrong digests", [each.digest_mismatches for each in shown]),
        Column("first bad record", [None if bad is None else bad.index for bad in first_bad], rank=1),
        Column("resyncs", [each.resyncs for each in shown], rank=2),
        Column("not live", [duration(int(each.not_live_s * 1000)) for each in shown], is_number=True, rank=1),
        Column("pages held", [each.pages_held for each in shown], rank=4),
    ]
    yield from table_lines(columns, width)


def _page_lines(report: AuditReport, width: int) -> Iterator[str]:
    from analysis.audit.report import PAGE_COUNTS

    totals = [sum(counts[medium] for counts in report.pages.values()) for medium in range(len(MEDIA))]
    yield ""
    texts = [text.format(churn=report.churn_s) for text in PAGE_COUNTS.values()]
    columns = [Column("pages", [*texts, "held until removed (p50)"])]
    for medium, tier in enumerate(MEDIA.values()):
        if totals[medium] or (not any(totals) and not medium):
            counts = [str(report.pages[name][medium]) for name in PAGE_COUNTS]
            held_s = report.lifetime_p50_s[medium]
            lifetime = None if held_s is None else duration(round(held_s * 1000))
            columns.append(Column(tier, [*counts, lifetime], is_number=True))
    yield from table_lines(columns, width)
    yield f"{count(report.orphans, 'page')} held at the end whose parent is not held: no prompt can use them"
    if report.untracked:
        yield f"{count(report.untracked, 'page')} not followed, because there was no room for them"


def _resync_lines(report: AuditReport, width: int) -> Iterator[str]:
    if not report.resync_pages:
        return
    shown = report.resyncs[:_MOST_ROWS]
    yield ""
    yield f"{count(report.num_resyncs, 'resync')} sent {count(report.resync_pages, 'page')} again; the largest"
    columns = [
        Column("stream", [each.stream for each in shown]),
        Column("reason", [each.reason for each in shown], rank=1),
        Column("pages", [each.pages for each in shown]),
        Column("bytes", [each.bytes for each in shown], rank=2),
        Column("took", [duration(int(each.seconds * 1000)) for each in shown], is_number=True, rank=1),
        Column("time", [local_time(each.time) for each in shown], rank=3),
        Column("end", ["complete" if each.is_complete else "cut off" for each in shown], rank=1),
    ]
    yield from table_lines(columns, width)


def _prefix_lines(report: AuditReport, width: int) -> Iterator[str]:
    if not report.hottest:
        return
    yield ""
    yield "prefixes that are used most"
    columns = [
        Column("last page", [f"{each.sequence_hash:016x}" for each in report.hottest]),
        *([Column("text", texts)] if any(texts := [each.text for each in report.hottest]) else []),
        Column("pages", [each.pages for each in report.hottest]),
        Column("requests", [each.requests for each in report.hottest]),
        Column("stores", [each.stores for each in report.hottest]),
        Column("workers now", [each.workers for each in report.hottest]),
    ]
    yield from table_lines(columns, width)


def _funnel_lines(funnel: Funnel, width: int) -> Iterator[str]:
    yield ""
    outcomes = f"{funnel.outcomes} with a known outcome"
    yield f"funnel of {count(funnel.requests, 'request')}, {outcomes}"
    tokens = funnel.steps.values()
    columns = [
        Column("tokens of prompts", list(funnel.steps)),
        Column("tokens", [f"{number:,}" for number in tokens], is_number=True),
        Column("share", [_share(number, funnel.prompt_tokens) for number in tokens], is_number=True),
    ]
    yield from table_lines(columns, width)
    yield from _loss_lines("lost", funnel.losses, width)
    yield from _loss_lines("gained", funnel.gains, width)
    if funnel.unmatched_outcomes or funnel.duplicates:
        yield f"{count(funnel.unmatched_outcomes, 'outcome')} without a decision, {funnel.duplicates} repeated"


def _loss_lines(title: str, losses: list[Loss], width: int) -> Iterator[str]:
    if losses:
        yield ""
        columns = [
            Column(f"{title} before", [each.step for each in losses]),
            Column("cause", [each.cause for each in losses]),
            Column("tokens", [f"{each.tokens:,}" for each in losses], is_number=True),
            Column("share", [f"{each.share:.1%}" for each in losses], is_number=True),
            Column("requests", [each.requests for each in losses], rank=1),
        ]
        yield from table_lines(columns, width)


def _example_lines(log: str, funnel: Funnel, folder: Path | None) -> Iterator[str]:
    yield ""
    if folder is None:
        yield "The largest losses of each cause; --examples FOLDER writes their prompts and prints how to explain them."
    for loss in funnel.losses:
        yield f"{loss.cause} ({loss.step})"
        for each in loss.examples:
            at = f"{math.floor(each.time * 1000) / 1000:.3f}"
            if folder is None:
                request, worker = printable(each.request_id), printable(each.worker)
                better = f"; {each.better}" if each.better else ""
                yield f"  request {request} at @{at}, worker {worker}: {count(each.tokens, 'token')}{better}"
            else:
                file, worker = shlex.quote(str(_prompt_file(folder, each))), shlex.quote(each.worker)
                yield f"  kvsight explain {shlex.quote(log)} --prompt {file} --worker {printable(worker)} --at @{at}"


def _share(number: int, whole: int) -> str:
    return f"{number / max(1, whole):.1%}"
