"""Event logs: checking, replay, audit, and moments. `python -m benchmarks.bench_replay [--json FILE]`

A log of 10M changes of pages by 64 workers: each record stores 128 new pages and, once the caches are full, removes 128
old ones. 1.3M pages are held at the end. The small logs have fewer changes in records of 1, 16 and 64 pages. Rates are
those of one core, by CPU time. The records are in the page cache of the operating system.
"""

import random
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from analysis.audit.audit import audit_log
from benchmarks.report import Figure, figure, main
from indexer.index import OverlapIndex
from indexer.replay import LogIndexer, Replay, Timeline
from kv_events.codec import RemovedPages, StoredPages, encode_batch, encode_event
from kv_events.hashing import U64Array
from kv_events.log.event_log import EventLogWriter
from kv_events.log.moments import LogMoment
from kv_events.log.reader import scan_log
from kv_events.records import LogRecord
from kv_events.schema import MEDIA, PackedRemoved, PackedStored
from kv_events.streams import StreamId

NUM_WORKERS, PAGES_PER_WORKER, PAGE_TOKENS = 64, 20_000, 16
NUM_CHANGES = 10_000_000
LOGS = (
    (1, 100_000, ""),
    (16, 2_000_000, ">= 3"),
    (64, 2_000_000, ">= 3"),
    (128, NUM_CHANGES, ">= 3"),
)
"""Pages a record, changes, and the goal of a replay. The last one is the log whose moments are opened."""
NUM_MOMENTS = 20
_RANDOM_SEED = 1
_START_S, _STEP_S = 1.7e9, 0.01


class Worker:
    """A cache that stores chains of new pages and removes its oldest ones. `index` computes its digests."""

    def __init__(self, number: int, index: OverlapIndex) -> None:
        self.stream = StreamId("model", "default", f"worker-{number}", 0)
        self._index, self._number = index, index.add_stream()
        self._held: deque[U64Array] = deque()
        self._seq = 0

    def store(self, chain: U64Array, now: float) -> tuple[bytes, int]:
        """Return a record, and the number of changes in it."""
        starts = np.packbits([1] + [0] * (len(chain) - 1), bitorder="little")
        self._index.store(self._number, StoredPages(0, chain, chain, starts, np.zeros(1, np.uint64)), 0, len(chain))
        self._held.append(chain)
        hashes = chain.tobytes()
        events = [encode_event(PackedStored(MEDIA[0], hashes, hashes, starts.tobytes(), bytes(8)))]
        if len(self._held) * len(chain) > PAGES_PER_WORKER:
            oldest = self._held.popleft()
            self._index.remove(self._number, RemovedPages(0, oldest, oldest), 0, len(oldest))
            events.append(encode_event(PackedRemoved(MEDIA[0], oldest.tobytes(), oldest.tobytes())))
        digest = self._index.digest(self._number).tobytes()
        payload = encode_batch(self.stream, PAGE_TOKENS, 1, self._seq, now, events, digest)
        self._seq += 1
        return payload, len(events) * len(chain)


def write_log(folder: Path, num_changes: int, pages_per_record: int) -> None:
    """Write a log of this many changes."""
    index = OverlapIndex()
    workers = [Worker(number, index) for number in range(NUM_WORKERS)]
    generator = np.random.default_rng(_RANDOM_SEED)
    done, now = 0, _START_S
    with EventLogWriter(folder) as writer:
        for worker in cycle(workers):
            chain = generator.integers(1, 2**64, pages_per_record, dtype=np.uint64)
            payload, changes = worker.store(chain, now)
            writer.append(LogRecord(0, writer.next_index, int(now * 1000), worker.stream.key.encode(), payload))
            done, now = done + changes, now + _STEP_S
            if done >= num_changes:
                return


def _cpu_s(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def log_rates(folder: Path, name: str, num_changes: int, goal: str) -> list[Figure]:
    """Measure checking, replaying and auditing a whole log."""
    size = sum(path.stat().st_size for path in folder.glob("*.kvlog"))

    def check() -> None:
        for _ in scan_log(folder, lambda error: None):
            pass

    def replay() -> None:
        views = Timeline(folder).at()
        assert all(view.state == "live" for view in views.namespaces.views)

    checks = [size / _cpu_s(check) / 1e6 for _ in range(5)]
    replays = [num_changes / _cpu_s(replay) / 1e6 for _ in range(3)]
    audits = [num_changes / _cpu_s(partial(audit_log, folder)) / 1e6]
    return [
        figure(f"check every record, {name}", "MB/s", checks, ">= 500"),
        figure(f"replay, {name}", "Mpages/s", replays, goal),
        figure(f"audit, {name}", "Mpages/s", audits),
    ]


def moments(folder: Path) -> list[Figure]:
    """Measure opening random moments, each as a new process would, after the log is indexed."""
    indexing = _cpu_s(LogIndexer(folder).advance)
    num_records = Timeline(folder).next_index
    frames = sum(path.stat().st_size for path in folder.glob("*.kvframe"))
    chosen = random.Random(_RANDOM_SEED)

    def open_at(until: LogMoment) -> None:
        assert Timeline(folder).at(until).namespaces.views

    indices = [chosen.randrange(100, num_records) for _ in range(NUM_MOMENTS)]
    by_index = [_cpu_s(partial(open_at, LogMoment(index=index))) for index in indices]
    times = [_START_S + chosen.uniform(1, num_records * _STEP_S) for _ in range(NUM_MOMENTS)]
    by_time = [_cpu_s(partial(open_at, LogMoment(time_s=time_s))) for time_s in times]
    return [
        figure("write key frames and time index, 10M pages", "s", [indexing]),
        figure("size of the key frames, 10M pages", "MB", [frames / 1e6]),
        figure("open a moment by index, 10M pages", "s", by_index, "< 2"),
        figure("open a moment by time, 10M pages", "s", by_time, "< 2"),
    ]


def run() -> list[Figure]:
    """Return all figures."""
    Replay()  # compiles the kernels
    with TemporaryDirectory() as name:
        figures = []
        for num_pages, num_changes, goal in LOGS:
            folder = Path(name, str(num_pages))
            write_log(folder, num_changes, num_pages)
            figures += log_rates(folder, f"{num_pages} pages a record", num_changes, goal)
        return figures + moments(folder)


if __name__ == "__main__":
    main("replay", run)
