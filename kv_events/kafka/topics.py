"""Creates the topics, and compares existing ones with the settings.

Publishers, `kvsight doctor --create-topics` and, for decisions and reservations alone, the service create topics. All
other clients wait for them.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from aiokafka.admin import NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, TopicAuthorizationFailedError, for_code

from kv_events.kafka.connection import KafkaConnection, KafkaUnreachableError
from kv_events.kafka.private_parts import describe_topics, start_client, stop_client
from kv_events.kafka.settings import KafkaSettings
from kv_events.runtime.variables import variable
from kv_events.runtime.words import count

_CONFIGS = ("retention.ms", "cleanup.policy")
_TIMEOUT_MS = 30_000
_POLL_S = 0.05
_SEGMENTS = 4


class Topic(NamedTuple):
    """A topic as it exists."""

    name: str
    num_partitions: int
    num_replicas: int
    """Smallest number of replicas of a partition."""
    configs: dict[str, str]
    """Some settings of the topic. Empty if this user may not read them."""


class Topics(NamedTuple):
    """Topics by name, as far as they exist."""

    found: dict[str, Topic]
    created: list[str]
    """Names of those that were created just now."""


async def inspect_topics(
    connection: KafkaConnection, settings: KafkaSettings, *, create: bool, names: Sequence[str] | None = None
) -> Topics:
    """Return topics as they are. create: first create missing ones. Existing ones are never changed.

    names: some of `topic_names`; by default those that publishers use. Raises KafkaUnreachableError, also if the broker
    refuses to create a topic.
    """
    names = [settings.events_topic, settings.control_topic] if names is None else names
    await connection.check()
    admin = connection.admin(request_timeout_ms=_TIMEOUT_MS)
    with connection.guarded("describe", KafkaUnreachableError):
        await start_client(admin)
        try:
            found = await describe_topics(admin, names)
            missing = [name for name in names if name not in found] if create else []
            if missing:
                await _create(admin, settings, missing, connection.user)
                found |= await _describe_new(admin, missing)
            configs = await _configs(admin, list(found))
        finally:
            await stop_client(admin)
    topics = {
        name: Topic(name, len(parts), min(map(len, parts), default=0), configs.get(name, {}))
        for name, parts in found.items()
    }
    return Topics(topics, missing)


def mismatches(topic: Topic, settings: KafkaSettings) -> list[str]:
    """Differences between a topic and the settings of writers, each with what to do.

    A number of partitions or replicas that is left at its default is a lower bound.
    """
    found = []
    has_many = topic.name not in (settings.control_topic, settings.reservations_topic)
    numbers = [("topic_replication", topic.num_replicas, "replica", "reassign its partitions")]
    if has_many:
        numbers.append(("topic_partitions", topic.num_partitions, "partition", "add some with kafka-topics.sh --alter"))
    for field, actual, noun, remedy in numbers:
        wanted, default = getattr(settings, field), type(settings).model_fields[field].default
        if actual < wanted or (has_many and actual != wanted != default):
            correct = f"set {variable(field)}={actual}"
            advice = f"{remedy}, or {correct}" if actual < wanted else correct
            found.append(f"it has {count(actual, noun)}, and {variable(field)} is {wanted}; {advice}")
    return found


def retention_mismatches(topic: Topic, snapshot_interval_s: float) -> list[str]:
    """Reasons why a topic may lose records that a reader needs, each with what to do.

    snapshot_interval_s: seconds between the indexer's snapshots.
    """
    found = []
    retention_ms = int(topic.configs.get("retention.ms", -1))
    if 0 <= retention_ms < snapshot_interval_s * 1000:
        found.append(
            f"retention.ms={retention_ms} is shorter than {variable('snapshot_interval_s')}={snapshot_interval_s:g}, "
            "so an indexer that restarts may miss records; raise retention.ms"
        )
    policy = topic.configs.get("cleanup.policy", "")
    if "compact" in policy:
        found.append(f"cleanup.policy={policy} keeps only a worker's newest batch; set cleanup.policy=delete")
    return found


async def _create(admin: Any, settings: KafkaSettings, names: Sequence[str], user: str) -> None:
    retention_ms = settings.topic_retention_s * 1000
    configs = {
        "cleanup.policy": "delete",
        "retention.ms": str(retention_ms),
        "segment.ms": str(retention_ms // _SEGMENTS),  # Kafka deletes whole segments, and never the newest one
    }
    partitions, replicas = _partitions(settings), settings.topic_replication
    topics = [NewTopic(name, partitions[name], replicas, topic_configs=configs) for name in names]
    answer = await admin.create_topics(topics, timeout_ms=_TIMEOUT_MS)
    for name, code, *message in answer.topic_errors:
        if code == TopicAuthorizationFailedError.errno:
            raise KafkaError(f"{user} may not create topic {name}: create it, or an ACL must allow it")
        if code not in (0, TopicAlreadyExistsError.errno):
            reason = " ".join(filter(None, message)) or for_code(code).description
            raise KafkaError(f"topic {name} cannot be created: {reason}")


async def _describe_new(admin: Any, names: list[str]) -> dict[str, list[list[int]]]:
    """Describe topics that the controller has just created. A broker learns of them a moment later."""
    give_up = time.monotonic() + _TIMEOUT_MS / 1000
    while True:
        found = await describe_topics(admin, names)
        unknown = [name for name in names if name not in found]
        if not unknown:
            return found
        if time.monotonic() > give_up:
            raise KafkaError(f"topic {unknown[0]} was created, but a broker does not know it yet; try again")
        await asyncio.sleep(_POLL_S)


async def _configs(admin: Any, names: list[str]) -> dict[str, dict[str, str]]:
    """Topic -> those of `_CONFIGS` that this user may read."""
    if not names:
        return {}
    wanted = [ConfigResource(ConfigResourceType.TOPIC, name, configs=dict.fromkeys(_CONFIGS, "")) for name in names]
    return {
        name: {entry[0]: entry[1] for entry in entries}
        for answer in await admin.describe_configs(wanted)
        for code, _, _, name, entries in answer.resources
        if code == 0
    }


def topic_names(settings: KafkaSettings) -> list[str]:
    return list(_partitions(settings))


def _partitions(settings: KafkaSettings) -> dict[str, int]:
    """Topic -> its partitions, when it is created."""
    return {
        settings.events_topic: settings.topic_partitions,
        settings.control_topic: 1,
        settings.decisions_topic: settings.topic_partitions,
        settings.reservations_topic: 1,  # each replica reads all of it
    }
