"""`kvsight record`"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv_events.log.event_log import DeletedSegment, EventLogReader
from kv_events.log.moments import LogMoment
from kv_events.records import Channel
from kv_events.runtime.variables import BYTES, LEAST_LOG, SECONDS, parse_quantity
from kv_events.runtime.words import count
from kvsight.cli.logs.reading import write_key_frames
from kvsight.cli.logs.records import OF_EVENTS, OfChannel, channels_of
from kvsight.cli.shared.console import UsageError, err
from kvsight.cli.shared.flags import BROKER, KAFKA, METRICS_PORT, with_flags
from kvsight.cli.shared.process import load_kernels, run_until_interrupted, stop_signals

if TYPE_CHECKING:
    from indexer.recording.feed import Feed, Selection
    from indexer.recording.recorder import Recorder
    from kv_events.kafka.settings import KafkaSettings

_SHOW_S = 0.5
_FLAGS = {"kafka": BROKER, **METRICS_PORT}


@with_flags(_FLAGS, KAFKA)
def record(
    folder: Annotated[Path, typer.Argument(help="Folder of the event log, new or to continue.")],
    once: Annotated[bool, typer.Option("--once", help="Stop at the current end of the topics.")] = False,
    since: Annotated[str | None, typer.Option("--from", help="First moment: a time, or PARTITION:OFFSET,...")] = None,
    until: Annotated[str | None, typer.Option("--to", help="Last moment, in the same forms; then stop.")] = None,
    worker: Annotated[str | None, typer.Option(help="Only this worker.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    channel: OfChannel = None,
    *,
    max_bytes: Annotated[str | None, typer.Option(help="Bound on the log's size, such as 20GiB.")] = None,
    max_age: Annotated[str | None, typer.Option(help="Bound on the age of records, such as 7d.")] = None,
    segment_bytes: Annotated[str | None, typer.Option(help="Size of a file of the log.")] = None,
    flags: dict[str, Any],
) -> None:
    """Copy the topics of a deployment into an event log.

    These are events, control messages, decisions and dead letters. `kvsight replay` and `kvsight explain` read the log.
    Runs until Ctrl-C, or until the moment of --to. Records keep their partition, offset and timestamp. A bound is kept
    by deleting whole files of the log, oldest first. Without Kafka, `kvsight serve --record FOLDER` records what the
    service reads.

    Moments are times (ISO 8601, 15:27, -5m or @SECONDS since 1970), or offsets of the events' topic:
    PARTITION:OFFSET,... Records from --from up to --to are copied; the offset of --to is not.

    Example: kvsight record incident --kafka localhost:9092 --from 2026-01-31T12:00:00Z --to 2026-01-31T12:10:00Z
    """
    from indexer.recording.feed import Selection
    from indexer.recording.recorder import Recorder, segment_bytes_within
    from kv_events.kafka.settings import KafkaSettings

    if flags["kafka"] is None:
        raise UsageError("give --kafka HOST:PORT; without Kafka, `kvsight serve --record FOLDER` records what it reads")
    metrics_port = flags.pop("metrics_port")
    settings = KafkaSettings.from_flags(**flags)
    first, last = _moment("--from", since), _moment("--to", until)
    if first.time_s is not None and last.time_s is not None and first.time_s > last.time_s:
        raise UsageError(f"--from {since} is after --to {until}")
    has_offsets = first.offsets is not None or last.offsets is not None
    feeds = _feeds(settings, channels_of(channel), last, Selection(worker, model), has_offsets=has_offsets)
    segment = 0 if segment_bytes is None else max(1, int(parse_quantity("--segment-bytes", segment_bytes, BYTES)))
    least = str(2 * segment) if segment else LEAST_LOG
    size = None if max_bytes is None else int(parse_quantity("--max-bytes", max_bytes, BYTES, least))
    segment = segment or segment_bytes_within(size)
    age_s = None if max_age is None else parse_quantity("--max-age", max_age, SECONDS)
    if once or first.time_s is not None:  # otherwise it waits for the broker
        from kv_events.kafka.connection import KafkaConnection

        run_until_interrupted(KafkaConnection(settings).check)  # before anything is written
    load_kernels()
    recorder = Recorder(
        folder, segment_bytes=segment, max_bytes=size, max_age_s=age_s, is_patient=not once, on_deleted=_report_deletion
    )
    recorder.open()
    begun = f"recording topic {settings.events_topic} into {folder}; Ctrl-C stops"
    has_events = any(feed.is_recorded and feed.channel == Channel.EVENTS for feed in feeds)
    is_short = once and size is None and age_s is None  # no file is deleted before its records are indexed at the end
    indexed = folder if has_events and not is_short else None
    asyncio.run(_record(recorder, feeds, first, begun, once=once, indexed=indexed, metrics_port=metrics_port))
    if has_events:
        write_key_frames(folder)
    num_records = recorder.next_index - EventLogReader(folder).first_index
    err.print(f"stopped; {folder} holds {count(num_records, 'record')}")


def _report_deletion(segment: DeletedSegment) -> None:
    records = f"records {segment.first_index} to {segment.last_index}, {segment.num_bytes} bytes"
    err.print(f"deleted {segment.path.name}: {records}")


async def _record(
    recorder: Recorder,
    feeds: list[Feed],
    since: LogMoment,
    begun: str,
    *,
    once: bool,
    indexed: Path | None,
    metrics_port: int | None,
) -> None:
    """begun: printed when Ctrl-C stops in order. indexed: folder of the log, if key frames are written meanwhile."""
    stop = stop_signals()
    err.print(begun)
    from indexer.replay.log_indexer import indexing

    if metrics_port is not None:
        from api.telemetry.families import Collected, recording_families
        from publisher.metrics import serve_metrics

        serve_metrics(metrics_port, Collected(lambda: recording_families(recorder)), lambda: recorder.obstacle)
    for feed in feeds:
        await _begin(feed, since)
    async with nullcontext() if indexed is None else indexing(indexed):
        running = asyncio.create_task(recorder.run(feeds, stop, once=once))
        with err.status("") as status:
            while not (await asyncio.wait({running}, timeout=_SHOW_S))[0]:
                status.update(count(recorder.next_index, "record"))
        await running


async def _begin(feed: Feed, since: LogMoment) -> None:
    """Find the offsets at which a range begins. Raises SourceUnavailableError."""
    from indexer.sources.kafka import KafkaSource

    feed.begins = since.offsets or {}
    if since.time_s is not None:
        feed.since_s = since.time_s
        assert isinstance(feed.source, KafkaSource)  # as `create_feeds` makes them
        try:
            await feed.source.start({})
            feed.begins = await feed.source.offsets_at(since.time_s)
        finally:
            await feed.source.stop()


def _feeds(
    settings: KafkaSettings, channels: frozenset[int], until: LogMoment, selection: Selection, *, has_offsets: bool
) -> list[Feed]:
    """The topics to read. Offsets belong to the events' topic, so a range of offsets contains nothing else."""
    from indexer.assembly import create_feeds

    wanted = channels or frozenset(OF_EVENTS if has_offsets else Channel)
    if has_offsets and wanted - OF_EVENTS:
        raise UsageError("--from and --to name offsets of the events' topic: give times for other kinds of records")
    events, *others = create_feeds(settings)
    events.is_recorded, events.has_dead_letters = Channel.EVENTS in wanted, Channel.DEAD_LETTERS in wanted
    feeds = [events] if wanted & OF_EVENTS else []
    feeds += [feed for feed in others if feed.channel in wanted]
    for feed in feeds:
        feed.select, feed.until = selection.select, until
    return feeds


def _moment(flag: str, text: str | None) -> LogMoment:
    """A moment of a topic. Raises UsageError."""
    moment = LogMoment.parse(text, flag, may_come=flag == "--to")
    if moment.index is not None:
        raise UsageError(f"{flag}: got {text}; a topic has no index: give a time or PARTITION:OFFSET,...")
    return moment
