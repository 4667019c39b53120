"""What publishing costs: on the engine's thread, in memory, and per page encoded.

python benchmarks/bench_publish.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kv_events.memory_log import MemoryLog
from kv_events.schema import BlockRemoved, BlockStored, EngineEvent, StorageMedium
from publisher import EventPublisher, PublisherSettings
from publisher.sinks import MemorySink

SEED = 1
BLOCK_SIZE = 16
QUEUE_PAGES = 1_000_000


class Figure(NamedTuple):
    """One line of the table."""

    name: str
    median: float
    spread: float
    """90th percentile, or the median again where there is one value only."""
    unit: str
    target: float | None
    """At most this (pages/s: at least)."""


def make_publisher() -> EventPublisher:
    """A publisher that nobody drains but the caller."""
    settings = PublisherSettings(model="m", worker="w", block_size=BLOCK_SIZE, queue_pages=QUEUE_PAGES)
    return EventPublisher(settings, MemorySink(MemoryLog()))


class Prompts:
    """Stored pages under random names."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(SEED)

    def event(self, num_pages: int, parent: int | None = None) -> BlockStored:
        """One event that stores a chain."""
        names = self._random.integers(0, 2**63, num_pages).tolist()
        sequence_hashes = self._random.bytes(8 * num_pages)
        tokens = [1] * (BLOCK_SIZE * num_pages)
        return BlockStored(names, parent, tokens, BLOCK_SIZE, None, StorageMedium.GPU, None, sequence_hashes)

    def single_pages(self, num_events: int) -> list[BlockStored]:
        """A chain, one page an event."""
        events, parent = [], None
        for _ in range(num_events):
            events.append(self.event(1, parent))
            parent = events[-1].block_hashes[0]
        return events


def timed_us(step: Callable[[list[EngineEvent]], object], calls: list[list[EngineEvent]]) -> tuple[float, float]:
    """Median and 90th percentile of one call, in microseconds."""
    times = []
    for events in calls:
        start = time.perf_counter_ns()
        step(events)
        times.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(times), statistics.quantiles(times, n=10)[-1]


def publish_figures() -> Iterator[Figure]:
    """Cost on the engine's thread."""
    prompts = Prompts()
    publisher = make_publisher()
    chains: list[list[EngineEvent]] = [[prompts.event(64)] for _ in range(2000)]
    yield Figure("publish, 1 event of 64 new pages", *timed_us(publisher.publish, chains), "us", 60)
    yield Figure("publish, 1 event of 64 known pages", *timed_us(publisher.publish, chains), "us", 60)
    removals: list[list[EngineEvent]] = [[BlockRemoved(call[0].block_hashes)] for call in chains]
    yield Figure("publish, 1 removal of 64 pages", *timed_us(publisher.publish, removals), "us", 60)
    singles: list[list[EngineEvent]] = [[*prompts.single_pages(256)] for _ in range(100)]
    yield Figure("publish, 256 events of 1 page", *timed_us(publisher.publish, singles), "us", 256)
    single: list[list[EngineEvent]] = [[prompts.event(1)] for _ in range(2000)]
    yield Figure("publish, 1 event of 1 page", *timed_us(publisher.publish, single), "us", None)


def queue_figures() -> Iterator[Figure]:
    """A full queue, and emptying it."""
    prompts = Prompts()
    calls = [[prompts.event(64)] for _ in range(QUEUE_PAGES // 64)]
    tracemalloc.start()
    publisher = make_publisher()
    publisher.take_records(time.time())
    for events in calls:
        publisher.publish(events)
    mebibytes = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    queued = publisher.stats().queue.queued
    yield Figure(f"reserved for {queued:,} queued pages, ledger of 4M included", mebibytes, mebibytes, "MiB", None)
    start = time.perf_counter()
    records = publisher.take_records(time.time(), force=True)
    rate = queued / (time.perf_counter() - start)
    yield Figure("encode, pages/s", rate, rate, "pages/s", None)
    size = sum(len(record.payload) for record in records) / queued
    yield Figure("bytes a page on the wire, chains of 64", size, size, "bytes", 24)
    start = time.perf_counter()
    publisher.request_resync("benchmark")
    publisher.take_records(time.time(), force=True)
    elapsed_ms = (time.perf_counter() - start) * 1000
    yield Figure(f"snapshot of {queued:,} pages", elapsed_ms, elapsed_ms, "ms", None)


def resident_figure() -> Figure:
    """Resident memory that a full queue of single-page calls adds, the worst case, and its ledger."""
    publisher = make_publisher()
    prompts = Prompts()
    before = _resident_bytes()
    for _ in range(QUEUE_PAGES // 1000):
        for event in prompts.single_pages(1000):
            publisher.publish([event])
    mebibytes = (_resident_bytes() - before) / 2**20
    return Figure(f"resident, {QUEUE_PAGES:,} single pages queued and held", mebibytes, mebibytes, "MiB", 200)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}, seed {SEED}"
    date = datetime.now(UTC).date().isoformat()
    figures = [resident_figure(), *publish_figures(), *queue_figures()]
    print(f"{machine}, {date}")
    for figure in figures:
        target = "" if figure.target is None else f"{figure.target:>10,.0f}"
        print(f"{figure.name:<62}{figure.median:>14,.1f}{figure.spread:>14,.1f} {figure.unit:<8}{target}")
    if arguments.json is not None:
        content = {"machine": machine, "date": date, "figures": [figure._asdict() for figure in figures]}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
