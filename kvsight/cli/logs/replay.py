"""`kvsight replay`"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kv_events.errors import InvalidValueError
from kv_events.http.log import BatchInLog, MovedPage, StreamDiff
from kv_events.log.moments import LogExtent, LogMoment
from kv_events.runtime.words import count, local_time, natural_order
from kv_events.streams import StreamId, split_group
from kvsight.cli.logs.reading import LogInput, exit_if_any_damaged, extent_text, moment_fault, open_source
from kvsight.cli.shared.answers import Asked, answer_lines
from kvsight.cli.shared.console import (
    EXIT_USAGE,
    UsageError,
    at_most_one,
    err,
    next_step,
    out,
    print_json,
    print_lines,
    print_result,
    progress_bar,
)
from kvsight.cli.shared.flags import BOOK, HTTP, KAFKA, ApiToken, AsJson, with_flags
from kvsight.cli.shared.process import allow_open_files, keep_freed_memory, load_kernels
from kvsight.cli.shared.prompts import decode_query, read_json_object
from kvsight.cli.shared.streams import MEDIA, StreamRow, streams_lines
from kvsight.cli.shared.tables import Column, table_lines
from kvsight.errors import KvsightConnectionError
from kvsight.extras import require

if TYPE_CHECKING:
    from analysis.diff import Holdings
    from indexer.replay import Replay
    from kv_events.http.parsed_query import ParsedQuery, PromptArray
    from selection.book import Book


@with_flags(KAFKA, HTTP, BOOK)
def replay(
    log: Annotated[Path | None, typer.Argument(help="Folder of an event log, from `kvsight record`.")] = None,
    kafka: Annotated[str | None, typer.Option(help="Read a Kafka topic instead: HOST:PORT,...")] = None,
    at: Annotated[str | None, typer.Option(help="The moment. Default: the end of the log.")] = None,
    query: Annotated[Path | None, typer.Option(help="JSON file with a query to answer.")] = None,
    as_json: AsJson = False,
    diff: Annotated[str | None, typer.Option(help="Compare with this log, or service (URL).")] = None,
    to: Annotated[str | None, typer.Option(help="Moment of that log. Default: its end.")] = None,
    api_token: ApiToken = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the page and the HTTP API over the past.")] = False,
    host: Annotated[str | None, typer.Option(help="Address, with --serve: 0.0.0.0 for other machines.")] = None,
    port: Annotated[int | None, typer.Option(help="Port, with --serve.", envvar="KVSIGHT_PORT")] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Rebuild and query the router's views of some moment.

    --at is a time (ISO 8601, 15:27, -5m or @SECONDS since 1970), a record's index in an event log, or
    PARTITION:OFFSET,... of a Kafka topic. A time without a zone is local; 15:27 is today's, or yesterday's if that is
    still to come. Records before an index or an offset are applied. A moment outside the log is reported, and the exit
    code is 2.

    The query may be any body that the API accepts; the answer is the API's. Without a query, the views are listed. With
    --kafka, the topic is read from its oldest record to its present end.

    With --diff, shows for each worker the pages that were gained, lost, and moved to other tiers since that moment: in
    the same log up to --to, in another one, or in a live service.

    With --serve, the page of kvsight serve and its HTTP API show any moment of an event log: requests name it by the
    parameter `at`, and those that name none get the moment of --at.

    Example: kvsight replay run.log --at 2026-01-31T12:00:00Z --query prompt.json
    """
    others = {"--kafka": kafka, "--query": query}
    if serve:
        _serve(
            _only(log, "--serve", others | {"--diff": diff, "--json": as_json or None}),
            at,
            host=host,
            port=port,
            **flags,
        )
        return
    if diff is not None:
        _show_diff(_only(log, "--diff", others), at, diff, to, api_token, as_json)
        return
    if to is not None:
        raise UsageError("--to needs --diff")
    if query is not None:
        require("serve", "kvsight replay --query")
    moment = LogMoment.parse(at, "--at")
    body = None if query is None else read_json_object(query)
    source = open_source(log, kafka, flags, moment)
    load_kernels()
    asked = None if body is None or query is None else decode_query(body, query)
    replayed, extent = source.views_at(moment)
    fault = moment_fault(extent, moment)
    if not replayed.applier.records:
        raise UsageError(fault or _no_batch(extent, moment, "--at"))
    if body is None or asked is None:
        book = source.book_at(moment, replayed, flags)
        print_result(list(_views(replayed, book)), streams_lines(_rows(replayed, book), out.width), as_json=as_json)
    else:
        _show_answer(body, *asked, replayed, as_json)
    err.print(f"{extent_text(extent)}\n{_used(moment, replayed.now, source.num_applied(replayed))}")
    if fault:
        err.print(f"warning: {fault}")
        raise typer.Exit(EXIT_USAGE)
    source.exit_if_damaged()


