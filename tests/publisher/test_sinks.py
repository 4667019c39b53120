"""The contract of sinks, run on each of them."""

import asyncio
import os
import threading
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from kv_events.codec import encode_resync
from kv_events.log.event_log import EventLogReader, EventLogWriter
from kv_events.log.memory import MemoryLog
from kv_events.schema import ResyncRequest
from publisher import OutRecord, PublisherSettings, Sink, SinkRejectedError, SinkUnavailableError
from publisher.sinks.file import FileSink
from publisher.sinks.kafka import KafkaSink
from publisher.sinks.memory import MemorySink
from tests.support.waiting import async_wait_until


class Seen(NamedTuple):
    """A record as a reader sees it."""

    key: bytes
    payload: bytes
    timestamp_ms: int


class MemoryPlace:
    """A log in memory."""

    def __init__(self) -> None:
        self.log = MemoryLog()

    def sink(self) -> Sink:
        return MemorySink(self.log)

    async def read(self) -> list[Seen]:
        return [Seen(r.key, r.payload, r.timestamp_ms) for r in self.log.read(0)]

    async def request(self, message: ResyncRequest) -> None:
        await asyncio.to_thread(self.log.request, message)


class FilePlace:
    """A folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def sink(self) -> Sink:
        return FileSink(self.folder)

    async def read(self) -> list[Seen]:
        return [Seen(r.key, r.payload, r.timestamp_ms) for _, r in EventLogReader(self.folder).read()]


@dataclass
class KafkaPlace:
    """New topics on a real broker."""

    settings: PublisherSettings

    def sink(self) -> Sink:
        return KafkaSink(self.settings)

    async def read(self) -> list[Seen]:
        topic = self.settings.events_topic
        async with AIOKafkaConsumer(bootstrap_servers=self.settings.kafka, group_id=None) as consumer:
            parts = [TopicPartition(topic, i) for i in range(self.settings.topic_partitions)]
            consumer.assign(parts)
            await consumer.seek_to_beginning()
            ends = await consumer.end_offsets(parts)
            seen: list[Seen] = []
            while sum(ends.values()) > len(seen):
                for records in (await consumer.getmany(timeout_ms=500)).values():
                    seen.extend(Seen(r.key, r.value, r.timestamp) for r in records)
        return seen

    async def request(self, message: ResyncRequest) -> None:
        async with AIOKafkaProducer(bootstrap_servers=self.settings.kafka) as producer:
            await producer.send_and_wait(self.settings.control_topic, encode_resync(message))


def kafka_place(bootstrap: str, **changes: Any) -> KafkaPlace:
    name = uuid.uuid4().hex
    values = {"model": "m", "worker": "w", "block_size": 16, "topic_partitions": 3, **changes}
    topics: dict[str, Any] = {"events_topic": f"events-{name}", "control_topic": f"control-{name}"}
    return KafkaPlace(PublisherSettings(kafka=bootstrap, **topics, **values))


@pytest.fixture(params=["memory", "file", pytest.param("kafka", marks=pytest.mark.kafka)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "memory":
        return MemoryPlace()
    if request.param == "file":
        return FilePlace(tmp_path / "log")
    return kafka_place(request.getfixturevalue("kafka_bootstrap"))


@pytest.fixture
async def sink(place: Any) -> AsyncIterator[Sink]:
    sink = place.sink()
    await sink.start()
    yield sink
    await sink.stop()


def records(count: int, key: bytes = b"t/m/w/0", size: int = 20) -> list[OutRecord]:
    return [OutRecord(key, key + b"%d" % i + bytes(size), 1_700_000_000_000 + i, 1) for i in range(count)]


def as_seen(sent: list[OutRecord]) -> list[Seen]:
    return [Seen(r.key, r.payload, r.timestamp_ms) for r in sent]


@pytest.mark.parametrize("size", [20, 700_000])
async def test_what_was_sent_can_be_read_once_send_returns(place: Any, sink: Sink, size: int) -> None:
    sent = records(5, size=size)
    await sink.send(sent)
    assert await place.read() == as_seen(sent)


async def test_records_of_one_key_keep_their_order_over_many_sends(place: Any, sink: Sink) -> None:
    keys = [b"t/m/w-%d/0" % i for i in range(4)]
    sent = {key: records(40, key) for key in keys}
    for start in range(0, 40, 10):
        await sink.send([record for key in keys for record in sent[key][start : start + 10]])
    seen = await place.read()
    for key in keys:
        assert [record for record in seen if record.key == key] == as_seen(sent[key])


async def test_sending_nothing_is_harmless(place: Any, sink: Sink) -> None:
    await sink.send([])
    assert await place.read() == []


async def test_a_second_sink_appends_behind_the_first(place: Any) -> None:
    first, second = records(2, b"a/m/w/0"), records(2, b"a/m/w/1")
    for sent in (first, second):
        sink = place.sink()
        await sink.start()
        await sink.send(sent)
        await sink.stop()
    assert sorted(await place.read()) == sorted(as_seen([*first, *second]))


async def test_stopping_twice_or_unstarted_is_harmless(place: Any) -> None:
    sink = place.sink()
    await sink.stop()
    await sink.start()
    await sink.stop()
    await sink.stop()


async def test_requests_come_from_start_on_and_only_when_made(place: Any, sink: Sink) -> None:
    waiting = asyncio.ensure_future(anext(sink.requests()))
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done
    if not hasattr(place, "request"):  # an event log has no control channel
        waiting.cancel()
        return
    message = ResyncRequest("t/m/w/0", 7, "gap")
    await place.request(message)
    assert await asyncio.wait_for(waiting, 10) == message


async def test_a_log_that_another_writer_holds_is_unavailable(tmp_path: Path) -> None:
    first, second = FileSink(tmp_path), FileSink(tmp_path)
    await first.start()
    with pytest.raises(SinkUnavailableError, match=str(tmp_path)):
        await second.start()
    await first.stop()
    await second.start()
    await second.stop()


async def test_stopping_waits_for_a_write_that_was_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_syncs, may_go_on, sync = 0, threading.Event(), os.fsync

    def slow(fd: int) -> None:
        nonlocal num_syncs
        num_syncs += 1
        assert may_go_on.wait(10)
        sync(fd)

    sink = FileSink(tmp_path)
    await sink.start()
    monkeypatch.setattr(os, "fsync", slow)
    sending = asyncio.ensure_future(sink.send(records(3)))
    await async_wait_until(lambda: num_syncs == 1)
    sending.cancel()
    stopping = asyncio.ensure_future(sink.stop())
    done, _ = await asyncio.wait({stopping}, timeout=0.1)
    assert (done, num_syncs) == (set(), 1)
    may_go_on.set()
    await stopping
    assert await FilePlace(tmp_path).read() == as_seen(records(3))


async def test_a_log_whose_opening_was_abandoned_is_closed_by_stop(tmp_path: Path) -> None:
    sink = FileSink(tmp_path)
    starting = asyncio.ensure_future(sink.start())
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await sink.stop()
    EventLogWriter(tmp_path).close()


async def test_a_broker_that_is_not_there_is_unavailable() -> None:
    sink = kafka_place("127.0.0.1:1").sink()
    with pytest.raises(SinkUnavailableError, match=r"127\.0\.0\.1:1"):
        await sink.start()
    await sink.stop()


async def test_a_record_beyond_the_brokers_limit_is_rejected_permanently(kafka_bootstrap: str) -> None:
    sink = kafka_place(kafka_bootstrap).sink()
    await sink.start()
    with pytest.raises(SinkRejectedError):
        await sink.send(records(1, size=2_000_000))
    await sink.send(records(1))
    await sink.stop()


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
async def test_compressed_records_read_back_the_same(kafka_bootstrap: str, compression: str) -> None:
    pytest.importorskip("cramjam", reason="pip install 'kvsight[compression]'")
    place = kafka_place(kafka_bootstrap, compression=compression)
    sink = place.sink()
    await sink.start()
    await sink.send(records(5, size=5000))
    await sink.stop()
    assert await place.read() == as_seen(records(5, size=5000))


async def test_send_outlasts_a_broker_that_goes_away(kafka_broker: Any) -> None:
    place = kafka_place(kafka_broker.bootstrap)
    sink = place.sink()
    await sink.start()
    await sink.send(records(2))
    await asyncio.to_thread(kafka_broker.kill)
    sending = asyncio.ensure_future(sink.send(records(20)[2:]))
    await asyncio.to_thread(kafka_broker.restart)
    await asyncio.wait_for(sending, 60)
    await sink.stop()
    assert await place.read() == as_seen(records(20))


async def test_stop_does_not_wait_for_a_broker_that_is_away(kafka_broker: Any) -> None:
    sink = kafka_place(kafka_broker.bootstrap).sink()
    await sink.start()
    await asyncio.to_thread(kafka_broker.kill)
    sending = asyncio.ensure_future(sink.send(records(1)))
    done, _ = await asyncio.wait({sending}, timeout=0.2)
    assert not done
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await asyncio.wait_for(sink.stop(), 10)
