"""`kvsight topics`"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsight.cli.app import App
from kvsight.cli.connection_flags import with_kafka_flags
from kvsight.cli.console import err, out, run_until_interrupted

if TYPE_CHECKING:
    from indexer.settings import IndexerSettings
    from kv_events.kafka.topics import Topic, Topics

_EXIT_MISMATCH = 1

app = App(no_args_is_help=True, help="Create the topics on Kafka, or check them.")

_Kafka = Annotated[str, typer.Option(help="Kafka bootstrap servers: HOST:PORT,...", envvar="KVSIGHT_KAFKA")]
_Partitions = Annotated[
    int | None,
    typer.Option(help="Partitions of events and of decisions.", envvar="KVSIGHT_TOPIC_PARTITIONS"),
]
_Replication = Annotated[int | None, typer.Option(help="Replicas of all topics.", envvar="KVSIGHT_TOPIC_REPLICATION")]
_Retention = Annotated[
    int | None, typer.Option(help="Seconds for which records are kept.", envvar="KVSIGHT_TOPIC_RETENTION_S")
]
_SnapshotInterval = Annotated[
    float | None, typer.Option(help="Seconds between snapshots.", envvar="KVSIGHT_SNAPSHOT_INTERVAL_S")
]


@app.command("create")
@with_kafka_flags
def create(
    kafka: _Kafka,
    topic_partitions: _Partitions = None,
    topic_replication: _Replication = None,
    topic_retention_s: _Retention = None,
    *,
    connection: dict[str, Any],
) -> None:
    """Create the topics of events, resync requests and decisions if they do not exist.

    Existing topics are not changed. Differences from the settings are reported on stderr.
    """
    settings = _settings(kafka, connection, topic_partitions, topic_replication, topic_retention_s, None)
    topics = _inspect(settings, create=True)
    for topic in topics.found.values():
        out.print(f"{'created' if topic.name in topics.created else 'exists'}: {_described(topic)}", soft_wrap=True)
        for problem in _problems(topic, settings):
            err.print(f"warning: {topic.name}: {problem}")


@app.command("check")
@with_kafka_flags
def check(
    kafka: _Kafka,
    topic_partitions: _Partitions = None,
    topic_replication: _Replication = None,
    snapshot_interval_s: _SnapshotInterval = None,
    *,
    connection: dict[str, Any],
) -> None:
    """Log in to Kafka, and compare the topics with the settings.

    Ends with exit code 1 if a topic is missing or differs, and with 2 if Kafka refuses the connection.
    """
    settings = _settings(kafka, connection, topic_partitions, topic_replication, None, snapshot_interval_s)
    from kv_events.kafka.topics import topic_names

    topics = _inspect(settings, create=False)
    is_good = True
    for name in topic_names(settings):
        topic = topics.found.get(name)
        problems = ["create it with `kvsight topics create`"] if topic is None else _problems(topic, settings)
        out.print(f"missing: {name}" if topic is None else _described(topic), soft_wrap=True, highlight=False)
        for problem in problems:
            out.print(f"  {problem}", soft_wrap=True, highlight=False)
        is_good = is_good and not problems
    raise typer.Exit(0 if is_good else _EXIT_MISMATCH)


def _settings(
    kafka: str,
    connection: dict[str, Any],
    topic_partitions: int | None,
    topic_replication: int | None,
    topic_retention_s: int | None,
    snapshot_interval_s: float | None,
) -> IndexerSettings:
    from indexer.settings import IndexerSettings

    return IndexerSettings.from_flags(
        kafka=kafka,
        **connection,
        topic_partitions=topic_partitions,
        topic_replication=topic_replication,
        topic_retention_s=topic_retention_s,
        snapshot_interval_s=snapshot_interval_s,
    )


def _inspect(settings: IndexerSettings, *, create: bool) -> Topics:
    from kv_events.kafka.connection import KafkaConnection
    from kv_events.kafka.topics import inspect_topics, topic_names

    connection, names = KafkaConnection(settings), topic_names(settings)
    return run_until_interrupted(partial(inspect_topics, connection, settings, create=create, names=names))


def _problems(topic: Topic, settings: IndexerSettings) -> list[str]:
    from kv_events.kafka.topics import mismatches, retention_mismatches

    found = mismatches(topic, settings)
    if topic.name == settings.events_topic:
        found += retention_mismatches(topic, settings.snapshot_interval_s)
    return found


def _described(topic: Topic) -> str:
    from kv_events.kafka.topics import counted

    facts = [counted(topic.num_partitions, "partition"), counted(topic.num_replicas, "replica")]
    retention_ms = topic.configs.get("retention.ms")
    if retention_ms is None:
        facts.append("its settings may not be read")
    else:
        facts.append(
            "kept without limit" if retention_ms == "-1" else f"kept for {timedelta(milliseconds=int(retention_ms))}"
        )
    return f"{topic.name}: {', '.join(facts)}"
