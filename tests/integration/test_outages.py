"""Kafka goes away and comes back: the service says so once in its log, and at once in its answers.

A real broker, a real `kvsight serve` and a real publisher process.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.publishing_process import MODEL, PublishingProcess
from tests.support.servers.kafka_broker import KafkaBroker
from tests.support.servers.service_process import ServiceProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timing("a service must recover within seconds of its broker")

_SINCE = re.compile(r"log unreadable since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ: ")


def metric(service: ServiceProcess, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", service.get("/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


async def test_an_outage_of_kafka_is_told(kafka_broker: KafkaBroker, tmp_path: Path) -> None:
    name = uuid.uuid4().hex
    topics: dict[str, Any] = {
        "KVSIGHT_KAFKA": kafka_broker.bootstrap,
        "KVSIGHT_EVENTS_TOPIC": f"events-{name}",
        "KVSIGHT_CONTROL_TOPIC": f"control-{name}",
    }
    await asyncio.to_thread(check_an_outage, kafka_broker, topics, tmp_path)


def check_an_outage(broker: KafkaBroker, topics: dict[str, Any], folder: Path) -> None:
    with PublishingProcess("w", **topics) as engine, ServiceProcess(folder, **topics) as service:
        engine.store(1, 2, 3)
        wait_until(lambda: service.pages("w") == {1, 2, 3}, 30, "the pages")
        service.wait_until_ready()
        assert (metric(service, "kvsight_log_up"), metric(service, "kvsight_log_down_seconds")) == (1, 0)

        broker.kill()
        wait_until(lambda: service.get("/ready").status_code == 503, 60, "the service to notice")
        ready = service.get("/ready")
        assert _SINCE.match(ready.json()["detail"])
        assert ready.headers["Retry-After"] == "1"
        assert (metric(service, "kvsight_log_up"), metric(service, "kvsight_ready")) == (0, 0)
        assert metric(service, "kvsight_log_down_seconds") > 0
        assert "kvsight_log_lag_records" not in service.get("/metrics").text
        wait_until(lambda: service.listener("w")["state"] == "stale", 60, "the view to be stale")
        assert _SINCE.match(service.listener("w")["stale_reason"])
        known, unknown = service.query(MODEL, [1, 2, 3]), service.query("unknown", [1])
        assert known.json()["instances"]["w"]["longest_matched"] == 12
        assert (unknown.status_code, unknown.headers["Retry-After"]) == (503, "1")
        assert _SINCE.search(unknown.json()["detail"])

        engine.store(4)
        broker.restart()
        service.wait_until_ready()
        wait_until(lambda: service.pages("w") == {1, 2, 3, 4} and service.listener("w")["state"] == "live", 30)
        assert service.query("unknown", [1]).status_code == 404
        assert metric(service, "kvsight_log_up") == 1
    lines = [line for line in service.log.read_text().splitlines() if line.strip()]
    assert len([line for line in lines if "log unreadable since" in line]) == 1, lines[:20]
    assert len([line for line in lines if re.search(r"log readable again after \d+\.\d s", line)]) == 1, lines[:20]
    assert len(lines) < 15, len(lines)