def _only(log: Path | None, flag: str, others: Mapping[str, object]) -> Path:
    """The log of a flag that takes nothing else. others: flags that exclude it -> their values. Raises UsageError."""
    for other, value in others.items():
        at_most_one({flag: True, other: value})
    if log is None:
        raise UsageError("give the folder of an event log")
    return log


def _serve(folder: Path, at: str | None, **flags: Any) -> None:
    """Serve the past of an event log until SIGINT or SIGTERM. Raises UsageError, and the errors of `listen`."""
    require("serve", "kvsight replay --serve")
    from api.settings import ApiSettings
    from selection.settings import SelectionSettings

    settings, selection = ApiSettings.from_flags(**flags), SelectionSettings.from_flags(**flags)
    log, moment = LogInput(folder), LogMoment.parse(at, "--at")
    log.find_torn_tail()
    # each moment that is opened would repeat them; the page shows them as marks
    logging.getLogger("indexer.applier").setLevel(logging.ERROR)
    keep_freed_memory()
    allow_open_files(settings.max_connections)
    from api.app import create_app
    from api.replay.moments import OutsideTheLogError
    from api.replay.service import ReplayService
    from api.server import listen, run_server, url_of

    load_kernels()
    log.write_missing_frames()
    try:
        app = create_app(ReplayService(folder, settings, moment, log.damage_lines, selection))
    except OutsideTheLogError as error:
        raise UsageError(f"--at {error}") from None
    bound = listen(settings)
    for line in log.damage_lines:
        err.print(f"damaged: {line}")
    err.print(f"the past of {folder} is served on {url_of(bound, settings)} (docs at /docs)")
    run_server(app, settings, bound)


def _used(moment: LogMoment, now: float, num_records: int) -> str:
    zone = " (the local zone)" if moment.is_naive else ""
    asked = "" if moment.time_s is None else f"; asked for {local_time(moment.time_s)}{zone}"
    return f"views as of {local_time(now)}, after {count(num_records, 'record')}{asked}"


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
        print_lines(answer_lines(found, Asked.of(body), list(_rows(replayed)), out.width))


def _views(replayed: Replay, book: Book | None) -> Iterator[dict[str, Any]]:
    for view in replayed.namespaces.views:
        yield {
            "model": view.stream.model,
            "worker": view.stream.worker,
            "dp_rank": view.stream.dp_rank,
            "state": replayed.freshness.state(view).value,
            "epoch": view.epoch,
            "next_seq": view.next_seq,
            **dict(zip(MEDIA, view.num_pages, strict=True)),
            **({} if book is None else {"booked": book.booked(view.stream)._asdict()}),
        }


def _rows(replayed: Replay, book: Book | None = None) -> Iterator[StreamRow]:
    from api.queries.answers import age_ms

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
            age_ms(view.last_batch_at, replayed.now),
            dict(zip(MEDIA, view.num_pages, strict=True)),
            booked=(0, 0, 0) if book is None else book.booked(view.stream),
        )


# --- the difference between two moments -----------------------------------------------------------------------------


def _show_diff(folder: Path, at: str | None, other: str, to: str | None, api_token: str | None, as_json: bool) -> None:
    """Compare what the workers hold at a moment of a log with another log, or with a live service.

    at, to: moments of the log and of the other one. other: a folder, which may be the same one, or an address.
    """
    is_service = other.startswith(("http://", "https://"))
    if is_service and to is not None:
        raise UsageError("--to: a live service has no other moment than now")
    moments = LogMoment.parse(at, "--at"), LogMoment.parse(to, "--to")
    sources = [LogInput(folder), LogInput(folder if is_service else Path(other))]
    from analysis.diff import diff

    load_kernels()
    before = _of_log(sources[0], moments[0], "--at")
    after = _of_service(other, api_token) if is_service else _of_log(sources[1], moments[1], "--to")
    found = diff(before, after)
    if not is_service and folder.resolve() != Path(other).resolve():
        found = _with_first_differences(found, (folder, Path(other)), moments)
    print_result(found, _diff_lines(found, out.width), as_json=as_json)
    exit_if_any_damaged(sources)


