"""`POST /query` of both services, by wrk: throughput of 16 connections, and latency of one."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import numpy as np

from benchmarks import bench_http
from benchmarks.peers.engines import BLOCK_SIZE, holding, prompts
from benchmarks.peers.services import KVSIGHT, dynamo, running
from benchmarks.report import Figure, figure

MANY_WORKERS = 1000
WORKERS, PAGES = (8, 64), (8, 64, 512, 1000, 8192)
ROUNDS, SECONDS = 5, 1
CONNECTIONS = 16
_PEER_THREADS = 2
_GOALS = {
    8: ("≥ 2", "≥ 2", "≥ 1.5", "≥ 1.5", "≥ 1.5"),
    64: ("≥ 3", "≥ 3", "≥ 2", "≥ 1.5", "≥ 1.5"),
}
_SCRIPT = """\
local body = io.open("{body}", "rb")
wrk.method, wrk.body = "POST", body:read("*all")
wrk.headers["Content-Type"] = "{content_type}"
done = function(summary, latency)
  local errors = summary.errors
  local failed = errors.status + errors.connect + errors.read + errors.write + errors.timeout
  io.write(string.format("%f %d %d %d\\n", summary.requests / summary.duration * 1e6, failed,
    latency:percentile(50), latency:percentile(99)))
end
"""


class Measured(NamedTuple):
    """Result of one run of wrk."""

    rate: float
    """Requests a second."""
    p50_us: float
    p99_us: float


def measured(service: HTTPConnection, body: bytes, content_type: str, connections: int) -> Measured:
    """Run wrk with one thread for `SECONDS`. Raises RuntimeError if an answer is not 200."""
    with tempfile.TemporaryDirectory() as folder:
        content, script = Path(folder, "body"), Path(folder, "query.lua")
        content.write_bytes(body)
        script.write_text(_SCRIPT.format(body=content, content_type=content_type))
        command = ["wrk", "-t1", f"-c{connections}", f"-d{SECONDS}s", "-s", str(script)]
        url = f"http://{service.host}:{service.port}/query"
        done = subprocess.run([*command, url], check=True, capture_output=True, text=True)
    rate, failed, p50, p99 = map(float, done.stdout.splitlines()[-1].split())
    if failed:
        raise RuntimeError(f"{failed:.0f} requests to {url} failed")
    return Measured(rate, p50, p99)


def run() -> Iterator[Figure]:
    """Yield all figures, ratios first. Both services run at the same time, and take turns."""
    peer = dynamo(_PEER_THREADS)
    if peer is None or shutil.which("wrk") is None:
        return
    for num_workers in WORKERS:
        with ExitStack() as stack:
            services = [stack.enter_context(running(each)) for each in (KVSIGHT, peer)]
            stack.enter_context(holding(services, num_workers))
            yield from _figures(services, num_workers)
    yield _many_workers()


def _many_workers() -> Figure:
    """Measure kvsight alone, with more workers than engines can be simulated here."""
    body = msgspec.json.encode({"model_name": "m", "token_ids": bench_http.prompts()[0][: 64 * BLOCK_SIZE].tolist()})
    with bench_http.server_process(MANY_WORKERS) as url:
        parts = urlsplit(url)
        service = HTTPConnection(parts.hostname or "", parts.port)
        rates = [measured(service, body, "application/json", CONNECTIONS).rate for _ in range(ROUNDS)]
    return figure(f"{MANY_WORKERS:,} workers, 64 pages: kvsight", "req/s", rates, "≥ 5,000")


def _figures(services: list[HTTPConnection], num_workers: int) -> Iterator[Figure]:
    tokens = prompts()[0]
    for pages, goal in zip(PAGES, _GOALS[num_workers], strict=True):
        asked = tokens[: pages * BLOCK_SIZE]
        body = msgspec.json.encode({"model_name": "m", "token_ids": asked})
        row = f"{num_workers} workers, {pages} pages"
        yield from _compared(services, body, row, goal)
        if pages == PAGES[-2]:
            packed: dict[str, Any] = {"model_name": "m", "token_ids": np.array(asked, "<u4").tobytes()}
            yield from _packed(services, body, msgspec.msgpack.encode(packed), row)


def _compared(services: list[HTTPConnection], body: bytes, row: str, goal: str) -> Iterator[Figure]:
    for connections in (CONNECTIONS, 1):
        ours, theirs = _rounds([(each, body, "application/json") for each in services], connections)
        if connections == 1:
            for name in ("p50_us", "p99_us"):
                values = [[getattr(each, name) for each in side] for side in (ours, theirs)]
                label = f"{row}, one connection, {name.partition('_')[0]}"
                yield figure(f"{label}: kvsight : Dynamo", "x", [median(values[0]) / median(values[1])], "≤ 1")
                yield figure(f"{label}: kvsight", "us", values[0])
                yield figure(f"{label}: Dynamo", "us", values[1])
        else:
            yield from _rates(row, [each.rate for each in ours], [each.rate for each in theirs], goal)


def _packed(services: list[HTTPConnection], body: bytes, packed: bytes, row: str) -> Iterator[Figure]:
    runs = [(services[0], packed, "application/msgpack"), (services[1], body, "application/json")]
    ours, theirs = _rounds(runs, CONNECTIONS)
    yield from _rates(f"{row}, packed", [each.rate for each in ours], [each.rate for each in theirs], "≥ 3")


def _rates(row: str, ours: list[float], theirs: list[float], goal: str) -> Iterator[Figure]:
    yield figure(f"{row}: kvsight : Dynamo", "x", [median(ours) / median(theirs)], goal)
    yield figure(f"{row}: kvsight", "req/s", ours)
    yield figure(f"{row}: Dynamo", "req/s", theirs)


def _rounds(runs: list[tuple[HTTPConnection, bytes, str]], connections: int) -> list[list[Measured]]:
    """Return the results of each service, of rounds in which they take turns."""
    results: list[list[Measured]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for result, (service, body, content_type) in zip(results, runs, strict=True):
            result.append(measured(service, body, content_type, connections))
    return results
