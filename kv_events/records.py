"""One record of a log, whichever log it is: Kafka topic, event-log file or memory."""

from __future__ import annotations

from typing import NamedTuple


class LogRecord(NamedTuple):
    """What a log stores and hands back."""

    partition: int
    offset: int
    """Position inside the partition, rising by at least one from record to record."""
    timestamp_ms: int
    """Milliseconds since 1970, the writer's clock."""
    key: bytes
    payload: bytes
