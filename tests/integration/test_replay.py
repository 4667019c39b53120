"""A recorded run, replayed: the same views at its end and at every offset on the way."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from indexer.replay import Replay, Until, log_records
from indexer.sources.base import Source
from indexer.views import View
from kv_events.kafka_settings import KafkaSettings
from kv_events.streams import StreamId
from simulation import SimulationSettings, WorkloadSettings, generate, simulate
from simulation.live import KafkaTransport, live_fleet

Held = dict[StreamId, set[int]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The event log of a small fleet whose caches are too small for their workload, so that pages are evicted."""
    folder = tmp_path_factory.mktemp("recorded")
    settings = SimulationSettings(workers=3, capacity_tokens=16_384, page_size=16, event_log_dir=folder)
    (report,) = simulate(generate(WorkloadSettings(num_requests=150)), settings, ["kv-aware"])
    assert report.divergent_pages == 0
    return folder / "kv-aware"


def test_a_replay_up_to_a_time_takes_the_records_of_that_time_along(recorded: Path) -> None:
    times = [record.timestamp_ms for record in log_records(recorded)]
    moment = sorted(times)[len(times) // 2]
    replayed = Replay().apply_all(log_records(recorded), Until(time_s=moment / 1000))
    assert replayed.applier.records == sum(time <= moment for time in times)
    assert replayed.now == moment / 1000


def held_by(views: list[View]) -> Held:
    return {v.stream: {h for part in v.index.stream_pages(v.number) for h in part.hashes.tolist()} for v in views}


async def replay_of(source: Source, until: Until) -> Replay:
    """Views from all that a live log holds now, up to `until`."""
    replay = Replay()
    reached = await source.start({})
    ends = await source.ends()
    while any(reached.get(partition, 0) < end for partition, end in ends.items()):
        records = await source.fetch()
        replay.apply_all(records, until)
        reached = {**reached, **{record.partition: record.offset + 1 for record in records}}
    await source.stop()
    return replay


async def test_a_topic_replays_to_what_the_live_views_were_then_and_are_now(kafka_bootstrap: str) -> None:
    name = uuid.uuid4().hex
    transport = KafkaTransport(
        KafkaSettings(kafka=kafka_bootstrap, events_topic=f"events-{name}", control_topic=f"control-{name}")
    )
    requests = generate(WorkloadSettings(num_requests=120))
    settings = SimulationSettings(workers=3, capacity_tokens=16_384, page_size=16)
    async with live_fleet(settings, "round-robin", transport) as fleet:
        for request in requests[:60]:
            fleet.trial.step(request)
        await fleet.settle()
        then, offsets = held_by(fleet.consumer.namespaces.views), dict(fleet.consumer.positions)
        for request in requests[60:]:
            fleet.trial.step(request)
        await fleet.settle()
        now = held_by(fleet.consumer.namespaces.views)
        replayed = await replay_of(transport.source(), Until())
        assert held_by(replayed.namespaces.views) == now != then
        replayed = await replay_of(transport.source(), Until(positions=offsets))
        assert held_by(replayed.namespaces.views) == then
