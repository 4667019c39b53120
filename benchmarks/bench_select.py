"""The selection service against Dynamo's: `python -m benchmarks.bench_select [--json FILE]`

Simulated engines hold the prompts, each service reads them itself, and wrk asks over 16 connections. Each request has
its own last page, traceparent and x-request-id. Rows with `reserve` book each choice under a name that the caller
gives, as the routers of Ray and Dynamo do. No reservation is released: Dynamo's book grows, and kvsight's reservations,
of which there can be 131,072, expire after a second. In rows with `life`, which come first, each request is followed by
one that its prefill is complete, and by its release. kvsight runs twice, alone and with Kafka: a bridge reads its
engines then, and each reservation becomes a record. The services run at the same time, and take turns. Before the first
row, kvsight books for ten seconds: a broker compiles its code while it runs, and takes three times as long for a record
until then. Latencies are measured twice: at half of what each service reached, and at one rate for all.
"""

import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from http.client import HTTPConnection
from statistics import median

import msgspec

from benchmarks.peers.clients import NAME_GAP
from benchmarks.peers.engines import BLOCK_SIZE, PAGES, holding, prompts, register
from benchmarks.peers.queries import (
    CONNECTIONS,
    ROUNDS,
    SECONDS,
    compared_rates,
    measured,
    own_bodies,
    paced_rounds_us,
    rounds,
)
from benchmarks.peers.services import KVSIGHT, Service, cpu_seconds, dynamo, posted, running
from benchmarks.report import Figure, figure, main, percentile
from benchmarks.services import broker

WORKERS, ASKED_PAGES, HALF_LOAD_PAGES = (8, 64), (8, 64, 512), 64
EQUAL_RATE = 8000.0
_WARM_UPS = 10
_PEER_THREADS = 2
_RESERVE = "/select_and_reserve"
_LIFE = f"POST /reservations/{NAME_GAP}/prefill_complete DELETE /reservations/{NAME_GAP}"
_KVSIGHT = KVSIGHT._replace(command=[*KVSIGHT.command, "--reservation-ttl-s", "1"])


def _peer() -> Service | None:
    indexer = dynamo(_PEER_THREADS)
    command = ["-m", "dynamo.select_service", "--port", "{port}", "--threads", str(_PEER_THREADS)]
    return None if indexer is None else indexer._replace(command=command)


def _add(service: HTTPConnection, worker: int, endpoint: str) -> None:
    try:
        register(service, worker, endpoint)
    except RuntimeError:  # Dynamo's selection service has another path
        body = {"worker_id": worker, "model_name": "m", "block_size": BLOCK_SIZE, "endpoint": f"http://w-{worker}"}
        posted(service, "/workers", msgspec.json.encode(body | {"kv_events_endpoints": {"0": endpoint}}))


class _WithBridge:
    """Makes a service with Kafka read its engines, by a bridge that is started with the last one of them."""

    def __init__(self, kafka: str, num_workers: int, stack: ExitStack) -> None:
        self._command = [sys.executable, "-m", "kvsight", "bridge", "--kafka", kafka, "--model", "m"]
        self._num_missing = num_workers
        self._stack = stack

    def add(self, worker: int, endpoint: str) -> None:
        self._command += ["--engine", f"{worker}={endpoint}"]
        self._num_missing -= 1
        if not self._num_missing:
            self._stack.callback(subprocess.Popen(self._command, stdout=subprocess.DEVNULL).kill)


def _is_filled(service: HTTPConnection, num_workers: int) -> bool:
    body = msgspec.json.encode({"model_name": "m", "token_ids": prompts()[-1]})
    try:
        found = posted(service, "/overlap_scores", body)
    except RuntimeError:
        return False  # no event has come through Kafka yet
    return [each["device_blocks"] for each in found["workers"]] == [PAGES] * num_workers


def run() -> list[Figure]:
    """Return all figures, ratios first."""
    return list(_run())


