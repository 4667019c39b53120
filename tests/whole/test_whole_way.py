"""The whole path of a page through real parts, and faults on it: caches, publishers, Kafka, Redis, index, HTTP."""

import asyncio

import httpx
import numpy as np
import pytest

from api.app import create_app
from api.server import running_server
from api.service import LiveService
from api.settings import ApiSettings
from engine_cache import InsertParams, RadixCache, RadixKey
from indexer.assembly import create_consumer
from indexer.settings import IndexerSettings
from indexer.views import ViewState
from kv_events.kafka.settings import KafkaSettings
from publisher import EventPublisher, PublisherSettings
from publisher.sinks.kafka import KafkaSink
from simulation import Request, SimulationSettings, WorkloadSettings, generate
from simulation.live import kafka_transport, live_fleet
from tests.support.servers.kafka_broker import KafkaBroker, topic_fields
from tests.support.waiting import async_wait_until

pytestmark = pytest.mark.timing("a page must reach the answers within seconds")

SMALL = SimulationSettings(workers=3, capacity_tokens=16_384, page_size=16)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return generate(WorkloadSettings(num_requests=300, seed=2))


async def test_what_an_engine_caches_a_router_finds_over_http(kafka_bootstrap: str) -> None:
    own, prompt = topic_fields(kafka_bootstrap), np.arange(1, 101)
    settings = PublisherSettings(model="m", worker="engine-0", block_size=16, heartbeat_s=0.2, **own)
    consumer = create_consumer(IndexerSettings(max_pages=100_000, **own))
    cache = RadixCache(page_size=16, enable_kv_cache_events=True)
    app = create_app(LiveService(consumer, ApiSettings(port=0)))
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
    transport = kafka_transport(KafkaSettings(**topic_fields(kafka_broker.bootstrap)))
    async with live_fleet(SMALL, "round-robin", transport) as fleet:
        for number, request in enumerate(requests):
            if number == 100:
                kafka_broker.kill()
            if number == 200:
                states = {fleet.consumer.freshness.state(view) for view in fleet.consumer.namespaces.views}
                assert ViewState.EXPIRED not in states
                await asyncio.to_thread(kafka_broker.restart)
            fleet.run.step(request)
            await asyncio.sleep(0)
        await fleet.wait_until_synced()
        assert fleet.run.report(0.0).divergent_pages == 0
