"""Where records go: memory (same process), a folder (recording), Kafka.

Start at `base.Sink`, the contract; `create_sink` chooses by settings. Imports only `kv_events` and the publisher's
settings; aiokafka is loaded when a Kafka sink is made.
"""

from __future__ import annotations

from kv_events.errors import InvalidValueError
from publisher.settings import PublisherSettings
from publisher.sinks.base import OutRecord, Sink, SinkError, SinkRejectedError, SinkUnavailableError
from publisher.sinks.file import FileSink
from publisher.sinks.memory import MemorySink

__all__ = [
    "FileSink",
    "MemorySink",
    "OutRecord",
    "Sink",
    "SinkError",
    "SinkRejectedError",
    "SinkUnavailableError",
    "create_sink",
]


def create_sink(settings: PublisherSettings) -> Sink:
    """The sink that the settings name: Kafka or a folder. Raises InvalidValueError if they name none, or both."""
    if (settings.kafka is None) == (settings.log_folder is None):
        named = {"KVSIGHT_KAFKA": settings.kafka, "KVSIGHT_LOG_FOLDER": settings.log_folder}
        raise InvalidValueError(" / ".join(named), list(named.values()), "exactly one of them")
    if settings.log_folder is not None:
        return FileSink(settings.log_folder)
    from publisher.sinks.kafka import KafkaSink

    return KafkaSink(settings)
