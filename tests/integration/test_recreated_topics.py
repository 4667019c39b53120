"""The topics are deleted and created again while publishers and a service use them.

A real broker, a real `kvsight serve` and real publisher processes.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from kv_events.kafka.connection import KafkaConnection
from kv_events.kafka.settings import KafkaSettings
from kv_events.kafka.topics import inspect_topics
from tests.support.engines.publishing_process import PublishingProcess
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timing("views must be right within seconds after a topic comes back")

_LONGEST_LIE_S = 2.0
"""How long a view may be `live` although it lacks pages."""
_ANSWERS = 20
"""Answers about a missing topic that are timed."""


@pytest.fixture
def topics(kafka_bootstrap: str) -> dict[str, Any]:
    return own_topics(kafka_bootstrap)


@pytest.fixture
def engines(topics: dict[str, Any]) -> Iterator[list[PublishingProcess]]:
    with PublishingProcess("w0", **topics) as one, PublishingProcess("w1", **topics) as other:
        yield [one, other]


def delete(topics: dict[str, Any], which: str = "KVSIGHT_EVENTS_TOPIC") -> None:
    async def run() -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=str(topics["KVSIGHT_KAFKA"]))
        await admin.start()
        await admin.delete_topics([str(topics[which])])
        await admin.close()

    asyncio.run(run())


def resyncs_of(service: ServiceProcess) -> int:
    found = re.search(
        r'^kvsight_worker_resyncs_total\{.*worker="w0".*\} (\S+)$', service.get("/metrics").text, re.MULTILINE
    )
    return 0 if found is None else int(float(found[1]))


def are_right(service: ServiceProcess, engines: list[PublishingProcess]) -> bool:
    return all(service.listener(e.worker)["state"] == "live" and service.pages(e.worker) == e.held for e in engines)


def test_a_topic_that_is_deleted_and_created_again_is_followed(
    topics: dict[str, Any], engines: list[PublishingProcess], tmp_path: Path
) -> None:
    with ServiceProcess(tmp_path, **topics) as service:
        for number, engine in enumerate(engines):
            engine.store(*range(100 * number + 1, 100 * number + 20))
        wait_until(lambda: all(service.pages(e.worker) for e in engines) and are_right(service, engines), 30, "a start")

        delete(topics)
        for engine in engines:
            engine.store(1000, 1001)
        lied_since: float | None = None
        longest_lie_s, give_up = 0.0, time.monotonic() + 90
        while not are_right(service, engines):
            is_lie = any(
                service.listener(e.worker)["state"] == "live" and service.pages(e.worker) < e.held for e in engines
            )
            lied_since = (lied_since or time.monotonic()) if is_lie else None
            longest_lie_s = max(longest_lie_s, time.monotonic() - lied_since if lied_since is not None else 0.0)
            assert time.monotonic() < give_up, [service.listener(engine.worker) for engine in engines]
            time.sleep(0.05)
        assert longest_lie_s < _LONGEST_LIE_S
        wait_until(lambda: service.get("/ready").status_code == 200, 30, "a service that is ready")

        engines[0].store(2000)
        wait_until(lambda: are_right(service, engines), 60, "later pages")
    log = service.log.read_text()
    assert "was deleted or created again; all workers are resynchronised" in log


def test_a_control_topic_that_is_deleted_is_created_again_while_records_flow(
    topics: dict[str, Any], engines: list[PublishingProcess], tmp_path: Path
) -> None:
    engines[0].store(1, 2, 3)
    with ServiceProcess(tmp_path, **topics) as service:
        wait_until(lambda: service.pages("w0") == {1, 2, 3}, 30, "a start")
        delete(topics, "KVSIGHT_CONTROL_TOPIC")
        resyncs = resyncs_of(service)

        def is_heard() -> bool:
            assert service.post("/workers/w0/resync").status_code == 202
            return resyncs_of(service) > resyncs

        wait_until(is_heard, 60, "a request over the new topic")


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

        await asyncio.to_thread(delete, topics)
        consumer._client.cluster.add_listener(note)
        await asyncio.wait_for(has_enough.wait(), 30)
        assert answers[_ANSWERS - 1] - answers[0] > 0.09 * (_ANSWERS - 1)
    finally:
        await consumer.stop()
