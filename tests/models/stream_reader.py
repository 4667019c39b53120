"""A reader of one stream's records, which the tests of publishers and bridges share."""

from collections.abc import Iterable
from typing import Any, Self

from kv_events.codec import DecodedBatch, RemovedPages, StoredPages, decode_batch
from kv_events.schema import AllBlocksCleared, SnapshotBegin, SnapshotEnd
from tests.support.log.records import digest_of

Pages = set[tuple[int, int]]
"""(tier, sequence hash)"""


class StreamReader:
    """What a reader knows after the records that it has read. Checks the numbers of records and the form of resyncs."""

    def __init__(self, *, is_strict: bool = False) -> None:
        """is_strict: also compare every digest, and accept no store of a page that is known."""
        self.pages: Pages = set()
        self.resyncs: list[str] = []
        """Reasons of all resyncs."""
        self.epoch, self.block_size = -1, 0
        self.degraded_reason: str | None = None
        self._is_strict = is_strict
        self._named: Pages | None = None
        self._next_seq = 0

    def read(self, payload: bytes) -> DecodedBatch:
        batch = decode_batch(payload)
        if batch.epoch < self.epoch:
            return batch
        if batch.epoch > self.epoch:
            self.epoch, self._next_seq = batch.epoch, 0
        assert batch.seq == self._next_seq
        self._next_seq += 1
        self.block_size, self.degraded_reason = batch.block_size, batch.degraded_reason
        self.apply(batch.steps)
        if self._is_strict and self._named is None:
            assert batch.digest.tobytes() == digest_of((name, tier) for tier, name in self.pages)
        return batch

    def read_all(self, records: Iterable[Any]) -> Self:
        """Read records that have a payload."""
        for record in records:
            self.read(record.payload)
        return self

    def apply(self, steps: Iterable[object]) -> Pages:
        """Apply decoded events. Returns the pages that are known then."""
        for step in steps:
            match step:
                case StoredPages():
                    here = {(step.medium, name) for name in step.hashes.tolist()}
                    assert not (self._is_strict and self._named is None and self.pages & here), "stored what was known"
                    self.pages |= here
                    if self._named is not None:
                        self._named |= here
                case RemovedPages():
                    gone = {(step.medium, name) for name in step.hashes.tolist()}
                    assert not self._is_strict or gone <= self.pages, "removed what was not known"
                    self.pages -= gone
                case AllBlocksCleared():
                    self.pages.clear()
                case SnapshotBegin():
                    assert self._named is None
                    self._named = set()
                    self.resyncs.append(step.reason)
                case SnapshotEnd():
                    assert self._named is not None
                    self.pages, self._named = self._named, None
                case _:
                    raise AssertionError(step)
        return self.pages
