"""Bounds on the size and the age of an event log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kv_events.errors import InvalidValueError
from kv_events.log.event_log import EventLogReader, EventLogWriter
from kv_events.log.retention import LogRetention
from kv_events.records import LogRecord

SEGMENT = 2000


def write(writer: EventLogWriter, num_records: int) -> None:
    for _ in range(num_records):
        writer.append(LogRecord(0, writer.next_index, 0, b"key", b"x" * 100))
    writer.flush()


def test_whole_segments_are_deleted_oldest_first_until_the_size_fits(tmp_path: Path) -> None:
    with EventLogWriter(tmp_path, segment_bytes=SEGMENT) as writer:
        retention = LogRetention(tmp_path, writer, max_bytes=3 * SEGMENT, max_age_s=None)
        write(writer, 100)
        deleted = retention.enforce()
        reader = EventLogReader(tmp_path)
        assert reader.first_index == deleted[-1].last_index + 1 > 0
        assert [record.offset for _, record in reader.read(reader.first_index)] == list(range(reader.first_index, 100))
        assert sum(file.stat().st_size for file in tmp_path.glob("*.kvlog")) <= 3 * SEGMENT
        assert retention.enforce() == []


def test_a_segment_is_deleted_when_its_last_record_is_too_old(tmp_path: Path) -> None:
    with EventLogWriter(tmp_path, segment_bytes=SEGMENT) as writer:
        retention = LogRetention(tmp_path, writer, max_bytes=None, max_age_s=80)
        write(writer, 3)
        now = next(tmp_path.glob("*.kvlog")).stat().st_mtime
        assert retention.enforce(now) == []
        retention.enforce(now + 11)  # a part of the longest age: the next records go into another segment
        write(writer, 3)
        os.utime(sorted(tmp_path.glob("*.kvlog"))[1], (now + 11, now + 11))
        assert retention.enforce(now + 70) == []
        assert [segment.last_index for segment in retention.enforce(now + 85)] == [2]
        retention.enforce(now + 200)
        assert len(list(tmp_path.glob("*.kvlog"))) == 1  # the newest one stays, and is empty


def test_bounds_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    with EventLogWriter(tmp_path, segment_bytes=SEGMENT) as writer:
        with pytest.raises(InvalidValueError, match="at least two segments"):
            LogRetention(tmp_path, writer, max_bytes=SEGMENT, max_age_s=None)
        with pytest.raises(InvalidValueError, match="max_age"):
            LogRetention(tmp_path, writer, max_bytes=None, max_age_s=0)


def test_a_file_that_is_gone_before_it_is_looked_at_is_no_error(tmp_path: Path) -> None:
    with EventLogWriter(tmp_path, segment_bytes=SEGMENT) as writer:
        retention = LogRetention(tmp_path, writer, max_bytes=3 * SEGMENT, max_age_s=None)
        write(writer, 100)
        unfinished = tmp_path / f"{0:020d}.kvframe.7"
        unfinished.symlink_to(tmp_path / "renamed")  # it is listed, and there is no file
        assert retention.enforce()
    assert not unfinished.is_symlink()
