"""Kafka goes away, its topics are deleted: views become right again, and the service says so.

A real broker, a real `kvsight serve` and real publisher processes.
"""

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition

from kv_events.kafka.connection import KafkaConnection
from kv_events.kafka.settings import KafkaSettings
from kv_events.kafka.topics import inspect_topics
from tests.support.engines.publishing_process import MODEL, PublishingProcess
from tests.support.servers.kafka_broker import KafkaBroker, administration
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timing("a service and its views must recover within seconds")

_LONGEST_WRONG_S = 2.0
"""How long a view may be `live` although it lacks pages."""
_ANSWERS = 20
"""Answers about a missing topic that are timed."""
_SINCE = re.compile(r"log unreadable since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ: ")


@pytest.fixture
def topics(kafka_bootstrap: str) -> dict[str, Any]:
    return own_topics(kafka_bootstrap)


@pytest.fixture
def engines(topics: dict[str, Any]) -> Iterator[list[PublishingProcess]]:
    with ExitStack() as running:
        yield [running.enter_context(PublishingProcess(f"w{number}", **topics)) for number in range(6)]


def are_right(service: ServiceProcess, engines: list[PublishingProcess]) -> bool:
    return all(map(service.is_right, engines))


def is_live_and_wrong(service: ServiceProcess, engine: PublishingProcess) -> bool:
    """Return whether a view is said to be live although it lacks pages."""
    return service.listener(engine.worker)["state"] == "live" and service.pages(engine.worker) < engine.held


# --- the broker -----------------------------------------------------------------------------------------------------


def test_a_service_ends_while_a_broker_hangs(kafka_broker: KafkaBroker, tmp_path: Path) -> None:
    topics, recording = own_topics(kafka_broker.bootstrap), {"KVSIGHT_RECORD": tmp_path / "recording"}
    with PublishingProcess("w", **topics) as engine, ServiceProcess(tmp_path, **topics, **recording) as service:
        engine.store(1)
        wait_until(lambda: service.is_right(engine), 60, "the view to be right")
        service.wait_until_ready()

        def written() -> int:
            book(service)
            names = ("kvsight_decisions_written_total", "kvsight_reservations_written_total")
            return min(int(service.metric(name)) for name in names)

        wait_until(written, 60, "the writers to be connected")
        kafka_broker.stop()
        try:
            book(service)
            began = time.monotonic()
            service.terminate()
            assert time.monotonic() - began < 8  # the two writers wait for the same broker, at the same time
        finally:
            kafka_broker.resume()
    for name in ("decisions", "reservations"):
        missing = rf"not written before the end: (1 {name[:-1]}|(?!1 )\d+ {name})$"
        assert re.search(missing, service.log.read_text(), re.MULTILINE)


def book(service: ServiceProcess) -> None:
    """Let a service write to both of its topics."""
    service.post("/decisions", {"request_id": "r", "worker": "w", "model_name": MODEL, "seq_hashes": [1]})
    assert service.post("/select_and_reserve", {"model_name": MODEL, "token_ids": [1, 2]}).status_code == 200


def test_an_outage_of_kafka_is_reported(kafka_broker: KafkaBroker, tmp_path: Path) -> None:
    topics = own_topics(kafka_broker.bootstrap)
    with PublishingProcess("w", **topics) as engine, ServiceProcess(tmp_path, **topics) as service:
        engine.store(1, 2, 3)
        wait_until(lambda: service.is_right(engine), 30, "the pages")
        service.wait_until_ready()
        assert (service.metric("kvsight_log_up"), service.metric("kvsight_log_down_seconds")) == (1, 0)

        kafka_broker.kill()
        wait_until(lambda: service.get("/ready").status_code == 503, 60, "the service to notice")
        ready = service.get("/ready")
        assert _SINCE.match(ready.json()["detail"])
        assert ready.headers["Retry-After"] == "1"
        assert (service.metric("kvsight_log_up"), service.metric("kvsight_ready")) == (0, 0)
        assert service.metric("kvsight_log_down_seconds") > 0
        assert "kvsight_log_lag_records" not in service.get("/metrics").text
        wait_until(lambda: service.listener("w")["state"] == "stale", 60, "the view to be stale")
        assert _SINCE.match(service.listener("w")["stale_reason"])
        known, unknown = service.query(MODEL, [1, 2, 3]), service.query("unknown", [1])
        assert known.json()["instances"]["w"]["longest_matched"] == 12
        assert (unknown.status_code, unknown.headers["Retry-After"]) == (503, "1")
        assert _SINCE.search(unknown.json()["detail"])

        engine.store(4)
        kafka_broker.restart()
        service.wait_until_ready()
        wait_until(lambda: service.is_right(engine), 30, "the view after the outage")
        assert service.query("unknown", [1]).status_code == 404
        assert service.metric("kvsight_log_up") == 1
    lines = [line for line in service.log.read_text().splitlines() if line.strip()]
    assert len([line for line in lines if "log unreadable since" in line]) == 1, lines[:20]
    assert len([line for line in lines if re.search(r"log readable again after \d+\.\d s", line)]) == 1, lines[:20]
    assert len(lines) < 15, len(lines)


