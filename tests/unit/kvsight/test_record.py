"""Copying a log into an event log."""

from __future__ import annotations

from pathlib import Path

from indexer.sources.memory import MemorySource
from kv_events.event_log import EventLogReader, EventLogWriter
from kv_events.log_retention import LogRetention
from kv_events.memory_log import MemoryLog
from kv_events.records import Channel, LogRecord
from kvsight.cli.record import _copy, next_offsets


async def _record(log: MemoryLog, folder: Path) -> list[bytes]:
    with EventLogWriter(folder) as writer:
        positions = next_offsets(folder)[Channel.EVENTS]
        await _copy(MemorySource(log), writer, LogRetention(folder, writer, None, None), positions, once=True)
    return [record.payload for _, record in EventLogReader(folder).read(0)]


def _log(*payloads: bytes) -> MemoryLog:
    log = MemoryLog()
    for payload in payloads:
        log.append(b"key", payload, 1)
    return log


async def test_a_recording_continues_where_it_ended(tmp_path: Path) -> None:
    log = _log(b"1", b"2")
    assert await _record(log, tmp_path) == [b"1", b"2"]
    log.append(b"key", b"3", 1)
    assert await _record(log, tmp_path) == [b"1", b"2", b"3"]


async def test_a_log_that_was_recreated_is_recorded_from_its_beginning(tmp_path: Path) -> None:
    await _record(_log(b"1", b"2", b"3"), tmp_path)
    assert await _record(_log(b"4", b"5"), tmp_path) == [b"1", b"2", b"3", b"4", b"5"]


def test_offsets_are_counted_for_each_channel_and_partition(tmp_path: Path) -> None:
    with EventLogWriter(tmp_path) as writer:
        writer.append(LogRecord(0, 7, 1, b"key", b"1"))
        writer.append(LogRecord(0, 40, 1, b"key", b"2", Channel.DECISIONS))
        writer.append(LogRecord(1, 3, 1, b"key", b"3"))
    assert next_offsets(tmp_path) == {Channel.EVENTS: {0: 8, 1: 4}, Channel.DECISIONS: {0: 41}}
