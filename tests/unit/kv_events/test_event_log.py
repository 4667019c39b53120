"""The event log: appended records are read back by every reader at any time, or damage is detected."""

from __future__ import annotations

import logging
import os
import signal
import struct
import subprocess
import sys
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
)
from kv_events.log.memory import LogTruncatedError
from kv_events.records import Channel, LogRecord
from tests.support.log.version_1 import write_version_1

KEY_AND_PAYLOAD_BYTES = 3 + 100
RECORD_BYTES = 12 + 24 + KEY_AND_PAYLOAD_BYTES
HEADER_BYTES = 24


def record(i: int) -> LogRecord:
    return LogRecord(i % 3, 1000 + i, 1_700_000_000_000 + 10 * i, b"w-%d" % (i % 3), b"%100d" % i)


def write(folder: Path, records: range, segment_bytes: int = 64 * 2**20) -> None:
    with EventLogWriter(folder, segment_bytes=segment_bytes) as writer:
        for i in records:
            assert writer.append(record(i)) == i


def read_all(folder: Path) -> list[tuple[int, LogRecord]]:
    return list(EventLogReader(folder).read())


def expected(records: range) -> list[tuple[int, LogRecord]]:
    return [(i, record(i)) for i in records]


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kvlog"))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def test_records_come_back_as_they_were_appended(tmp_path: Path) -> None:
    write(tmp_path, range(50))
    assert read_all(tmp_path) == expected(range(50))


def test_a_log_opened_again_continues_where_it_ended(tmp_path: Path) -> None:
    write(tmp_path, range(20))
    write(tmp_path, range(20, 40))
    assert read_all(tmp_path) == expected(range(40))


def test_a_new_folder_is_made_and_is_an_empty_log(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "log"
    with EventLogWriter(folder) as writer:
        assert writer.next_index == 0
        assert (EventLogReader(folder).first_index, EventLogReader(folder).next_index) == (0, 0)
    assert read_all(folder) == []


def test_a_segment_is_never_larger_than_asked_for(tmp_path: Path) -> None:
    write(tmp_path, range(40), segment_bytes=1000)
    sizes = [path.stat().st_size for path in segments(tmp_path)]
    assert max(sizes) == HEADER_BYTES + 7 * RECORD_BYTES <= 1000
    assert read_all(tmp_path) == expected(range(40))


def test_a_record_larger_than_a_segment_gets_one_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, range(5), segment_bytes=1)
    assert len(segments(tmp_path)) == 5
    assert read_all(tmp_path) == expected(range(5))


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


def test_every_channel_comes_back(tmp_path: Path) -> None:
    written = [record(i)._replace(channel=channel) for i, channel in enumerate([*Channel, 200])]
    with EventLogWriter(tmp_path) as writer:
        for each in written:
            writer.append(each)
    assert [each for _, each in read_all(tmp_path)] == written


def test_a_log_of_version_1_is_read_and_continued_in_a_segment_of_version_2(tmp_path: Path) -> None:
    old = write_version_1(tmp_path, map(record, range(10)))
    assert read_all(tmp_path) == expected(range(10))
    before = old.read_bytes()
    write(tmp_path, range(10, 20))
    assert read_all(tmp_path) == expected(range(20))
    assert [path.read_bytes()[8] for path in segments(tmp_path)] == [1, 2]
    assert old.read_bytes() == before


def test_a_torn_tail_of_version_1_is_cut_before_version_2_begins(tmp_path: Path) -> None:
    old = write_version_1(tmp_path, map(record, range(10)))
    os.truncate(old, old.stat().st_size - 1)
    write(tmp_path, range(9, 20))
    assert read_all(tmp_path) == expected(range(20))


def test_an_empty_segment_of_version_1_is_begun_again(tmp_path: Path) -> None:
    write_version_1(tmp_path, [], first_index=30)
    write(tmp_path, range(30, 32))
    assert list(EventLogReader(tmp_path).read(30)) == expected(range(30, 32))
    assert len(segments(tmp_path)) == 1


def test_a_segment_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    path = segments(tmp_path)[0]
    head = path.read_bytes()[:8] + struct.pack("<IQ", 3, 0)
    path.write_bytes(head + struct.pack("<I", zlib.crc32(head)) + path.read_bytes()[24:])
    with pytest.raises(EventLogCorruptedError, match="a format version of 1 to 2"):
        read_all(tmp_path)


def test_reading_starts_and_stops_at_any_index(tmp_path: Path) -> None:
    write(tmp_path, range(30), segment_bytes=1000)
    reader = EventLogReader(tmp_path)
    for start in range(0, 31, 3):
        for stop in (start, start + 4, 100, None):
            end = 30 if stop is None else min(stop, 30)
            assert list(reader.read(start, stop)) == expected(range(start, end))


def test_a_reader_sees_what_is_flushed_and_only_whole_records(tmp_path: Path) -> None:
    reader = EventLogReader(tmp_path)
    assert list(reader.read()) == []
    with EventLogWriter(tmp_path, segment_bytes=1000) as writer:
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


def test_a_torn_tail_is_ignored_by_readers_and_cut_by_the_writer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, range(10))
    path = segments(tmp_path)[0]
    os.truncate(path, path.stat().st_size - 1)
    assert read_all(tmp_path) == expected(range(9))
    with caplog.at_level(logging.WARNING):
        write(tmp_path, range(9, 12))
    assert f"torn tail of {RECORD_BYTES - 1} bytes, record 9" in caplog.text
    assert read_all(tmp_path) == expected(range(12))


