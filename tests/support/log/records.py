"""Log records made by hand, as a publisher would send them."""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from kv_events.codec import encode_batch, encode_event
from kv_events.log.event_log import EventLogReader
from kv_events.records import LogRecord
from kv_events.schema import MEDIA, AllBlocksCleared, PackedRemoved, PackedStored, SnapshotBegin, SnapshotEnd, WireEvent
from kv_events.streams import StreamId

Chain = tuple[int, Sequence[int]]
"""Sequence hash of the chain's parent (0: none), and the hashes of the chain."""


def log_records(folder: Path) -> list[LogRecord]:
    """Return the records of a log. Their offsets are their indices in it."""
    return [record._replace(offset=index) for index, record in EventLogReader(folder).read()]


def records_of(folder: Path) -> list[LogRecord]:
    """Return the records of a log, as far as they were not deleted."""
    reader = EventLogReader(folder)
    return [record for _, record in reader.read(reader.first_index)]


def words(values: Iterable[int]) -> bytes:
    """Return packed little-endian u64 values."""
    return np.array(list(values), dtype="<u8").tobytes()


def stored(*chains: Chain, tier: int = 0) -> PackedStored:
    """Return a store of some chains on a tier. The block hashes equal the sequence hashes."""
    hashes = [h for _, chain in chains for h in chain]
    starts, position = np.zeros(len(hashes), np.uint8), 0
    for _, chain in chains:
        starts[position] = 1
        position += len(chain)
    bitmap = np.packbits(starts, bitorder="little").tobytes()
    return PackedStored(MEDIA[tier], words(hashes), words(hashes), bitmap, words(parent for parent, _ in chains))


def removed(hashes: Sequence[int], tier: int = 0) -> PackedRemoved:
    """Return a removal from a tier."""
    return PackedRemoved(MEDIA[tier], words(hashes), words(hashes))


def splitmix(value: int) -> int:
    """The mixing function of the digest, in plain Python integers."""
    mask = 2**64 - 1
    x = (value + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def digest_of(held: Iterable[tuple[int, int]]) -> bytes:
    """Compute the digest of a set of (sequence hash, tier) from scratch."""
    counts, xors = [0] * 4, [0] * 4
    for page, tier in set(held):
        counts[tier] += 1
        xors[tier] ^= splitmix(page)
    return words(counts + xors)


class Stream:
    """A publisher controlled by the test. Keeps the set of (sequence hash, tier) that its events imply."""

    def __init__(
        self, worker: str = "w0", *, model: str = "m", tenant: str = "default", dp_rank: int = 0, block_size: int = 4
    ) -> None:
        self.id = StreamId(model, tenant, worker, dp_rank)
        self.block_size = block_size
        self.epoch = 1
        self.seq = 0
        self.held: set[tuple[int, int]] = set()
        self.clock: Callable[[], float] = time.time

    def restart(self) -> None:
        """Start a new incarnation that holds nothing."""
        self.epoch, self.seq, self.held = self.epoch + 1, 0, set()

    def batch(
        self, *events: WireEvent, digest: bytes | None = None, now: float | None = None, degraded_reason: str = ""
    ) -> LogRecord:
        """Return the next record."""
        for event in events:
            self._track(event)
        now = self.clock() if now is None else float(now)  # an integer is encoded otherwise, and no batch is plain
        payload = encode_batch(
            self.id,
            self.block_size,
            self.epoch,
            self.seq,
            now,
            [encode_event(event) for event in events],
            digest_of(self.held) if digest is None else digest,
            degraded_reason,
        )
        self.seq += 1
        return LogRecord(0, self.seq, int(now * 1000), self.id.key.encode(), payload)

    def resync(self, *, now: float | None = None) -> LogRecord:
        """Return a resync of everything held, in one record."""
        stores = [stored(*[(0, [page]) for page, t in sorted(self.held) if t == tier], tier=tier) for tier in range(4)]
        return self.batch(SnapshotBegin("test"), *stores, SnapshotEnd(), now=now)

    def _track(self, event: WireEvent) -> None:
        match event:
            case PackedStored():
                self.held |= {
                    (h, MEDIA.index(event.medium)) for h in np.frombuffer(event.sequence_hashes, "<u8").tolist()
                }
            case PackedRemoved():
                self.held -= {
                    (h, MEDIA.index(event.medium)) for h in np.frombuffer(event.sequence_hashes, "<u8").tolist()
                }
            case AllBlocksCleared():
                self.held.clear()
