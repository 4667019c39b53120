"""`kvsight doctor --create-topics`."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from kvsight.cli.shared.console import err, print_lines
from kvsight.cli.shared.process import run_until_interrupted

if TYPE_CHECKING:
    from indexer.settings import IndexerSettings
    from kv_events.kafka.topics import Topic


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
            err.print(f"warning: {topic.name}: {problem}", markup=False)


def _problems(topic: Topic, settings: IndexerSettings) -> list[str]:
    from kv_events.kafka.topics import mismatches, retention_mismatches

    is_of_events = topic.name == settings.events_topic
    return mismatches(topic, settings) + (
        retention_mismatches(topic, settings.snapshot_interval_s) if is_of_events else []
    )


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
