"""A replica in a process of its own, which a test controls line by line and kills.

Usage: `python -m tests.support.replica_process TTL_S SETTINGS`, a JSON object of `IndexerSettings`. Each line
on stdin is a JSON array, and each one is answered by a line on stdout when its record is written: `["reserve", ID,
WORKER, HASHES]`, `["progress", ID, STEP, OUTPUT_BLOCKS]`.
"""

import asyncio
import json
import sys
import time

import numpy as np

from indexer.assembly import create_queue
from indexer.settings import IndexerSettings
from indexer.sources.kafka import KafkaSource
from indexer.writing.queue import RESERVATIONS
from kv_events.decisions import Decision
from kv_events.reservations import VERSION, Progressed, ReservationRecord, Reserved
from kv_events.streams import StreamId
from selection.book import Book, Booked
from selection.exchange import ReservationExchange
from tests.support.controlled_process import ControlledProcess, say
from tests.support.waiting import async_wait_until

BLOCK_SIZE = 16


class Clock:
    """The wall clock of replicas, which a test can set forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


class Replica:
    """An exchange and its book, as a service uses them."""

    def __init__(self, settings: IndexerSettings, ttl_s: float, clock: Clock) -> None:
        self.book = Book(ttl_s, 0)
        source = KafkaSource(settings, topic=settings.reservations_topic)
        self.exchange = ReservationExchange(self.book, create_queue(settings, RESERVATIONS), source, clock)
        self._now = clock

    def reserve(self, name: str, worker: str, hashes: list[int]) -> None:
        """Book a request, of which the worker computes all tokens."""
        self._take(reserved(name, worker, hashes, self._now(), self.exchange.replica))

    def progress(self, name: str, step: str, output_blocks: int = 0) -> None:
        """Say that a request goes on, or ends."""
        self._take(Progressed(VERSION, self.exchange.replica, name, self._now(), step, None, output_blocks))

    def _take(self, record: ReservationRecord) -> None:
        assert self.book.apply(record, self._now())
        assert self.exchange.put(record) is None

    def loads(self, worker: str) -> Booked:
        """Return the requests, tokens and pages that are booked on a worker."""
        self.book.expire(self._now())
        return self.book.booked(StreamId("m", "default", worker, 0))

    def names(self) -> set[str]:
        """Return the ids of the reservations."""
        return set(self.book)


def reserved(
    name: str, worker: str, hashes: list[int], at: float, replica: str = "other", dp_rank: int | None = 0
) -> Reserved:
    """Return the record of a request that begins."""
    tokens, packed = len(hashes) * BLOCK_SIZE, np.array(hashes, "<u8").tobytes()
    parts = "m", "default", BLOCK_SIZE, tokens, packed, worker, dp_rank, 0
    return Reserved(VERSION, replica, Decision(VERSION, name, at, *parts, ()), tokens)


class ReplicaProcess(ControlledProcess):
    """`with ReplicaProcess(300, kafka=...) as replica:`."""

    def __init__(self, ttl_s: float, **settings: object) -> None:
        super().__init__(__name__, [ttl_s, json.dumps(settings)], {})

    def reserve(self, *arguments: object) -> None:
        """See `Replica.reserve`."""
        self.order("reserve", *arguments)

    def progress(self, *arguments: object) -> None:
        """See `Replica.progress`."""
        self.order("progress", *arguments)


async def _main(ttl_s: float, settings: IndexerSettings) -> None:
    replica = Replica(settings, ttl_s, Clock())
    exchange = replica.exchange
    async with exchange.running():
        say(exchange.replica)
        while line := await asyncio.to_thread(sys.stdin.readline):
            name, *arguments = json.loads(line)
            getattr(replica, name)(*arguments)
            await async_wait_until(lambda: not exchange.queue.num_queued, what="the record")
            say(None)


if __name__ == "__main__":
    asyncio.run(_main(float(sys.argv[1]), IndexerSettings(**json.loads(sys.argv[2]))))
