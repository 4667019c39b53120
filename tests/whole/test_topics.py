"""Topics: only publishers and `kvsight doctor` create them, and one setting names them for every writer and reader."""

import asyncio
import logging
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import NewTopic

from indexer.assembly import create_consumer
from indexer.settings import IndexerSettings
from indexer.sources.kafka import KafkaSource
from kv_events.kafka.connection import KafkaConnection
from kv_events.kafka.settings import KafkaSettings
from kv_events.kafka.topics import Topic, inspect_topics, mismatches, retention_mismatches
from kv_events.log.event_log import EventLogReader
from kv_events.schema import ResyncRequest
from publisher import EventPublisher, PublisherSettings
from publisher.sinks import create_sink
from tests.support.commands import RunningCommand, kvsight
from tests.support.log.records import records_of
from tests.support.servers.kafka_broker import administration, topic_fields
from tests.support.waiting import async_wait_until, wait_until


@pytest.fixture
def own(kafka_bootstrap: str) -> dict[str, Any]:
    """Settings of topics that do not exist."""
    return topic_fields(kafka_bootstrap)


async def existing(own: dict[str, Any]) -> dict[str, Topic]:
    """Name -> topic, of those that exist."""
    settings = KafkaSettings(**own)
    return (await inspect_topics(KafkaConnection(settings), settings, create=False)).found


async def create(bootstrap: str, name: str, partitions: int = 1, configs: dict[str, str] | None = None) -> None:
    """Create a topic as an operator does."""
    async with administration(bootstrap) as admin:
        await admin.create_topics([NewTopic(name, partitions, 1, topic_configs=configs or {})])


def flags(own: dict[str, Any]) -> list[str]:
    return [part for field, value in own.items() for part in (f"--{field.replace('_', '-')}", value)]


