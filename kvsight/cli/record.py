"""`kvsight record`"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv_events.errors import InvalidValueError
from kv_events.event_log import EventLogReader, EventLogWriter
from kv_events.records import Channel, LogRecord
from kvsight.cli.connection_flags import with_kafka_flags
from kvsight.cli.console import UsageError, err

if TYPE_CHECKING:
    from indexer.sources.base import Source
    from kv_events.log_retention import LogRetention

_SEGMENT_BYTES = 64 * 2**20
_MIN_SEGMENTS = 8
"""Segments in which a bound on the size is kept at least."""
_PROBE_S = 1.0
_BYTES = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


@with_kafka_flags
def record(
    folder: Annotated[Path, typer.Argument(help="Folder of the event log, new or to continue.")],
    kafka: Annotated[str, typer.Option(help="Kafka bootstrap servers: HOST:PORT,...", envvar="KVSIGHT_KAFKA")],
    once: Annotated[bool, typer.Option("--once", help="Stop at the current end of the topic.")] = False,
    max_bytes: Annotated[str | None, typer.Option(help="Bound on the log's size, such as 20GiB.")] = None,
    max_age: Annotated[str | None, typer.Option(help="Bound on the age of records, such as 7d.")] = None,
    segment_bytes: Annotated[str | None, typer.Option(help="Size of a file of the log.")] = None,
    *,
    connection: dict[str, Any],
) -> None:
    """Copy the events of a Kafka topic into an event log.

    `kvsight replay` reads it. Runs until Ctrl-C. Records keep their partition, offset and timestamp. A bound is kept by
    deleting whole files of the log, oldest first.
    """
    from indexer.sources.kafka import KafkaSource
    from kv_events.kafka_settings import KafkaSettings
    from kv_events.log_retention import LogRetention

    settings = KafkaSettings.from_flags(kafka=kafka, **connection)
    source = KafkaSource(settings)
    size = None if max_bytes is None else int(_amount("--max-bytes", max_bytes, _BYTES))
    age_s = None if max_age is None else _amount("--max-age", max_age, _SECONDS)
    segment = _SEGMENT_BYTES if size is None else min(_SEGMENT_BYTES, size // _MIN_SEGMENTS)
    if segment_bytes is not None:
        segment = int(_amount("--segment-bytes", segment_bytes, _BYTES))
    with EventLogWriter(folder, segment_bytes=max(1, segment)) as writer:
        retention = LogRetention(folder, writer, size, age_s)
        err.print(f"recording topic {settings.events_topic} into {folder}; Ctrl-C stops")
        asyncio.run(_copy(source, writer, retention, next_offsets(folder)[Channel.EVENTS], once))
        num_records = writer.next_index - EventLogReader(folder).first_index
        err.print(f"stopped; {folder} holds {num_records} records")


def next_offsets(folder: Path) -> defaultdict[int, dict[int, int]]:
    """Channel -> partition -> the offset after its newest record in an event log."""
    positions: defaultdict[int, dict[int, int]] = defaultdict(dict)
    reader = EventLogReader(folder)
    for _, found in reader.read(reader.first_index):
        positions[found.channel][found.partition] = found.offset + 1
    return positions


async def _copy(
    source: Source, writer: EventLogWriter, retention: LogRetention, positions: dict[int, int], once: bool
) -> None:
    from indexer.slices import Interval
    from indexer.sources.reader import SourceReader

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    reader = SourceReader(source)
    goal = None
    try:
        if once:
            positions, goal = await _open_once(source, positions)
        else:
            while not stop.is_set() and (opened := await reader.start(positions)) is None:
                pass  # the reader has logged why, and paused
            positions = dict(opened.begins) if opened is not None else positions
        probe = Interval(_PROBE_S, time.monotonic())
        with err.status("") as status:
            while not stop.is_set() and (goal is None or any(positions.get(p, 0) < end for p, end in goal.items())):
                for found in await reader.fetch():
                    _append(writer, found)
                    positions[found.partition] = found.offset + 1
                if probe.is_due(time.monotonic()):
                    await reader.ends()  # finds a topic or partitions that are created later
                await asyncio.to_thread(_keep, writer, retention)
                status.update(f"{writer.next_index} records")
    finally:
        await source.stop()


async def _open_once(source: Source, positions: dict[int, int]) -> tuple[dict[int, int], dict[int, int]]:
    """Begin to read. Returns the positions and the ends of the partitions."""
    begins = dict(await source.start(positions))  # the topic may have been recreated
    if not begins:
        raise UsageError("the topic does not exist; `kvsight topics check` shows what does")
    return begins, dict(await source.ends())


def _keep(writer: EventLogWriter, retention: LogRetention) -> None:
    """Write what was read, and delete what exceeds a bound."""
    writer.flush()
    for segment in retention.enforce():
        records = f"records {segment.first_index} to {segment.last_index}, {segment.num_bytes} bytes"
        err.print(f"deleted {segment.path.name}: {records}")


def _append(writer: EventLogWriter, found: LogRecord) -> None:
    try:
        writer.append(found)
    except InvalidValueError as error:
        err.print(f"skipped partition {found.partition} offset {found.offset}: {error}")


def _amount(flag: str, text: str, units: dict[str, int]) -> float:
    """A positive number with a unit. Raises InvalidValueError naming the flag."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2] not in units or not float(found[1]) > 0:
        raise InvalidValueError(flag, text, f"a positive number with one of the units {', '.join(filter(None, units))}")
    return float(found[1]) * units[found[2]]
