"""What a recorder copies, once or on and on; and beside an event loop, with a disk that hangs."""

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from indexer.recording.feed import Feed, Selection
from indexer.recording.recorder import MAX_WAITING_BYTES, LogPositions, Recorder, RecordingThread
from indexer.sources.memory import MemorySource
from kv_events.decisions import VERSION, Decision, Outcome, encode_decision
from kv_events.log.event_log import DeletedSegment, EventLogReader, EventLogWriter
from kv_events.log.format import EventLogCorruptedError, list_segments, size_of
from kv_events.log.memory import MemoryLog
from kv_events.log.moments import LogMoment
from kv_events.log.reader import scan_log
from kv_events.records import Channel, LogRecord
from kv_events.reservations import RELEASED, Progressed, ReservationRecord, encode_reservation, joined
from tests.support.log.late_log import write_log
from tests.support.log.plain_log import flip, segments
from tests.support.log.records import Stream, records_of, stored
from tests.support.replica_process import reserved
from tests.support.waiting import async_wait_until


def record(number: int, num_bytes: int = 1000) -> LogRecord:
    return LogRecord(0, number, 1, b"key", bytes(num_bytes), Channel.EVENTS)


def damage_the_last(folder: Path, where: slice) -> Path:
    path = max(folder.glob("*.kvlog"))
    data = bytearray(path.read_bytes())
    data[where] = bytes(byte ^ 1 for byte in data[where])
    path.write_bytes(data)
    return path


async def test_a_disk_that_hangs_is_reported_and_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.recording.recorder._STUCK_S", 1.0)
    answers = threading.Event()

    def hang(_segment: DeletedSegment) -> None:
        """Stands in for a disk that does not answer."""
        answers.wait()

    recorder = Recorder(tmp_path, segment_bytes=2000, max_bytes=4000, on_deleted=hang)
    recording = RecordingThread(recorder)
    async with recording.running():
        assert recording.degraded == ""
        for number in range(10):
            recorder.offer(record(number))
        await async_wait_until(lambda: recording.degraded, 60, "the report")
        assert "recording degraded: no answer of the disk for " in recording.degraded
        assert recorder.degraded_seconds > 1
        recorder.offer(record(10))
        answers.set()
        await async_wait_until(lambda: not recording.degraded, 60, "the disk")
        await async_wait_until(lambda: recorder.written == 11, 60, "the records")
    kept = [found.offset for found in records_of(tmp_path)]
    assert kept == list(range(11 - len(kept), 11))


async def test_a_folder_with_another_topic_is_named_beside_a_service(tmp_path: Path) -> None:
    def feeds(topic: str) -> list[Feed]:
        return [Feed(MemorySource(_log(b"1")), Channel.EVENTS, topic)]

    recorder = Recorder(tmp_path)
    async with RecordingThread(recorder, lambda: feeds("one")).running():
        await async_wait_until(lambda: recorder.written == 1, 60, "the record")
    recording = RecordingThread(Recorder(tmp_path), lambda: feeds("other"))
    async with recording.running():
        await async_wait_until(lambda: recording.degraded, 60, "the refusal")
        assert "it has records of topic one, not of other: give another folder" in recording.degraded
    assert [found.payload for found in records_of(tmp_path)] == [b"1"]


async def test_records_that_are_offered_beyond_the_bound_are_lost_and_counted(tmp_path: Path) -> None:
    recorder, small, size = Recorder(tmp_path), record(0, 30), 500_000
    assert small.memory_bytes > 256  # small records count with the memory that they take
    fitting = MAX_WAITING_BYTES // record(0, size).memory_bytes
    for number in range(fitting + 3):
        recorder.offer(record(number, size))
    assert recorder.lost == 3
    async with RecordingThread(recorder).running():
        await async_wait_until(lambda: recorder.written == fitting, 30, "the records that fit")
        recorder.offer(record(fitting, size))
        await async_wait_until(lambda: recorder.written == fitting + 1, 30, "a further one")


