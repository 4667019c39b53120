"""From `publish()` to `/query` through a real broker. `python -m benchmarks.bench_end_to_end [--json FILE]`

A publisher sends 5,000 and 20,000 pages/s to Kafka, `kvsight serve` reads them in its own process, and a router queries
the newest event over HTTP, every half millisecond, until all its pages are found. KVSIGHT_KAFKA names the broker;
without it, the benchmark starts one.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import numpy as np

from benchmarks.report import Figure, figure, main, percentile
from benchmarks.services import broker
from kv_events.schema import BlockStored, StorageMedium
from publisher import EventPublisher, PublisherSettings
from publisher.sinks.kafka import KafkaSink

EVENT_PAGES, BLOCK_SIZE = 50, 16
SECONDS = 20.0
_QUERY_S = 0.0005


@contextmanager
def indexer(kafka: str) -> Iterator[httpx.Client]:
    """Yield a client of a `kvsight serve` that is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "kvsight", "serve", "--port", str(port), "--kafka", kafka]
    process = subprocess.Popen(command)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        try:
            while not _is_ready(client):
                if process.poll() is not None:
                    raise RuntimeError(f"kvsight serve has ended with {process.returncode}")
                time.sleep(0.05)
            yield client
        finally:
            process.terminate()
            process.wait()


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").is_success
    except httpx.TransportError:
        return False


class Load(threading.Thread):
    """Publishes chains of new pages at a steady rate."""

    def __init__(self, publisher: EventPublisher, pages_per_s: int) -> None:
        super().__init__(daemon=True)
        self._period_s = EVENT_PAGES / pages_per_s
        self._publisher = publisher
        self._random = np.random.default_rng(1)
        self.newest: tuple[float, list[int]] = (0.0, [])
        """The time at which the newest event was published, and its sequence hashes."""
        self.costs: list[float] = []
        self.running = True

    def run(self) -> None:
        due = time.perf_counter()
        while self.running:
            hashes = self._random.integers(1, 2**63, EVENT_PAGES, dtype=np.uint64)
            event = BlockStored(
                hashes.tolist(), None, [], BLOCK_SIZE, None, StorageMedium.GPU, None, hashes.astype("<u8").tobytes()
            )
            published_at = time.perf_counter()
            self._publisher.publish([event])
            self.costs.append(time.perf_counter() - published_at)
            self.newest = (published_at, hashes.tolist())
            due += self._period_s
            time.sleep(max(0.0, due - time.perf_counter()))


def seconds_until_visible(client: httpx.Client, model: str, hashes: list[int], published_at: float) -> float:
    """Query until the whole event is found."""
    body = {"model_name": model, "seq_hashes": hashes}
    while True:
        answer = client.post("/query_by_hash", json=body).json()
        held = answer.get("instances", {}).get("engine-0", {}).get("gpu", 0)
        if held == len(hashes) * BLOCK_SIZE:
            return time.perf_counter() - published_at
        time.sleep(_QUERY_S)


def freshness_figures(kafka: str, client: httpx.Client, pages_per_s: int) -> Iterator[Figure]:
    """Measure one load."""
    latencies: list[float] = []
    model = f"bench-{time.time_ns()}"  # the topic may contain older runs
    settings = PublisherSettings(model=model, worker="engine-0", block_size=BLOCK_SIZE, kafka=kafka)
    with EventPublisher(settings, KafkaSink(settings)) as publisher:
        load = Load(publisher, pages_per_s)
        load.start()
        asked = 0.0
        until = time.perf_counter() + SECONDS
        while time.perf_counter() < until:
            published_at, hashes = load.newest
            if published_at > asked:
                asked = published_at
                latencies.append(seconds_until_visible(client, model, hashes, published_at) * 1e3)
            else:
                time.sleep(_QUERY_S)
        load.running = False
        load.join()
    within = 100 * sum(latency <= 50 for latency in latencies) / len(latencies)
    costs = [cost * 1e6 for cost in load.costs]
    yield figure(f"visible in /query at {pages_per_s} pages/s, {len(latencies)} events", "ms", latencies)
    yield figure("the same, 99th percentile", "ms", [percentile(latencies, 99)], "<= 15")
    yield figure("visible within 50 ms", "%", [within], ">= 99")
    yield figure(f"publish() of {EVENT_PAGES} pages during this run", "us", costs, "<= 60")
    yield figure("the same, 99th percentile", "us", [percentile(costs, 99)], "<= 200")


def run() -> list[Figure]:
    """Return the latencies of a few thousand events for each load."""
    with broker() as kafka, indexer(kafka) as client:
        return [each for load in (5000, 20_000) for each in freshness_figures(kafka, client, load)]


if __name__ == "__main__":
    main("end to end through Kafka", run)
