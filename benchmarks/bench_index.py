"""The index in process: queries, applying, memory. `python -m benchmarks.bench_index [--json FILE]`

1M distinct pages of 123 prompts, 64 workers x 4 tiers, batches of 64 pages. "known" queries ask for pages that are
held. Consecutive queries ask for different prompts, so that no answer comes from the processor's caches alone.

The rows of growth fill an index with 10M pages, three of 1,000 workers on each, and free everything. Their unit is the
CPU time of one call, so that other programs do not count.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.report import Figure, figure, main, timed
from indexer.index import OverlapIndex
from kv_events.codec import RemovedPages, StoredPages
from kv_events.hashing import sequence_hashes

NUM_PAGES, CHAIN, BATCH, WORKERS, PAGE_TOKENS = 1_000_000, 8192, 64, 64, 16
GROWN_PAGES, GROWN_WORKERS, HOLDERS, SWEPT_WORKERS = 10_000_000, 1000, 3, 20
_STARTS = np.packbits([1] + [0] * (BATCH - 1), bitorder="little")
_RANDOM_SEED = 1


def chains() -> list[np.ndarray]:
    """Return the prompts as sequence hashes, uint64[8192] each."""
    random = np.random.default_rng(_RANDOM_SEED)
    pages = random.integers(1, 2**64, NUM_PAGES, dtype=np.uint64)
    return [pages[i : i + CHAIN] for i in range(0, NUM_PAGES, CHAIN)]


def batches(chain: np.ndarray, tier: int) -> Iterator[StoredPages]:
    """Yield a prompt as decoded events of 64 pages."""
    for start in range(0, len(chain), BATCH):
        hashes = chain[start : start + BATCH]
        parent = chain[start - 1 : start] if start else np.zeros(1, np.uint64)
        starts = _STARTS[: (len(hashes) + 7) // 8]
        yield StoredPages(tier, hashes, hashes, starts, np.ascontiguousarray(parent))


def apply_rates(prompts: list[np.ndarray]) -> tuple[OverlapIndex, list[Figure]]:
    """Measure stores and removals in million pages a second.

    Returns an index in which almost every worker holds every page, each worker on one of the four tiers.
    """
    index = OverlapIndex()
    streams = [index.add_stream() for _ in range(WORKERS)]
    new: list[float] = []
    known: list[float] = []
    removals: list[float] = []
    for number, stream in enumerate(streams):
        for events in ([*batches(chain, number % 4)] for chain in prompts):
            pages = sum(len(e.hashes) for e in events)
            seconds = timed(lambda s, ev: [index.store(s, e, 0, len(e.hashes)) for e in ev], stream, events)
            (new if number == 0 else known).append(pages / seconds / 1e6)
    victim = streams[-1]
    for events in ([*batches(chain, (WORKERS - 1) % 4)] for chain in prompts):
        gone = [RemovedPages(e.medium, e.hashes, e.block_hashes) for e in events]
        pages = sum(len(e.hashes) for e in gone)
        seconds = timed(lambda ev: [index.remove(victim, e, 0, len(e.hashes)) for e in ev], gone)
        removals.append(pages / seconds / 1e6)
    return index, [
        figure("store pages that no worker holds", "Mpages/s", new, ">= 3"),
        figure("store pages that others hold", "Mpages/s", known, ">= 3"),
        figure("remove pages", "Mpages/s", removals, ">= 3"),
    ]


def mixed_index(prompts: list[np.ndarray]) -> OverlapIndex:
    """Return an index in which each worker holds each prompt to another depth on another tier, one of them whole."""
    random = np.random.default_rng(_RANDOM_SEED)
    index = OverlapIndex()
    streams = [index.add_stream() for _ in range(WORKERS)]
    for number, chain in enumerate(prompts):
        for stream in streams:
            depth = len(chain) if stream == number % WORKERS else int(random.integers(1, len(chain)))
            for event in batches(chain[:depth], (stream + number) % 4):
                index.store(stream, event, 0, len(event.hashes))
    return index


def query_times(index: OverlapIndex, prompts: list[np.ndarray], what: str) -> Iterator[Figure]:
    """Measure queries of known pages, given as hashes."""
    goals = {8: "<= 3", 64: "<= 3", 1000: "<= 12", 8192: "<= 150"}
    random = np.random.default_rng(_RANDOM_SEED)
    for length, goal in goals.items():
        asked = [np.ascontiguousarray(prompts[i][:length]) for i in random.integers(0, len(prompts) - 1, 2000)]
        times = [timed(lambda h: index.find(h), h) * 1e6 for h in asked]
        yield figure(f"query {length} known pages, {what}", "us", times, goal)


def hashing_time() -> Figure:
    """Measure the hashing of a prompt's tokens."""
    random = np.random.default_rng(_RANDOM_SEED)
    tokens = random.integers(0, 128_000, (200, 1000 * PAGE_TOKENS), dtype=np.uint32)
    hashing = [timed(lambda t: sequence_hashes(t, PAGE_TOKENS), t) * 1e6 for t in tokens]
    return figure("hash 1000 pages of 16 tokens", "us", hashing, "<= 100")


def scattered_index(prompts: list[np.ndarray]) -> tuple[OverlapIndex, float]:
    """Build the worst case for holder sets: a random tenth of the workers holds each page.

    Returns the index and the microseconds of CPU time of the longest slice.
    """
    random = np.random.default_rng(_RANDOM_SEED)
    index, longest = OverlapIndex(), 0.0
    for _ in range(WORKERS):
        stream = index.add_stream()
        for chain in prompts:
            part = np.ascontiguousarray(chain[random.random(len(chain)) < 0.1])
            for event in batches(part, 0):
                longest = max(longest, cpu_us(index.store, stream, event, 0, len(event.hashes)))
    return index, longest


