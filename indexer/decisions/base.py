"""The interface of what keeps decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from kv_events.errors import KvsightError
from kv_events.records import LogRecord


class DecisionsUnavailableError(KvsightError):
    """Decisions cannot be written now. Try again later."""

    retriable: ClassVar[bool] = True


class DecisionSink(Protocol):
    """A log that keeps decisions. Belongs to one event loop."""

    async def write(self, records: Sequence[LogRecord]) -> None:
        """Append records of the channel DECISIONS. Connects if necessary. Raises DecisionsUnavailableError.

        A call that failed may have written some of its records. It is repeated.
        """

    async def stop(self) -> None:
        """Release all resources."""
