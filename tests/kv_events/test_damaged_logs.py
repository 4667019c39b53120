"""Logs with torn tails and damage: a reader returns what was written or reports damage."""

import logging
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_events.log.event_log import EventLogCorruptedError, EventLogReader, EventLogWriter
from kv_events.records import LogRecord
from tests.support.effort import num_examples
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

RECORDS = st.lists(
    st.builds(
        LogRecord,
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**63 - 1),
        st.integers(-(2**63), 2**63 - 1),
        st.binary(max_size=20),
        st.binary(max_size=60),
        st.integers(0, 255),
        headers=st.just(()),  # a log does not keep those of Kafka
    ),
    min_size=1,
    max_size=12,
)


@contextmanager
def log_of(records: list[LogRecord], segment_bytes: int = 2**20) -> Iterator[tuple[Path, list[int]]]:
    """Folder of a log, and the size of its (last) segment after each record."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ends = []
        with EventLogWriter(folder, segment_bytes=segment_bytes) as writer:
            for item in records:
                writer.append(item)
                writer.flush(sync=False)
                ends.append(segments(folder)[-1].stat().st_size)
        yield folder, ends


@settings(max_examples=num_examples(25))
@given(RECORDS)
def test_a_log_cut_at_any_byte_gives_back_exactly_its_whole_records(records: list[LogRecord]) -> None:
    with log_of(records) as (folder, ends):
        (path,) = segments(folder)
        whole = path.read_bytes()
        last_begin = ends[-2] if len(ends) > 1 else HEADER_BYTES
        for cut in {*range(last_begin, ends[-1] + 1), *range(0, ends[-1], 17)}:
            path.write_bytes(whole[:cut])
            assert records_of(folder) == records[: sum(end <= cut for end in ends)]


@settings(max_examples=num_examples(25))
@given(RECORDS, st.booleans(), st.data())
def test_a_log_cut_at_any_byte_and_written_on_reads_as_if_never_cut(
    records: list[LogRecord], is_version_1: bool, data: st.DataObject
) -> None:
    with log_of(records) as (folder, ends):
        (path,) = segments(folder)
        if is_version_1:
            records = [item._replace(channel=0) for item in records]
            write_version_1(folder, records)
        cut = data.draw(st.integers(0, ends[-1]))
        path.write_bytes(path.read_bytes()[:cut])
        with EventLogWriter(folder) as writer:
            assert writer.next_index == sum(end <= cut for end in ends)
            for item in records[writer.next_index :]:
                writer.append(item)
        assert records_of(folder) == records


@settings(max_examples=num_examples(100))
@given(RECORDS, st.data())
def test_a_flipped_bit_never_gives_a_wrong_record(records: list[LogRecord], data: st.DataObject) -> None:
    with log_of(records) as (folder, ends):
        position = data.draw(st.integers(0, ends[-1] - 1))
        flip(segments(folder)[0], position, 1 << data.draw(st.integers(0, 7)))
        hit = sum(end <= position for end in ends)  # index of the record that contains the bit
        seen: list[LogRecord] = []
        found = False
        try:
            for _, item in EventLogReader(folder).read():
                seen.append(item)
        except EventLogCorruptedError:
            found = True
        assert seen == ([] if position < HEADER_BYTES else records[:hit])
        assert found or hit == len(records) - 1  # a damaged last record may be a torn tail


@settings(max_examples=num_examples(50))
@given(RECORDS, st.integers(1, 300), st.data())
def test_any_window_is_read_whatever_was_read_before(
    records: list[LogRecord], segment_bytes: int, data: st.DataObject
) -> None:
    with log_of(records, segment_bytes) as (folder, _):
        reader = EventLogReader(folder)
        for _ in range(4):
            start = data.draw(st.integers(0, len(records)))
            stop = data.draw(st.integers(start, len(records) + 2) | st.none())
            wanted = list(enumerate(records))[start:stop]
            num_read = data.draw(st.integers(0, len(wanted)))  # a reader may be left in the middle
            assert [found for found, _ in zip(reader.read(start, stop), range(num_read), strict=False)] == wanted[
                :num_read
            ]
            assert list(reader.read(start, stop)) == wanted
            if data.draw(st.booleans()):
                assert reader.next_index == len(records)


def test_a_torn_tail_is_cut_by_the_writer_who_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, range(10))
    path = segments(tmp_path)[0]
    os.truncate(path, path.stat().st_size - 1)
    with caplog.at_level(logging.WARNING):
        write(tmp_path, range(9, 12))
    assert f"torn tail of {RECORD_BYTES - 1} bytes, record 9" in caplog.text
    os.truncate(path, path.stat().st_size + 5000)  # a file that grew without its data
    assert read(tmp_path) == expected(range(12))
    write(tmp_path, range(12, 14))
    assert read(tmp_path) == expected(range(14))


@pytest.mark.parametrize("head", [b"", b"KVSL", bytes(24)], ids=["empty", "cut", "zeros"])
def test_a_segment_whose_header_was_cut_off_is_begun_again(tmp_path: Path, head: bytes) -> None:
    write(tmp_path, range(14), SEGMENT)
    (tmp_path / f"{14:020d}.kvlog").write_bytes(head)
    assert EventLogReader(tmp_path).next_index == 14
    assert read(tmp_path) == expected(range(14))
    write(tmp_path, range(14, 16), SEGMENT)
    assert read(tmp_path) == expected(range(16))


@pytest.mark.parametrize("place", [0, 4, 8, 12, 40, RECORD_BYTES - 1])
def test_damage_before_the_tail_is_named_and_reading_can_continue_behind_it(tmp_path: Path, place: int) -> None:
    write(tmp_path, range(14), SEGMENT)
    first, position = segments(tmp_path)[0], HEADER_BYTES + 3 * RECORD_BYTES
    flip(first, position + place)
    reader = EventLogReader(tmp_path)
    with pytest.raises(EventLogCorruptedError, match=r"record 3; the next sound record is 4") as caught:
        list(reader.read())
    error = caught.value
    assert (error.segment, error.position, error.index) == (first, position, 3)
    assert error.resume == (4, position + RECORD_BYTES)
    assert list(reader.read(4)) == read(tmp_path, 4) == expected(range(4, 14))
    assert reader.next_index == EventLogReader(tmp_path).next_index == 14


def test_a_writer_refuses_a_damaged_segment_or_leaves_it_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, range(10))
    path = segments(tmp_path)[0]
    flip(path, HEADER_BYTES + 2 * RECORD_BYTES)
    before = path.read_bytes()
    with pytest.raises(EventLogCorruptedError, match="record 2; the next sound record is 3"):
        EventLogWriter(tmp_path)
    with EventLogWriter(tmp_path, leaves_damage=True) as writer:
        assert writer.append(record(10)) == 10
    assert path.read_bytes() == before
    assert read(tmp_path, 3) == expected(range(3, 11))


def test_a_damaged_header_and_a_newer_version_are_refused(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    path = segments(tmp_path)[0]
    head = path.read_bytes()[:8] + struct.pack("<IQ", 3, 0)
    for changed in (bytes([*head[:7], 9, *head[8:]]), head):
        path.write_bytes(changed + struct.pack("<I", zlib.crc32(changed)) + path.read_bytes()[24:])
        with pytest.raises(EventLogCorruptedError, match=r"not a segment header .* a format version of 1 to 2"):
            read(tmp_path)


def test_a_segment_cut_short_before_the_last_is_damage(tmp_path: Path) -> None:
    write(tmp_path, range(14), SEGMENT)
    os.truncate(segments(tmp_path)[0], HEADER_BYTES + 6 * RECORD_BYTES)
    with pytest.raises(EventLogCorruptedError, match="records up to 7 are missing"):
        read(tmp_path)