async def test_a_reader_creates_no_topic_and_says_once_what_it_waits_for(
    own: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    source = KafkaSource(KafkaSettings(**own))
    assert await source.start({}) == {}
    for _ in range(3):
        assert (await source.fetch(), await source.ends()) == ([], {})
        await source.request(ResyncRequest("default/m/w/0", 1, "test"))
    assert await existing(own) == {}
    for topic in (own["events_topic"], own["control_topic"]):
        said = f"waiting for topic {topic}: create it with `kvsight doctor --create-topics` or start a publisher"
        assert caplog.text.count(said) == 1
    await create(own["kafka"], own["events_topic"], partitions=2)

    async def is_found() -> bool:
        return set(await source.ends()) == {0, 1}

    await async_wait_until(is_found, deadline_s=60, what="the topic")
    assert caplog.text.count(f"topic {own['events_topic']} exists now") == 1
    await source.stop()


async def test_a_publisher_creates_the_topics_of_its_settings_and_again_when_they_are_deleted(
    own: dict[str, Any],
) -> None:
    wanted: dict[str, Any] = {"topic_partitions": 3, "topic_retention_s": 3600}
    settings = PublisherSettings(model="m", worker="w", block_size=4, heartbeat_s=0.2, **wanted, **own)
    source = KafkaSource(settings)

    async def are_right() -> bool:
        found = await existing(own)
        return {name: (t.num_partitions, t.num_replicas, t.configs) for name, t in found.items()} == {
            own["events_topic"]: (3, 1, {"retention.ms": "3600000", "cleanup.policy": "delete"}),
            own["control_topic"]: (1, 1, {"retention.ms": "3600000", "cleanup.policy": "delete"}),
        }

    async with EventPublisher(settings, create_sink(settings)) as publisher:
        await async_wait_until(are_right, deadline_s=60, what="the topics")
        async with administration(own["kafka"]) as admin:
            await admin.delete_topics([own["events_topic"], own["control_topic"]])
        await async_wait_until(are_right, deadline_s=80, what="the topics again")  # one request may take 40 s
        await source.start({})

        async def are_records_written() -> bool:
            return sum((await source.ends()).values()) > 1

        await async_wait_until(are_records_written, deadline_s=30, what="records of the same publisher")
        assert publisher.stats().failure is None
    await source.stop()


async def test_topics_that_differ_from_the_settings_are_one_warning_each(
    own: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await create(
        own["kafka"], own["events_topic"], configs={"cleanup.policy": "compact,delete", "retention.ms": "1000"}
    )
    settings = PublisherSettings(model="m", worker="w", block_size=4, heartbeat_s=0.1, **own)
    consumer = create_consumer(IndexerSettings(snapshot_dir=tmp_path, **own))
    async with EventPublisher(settings, create_sink(settings)), consumer.running():
        await async_wait_until(lambda: consumer.namespaces.views, deadline_s=60, what="a view")
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    (line,) = [each for each in lines if "TOPIC_PARTITIONS" in each]
    assert line.startswith(f"topic {own['events_topic']}: it has 1 partition, and KVSIGHT_TOPIC_PARTITIONS is 8; ")
    assert line.endswith("add some with kafka-topics.sh --alter, or set KVSIGHT_TOPIC_PARTITIONS=1")
    assert (
        len([line for line in lines if "retention.ms=1000 is shorter than KVSIGHT_SNAPSHOT_INTERVAL_S=30" in line]) == 1
    )
    assert len([line for line in lines if "set cleanup.policy=delete" in line]) == 1


def test_a_default_is_a_lower_bound_and_a_setting_is_exact() -> None:
    topic = Topic("kv-events", 16, 3, {"retention.ms": "-1", "cleanup.policy": "delete"})
    assert mismatches(topic, KafkaSettings()) == retention_mismatches(topic, 30.0) == []
    assert mismatches(topic, KafkaSettings(topic_partitions=12)) == [
        "it has 16 partitions, and KVSIGHT_TOPIC_PARTITIONS is 12; set KVSIGHT_TOPIC_PARTITIONS=16"
    ]
    (line,) = mismatches(topic._replace(num_replicas=1), KafkaSettings(topic_replication=3))
    assert line.endswith("reassign its partitions, or set KVSIGHT_TOPIC_REPLICATION=1")
    unknown = topic._replace(configs={})  # this user may not read them
    assert retention_mismatches(unknown, 30.0) == []


def test_the_command_creates_and_checks_topics(own: dict[str, Any]) -> None:
    missing = kvsight("doctor", *flags(own))
    assert missing.returncode == 1
    assert f"{own['events_topic']} and {own['control_topic']}: no such topic" in missing.stdout
    made = kvsight("doctor", "--create-topics", *flags(own), "--topic-partitions", 2, "--topic-retention-s", 7200)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.splitlines() == [
        f"created: {own['events_topic']}: 2 partitions, 1 replica, kept for 2:00:00",
        f"created: {own['control_topic']}: 1 partition, 1 replica, kept for 2:00:00",
        f"created: {own['decisions_topic']}: 2 partitions, 1 replica, kept for 2:00:00",
        f"created: {own['reservations_topic']}: 1 partition, 1 replica, kept for 2:00:00",
    ]
    again = kvsight("doctor", "--create-topics", *flags(own))
    assert (again.returncode, again.stdout.count("exists: ")) == (0, 4)
    assert "it has 2 partitions, and KVSIGHT_TOPIC_PARTITIONS is 8" in again.stderr
    assert "it has 2 partitions, and KVSIGHT_TOPIC_PARTITIONS is 8" in kvsight("doctor", *flags(own)).stdout
    assert "kept for 7200 s" in kvsight("doctor", *flags(own), "--topic-partitions", 2).stdout
    assert kvsight("doctor", "--create-topics", "--kafka", "127.0.0.1:1").returncode == 2


def test_a_simulation_without_a_broker_fails_in_seconds() -> None:
    began = time.monotonic()
    done = kvsight("simulate", "--kafka", "127.0.0.1:1")
    assert (done.returncode, done.stderr) == (2, "kvsight: Kafka at 127.0.0.1:1: connection refused\n")
    assert time.monotonic() - began < 20


async def test_a_recording_waits_for_its_topic_and_keeps_a_bound_on_its_size(
    own: dict[str, Any], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    bounds = ("--max-bytes", "64KiB", "--segment-bytes", "8KiB", "--channel", "events")
    with RunningCommand("record", log, *flags(own), *bounds) as command:
        await asyncio.to_thread(command.wait_for, "waiting for topic")
        assert await existing(own) == {}
        await create(own["kafka"], own["events_topic"])
        async with AIOKafkaProducer(bootstrap_servers=own["kafka"]) as producer:
            for _ in range(200):
                await producer.send_and_wait(own["events_topic"], b"x" * 1000, key=b"k")
        await asyncio.to_thread(wait_until, lambda: EventLogReader(log).next_index == 200, 30, "the records")
        assert await asyncio.to_thread(command.end, signal.SIGTERM) == 0
    files = sorted(log.glob("*.kvlog"))
    assert sum(file.stat().st_size for file in files) <= 64 * 1024
    assert len(list(log.glob("*.kvtimes"))) == len(files)  # the time index is written along
    kept = [record.offset for record in records_of(log)]
    assert kept == list(range(200 - len(kept), 200))
    assert command.err.count("waiting for topic") == 1
    assert "deleted 00000000000000000000.kvlog: records 0 to " in command.err


async def test_a_recording_of_one_topic_does_not_go_on_with_another_one(own: dict[str, Any], tmp_path: Path) -> None:
    log, other = tmp_path / "log", own["events_topic"] + "-other"
    for topic in (own["events_topic"], other):
        await create(own["kafka"], topic)
        async with AIOKafkaProducer(bootstrap_servers=own["kafka"]) as producer:
            await producer.send_and_wait(topic, topic.encode(), key=b"k")
    for _ in range(2):
        assert kvsight("record", log, "--once", *flags(own)).returncode == 0
    refused = kvsight("record", log, "--once", *flags(own | {"events_topic": other}))
    said = f"{log}: it has records of topic {own['events_topic']}, not of {other}: give another folder"
    assert (refused.returncode, refused.stderr.splitlines()[-1]) == (2, f"kvsight: {said}")
    assert {record.payload for record in records_of(log)} == {own["events_topic"].encode()}


def test_a_recording_of_a_topic_that_does_not_exist_ends_if_it_is_to_run_once(
    own: dict[str, Any], tmp_path: Path
) -> None:
    done = kvsight("record", tmp_path / "log", "--once", *flags(own))
    assert done.returncode == 2
    assert "the topic does not exist" in done.stderr
