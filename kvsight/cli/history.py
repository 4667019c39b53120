"""The records of the past: an event log, or what a topic holds now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kv_events.event_log import EventLogReader
from kvsight.cli.console import UsageError, at_most_one

if TYPE_CHECKING:
    from kv_events.records import LogRecord
    from kvsight.cli.moments import LogSpan, Moment


class History(NamedTuple):
    """The records of a log, from the oldest to the newest."""

    name: str
    is_topic: bool
    read: Callable[[Callable[[int], None]], Iterator[tuple[int, LogRecord]]]
    """Yields each record with its index. Passes their number to its argument when it begins."""

    def records(self, span: LogSpan) -> Iterator[tuple[int, LogRecord]]:
        """Yield each record with its index, noted in a span, and show the progress on stderr."""
        from kvsight.cli.console import progress_bar

        with progress_bar() as bar:
            task = bar.add_task("replaying", total=None)
            for index, record in self.read(lambda total: bar.update(task, total=total)):
                span.note(index, record)
                if span.records % 256 == 0:
                    bar.update(task, completed=span.records)
                yield index, record


def open_history(log: Path | None, kafka: str | None, connection: dict[str, Any], moment: Moment) -> History:
    """Open the log that was asked for. connection: further settings of Kafka. Raises KvsightError."""
    if at_most_one({"LOG": log, "--kafka": kafka}) is None:
        raise UsageError("give the folder of an event log, or --kafka HOST:PORT")
    if log is None:
        return _topic(kafka, connection, moment)
    reader = EventLogReader(log)

    def read(on_start: Callable[[int], None]) -> Iterator[tuple[int, LogRecord]]:
        on_start(reader.next_index - reader.first_index)
        return reader.read(reader.first_index)

    return History(str(log), False, read)


def _topic(kafka: str | None, connection: dict[str, Any], moment: Moment) -> History:
    from indexer.sources.history import source_records
    from indexer.sources.kafka import KafkaSource
    from kv_events.kafka_clients import KafkaConnection
    from kv_events.kafka_settings import KafkaSettings

    if moment.until.offset is not None:
        raise UsageError(f"--at {moment.text}: a topic has no index; give a time or PARTITION:OFFSET,...")
    settings = KafkaSettings.from_flags(kafka=kafka, **connection)
    asyncio.run(KafkaConnection(settings).check())  # before kernels are compiled
    name = f"topic {settings.events_topic}"
    return History(name, True, lambda on_start: enumerate(source_records(KafkaSource(settings), on_start)))
