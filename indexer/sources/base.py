"""Where records come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

from kv_events.errors import KvsightError
from kv_events.records import LogRecord
from kv_events.schema import ResyncRequest


class SourceUnavailableError(KvsightError):
    """The log cannot be read now; try again."""

    retriable: ClassVar[bool] = True


class Source(Protocol):
    """A log that one consumer reads, and the way back to its publishers. Belongs to one event loop."""

    async def start(self, positions: Mapping[int, int]) -> Mapping[int, int]:
        """Begin to read. positions: partition -> offset of the first record wanted; others begin at the oldest.

        Returns where each partition that there is really begins. An offset that the log no longer keeps becomes the
        oldest, and so does one beyond the log's end, which must have been made anew: the views find the gap by
        themselves. Raises SourceUnavailableError.
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
        """Let go of everything."""
