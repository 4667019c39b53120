"""The links that exist without an engine: Kafka with its topics, Redis, the service."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from http import HTTPStatus
from typing import TYPE_CHECKING

import httpx

from kv_events.runtime.words import count
from kvsight.calls import Call
from kvsight.cli.doctor.checks import BrokenError, SkippedError
from kvsight.cli.shared.console import err, print_lines
from kvsight.cli.shared.engine_client import ClockReading, read_date
from kvsight.cli.shared.process import run_until_interrupted
from kvsight.errors import KvsightHttpError

if TYPE_CHECKING:
    from indexer.settings import IndexerSettings
    from kv_events.kafka.topics import Topic
    from kvsight.client import Client

_READY = Call("GET", "/ready", lambda _body: None, may_repeat=False)


@dataclass
class Servers:
    """The servers of a deployment."""

    settings: IndexerSettings
    client: Client
    url: str
    """Of the service."""
    redis_clock: ClockReading | None = None
    """None until `redis` has read it."""

    def broker(self) -> str:
        """Log in to Kafka."""
        from kv_events.kafka.connection import KafkaConnection

        self._require_kafka()
        run_until_interrupted(KafkaConnection(self.settings).check)
        return f"{self.settings.kafka} accepts this client"

    def topics(self) -> str:
        """Compare the topics with the settings."""
        from kv_events.kafka.topics import mismatches

        self._require_kafka()
        names = (self.settings.events_topic, self.settings.control_topic)
        missing = [name for name in names if name not in self._topics]
        if missing:
            remedy = "create them with `kvsight doctor --create-topics`, or correct their names"
            raise BrokenError(f"{' and '.join(missing)}: no such topic", remedy)
        for topic in self._topics.values():
            for mismatch in mismatches(topic, self.settings):
                fault, _, remedy = mismatch.rpartition("; ")
                raise BrokenError(f"{topic.name}: {fault}", remedy)
        return ", ".join(f"{name} with {count(self._topics[name].num_partitions, 'partition')}" for name in names)

    def retention(self) -> str:
        """Compare the time for which records are kept with the time between snapshots."""
        from kv_events.kafka.topics import retention_mismatches

        self._require_kafka()
        topic, interval_s = self._topics[self.settings.events_topic], self.settings.snapshot_interval_s
        if "retention.ms" not in topic.configs:
            raise SkippedError(f"this user may not read the settings of topic {topic.name}")
        for mismatch in retention_mismatches(topic, interval_s):
            fault, _, remedy = mismatch.rpartition("; ")
            raise BrokenError(f"{topic.name}: {fault}", remedy)
        kept_s = int(topic.configs["retention.ms"]) / 1000
        kept = "without limit" if kept_s < 0 else f"for {kept_s:g} s"
        return f"records are kept {kept}, snapshots are written every {interval_s:g} s"

    def redis(self) -> str:
        """Log in to Redis, and look for a snapshot."""
        if self.settings.redis is None:
            raise SkippedError("no --redis")
        has_snapshot, self.redis_clock = run_until_interrupted(self._ask_redis)
        return "it answers and has a snapshot" if has_snapshot else "it answers and has no snapshot yet"

    def ready(self) -> str:
        """Ask the service whether its views are complete."""
        try:
            self.client.send(_READY)
        except KvsightHttpError as error:
            if error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            raise BrokenError(f"it is not ready: {error.detail}", _remedy_if_not_ready(error.detail)) from None
        return f"it is ready and knows {count(len(self.client.workers()), 'worker')}"

    def service_clock(self) -> ClockReading | None:
        """The service's clock, or None if it cannot be read."""
        try:
            return read_date(httpx.get(f"{self.url.rstrip('/')}/health", trust_env=False))
        except httpx.HTTPError:
            return None

    @cached_property
    def _topics(self) -> dict[str, Topic]:
        from kv_events.kafka.connection import KafkaConnection
        from kv_events.kafka.topics import inspect_topics

        found = run_until_interrupted(
            partial(inspect_topics, KafkaConnection(self.settings), self.settings, create=False)
        )
        return found.found

    def _require_kafka(self) -> None:
        if self.settings.kafka is None:
            raise SkippedError("no --kafka")

    async def _ask_redis(self) -> tuple[bool, ClockReading | None]:
        from indexer.snapshots.redis import RedisStore

        store = RedisStore(self.settings)
        try:
            has_snapshot = await store.has_snapshot()
            theirs = await store.time()
            return has_snapshot, None if theirs is None else ClockReading(theirs, time.time())
        finally:
            await store.close()


def _remedy_if_not_ready(detail: str) -> str:
    if detail.startswith("catching up"):
        return "wait, and run this command again; if the number does not fall, the service has too little CPU"
    if detail.startswith("compiling kernels"):
        return "wait; it happens once on a machine"
    return "see `/ready` answers 503 in docs/troubleshooting.md"


# --- --create-topics ------------------------------------------------------------------------------------------------


def create_topics(settings: IndexerSettings) -> None:
    """Create the topics that do not exist, and print all. Differences from the settings are reported on stderr."""
    from kv_events.kafka.connection import KafkaConnection
    from kv_events.kafka.topics import inspect_topics, topic_names

    names = topic_names(settings)
    topics = run_until_interrupted(
        partial(inspect_topics, KafkaConnection(settings), settings, create=True, names=names)
    )
    for topic in topics.found.values():
        print_lines([f"{'created' if topic.name in topics.created else 'exists'}: {_described(topic)}"])
        for problem in _problems(topic, settings):
            err.print(f"warning: {topic.name}: {problem}")


def _problems(topic: Topic, settings: IndexerSettings) -> list[str]:
    from kv_events.kafka.topics import mismatches, retention_mismatches

    is_of_events = topic.name == settings.events_topic
    return mismatches(topic, settings) + (
        retention_mismatches(topic, settings.snapshot_interval_s) if is_of_events else []
    )


def _described(topic: Topic) -> str:
    facts = [count(topic.num_partitions, "partition"), count(topic.num_replicas, "replica")]
    retention_ms = topic.configs.get("retention.ms")
    if retention_ms is None:
        facts.append("its settings may not be read")
    else:
        facts.append(
            "kept without limit" if retention_ms == "-1" else f"kept for {timedelta(milliseconds=int(retention_ms))}"
        )
    return f"{topic.name}: {', '.join(facts)}"
