"""The contract of sources, run on each of them."""

import asyncio
import gc
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import NewTopic

from indexer.sources.base import Source, SourceUnavailableError
from indexer.sources.file import FileSource
from indexer.sources.kafka import KafkaSource
from indexer.sources.memory import MemorySource
from kv_events.kafka.settings import KafkaSettings
from kv_events.log.event_log import EventLogWriter
from kv_events.log.memory import MemoryLog
from kv_events.records import LogRecord
from tests.support.log.records import Stream
from tests.support.servers.kafka_broker import administration
from tests.support.waiting import async_wait_for, async_wait_until

Append = Callable[[LogRecord], Awaitable[None]]


class Log(NamedTuple):
    """A log of one kind, with functions to write to it and to open another reader."""

    append: Append
    new_source: Callable[[], Source]


def kafka_settings(bootstrap: str, topic: str) -> KafkaSettings:
    return KafkaSettings(kafka=bootstrap, events_topic=topic, control_topic=f"{topic}-control")


async def _kafka_log(bootstrap: str) -> AsyncIterator[Log]:
    topic = f"events-{uuid.uuid4().hex}"
    async with administration(bootstrap) as admin:
        await admin.create_topics([NewTopic(topic, 3, 1)])
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True) as producer:

        async def append(record: LogRecord) -> None:
            await producer.send_and_wait(topic, record.payload, key=record.key, timestamp_ms=record.timestamp_ms)

        yield Log(append, lambda: KafkaSource(kafka_settings(bootstrap, topic)))


@pytest.fixture(params=["memory", "file", "kafka"])
async def log(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Log]:
    if request.param == "memory":
        memory = MemoryLog()

        async def append(record: LogRecord) -> None:
            memory.append(record.key, record.payload, record.timestamp_ms)

        yield Log(append, lambda: MemorySource(memory))
    elif request.param == "file":
        with EventLogWriter(tmp_path / "log") as writer:

            async def append(record: LogRecord) -> None:
                writer.append(record)
                writer.flush(sync=False)

            yield Log(append, lambda: FileSource(tmp_path / "log"))
    else:
        async for made in _kafka_log(request.getfixturevalue("kafka_bootstrap")):
            yield made


@asynccontextmanager
async def started(source: Source, positions: Mapping[int, int] | None = None) -> AsyncIterator[Source]:
    await source.start(positions or {})
    yield source
    await source.stop()


async def read(source: Source, count: int) -> list[LogRecord]:
    records: list[LogRecord] = []

    async def enough() -> bool:
        records.extend(await source.fetch())
        return len(records) >= count

    await async_wait_until(enough, deadline_s=60, what=f"{count} records")
    return records


async def test_records_come_whole_and_in_the_order_of_their_stream(log: Log) -> None:
    streams = [Stream(f"w{i}") for i in range(5)]
    sent = [stream.batch() for _ in range(20) for stream in streams]
    for record in sent:
        await log.append(record)
    async with started(log.new_source()) as source:
        received = await read(source, len(sent))
    for stream in streams:
        key = stream.id.key.encode()
        assert [r.payload for r in received if r.key == key] == [r.payload for r in sent if r.key == key]
    assert {r.timestamp_ms for r in received} == {r.timestamp_ms for r in sent}


async def test_a_reader_begins_where_another_one_stopped_and_beyond_the_end_at_the_oldest_record(log: Log) -> None:
    stream = Stream()
    for _ in range(10):
        await log.append(stream.batch())
    async with started(log.new_source()) as source:
        records = await read(source, 10)
        half, ends = records[5], await source.ends()
    assert ends[half.partition] == sum(ends.values()) == records[-1].offset + 1 == 10
    async with started(log.new_source(), {half.partition: half.offset}) as source:
        assert [r for r in await read(source, 5) if r.partition == half.partition] == records[5:]
    source = log.new_source()
    assert (await source.start({half.partition: 1000}))[half.partition] == 0
    assert len(await read(source, 10)) == 10
    await source.stop()


async def test_records_that_come_later_are_seen(log: Log) -> None:
    async with started(log.new_source()) as source:
        assert list(await source.fetch()) == []
        await log.append(Stream().batch())
        assert len(await read(source, 1)) == 1


async def test_a_dropped_offset_begins_at_the_oldest_record() -> None:
    memory = MemoryLog(capacity_bytes=1000)
    stream = Stream()
    for _ in range(30):
        record = stream.batch()
        memory.append(record.key, record.payload, record.timestamp_ms)
    async with started(MemorySource(memory), {0: 0}) as source:
        assert (await source.fetch())[0].offset == memory.first_offset > 0


async def test_a_folder_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailableError, match="no such folder"):
        await FileSource(tmp_path / "nowhere").start({})


async def test_a_broker_that_is_not_there_is_unavailable() -> None:
    source = KafkaSource(kafka_settings("127.0.0.1:1", "events"))
    with pytest.raises(SourceUnavailableError, match="Kafka"):
        await source.start({})
    await source.stop()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # aiokafka drops a connection that it is opening
async def test_a_start_that_is_cancelled_at_any_moment_closes_its_consumer(
    kafka_bootstrap: str, caplog: pytest.LogCaptureFixture
) -> None:
    num_steps, is_started = 1, False
    while not is_started:
        source = KafkaSource(kafka_settings(kafka_bootstrap, f"cut-{uuid.uuid4().hex}"))
        starting = asyncio.create_task(source.start({}))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        is_started = starting.done()
        starting.cancel()
        await asyncio.wait({starting})
        if is_started:
            await source.stop()
        num_steps += 1 + num_steps // 4
        del source, starting
    gc.collect()
    assert "Unclosed" not in caplog.text


async def test_a_topic_that_appears_later_is_read_from_its_beginning(kafka_bootstrap: str) -> None:
    topic = f"late-{uuid.uuid4().hex}"
    async with started(KafkaSource(kafka_settings(kafka_bootstrap, topic))) as source:
        async with AIOKafkaProducer(bootstrap_servers=kafka_bootstrap) as producer:
            await producer.send_and_wait(topic, b"first")
        await async_wait_for(source.ends, lambda ends: sum(ends.values()) == 1, 60, "the topic")
        assert [r.payload for r in await read(source, 1)] == [b"first"]
