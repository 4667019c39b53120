"""`kvsight tail`"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kv_events.http.service import DEFAULT_URL
from kv_events.records import Channel
from kvsight.cli.connection_flags import with_kafka_flags
from kvsight.cli.console import UsageError, at_most_one, err, print_lines, run_until_interrupted
from kvsight.cli.options import ApiToken
from kvsight.cli.tail_events import Filter, TailEvent, of_feed, of_record

if TYPE_CHECKING:
    from indexer.sources.base import Source


@with_kafka_flags
def tail(
    url: Annotated[
        str | None, typer.Option(help="Address of the API.", envvar="KVSIGHT_URL", show_default=DEFAULT_URL)
    ] = None,
    api_token: ApiToken = None,
    kafka: Annotated[str | None, typer.Option(help="Read Kafka instead: HOST:PORT,...")] = None,
    log: Annotated[Path | None, typer.Option(help="Read an event log instead: its folder.")] = None,
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", help="With --kafka or --log: also old records.")
    ] = False,
    worker: Annotated[str | None, typer.Option(help="Only this worker.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    medium: Annotated[list[str] | None, typer.Option(help="Only changes on gpu, cpu, disk or external.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Only these kinds; see above. Repeatable.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", help="Stop after this many events.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    *,
    connection: dict[str, Any],
) -> None:
    """Show events as they come, until Ctrl-C.

    Reads GET /events of a running indexer, or with --kafka or --log the records that engines publish.

    Kinds: stored, removed, cleared, heartbeat, state (of a view; API only), dropped (API only), resync and rejected
    (records only).

    Example: kvsight tail --worker engine-0 --kind stored --kind removed
    """
    typed = Filter.of(worker, model, tenant, medium or [], kind or [])
    records_from = at_most_one({"--kafka": kafka, "--log": log})
    if from_beginning and records_from is None:
        raise UsageError("--from-beginning needs --kafka or --log: the API shows new events only")
    try:
        if records_from is None:
            with closing(_feed(url or DEFAULT_URL, api_token, typed)) as events:
                for event in islice(events, limit):
                    _show(event, as_json)
        else:
            source = _source(kafka, log, connection)
            run_until_interrupted(lambda: _show_records(source, typed, from_beginning, limit, as_json))
    except KeyboardInterrupt:
        return


def _show(event: TailEvent, as_json: bool) -> None:
    print_lines([msgspec.json.encode(event).decode() if as_json else event.line()])


def _feed(url: str, api_token: str | None, wanted: Filter) -> Generator[TailEvent]:
    """Yield what the API reports."""
    from kvsight.client import Client

    with Client(url, token=api_token) as client:
        for received in client.events(worker=wanted.worker, tenant=wanted.tenant):
            event = of_feed(received)
            if wanted.takes(event):
                yield event
    err.print("the service ended the stream")


def _source(kafka: str | None, log: Path | None, connection: dict[str, Any]) -> Source:
    from indexer.sources.file import FileSource
    from indexer.sources.kafka import KafkaSource
    from kv_events.kafka.settings import KafkaSettings

    if log is not None:
        return FileSource(log)
    return KafkaSource(KafkaSettings.from_flags(kafka=kafka, **connection))


async def _show_records(source: Source, wanted: Filter, from_beginning: bool, limit: int | None, as_json: bool) -> None:
    num_shown = 0
    async with aclosing(_records(source, from_beginning)) as events:
        async for event in events:
            if wanted.takes(event):
                _show(event, as_json)
                num_shown += 1
            if num_shown == limit:
                return


async def _records(source: Source, from_beginning: bool) -> AsyncGenerator[TailEvent]:
    """Yield the records of a source. Raises SourceUnavailableError if it cannot be opened; later outages pass."""
    from indexer.sources.reader import SourceReader

    await source.start({})
    try:
        if not from_beginning:
            ends = await source.ends()
            await source.stop()
            await source.start(ends)
        reader = SourceReader(source)
        while True:
            for record in await reader.fetch():
                if record.channel in (Channel.EVENTS, Channel.DEAD_LETTERS):
                    yield of_record(record)
    finally:
        await source.stop()
