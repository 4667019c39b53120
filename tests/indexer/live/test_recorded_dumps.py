"""A service records a run with faults: at each moment, the recording replays to what the service held then.

A real broker, a real `kvsight serve --record`, real publishers that are killed, and forged ones whose batches are lost,
doubled and swapped. Publishers are stopped while a dump is taken, so that its Kafka offsets are known.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from analysis.diff import Holdings, diff, holdings_of, holdings_of_dump
from indexer.replay import LogIndexer, Timeline
from indexer.settings import IndexerSettings
from kv_events.log.moments import LogMoment
from kv_events.records import Channel, LogRecord
from tests.support.commands import kvsight
from tests.support.engines.publishing_process import PublishingProcess
from tests.support.log.faulty_run import faulty_run
from tests.support.log.records import Stream, stored
from tests.support.servers.service_process import ServiceProcess, own_topics
from tests.support.waiting import wait_until

NUM_PARTITIONS = 2
NUM_FORGED = 30
"""Forged records between two moments."""
_DEADLINE_S = 90.0

Positions = Mapping[int, int]


class Moment(NamedTuple):
    positions: Positions
    held: Holdings


class Run:
    """A deployment, and what it is told."""

    def __init__(self, topics: dict[str, Any], folder: Path, seed: int, **settings: Any) -> None:
        self.random = Random(seed)
        self.recording = folder / "recording"
        self.settings = settings
        self._topics = topics
        self._variables = topics | {f"KVSIGHT_{name.upper()}": value for name, value in settings.items()}
        self.service = ServiceProcess(folder, **self._variables, KVSIGHT_RECORD=self.recording)
        self._forged = iter(faulty_run(self.random, 300 * NUM_FORGED, start_s=time.time(), pace=0.0))
        self._engines: dict[str, PublishingProcess] = {}

    def step(self) -> None:
        """Let the publishers do something, and sometimes kill one."""
        self.forge(*(record for record, _ in zip(self._forged, range(NUM_FORGED), strict=False)))
        for name in ("engine-0", "engine-1"):
            if name not in self._engines or self.random.random() < 0.1:
                self.kill(name)
                self._engines[name] = PublishingProcess(name, **self._topics)
            engine = self._engines[name]
            engine.store(*self.random.sample(range(1, 400), 40))
            engine.remove(*self.random.sample(sorted(engine.held), 15))

    def kill(self, name: str) -> None:
        """Kill an engine, if it runs."""
        if name in self._engines:
            self._engines.pop(name).__exit__(None, None, None)

    def forge(self, *records: LogRecord) -> None:
        """Write batches to the topic."""

        async def send() -> None:
            async with AIOKafkaProducer(bootstrap_servers=self._topics["KVSIGHT_KAFKA"]) as producer:
                for record in records:
                    if record.channel == Channel.EVENTS:
                        await producer.send(self._topics["KVSIGHT_EVENTS_TOPIC"], record.payload, record.key)

        asyncio.run(send())

    def dump(self) -> Moment:
        """Stop all publishers, and return what the service holds then, with the ends of the topic."""
        for engine in self._engines.values():
            engine.pause()
        try:
            while True:
                ends = self.ends()
                wait_until(partial(self.has_applied, sum(ends.values())), _DEADLINE_S, "the service to apply the log")
                held = holdings_of_dump(self.service.get("/dump").json())
                if ends == self.ends():  # nothing was on its way to the broker
                    return Moment(ends, held)
        finally:
            for engine in self._engines.values():
                engine.resume()

    def ends(self) -> Positions:
        """Return partition -> offset after its newest record."""
        topic = self._topics["KVSIGHT_EVENTS_TOPIC"]

        async def find() -> Positions:
            async with AIOKafkaConsumer(bootstrap_servers=self._topics["KVSIGHT_KAFKA"]) as consumer:
                found = await consumer.end_offsets([TopicPartition(topic, part) for part in range(NUM_PARTITIONS)])
            return {place.partition: offset for place, offset in found.items()}

        return asyncio.run(find())

    def has_applied(self, num_records: int) -> bool:
        lines = self.service.get("/metrics").text.splitlines()
        (count,) = (line.split()[1] for line in lines if line.startswith("kvsight_records_total"))
        return float(count) >= num_records

    def close(self) -> None:
        """End all processes."""
        for name in list(self._engines):
            self.kill(name)
        self.service.__exit__(None, None, None)


def record_moments(run: Run, num_moments: int, halfway: Callable[[], None]) -> list[Moment]:
    """Take dumps at many moments. The service is killed and restarted halfway, before a call of `halfway`."""
    try:
        run.service.start()
        run.service.wait_until_ready()
        moments = []
        for number in range(num_moments):
            if number == num_moments // 2:
                run.service.kill()
                run.step()
                run.service.start()
                run.service.wait_until_ready()
                halfway()
            run.step()
            moments.append(run.dump())
        wait_until(partial(is_recorded, run.recording, moments[-1].positions), _DEADLINE_S, "the end of the recording")
        run.service.terminate()
        return moments
    finally:
        run.close()


def is_recorded(folder: Path, positions: Positions) -> bool:
    ends: dict[int, int] = {}
    for _, record in Timeline(folder).records():
        if record.channel == Channel.EVENTS:
            ends[record.partition] = record.offset + 1
    return all(ends.get(partition, 0) >= offset for partition, offset in positions.items())


def assert_replays_to(run: Run, moments: list[Moment]) -> None:
    """Compare the views at the offsets of each dump with it, page for page, with key frames and without any."""
    settings = IndexerSettings.ignoring_environment(**run.settings)
    LogIndexer(run.recording, settings, frame_cost=5000).advance()
    frames = list(run.recording.glob("*.kvframe"))
    assert len(frames) > 2
    assert_equal(Timeline(run.recording, settings), moments)
    for path in frames:
        path.unlink()
    assert_equal(Timeline(run.recording, settings), run.random.sample(moments, 3))
    assert sum(len(pages.hashes) for moment in moments for pages in moment.held.values()) > 100 * len(moments)


def assert_equal(timeline: Timeline, moments: list[Moment]) -> None:
    for moment in moments:
        views = holdings_of(timeline.at(LogMoment(offsets=moment.positions)))
        assert [each for each in diff(moment.held, views) if not each.is_empty] == [], moment.positions
    assert (timeline.damage, timeline.faults) == ([], [])


@pytest.fixture
def topics(kafka_bootstrap: str) -> dict[str, Any]:
    found = own_topics(kafka_bootstrap, KVSIGHT_TOPIC_PARTITIONS=str(NUM_PARTITIONS))
    created = kvsight("doctor", "--create-topics", environment=found)
    assert created.returncode == 0, created.stderr
    return found


@pytest.mark.timeout(600)
def test_a_recorded_run_with_faults_replays_to_the_dumps_of_the_service(topics: dict[str, Any], tmp_path: Path) -> None:
    run = Run(topics, tmp_path, seed=1, worker_ttl_s=600.0)
    moments = record_moments(run, 8, halfway=lambda: None)
    assert_replays_to(run, moments)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_200_moments_of_a_run_with_an_expired_worker_replay_to_the_dumps(
    topics: dict[str, Any], tmp_path: Path
) -> None:
    run = Run(topics, tmp_path, seed=2, worker_ttl_s=8.0)
    sleeper = Stream("sleeper")
    sleeper.epoch = 5

    def expire() -> None:
        """A worker is silent until it is expired; then one of an older epoch takes its place and is followed."""
        run.forge(sleeper.batch(stored((0, range(1, 30)))))
        wait_until(lambda: run.service.listener("sleeper").get("state") == "expired", _DEADLINE_S, "the silent worker")
        sleeper.restart()
        sleeper.epoch = 3
        run.forge(sleeper.batch(stored((0, range(50, 60)))))
        wait_until(lambda: run.service.pages("sleeper") == set(range(50, 60)), _DEADLINE_S, "the older epoch")

    moments = record_moments(run, 200, expire)
    assert_replays_to(run, moments)
