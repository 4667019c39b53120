"""The contract of sinks."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from kv_events.errors import KvsightError
from kv_events.records import Headers
from kv_events.runtime.outages import Outage
from kv_events.schema import ResyncRequest


class SinkError(KvsightError):
    """A sink did not accept records."""


class SinkUnavailableError(SinkError):
    """The sink is unavailable or slow. The same records may be sent again later; readers ignore duplicates."""

    retriable: ClassVar[bool] = True


class SinkRejectedError(SinkError):
    """The sink will never accept one of these records."""


class OutRecord(NamedTuple):
    """One record to be written to the log."""

    key: bytes
    """Identity of the stream. Records with equal keys keep their order."""
    payload: bytes
    timestamp_ms: int
    """Milliseconds since 1970."""
    num_pages: int
    headers: Headers = ()
    """Context of a trace, for sinks that can carry it."""


async def no_requests() -> AsyncIterator[ResyncRequest | None]:
    """The requests of a sink without a control channel."""
    await asyncio.Event().wait()
    yield None  # never reached; makes this function a generator


@runtime_checkable
class Sink(Protocol):
    """A destination of records. All methods belong to one event loop. `start` is called first, `stop` last."""

    @property
    def outage(self) -> Outage:
        """Whether the destination takes records. The publishers that use the sink keep it up to date."""

    async def start(self) -> None:
        """Connect. Raises SinkUnavailableError; it may then be called again."""

    async def send(self, records: Sequence[OutRecord]) -> None:
        """Send records, in order for equal keys. Returns when all of them are durable for this sink. Raises
        SinkUnavailableError or SinkRejectedError. Any part of the records may then have been accepted.
        """

    async def stop(self) -> None:
        """Release all resources. Does not raise if the other side is unavailable. Stopping twice is harmless."""

    def requests(self) -> AsyncIterator[ResyncRequest | None]:
        """Yield resync requests of all streams after `start`. None stands for a message that is not a request.

        A sink without a control channel waits forever.
        """
        ...
