"""Passes decisions to the recorder of the service, where no log keeps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kv_events.records import LogRecord


class RecordedDecisions:
    """See `DecisionSink`."""

    def __init__(self, offer: Callable[[LogRecord], None]) -> None:
        """offer: `Recorder.offer`."""
        self._offer = offer

    async def write(self, records: Sequence[LogRecord]) -> None:
        """See `DecisionSink`."""
        for record in records:
            self._offer(record)

    async def stop(self) -> None:
        """See `DecisionSink`. There is nothing to release."""
