"""The interface of sources of records."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

from kv_events.errors import KvsightError
from kv_events.records import LogRecord
from kv_events.schema import ResyncRequest


class SourceUnavailableError(KvsightError):
    """The event log cannot be read now. Try again later."""

    retriable: ClassVar[bool] = True


class LogReplacedError(KvsightError):
    """The event log was deleted or created again, so records may be lost. `start` judges the old positions."""


class Source(Protocol):
    """An event log that one consumer reads, and the channel back to publishers. Belongs to one event loop."""

    async def start(self, positions: Mapping[int, int]) -> Mapping[int, int]:
        """Begin to read. positions: partition -> first offset to read; others are read from the oldest record.

        Returns the first offset of every existing partition. An offset that the log no longer keeps is replaced by the
        oldest one. So is an offset beyond the end, because the log was then created again. The views detect the gap
        themselves. Raises SourceUnavailableError.
        """

    async def fetch(self) -> Sequence[LogRecord]:
        """Return the next records, in order within each partition. Waits briefly and may return none. Raises
        SourceUnavailableError, or LogReplacedError, after which `start` must be called again.
        """

    async def ends(self) -> Mapping[int, int]:
        """Return partition -> offset after its newest record. Success also shows that the log is available.

        Can be called while `fetch` waits.

        Raises SourceUnavailableError, or LogReplacedError, after which `start` must be called again.
        """

    async def request(self, request: ResyncRequest) -> None:
        """Request a resync from a publisher. Does nothing without a channel back. Raises SourceUnavailableError."""

    async def stop(self) -> None:
        """Release all resources."""
