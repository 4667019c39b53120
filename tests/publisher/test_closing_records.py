"""The closing record of a publisher: its worker leaves the scores at once."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from bridge import EngineSettings
from indexer.assembly import create_consumer
from indexer.settings import IndexerSettings
from indexer.views import ViewState
from kv_events.log.memory import MemoryLog
from kv_events.schema import CLOSED, BlockStored, StorageMedium
from publisher import EventPublisher, PublisherSettings
from publisher.sinks.memory import MemorySink
from publisher.sinks.zmq import ZmqSink
from tests.rigs.bridge import GPU, LiveBridge, on
from tests.support.engines import event_payloads
from tests.support.engines.event_payloads import names_of, payload
from tests.support.engines.publishing_process import MODEL, PublishingProcess
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.servers.child_process import free_port
from tests.support.servers.kafka_broker import KafkaBroker
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import async_wait_until, wait_until

pytestmark = pytest.mark.timing("a publisher must close within its deadline")

GRACE_S = 3.0
"""Beyond its deadline, a close may stop the sink."""


@pytest.fixture(scope="module")
def topics(kafka_bootstrap: str) -> dict[str, Any]:
    return own_topics(kafka_bootstrap, KVSIGHT_TOPIC_PARTITIONS=1)


@pytest.fixture(scope="module")
def service(topics: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("service"), **topics, KVSIGHT_WORKER_TTL_S=300) as service:
        service.wait_until_ready()
        yield service


@pytest.fixture
def worker() -> str:
    return uuid.uuid4().hex


def scored(service: ServiceProcess) -> dict[str, Any]:
    instances: dict[str, Any] = service.query(MODEL, [1, 2]).json().get("instances", {})
    return instances


@pytest.mark.parametrize("way", ["close", "terminate"])
def test_a_closed_publisher_leaves_the_scores_at_once_and_can_come_back(
    service: ServiceProcess, topics: dict[str, Any], worker: str, way: str
) -> None:
    with PublishingProcess(worker, **topics) as engine:
        engine.store(1, 2)
        wait_until(lambda: scored(service).get(worker, {}).get("gpu") == 8, what="the worker in the scores")
        getattr(engine, way)()
    wait_until(lambda: worker not in scored(service), what="the worker to leave the scores")
    listener = service.listener(worker)
    assert (listener["state"], listener["stale_reason"]) == ("expired", CLOSED)
    assert service.pages(worker) == {1, 2}
    with PublishingProcess(worker, clock_ahead_s=-60, **topics) as engine:
        engine.store(1)
        wait_until(lambda: scored(service).get(worker, {}).get("gpu") == 4, what="the worker back in the scores")
        assert scored(service)[worker]["state"] == "live"


def test_a_publisher_closes_within_its_bound_while_the_broker_hangs(kafka_broker: KafkaBroker) -> None:
    with PublishingProcess("w", KVSIGHT_KAFKA=kafka_broker.bootstrap) as engine:
        engine.store(1, 2)
        kafka_broker.stop()
        try:
            engine.store(3)
            assert engine.close(deadline_s=1.0) < 1.0 + GRACE_S
        finally:
            kafka_broker.kill()  # the next test that needs it gets a running one


def test_a_publisher_that_never_reached_its_broker_closes_within_its_bound() -> None:
    with PublishingProcess("w", KVSIGHT_KAFKA=f"127.0.0.1:{free_port()}") as engine:
        engine.store(1)
        assert engine.close(deadline_s=0.5) < 0.5 + GRACE_S


@pytest.mark.parametrize(("ends_stream", "state"), [(True, ViewState.EXPIRED), (False, ViewState.LIVE)])
async def test_a_publisher_sends_a_closing_record_unless_it_is_replaced(ends_stream: bool, state: ViewState) -> None:
    log = MemoryLog()
    consumer = create_consumer(IndexerSettings(), log)
    async with consumer.running():
        publisher = EventPublisher(PublisherSettings(model="m", worker="w", block_size=4), MemorySink(log))
        await publisher.start()
        publisher.publish([BlockStored([1, 2], None, list(range(8)), 4)])
        await async_wait_until(lambda: consumer.namespaces.view(publisher.stream) is not None, what="a view")
        view = consumer.namespaces.view(publisher.stream)
        assert view is not None
        await async_wait_until(lambda: consumer.freshness.state(view) is ViewState.LIVE, what="a live view")
        await publisher.aclose(ends_stream=ends_stream)
        await async_wait_until(lambda: consumer.progress.positions.get(0) == log.next_offset, what="all records")
        assert (consumer.freshness.state(view), view.num_pages[0]) == (state, 2)


async def test_a_bridge_sends_closing_records_for_its_engines() -> None:
    tokens = [7, 8, 9, 10]
    page = on(GPU, names_of(tokens))
    with ZmqEngine() as engine:
        async with LiveBridge() as bridge:
            await bridge.read(engine)
            engine.send(payload(event_payloads.stored([1], tokens), rank=None))
            await bridge.shows(page)
            assert bridge.view().degraded_reason == ""
    assert (bridge.view().pages, bridge.view().degraded_reason) == (page, CLOSED)


async def test_a_bridge_drops_the_pages_of_an_engine_that_closes_its_zmq_sink() -> None:
    port, replay = free_port(), free_port()
    settings = PublisherSettings(
        model="m", worker="w", block_size=4, with_tokens=True, zmq=f"tcp://*:{port}", zmq_replay=f"tcp://*:{replay}"
    )
    tokens = list(range(8))
    engine = EngineSettings(
        worker="w", model="m", endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=f"tcp://127.0.0.1:{replay}"
    )
    async with LiveBridge() as bridge:
        async with EventPublisher(settings, ZmqSink(settings)) as publisher:
            await bridge.fleet.add(engine)
            publisher.publish([BlockStored([1, 2], None, tokens, 4, medium=StorageMedium.GPU)])
            await bridge.shows(on(GPU, names_of(tokens)))
        await bridge.shows(set(), deadline_s=8)
