"""`kvsight tail`"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kv_events.http.service import DEFAULT_URL
from kv_events.log.format import list_segments
from kvsight.cli.logs.lines import RecordLine, full_records, of_feed, of_record
from kvsight.cli.logs.reading import LogInput
from kvsight.cli.logs.records import OF_EVENTS, From, LogRange, OfChannel, RecordFilter, Selection, To
from kvsight.cli.shared.console import UsageError, at_most_one, err, print_lines
from kvsight.cli.shared.flags import KAFKA, ApiToken, Url, with_flags
from kvsight.cli.shared.process import run_until_interrupted

if TYPE_CHECKING:
    from indexer.sources.base import Source


@with_flags(KAFKA)
def tail(
    *,
    url: Url = DEFAULT_URL,
    api_token: ApiToken = None,
    kafka: Annotated[str | None, typer.Option(help="Read Kafka instead: HOST:PORT,...")] = None,
    log: Annotated[Path | None, typer.Option(help="Read an event log instead: its folder.")] = None,
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", help="With --kafka or --log: also old records.")
    ] = False,
    first: From = None,
    last: To = None,
    full: Annotated[bool, typer.Option("--full", help="With --log: all of each record, as JSON.")] = False,
    worker: Annotated[str | None, typer.Option(help="Only this worker.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    medium: Annotated[list[str] | None, typer.Option(help="Only changes on gpu, cpu, disk or external.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Only these kinds; see above. Repeatable.")] = None,
    channel: OfChannel = None,
    sequence_hash: Annotated[list[str] | None, typer.Option(help="Only batches with this hash. Repeatable.")] = None,
    block_hash: Annotated[list[str] | None, typer.Option(help="Only batches with this hash. Repeatable.")] = None,
    seq: Annotated[str | None, typer.Option(help="Only these numbers: NUMBER or FIRST-LAST.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", help="Stop after this many events.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    flags: dict[str, Any],
) -> None:
    """Show events as they come, or those of an event log.

    Ends with Ctrl-C. Reads GET /events of a running indexer, or with --kafka or --log the records that engines publish.

    Kinds: stored, removed, cleared, heartbeat, state (of a view; API only), dropped (API only), resync and rejected
    (records only).

    With --log and any of --from, --to, --full, --channel, --seq and the hashes, prints what the log has and ends.
    --from and --to accept what `kvsight replay --at` does. --full also prints control messages and decisions.

    Example: kvsight tail --worker engine-0 --kind stored --kind removed
    """
    records_from = at_most_one({"--kafka": kafka, "--log": log})
    given = {"--from": first, "--to": last, "--full": full, "--channel": channel, "--seq": seq}
    given |= {"--sequence-hash": sequence_hash, "--block-hash": block_hash}
    of_past = next((flag for flag, value in given.items() if value), None)
    if of_past is not None and log is None:
        raise UsageError(f"{of_past} needs --log")
    if from_beginning and (records_from is None or of_past is not None):
        raise UsageError("--from-beginning needs --kafka or --log: the API shows new events only")
    hashes = {"sequence_hash": sequence_hash, "block_hash": block_hash}
    wanted = RecordFilter.parse(worker, model, tenant, medium, kind, channel, seq, **hashes)
    wanted.check(of_records=records_from is not None, full=full or of_past is None)
    try:
        if log is not None and of_past is not None:
            _print_past(LogInput(log), Selection(LogRange.of(first, last), wanted), limit, full, as_json)
        elif records_from is None:
            with closing(_feed(url, api_token, wanted)) as events:
                for event in islice(events, limit):
                    _show(event, as_json)
        else:
            if log is not None and log.is_dir() and not list_segments(log):
                err.print(f"{log}: no event log, it has no files *.kvlog; waiting for one")
            source = _source(kafka, log, flags)
            run_until_interrupted(lambda: _show_records(source, wanted, from_beginning, limit, as_json))
    except KeyboardInterrupt:
        return


def _print_past(source: LogInput, selection: Selection, limit: int | None, full: bool, as_json: bool) -> None:
    """Print the records of a log. Ends with exit code 1 if parts of it could not be read."""
    encode, write, num_left = msgspec.json.Encoder().encode, sys.stdout.buffer.write, limit
    has_shown = False
    for chunk in source.chunks("reading"):
        for index, record in selection.records(chunk):
            if not full and record.channel not in OF_EVENTS:
                continue
            has_shown = True
            for each in full_records(index, record) if full else [of_record(record)]:
                if isinstance(each, RecordLine):
                    _show(each, as_json)
                else:
                    write(encode(each) + b"\n")
                if num_left is not None and (num_left := num_left - 1) == 0:
                    return
    sys.stdout.flush()
    if not selection.num_in_range and selection.range.is_bounded:
        source.fail_outside(str(selection.range))
    if not has_shown and source.extent.num_records:
        err.print(f"{source.folder}: no record matches")
    source.exit_if_damaged()


def _show(event: RecordLine, as_json: bool) -> None:
    print_lines([msgspec.json.encode(event).decode() if as_json else event.line()])


def _feed(url: str, api_token: str | None, wanted: RecordFilter) -> Generator[RecordLine]:
    from kvsight.client import Client

    with Client(url, token=api_token) as client:
        for received in client.events(worker=wanted.worker, tenant=wanted.tenant):
            event = of_feed(received)
            if wanted.takes(event):
                yield event
    err.print("the service ended the stream")


def _source(kafka: str | None, log: Path | None, flags: dict[str, Any]) -> Source:
    from indexer.sources.file import FileSource
    from indexer.sources.kafka import KafkaSource
    from kv_events.kafka.settings import KafkaSettings

    if log is not None:
        return FileSource(log)
    return KafkaSource(KafkaSettings.from_flags(kafka=kafka, **flags))


async def _show_records(
    source: Source, wanted: RecordFilter, from_beginning: bool, limit: int | None, as_json: bool
) -> None:
    """Show the records of a source. Raises SourceUnavailableError if it cannot be opened; later outages pass."""
    from indexer.sources.reader import SourceReader

    num_shown = 0
    await source.start({})
    try:
        if not from_beginning:
            ends = await source.ends()
            await source.stop()
            await source.start(ends)
        reader = SourceReader(source)
        while True:
            for record in await reader.fetch():
                if record.channel in OF_EVENTS and wanted.takes(event := of_record(record)):
                    _show(event, as_json)
                    num_shown += 1
                    if num_shown == limit:
                        return
    finally:
        await source.stop()
