"""Streams that were forged, doubled or led astray by clocks: views find back to the engine's pages.

A real broker, a real `kvsight serve` and real publisher processes.
"""

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from kv_events.records import LogRecord
from tests.support.engines.publishing_process import BLOCK_SIZE, MODEL, PublishingProcess
from tests.support.log.records import Stream, splitmix, stored, words
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timing("views must be repaired within seconds")

TTL_S = 60  # no repair waits for it


@pytest.fixture(scope="module")
def topics(kafka_bootstrap: str) -> dict[str, Any]:
    """Settings that name the broker, and topics of these tests alone."""
    return own_topics(kafka_bootstrap, KVSIGHT_TOPIC_PARTITIONS=1)


@pytest.fixture(scope="module")
def service(topics: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service that all tests share: use a worker of your own."""
    folder = tmp_path_factory.mktemp("service")
    with ServiceProcess(folder, **topics, KVSIGHT_WORKER_TTL_S=TTL_S, KVSIGHT_SNAPSHOT_DIR=folder) as service:
        service.wait_until_ready()
        yield service


@pytest.fixture
def worker() -> str:
    return uuid.uuid4().hex


def forge(topics: dict[str, Any], *records: LogRecord) -> None:
    """Write records to the topic, as a stranger may."""

    async def send() -> None:
        async with AIOKafkaProducer(bootstrap_servers=str(topics["KVSIGHT_KAFKA"])) as producer:
            for record in records:
                await producer.send_and_wait(str(topics["KVSIGHT_EVENTS_TOPIC"]), record.payload, record.key)

    asyncio.run(send())


def assert_view_becomes_right(service: ServiceProcess, engine: PublishingProcess, deadline_s: float = 15.0) -> None:
    def is_right() -> bool:
        listener = service.listener(engine.worker)
        state = (listener.get("state"), listener.get("epoch"))
        return state == ("live", engine.epoch) and service.pages(engine.worker) == engine.held

    wait_until(is_right, deadline_s, what=f"a right view; it is {service.listener(engine.worker)}")


def forged(engine: PublishingProcess, epoch: int, seq: int, block_size: int = BLOCK_SIZE) -> LogRecord:
    """A record in an engine's name that stores a page."""
    stream = Stream(engine.worker, model=MODEL, block_size=block_size)
    stream.epoch, stream.seq = epoch, seq
    return stream.batch(stored((0, [99])))


def test_of_two_publishers_of_one_name_the_older_is_believed_once_the_newer_has_died(
    service: ServiceProcess, topics: dict[str, Any], worker: str
) -> None:
    with PublishingProcess(worker, **topics) as older, PublishingProcess(worker, **topics) as newer:
        older.store(1, 2, 3)
        newer.store(4)
        assert_view_becomes_right(service, newer)
        newer.kill()
        older.store(5)
        assert_view_becomes_right(service, older)


def test_an_engine_whose_clock_had_run_ahead_is_believed_after_its_restart(
    service: ServiceProcess, topics: dict[str, Any], worker: str
) -> None:
    with PublishingProcess(worker, clock_ahead_s=600, **topics) as ahead:
        ahead.store(1, 2)
        assert_view_becomes_right(service, ahead)
    with PublishingProcess(worker, **topics) as engine:
        engine.store(3)
        service.kill()
        service.start()
        assert_view_becomes_right(service, engine)


@pytest.mark.parametrize("block_size", [BLOCK_SIZE, 2 * BLOCK_SIZE])
def test_one_forged_record_with_a_future_epoch_costs_two_heartbeats(
    service: ServiceProcess, topics: dict[str, Any], worker: str, block_size: int
) -> None:
    with PublishingProcess(worker, **topics) as engine:
        engine.store(1, 2)
        assert_view_becomes_right(service, engine)
        forge(topics, forged(engine, 2**62, 7 if block_size == BLOCK_SIZE else 0, block_size))
        wait_until(lambda: service.listener(worker)["epoch"] == 2**62, what="the forged epoch")
        engine.store(3)
        assert_view_becomes_right(service, engine)


@pytest.mark.parametrize("far", [5, 2**63 - 1])
def test_one_record_with_a_number_far_ahead_hides_nothing(
    service: ServiceProcess, topics: dict[str, Any], worker: str, far: int
) -> None:
    with PublishingProcess(worker, **topics) as engine:
        engine.store(1, 2)
        assert_view_becomes_right(service, engine)
        seq = service.listener(worker)["seq"]
        forge(topics, forged(engine, engine.epoch, min(seq + far, 2**63 - 1)))
        engine.store(3)
        assert_view_becomes_right(service, engine)


def test_a_clock_two_hours_ahead_and_back_again_silences_no_worker(
    service: ServiceProcess, topics: dict[str, Any], worker: str
) -> None:
    with PublishingProcess(worker, **topics) as engine:
        engine.store(1)
        assert_view_becomes_right(service, engine)
        engine.set_clock(7200)
        engine.store(2)
        assert_view_becomes_right(service, engine)
        engine.set_clock(0)
        engine.store(3)
        assert_view_becomes_right(service, engine)


def many_records(topics: dict[str, Any], worker: str, num_records: int) -> list[int]:
    """Write records that store one page each. Returns the pages, a prompt."""
    stream, pages = Stream(worker, model=worker, block_size=BLOCK_SIZE), list(range(1, num_records + 1))
    records, xor = [], 0
    for page in pages:
        xor ^= splitmix(page)
        records.append(stream.batch(stored((page - 1, [page])), digest=words([page, 0, 0, 0, xor, 0, 0, 0])))

    async def send() -> None:
        async with AIOKafkaProducer(bootstrap_servers=str(topics["KVSIGHT_KAFKA"]), linger_ms=5) as producer:
            topic = str(topics["KVSIGHT_EVENTS_TOPIC"])
            await asyncio.gather(*[await producer.send(topic, each.payload, each.key) for each in records])

    asyncio.run(send())
    return pages


def test_a_restarted_service_claims_nothing_before_it_has_caught_up(
    topics: dict[str, Any], tmp_path: Path, worker: str
) -> None:
    topics = {**topics, "KVSIGHT_EVENTS_TOPIC": f"events-{worker}"}
    pages = many_records(topics, worker, 10_000)
    shown = set()
    with ServiceProcess(tmp_path, **topics, KVSIGHT_WORKER_TTL_S=60) as service:
        while service.get("/ready").status_code != 200:
            answer = service.query(worker, pages)
            if answer.is_success and service.get("/ready").status_code != 200:
                shown |= {each["state"] for each in answer.json()["instances"].values()}
                assert service.listener(worker)["state"] in {"syncing", "stale", "live"}
        assert "syncing" in shown
        assert shown <= {"syncing", "stale"}  # stale if catching up takes longer than three heartbeats
        instance = service.query(worker, pages).json()["instances"][worker]
        assert (instance["state"], instance["gpu"]) == ("live", len(pages) * BLOCK_SIZE)


def test_a_restarted_service_refuses_queries_before_it_has_caught_up_if_told_to(
    topics: dict[str, Any], tmp_path: Path, worker: str
) -> None:
    topics = {**topics, "KVSIGHT_EVENTS_TOPIC": f"events-{worker}"}
    pages = many_records(topics, worker, 10_000)
    refusals = []
    with ServiceProcess(tmp_path, **topics, KVSIGHT_WORKER_TTL_S=60, KVSIGHT_ANSWER_BEFORE_READY="false") as service:
        while (answer := service.query(worker, pages)).status_code != 200:
            refusals.append((answer.status_code, answer.headers["retry-after"]))
        assert set(refusals) == {(503, "1")}
        assert service.get("/ready").status_code == 200
        assert answer.json()["instances"][worker]["gpu"] == len(pages) * BLOCK_SIZE
