"""What a publisher needs from the place it publishes to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import ClassVar, NamedTuple, Protocol

from kv_events.errors import KvsightError
from kv_events.schema import ResyncRequest


class SinkError(KvsightError):
    """A sink did not take records."""


class SinkUnavailableError(SinkError):
    """The sink is away or slow. The same records may be handed over again later; readers ignore doubles."""

    retriable: ClassVar[bool] = True


class SinkRejectedError(SinkError):
    """The sink will never take one of these records."""


class OutRecord(NamedTuple):
    """One record on its way to the log."""

    key: bytes
    """Name of the stream: equal keys keep their order."""
    payload: bytes
    timestamp_ms: int
    """Milliseconds since 1970."""
    num_pages: int


class Sink(Protocol):
    """Where records go. All methods belong to one event loop; `start` comes first, `stop` last."""

    async def start(self) -> None:
        """Connect. Raises SinkUnavailableError, and may be called again then."""

    async def send(self, records: Sequence[OutRecord]) -> None:
        """Hand over records, in order for equal keys. Returns once all are durable for this sink.

        Raises SinkUnavailableError or SinkRejectedError; an unknown part of the records may have been taken then.
        """

    async def stop(self) -> None:
        """Let go of everything. Does not raise if the far side is away; stopping twice is harmless."""

    def requests(self) -> AsyncIterator[ResyncRequest]:
        """Requests for a resync, of whatever stream, from `start` on. A sink without a way back waits for ever."""
        ...
