"""`kvsight explain`"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kv_events.http.explanations import BatchPosition, Explanation, WorkerExplanation
from kv_events.log.moments import LogMoment
from kv_events.runtime.words import count, local_time, names, natural_order, printable
from kvsight.cli.logs.reading import LogInput, TopicInput, extent_text, moment_fault, open_source
from kvsight.cli.shared.console import UsageError, err, out, print_result
from kvsight.cli.shared.flags import KAFKA, AsJson, with_flags
from kvsight.cli.shared.process import load_kernels
from kvsight.cli.shared.prompts import decode_query, read_json_object
from kvsight.cli.shared.streams import namespace_text
from kvsight.cli.shared.tables import Column, table_lines
from kvsight.extras import require

if TYPE_CHECKING:
    from analysis.explain.asked_prompt import AskedPrompt


@with_flags(KAFKA)
def explain(
    prompt: Annotated[Path, typer.Option(help='JSON file with the query. "-" reads stdin.')],
    log: Annotated[Path | None, typer.Argument(help="Folder of an event log, from `kvsight record`.")] = None,
    kafka: Annotated[str | None, typer.Option(help="Read a Kafka topic instead: HOST:PORT,...")] = None,
    worker: Annotated[str | None, typer.Option(help="Explain only this worker.")] = None,
    at: Annotated[str | None, typer.Option(help="The moment. Default: the end of the log.")] = None,
    as_json: AsJson = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Explain why each worker holds no more of a prompt.

    The prompt is a file with the body of POST /query or /query_by_hash, such as {"model_name": "m", "token_ids": [1,
    2, 3]}. For each worker, the page at which its prefix ends is shown, with the cause and the batch that shows it.
    Pages are counted from 1. --at accepts what `kvsight replay --at` does.

    Example: kvsight explain run.log --prompt prompt.json --worker engine-0 --at 2026-01-31T12:03:00Z
    """
    require("serve", "kvsight explain")
    moment = LogMoment.parse(at, "--at")
    body = read_json_object(prompt)
    source = open_source(log, kafka, flags, moment)
    from analysis.explain.asked_prompt import AskedPrompt

    load_kernels()
    asked = AskedPrompt(*decode_query(body, prompt), worker)
    found = _explain(asked, source, moment)
    print_result(found, _lines(found, asked, out.width), as_json=as_json)
    as_of = f"as of {local_time(found.time)}, after {count(found.records, 'record')}"
    err.print(f"{extent_text(source.extent)}\n{as_of}")
    source.exit_if_damaged()


def _explain(asked: AskedPrompt, source: LogInput | TopicInput, moment: LogMoment) -> Explanation:
    """Raises UsageError if the moment is outside the log."""
    from analysis.explain.decisions import decisions_beside
    from analysis.explain.explanation import NothingToExplainError
    from analysis.explain.explanation import explain as explain_records

    if isinstance(source, LogInput):
        parts: tuple[Any, ...] = (
            source.chunks("replaying"),
            moment,
            source.views_before(),
            decisions_beside(source.folder),
        )
    else:
        parts = ((None, record) for record in source.records()), moment  # a topic has no indices
    try:
        found = explain_records(asked, *parts)
    except NothingToExplainError as error:
        if not source.extent.num_records:
            source.exit_if_damaged()
        raise UsageError(moment_fault(source.extent, moment) or f"{source.extent.name}: {error}") from error
    if fault := moment_fault(source.extent, moment):
        raise UsageError(fault)
    return msgspec.structs.replace(found, damage=list(source.damage_lines))


def _lines(found: Explanation, asked: AskedPrompt, width: int) -> Iterator[str]:
    """Yield a table of the workers, and then their findings in sentences. width: terminal cells."""
    workers = sorted(found.workers, key=_order)
    sizes = sorted({worker.block_size for worker in workers})
    size = sizes[0] if len(sizes) == 1 else 0
    sizes_of_prompt = [] if found.num_tokens is None else [count(found.num_tokens, "token")]
    if size or asked.tokens is None:
        sizes_of_prompt.append(count(asked.num_pages(size), "page"))
    yield f"prompt of {', '.join(sizes_of_prompt)}; {namespace_text(found.model_name, found.routing_group, size)}"
    yield from table_lines(_columns(workers), width)
    yield ""
    yield from _sentences(workers)


def _order(worker: WorkerExplanation) -> tuple[Any, ...]:
    return (-worker.held["external"], -worker.held["gpu"], natural_order(worker.instance_id), worker.dp_rank)


def _columns(workers: Sequence[WorkerExplanation]) -> Iterator[Column]:
    main = [worker.findings[0] for worker in workers]
    newest = [each.evidence[-1].batch if each.evidence else None for each in main]
    yield Column("worker", [worker.instance_id for worker in workers])
    if any(worker.dp_rank for worker in workers):
        yield Column("rank", [worker.dp_rank for worker in workers])
    held = [f"{worker.held['external']}/{worker.num_pages}" for worker in workers]
    yield Column("pages", held, is_number=True)
    if any(worker.cause in ("group", "last_token") for worker in workers):
        yield Column("reusable", [worker.reusable["external"] for worker in workers])
    if any(worker.held["gpu"] != worker.held["external"] for worker in workers):
        yield Column("gpu", [worker.held["gpu"] for worker in workers], rank=2)
    yield Column("state", [worker.state or "" for worker in workers], rank=3)
    yield Column("cause", [worker.cause.replace("_", " ") for worker in workers])
    yield Column("page", [each.page for each in main])
    if any(newest):
        yield Column("at", [None if batch is None else _time(batch) for batch in newest], rank=1)
        yield Column("record", [None if batch is None else _record(batch) for batch in newest], is_number=True, rank=1)
        yield Column("batch", [None if batch is None else batch.seq for batch in newest], rank=1)


def _time(batch: BatchPosition) -> str:
    shown = local_time(batch.time)
    return shown if shown.startswith("@") else shown[5:23]


def _record(batch: BatchPosition) -> str:
    return f"{batch.partition}:{batch.offset}" if batch.index is None else str(batch.index)


def _sentences(workers: Sequence[WorkerExplanation]) -> Iterator[str]:
    """Yield the findings of each worker. Workers with the same sentences share them."""
    by_text: dict[tuple[str, ...], list[str]] = {}
    has_ranks = any(worker.dp_rank for worker in workers)
    for worker in workers:
        texts = tuple(finding.text for finding in worker.findings)
        name = f"{worker.instance_id} rank {worker.dp_rank}" if has_ranks else worker.instance_id
        by_text.setdefault(texts, []).append(name)
    for texts, several in by_text.items():
        yield f"{names(several)}: {printable(texts[0])}"
        yield from (f"  {printable(text)}" for text in texts[1:])
