"""Publishers for tests: without tasks, with a sink that fails on demand, and what their records contain."""

from collections.abc import Iterable, Sequence
from typing import Any

from kv_events.codec import DecodedBatch, decode_batch
from kv_events.log.memory import MemoryLog
from kv_events.schema import BlockStored, SnapshotBegin, SnapshotEnd
from publisher import EventPublisher, OutRecord, PublisherSettings
from publisher.sinks.memory import MemorySink
from tests.models.stream_reader import StreamReader
from tests.support.log.records import words

NOW = 1_700_000_000.0


def publisher_settings(**settings: Any) -> PublisherSettings:
    """Settings whose resyncs neither wait nor begin at random times."""
    plain = {"model": "m", "worker": "w", "block_size": 4, "resync_jitter_s": 0, "ledger_pages": 10_000}
    return PublisherSettings(**{**plain, **settings})


def make_publisher(sink: MemorySink | None = None, **settings: Any) -> EventPublisher:
    return EventPublisher(publisher_settings(**settings), sink or MemorySink(MemoryLog()))


def make_begun(**settings: Any) -> EventPublisher:
    """A publisher that has sent its first, empty resync."""
    publisher = make_publisher(**settings)
    assert steps_of(publisher.take_records(NOW)) == [SnapshotBegin("start"), SnapshotEnd()]
    return publisher


def make_running(sink: MemorySink, **settings: Any) -> EventPublisher:
    """A publisher to be started, which hardly waits."""
    return make_publisher(sink, **{"linger_ms": 1, "resync_min_interval_s": 0, **settings})


def view_of(log: MemoryLog) -> set[int]:
    """Return the pages that a reader of the whole log holds, on any medium."""
    return {name for _, name in StreamReader().read_all(log.read(0, 10_000)).pages}


def stored(*names: int, parent: int | None = None, **fields: Any) -> BlockStored:
    """A store of pages whose sequence hashes are their block hashes plus 100."""
    values = {"sequence_hashes": words([name + 100 for name in names]), **fields}
    return BlockStored(list(names), parent, [], 4, **values)


def batches_of(records: Iterable[Any]) -> list[DecodedBatch]:
    return [decode_batch(record.payload) for record in records]


def steps_of(records: Iterable[Any]) -> list[Any]:
    return [step for batch in batches_of(records) for step in batch.steps]


def num_pages(steps: Iterable[Any]) -> int:
    """Count the pages in steps that store or remove."""
    return sum(len(step.hashes) for step in steps)


class FaultySink(MemorySink):
    """A memory sink that fails on demand."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__(log)
        self.error: Exception | None = None
        self.start_error: Exception | None = None
        self.num_attempts = 0

    async def start(self) -> None:
        if self.start_error is not None:
            raise self.start_error
        await super().start()

    async def send(self, records: Sequence[OutRecord]) -> None:
        self.num_attempts += 1
        if self.error is not None:
            raise self.error
        await super().send(records)
