"""A recorded run, replayed: the same views at its end and at every offset on the way."""

import asyncio
import uuid
from pathlib import Path

import pytest

from indexer.replay import Replay
from indexer.sources.reader import source_records
from indexer.views import View
from kv_events.kafka.settings import KafkaSettings
from kv_events.log.moments import LogMoment
from kv_events.records import Channel, LogRecord
from kv_events.streams import StreamId
from simulation import SimulationSettings, WorkloadSettings, generate, simulate
from simulation.live import Transport, kafka_transport, live_fleet
from tests.support.commands import invoke, printed
from tests.support.log.records import log_records
from tests.support.log.view_facts import held_pages
from tests.support.servers.kafka_broker import recorded_topic

Held = dict[StreamId, set[int]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The event log of a small fleet whose caches are too small for their workload, so that pages are evicted."""
    folder = tmp_path_factory.mktemp("recorded")
    settings = SimulationSettings(workers=3, capacity_tokens=16_384, page_size=16, event_log_dir=folder)
    (report,) = simulate(generate(WorkloadSettings(num_requests=150)), settings, ["overlap-load"])
    assert report.divergent_pages == 0
    return folder / "overlap-load"


def events(folder: Path) -> list[LogRecord]:
    return [record for record in log_records(folder) if record.channel == Channel.EVENTS]


def test_a_replay_up_to_a_time_takes_the_records_of_that_time_along(recorded: Path) -> None:
    times = [record.timestamp_ms for record in events(recorded)]
    moment = sorted(times)[len(times) // 2]
    replayed = Replay().apply_all(events(recorded), LogMoment(time_s=moment / 1000))
    assert replayed.applier.records == sum(time <= moment for time in times)
    assert replayed.now == moment / 1000


def held_by(views: list[View]) -> Held:
    return {v.stream: set(held_pages(v)) for v in views}


async def replay_of(transport: Transport, until: LogMoment) -> Replay:
    """Views from all that a topic holds now, up to `until`. In a thread, because it has an event loop of its own."""
    return await asyncio.to_thread(lambda: Replay().apply_all(source_records(transport.source()), until))


async def test_a_topic_replays_to_what_the_live_views_were_then_and_are_now(kafka_bootstrap: str) -> None:
    name = uuid.uuid4().hex
    transport = kafka_transport(
        KafkaSettings(kafka=kafka_bootstrap, events_topic=f"events-{name}", control_topic=f"control-{name}")
    )
    requests = generate(WorkloadSettings(num_requests=120))
    settings = SimulationSettings(workers=3, capacity_tokens=16_384, page_size=16)
    async with live_fleet(settings, "round-robin", transport) as fleet:
        for request in requests[:60]:
            fleet.run.step(request)
        await fleet.wait_until_synced()
        then, offsets = held_by(fleet.consumer.namespaces.views), dict(fleet.consumer.progress.positions)
        for request in requests[60:]:
            fleet.run.step(request)
        await fleet.wait_until_synced()
        now = held_by(fleet.consumer.namespaces.views)
        replayed = await replay_of(transport, LogMoment())
        assert held_by(replayed.namespaces.views) == now != then
        replayed = await replay_of(transport, LogMoment(offsets=offsets))
        assert held_by(replayed.namespaces.views) == then


@pytest.fixture(scope="module")
def topic(recorded: Path, kafka_bootstrap: str) -> KafkaSettings:
    """A topic of two partitions with the records of that log."""
    return recorded_topic(kafka_bootstrap, events(recorded))


def views(*arguments: object) -> list[dict[str, object]]:
    """What the command prints, in an order that does not depend on that of the records."""
    return sorted(printed("replay", *arguments), key=lambda view: str(view["worker"]))


def test_the_command_replays_a_topic_as_it_does_a_recording(recorded: Path, topic: KafkaSettings) -> None:
    flags = ("--kafka", topic.kafka, "--events-topic", topic.events_topic)
    assert views(*flags) == views(recorded)
    times = sorted(record.timestamp_ms for record in events(recorded))
    moment = ("--at", f"@{times[len(times) // 2] / 1000}")
    assert views(*flags, *moment) == views(recorded, *moment)
    done = invoke("replay", *flags)
    assert "worker-0" in done.stdout
    assert done.stderr.startswith(f"topic {topic.events_topic} has ")


def test_a_topic_is_replayed_up_to_positions(topic: KafkaSettings) -> None:
    flags = ("--kafka", topic.kafka, "--events-topic", topic.events_topic)
    assert sum(int(str(view["next_seq"])) for view in views(*flags, "--at", "0:3")) == 3
    assert "after 3 records" in invoke("replay", *flags, "--at", "0:3").stderr
    late = invoke("replay", *flags, "--at", "0:100000,1:1")
    assert late.exit_code == 2
    assert "--at 0:100000,1:1 is behind the end of the log, which has records 0:" in late.stderr


def test_a_topic_that_does_not_exist_is_named(kafka_bootstrap: str) -> None:
    done = invoke("replay", "--events-topic", "typo", "--kafka", kafka_bootstrap)
    assert "the topic does not exist" in str(done.exception)
