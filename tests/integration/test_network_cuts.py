"""The network between engine, Kafka, Redis and service fails and heals: views become right again, no answer fails.

A real broker, redis-server, `kvsight serve` and publisher process, with a proxy on each link.
"""

from __future__ import annotations

import asyncio
import gc
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from indexer.sources.base import SourceUnavailableError
from indexer.sources.kafka import KafkaSource
from kv_events.kafka.settings import KafkaSettings
from tests.support.engines.publishing_process import MODEL, PublishingProcess
from tests.support.servers.linked_kafka import LinkedKafka
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.servers.tcp_proxy import TcpProxy
from tests.support.waiting import async_wait_until, wait_until

pytestmark = pytest.mark.timing("views must be right within seconds after a cut heals")

CUT, BLACKHOLE = TcpProxy.cut, TcpProxy.blackhole


class Site(NamedTuple):
    links: dict[str, TcpProxy]
    service: ServiceProcess
    topics: dict[str, Any]
    """Settings of engines."""


@pytest.fixture(scope="module")
def site(linked_kafka: LinkedKafka, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A service, and links of engines and services to Kafka and Redis, which all tests share."""
    folder, links = tmp_path_factory.mktemp("site"), linked_kafka.links
    topics = own_topics(links["ENGINES"].address)
    with TcpProxy(urlsplit(redis_url).netloc) as redis:
        settings = {
            "KVSIGHT_KAFKA": links["SERVICES"].address,
            "KVSIGHT_REDIS": f"redis://{redis.address}/7",  # a database of its own
            "KVSIGHT_SNAPSHOT_INTERVAL_S": 0.5,
            "KVSIGHT_WORKER_TTL_S": 300,  # no worker expires, however slow the machine is
        }
        with ServiceProcess(folder, **topics | settings) as service:
            service.wait_until_ready()
            yield Site({**links, "REDIS": redis}, service, topics)


def metric(service: ServiceProcess, name: str) -> float:
    return next(float(line.split()[1]) for line in service.get("/metrics").text.splitlines() if line.startswith(name))


def view_is_stale(service: ServiceProcess) -> bool:
    return bool(service.listener("w")["state"] == "stale")


def log_is_unreadable(service: ServiceProcess) -> bool:
    return service.get("/ready").status_code == 503


def snapshots_fail(service: ServiceProcess) -> bool:
    return metric(service, "kvsight_snapshot_failures_total") > 0


@pytest.mark.parametrize(
    ("link", "fails", "shows"),
    [
        ("ENGINES", CUT, view_is_stale),
        ("ENGINES", BLACKHOLE, view_is_stale),
        ("SERVICES", CUT, log_is_unreadable),
        ("SERVICES", BLACKHOLE, log_is_unreadable),
        ("REDIS", CUT, snapshots_fail),
    ],
)
def test_a_link_that_fails_and_heals_costs_freshness_alone(
    site: Site, link: str, fails: Callable[[TcpProxy], None], shows: Callable[[ServiceProcess], bool]
) -> None:
    service = site.service
    with PublishingProcess("w", **site.topics) as engine:

        def is_right() -> bool:
            listener = service.listener("w")
            return (listener.get("state"), listener.get("epoch")) == ("live", engine.epoch) and (
                service.pages("w") == engine.held
            )

        engine.store(1, 2, 3)
        wait_until(is_right, 60, "the view before")
        fails(site.links[link])
        try:
            engine.store(4)
            engine.remove(3)
            wait_until(lambda: shows(service), 60, f"the fault to be noticed; the log says {service.log.read_text()}")
            assert service.query(MODEL, [1, 2]).json()["instances"]["w"]["longest_matched"] == 8
        finally:
            site.links[link].heal()
        engine.store(5)
        wait_until(is_right, 60, "the view to be right")
        service.wait_until_ready()
        written = metric(service, "kvsight_snapshots_written_total")
        wait_until(lambda: metric(service, "kvsight_snapshots_written_total") > written, 60, "a snapshot")
    assert "Traceback" not in service.log.read_text()


def test_a_slow_link_loses_nothing(site: Site) -> None:
    link = site.links["ENGINES"]
    with PublishingProcess("slow", **site.topics) as engine:
        link.slow(50_000)
        try:
            engine.store(*range(1, 9001))
            wait_until(lambda: site.service.listener("slow").get("pages", {}).get("GPU") == 9000, 60, "the pages")
        finally:
            link.heal()


@pytest.mark.timeout(200)
async def test_a_topic_without_records_is_read_again_after_its_connection_was_lost_silently(
    linked_kafka: LinkedKafka, caplog: pytest.LogCaptureFixture
) -> None:
    link = linked_kafka.links["SERVICES"]
    source = KafkaSource(KafkaSettings(kafka=link.address), topic=f"missing-{uuid.uuid4().hex}")
    await source.start({})

    async def is_readable() -> bool:
        try:
            return await source.ends() == {}
        except SourceUnavailableError:
            return False

    assert await is_readable()
    await asyncio.to_thread(link.lose)
    assert not await is_readable()
    await async_wait_until(is_readable, 90, "the end of aiokafka's own time limit")
    await source.stop()
    gc.collect()
    assert "never retrieved" not in caplog.text
