"""A consumer of a log in memory to which a test appends records."""

from collections.abc import Sequence

from indexer.applier import Applier, DeadLetters
from indexer.consumer import Consumer
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from indexer.sources.memory import MemorySource
from kv_events.hashing import namespace_seed, sequence_hashes, token_array
from kv_events.log.memory import MemoryLog
from kv_events.records import LogRecord
from tests.support.log.records import Stream, stored
from tests.support.waiting import async_wait_until


class HandFed:
    """The log and its consumer, which is not started."""

    def __init__(self, settings: IndexerSettings | None = None) -> None:
        settings = settings or IndexerSettings(max_pages=2**18)
        self.log = MemoryLog()
        applier = Applier(Namespaces(settings), DeadLetters())
        self.consumer = Consumer(MemorySource(self.log), applier, settings)

    async def feed(self, *records: LogRecord) -> None:
        """Append records to the log of a consumer that has caught up, and wait until they are applied."""
        await async_wait_until(lambda: self.consumer.ready, what="a consumer that has caught up")
        for record in records:
            self.log.append(record.key, record.payload, record.timestamp_ms)
        progress, log = self.consumer.progress, self.log
        await async_wait_until(lambda: progress.positions.get(0) == log.next_offset, what="records applied")

    async def hold(
        self,
        stream: Stream,
        tokens: Sequence[int],
        tiers: dict[int, range] | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> list[int]:
        """Store a prompt in a stream. tiers: tier -> pages; None: all on the device. Returns the hashes."""
        seed = namespace_seed(lora_name, cache_salt)
        hashes: list[int] = sequence_hashes(token_array(tokens), stream.block_size, seed).tolist()
        places = {0: range(len(hashes))} if tiers is None else tiers
        events = []
        for tier, pages in places.items():
            parent = hashes[pages.start - 1] if pages.start else 0
            events.append(stored((parent, hashes[pages.start : pages.stop]), tier=tier))
        await self.feed(stream.batch(*events))
        return hashes