def test_a_file_that_grew_without_its_data_has_a_torn_tail(tmp_path: Path) -> None:
    write(tmp_path, range(10))
    path = segments(tmp_path)[0]
    os.truncate(path, path.stat().st_size + 5000)
    assert read_all(tmp_path) == expected(range(10))
    write(tmp_path, range(10, 12))
    assert read_all(tmp_path) == expected(range(12))


@pytest.mark.parametrize("head", [b"", b"KVSL", bytes(24)], ids=["empty", "cut", "zeros"])
def test_a_segment_whose_header_was_cut_off_is_begun_again(tmp_path: Path, head: bytes) -> None:
    write(tmp_path, range(14), segment_bytes=1000)
    (tmp_path / f"{14:020d}.kvlog").write_bytes(head)
    assert EventLogReader(tmp_path).next_index == 14
    assert read_all(tmp_path) == expected(range(14))
    write(tmp_path, range(14, 16), segment_bytes=1000)
    assert read_all(tmp_path) == expected(range(16))


@pytest.mark.parametrize("place", [0, 4, 8, 12, 40, RECORD_BYTES - 1])
def test_damage_before_the_tail_is_named_and_reading_can_continue_behind_it(tmp_path: Path, place: int) -> None:
    write(tmp_path, range(14), segment_bytes=1000)
    first = segments(tmp_path)[0]
    flip(first, HEADER_BYTES + 3 * RECORD_BYTES + place)
    reader = EventLogReader(tmp_path)
    seen: list[tuple[int, LogRecord]] = []
    with pytest.raises(EventLogCorruptedError, match=r"record 3; the next sound record is 4") as caught:
        seen.extend(reader.read())
    error = caught.value
    assert (error.segment, error.position, error.index) == (first, HEADER_BYTES + 3 * RECORD_BYTES, 3)
    assert error.resume == (4, HEADER_BYTES + 4 * RECORD_BYTES)
    assert list(reader.read(4)) == expected(range(4, 14))
    assert list(EventLogReader(tmp_path).read(4)) == expected(range(4, 14))
    assert reader.next_index == EventLogReader(tmp_path).next_index == 14


def test_a_writer_refuses_a_damaged_segment_instead_of_cutting_it(tmp_path: Path) -> None:
    write(tmp_path, range(10))
    path = segments(tmp_path)[0]
    flip(path, HEADER_BYTES + 2 * RECORD_BYTES)
    before = path.read_bytes()
    with pytest.raises(EventLogCorruptedError, match="record 2; the next sound record is 3"):
        EventLogWriter(tmp_path)
    assert path.read_bytes() == before


def test_a_damaged_header_is_found(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    flip(segments(tmp_path)[0], 13)
    with pytest.raises(EventLogCorruptedError, match="not a segment header"):
        read_all(tmp_path)


def test_a_segment_cut_short_before_the_last_is_damage(tmp_path: Path) -> None:
    write(tmp_path, range(14), segment_bytes=1000)
    first = segments(tmp_path)[0]
    os.truncate(first, HEADER_BYTES + 6 * RECORD_BYTES)
    with pytest.raises(EventLogCorruptedError, match="records up to 7 are missing"):
        read_all(tmp_path)


def test_deleted_old_segments_leave_a_log_that_begins_later(tmp_path: Path) -> None:
    write(tmp_path, range(21), segment_bytes=1000)
    segments(tmp_path)[0].unlink()
    reader = EventLogReader(tmp_path)
    assert reader.first_index == 7
    assert list(reader.read(7)) == expected(range(7, 21))
    with pytest.raises(LogTruncatedError, match="offset 0 was dropped; the log begins at 7"):
        list(reader.read())


def test_a_second_writer_is_refused_until_the_first_closes(tmp_path: Path) -> None:
    with EventLogWriter(tmp_path), pytest.raises(EventLogLockedError, match="another writer"):
        EventLogWriter(tmp_path)
    EventLogWriter(tmp_path).close()


def test_a_killed_writer_leaves_no_lock_and_every_flushed_record(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from kv_events.log.event_log import EventLogWriter;"
        "from kv_events.records import LogRecord; writer = EventLogWriter(Path(sys.argv[1]));"
        "writer.append(LogRecord(0, 0, 0, b'', b'one')); writer.flush();"
        "writer.append(LogRecord(0, 1, 0, b'', b'two')); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    with EventLogWriter(tmp_path) as writer:
        assert writer.next_index == 1
    assert [item.payload for _, item in EventLogReader(tmp_path).read()] == [b"one"]


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
    command = [sys.executable, "-c", REFUSED_WRITE, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
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
def test_a_record_beyond_the_limits_is_refused_and_the_log_continues(
    tmp_path: Path, field: str, refused: LogRecord
) -> None:
    with EventLogWriter(tmp_path) as writer:
        with pytest.raises(InvalidValueError, match=field):
            writer.append(refused)
        writer.append(record(0))
    assert read_all(tmp_path) == expected(range(1))


def test_the_largest_record_fits(tmp_path: Path) -> None:
    largest = LogRecord(2**32 - 1, 2**63 - 1, -(2**63), bytes(65_535), os.urandom(MAX_RECORD_BYTES), 255)
    with EventLogWriter(tmp_path) as writer:
        for _ in range(3):
            writer.append(largest)
    assert [item for _, item in EventLogReader(tmp_path).read()] == [largest] * 3


def test_a_closed_writer_reports_it(tmp_path: Path) -> None:
    writer = EventLogWriter(tmp_path)
    writer.close()
    writer.close()
    with pytest.raises(EventLogError, match="this writer is closed"):
        writer.append(record(0))


def test_a_segment_size_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="segment_bytes: got 0"):
        EventLogWriter(tmp_path, segment_bytes=0)


def test_reading_a_folder_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(EventLogError, match="nowhere: no such folder"):
        EventLogReader(tmp_path / "nowhere")
