"""Event logs: appended records are read back by every reader at any time."""

import os
import signal
import struct
import zlib
from pathlib import Path

import pytest

from kv_events.errors import InvalidValueError
from kv_events.limits import MAX_RECORD_BYTES
from kv_events.log.event_log import (
    EventLogCorruptedError,
    EventLogError,
    EventLogLockedError,
    EventLogReader,
    EventLogWriter,
    LogRetention,
)
from kv_events.log.memory import LogTruncatedError, MemoryLog
from kv_events.records import Channel, LogRecord
from kv_events.schema import ResyncRequest
from tests.support.log.plain_log import (
    HEADER_BYTES,
    RECORD_BYTES,
    SEGMENT,
    expected,
    flip,
    read,
    record,
    segments,
    write,
)
from tests.support.log.records import records_of
from tests.support.log.version_1 import write_version_1
from tests.support.programs import run_program

# --- what is written is read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("segment_bytes", "most"), [(64 * 2**20, 40), (SEGMENT, 7), (1, 1)])
def test_a_log_opened_again_goes_on_in_segments_that_are_never_larger_than_asked_for(
    tmp_path: Path, segment_bytes: int, most: int
) -> None:
    """A record that is larger than a segment gets one of its own."""
    write(tmp_path, range(20), segment_bytes)
    write(tmp_path, range(20, 40), segment_bytes)
    assert max(path.stat().st_size for path in segments(tmp_path)) == HEADER_BYTES + most * RECORD_BYTES
    assert read(tmp_path) == expected(range(40))


