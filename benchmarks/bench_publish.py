"""The cost of publishing: time on the engine's thread, memory, and bytes and time per encoded page.

`python -m benchmarks.bench_publish [--json FILE]`. The paced rows send to Kafka: KVSIGHT_KAFKA names the broker, or the
benchmark starts one.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import psutil

from benchmarks.report import Figure, figure, main, percentile, timed
from benchmarks.services import broker
from kv_events.log.memory import MemoryLog
from kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent, StorageMedium
from publisher import EventPublisher, PublisherSettings
from publisher.sinks.kafka import KafkaSink
from publisher.sinks.memory import MemorySink

SEED = 1
BLOCK_SIZE = 16
QUEUE_PAGES = 1_000_000
NUM_RESYNCS = NUM_CLEARS = 5
RESYNC_S = 1.5
"""More than a resync of QUEUE_PAGES needs."""
ENGINE_STEP_S = 0.0005
PACED_PAGES = 50
PACED_S = 5.0


def make_publisher() -> EventPublisher:
    """Return a publisher without a running drain. The caller takes the records."""
    settings = PublisherSettings(
        model="m",
        worker="w",
        block_size=BLOCK_SIZE,
        queue_pages=QUEUE_PAGES,
        resync_jitter_s=0,
        resync_min_interval_s=0,
    )
    return EventPublisher(settings, MemorySink(MemoryLog()))


class Prompts:
    """Return stored pages with random hashes."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(SEED)

    def event(self, num_pages: int, parent: int | None = None) -> BlockStored:
        """Return one event that stores a chain."""
        names = self._random.integers(0, 2**63, num_pages).tolist()
        sequence_hashes = self._random.bytes(8 * num_pages)
        tokens = [1] * (BLOCK_SIZE * num_pages)
        return BlockStored(names, parent, tokens, BLOCK_SIZE, None, StorageMedium.GPU, None, sequence_hashes)

    def single_pages(self, num_events: int) -> list[BlockStored]:
        """Return events that store a chain, one page each."""
        events, parent = [], None
        for _ in range(num_events):
            events.append(self.event(1, parent))
            parent = events[-1].block_hashes[0]
        return events


def times_us(step: Callable[[Sequence[EngineEvent]], object], calls: Sequence[Sequence[EngineEvent]]) -> list[float]:
    """Return the microseconds of each call."""
    return [timed(lambda e: step(e), events) * 1e6 for events in calls]


def publish_figures() -> Iterator[Figure]:
    """Measure the cost on the engine's thread."""
    prompts = Prompts()
    publisher = make_publisher()
    chains = [[prompts.event(64)] for _ in range(2000)]
    yield figure("publish, 1 event of 64 new pages", "us", times_us(publisher.publish, chains), "<= 60")
    yield figure("publish, 1 event of 64 known pages", "us", times_us(publisher.publish, chains), "<= 60")
    removals: list[list[EngineEvent]] = [[BlockRemoved(event.block_hashes) for event in call] for call in chains]
    yield figure("publish, 1 removal of 64 pages", "us", times_us(publisher.publish, removals), "<= 60")
    singles: list[list[EngineEvent]] = [[*prompts.single_pages(256)] for _ in range(100)]
    yield figure("publish, 256 events of 1 page", "us", times_us(publisher.publish, singles))
    single: list[list[EngineEvent]] = [[prompts.event(1)] for _ in range(2000)]
    yield figure("publish, 1 event of 1 page", "us", times_us(publisher.publish, single))