async def test_what_is_offered_last_is_written_before_the_end(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    async with RecordingThread(recorder).running():
        recorder.offer(record(0))
        await async_wait_until(lambda: recorder.written == 1, 60, "the first record")
        for number in range(1, 101):
            recorder.offer(record(number))
    recorder.offer(record(101))
    kept = [found.offset for found in records_of(tmp_path)]
    assert kept == list(range(101))
    assert (recorder.written, recorder.lost) == (101, 1)


async def test_a_recording_goes_on_after_damage_and_knows_what_it_has(tmp_path: Path) -> None:
    write_log(tmp_path, (record(number) for number in range(10)))
    (segment,) = segments(tmp_path)
    flip(segment, size_of(segment) // 2)
    recorder = Recorder(tmp_path)
    async with RecordingThread(recorder).running():
        for number in range(8, 12):  # it has two of them
            recorder.offer(record(number))
    reader = EventLogReader(tmp_path)
    assert reader.next_index == 12
    assert [(index, found.offset) for index, found in reader.read(8)] == [(n, n) for n in range(8, 12)]
    assert recorder.written == 2


@pytest.mark.parametrize("damaged", [slice(0, 1), slice(0, None)], ids=["header", "everything"])
async def test_a_recording_goes_on_after_a_file_with_a_damaged_header(
    tmp_path: Path, damaged: slice, caplog: pytest.LogCaptureFixture
) -> None:
    write_log(tmp_path, (record(number) for number in range(10)), 3000)
    last = damage_the_last(tmp_path, damaged)
    for first in (8, 12):
        recorder = Recorder(tmp_path)
        async with RecordingThread(recorder).running():
            for number in range(first, first + 4):
                recorder.offer(record(number))
        assert recorder.degraded == ""
    damage: list[EventLogCorruptedError] = []
    kept = [found.offset for chunk in scan_log(tmp_path, damage.append) for _, found in chunk.records()]
    assert kept == ([*range(16)] if damaged.stop else [*range(8), *range(8, 16)])
    assert {error.segment for error in damage} == {last}
    assert len([line for line in caplog.messages if "the log goes on in a new segment" in line]) == 1


async def test_what_the_disk_does_not_accept_before_the_end_is_counted(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    with EventLogWriter(tmp_path):
        async with RecordingThread(recorder).running():
            await async_wait_until(lambda: recorder.degraded, 60, "the report")
            for number in range(10):
                recorder.offer(record(number))
    assert (recorder.written, recorder.lost) == (0, 10)


async def test_a_folder_that_another_writer_has_open_is_used_when_it_is_free(tmp_path: Path) -> None:
    first, second = Recorder(tmp_path), Recorder(tmp_path)
    async with RecordingThread(first).running():
        first.offer(record(0))
        await async_wait_until(lambda: first.written == 1, 60, "the first record")
        waiting = RecordingThread(second)
        running = waiting.running()
        await running.__aenter__()
        second.offer(record(1))
        await async_wait_until(lambda: "another writer" in waiting.degraded, 60, "the report")
    await async_wait_until(lambda: second.written == 1, 60, "the second record")
    assert waiting.degraded == ""
    await running.__aexit__(None, None, None)


async def _record(log: MemoryLog, folder: Path, **of_feed: object) -> list[bytes]:
    feed = Feed(MemorySource(log), Channel.EVENTS, "log", **of_feed)  # type: ignore[arg-type]
    await Recorder(folder, is_patient=False).run([feed], asyncio.Event(), once=True)
    return [record.payload for record in records_of(folder)]


def _log(*payloads: bytes) -> MemoryLog:
    log = MemoryLog()
    for number, payload in enumerate(payloads):
        log.append(b"key", payload, 1000 * number)
    return log


@pytest.mark.parametrize("has_positions", [True, False])
async def test_a_recording_continues_where_it_ended(tmp_path: Path, has_positions: bool) -> None:
    log = _log(b"1", b"2")
    assert await _record(log, tmp_path) == [b"1", b"2"]
    if not has_positions:
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
    assert positions.by_channel[Channel.EVENTS] == {0: 8, 1: 4}
    assert positions.by_channel[Channel.DECISIONS] == {0: 41}


@pytest.mark.parametrize(
    ("bounds", "recorded"),
    [
        ({"since_s": 1.0, "until": LogMoment(time_s=3.0)}, [b"1", b"2", b"3"]),
        ({"begins": {0: 1}, "until": LogMoment(offsets={0: 3})}, [b"1", b"2"]),
    ],
)
async def test_a_range_is_recorded(tmp_path: Path, bounds: dict[str, object], recorded: list[bytes]) -> None:
    assert await _record(_log(b"0", b"1", b"2", b"3", b"4"), tmp_path, **bounds) == recorded


async def test_a_recording_ends_when_its_range_does(tmp_path: Path) -> None:
    log = _log(b"0", b"1")
    feed = Feed(MemorySource(log), Channel.EVENTS, "log", until=LogMoment(offsets={0: 3}))
    running = asyncio.create_task(Recorder(tmp_path).run([feed], asyncio.Event()))
    await asyncio.sleep(0)
    for payload in (b"2", b"3"):
        log.append(b"key", payload, 1)
    await asyncio.wait_for(running, 10)
    assert [record.payload for record in records_of(tmp_path)] == [b"0", b"1", b"2"]


def _selected(selection: Selection, records: Sequence[LogRecord]) -> list[LogRecord]:
    return [taken for record in records if (taken := selection.select(record)) is not None]


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
        found = Decision(VERSION, f"r{number}", 1.0, "m", "default", 4, 4, hashes, worker, None, 4, ())
        return LogRecord(0, number, 1, b"", encode_decision(found), Channel.DECISIONS)

    def outcome(number: int, request: str) -> LogRecord:
        return LogRecord(0, number, 1, b"", encode_decision(Outcome(VERSION, request, 1.0, 0)), Channel.DECISIONS)

    records = [decision(0, "a"), decision(1, "b"), outcome(2, "r0"), outcome(3, "r1")]
    assert _selected(Selection("a", None), records) == [records[0], records[2]]
    assert _selected(Selection(None, "other"), records) == []


def test_of_joined_reservations_those_of_the_worker_are_selected_with_their_steps() -> None:
    def record(offset: int, *parts: ReservationRecord) -> LogRecord:
        payload = joined(len(parts), b"".join(map(encode_reservation, parts)))
        return LogRecord(0, offset, 1, b"r0", payload, Channel.RESERVATIONS)

    first, other = reserved("r0", "a", [1], 1.0), reserved("r1", "b", [1], 1.0)
    ended = [Progressed(VERSION, "x", name, 2.0, RELEASED) for name in ("r1", "r0")]
    records = [record(0, other, first), record(1, *ended), record(2, ended[0])]
    assert _selected(Selection("a", None), records) == [record(0, first), record(1, ended[1])]
    assert _selected(Selection(None, "m"), records) == records


@pytest.mark.parametrize("is_recorded", [True, False])
async def test_records_that_cannot_be_decoded_are_dead_letters_as_well(tmp_path: Path, is_recorded: bool) -> None:
    log = MemoryLog()
    good = Stream().batch(stored((0, [1])), now=1.0)
    log.append(good.key, good.payload, 1)
    log.append(good.key, b"garbage", 2)
    await _record(log, tmp_path, is_recorded=is_recorded, has_dead_letters=True)
    found = [(record.channel, record.offset, record.payload) for record in records_of(tmp_path)]
    events = [(Channel.EVENTS, 0, good.payload), (Channel.EVENTS, 1, b"garbage")]
    assert found == [*(events if is_recorded else []), (Channel.DEAD_LETTERS, 1, b"garbage")]