def test_a_new_folder_is_made_and_is_an_empty_log(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "log"
    with pytest.raises(EventLogError, match="log: no such folder"):
        EventLogReader(folder)
    with EventLogWriter(folder) as writer:
        assert writer.next_index == 0
        assert (EventLogReader(folder).first_index, EventLogReader(folder).next_index) == (0, 0)
    assert read(folder) == []


def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    wanted = LogRecord(7, 2**40, 1_700_000_000_123, b"tenant/model/w/0", b"payload", Channel.DECISIONS)
    with EventLogWriter(tmp_path) as writer:
        writer.append(wanted)
    data = (tmp_path / "00000000000000000000.kvlog").read_bytes()
    assert data[:8] == b"KVSLOG\r\n"
    assert struct.unpack("<IQI", data[8:24]) == (2, 0, zlib.crc32(data[:20]))
    body = data[36:]
    assert struct.unpack("<III", data[24:36]) == (len(body), zlib.crc32(body), zlib.crc32(data[24:32]))
    assert struct.unpack("<IqqHBB", body[:24]) == (7, 2**40, 1_700_000_000_123, 16, Channel.DECISIONS, 0)
    assert body[24:] == b"tenant/model/w/0payload"


def test_a_log_of_version_1_is_read_and_continued_in_a_segment_of_version_2(tmp_path: Path) -> None:
    old = write_version_1(tmp_path, map(record, range(10)))
    assert read(tmp_path) == expected(range(10))
    before = old.read_bytes()
    write(tmp_path, range(10, 20))
    assert read(tmp_path) == expected(range(20))
    assert [path.read_bytes()[8] for path in segments(tmp_path)] == [1, 2]
    assert old.read_bytes() == before


def test_an_empty_segment_of_version_1_is_begun_again(tmp_path: Path) -> None:
    write_version_1(tmp_path, [], first_index=30)
    write(tmp_path, range(30, 32))
    assert read(tmp_path, 30) == expected(range(30, 32))
    assert len(segments(tmp_path)) == 1


def test_a_reader_sees_what_is_flushed_and_only_whole_records(tmp_path: Path) -> None:
    reader = EventLogReader(tmp_path)
    assert list(reader.read()) == []
    with EventLogWriter(tmp_path, segment_bytes=SEGMENT) as writer:
        for i in range(25):
            writer.append(record(i))
            writer.flush(sync=False)
            assert list(reader.read(i)) == expected(range(i, i + 1))
            assert reader.next_index == i + 1
    assert list(reader.read(5)) == expected(range(5, 25))


def test_polling_reads_only_what_was_appended(tmp_path: Path) -> None:
    with EventLogWriter(tmp_path) as writer:
        for i in range(20):
            writer.append(record(i))
        writer.flush()
        reader = EventLogReader(tmp_path)
        assert reader.next_index == 20
        flip(segments(tmp_path)[0], HEADER_BYTES + 60)  # detected by every reader that starts at the beginning
        writer.append(record(20))
        writer.flush()
        assert list(reader.read(20)) == expected(range(20, 21))
        with pytest.raises(EventLogCorruptedError):
            list(reader.read(0))


def test_deleted_old_segments_leave_a_log_that_begins_later(tmp_path: Path) -> None:
    write(tmp_path, range(21), SEGMENT)
    segments(tmp_path)[0].unlink()
    assert EventLogReader(tmp_path).first_index == 7
    assert read(tmp_path, 7) == expected(range(7, 21))
    with pytest.raises(LogTruncatedError, match="offset 0 was dropped; the log begins at 7"):
        read(tmp_path)


# --- writers --------------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_until_the_first_closes_which_reports_that_it_is_closed(tmp_path: Path) -> None:
    with EventLogWriter(tmp_path) as writer, pytest.raises(EventLogLockedError, match="another writer"):
        EventLogWriter(tmp_path)
    writer.close()
    with pytest.raises(EventLogError, match="this writer is closed"):
        writer.append(record(0))
    EventLogWriter(tmp_path).close()
    with pytest.raises(InvalidValueError, match="segment_bytes: got 0"):
        EventLogWriter(tmp_path, segment_bytes=0)


KILLED = """
import os, sys
from pathlib import Path
from kv_events.log.event_log import EventLogWriter
from kv_events.records import LogRecord
writer = EventLogWriter(Path(sys.argv[1]))
writer.append(LogRecord(0, 0, 0, b'', b'one'))
writer.flush()
writer.append(LogRecord(0, 1, 0, b'', b'two'))
os.kill(os.getpid(), 9)
"""


def test_a_killed_writer_leaves_no_lock_and_every_flushed_record(tmp_path: Path) -> None:
    assert run_program(KILLED, tmp_path).returncode == -signal.SIGKILL
    with EventLogWriter(tmp_path) as writer:
        assert writer.next_index == 1
    assert [item.payload for item in records_of(tmp_path)] == [b"one"]


REFUSED_WRITE = """
import resource, signal, sys
from pathlib import Path
from kv_events.log.event_log import EventLogReader, EventLogWriter
from kv_events.records import LogRecord

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
folder = Path(sys.argv[1])
writer = EventLogWriter(folder)
writer.append(LogRecord(0, 0, 0, b"", bytes(100)))
writer.flush()
for i in range(1, 10):
    writer.append(LogRecord(0, i, 0, b"", bytes(100)))
list(EventLogReader(folder).read())  # loads its kernel
resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
try:
    writer.flush()
except OSError as error:
    print(error.strerror, len(list(EventLogReader(folder).read())))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
writer.close()
print([item.offset for _, item in EventLogReader(folder).read()])
"""


def test_after_a_refused_write_the_log_is_sound_and_the_next_try_writes_everything(tmp_path: Path) -> None:
    ended = run_program(REFUSED_WRITE, tmp_path)
    assert ended.stdout.splitlines() == ["File too large 1", str(list(range(10)))], ended.stderr


@pytest.mark.parametrize(
    ("field", "refused"),
    [
        ("partition", LogRecord(-1, 0, 0, b"", b"")),
        ("partition", LogRecord(2**32, 0, 0, b"", b"")),
        ("offset", LogRecord(0, -1, 0, b"", b"")),
        ("timestamp_ms", LogRecord(0, 0, 2**63, b"", b"")),
        ("key", LogRecord(0, 0, 0, bytes(65_536), b"")),
        ("payload", LogRecord(0, 0, 0, b"", bytes(MAX_RECORD_BYTES + 1))),
        ("channel", LogRecord(0, 0, 0, b"", b"", 256)),
    ],
)
def test_a_record_beyond_the_limits_is_refused_and_the_largest_one_is_not(
    tmp_path: Path, field: str, refused: LogRecord
) -> None:
    largest = LogRecord(2**32 - 1, 2**63 - 1, -(2**63), bytes(65_535), os.urandom(MAX_RECORD_BYTES), 255)
    with EventLogWriter(tmp_path) as writer:
        with pytest.raises(InvalidValueError, match=field):
            writer.append(refused)
        for _ in range(3):
            writer.append(largest)
    assert records_of(tmp_path) == [largest] * 3


# --- retention ------------------------------------------------------------------------------------------------------


def write_on(writer: EventLogWriter, num_records: int) -> None:
    for _ in range(num_records):
        writer.append(LogRecord(0, writer.next_index, 0, b"key", b"x" * 100))
    writer.flush()


def test_whole_segments_are_deleted_oldest_first_until_the_size_fits(tmp_path: Path) -> None:
    with EventLogWriter(tmp_path, segment_bytes=2000) as writer:
        retention = LogRetention(tmp_path, writer, max_bytes=6000, max_age_s=None)
        write_on(writer, 100)
        unfinished = tmp_path / f"{0:020d}.kvframe.7"
        unfinished.symlink_to(tmp_path / "renamed")  # it is listed, and there is no file
        deleted = retention.enforce()
        assert not unfinished.is_symlink()
        first = EventLogReader(tmp_path).first_index
        assert first == deleted[-1].last_index + 1 > 0
        assert [item.offset for _, item in read(tmp_path, first)] == list(range(first, 100))
        assert sum(file.stat().st_size for file in segments(tmp_path)) <= 6000
        assert retention.enforce() == []


def test_a_segment_is_deleted_when_its_last_record_is_too_old(tmp_path: Path) -> None:
    with EventLogWriter(tmp_path, segment_bytes=2000) as writer:
        retention = LogRetention(tmp_path, writer, max_bytes=None, max_age_s=80)
        write_on(writer, 3)
        now = segments(tmp_path)[0].stat().st_mtime
        assert retention.enforce(now) == []
        retention.enforce(now + 11)  # a part of the longest age: the next records go into another segment
        write_on(writer, 3)
        os.utime(segments(tmp_path)[1], (now + 11, now + 11))
        assert retention.enforce(now + 70) == []
        assert [segment.last_index for segment in retention.enforce(now + 85)] == [2]
        retention.enforce(now + 200)
        assert len(segments(tmp_path)) == 1  # the newest one stays, and is empty


@pytest.mark.parametrize(("bounds", "message"), [((2000, None), "at least two segments"), ((None, 0), "max_age")])
def test_bounds_that_cannot_be_kept_are_refused(
    tmp_path: Path, bounds: tuple[int | None, int | None], message: str
) -> None:
    with EventLogWriter(tmp_path, segment_bytes=2000) as writer, pytest.raises(InvalidValueError, match=message):
        LogRetention(tmp_path, writer, *bounds)


# --- the log in memory ----------------------------------------------------------------------------------------------


def offsets(log: MemoryLog, start: int, max_records: int = 500) -> list[int]:
    return [item.offset for item in log.read(start, max_records)]


def test_records_in_memory_come_back_in_order_with_their_offsets() -> None:
    log = MemoryLog()
    assert [log.append(b"k", bytes([i]), i) for i in range(5)] == [0, 1, 2, 3, 4]
    assert [(r.offset, r.payload, r.timestamp_ms) for r in log.read(3)] == [(3, b"\3", 3), (4, b"\4", 4)]
    assert (offsets(log, 0, max_records=2), offsets(log, 5)) == ([0, 1], [])


def test_beyond_its_capacity_the_oldest_records_go_and_readers_get_an_error() -> None:
    log = MemoryLog(capacity_bytes=100)
    for _ in range(20):
        log.append(b"k", bytes(10), 0)
    assert (log.first_offset, log.next_offset) == (10, 20)
    with pytest.raises(LogTruncatedError, match="offset 3 was dropped; the log begins at 10"):
        log.read(3)
    log.append(b"k", bytes(200), 0)  # a record larger than the capacity is kept alone
    assert offsets(log, log.first_offset) == [20]
    with pytest.raises(InvalidValueError, match="capacity_bytes: got 0"):
        MemoryLog(capacity_bytes=0)


def test_a_watcher_hears_of_each_record_until_it_stops() -> None:
    log, heard = MemoryLog(), list[int]()
    stop = log.watch(lambda: heard.append(log.next_offset))
    log.append(b"k", b"v", 0)
    stop()
    log.append(b"k", b"v", 0)
    assert heard == [1]


def test_requests_reach_every_listener_until_it_stops() -> None:
    log, heard = MemoryLog(), list[str]()
    stop = log.listen(lambda request: heard.append(f"one {request.reason}"))
    log.listen(lambda request: heard.append(f"two {request.reason}"))
    log.request(ResyncRequest("s", 1, "a"))
    stop()
    log.request(ResyncRequest("s", 1, "b"))
    assert heard == ["one a", "two a", "two b"]


def test_a_log_that_is_read_once_keeps_only_what_was_not_read() -> None:
    log = MemoryLog(is_read_once=True)
    for number in range(5):
        log.append(b"k", bytes([number]), 0)
    assert offsets(log, 0, max_records=3) == [0, 1, 2]
    assert log.first_offset == 0  # until the reader continues, it may read the same records again
    assert offsets(log, 3) == [3, 4]
    assert (log.first_offset, log.next_offset) == (3, 5)
    assert offsets(log, 5) == []
    assert (log.first_offset, log.next_offset) == (5, 5)
    assert log.append(b"k", b"v", 0) == 5
    with pytest.raises(LogTruncatedError, match="offset 4 was dropped; the log begins at 5"):
        log.read(4)
