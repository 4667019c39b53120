"""The contract of sources, run on each of them."""

import asyncio
import gc
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from indexer.sources.base import Source, SourceUnavailableError
from indexer.sources.file import FileSource
from indexer.sources.kafka import KafkaSource
from indexer.sources.memory import MemorySource
from kv_events.kafka.settings import KafkaSettings
from kv_events.log.event_log import EventLogWriter
from kv_events.log.memory import MemoryLog
from kv_events.records import LogRecord
from tests.support.log.records import Stream
from tests.support.waiting import async_wait_until

Append = Callable[[LogRecord], Awaitable[None]]


class Log(NamedTuple):
    """A log of one kind, with functions to write to it and to open another reader."""

    append: Append
    new_source: Callable[[], Source]


def kafka_settings(bootstrap: str, topic: str) -> KafkaSettings:
    return KafkaSettings(kafka=bootstrap, events_topic=topic, control_topic=f"{topic}-control")


async def _kafka_log(bootstrap: str) -> AsyncIterator[Log]:
    topic = f"events-{uuid.uuid4().hex}"
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(topic, 3, 1)])
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True)
    await producer.start()

    async def append(record: LogRecord) -> None:
        await producer.send_and_wait(topic, record.payload, key=record.key, timestamp_ms=record.timestamp_ms)

    yield Log(append, lambda: KafkaSource(kafka_settings(bootstrap, topic)))
    await producer.stop()
    await admin.close()


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
    source = log.new_source()
    await source.start({})
    received = await read(source, len(sent))
    for stream in streams:
        key = stream.id.key.encode()
        assert [r.payload for r in received if r.key == key] == [r.payload for r in sent if r.key == key]
    assert {r.timestamp_ms for r in received} == {r.timestamp_ms for r in sent}
    await source.stop()


async def test_a_second_reader_continues_where_the_first_one_stopped(log: Log) -> None:
    stream = Stream()
    for _ in range(10):
        await log.append(stream.batch())
    first = log.new_source()
    await first.start({})
    records = await read(first, 10)
    await first.stop()
    half = records[5]
    second = log.new_source()
    await second.start({half.partition: half.offset})
    rest = [r for r in await read(second, 5) if r.partition == half.partition]
    assert rest == records[5:]
    await second.stop()


async def test_the_ends_state_what_there_is_to_catch_up_with(log: Log) -> None:
    stream = Stream()
    for _ in range(3):
        await log.append(stream.batch())
    source = log.new_source()
    await source.start({})
    records = await read(source, 3)
    ends = await source.ends()
    assert ends[records[-1].partition] == records[-1].offset + 1
    assert sum(ends.values()) == 3
    await source.stop()


async def test_a_position_beyond_the_end_begins_at_the_oldest_record(log: Log) -> None:
    stream = Stream()
    for _ in range(3):
        await log.append(stream.batch())
    probe = log.new_source()
    await probe.start({})
    partition = (await read(probe, 3))[0].partition
    await probe.stop()
    source = log.new_source()
    began = await source.start({partition: 1000})
    assert began[partition] == 0
    assert len(await read(source, 3)) == 3
    await source.stop()


async def test_records_that_come_later_are_seen(log: Log) -> None:
    source = log.new_source()
    await source.start({})
    assert list(await source.fetch()) == []
    await log.append(Stream().batch())
    assert len(await read(source, 1)) == 1
    await source.stop()


async def test_a_dropped_offset_begins_at_the_oldest_record() -> None:
    memory = MemoryLog(capacity_bytes=1000)
    stream = Stream()
    for _ in range(30):
        record = stream.batch()
        memory.append(record.key, record.payload, record.timestamp_ms)
    source = MemorySource(memory)
    await source.start({0: 0})
    records = await source.fetch()
    assert records[0].offset == memory.first_offset > 0
    await source.stop()


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
    source = KafkaSource(kafka_settings(kafka_bootstrap, topic))
    await source.start({})
    producer = AIOKafkaProducer(bootstrap_servers=kafka_bootstrap)
    await producer.start()
    await producer.send_and_wait(topic, b"first")
    await producer.stop()

    async def seen() -> bool:
        return sum((await source.ends()).values()) == 1

    await async_wait_until(seen, deadline_s=60, what="the topic")
    assert [r.payload for r in await read(source, 1)] == [b"first"]
    await source.stop()