def room_slices(index: OverlapIndex) -> Iterator[float]:
    """Make room for another worker, for which all holder sets become wider. Yields the microseconds of each slice."""
    making, is_over = iter(index.make_room()), False
    while not is_over:
        began = time.thread_time()
        is_over = next(making, True) is True
        yield (time.thread_time() - began) * 1e6


def memory(prompts: list[np.ndarray], num_workers: int) -> Iterator[Figure]:
    """Measure bytes a distinct page: as counted by the arrays, and as the growth of the process."""
    before = _resident_bytes()
    index = OverlapIndex()
    for number in range(num_workers):
        stream = index.add_stream()
        for chain in prompts:
            for event in batches(chain, number % 4):
                index.store(stream, event, 0, len(event.hashes))
    grown = _resident_bytes() - before
    name = f"memory a page, {num_workers} workers hold all"
    yield figure(f"{name}, arrays", "bytes", [index.bytes_used / index.num_pages], "<= 48")
    yield figure(f"{name}, process", "bytes", [grown / index.num_pages], "<= 48")


def growth() -> Iterator[Figure]:
    """Measure single calls while an index grows and while everything is freed."""
    index = OverlapIndex()
    streams = [index.add_stream() for _ in range(GROWN_WORKERS)]
    seeds = np.random.default_rng(_RANDOM_SEED).integers(1, 2**63, GROWN_PAGES // CHAIN)

    def chain(number: int) -> np.ndarray:
        return np.random.default_rng(seeds[number]).integers(1, 2**64, CHAIN, dtype=np.uint64)

    def events(holder: int) -> Iterator[tuple[int, StoredPages]]:
        for number in range(len(seeds)):
            stream = streams[(7 * number + 331 * holder) % GROWN_WORKERS]
            yield from ((stream, event) for event in batches(chain(number), holder))

    total = 0.0
    for holder in range(HOLDERS):
        calls = [cpu_us(index.store, stream, e, 0, len(e.hashes)) for stream, e in events(holder)]
        total += sum(calls)
        yield figure(f"store 64 pages, holder {holder + 1} of each page", "us", calls)
        yield figure("the same, the longest of all", "us", [max(calls)], "<= 2000")
    grown = f"{index.num_pages:,} pages"
    yield figure("store a page, mean of all", "ns", [1e3 * total / HOLDERS / index.num_pages], "<= 80")
    yield figure(f"memory a page, {grown}, arrays", "bytes", [index.bytes_used / index.num_pages], "<= 48")
    numbers = np.random.default_rng(_RANDOM_SEED).integers(0, len(seeds), 500)
    asked = [np.ascontiguousarray(chain(number)[:512]) for number in numbers]
    yield figure(
        f"query 512 of {grown}", "us", [timed(lambda h: index.find(h), each) * 1e6 for each in asked], "<= 6.6"
    )
    slices: list[float] = []
    for stream in streams[:SWEPT_WORKERS]:
        sweep = index.sweep(stream)
        while index.digest(stream)[:HOLDERS].any():
            slices.append(cpu_us(next, sweep, 0))
    yield figure("forget a worker, one slice", "us", slices)
    yield figure("the same, the longest of all", "us", [max(slices)], "<= 2000")
    for holder in range(HOLDERS):
        removed = ((s, RemovedPages(e.medium, e.hashes, e.block_hashes)) for s, e in events(holder))
        calls = [cpu_us(index.remove, s, e, 0, len(e.hashes)) for s, e in removed]
        yield figure(f"remove 64 pages, holder {holder + 1} of each page", "us", calls)
        yield figure("the same, the longest of all", "us", [max(calls)], "<= 2000")


def cpu_us(call: Callable[..., object], *arguments: object) -> float:
    """Return the microseconds of CPU time that a call takes."""
    began = time.thread_time()
    call(*arguments)
    return (time.thread_time() - began) * 1e6


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def run() -> list[Figure]:
    """Return all figures. Memory is measured in fresh processes, which have not freed anything before."""
    prompts = chains()
    index, figures = apply_rates(prompts)
    figures.extend(query_times(index, prompts, "all workers hold all"))
    figures.extend(query_times(mixed_index(prompts), prompts, "each worker another depth and tier"))
    figures.append(hashing_time())
    scattered, longest = scattered_index(prompts)
    name = "random tenth of the workers on each page"
    figures.append(figure(f"memory a page, {name}", "bytes", [scattered.bytes_used / scattered.num_pages]))
    figures.append(figure(f"longest store of 64 pages, {name}", "us", [longest], "<= 2000"))
    room = [*room_slices(scattered)]
    figures.append(figure(f"widen {scattered.num_sets:,} holder sets for worker 65, one slice", "us", room))
    figures.append(figure("the same, the longest of all", "us", [max(room)], "<= 2000"))
    for num_workers in (1, WORKERS):
        command = [sys.executable, "-m", "benchmarks.bench_index", "--memory", str(num_workers)]
        for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
            name, value = line.split("\t")
            figures.append(figure(name, "bytes", [float(value)], "<= 48"))
    return [*figures, *growth()]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory"]:
        prompts_of_memory = chains()
        OverlapIndex(1000).find(prompts_of_memory[0][:1])
        for each in memory(prompts_of_memory, int(sys.argv[2])):
            sys.stdout.write(f"{each.name}\t{each.median}\n")
    else:
        main("index in process", run)
