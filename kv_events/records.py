"""One record of a log: of a Kafka topic, an event-log file or a log in memory."""

from enum import IntEnum
from typing import Final, NamedTuple

Headers = tuple[tuple[str, bytes], ...]
"""Names and values of headers."""


class Channel(IntEnum):
    """What a record of an event log contains, and the topic that it comes from. A Kafka topic has one channel only.

    Each channel has its own partitions and offsets. Whoever reads a log ignores the channels that it cannot apply.
    """

    EVENTS = 0
    """One `EventBatch`. The only channel that changes views."""
    CONTROL = 1
    """A request to publishers, from the control topic."""
    DECISIONS = 2
    """What a router chose."""
    DEAD_LETTERS = 3
    """A record of the events that an indexer could not decode."""
    RESERVATIONS = 4
    """Requests that a service placed, or how they went on."""


MAX_CHANNEL: Final = 255

_OBJECT_BYTES = 256
"""What a record takes in memory beside its key and its payload."""


class LogRecord(NamedTuple):
    """A record as a log stores and returns it."""

    partition: int
    offset: int
    """Position inside the partition of the channel, which increases by at least one from record to record."""
    timestamp_ms: int
    """Milliseconds since 1970, by the writer's clock."""
    key: bytes
    payload: bytes
    channel: int = Channel.EVENTS
    """A `Channel`, or the number of one that this version does not know."""
    headers: Headers = ()
    """Context of a trace, if a source carries it and the process sends traces."""

    @property
    def memory_bytes(self) -> int:
        """About the bytes that the record takes in memory."""
        return _OBJECT_BYTES + len(self.key) + len(self.payload)
