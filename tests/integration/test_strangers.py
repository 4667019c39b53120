"""Streams that no publisher stands behind do not delay the others.

A real broker, a real `kvsight serve` and real publisher processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from kv_events.records import LogRecord
from tests.support.engines.publishing_process import BLOCK_SIZE, MODEL, PublishingProcess
from tests.support.log.records import Stream, stored
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import wait_until

_DEADLINE_S = 8.0
"""Alone on a machine it takes 2 s: six requests at five a second, and the resyncs."""


@pytest.fixture
def topics(kafka_bootstrap: str) -> dict[str, Any]:
    return own_topics(kafka_bootstrap)


@pytest.fixture
def engines(topics: dict[str, Any]) -> Iterator[list[PublishingProcess]]:
    with ExitStack() as running:
        yield [running.enter_context(PublishingProcess(f"w{number}", **topics)) for number in range(6)]


def write(topics: dict[str, Any], records: list[LogRecord]) -> None:
    async def send() -> None:
        async with AIOKafkaProducer(bootstrap_servers=topics["KVSIGHT_KAFKA"]) as producer:
            for record in records:
                await producer.send(topics["KVSIGHT_EVENTS_TOPIC"], record.payload, record.key)

    asyncio.run(send())


def batches_of_strangers() -> list[LogRecord]:
    """Batches of 30 unknown workers and 70 unknown models, from the middle of their streams."""
    strangers = [Stream(f"stranger-{i}", model=MODEL, block_size=BLOCK_SIZE) for i in range(30)]
    strangers += [Stream("w", model=f"model-{i}") for i in range(70)]
    for stranger in strangers:
        stranger.batch()  # never sent
    return [stranger.batch(stored((0, [1])), digest=bytes(64)) for stranger in strangers]


def break_view(service: ServiceProcess, engine: PublishingProcess) -> LogRecord:
    """Return a record that makes the view of an engine wrong until a resync."""
    forged = Stream(engine.worker, model=MODEL, block_size=BLOCK_SIZE)
    forged.epoch, forged.seq = engine.epoch, service.listener(engine.worker)["seq"] + 20
    return forged.batch(stored((0, [99])))


def test_resyncs_of_workers_do_not_wait_for_streams_without_a_publisher(
    topics: dict[str, Any], engines: list[PublishingProcess], tmp_path: Path
) -> None:
    settings = {"KVSIGHT_MAX_NAMESPACES": 100, "KVSIGHT_SNAPSHOT_DIR": tmp_path, "KVSIGHT_SNAPSHOT_INTERVAL_S": 1}
    with ServiceProcess(tmp_path, **topics, **settings) as service:

        def are_right() -> bool:
            listeners = [service.listener(engine.worker) for engine in engines]
            return all((each.get("state"), each.get("pages", {}).get("GPU")) == ("live", 3) for each in listeners)

        for engine in engines:
            engine.store(1, 2, 3)
        wait_until(are_right, 60, "the pages of all engines")
        write(topics, batches_of_strangers())
        wait_until(lambda: len(service.get("/workers").json()) == 106, 30, "all strangers")
        write(topics, [break_view(service, engine) for engine in engines])
        wait_until(lambda: not are_right(), 30, "broken views")
        wait_until(are_right, _DEADLINE_S, "six resyncs")
