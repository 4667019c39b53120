"""`kvsight replay`"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from kv_events.errors import shorten
from kvsight.cli.console import UsageError, compile_kernels, out, print_json, progress_bar, read_json_object
from kvsight.cli.query import answer_table
from kvsight.extras import require_serve

if TYPE_CHECKING:
    from api.questions import Question
    from indexer.replay import Replay, Until
    from kv_events.records import LogRecord

_AT_HELP = "Offset (records before it are applied), or time (ISO 8601, or @SECONDS since 1970)."


def replay(
    log: Annotated[Path, typer.Argument(help="Folder of an event log, written by `kvsight record`.")],
    at: Annotated[str | None, typer.Option(help=_AT_HELP)] = None,
    query: Annotated[
        Path | None, typer.Option(help='JSON file with the prompt: {"model_name": "m", "token_ids": [...]}.')
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Rebuild the router's views as of some moment, and query them.

    Without --at, the whole log is applied. Without --query, the views are listed. The query may be any body that the
    API accepts; the answer is the API's.

    Example: kvsight replay run.log --at 2026-01-31T12:00:00Z --query prompt.json
    """
    if query is not None:
        require_serve("kvsight replay --query")
    compile_kernels()
    question = _question(query) if query is not None else None
    replayed = _replay(log, _until(at))
    found = _views(replayed) if question is None else _answer(replayed, question)
    if as_json:
        print_json(found)
    else:
        out.print(_views_table(found) if isinstance(found, list) else answer_table(found))


def _replay(folder: Path, until: Until) -> Replay:
    from indexer.replay import Replay, log_records
    from kv_events.event_log import EventLogReader

    total = EventLogReader(folder).next_index
    with progress_bar() as bar:
        task = bar.add_task("replaying", total=min(total, until.offset) if until.offset is not None else total)

        def shown(records: Iterable[LogRecord]) -> Iterable[LogRecord]:
            for record in records:
                if record.offset % 256 == 0:
                    bar.update(task, completed=record.offset)
                yield record

        return Replay().apply_all(shown(log_records(folder, until.offset)), until)


def _until(at: str | None) -> Until:
    from indexer.replay import Until

    if at is None:
        return Until()
    try:
        if at.isdecimal():
            return Until(offset=int(at))
        if at.startswith("@"):
            return Until(time_s=_finite(float(at[1:])))
        moment = datetime.fromisoformat(at)
    except ValueError:
        raise UsageError(f"--at {shorten(at)}: not an offset or a time. {_AT_HELP}") from None
    return Until(time_s=(moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


def _finite(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise ValueError("not a time")
    return seconds


def _question(path: Path) -> Question:
    from api.decoding import codec_of
    from api.questions import BY_ANY, decode_question

    return decode_question(msgspec.json.encode(read_json_object(path)), codec_of("application/json"), BY_ANY)


def _answer(replayed: Replay, question: Question) -> dict[str, Any]:
    from api.answers import answer

    return msgspec.json.decode(
        answer(question, replayed.namespaces, replayed.freshness, replayed.now), type=dict[str, Any]
    )


def _views(replayed: Replay) -> list[dict[str, Any]]:
    from kv_events.schema import MEDIA

    return [
        {
            "model": view.stream.model,
            "worker": view.stream.worker,
            "dp_rank": view.stream.dp_rank,
            "state": replayed.freshness.state(view).value,
            "epoch": view.epoch,
            "next_seq": view.next_seq,
            **{medium.value: pages for medium, pages in zip(MEDIA, view.num_pages, strict=True)},
        }
        for view in replayed.namespaces.views
    ]


def _views_table(rows: list[dict[str, Any]]) -> Table | str:
    if not rows:
        return "no worker is known"
    table = Table()
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*[str(value) for value in row.values()])
    return table
