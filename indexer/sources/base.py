"""Where records come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

from kv_events.errors import KvsightError
from kv_events.records import LogRecord
from kv_events.schema import ResyncRequest


class SourceUnavailableError(KvsightError):
    """The event log cannot be read now. Try again later."""

    retriable: ClassVar[bool] = True


class Source(Protocol):
    """An event log that one consumer reads, and the channel back. Belongs to one event loop."""

    async def start(self, positions: Mapping[int, int]) -> Mapping[int, int]:
        """Begin to read. positions: partition -> offset of the first record wanted; others begin at the oldest.

        Returns the first offset of every existing partition. An offset that the log no longer keeps becomes the oldest
        one. So does an offset beyond the end: the log was created again. The views detect the gap themselves.
        Raises SourceUnavailableError.
        """

    async def fetch(self) -> Sequence[LogRecord]:
        """The next records, in order within a partition; waits a little and may return none.

        Raises SourceUnavailableError.
        """

    async def ends(self) -> Mapping[int, int]:
        """Partition -> offset after its newest record: what there is to catch up with. Also the sign of life.

        Raises SourceUnavailableError.
        """

    async def request(self, request: ResyncRequest) -> None:
        """Ask a publisher for a resync. Raises SourceUnavailableError; a log without a way back does nothing."""

    async def stop(self) -> None:
        """Release all resources."""