def queue_figures() -> Iterator[Figure]:
    """Measure a full queue and draining it."""
    prompts = Prompts()
    publisher = make_publisher()
    publisher.take_records(time.time())
    for _ in range(QUEUE_PAGES // 64):
        publisher.publish([prompts.event(64)])
    queued = publisher.stats().queued
    began = time.perf_counter()
    records = publisher.take_records(time.time(), force=True)
    seconds = time.perf_counter() - began
    yield figure("encode", "Mpages/s", [queued / seconds / 1e6])
    size = sum(len(record.payload) for record in records) / queued
    yield figure("a page on the wire, chains of 64", "bytes", [size], "<= 24")
    yield figure(f"resync of {queued:,} pages", "ms", [_resync_ms(publisher) for _ in range(NUM_RESYNCS)])


def _resync_ms(publisher: EventPublisher) -> float:
    publisher.request_resync("benchmark")
    return timed(lambda: publisher.take_records(time.time(), force=True)) * 1e3


def resync_figures() -> Iterator[Figure]:
    """Measure a resync, `publish()` during the resync, and a clear."""
    prompts = Prompts()
    publisher = make_publisher()
    for _ in range(QUEUE_PAGES // 1000):
        publisher.publish([prompts.event(1000)])
    publisher.take_records(time.time(), force=True)
    calls: list[list[EngineEvent]] = [[prompts.event(64)] for _ in range(2000)]
    publisher.start_in_thread()
    rounds = [times_during_resync(publisher, calls) for _ in range(NUM_RESYNCS)]
    publisher.close()
    name = f"publish, 64 pages, during a resync of {QUEUE_PAGES:,}"
    yield figure(name, "us", [value for times in rounds for value in times])
    yield figure(f"{name}: the slowest", "us", map(max, rounds))


def clear_figures() -> Iterator[Figure]:
    """Measure the publication of a flushed cache."""
    times = []
    for _ in range(NUM_CLEARS):
        prompts = Prompts()
        publisher = make_publisher()
        for _ in range(QUEUE_PAGES // 1000):
            publisher.publish([prompts.event(1000)])
        times += times_us(publisher.publish, [[AllBlocksCleared()]])
    yield figure(f"publish, AllBlocksCleared of {QUEUE_PAGES:,} pages", "us", times)


def times_during_resync(publisher: EventPublisher, calls: list[list[EngineEvent]]) -> list[float]:
    """Return the microseconds of each call during a resync, by an engine that does other work between calls."""
    num_resyncs = publisher.stats().resyncs
    publisher.request_resync("benchmark")
    over_at = time.monotonic() + RESYNC_S
    times = []
    for events in calls:
        times += times_us(publisher.publish, [events])
        time.sleep(ENGINE_STEP_S)
        if time.monotonic() > over_at:
            break
    if publisher.stats().resyncs == num_resyncs:
        raise RuntimeError(f"no resync within {RESYNC_S} s")
    return times


def paced_figures() -> Iterator[Figure]:
    """Measure calls that come every few milliseconds, as an engine's do, with a Kafka sink at work.

    Between two calls, everything leaves the processor's caches. The floor is what a short Python function costs then.
    """
    prompts = Prompts()
    with broker() as kafka:
        settings = PublisherSettings(model=f"bench-{time.time_ns()}", worker="w", block_size=BLOCK_SIZE, kafka=kafka)
        with EventPublisher(settings, KafkaSink(settings)) as publisher:
            for period_s in (0.0025, 0.01):
                for pause in (sleep_until, spin_until):
                    how = f"every {period_s * 1e3:g} ms, {pause.__name__.removesuffix('_until')}"
                    times, cpu = paced_times(publisher.publish, prompts, period_s, pause)
                    yield figure(f"publish, {PACED_PAGES} pages {how}", "us", times, "<= 60")
                    yield figure("the same, 99th percentile", "us", [percentile(times, 99)], "<= 200")
                    yield figure("the same, CPU time of the thread", "us", cpu)
                    floor, _ = paced_times(page_numbers, prompts, period_s, pause)
                    yield figure(f"a dict of {PACED_PAGES} pages {how}", "us", floor)


def sleep_until(due: float) -> None:
    """Wait as an engine that waits for its device."""
    time.sleep(max(0.0, due - time.perf_counter()))


def spin_until(due: float) -> None:
    """Wait as an engine that computes in Python and never releases the interpreter lock."""
    while time.perf_counter() < due:
        pass


def page_numbers(events: Sequence[EngineEvent]) -> dict[int, int]:
    """Do what costs about as much as the shortest thinkable `publish`."""
    return {name: i for event in events if isinstance(event, BlockStored) for i, name in enumerate(event.block_hashes)}


def paced_times(
    step: Callable[[Sequence[EngineEvent]], object], prompts: Prompts, period_s: float, pause: Callable[[float], None]
) -> tuple[list[float], list[float]]:
    """Return the microseconds of each call, and those of CPU time."""
    times, cpu = [], []
    due = time.perf_counter()
    for _ in range(int(PACED_S / period_s)):
        events = [prompts.event(PACED_PAGES)]
        due += period_s
        pause(due)
        began = time.thread_time()
        times += times_us(step, [events])
        cpu.append((time.thread_time() - began) * 1e6)
    return times, cpu


def queue_memory() -> float:
    """Return the MB of resident memory of a queue full of single-page calls, the worst case, and of its ledger."""
    publisher = make_publisher()
    prompts = Prompts()
    publisher.publish([prompts.event(1)])
    before = psutil.Process().memory_info().rss
    for _ in range(QUEUE_PAGES // 1000):
        for event in prompts.single_pages(1000):
            publisher.publish([event])
    return float(psutil.Process().memory_info().rss - before) / 1e6


def run() -> list[Figure]:
    """Return all figures. Memory is measured in a fresh process, which has not freed anything before."""
    command = [sys.executable, "-m", "benchmarks.bench_publish", "--memory"]
    memory = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    name = f"{QUEUE_PAGES:,} single pages queued, and in the ledger"
    return [
        *publish_figures(),
        *queue_figures(),
        *resync_figures(),
        *clear_figures(),
        *paced_figures(),
        figure(name, "MB", [float(memory)], "<= 200"),
    ]


if __name__ == "__main__":
    if sys.argv[1:] == ["--memory"]:
        sys.stdout.write(f"{queue_memory()}\n")
    else:
        main("publisher", run)
