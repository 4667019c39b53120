"""A recorder beside an event loop: its disk may hang, and what is offered is bounded."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from indexer.recording.recorder import MAX_WAITING_BYTES, Recorder
from indexer.recording.thread import RecordingThread
from kv_events.log.event_log import EventLogReader, EventLogWriter
from kv_events.log.format import EventLogCorruptedError
from kv_events.log.reader import scan_log
from kv_events.log.retention import DeletedSegment
from kv_events.records import Channel, LogRecord
from tests.support.waiting import async_wait_until


def record(number: int, num_bytes: int = 1000) -> LogRecord:
    return LogRecord(0, number, 1, b"key", bytes(num_bytes), Channel.EVENTS)


def damage_the_middle(folder: Path) -> None:
    (segment,) = folder.glob("*.kvlog")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)


def damage_the_last(folder: Path, where: slice) -> Path:
    path = max(folder.glob("*.kvlog"))
    data = bytearray(path.read_bytes())
    data[where] = bytes(byte ^ 1 for byte in data[where])
    path.write_bytes(data)
    return path


async def test_a_disk_that_hangs_is_reported_and_holds_up_nothing(tmp_path: Path) -> None:
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
    kept = [found.offset for _, found in EventLogReader(tmp_path).read(EventLogReader(tmp_path).first_index)]
    assert kept == list(range(11 - len(kept), 11))


async def test_records_that_are_offered_beyond_the_bound_are_lost_and_counted(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    size = 500_000
    fitting = MAX_WAITING_BYTES // size
    for number in range(fitting + 3):
        recorder.offer(record(number, size))
    assert recorder.lost == 3
    async with RecordingThread(recorder).running():
        await async_wait_until(lambda: recorder.written == fitting, 30, "the records that fit")
        recorder.offer(record(fitting, size))
        await async_wait_until(lambda: recorder.written == fitting + 1, 30, "a further one")


async def test_small_records_count_with_the_memory_that_they_take() -> None:
    recorder = Recorder(Path("unused"))
    fitting = MAX_WAITING_BYTES // record(0, 30).memory_bytes
    small = record(0, 30)
    for _ in range(fitting + 2):
        recorder.offer(small)
    assert recorder.lost == 2
    assert fitting < MAX_WAITING_BYTES / 256


async def test_what_is_offered_last_is_written_before_the_end(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    async with RecordingThread(recorder).running():
        recorder.offer(record(0))
        await async_wait_until(lambda: recorder.written == 1, 60, "the first record")
        for number in range(1, 101):
            recorder.offer(record(number))
    recorder.offer(record(101))
    kept = [found.offset for _, found in EventLogReader(tmp_path).read()]
    assert kept == list(range(101))
    assert (recorder.written, recorder.lost) == (101, 1)


async def test_a_recording_goes_on_after_damage_and_knows_what_it_has(tmp_path: Path) -> None:
    with EventLogWriter(tmp_path) as writer:
        for number in range(10):
            writer.append(record(number))
    damage_the_middle(tmp_path)
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
    with EventLogWriter(tmp_path, segment_bytes=3000) as writer:
        for number in range(10):
            writer.append(record(number))
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
