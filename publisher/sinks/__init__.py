"""Sinks for records: memory (same process), an event log in a folder, Kafka, or readers of the engines' ZMQ protocol.

Start at the contract, `base.Sink`. `create_sink` chooses by settings. Imports only `kv_events` and the publisher's
settings; aiokafka and ZMQ are loaded when their sink is created.
"""

from kv_events.errors import InvalidValueError
from publisher.settings import PublisherSettings
from publisher.sinks.base import Sink
from publisher.sinks.file import FileSink


def create_sink(settings: PublisherSettings) -> Sink:
    """Create the sink of the settings: Kafka, a folder or ZMQ. Raises InvalidValueError unless they name one."""
    named = {
        "KVSIGHT_KAFKA": settings.kafka,
        "KVSIGHT_EVENT_LOG_DIR": settings.event_log_dir,
        "KVSIGHT_ZMQ": settings.zmq,
    }
    if sum(value is not None for value in named.values()) != 1:
        raise InvalidValueError(" / ".join(named), list(named.values()), "exactly one of them")
    if settings.event_log_dir is not None:
        return FileSink(settings.event_log_dir)
    if settings.zmq is not None:
        from publisher.sinks.zmq import ZmqSink

        return ZmqSink(settings)
    from publisher.sinks.kafka import KafkaSink

    return KafkaSink(settings)
