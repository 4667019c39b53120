"""The whole path of a page through real parts, and faults on it: caches, publishers, Kafka, Redis, index, HTTP."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from api.app import create_app
from api.server import running_server
from api.settings import ApiSettings
from engine_cache import InsertParams, RadixCache, RadixKey
from indexer.applier import Applier, DeadLetters
from indexer.consumer import Consumer
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings, RedisSettings
from indexer.snapshots.redis import RedisStore
from indexer.sources.kafka import KafkaSource
from indexer.views import ViewState
from kv_events.kafka.settings import KafkaSettings
from publisher import EventPublisher, PublisherSettings
from publisher.sinks.kafka import KafkaSink
from simulation import Request, SimulationSettings, WorkloadSettings, generate
from simulation.live import kafka_transport, live_fleet
from tests.support.servers.kafka_broker import KafkaBroker
from tests.support.waiting import async_wait_until

pytestmark = pytest.mark.timing("a page must reach the answers within seconds")

SMALL = SimulationSettings(workers=3, capacity_tokens=16_384, page_size=16)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return generate(WorkloadSettings(num_requests=300, seed=2))


def topics() -> tuple[str, str]:
    name = uuid.uuid4().hex
    return f"events-{name}", f"control-{name}"


def kafka_settings(bootstrap: str, names: tuple[str, str]) -> KafkaSettings:
    return KafkaSettings(kafka=bootstrap, events_topic=names[0], control_topic=names[1])


def new_consumer(bootstrap: str, names: tuple[str, str], redis_url: str | None = None) -> Consumer:
    settings = IndexerSettings(max_pages=100_000, resync_retry_s=0.3)
    store = RedisStore(RedisSettings(redis=redis_url), prefix=f"test:{names[0]}") if redis_url else None
    return Consumer(
        KafkaSource(kafka_settings(bootstrap, names)), Applier(Namespaces(settings), DeadLetters()), settings, store
    )


def publisher_settings(bootstrap: str, names: tuple[str, str], **more: Any) -> PublisherSettings:
    return PublisherSettings(
        model="m",
        worker="engine-0",
        block_size=16,
        kafka=bootstrap,
        events_topic=names[0],
        control_topic=names[1],
        heartbeat_s=0.2,
        **more,
    )


async def test_what_an_engine_caches_a_router_finds_over_http(kafka_bootstrap: str) -> None:
    names, prompt = topics(), np.arange(1, 101)
    settings = publisher_settings(kafka_bootstrap, names)
    cache = RadixCache(page_size=16, enable_kv_cache_events=True)
    app = create_app(new_consumer(kafka_bootstrap, names), ApiSettings(port=0))
    async with (
        EventPublisher(settings, KafkaSink(settings)) as publisher,
        running_server(app, ApiSettings(port=0)) as url,
        httpx.AsyncClient(base_url=url) as router,
    ):
        cache.insert(InsertParams(RadixKey(prompt[:96]), np.arange(96)))
        publisher.publish(cache.take_events())
        body = {"model_name": "m", "token_ids": prompt.tolist()}

        async def found() -> bool:
            answer = (await router.post("/query", json=body)).json()
            instance = answer.get("instances", {}).get("engine-0", {})
            return (instance.get("gpu"), instance.get("state")) == (96, "live")

        await async_wait_until(found, deadline_s=30, what="96 tokens in the answer")
        cache.reset()
        publisher.publish(cache.take_events())

        async def dropped() -> bool:
            return bool((await router.post("/query", json=body)).json().get("instances") == {})

        await async_wait_until(dropped, deadline_s=30, what="an empty answer")


async def test_a_broker_killed_in_mid_stream_loses_and_doubles_nothing(
    kafka_broker: KafkaBroker, requests: list[Request]
) -> None:
    transport = kafka_transport(kafka_settings(kafka_broker.bootstrap, topics()))
    async with live_fleet(SMALL, "round-robin", transport) as fleet:
        for number, request in enumerate(requests):
            if number == 100:
                kafka_broker.kill()
            if number == 200:
                states = {fleet.consumer.freshness.state(view) for view in fleet.consumer.namespaces.views}
                assert ViewState.EXPIRED not in states
                await asyncio.to_thread(kafka_broker.restart)
            fleet.trial.step(request)
            await asyncio.sleep(0)
        await fleet.settle()
        assert fleet.trial.report(0.0).divergent_pages == 0


async def test_a_queue_that_overflows_while_the_broker_is_away_ends_in_a_resync(kafka_broker: KafkaBroker) -> None:
    names = topics()
    settings = publisher_settings(kafka_broker.bootstrap, names, queue_pages=1000, ledger_pages=100_000)
    cache = RadixCache(page_size=16, enable_kv_cache_events=True)
    consumer = new_consumer(kafka_broker.bootstrap, names)
    random = np.random.default_rng(0)
    async with EventPublisher(settings, KafkaSink(settings)) as publisher, consumer.running():
        await async_wait_until(lambda: consumer.namespaces.view(publisher.stream) is not None, deadline_s=30)
        kafka_broker.kill()
        for _ in range(50):
            cache.insert(InsertParams(RadixKey(random.integers(0, 1000, 1600)), np.arange(1600)))
            publisher.publish(cache.take_events())
        assert publisher.stats().queue.dropped > 0
        await asyncio.to_thread(kafka_broker.restart)

        def is_whole() -> bool:
            view = consumer.namespaces.view(publisher.stream)
            return view is not None and view.state is ViewState.LIVE and view.num_pages[0] == 5000

        await async_wait_until(is_whole, deadline_s=60, what="a resync of 5000 pages")


async def test_an_indexer_that_restarts_continues_from_its_snapshot_in_redis(
    kafka_bootstrap: str, redis_url: str
) -> None:
    names = topics()
    settings = publisher_settings(kafka_bootstrap, names)
    cache = RadixCache(page_size=16, enable_kv_cache_events=True)

    def insert(number: int) -> None:
        cache.insert(InsertParams(RadixKey(np.arange(number, number + 160)), np.arange(160)))

    async def has_pages(consumer: Consumer, count: int) -> None:
        def reached() -> bool:
            view = consumer.namespaces.view(publisher.stream)
            live = view is not None and view.state is ViewState.LIVE
            return consumer.ready and live and view is not None and view.num_pages[0] == count

        await async_wait_until(reached, deadline_s=30, what=f"{count} pages")

    async with EventPublisher(settings, KafkaSink(settings)) as publisher:
        first = new_consumer(kafka_bootstrap, names, redis_url)
        async with first.running():
            insert(0)
            publisher.publish(cache.take_events())
            await has_pages(first, 10)
        insert(1000)
        publisher.publish(cache.take_events())
        second = new_consumer(kafka_bootstrap, names, redis_url)
        async with second.running():
            await has_pages(second, 20)
            view = second.namespaces.view(publisher.stream)
            assert view is not None
            assert view.counters.resyncs == 1  # the one at the publisher's start, out of the snapshot's counters
            assert second.resyncs.requested.total() == 0


async def test_an_engine_that_restarts_empty_takes_its_old_pages_along(kafka_bootstrap: str, tmp_path: Path) -> None:
    names = topics()
    consumer = new_consumer(kafka_bootstrap, names)
    settings = publisher_settings(kafka_bootstrap, names)
    async with consumer.running():
        for life in range(2):
            cache = RadixCache(page_size=16, enable_kv_cache_events=True)
            async with EventPublisher(settings, KafkaSink(settings)) as publisher:
                cache.insert(InsertParams(RadixKey(np.arange(life * 1000, life * 1000 + 160)), np.arange(160)))
                publisher.publish(cache.take_events())

                def is_alone(publisher: EventPublisher = publisher) -> bool:
                    view = consumer.namespaces.view(publisher.stream)
                    return view is not None and (view.epoch, view.state, view.num_pages[0]) == (
                        publisher.epoch,
                        ViewState.LIVE,
                        10,
                    )

                await async_wait_until(is_alone, deadline_s=30, what="the pages of this life alone")
