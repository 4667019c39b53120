"""Records on the topics that kvsight did not write: they are skipped and counted, and stop nothing."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from aiokafka import AIOKafkaProducer

from indexer.assembly import create_consumer
from indexer.settings import IndexerSettings
from indexer.views import ViewState
from kv_events.codec import encode_resync
from kv_events.schema import BlockStored, ResyncRequest, StorageMedium
from publisher import EventPublisher, PublisherSettings
from publisher.sinks.kafka import KafkaSink
from tests.support.log.records import Stream
from tests.support.programs import run_program
from tests.support.waiting import async_wait_until

pytestmark = pytest.mark.timing("a consumer must be ready within a minute")


class Topics(NamedTuple):
    """Two topics of a test, and a producer of any records."""

    bootstrap: str
    events: str
    control: str
    producer: AIOKafkaProducer


@pytest.fixture
async def topics(kafka_bootstrap: str) -> AsyncIterator[Topics]:
    name = uuid.uuid4().hex
    producer = AIOKafkaProducer(bootstrap_servers=kafka_bootstrap)
    await producer.start()
    yield Topics(kafka_bootstrap, f"events-{name}", f"control-{name}", producer)
    await producer.stop()


@asynccontextmanager
async def publishing(topics: Topics) -> AsyncIterator[tuple[EventPublisher, KafkaSink]]:
    """Run a publisher that holds a page and has written a record."""
    own: dict[str, Any] = {"kafka": topics.bootstrap, "events_topic": topics.events, "control_topic": topics.control}
    paces: dict[str, Any] = {"resync_jitter_s": 0, "resync_min_interval_s": 0, "ledger_pages": 10_000}
    settings = PublisherSettings(model="m", worker="w", block_size=4, **own, **paces)
    sink = KafkaSink(settings)
    async with EventPublisher(settings, sink) as publisher:
        publisher.publish([BlockStored([1], None, [1, 2, 3, 4], 4, None, StorageMedium.GPU, None)])
        await async_wait_until(lambda: publisher.stats().next_seq, 30, "the first record")
        yield publisher, sink


NOT_REQUESTS = {
    "tombstone": None,
    "empty": b"",
    "garbage": b"\xc1garbage",
    "other msgpack": b"\x81\xa1a\x01",
    "batch": Stream().batch().payload,
    "large": encode_resync(ResyncRequest("m" * 900_000, 1)),
    "request of another type": encode_resync(ResyncRequest("w", 1)).replace(b"\xa1w", b"\xc3"),
}


async def test_a_publisher_answers_requests_after_anything_else_on_the_control_topic(topics: Topics) -> None:
    async with publishing(topics) as (publisher, _):
        for value in NOT_REQUESTS.values():
            await topics.producer.send_and_wait(topics.control, value, b"\xff")
        await topics.producer.send_and_wait(topics.control, b"no key")
        request = ResyncRequest(publisher.stream.key, publisher.epoch, "after all of that")
        await topics.producer.send_and_wait(topics.control, encode_resync(request))
        await async_wait_until(lambda: publisher.stats().resyncs == 2, 30, "the resync")
        assert publisher.stats().skipped_requests == len(NOT_REQUESTS) + 1
        assert publisher.stats().failure is None


async def test_a_publisher_that_aiokafka_has_stopped_reading_for_listens_again_by_a_failure_put_in(
    topics: Topics,
) -> None:
    async with publishing(topics) as (publisher, sink):
        given_up = sink._consumer
        given_up._fetcher.error_future.cancel()

        async def resync() -> bool:
            request = ResyncRequest(publisher.stream.key, publisher.epoch, "nobody listens")
            await topics.producer.send_and_wait(topics.control, encode_resync(request))
            return publisher.stats().resyncs >= 2

        await async_wait_until(resync, 30, "the resync")
        assert sink._consumer is not given_up
        assert given_up._closed


UNREADABLE = """
import asyncio, sys
from aiokafka import AIOKafkaProducer


class NotText(str):
    def encode(self, *_: str) -> bytes:
        return b"\\xff"


async def send(bootstrap: str, topic: str) -> None:
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        await producer.send_and_wait(topic, b"x", headers=[(NotText(), b"")])


asyncio.run(send(*sys.argv[1:]))
"""
"""Sends a record with a header whose name is not UTF-8, at which aiokafka's readers fail."""


def send_unreadable(topics: Topics, topic: str) -> None:
    done = run_program(UNREADABLE, topics.bootstrap, topic, AIOKAFKA_NO_EXTENSIONS="1")
    assert done.returncode == 0, done.stderr


async def test_an_indexer_and_a_publisher_skip_and_count_what_is_no_batch_and_what_the_client_library_cannot_read(
    topics: Topics,
) -> None:
    settings = IndexerSettings(kafka=topics.bootstrap, events_topic=topics.events, control_topic=topics.control)
    others = {name: value for name, value in NOT_REQUESTS.items() if name != "batch"}
    consumer = create_consumer(settings)
    counts = consumer.applier.dead_letters.counts
    async with publishing(topics) as (publisher, _):
        for _ in range(2):
            await asyncio.to_thread(send_unreadable, topics, topics.events)
        await asyncio.to_thread(send_unreadable, topics, topics.control)
        async with consumer.running():
            await async_wait_until(lambda: consumer.ready, 60, "the consumer to be ready")
            for value in others.values():
                await topics.producer.send_and_wait(topics.events, value, b"\xff")
            await topics.producer.send_and_wait(topics.events, b"no key")
            publisher.publish([BlockStored([2], None, [1, 2, 3, 5], 4, None, StorageMedium.GPU, None)])
            await async_wait_until(lambda: consumer.namespaces.view(publisher.stream), 60, "the view")
            view = consumer.namespaces.view(publisher.stream)
            assert view is not None
            await async_wait_until(lambda: view.num_pages[0] == 2 and view.state is ViewState.LIVE, 60, "the pages")
            await async_wait_until(lambda: counts.total() == len(others) + 3, 30, "all of them")
            assert counts["empty"] == 4
            assert consumer.failure is None
            resyncs = publisher.stats().resyncs
            consumer.resyncs.demand(view)
            await async_wait_until(lambda: publisher.stats().resyncs > resyncs, 60, "an answer to a request")
            assert publisher.stats().failure is None
