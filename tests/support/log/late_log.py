"""Logs of some records, also such that begin late, with a key frame at their first record."""

from collections.abc import Iterable
from pathlib import Path

from indexer.replay import LogIndexer
from indexer.settings import IndexerSettings
from kv_events.log.event_log import EventLogWriter
from kv_events.records import LogRecord


def write_late_log(
    folder: Path, records: Iterable[LogRecord], begin: int, settings: IndexerSettings | None = None
) -> None:
    """Write a log, and delete the records before index `begin`, as retention does, after key frames were written."""
    with EventLogWriter(folder) as writer:
        for index, record in enumerate(records):
            if index == begin:
                writer.start_segment()
            writer.append(record)
    LogIndexer(folder, settings).advance()
    if begin:
        for path in folder.glob(f"{0:020d}.*"):
            path.unlink()


def write_log(folder: Path, records: Iterable[LogRecord], segment_bytes: int = 2**26) -> Path:
    """Write a log, and return its folder."""
    with EventLogWriter(folder, segment_bytes=segment_bytes) as writer:
        for record in records:
            writer.append(record)
    return folder
