"""One record of a log: of a Kafka topic, an event-log file or a log in memory."""

from __future__ import annotations

from typing import NamedTuple


class LogRecord(NamedTuple):
    """A record as a log stores and returns it."""

    partition: int
    offset: int
    """Position inside the partition, which increases by at least one from record to record."""
    timestamp_ms: int
    """Milliseconds since 1970, by the writer's clock."""
    key: bytes
    payload: bytes
