"""The event log under truncation and flipped bits: it returns what was written or reports damage."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_events.log.event_log import EventLogCorruptedError, EventLogReader, EventLogWriter
from kv_events.records import LogRecord
from tests.support.effort import num_examples

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
                ends.append(max(folder.glob("*.kvlog")).stat().st_size)
        yield folder, ends


def payloads(folder: Path) -> list[LogRecord]:
    return [item for _, item in EventLogReader(folder).read()]


@settings(max_examples=num_examples(25))
@given(RECORDS)
def test_a_log_cut_at_any_byte_gives_back_exactly_its_whole_records(records: list[LogRecord]) -> None:
    with log_of(records) as (folder, ends):
        path = max(folder.glob("*.kvlog"))
        whole = path.read_bytes()
        last_begin = ends[-2] if len(ends) > 1 else 24
        for cut in {*range(last_begin, ends[-1] + 1), *range(0, ends[-1], 17)}:
            path.write_bytes(whole[:cut])
            assert payloads(folder) == records[: sum(end <= cut for end in ends)]


@settings(max_examples=num_examples(25))
@given(RECORDS, st.data())
def test_a_log_cut_at_any_byte_and_written_on_reads_as_if_never_cut(
    records: list[LogRecord], data: st.DataObject
) -> None:
    with log_of(records) as (folder, ends):
        path = max(folder.glob("*.kvlog"))
        cut = data.draw(st.integers(0, ends[-1]))
        path.write_bytes(path.read_bytes()[:cut])
        with EventLogWriter(folder) as writer:
            for item in records[writer.next_index :]:
                writer.append(item)
        assert payloads(folder) == records


@settings(max_examples=num_examples(100))
@given(RECORDS, st.data())
def test_a_flipped_bit_never_gives_a_wrong_record(records: list[LogRecord], data: st.DataObject) -> None:
    with log_of(records) as (folder, ends):
        path = max(folder.glob("*.kvlog"))
        damaged = bytearray(path.read_bytes())
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(damaged)
        hit = sum(end <= position for end in ends)  # index of the record that contains the bit
        seen: list[LogRecord] = []
        found = False
        try:
            for _, item in EventLogReader(folder).read():
                seen.append(item)
        except EventLogCorruptedError:
            found = True
        assert seen == ([] if position < 24 else records[:hit])
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
            stop = data.draw(st.integers(start, len(records) + 2))
            wanted = list(enumerate(records))[start:stop]
            assert list(reader.read(start, stop)) == wanted
            assert reader.next_index == len(records)
