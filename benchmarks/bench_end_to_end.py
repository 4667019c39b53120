"""From `publish()` to `/query` through a real broker. `python -m benchmarks.bench_end_to_end [--json FILE]`

A publisher in a process of its own sends 5,000 and 20,000 pages/s to Kafka, as an engine does. `kvsight serve` reads
them, and a router queries the newest event over HTTP, every half millisecond, until all its pages are found.
KVSIGHT_KAFKA names the broker; without it, the benchmark starts one.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

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
_WARM_UP = 100
_PUBLISHED = np.dtype([("at", "f8"), ("cost", "f8"), ("hashes", "u8", EVENT_PAGES)])


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


def publish_steadily(kafka: str, model: str, pages_per_s: int) -> None:
    """Publish chains of new pages at a steady rate, and write each as an element of `_PUBLISHED` to stdout."""
    settings = PublisherSettings(model=model, worker="engine-0", block_size=BLOCK_SIZE, kafka=kafka)
    random = np.random.default_rng(1)
    with EventPublisher(settings, KafkaSink(settings)) as publisher, suppress(BrokenPipeError):
        due = time.perf_counter()
        while True:
            hashes = random.integers(1, 2**63, EVENT_PAGES, dtype=np.uint64)
            event = BlockStored(
                hashes.tolist(), None, [], BLOCK_SIZE, None, StorageMedium.GPU, None, hashes.astype("<u8").tobytes()
            )
            published_at = time.perf_counter()
            publisher.publish([event])
            cost = time.perf_counter() - published_at
            os.write(sys.stdout.fileno(), np.array((published_at, cost, hashes), _PUBLISHED).tobytes())
            due += EVENT_PAGES / pages_per_s
            time.sleep(max(0.0, due - time.perf_counter()))


class Load:
    """A process that publishes, for `with`."""

    def __init__(self, kafka: str, model: str, pages_per_s: int) -> None:
        command = [sys.executable, "-m", "benchmarks.bench_end_to_end", "--publish", kafka, model, str(pages_per_s)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        os.set_blocking(self._pipe.fileno(), False)
        self._unread = b""
        self.costs: list[float] = []
        """Seconds of each call of `publish()` so far."""

    def newest(self) -> tuple[float, list[int]] | None:
        """Return the time and the sequence hashes of the newest event, or None if there is none since the last call."""
        self._unread += self._pipe.read() or b""
        num_events = len(self._unread) // _PUBLISHED.itemsize
        if not num_events:
            return None
        events = np.frombuffer(self._unread, _PUBLISHED, num_events)
        self._unread = self._unread[num_events * _PUBLISHED.itemsize :]
        self.costs += events["cost"].tolist()
        return float(events["at"][-1]), events["hashes"][-1].tolist()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.wait()


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
    with Load(kafka, model, pages_per_s) as load:
        until = time.perf_counter() + SECONDS
        while time.perf_counter() < until:
            newest = load.newest()
            if newest is None:
                time.sleep(_QUERY_S)
            else:
                published_at, hashes = newest
                latencies.append(seconds_until_visible(client, model, hashes, published_at) * 1e3)
    latencies = latencies[_WARM_UP:]
    within = 100 * sum(latency <= 50 for latency in latencies) / len(latencies)
    costs = [cost * 1e6 for cost in load.costs[_WARM_UP:]]
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
    if sys.argv[1:2] == ["--publish"]:
        publish_steadily(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main("end to end through Kafka", run)
