"""The topic of the events is deleted and created again while publishers and a service use it.

A real broker, a real `kvsight serve` and real publisher processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from tests.support.engines.publishing_process import PublishingProcess
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import wait_until

_LONGEST_LIE_S = 2.0
"""How long a view may be `live` although it lacks pages."""


@pytest.fixture
def topics(kafka_bootstrap: str) -> dict[str, Any]:
    return own_topics(kafka_bootstrap)


@pytest.fixture
def engines(topics: dict[str, Any]) -> Iterator[list[PublishingProcess]]:
    with PublishingProcess("w0", **topics) as one, PublishingProcess("w1", **topics) as other:
        yield [one, other]


def delete(topics: dict[str, Any]) -> None:
    async def run() -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=str(topics["KVSIGHT_KAFKA"]))
        await admin.start()
        await admin.delete_topics([str(topics["KVSIGHT_EVENTS_TOPIC"])])
        await admin.close()

    asyncio.run(run())


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
        assert service.get("/ready").status_code == 200

        engines[0].store(2000)
        wait_until(lambda: are_right(service, engines), 60, "later pages")
    log = service.log.read_text()
    assert "was deleted or created again; all workers are resynchronised" in log
