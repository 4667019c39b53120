"""`kvsight replay`"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kv_events.log.moments import LogExtent, LogMoment
from kvsight.cli.answers import Asked, answer_lines
from kvsight.cli.connection_flags import with_kafka_and_http_flags
from kvsight.cli.console import (
    EXIT_USAGE,
    UsageError,
    compile_kernels,
    err,
    out,
    print_json,
    print_lines,
    read_json_object,
    waiting,
)
from kvsight.cli.history import History, open_history
from kvsight.cli.log.reading import LogInput
from kvsight.cli.moments import extent_text, local_time, moment_fault, parse_moment
from kvsight.cli.options import AsJson
from kvsight.cli.past import serve_past
from kvsight.cli.prompts import decode_query
from kvsight.cli.streams import StreamRow, streams_lines
from kvsight.cli.tables import count
from kvsight.extras import require_serve

if TYPE_CHECKING:
    from indexer.replay import Replay
    from kv_events.http.parsed_query import ParsedQuery, PromptArray


@with_kafka_and_http_flags
def replay(
    log: Annotated[Path | None, typer.Argument(help="Folder of an event log, from `kvsight record`.")] = None,
    kafka: Annotated[str | None, typer.Option(help="Read a Kafka topic instead: HOST:PORT,...")] = None,
    at: Annotated[str | None, typer.Option(help="The moment. Default: the end of the log.")] = None,
    query: Annotated[Path | None, typer.Option(help="JSON file with a query to answer.")] = None,
    as_json: AsJson = False,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the page and the HTTP API over the past.")] = False,
    host: Annotated[str | None, typer.Option(help="Address to listen on, with --serve.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, with --serve.", envvar="KVSIGHT_PORT")] = None,
    *,
    connection: dict[str, Any],
) -> None:
    """Rebuild the router's views as of some moment, and query them.

    --at is a time (ISO 8601, or @SECONDS since 1970), a record's index in an event log, or PARTITION:OFFSET,... of a
    Kafka topic. A time without a zone is local. Records before an index or an offset are applied. A moment outside the
    log is reported, and the exit code is 2.

    The query may be any body that the API accepts; the answer is the API's. Without a query, the views are listed. With
    --kafka, the topic is read from its oldest record to its present end.

    With --serve, the page of kvsight serve and its HTTP API show any moment of an event log: requests name it by the
    parameter `at`, and those that name none get the moment of --at.

    Example: kvsight replay run.log --at 2026-01-31T12:00:00Z --query prompt.json
    """
    if serve:
        serve_past(
            log, at, {"--kafka": kafka, "--query": query, "--json": as_json or None}, host=host, port=port, **connection
        )
        return
    if query is not None:
        require_serve("kvsight replay --query")
    moment = parse_moment(at)
    body = None if query is None else read_json_object(query)
    history = open_history(log, kafka, connection, moment)
    compile_kernels(
        "indexer.replay",
        "api.queries.encoding",
        *(["api.fast.local_answers", "api.queries.parsing"] if query is not None else []),
    )
    asked = None if body is None else decode_query(body)
    replayed, extent = _replay(history, moment)
    fault = moment_fault(extent, moment)
    if not replayed.applier.records:
        raise UsageError(fault or f"--at {moment.typed}: no record is before this moment: {extent_text(extent)}")
    if body is None or asked is None:
        _show_views(replayed, as_json)
    else:
        _show_answer(body, *asked, replayed, as_json)
    err.print(f"{extent_text(extent)}\n{_used(moment, replayed)}", markup=False)
    if fault:
        err.print(f"warning: {fault}", markup=False)
        raise typer.Exit(EXIT_USAGE)
    history.exit_if_damaged()


def _replay(history: History, moment: LogMoment) -> tuple[Replay, LogExtent]:
    from indexer.replay import Replay

    if history.log is not None:
        with waiting("replaying"):
            return views_at(history.log, moment)
    extent = LogExtent(history.name)
    return Replay().apply_all((record for _, record in history.records(extent)), moment), extent


def views_at(log: LogInput, moment: LogMoment) -> tuple[Replay, LogExtent]:
    """The views at a moment of a log, and the extent of the log. Damage and warnings are noted in the log."""
    from indexer.replay import Timeline

    timeline = Timeline(log.folder)
    views, extent = timeline.at(moment), timeline.extent
    extent.name = log.extent.name
    if moment.offsets is not None:
        with waiting("reading"):
            extent.offsets = timeline.offsets()
    log.damage, log.faults, log.warnings = timeline.damage, timeline.faults, timeline.warnings
    log.find_torn_tail()
    return views, extent


def _used(moment: LogMoment, replayed: Replay) -> str:
    """The moment that was used, in words."""
    zone = " (the local zone)" if moment.is_naive else ""
    asked = "" if moment.time_s is None else f"; asked for {local_time(moment.time_s)}{zone}"
    return f"views as of {local_time(replayed.now)}, after {count(replayed.applier.records, 'record')}{asked}"


def _show_views(replayed: Replay, as_json: bool) -> None:
    if as_json:
        print_json(list(_views(replayed)))
    else:
        print_lines(streams_lines(_rows(replayed), out.width))


def _show_answer(
    body: dict[str, msgspec.Raw], question: ParsedQuery, numbers: PromptArray, replayed: Replay, as_json: bool
) -> None:
    from api.queries.answers import general_answer, namespaces_of

    asked_of = namespaces_of(question, replayed.namespaces)
    encoded = general_answer(question, numbers, asked_of, replayed.freshness, replayed.now)
    found = msgspec.json.decode(encoded, type=dict[str, Any])
    if as_json:
        print_json(found)
    else:
        asked = Asked.of(msgspec.json.decode(msgspec.json.encode(body), type=dict[str, Any]))
        print_lines(answer_lines(found, asked, list(_rows(replayed)), out.width))


def _views(replayed: Replay) -> Iterator[dict[str, Any]]:
    from kv_events.schema import MEDIA

    for view in replayed.namespaces.views:
        yield {
            "model": view.stream.model,
            "worker": view.stream.worker,
            "dp_rank": view.stream.dp_rank,
            "state": replayed.freshness.state(view).value,
            "epoch": view.epoch,
            "next_seq": view.next_seq,
            **{medium.value: pages for medium, pages in zip(MEDIA, view.num_pages, strict=True)},
        }


def _rows(replayed: Replay) -> Iterator[StreamRow]:
    from api.queries.encoding import age_ms
    from kv_events.schema import MEDIA
    from kv_events.streams import split_group

    for view in replayed.namespaces.views:
        model, group = split_group(view.stream.model)
        yield StreamRow(
            model,
            view.stream.tenant,
            view.block_size,
            view.stream.worker,
            view.stream.dp_rank,
            group or "",
            replayed.freshness.state(view).value,
            view.reason,
            age_ms(view.heard_at, replayed.now),
            {medium.value: pages for medium, pages in zip(MEDIA, view.num_pages, strict=True)},
        )
