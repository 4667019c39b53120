"""Replicas that share their reservations through a real broker."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from zlib import crc32

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import NewTopic

from indexer.assembly import create_recording
from indexer.settings import IndexerSettings
from indexer.sources.kafka import KafkaSource
from indexer.writing.kafka import TopicWriter
from indexer.writing.queue import NO_LOG, QUEUE_FULL, RESERVATIONS, WriteQueue
from kv_events.log.event_log import EventLogReader
from kv_events.records import Channel, LogRecord
from kv_events.reservations import (
    MAX_JOINED,
    OUTPUT_BLOCK,
    PREFILL_COMPLETE,
    RELEASED,
    VERSION,
    Progressed,
    ReservationRecord,
    decode_reservation,
    encode_reservation,
    reservation_id,
    singles,
    time_of,
)
from selection.book import Book
from selection.exchange import ReservationExchange, create_exchange
from tests.support.commands import kvsight
from tests.support.replica_process import Clock, Replica, ReplicaProcess, reserved
from tests.support.servers.kafka_broker import administration
from tests.support.waiting import async_wait_until

TTL_S = 300.0


@pytest.fixture
def own(kafka_bootstrap: str) -> dict[str, Any]:
    """Settings with topics that do not exist."""
    name = uuid.uuid4().hex
    return {"kafka": kafka_bootstrap, "reservations_topic": f"r-{name}"}


@asynccontextmanager
async def replica(settings: dict[str, Any], clock: Clock) -> AsyncIterator[Replica]:
    """A replica that has read the topic."""
    found = Replica(IndexerSettings(**settings), TTL_S, clock)
    async with found.exchange.running():
        await async_wait_until(lambda: not found.exchange.why_not_ready(), 60, "the backlog")
        yield found


@pytest.fixture
async def producer(kafka_bootstrap: str) -> AsyncIterator[AIOKafkaProducer]:
    """Another writer of the topic."""
    async with AIOKafkaProducer(bootstrap_servers=kafka_bootstrap) as found:
        yield found


async def write(producer: AIOKafkaProducer, topic: str, record: ReservationRecord, at: float | None = None) -> None:
    payload, key = encode_reservation(record), reservation_id(record).encode()
    await producer.send_and_wait(topic, payload, key=key, timestamp_ms=None if at is None else int(at * 1000))


async def test_bookings_of_a_killed_replica_stay_and_expire_and_none_is_lost_or_doubled(
    own: dict[str, Any], producer: AIOKafkaProducer
) -> None:
    clock = Clock()
    with ReplicaProcess(TTL_S, **own) as killed:
        async with replica(own, clock) as left:
            for number in range(10):
                await asyncio.to_thread(killed.reserve, f"k{number}", "w1", [1, 2, 100 + number])
                left.reserve(f"l{number}", "w1", [1, 2, 200 + number])
            for step in (PREFILL_COMPLETE, RELEASED):
                await asyncio.to_thread(killed.progress, "k0", step)
            await asyncio.to_thread(killed.progress, "k1", OUTPUT_BLOCK, 1)
            await async_wait_until(lambda: left.loads("w1") == (19, 19 * 48, 2 + 19 + 1), 30, "all bookings")
            killed.kill()
            left.progress("k9", RELEASED)  # its caller asks another replica from now on
            await async_wait_until(lambda: left.exchange.queue.num_queued == 0, what="the records")
            now = clock()
            repeated = Progressed(VERSION, "k", "k1", now, OUTPUT_BLOCK, None, 1)
            for record in (reserved("k2", "w1", [1, 2, 102], now), repeated):  # a writer was not sure of them
                await write(producer, own["reservations_topic"], record)
            await producer.send_and_wait(own["reservations_topic"], b"\xc1", key=b"k")
            async with replica(own, clock) as restarted:
                await async_wait_until(lambda: left.exchange.rejected == {"msgpack": 1}, what="the garbage")
                assert restarted.loads("w1") == left.loads("w1") == (18, 18 * 48, 2 + 18 + 1)
                assert restarted.names() == left.names()
                clock.ahead_s = TTL_S - 60
                for number in range(10):
                    left.progress(f"l{number}", PREFILL_COMPLETE)
                await async_wait_until(lambda: restarted.loads("w1")[1] == 8 * 48, what="the other replica")
                clock.ahead_s = TTL_S + 60
                assert restarted.loads("w1") == left.loads("w1") == (10, 0, 2 + 10)
                assert restarted.names() == left.names() == {f"l{number}" for number in range(10)}
                assert restarted.book.num_expired == left.book.num_expired == 8


async def test_a_start_finds_requests_that_last_longer_than_the_time_to_live(
    own: dict[str, Any], producer: AIOKafkaProducer
) -> None:
    topic, now = own["reservations_topic"], time.time()
    for name, ages_s in {"long": (900, 700, 450, 200), "silent": (900, 700, 380), "late": (900, 590, 200)}.items():
        await write(producer, topic, reserved(name, "w1", [1, 2], now - ages_s[0]), now - ages_s[0])
        for number, age_s in enumerate(ages_s[1:], 1):
            step = Progressed(VERSION, "x", name, now - age_s, OUTPUT_BLOCK, None, number)
            await write(producer, topic, step, now - age_s)
    async with replica(own, Clock()) as found:
        assert found.names() == {"long"}
        assert found.loads("w1") == (1, 32, 2 + 3)


async def test_choices_of_a_broken_clock_are_not_reported(own: dict[str, Any], producer: AIOKafkaProducer) -> None:
    now, placed = time.time(), list[str]()
    async with replica(own, Clock()) as found:
        found.exchange.listener = Mock(take=lambda decision: placed.append(decision.request_id))
        for name, at in (("later", now + 7200), ("now", now)):
            await write(producer, own["reservations_topic"], reserved(name, "w1", [1], at))
        await async_wait_until(lambda: found.names() == {"later", "now"}, what="both")
    assert placed == ["now"]


async def test_a_record_reaches_the_other_replica_in_milliseconds(own: dict[str, Any]) -> None:
    clock, seconds = Clock(), []
    async with replica(own, clock) as first, replica(own, clock) as second:
        for number in range(30):
            began = time.perf_counter()
            first.reserve(str(number), "w1", [number])
            await async_wait_until(lambda: str(number) in second.names(), 60)  # noqa: B023
            seconds.append(time.perf_counter() - began)
    assert sorted(seconds)[15] < 0.25


async def test_records_that_fill_several_batches_of_a_partition_reach_the_other_replica_in_order(
    own: dict[str, Any],
) -> None:
    async with administration(own["kafka"]) as admin:
        await admin.create_topics([NewTopic(own["reservations_topic"], 4, 1)])
    clock, names = Clock(), [f"r{number}" for number in range(40)]
    async with replica(own, clock) as first, replica(own, clock) as second:
        for number, name in enumerate(names):
            first.reserve(name, "w1", list(range(60_000 * number, 60_000 * (number + 1))))
        for number, name in enumerate(names):
            first.progress(name, RELEASED if number % 2 else PREFILL_COMPLETE)
        await async_wait_until(lambda: second.exchange.applied == 80, 60, "all records")
        assert second.loads("w1") == first.loads("w1") == (20, 0, 20 * 60_000)
        assert second.names() == {*names[::2]}
    source = KafkaSource(IndexerSettings(**own), topic=own["reservations_topic"])
    await source.start({})
    assert len([end for end in (await source.ends()).values() if end]) > 1  # they are spread
    await source.stop()


async def test_more_records_than_one_of_the_topic_may_have_are_split(own: dict[str, Any]) -> None:
    clock = Clock()
    async with replica(own, clock) as first, replica(own, clock) as second:
        records = [reserved(f"r{number}", "w1", [number], clock()) for number in range(2 * MAX_JOINED + 1)]
        assert all(first.book.apply(record, clock()) for record in records)
        assert first.exchange.put(*records) is None
        await async_wait_until(lambda: second.exchange.applied == len(records), 60, "all records")
        assert second.names() == first.names()


@pytest.mark.parametrize("num_partitions", [1, 4])
async def test_records_that_were_encoded_together_are_each_in_their_partition(
    own: dict[str, Any], num_partitions: int
) -> None:
    async with administration(own["kafka"]) as admin:
        await admin.create_topics([NewTopic(own["reservations_topic"], num_partitions, 1)])
    clock, names, found = Clock(), [f"r{number}" for number in range(40)], dict[int, list[str]]()
    async with replica(own, clock) as first, replica(own, clock) as second:
        for begin in range(0, len(names), 8):
            records = [reserved(name, "w1", [1], clock()) for name in names[begin : begin + 8]]
            records = [msgspec.structs.replace(each, replica=first.exchange.replica) for each in records]
            assert all(first.book.apply(record, clock()) for record in records)
            first.exchange.put_joined({"reserved": len(records)}, b"".join(map(encode_reservation, records)))
        await async_wait_until(lambda: second.names() == set(names), what="all")
        await async_wait_until(lambda: first.exchange.queue.written == len(names), what="all")
        assert (first.exchange.applied, second.exchange.applied) == (0, len(names))
    source = KafkaSource(IndexerSettings(**own), topic=own["reservations_topic"])
    await source.start({})
    ends = await source.ends()
    while sum(map(len, found.values())) < len(names):
        for record in await source.fetch():
            made = map(decode_reservation, singles(record.payload))
            found.setdefault(record.partition, []).extend(map(reservation_id, made))
    await source.stop()
    assert sum(ends.values()) < len(names)
    expected = {part: [name for name in names if crc32(name.encode()) % num_partitions == part] for part in ends}
    assert found == {part: of_partition for part, of_partition in expected.items() if of_partition}


async def test_without_a_broker_bookings_stay_local_and_the_queue_is_bounded() -> None:
    queue = WriteQueue(TopicWriter(settings := IndexerSettings(kafka="127.0.0.1:9"), "r").write, contents=RESERVATIONS)
    source = KafkaSource(settings, topic="r")
    exchange = ReservationExchange(Book(TTL_S, 0), queue, source)
    async with exchange.running():
        await async_wait_until(lambda: "127.0.0.1:9" in exchange.why_not_ready(), what="the obstacle")
        big = [reserved(str(number), "w1", list(range(60_000)), time.time()) for number in range(80)]
        reasons = [exchange.put(record) for record in big]
        assert set(reasons) == {None, QUEUE_FULL}
        assert queue.dropped[QUEUE_FULL] == 80 - queue.num_queued == reasons.count(QUEUE_FULL) > 0


async def test_records_that_waited_for_long_keep_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    written = list[LogRecord]()

    async def write(records: Sequence[LogRecord]) -> None:
        written.extend(records)

    queue = WriteQueue(write, contents=RESERVATIONS)
    names = [f"r{number}" for number in range(40)]
    for number, name in enumerate(names):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda number=number: 100 + number / 100)
            queue.put(("reserved", name, encode_reservation(reserved(name, "w1", [1], 100 + number / 100))))
    async with queue.running():
        await async_wait_until(lambda: queue.written == len(names), what="the records")
    made = [list(map(decode_reservation, singles(record.payload))) for record in written]
    assert [reservation_id(each) for several in made for each in several] == names
    assert [names[record.offset] for record in written] == [reservation_id(several[0]) for several in made]
    for record, several in zip(written, made, strict=True):
        assert all(-1 < time_of(each) * 1000 - record.timestamp_ms < 21 for each in several)
    assert len(written) < len(names)


async def test_a_recording_has_the_records_of_the_topic(own: dict[str, Any], tmp_path: Path) -> None:
    async with replica(own, Clock()) as only:
        for number in range(5):
            only.reserve(f"r{number}", "w1", [number])
            only.progress(f"r{number}", PREFILL_COMPLETE)
        await async_wait_until(lambda: only.exchange.queue.written == 10, what="the records")
    flags = [part for field, value in own.items() for part in (f"--{field.replace('_', '-')}", value)]
    done = await asyncio.to_thread(kvsight, "record", tmp_path, "--once", "--channel", "reservations", *flags)
    assert done.returncode == 0, done.stderr
    records = [record for _, record in EventLogReader(tmp_path).read()]
    assert {record.channel for record in records} == {Channel.RESERVATIONS}
    found = {f"r{number}": list[str]() for number in range(5)}
    assert len(records) < 10
    for record in records:
        for payload in singles(record.payload):
            made = decode_reservation(payload)
            found[reservation_id(made)].append(type(made).__name__)
    assert set(map(tuple, found.values())) == {("Reserved", "Progressed")}


@pytest.mark.parametrize("is_beside", [False, True])
async def test_without_kafka_records_go_where_decisions_go(tmp_path: Path, is_beside: bool) -> None:
    settings = IndexerSettings(event_log_dir=tmp_path) if is_beside else IndexerSettings()
    recording = None if is_beside else create_recording(settings, tmp_path, 3600)
    exchange = create_exchange(settings, Book(TTL_S, 0), recording)
    async with AsyncExitStack() as stack:
        if recording is not None:
            await stack.enter_async_context(recording.running())
        await stack.enter_async_context(exchange.running())
        assert exchange.why_not_ready() == ""
        assert exchange.put(reserved("r", "w1", [1], time.time())) is None
    ((_, record),) = EventLogReader(tmp_path / "reservations" if is_beside else tmp_path).read()
    assert (record.channel, record.key) == (Channel.RESERVATIONS, b"r")


async def test_a_service_without_a_log_says_that_it_keeps_no_record() -> None:
    exchange = create_exchange(IndexerSettings(), Book(TTL_S, 0))
    async with exchange.running():
        assert exchange.put(reserved("r", "w1", [1], time.time())) == NO_LOG
    assert exchange.queue.dropped[NO_LOG] == 1