def _run() -> Iterator[Figure]:
    peer = _peer()
    if peer is None or shutil.which("wrk") is None:
        sys.exit("this needs wrk, and pip must be able to install ai-dynamo-runtime")
    for num_workers in WORKERS:
        with ExitStack() as stack:
            kafka = stack.enter_context(broker())
            with_kafka = _KVSIGHT._replace(command=[*_KVSIGHT.command, "--kafka", kafka])
            services = [stack.enter_context(running(each)) for each in (_KVSIGHT, with_kafka, peer)]
            bridge = _WithBridge(kafka, num_workers, stack)

            def add(service: HTTPConnection, worker: int, endpoint: str) -> None:
                bridge.add(worker, endpoint) if service is services[1] else _add(service, worker, endpoint)  # noqa: B023

            stack.enter_context(holding(services, num_workers, add, _is_filled))
            named = own_bodies(prompts()[0][: HALF_LOAD_PAGES * BLOCK_SIZE], selection_id=NAME_GAP)
            for _ in range(_WARM_UPS):
                measured(services[1], named, "application/json", CONNECTIONS, _RESERVE)
            yield from _figures(services, num_workers)


def _figures(services: list[HTTPConnection], num_workers: int) -> Iterator[Figure]:
    asked = {pages: prompts()[0][: pages * BLOCK_SIZE] for pages in ASKED_PAGES}
    named = {pages: own_bodies(tokens, selection_id=NAME_GAP) for pages, tokens in asked.items()}
    for pages, bodies in named.items():  # first, because they leave nothing in the books
        yield from _compared(services, f"{num_workers} workers, {pages} pages, life", bodies, _RESERVE, _LIFE)
    for name, service in zip(("kvsight", "kvsight with Kafka"), services, strict=False):
        row = f"{num_workers} workers, {ASKED_PAGES[0]} pages, {_RESERVE[1:]}, CPU time: {name}"
        yield figure(row, "us", _cpu_us(service, named[ASKED_PAGES[0]]))
    for pages, tokens in asked.items():
        for path, bodies in (("/select", own_bodies(tokens)), (_RESERVE, named[pages])):
            row = f"{num_workers} workers, {pages} pages, {path[1:]}"
            all_rates = yield from _compared(services, row, bodies, path)
            if pages == HALF_LOAD_PAGES:
                half = [median(each) / 2 for each in all_rates]
                yield from _latencies(services, f"{row}, half load", bodies, path, half)
                yield from _latencies(services, f"{row}, {EQUAL_RATE:,.0f} requests/s", bodies, path, [EQUAL_RATE] * 3)


def _compared(
    services: list[HTTPConnection], row: str, bodies: list[bytes], path: str, steps: str = ""
) -> Generator[Figure, None, Sequence[list[float]]]:
    """Yield the figures of one kind of request. Returns the requests a second of each service."""
    runs = [(each, bodies, "application/json") for each in services]
    ours, durable, theirs = ([each.rate for each in side] for side in rounds(runs, CONNECTIONS, path, steps))
    yield from compared_rates(row, ours, theirs, "≥ 2")
    yield from list(compared_rates(f"{row}, with Kafka", durable, theirs, "≥ 2"))[:2]
    return ours, durable, theirs


def _latencies(
    services: list[HTTPConnection], row: str, bodies: list[bytes], path: str, rates: list[float]
) -> Iterator[Figure]:
    """rates: requests a second that each service gets."""
    for name, service, rate in zip(("kvsight", "kvsight with Kafka", "Dynamo"), services, rates, strict=True):
        took = paced_rounds_us(service, bodies, rate, path)
        for percent, goal in ((50, ""), (99, "≤ 2000")):
            values = [percentile(each, percent) for each in took]
            yield figure(f"{row}, p{percent}: {name}", "us", values, goal)


def _cpu_us(service: HTTPConnection, bodies: list[bytes]) -> list[float]:
    """Return the CPU time of a service for each reservation, in several runs."""
    found = []
    for _ in range(ROUNDS):
        before = cpu_seconds(service)
        num_requests = SECONDS * measured(service, bodies, "application/json", CONNECTIONS, _RESERVE).rate
        found.append((cpu_seconds(service) - before) / num_requests * 1e6)
    return found


if __name__ == "__main__":
    main("the selection service", run)