# --- the topics -----------------------------------------------------------------------------------------------------


async def delete(topics: dict[str, Any], which: str = "KVSIGHT_EVENTS_TOPIC") -> None:
    async with administration(topics["KVSIGHT_KAFKA"]) as admin:
        await admin.delete_topics([topics[which]])


def test_topics_that_are_deleted_and_created_again_are_followed(
    topics: dict[str, Any], engines: list[PublishingProcess], tmp_path: Path
) -> None:
    with ServiceProcess(tmp_path, **topics) as service:
        for number, engine in enumerate(engines):
            engine.store(*range(100 * number + 1, 100 * number + 20))
        wait_until(lambda: are_right(service, engines), 60, "a start")

        asyncio.run(delete(topics))
        for engine in engines:
            engine.store(1000, 1001)
        wrong_since: float | None = None
        longest_wrong_s, give_up = 0.0, time.monotonic() + 90
        while not are_right(service, engines):
            is_wrong = any(is_live_and_wrong(service, engine) for engine in engines)
            wrong_since = (wrong_since or time.monotonic()) if is_wrong else None
            longest_wrong_s = max(longest_wrong_s, time.monotonic() - wrong_since if wrong_since is not None else 0.0)
            assert time.monotonic() < give_up, [service.listener(engine.worker) for engine in engines]
            time.sleep(0.05)
        assert longest_wrong_s < _LONGEST_WRONG_S
        wait_until(lambda: service.get("/ready").status_code == 200, 30, "a service that is ready")
        engines[0].store(2000)
        wait_until(lambda: are_right(service, engines), 60, "later pages")

        asyncio.run(delete(topics, "KVSIGHT_CONTROL_TOPIC"))
        of_worker = 'kvsight_worker_resyncs_total\\{.*worker="w0".*\\}'
        resyncs = service.metric(of_worker)

        def is_heard() -> bool:
            assert service.post("/workers/w0/resync").status_code == 202
            return service.metric(of_worker) > resyncs

        wait_until(is_heard, 60, "a request over the new topic")
    assert "was deleted or created again; all workers are resynchronised" in service.log.read_text()


async def test_a_reader_of_a_topic_that_is_deleted_asks_for_it_at_a_bounded_rate(topics: dict[str, Any]) -> None:
    settings = KafkaSettings(kafka=topics["KVSIGHT_KAFKA"], events_topic=topics["KVSIGHT_EVENTS_TOPIC"])
    connection = KafkaConnection(settings)
    await inspect_topics(connection, settings, create=True, names=[settings.events_topic])
    consumer = connection.consumer()
    await consumer.start()
    try:
        place = TopicPartition(settings.events_topic, 0)
        consumer.assign([place])
        await consumer.seek_to_beginning()
        assert await consumer.position(place) == 0
        answers, has_enough = list[float](), asyncio.Event()

        def note(_cluster: object) -> None:
            answers.append(time.monotonic())
            if len(answers) == _ANSWERS:
                has_enough.set()

        await delete(topics)
        consumer._client.cluster.add_listener(note)
        await asyncio.wait_for(has_enough.wait(), 30)
        assert answers[_ANSWERS - 1] - answers[0] > 0.09 * (_ANSWERS - 1)
    finally:
        await consumer.stop()
