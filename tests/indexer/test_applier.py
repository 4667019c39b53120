"""Chunks of records, applied at once, compared with the same records applied one by one."""

import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.applier import PlainRun
from indexer.replay import ApplyObserver, Replay
from indexer.settings import IndexerSettings
from indexer.views import ViewState
from kv_events.codec import RemovedPages, Step, StoredPages, decode_batch
from kv_events.kernels.batches import (
    DIGEST,
    END_EVENT,
    EPOCH,
    FIRST_EVENT,
    IS_REMOVAL,
    MEDIUM,
    NUM_CHAINS,
    NUM_PAGES,
    PAGES,
    SEQ,
    STARTS,
    TIME,
)
from kv_events.kernels.log_records import END, PAYLOAD
from kv_events.log.reader import BatchColumns, RecordChunk, decode_chunk, scan_log
from kv_events.records import Channel, LogRecord
from kv_events.schema import SnapshotBegin, WireEvent
from tests.support.effort import num_examples
from tests.support.log.faulty_run import faulty_run
from tests.support.log.late_log import write_log
from tests.support.log.records import Stream, removed, stored
from tests.support.log.view_facts import facts

SEEDS = st.integers(0, 2**32)
BOUNDS = (
    {"max_pages": 1000},
    {"max_pages": 40},
    {"max_pages": 1000, "max_streams": 2},
    {"max_pages": 1000, "max_namespaces": 2},
)


class Counting(ApplyObserver):
    """A witness that holds some records back and checks what it receives."""

    def __init__(self, random: Random, share: float) -> None:
        self.plain: list[int] = []
        self.single: list[int] = []
        self._random, self._share = random, share

    def mark_not_plain(self, columns: BatchColumns) -> None:
        for row in range(len(columns.rows)):
            if self._random.random() < self._share:
                columns.arrays.plain[row] = 0

    def take_plain(self, run: PlainRun) -> None:
        columns = run.batches.columns
        self.plain += (run.batches.first_index + run.rows).tolist()
        newest = {columns.names()[row]: row for row in run.rows.tolist()}
        assert {row: view.stream.worker for view, row in run.newest()} == {
            row: decode_batch(columns.data[slice(*columns.rows[row, [PAYLOAD, END]])]).stream.worker
            for row in newest.values()
        }

    def take_one(self, index: int, record: LogRecord, apply: Callable[[], None]) -> None:
        self.single.append(index)
        apply()


def written(folder: Path, records: list[LogRecord]) -> list[RecordChunk]:
    return list(scan_log(write_log(folder, records, 10**9), lambda error: pytest.fail(str(error))))


def one_by_one(records: list[LogRecord], bounds: IndexerSettings) -> Replay:
    replay = Replay(bounds)
    for record in records:
        replay.apply(record)
    return replay


def damaged(random: Random, record: LogRecord) -> LogRecord:
    """Return a record with some bytes of its payload changed, added or missing."""
    payload = bytearray(record.payload)
    fate = random.random()
    if fate < 0.6:
        payload[random.randrange(len(payload))] = random.randrange(256)
    elif fate < 0.8:
        del payload[random.randrange(len(payload)) :]
    else:
        payload += random.randbytes(random.randrange(1, 4))
    return record._replace(payload=bytes(payload))


def widened(record: LogRecord) -> LogRecord:
    """Return the same batch with its block size encoded in nine bytes instead of one."""
    fields = msgspec.msgpack.decode(record.payload)
    packed = [msgspec.msgpack.encode(field) for field in fields]
    packed[5] = b"\xcf" + struct.pack(">Q", fields[5])
    return record._replace(payload=bytes((0x90 + len(packed),)) + b"".join(packed))


def newer(record: LogRecord) -> LogRecord:
    """Return the same batch from a newer version, whose names the kernel does not read."""
    version, *fields = msgspec.msgpack.decode(record.payload)
    return record._replace(payload=msgspec.msgpack.encode([version + 1, *fields]))