def _with_first_differences(
    found: list[StreamDiff], folders: tuple[Path, Path], moments: tuple[LogMoment, LogMoment]
) -> list[StreamDiff]:
    """Add the first batch of each stream that differs between two logs."""
    from analysis.diff import first_differences, records_before

    with progress_bar() as bar:
        chunks = [LogInput(folder).chunks(f"comparing {folder}", bar) for folder in folders]
        parted = first_differences(*map(records_before, chunks, moments))
    both = [
        parted.get(StreamId(each.model, each.tenant, each.worker, each.dp_rank).key, (None, None)) for each in found
    ]
    return [
        msgspec.structs.replace(each, first_before=first[0], first_after=first[1])
        for each, first in zip(found, both, strict=True)
    ]


def _no_batch(extent: LogExtent, moment: LogMoment, flag: str) -> str:
    """Say that there is nothing to show."""
    before = f"{flag} {moment.typed}" if moment.typed else "the end"
    return f"no batch is before {before}: {extent_text(extent)}"


def _of_log(source: LogInput, moment: LogMoment, flag: str) -> Holdings:
    """What the workers hold at a moment of a log. Raises UsageError if the moment is outside."""
    from analysis.diff import holdings_of

    views, extent = source.views_at(moment)
    if fault := moment_fault(extent, moment, flag):
        raise UsageError(fault)
    if not views.applier.records:
        raise UsageError(_no_batch(extent, moment, flag))
    err.print(f"{source.folder}: {_used(LogMoment(), views.now, source.num_applied(views))}")
    return holdings_of(views)


def _of_service(url: str, api_token: str | None) -> Holdings:
    from analysis.diff import holdings_of_dump
    from kvsight.client import Client

    try:
        with Client(url, token=api_token) as client:
            dump = client.dump()
    except KvsightConnectionError as error:
        raise UsageError(f"{error}{next_step(error, '--diff')}") from error
    except InvalidValueError as error:
        raise InvalidValueError("--diff", error.value, error.expected) from error
    err.print(f"{url}: views as of now")
    return holdings_of_dump(dump)


def _diff_lines(found: Sequence[StreamDiff], width: int) -> Iterator[str]:
    different = sorted(
        (each for each in found if not each.is_empty),
        key=lambda each: (each.model, each.tenant, natural_order(each.worker), each.dp_rank),
    )
    if different:
        yield from table_lines(_columns(different), width)
    num_equal = len(found) - len(different)
    parted = [each for each in found if each.first_before or each.first_after]
    if different or not parted:
        yield f"{count(num_equal, 'worker stream')} without a difference" if different else "no difference"
    else:
        yield "the same pages at the end, after different batches"
    for each in parted:
        rank = f" rank {each.dp_rank}" if each.dp_rank else ""
        yield f"{each.worker}{rank} parts at {_batch(each.first_before)} before, {_batch(each.first_after)} after"
    for each in different:
        yield from _examples(each)


def _columns(found: Sequence[StreamDiff]) -> Iterator[Column]:
    yield Column("worker", [each.worker for each in found])
    if any(each.dp_rank for each in found):
        yield Column("rank", [each.dp_rank for each in found])
    if len({(each.model, each.tenant) for each in found}) > 1:
        yield Column("model", [each.model for each in found], rank=1)
        yield Column("tenant", [each.tenant for each in found], rank=2)
    yield Column("before", [each.before for each in found], rank=3)
    yield Column("after", [each.after for each in found], rank=3)
    yield Column("gained", [each.gained for each in found])
    yield Column("lost", [each.lost for each in found])
    yield Column("moved", [each.moved for each in found])


def _examples(each: StreamDiff) -> Iterator[str]:
    parts = [
        ("gained", list(map(str, each.gained_examples))),
        ("lost", list(map(str, each.lost_examples))),
        ("moved", list(map(_moved, each.moved_examples))),
    ]
    for verb, pages in parts:
        if pages:
            yield f"{each.worker} {verb}, for example: {', '.join(pages)}"


def _batch(batch: BatchInLog | None) -> str:
    if batch is None:
        return "the end"
    return f"{local_time(batch.time)} (record {batch.index}, batch {batch.seq})"


def _moved(page: MovedPage) -> str:
    before, after = ("+".join(MEDIA[medium] for medium in media) for media in (page.before, page.after))
    return f"{page.sequence_hash} ({before} -> {after})"
