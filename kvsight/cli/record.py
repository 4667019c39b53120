"""`kvsight record`"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from indexer.sources.base import Source
from indexer.sources.reader import SourceReader
from kv_events.errors import InvalidValueError
from kv_events.event_log import EventLogReader, EventLogWriter
from kv_events.records import LogRecord
from kvsight.cli.console import err
from kvsight.cli.kafka_flags import with_kafka_flags


@with_kafka_flags
def record(
    folder: Annotated[Path, typer.Argument(help="Folder of the event log. An existing log is continued.")],
    kafka: Annotated[str, typer.Option(help="Kafka bootstrap servers: HOST:PORT,...", envvar="KVSIGHT_KAFKA")],
    once: Annotated[bool, typer.Option("--once", help="Stop at the current end of the topic.")] = False,
    *,
    connection: dict[str, Any],
) -> None:
    """Copy the events of a Kafka topic into an event log, for `kvsight replay`.

    Runs until Ctrl-C. Records keep their partition, offset and timestamp.
    """
    from indexer.sources.kafka import KafkaSource
    from kv_events.kafka_settings import KafkaSettings

    source = KafkaSource(KafkaSettings.from_flags(kafka=kafka, **connection))
    with EventLogWriter(folder) as writer:
        positions = next_offsets(folder)
        try:
            asyncio.run(_copy(source, writer, positions, once))
        except KeyboardInterrupt:
            err.print("stopped")
        err.print(f"{folder} holds {writer.next_index} records")


def next_offsets(folder: Path) -> dict[int, int]:
    """Partition -> the offset after its newest record in an event log."""
    positions: dict[int, int] = {}
    reader = EventLogReader(folder)
    for _, found in reader.read(reader.first_index):
        positions[found.partition] = found.offset + 1
    return positions


async def _copy(source: Source, writer: EventLogWriter, positions: dict[int, int], once: bool) -> None:
    reader = SourceReader(source)
    try:
        positions = dict(await source.start(positions))  # the topic may have been recreated
        goal = await source.ends() if once else None
        with err.status(f"recording, {writer.next_index} records so far; Ctrl-C stops") as status:
            while goal is None or any(positions.get(p, 0) < end for p, end in goal.items()):
                for found in await reader.fetch():
                    _append(writer, found)
                    positions[found.partition] = found.offset + 1
                await asyncio.to_thread(writer.flush)
                status.update(f"recording, {writer.next_index} records so far; Ctrl-C stops")
    finally:
        await source.stop()


def _append(writer: EventLogWriter, found: LogRecord) -> None:
    try:
        writer.append(found)
    except InvalidValueError as error:
        err.print(f"skipped partition {found.partition} offset {found.offset}: {error}")
