"""The records of the past: an event log, or what a topic holds now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsight.cli.console import UsageError, at_most_one, interrupting_loops, progress_bar, run_until_interrupted
from kvsight.cli.log.reading import LogInput

if TYPE_CHECKING:
    from rich.progress import Progress

    from kv_events.log.moments import LogExtent, LogMoment
    from kv_events.records import LogRecord


class History(NamedTuple):
    """The records of a log, from the oldest to the newest."""

    name: str
    read: Callable[[Progress], Iterator[tuple[int, LogRecord]]]
    """Yields each record with its index, and shows the progress in its argument."""
    log: LogInput | None = None
    """None: a topic."""

    def records(self, extent: LogExtent) -> Iterator[tuple[int, LogRecord]]:
        """Yield each record with its index, noted in an extent, and show the progress on stderr."""
        with progress_bar() as bar:
            for index, record in self.read(bar):
                extent.note(index, record)
                yield index, record

    def exit_if_damaged(self) -> None:
        """Print warnings and what could not be read. Ends with exit code 1 unless everything was read."""
        if self.log is not None:
            self.log.exit_if_damaged()


def open_history(log: Path | None, kafka: str | None, connection: dict[str, Any], moment: LogMoment) -> History:
    """Open the log that was asked for. connection: further settings of Kafka. Raises KvsightError."""
    if at_most_one({"LOG": log, "--kafka": kafka}) is None:
        raise UsageError("give the folder of an event log, or --kafka HOST:PORT")
    if log is None:
        return _topic(kafka, connection, moment)
    source = LogInput(log)
    return History(str(log), lambda bar: source.records("replaying", bar), source)


def _topic(kafka: str | None, connection: dict[str, Any], moment: LogMoment) -> History:
    from indexer.sources.kafka import KafkaSource
    from indexer.sources.reader import source_records
    from kv_events.kafka.connection import KafkaConnection
    from kv_events.kafka.settings import KafkaSettings

    if moment.index is not None:
        raise UsageError(f"--at {moment.typed}: a topic has no index; give a time or PARTITION:OFFSET,...")
    settings = KafkaSettings.from_flags(kafka=kafka, **connection)
    run_until_interrupted(KafkaConnection(settings).check)  # before kernels are compiled
    name = f"topic {settings.events_topic}"

    def read(bar: Progress) -> Iterator[tuple[int, LogRecord]]:
        task = bar.add_task("replaying", total=None)
        records = source_records(KafkaSource(settings), lambda total: bar.update(task, total=total))
        with interrupting_loops():
            for index, record in enumerate(records):
                if index % 256 == 0:
                    bar.update(task, completed=index)
                yield index, record

    return History(name, read)