@given(SEEDS, st.integers(1, 150), st.sampled_from(BOUNDS))
@settings(max_examples=num_examples(40), deadline=None)
def test_chunks_equal_records_one_by_one(seed: int, length: int, bounds: dict[str, int]) -> None:
    random = Random(seed)
    limits = IndexerSettings.ignoring_environment(**bounds)
    records = faulty_run(random, length)
    for number, record in enumerate(records):
        if record.channel == Channel.EVENTS and len(record.payload) > 1 and random.random() < 0.05:
            records[number] = widened(record) if random.random() < 0.3 else damaged(random, record)
    wanted = [random.random() < 0.98 for _ in records]
    replay, witness = Replay(limits), Counting(random, random.choice((0.0, 0.3)))
    with TemporaryDirectory() as name:
        for chunk in written(Path(name), records):
            borders = sorted({0, len(chunk.rows), random.randrange(len(chunk.rows) + 1)})
            for start, stop in pairwise(borders):
                first = chunk.first_index
                replay.apply_chunk(chunk, start, np.array(wanted[first + start : first + stop], np.bool_), witness)
    applied = [record for record, is_wanted in zip(records, wanted, strict=True) if is_wanted]
    expected = one_by_one(applied, limits)
    assert facts(replay) == facts(expected)
    assert replay.positions == expected.positions
    for namespace in replay.namespaces:
        namespace.index.check()
    assert sorted(witness.plain + witness.single) == [
        index for index, record in enumerate(records) if wanted[index] and record.channel == Channel.EVENTS
    ]


def events_of_many_forms(random: Random) -> Iterator[WireEvent]:
    for _ in range(random.randrange(4)):
        hashes = [random.getrandbits(64) for _ in range(random.randrange(20))]
        tier = random.randrange(4)
        if random.random() < 0.3:
            yield removed(hashes, tier=tier)
        else:
            event = stored(*((random.getrandbits(64), [each]) for each in hashes), tier=tier)
            tokens = random.choice((None, b"", bytes(64)))
            yield msgspec.structs.replace(event, token_ids=tokens, extra_key=random.choice((None, "salt", "šalt")))


def columns_of(record: LogRecord) -> tuple[object, ...]:
    """Return what the decoder of single records returns, without what a plain batch cannot have."""
    batch = decode_batch(record.payload)
    assert not batch.degraded_reason
    return batch.epoch, batch.seq, batch.timestamp, batch.digest.tobytes(), [event_facts(step) for step in batch.steps]


def event_facts(step: Step) -> tuple[object, ...]:
    assert isinstance(step, StoredPages | RemovedPages)
    chains = (step.chain_starts.tobytes(), step.parents.tolist()) if isinstance(step, StoredPages) else (b"", [])
    return isinstance(step, RemovedPages), step.medium, step.hashes.tolist(), step.block_hashes.tolist(), *chains


def decoded(columns: BatchColumns, row: int) -> tuple[object, ...]:
    """Return the same from columns."""
    batch = columns.arrays.batches[row].tolist()
    (time_s,) = struct.unpack("<d", struct.pack("<q", batch[TIME]))
    digest = columns.data[batch[DIGEST] : batch[DIGEST] + 64]
    events = columns.arrays.events[batch[FIRST_EVENT] : batch[END_EVENT]].tolist()
    return batch[EPOCH], batch[SEQ], time_s, digest, [decoded_event(columns, event) for event in events]


def decoded_event(columns: BatchColumns, event: list[int]) -> tuple[object, ...]:
    at, num_pages, words = event[PAGES], event[NUM_PAGES], columns.arrays.words
    num_bytes = 0 if event[IS_REMOVAL] else (num_pages + 7) // 8
    return (
        bool(event[IS_REMOVAL]),
        event[MEDIUM],
        words[at : at + num_pages].tolist(),
        words[at + num_pages : at + 2 * num_pages].tolist(),
        columns.data[event[STARTS] : event[STARTS] + num_bytes],
        words[at + 2 * num_pages : at + 2 * num_pages + event[NUM_CHAINS]].tolist(),
    )


@given(SEEDS)
@settings(max_examples=num_examples(40), deadline=None)
def test_a_plain_batch_has_the_columns_that_its_decoder_returns(seed: int) -> None:
    random = Random(seed)
    stream = Stream("w", block_size=random.choice((1, 16, 200, 60_000)))
    records: list[LogRecord] = []
    for _ in range(12):
        record = stream.batch(*events_of_many_forms(random), now=random.uniform(0, 2e9), digest=bytes(64))
        records.append(damaged(random, record) if records and random.random() < 0.5 else record)
    with TemporaryDirectory() as name:
        (chunk,) = written(Path(name), records)
    columns = decode_chunk(chunk, 0, len(records))
    for row, record in enumerate(records):
        if columns.arrays.plain[row] and columns.names()[row] == columns.names()[0]:
            assert decoded(columns, row) == columns_of(record)


