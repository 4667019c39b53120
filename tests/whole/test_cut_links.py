"""The network between engine, Kafka, Redis and service fails and heals, disks are full and have room again.

Views become right again, and no answer fails. A real broker, redis-server, `kvsight serve` and publisher process, with
a proxy on each link. A limit on the size of files stands in for a full disk: writes are cut in the middle, as there.
"""

import asyncio
import gc
import resource
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partialmethod
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from indexer.sources.base import SourceUnavailableError
from indexer.sources.kafka import KafkaSource
from kv_events.kafka.connection import KafkaConnection
from kv_events.kafka.settings import KafkaSettings
from tests.support.engines.publishing_process import BLOCK_SIZE, MODEL, PublishingProcess
from tests.support.log.records import Stream, stored
from tests.support.servers.kafka_broker import LinkedKafka
from tests.support.servers.service_process import ServiceProcess, own_topics, write_events
from tests.support.servers.tcp_proxy import TcpProxy
from tests.support.waiting import async_wait_until, wait_until

pytestmark = pytest.mark.timing("views must be right within seconds after a fault ends")

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


def view_is_stale(service: ServiceProcess) -> bool:
    return bool(service.listener("w")["state"] == "stale")


def log_is_unreadable(service: ServiceProcess) -> bool:
    return service.get("/ready").status_code == 503


def snapshots_fail(service: ServiceProcess) -> bool:
    return service.metric("kvsight_snapshot_failures_total") > 0


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
        engine.store(1, 2, 3)
        wait_until(lambda: service.is_right(engine), 60, "the view before")
        fails(site.links[link])
        try:
            engine.store(4)
            engine.remove(3)
            wait_until(lambda: shows(service), 60, f"the fault to be noticed; the log says {service.log.read_text()}")
            assert service.query(MODEL, [1, 2]).json()["instances"]["w"]["longest_matched"] == 8
        finally:
            site.links[link].heal()
        engine.store(5)
        wait_until(lambda: service.is_right(engine), 60, "the view to be right")
        service.wait_until_ready()
        service.wait_for_snapshot()
    assert "Traceback" not in service.log.read_text()


def test_a_slow_link_loses_nothing(site: Site) -> None:
    link = site.links["ENGINES"]
    with PublishingProcess("slow", **site.topics) as engine:
        link.slow(50_000)
        try:
            engine.store(*range(1, 9001))
            wait_until(lambda: site.service.is_right(engine), 60, "the pages")
        finally:
            link.heal()


@pytest.mark.parametrize("answers", [True, False])
def test_a_restarted_service_claims_nothing_before_it_has_caught_up(
    linked_kafka: LinkedKafka, tmp_path: Path, answers: bool
) -> None:
    link, stream = linked_kafka.links["SERVICES"], Stream("w", model=MODEL, block_size=BLOCK_SIZE)
    topics = own_topics(linked_kafka.bootstrap, KVSIGHT_WORKER_TTL_S=300)
    settings = {"KVSIGHT_KAFKA": link.address, "KVSIGHT_SNAPSHOT_DIR": tmp_path, "KVSIGHT_SNAPSHOT_INTERVAL_S": 0.2}
    if not answers:
        settings["KVSIGHT_ANSWER_BEFORE_READY"] = "false"
    write_events(topics, stream.batch(stored((0, [1, 2, 3]))))
    with ServiceProcess(tmp_path, **topics | settings) as service:
        wait_until(lambda: service.pages("w") == {1, 2, 3}, 60, "the view before")
        service.wait_for_snapshot()
        service.kill()
        write_events(topics, *(stream.batch(stored((3, range(first, first + 30_000)))) for first in (4, 30_004)))
        link.slow(100_000)  # it takes seconds to read them
        try:
            service.start()
            if answers:
                wait_until(lambda: service.query(MODEL, [1]).is_success, 60, "the snapshot")
            found = service.query(MODEL, [1, 2, 3, 4])
            assert service.get("/ready").status_code == 503
        finally:
            link.heal()
        if answers:
            instance = found.json()["instances"]["w"]
            assert (instance["state"], instance["gpu"]) == ("syncing", 3 * BLOCK_SIZE)
        else:
            assert (found.status_code, found.headers["retry-after"]) == (503, "1")
        service.wait_until_ready()
        instance = service.query(MODEL, [1, 2, 3, 4]).json()["instances"]["w"]
        assert (instance["state"], instance["gpu"]) == ("live", 4 * BLOCK_SIZE)


async def test_a_topic_without_records_is_read_again_after_its_connection_was_lost_silently(
    linked_kafka: LinkedKafka, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = KafkaConnection.consumer
    monkeypatch.setattr(KafkaConnection, "consumer", partialmethod(consumer, request_timeout_ms=2000))  # of 40 s
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


# --- full disks -----------------------------------------------------------------------------------------------------


@contextmanager
def full_disk(pid: int, room_bytes: int) -> Iterator[None]:
    """No file of a process grows beyond a size."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (room_bytes, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it was killed meanwhile
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


@pytest.fixture
def log(tmp_path: Path) -> dict[str, Any]:
    """The setting of an event log, for engine and service."""
    return {"KVSIGHT_EVENT_LOG_DIR": tmp_path / "log"}


def test_a_full_disk_under_an_event_log_costs_freshness_alone(log: dict[str, Any], tmp_path: Path) -> None:
    with PublishingProcess("w", **log) as engine, ServiceProcess(tmp_path, **log, KVSIGHT_WORKER_TTL_S=300) as service:
        engine.store(1, 2, 3)
        wait_until(lambda: service.is_right(engine), 60, "the view before")
        size = sum(path.stat().st_size for path in (tmp_path / "log").glob("*.kvlog"))
        with full_disk(engine.pid, size + 1000):
            engine.store(*range(10, 3000))
            engine.remove(3)
            wait_until(lambda: view_is_stale(service), 60, "the view to be stale")
            assert service.query(MODEL, [1, 2]).json()["instances"]["w"]["longest_matched"] == 8
        engine.store(4)
        wait_until(lambda: service.is_right(engine), 60, f"the view to be right: {service.log.read_text()}")


def test_a_full_disk_under_snapshots_costs_snapshots_alone(log: dict[str, Any], tmp_path: Path) -> None:
    settings = {**log, "KVSIGHT_SNAPSHOT_DIR": tmp_path / "s", "KVSIGHT_SNAPSHOT_INTERVAL_S": 0.2}
    with PublishingProcess("w", **log) as engine, ServiceProcess(tmp_path, **settings) as service:

        def wait_for_failures() -> None:
            failures = service.metric("kvsight_snapshot_failures_total")
            wait_until(lambda: service.metric("kvsight_snapshot_failures_total") > failures, 60, "snapshots to fail")

        engine.store(*range(1, 2000))
        service.wait_for_snapshot()
        with full_disk(service.pid, 1000):
            wait_for_failures()
            engine.store(3000)
            wait_until(lambda: service.is_right(engine), 60, "the view while the disk is full")
        service.wait_for_snapshot()
        with full_disk(service.pid, 1000):
            wait_for_failures()
            service.kill()
            service.start()
        service.wait_until_ready()
        wait_until(lambda: service.is_right(engine), 60, "the view after the restart")
        assert "Traceback" not in service.log.read_text()
