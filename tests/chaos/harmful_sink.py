"""A sink that harms records on their way to the log, without the publisher's knowledge."""

from collections.abc import AsyncIterator, Sequence

from kv_events.runtime.outages import Outage
from kv_events.schema import ResyncRequest
from publisher.sinks.base import OutRecord, Sink

HARMS = ("dropped", "doubled", "swapped", "truncated")


class HarmfulSink:
    """See `Sink`. Passes everything on to another one, except for the records that it was told to harm."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._harm = ""
        self._left = 0
        self._late: OutRecord | None = None  # a record that waits for its successor

    def harm_next(self, harm: str, records: int) -> None:
        """Harm the next records: one of HARMS. Any thread."""
        self._harm, self._left = harm, records

    @property
    def num_left(self) -> int:
        """How many of them have not been sent yet."""
        return self._left + (self._late is not None)

    @property
    def outage(self) -> Outage:
        return self._sink.outage

    async def start(self) -> None:
        await self._sink.start()

    async def send(self, records: Sequence[OutRecord]) -> None:
        await self._sink.send([each for record in records for each in self._harmed(record)])

    async def stop(self) -> None:
        await self._sink.stop()

    def requests(self) -> AsyncIterator[ResyncRequest | None]:
        return self._sink.requests()

    def _harmed(self, record: OutRecord) -> list[OutRecord]:
        if self._late is not None:
            late, self._late = self._late, None
            return [record, late]
        if self._left == 0:
            return [record]
        self._left -= 1
        match self._harm:
            case "dropped":
                return []
            case "doubled":
                return [record, record]
            case "swapped":
                self._late = record
                return []
            case "truncated":
                return [record._replace(payload=record.payload[: len(record.payload) // 2])]
            case harm:
                raise ValueError(harm)
