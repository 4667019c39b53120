"""From `publish()` to `/query` through a real broker. `python -m benchmarks.bench_end_to_end [--json FILE]`

A publisher sends 5,000 pages/s to Kafka, `kvsight serve` reads them in its own process, and a router queries the newest
event over HTTP until all its pages are found. KVSIGHT_KAFKA names the broker; without it, the benchmark starts one.
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

from benchmarks.report import Figure, figure, main
from benchmarks.services import broker
from kv_events.schema import BlockStored, StorageMedium
from publisher import EventPublisher, PublisherSettings
from publisher.sinks.kafka import KafkaSink

PAGES_PER_S, EVENT_PAGES, BLOCK_SIZE = 5000, 50, 16
SECONDS = 30.0
_MODEL = f"bench-{time.time_ns()}"  # the topic may contain older runs


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

    def __init__(self, publisher: EventPublisher) -> None:
        super().__init__(daemon=True)
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
            due += EVENT_PAGES / PAGES_PER_S
            time.sleep(max(0.0, due - time.perf_counter()))


def seconds_until_visible(client: httpx.Client, hashes: list[int], published_at: float) -> float:
    """Query until the whole event is found."""
    body = {"model_name": _MODEL, "seq_hashes": hashes}
    while True:
        answer = client.post("/query_by_hash", json=body).json()
        held = answer.get("instances", {}).get("engine-0", {}).get("gpu", 0)
        if held == len(hashes) * BLOCK_SIZE:
            return time.perf_counter() - published_at


def run() -> list[Figure]:
    """Return the latencies of a few thousand events."""
    latencies: list[float] = []
    with broker() as kafka, indexer(kafka) as client:
        settings = PublisherSettings(model=_MODEL, worker="engine-0", block_size=BLOCK_SIZE, kafka=kafka)
        with EventPublisher(settings, KafkaSink(settings)) as publisher:
            load = Load(publisher)
            load.start()
            asked = 0.0
            until = time.perf_counter() + SECONDS
            while time.perf_counter() < until:
                published_at, hashes = load.newest
                if published_at > asked:
                    asked = published_at
                    latencies.append(seconds_until_visible(client, hashes, published_at) * 1e3)
            load.running = False
            load.join()
    latencies.sort()
    p99 = latencies[int(0.99 * len(latencies))]
    within = 100 * sum(latency <= 50 for latency in latencies) / len(latencies)
    return [
        figure(f"visible in /query at {PAGES_PER_S} pages/s, {len(latencies)} events", "ms", latencies),
        figure("the same, 99th percentile", "ms", [p99], "<= 50"),
        figure("visible within 50 ms", "%", [within], ">= 99"),
        figure(f"publish() of {EVENT_PAGES} pages during this run", "us", [cost * 1e6 for cost in load.costs]),
    ]


if __name__ == "__main__":
    main("end to end through Kafka", run)