def test_most_batches_of_a_sound_log_are_applied_as_chunks(tmp_path: Path) -> None:
    streams = [Stream(f"w-{number}") for number in range(3)]
    records = [
        streams[i % 3].batch(stored((0, [100 * i + k for k in range(1, 9)]), tier=i % 4), *last_removed(i), now=i / 100)
        for i in range(300)
    ]
    replay, witness = Replay(), Counting(Random(0), 0.0)
    for chunk in written(tmp_path, records):
        replay.apply_chunk(chunk, observer=witness)
    assert witness.single == [0, 1, 2]


def test_batches_that_waited_for_the_end_of_an_outage_are_as_late_in_chunks(tmp_path: Path) -> None:
    stream, records = Stream("w-0"), list[LogRecord]()
    for i in range(600):  # two batches a second; those of half a minute arrive when it has passed
        made_at = i / 2
        arrived_at = max(made_at, 130.0) if 200 <= i < 260 else made_at
        record = stream.batch(stored((0, [i + 1])), now=made_at)
        records.append(record._replace(timestamp_ms=int(arrived_at * 1000)))
    replay, states = Replay(), list[tuple[ViewState, str]]()
    one_after_another, expected = Replay(), list[tuple[ViewState, str]]()
    for chunk in written(tmp_path, records):
        for start in range(0, len(chunk.rows), 5):
            stop = min(start + 5, len(chunk.rows))
            replay.apply_chunk(chunk, start, np.ones(stop - start, np.bool_))
            for number in range(start, stop):
                one_after_another.apply(chunk.record(number))
            for shown, each in ((states, replay), (expected, one_after_another)):
                (view,) = each.namespaces.views
                shown.append((each.freshness.state(view), each.freshness.reason(view)))
    assert states == expected
    assert {state for state, _ in states} == {ViewState.LIVE, ViewState.STALE}
    assert states[-1][0] is ViewState.LIVE


@pytest.mark.parametrize("is_newer", [False, True])
@pytest.mark.parametrize("most_names", [4, 65_536])
def test_an_index_that_grows_between_chunks_and_in_them_is_followed(
    is_newer: bool, most_names: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.applier._MOST_NAMES", most_names)
    streams: list[Stream] = [Stream("w-0")]
    records: list[LogRecord] = []
    for i in range(600):
        if i % 4 == 0:
            streams.append(Stream(f"w-{i}"))
            first = streams[-1].resync(now=i / 10) if i % 8 else streams[-1].batch(SnapshotBegin(), now=i / 10)
            records.append(newer(first) if is_newer else first)
        records.append(streams[i % 7 % len(streams)].batch(stored((0, [i + 1, i + 2, 7])), now=i / 10))
    replay = Replay()
    for chunk in written(tmp_path, records):
        for start in range(0, len(chunk.rows), 333):
            replay.apply_chunk(chunk, start, np.ones(min(333, len(chunk.rows) - start), np.bool_))
    assert facts(replay) == facts(one_by_one(records, IndexerSettings()))
    assert [namespace.index.most_streams for namespace in replay.namespaces] == [256]


def test_an_index_without_room_for_holder_sets_refuses_the_same_pages(tmp_path: Path) -> None:
    random, limits = Random(1), IndexerSettings(max_set_bytes=65_536)
    streams = [Stream(f"w-{number}") for number in range(8)]
    records: list[LogRecord] = []
    for i in range(800):
        pages, tier, now = random.sample(range(1, 3000), 40), random.randrange(4), float(i)
        event = removed(pages, tier=tier) if random.random() < 0.3 else stored((0, pages), tier=tier)
        records.append(
            streams[i % 8].resync(now=now) if random.random() < 0.02 else streams[i % 8].batch(event, now=now)
        )
    replay, witness = Replay(limits), Counting(random, 0.0)
    for chunk in written(tmp_path, records):
        replay.apply_chunk(chunk, observer=witness)
    assert facts(replay) == facts(one_by_one(records, limits))
    assert sum(view.counters.refused_pages for view in replay.namespaces.views) > 1000
    assert len(witness.plain) > 100


def last_removed(number: int) -> list[WireEvent]:
    """Return the removal of a page that the same stream stored three records before."""
    return [removed([100 * (number - 3) + 1], tier=(number - 3) % 4)] if number >= 3 else []
