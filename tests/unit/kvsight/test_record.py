"""What `kvsight record` copies: a log, once or on and on, with its range and its kinds of records."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from indexer.recording.feed import Feed, Selection
from indexer.recording.recorder import Recorder
from indexer.sources.memory import MemorySource
from kv_events.decisions import VERSION, Decision, Outcome, encode_decision
from kv_events.log.event_log import EventLogReader, EventLogWriter
from kv_events.log.format import list_segments
from kv_events.log.memory import MemoryLog
from kv_events.log.moments import LogMoment
from kv_events.log.recorded_offsets import LogPositions
from kv_events.records import Channel, LogRecord
from tests.support.log.records import Stream, stored


async def _record(log: MemoryLog, folder: Path, **of_feed: object) -> list[bytes]:
    feed = Feed(MemorySource(log), Channel.EVENTS, "log", **of_feed)  # type: ignore[arg-type]
    await Recorder(folder, is_patient=False).run([feed], asyncio.Event(), once=True)
    return [record.payload for record in _records(folder)]


def _records(folder: Path) -> list[LogRecord]:
    return [record for _, record in EventLogReader(folder).read(0)]


def _log(*payloads: bytes) -> MemoryLog:
    log = MemoryLog()
    for number, payload in enumerate(payloads):
        log.append(b"key", payload, 1000 * number)
    return log


async def test_a_recording_continues_where_it_ended(tmp_path: Path) -> None:
    log = _log(b"1", b"2")
    assert await _record(log, tmp_path) == [b"1", b"2"]
    log.append(b"key", b"3", 1)
    assert await _record(log, tmp_path) == [b"1", b"2", b"3"]


async def test_a_recording_continues_without_the_file_of_its_positions(tmp_path: Path) -> None:
    log = _log(b"1", b"2")
    await _record(log, tmp_path)
    (tmp_path / "positions.json").unlink()
    log.append(b"key", b"3", 1)
    assert await _record(log, tmp_path) == [b"1", b"2", b"3"]


async def test_a_recording_that_lost_its_tail_copies_it_again(tmp_path: Path) -> None:
    log = _log(b"1", b"2", b"3")
    await _record(log, tmp_path)
    (segment,) = list_segments(tmp_path)
    os.truncate(segment.path, segment.path.stat().st_size - 1)
    assert await _record(log, tmp_path) == [b"1", b"2", b"3"]


async def test_a_log_that_was_recreated_is_recorded_from_its_beginning(tmp_path: Path) -> None:
    await _record(_log(b"1", b"2", b"3"), tmp_path)
    assert await _record(_log(b"4", b"5"), tmp_path) == [b"1", b"2", b"3", b"4", b"5"]


def test_offsets_are_counted_for_each_channel_and_partition(tmp_path: Path) -> None:
    with EventLogWriter(tmp_path) as writer:
        writer.append(LogRecord(0, 7, 1, b"key", b"1"))
        writer.append(LogRecord(0, 40, 1, b"key", b"2", Channel.DECISIONS))
        writer.append(LogRecord(1, 3, 1, b"key", b"3"))
    positions = LogPositions(tmp_path, next_index=3)
    assert positions.of(Channel.EVENTS) == {0: 8, 1: 4}
    assert positions.of(Channel.DECISIONS) == {0: 41}


async def test_a_range_of_times_is_recorded(tmp_path: Path) -> None:
    log = _log(b"0", b"1", b"2", b"3", b"4")
    assert await _record(log, tmp_path, since_s=1.0, until=LogMoment(time_s=3.0)) == [b"1", b"2", b"3"]


async def test_a_range_of_offsets_is_recorded(tmp_path: Path) -> None:
    log = _log(b"0", b"1", b"2", b"3", b"4")
    assert await _record(log, tmp_path, begins={0: 1}, until=LogMoment(offsets={0: 3})) == [b"1", b"2"]


async def test_a_recording_ends_when_its_range_does(tmp_path: Path) -> None:
    log = _log(b"0", b"1")
    feed = Feed(MemorySource(log), Channel.EVENTS, "log", until=LogMoment(offsets={0: 3}))
    running = asyncio.create_task(Recorder(tmp_path).run([feed], asyncio.Event()))
    await asyncio.sleep(0)
    for payload in (b"2", b"3"):
        log.append(b"key", payload, 1)
    await asyncio.wait_for(running, 10)
    assert [record.payload for record in _records(tmp_path)] == [b"0", b"1", b"2"]


def _selected(selection: Selection, records: Sequence[LogRecord]) -> list[LogRecord]:
    return [record for record in records if selection.takes(record)]


def test_one_worker_or_one_model_is_selected_with_its_group_streams() -> None:
    names = [("a/b", "m"), ("a/b", "n"), ("c", "m"), ("c", "m#mamba")]
    records = [Stream(worker, model=model).batch(now=1.0) for worker, model in names]
    assert _selected(Selection(None, None), records) == records
    assert _selected(Selection("a/b", None), records) == records[:2]
    assert _selected(Selection(None, "m"), records) == [records[0], *records[2:]]
    assert _selected(Selection("a/b", "n"), records) == [records[1]]
    assert _selected(Selection("a", None), [LogRecord(0, 0, 0, b"garbage", b"")]) == []


def test_decisions_for_a_worker_are_selected_with_their_outcomes() -> None:
    def decision(number: int, worker: str) -> LogRecord:
        hashes = np.arange(1, dtype="<u8").tobytes()
        found = Decision(VERSION, f"r{number}", 1.0, "m", "default", 4, 4, hashes, worker, None, 4, [])
        return LogRecord(0, number, 1, b"", encode_decision(found), Channel.DECISIONS)

    def outcome(number: int, request: str) -> LogRecord:
        return LogRecord(0, number, 1, b"", encode_decision(Outcome(VERSION, request, 1.0, 0)), Channel.DECISIONS)

    records = [decision(0, "a"), decision(1, "b"), outcome(2, "r0"), outcome(3, "r1")]
    assert _selected(Selection("a", None), records) == [records[0], records[2]]
    assert _selected(Selection(None, "other"), records) == []


@pytest.mark.parametrize("is_recorded", [True, False])
async def test_records_that_cannot_be_decoded_are_dead_letters_as_well(tmp_path: Path, is_recorded: bool) -> None:
    log = MemoryLog()
    good = Stream().batch(stored((0, [1])), now=1.0)
    log.append(good.key, good.payload, 1)
    log.append(good.key, b"garbage", 2)
    await _record(log, tmp_path, is_recorded=is_recorded, has_dead_letters=True)
    found = [(record.channel, record.offset, record.payload) for record in _records(tmp_path)]
    events = [(Channel.EVENTS, 0, good.payload), (Channel.EVENTS, 1, b"garbage")]
    assert found == [*(events if is_recorded else []), (Channel.DEAD_LETTERS, 1, b"garbage")]
