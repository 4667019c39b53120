"""`POST /query` of both services: throughput of 16 connections, and latency of one.

wrk asks, except in the last two modes:

    own headers   each request has its own prompt, traceparent and x-request-id, as those of a router have
    varying       the same; in turn, requests have salts or adapters of their own, a routing group, or another form
    (no name)     all requests are equal
    aiohttp       own headers, by aiohttp's client
    half load     own headers, at half of the rate that the service reached; the latency since a request was due
"""

import json
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import numpy as np

from benchmarks import bench_http
from benchmarks.peers.clients import NAME_GAP, aiohttp_rate, paced_us
from benchmarks.peers.engines import BLOCK_SIZE, holding, prompts
from benchmarks.peers.services import KVSIGHT, dynamo, running
from benchmarks.report import Figure, figure, percentile

MANY_WORKERS = 1000
WORKERS, PAGES = (8, 64), (8, 64, 512, 1000, 8192)
ROUNDS, SECONDS = 5, 1
CONNECTIONS = 16
_PEER_THREADS = 2
_GOALS = {
    8: ("≥ 2", "≥ 2", "≥ 1.5", "≥ 1.5", "≥ 1.5"),
    64: ("≥ 3", "≥ 3", "≥ 2", "≥ 1.5", "≥ 1.5"),
}
_OWN_REQUESTS = 1024
_HALF_LOAD_PAGES, _MOST_ADAPTERS = 64, 16
_GOALS_OWN = {8: ("≥ 2", "≥ 2", "≥ 1.6"), 64: ("≥ 3", "≥ 3", "≥ 2")}
_LAG = 256  # requests, so that the answer to one has come before the next step of what it named
_SCRIPT = """\
local requests, steps, number, named, followed = {{}}, {{}}, 0, 0, {{}}
local function parted(text)
  local gap = string.find(text, "{gap}", 1, true)
  return gap and {{string.sub(text, 1, gap - 1), string.sub(text, gap + #"{gap}")}} or {{text}}
end
local function of_name(parts, name)
  return parts[2] and parts[1] .. string.format("{run}%08x", name) .. parts[2] or parts[1]
end
init = function()
  local bodies = io.open("{bodies}", "rb")
  for _, size in ipairs({{{sizes}}}) do
    local headers = {{["Content-Type"] = "{content_type}"}}
    if {has_own_headers} then
      headers["x-request-id"] = string.format("%08x-0000-4000-8000-%012x", #requests, #requests * 7919)
      headers["traceparent"] = string.format("00-%032x-%016x-01", #requests + 1, #requests * 104729 + 1)
    end
    requests[#requests + 1] = parted(wrk.format("POST", nil, headers, bodies:read(size)))
  end
  for method, path in string.gmatch("{steps}", "(%S+) (%S+)") do
    steps[#steps + 1], followed[#followed + 1] = parted(wrk.format(method, path)), 1 -- wrk tries the first request
  end
end
request = function()
  number = number + 1
  local step = number % (#steps + 1)
  if step > 0 and followed[step] + {lag} < (followed[step - 1] or named) then
    followed[step] = followed[step] + 1
    return of_name(steps[step], followed[step])
  end
  named = named + 1
  return of_name(requests[(named - 1) % #requests + 1], named)
end
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


def measured(
    service: HTTPConnection,
    bodies: Sequence[bytes],
    content_type: str,
    connections: int,
    path: str = "/query",
    steps: str = "",
) -> Measured:
    """Run wrk with one thread for `SECONDS`. Raises RuntimeError if an answer is not 200.

    bodies: with several, each request also has headers of its own. steps: methods and paths of the requests that follow
    on each one, with `NAME_GAP` in place of its name.
    """
    with tempfile.TemporaryDirectory() as folder:
        content, script = Path(folder, "bodies"), Path(folder, "query.lua")
        content.write_bytes(b"".join(bodies))
        given = {"bodies": content, "sizes": ",".join(str(len(body)) for body in bodies), "content_type": content_type}
        given |= {
            "steps": steps,
            "lag": _LAG,
            "gap": NAME_GAP,
            "run": secrets.token_hex(4),
            "has_own_headers": str(len(bodies) > 1).lower(),
        }
        script.write_text(_SCRIPT.format(**given))
        command = ["wrk", "-t1", f"-c{connections}", f"-d{SECONDS}s", "-s", str(script)]
        url = f"http://{service.host}:{service.port}{path}"
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
        rates = [measured(service, [body], "application/json", CONNECTIONS).rate for _ in range(ROUNDS)]
    return figure(f"{MANY_WORKERS:,} workers, 64 pages: kvsight", "req/s", rates, "≥ 5,000")


def _figures(services: list[HTTPConnection], num_workers: int) -> Iterator[Figure]:
    tokens = prompts()[0]
    for pages, goal in zip(PAGES, _GOALS_OWN[num_workers], strict=False):
        asked = tokens[: pages * BLOCK_SIZE]
        for mode, bodies in (("own headers", own_bodies(asked)), ("varying", _varying_bodies(asked))):
            ours, theirs = rounds([(each, bodies, "application/json") for each in services], CONNECTIONS)
            rates = [each.rate for each in ours], [each.rate for each in theirs]
            row = f"{num_workers} workers, {pages} pages, {mode}"
            yield from compared_rates(row, *rates, goal if mode == "own headers" else "")
            if mode == "own headers":
                yield from _python_clients(services, bodies, f"{num_workers} workers, {pages} pages", rates)
    for pages, goal in zip(PAGES, _GOALS[num_workers], strict=True):
        asked = tokens[: pages * BLOCK_SIZE]
        body = msgspec.json.encode({"model_name": "m", "token_ids": asked})
        row = f"{num_workers} workers, {pages} pages"
        yield from _compared(services, body, row, goal)
        if pages == PAGES[-2]:
            packed: dict[str, Any] = {"model_name": "m", "token_ids": np.array(asked, "<u4").tobytes()}
            yield from _packed(services, body, msgspec.msgpack.encode(packed), row)


def own_bodies(tokens: list[int], **fields: Any) -> list[bytes]:
    """Return bodies that ask for all pages but the last one, which is different in each. fields: further ones."""
    asked = {"model_name": "m", "token_ids": tokens, **fields}
    own = np.random.default_rng(1).integers(0, 128_000, (_OWN_REQUESTS, BLOCK_SIZE)).tolist()
    return [msgspec.json.encode(asked | {"token_ids": tokens[:-BLOCK_SIZE] + last}) for last in own]


def _varying_bodies(tokens: list[int]) -> list[bytes]:
    bodies = []
    for number, body in enumerate(own_bodies(tokens)):
        query = msgspec.json.decode(body)
        kinds = {"cache_salt": f"user-{number}"}, {"lora_name": f"adapter-{number % _MOST_ADAPTERS}"}
        match number % 4:
            case 0 | 1 as kind:
                bodies.append(msgspec.json.encode(query | kinds[kind]))
            case 2:
                bodies.append(msgspec.json.encode(query | {"routing_group": "default"}))
            case _:
                bodies.append(json.dumps(dict(reversed(query.items()))).encode())
    return bodies


def _python_clients(
    services: list[HTTPConnection], bodies: list[bytes], row: str, rates: tuple[list[float], list[float]]
) -> Iterator[Figure]:
    """rates: of both services, by wrk."""
    by_aiohttp: tuple[list[float], list[float]] = [], []
    for _ in range(ROUNDS):
        for each, service in zip(by_aiohttp, services, strict=True):
            each.append(aiohttp_rate(service, bodies, CONNECTIONS, SECONDS))
    yield from compared_rates(f"{row}, aiohttp", *by_aiohttp, "≥ 1")
    if row.endswith(f" {_HALF_LOAD_PAGES} pages"):
        for name, goal, service, rate in zip(("kvsight", "Dynamo"), ("≤ 1000", ""), services, rates, strict=True):
            runs = paced_rounds_us(service, bodies, median(rate) / 2)
            yield figure(f"{row}, half load: {name}", "us", [percentile(took, 50) for took in runs])
            yield figure(f"{row}, half load, p99: {name}", "us", [percentile(took, 99) for took in runs], goal)


def paced_rounds_us(
    service: HTTPConnection, bodies: Sequence[bytes], rate: float, path: str = "/query"
) -> list[list[float]]:
    """Return how long each answer took in some rounds, see `paced_us`."""
    return [paced_us(service, bodies, CONNECTIONS, SECONDS, rate, path) for _ in range(ROUNDS)]


def _compared(services: list[HTTPConnection], body: bytes, row: str, goal: str) -> Iterator[Figure]:
    for connections in (CONNECTIONS, 1):
        ours, theirs = rounds([(each, [body], "application/json") for each in services], connections)
        if connections == 1:
            for name in ("p50_us", "p99_us"):
                values = [[getattr(each, name) for each in side] for side in (ours, theirs)]
                label = f"{row}, one connection, {name.partition('_')[0]}"
                yield figure(f"{label}: kvsight : Dynamo", "x", [median(values[0]) / median(values[1])], "≤ 1")
                yield figure(f"{label}: kvsight", "us", values[0])
                yield figure(f"{label}: Dynamo", "us", values[1])
        else:
            yield from compared_rates(row, [each.rate for each in ours], [each.rate for each in theirs], goal)


def _packed(services: list[HTTPConnection], body: bytes, packed: bytes, row: str) -> Iterator[Figure]:
    runs = [(services[0], [packed], "application/msgpack"), (services[1], [body], "application/json")]
    ours, theirs = rounds(runs, CONNECTIONS)
    yield from compared_rates(f"{row}, packed", [each.rate for each in ours], [each.rate for each in theirs], "≥ 3")


def compared_rates(row: str, ours: list[float], theirs: list[float], goal: str) -> Iterator[Figure]:
    """Yield the ratio of two series of rates, then both."""
    yield figure(f"{row}: kvsight : Dynamo", "x", [median(ours) / median(theirs)], goal)
    yield figure(f"{row}: kvsight", "req/s", ours)
    yield figure(f"{row}: Dynamo", "req/s", theirs)


def rounds(
    runs: Sequence[tuple[HTTPConnection, list[bytes], str]], connections: int, path: str = "/query", steps: str = ""
) -> list[list[Measured]]:
    """Return the results of each service, of rounds in which they take turns."""
    results: list[list[Measured]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for result, (service, bodies, content_type) in zip(results, runs, strict=True):
            result.append(measured(service, bodies, content_type, connections, path, steps))
    return results
