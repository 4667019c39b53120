"""Restarts from a snapshot, and what writing one costs queries. `python -m benchmarks.bench_restart [--json FILE]`

A snapshot of 1M pages of 64 workers is in a folder and in Redis. `kvsight serve` is started until `GET /ready`
succeeds and `POST /query` is answered, also without a snapshot, and its memory is read; files are in the page cache and
kernels are compiled. Then a loop asks for prompts without a pause while
snapshots are written: the longest turn of the loop is the longest time that a query waits. CPU time includes that of
threads which do not hold the interpreter, so a turn is at most as long as shown; it does not depend on other programs.
"""

import asyncio
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import psutil
import uvloop

from benchmarks.report import Figure, figure, main
from indexer.namespaces import Namespaces
from indexer.settings import IndexerSettings
from indexer.slices import Slices
from indexer.snapshots.base import FolderStore, SnapshotStore
from indexer.snapshots.image import SnapshotParts, take
from indexer.snapshots.keeper import SnapshotKeeper
from indexer.snapshots.redis import RedisStore
from kv_events.codec import StoredPages
from kv_events.log.event_log import EventLogWriter
from kv_events.streams import StreamId
from kvsight.cli.shared.process import keep_freed_memory, load_kernels
from tests.support.servers.redis_server import RedisServer
from tests.support.waiting import wait_until

NUM_WORKERS, CHAIN_PAGES = 64, 125
RESTARTS, SNAPSHOTS = 5, 10
_SETTINGS, _SLICES = IndexerSettings(), Slices()  # a service makes both at its start


def filled(num_pages: int) -> Namespaces:
    """Return views that hold distinct pages."""
    namespaces, random = Namespaces(_SETTINGS), np.random.default_rng(1)
    views = [namespaces.add_view(StreamId("m", "default", f"w{n}", 0), 16) for n in range(NUM_WORKERS)]
    starts = np.packbits([1] + [0] * (CHAIN_PAGES - 1), bitorder="little")
    for number in range(num_pages // CHAIN_PAGES):
        view, hashes = views[number % NUM_WORKERS], random.integers(1, 2**64, CHAIN_PAGES, dtype=np.uint64)
        chain = StoredPages(0, hashes, hashes, starts, np.zeros(1, np.uint64))
        view.index.store(view.number, chain, 0, CHAIN_PAGES)
    return namespaces


async def _copied(namespaces: Namespaces) -> SnapshotParts:
    parts: SnapshotParts = await _SLICES.run(take(namespaces, {0: 0}, time.time()))
    return parts


async def _save(store: SnapshotStore, namespaces: Namespaces) -> None:
    keeper = SnapshotKeeper(store, _SETTINGS, 0.0)
    await keeper.close(lambda: _copied(namespaces))
    if not keeper.counts.written:
        raise RuntimeError("the snapshot could not be written")


class Start(NamedTuple):
    """What one start took."""

    ready_s: float
    """From the start until the service is ready."""
    cpu_s: float
    """CPU time of its process by then."""
    answer_s: float
    """From the start until it has answered a query."""
    memory_bytes: int
    """Resident memory after that."""


def restarts(name: str, folder: Path, *options: str) -> list[Figure]:
    """Measure several starts. name: of what is loaded."""
    starts = [_restart(folder, *options) for _ in range(RESTARTS)]
    return [
        figure(f"start until ready, {name}", "s", [each.ready_s for each in starts], "<= 3"),
        figure("the same, CPU time", "s", [each.cpu_s for each in starts]),
        figure("start until the first answer to a query", "s", [each.answer_s for each in starts]),
        figure("memory of the process when idle", "MB", [each.memory_bytes / 1e6 for each in starts]),
    ]


def _restart(folder: Path, *options: str) -> Start:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "kvsight", "serve", "--port", str(port), "--event-log-dir", str(folder / "log")]
    began = time.perf_counter()
    process = subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            wait_until(lambda: process.poll() is not None or _is_ready(client), 600, "kvsight serve to be ready")
            if process.returncode is not None:
                raise RuntimeError(f"kvsight serve has ended with {process.returncode}")
            ready_s, used = time.perf_counter() - began, psutil.Process(process.pid).cpu_times()
            client.post("/query", json={"model_name": "m", "token_ids": [1] * 1024})
            answer_s = time.perf_counter() - began
            memory_bytes = psutil.Process(process.pid).memory_info().rss
        return Start(ready_s, sum(used[:4]), answer_s, memory_bytes)
    finally:
        process.send_signal(signal.SIGKILL)  # a last snapshot would differ
        process.wait()


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").is_success
    except httpx.TransportError:
        return False


async def longest_turns(namespaces: Namespaces, run: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Return the longest turn of a loop that asks without a pause while `run` runs: milliseconds, of CPU time and of
    the clock.
    """
    (namespace,) = namespaces
    prompt = namespace.index.live_entries()[:64].astype(np.uint64)
    cpu, clock = [], []

    async def ask() -> None:
        while True:
            began_cpu, began = time.process_time(), time.perf_counter()
            namespace.index.find(prompt)
            await asyncio.sleep(0)
            cpu.append(time.process_time() - began_cpu)
            clock.append(time.perf_counter() - began)

    asking = asyncio.create_task(ask())
    await asyncio.sleep(0.1)
    cpu.clear()
    clock.clear()
    await run()
    asking.cancel()
    return 1e3 * max(cpu), 1e3 * max(clock)


def turns(num_pages: int, store: Callable[[], SnapshotStore], name: str) -> list[Figure]:
    """Measure the longest turns without and with a snapshot."""
    namespaces = filled(num_pages)

    async def measure() -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        await _save(store(), namespaces)
        quiet = [await longest_turns(namespaces, lambda: asyncio.sleep(0.3)) for _ in range(SNAPSHOTS)]
        busy = [await longest_turns(namespaces, lambda: _save(store(), namespaces)) for _ in range(SNAPSHOTS)]
        return quiet, busy

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        quiet, busy = runner.run(measure())
    return [
        figure(f"longest turn of the loop, no snapshot, {name}, CPU time", "ms", [each[0] for each in quiet]),
        figure(f"the same while a snapshot is written, {name}", "ms", [each[0] for each in busy], "<= 5"),
        figure(f"the same by the clock, {name}", "ms", [each[1] for each in busy]),
    ]


def run() -> list[Figure]:
    """Return all figures."""
    keep_freed_memory()  # both as `kvsight serve` does
    load_kernels()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        server = RedisServer(folder)
        server.restart()
        settings = IndexerSettings(redis=server.url)
        with EventLogWriter(folder / "log"):
            pass
        figures = []
        try:
            figures += restarts("nothing to load", folder)
            snapshots: dict[str, tuple[Callable[[], SnapshotStore], list[str]]] = {
                "folder": (lambda: FolderStore(folder / "snapshots"), ["--snapshot-dir", str(folder / "snapshots")]),
                "Redis": (lambda: RedisStore(settings), ["--redis", server.url]),
            }
            million = filled(1_000_000)
            for name, (store, options) in snapshots.items():
                asyncio.run(_save(store(), million))
                figures += restarts(f"1M pages in {name}", folder, *options)
                figures += turns(1_000_000, store, f"1M pages to {name}")
            figures += turns(10_000_000, snapshots["folder"][0], "10M pages to folder")
        finally:
            server.kill()
        return figures


if __name__ == "__main__":
    main("restart", run)
