"""Open pages beside an ordinary caller: `python -m benchmarks.bench_page [--json FILE]`

One caller asks for 64 pages, again and again, on one connection. Half of the time, 20 pages are open: one process of
the lowest priority asks for what they ask for, as often as they do. Times with and without them are taken in turns, so
that they are compared with their own moment. The index has 102,400 distinct pages, and 16 workers.

"in the loop" is the longest CPU time of one step of an answer, after which the event loop can turn to others.
"""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Event
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from api.page.fleet import describe_fleet
from api.page.residency import Wanted, describe_residency
from api.service import LiveService
from api.settings import ApiSettings
from benchmarks.bench_hostile import ordinary
from benchmarks.bench_http import Caller, filled_consumer, server_process
from benchmarks.report import Figure, figure, main

_PAGES = 20
_INTERVALS_S = {"/fleet": 2.0, "/residency?limit=300": 5.0, "/funnel": 10.0}
"""Path -> seconds between two requests of a page."""
_ROUNDS, _ROUND_S, _WARM = 12, 2.0, 200


def _open_pages(url: str, start: Event, stop: Event) -> None:
    """Ask for the data of all pages while `start` is set. Runs in a process of its own."""
    os.nice(19)
    asyncio.run(_ask_forever(url, start, stop))


async def _ask_forever(url: str, start: Event, stop: Event) -> None:
    random = np.random.default_rng(1)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(_PAGES):
            tasks.create_task(_follow(url, stop))
            for path, interval_s in _INTERVALS_S.items():
                tasks.create_task(_ask(url, path, interval_s, float(random.random()) * interval_s, start, stop))


async def _follow(url: str, stop: Event) -> None:
    """Listen to changes of states, as each page does."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"GET /events?kind=state HTTP/1.1\r\nhost: bench\r\n\r\n")
    while not stop.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(reader.read(2**16), 1.0)
    writer.close()


async def _ask(url: str, path: str, interval_s: float, first_s: float, start: Event, stop: Event) -> None:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    request = f"GET {path} HTTP/1.1\r\nhost: bench\r\n\r\n".encode()
    await asyncio.sleep(first_s)
    while not stop.is_set():
        if start.is_set():
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"{path}: {head!r}")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        await asyncio.sleep(interval_s)
    writer.close()


@contextmanager
def _pages(url: str) -> Iterator[Event]:
    """Yield the event during which the pages are open."""
    context = multiprocessing.get_context("spawn")
    start, stop = context.Event(), context.Event()
    process = context.Process(target=_open_pages, args=(url, start, stop))
    process.start()
    try:
        yield start
    finally:
        stop.set()
        process.join()


async def _latencies(url: str, start: Event) -> dict[bool, list[float]]:
    """Return the times of queries with and without open pages, in ms."""
    request = ordinary()
    found: dict[bool, list[float]] = {False: [], True: []}
    caller = await Caller.connect(url)
    for number in range(_WARM):
        await caller.ask(request, number)
    for turn in range(2 * _ROUNDS):
        has_pages = turn % 2 == 1
        (start.set if has_pages else start.clear)()
        await asyncio.sleep(0.2)
        end, number = time.perf_counter() + _ROUND_S, 0
        while time.perf_counter() < end:
            found[has_pages].append(1000 * await caller.ask(request, number))
            number += 1
    return found


def _longest_step(steps: Generator[None, None, Any]) -> float:
    """Return the longest CPU time between two pauses of an answer, in ms."""
    longest = 0.0
    while True:
        began = time.thread_time()
        try:
            next(steps)
        except StopIteration:
            return longest
        finally:
            longest = max(longest, 1000 * (time.thread_time() - began))


def _in_the_loop() -> list[Figure]:
    scene = asyncio.run(LiveService(filled_consumer(), ApiSettings()).page_state(None))
    fleet, residency = [], []
    for _ in range(_ROUNDS):
        fleet.append(_longest_step(describe_fleet(scene)))
        residency.append(_longest_step(describe_residency(scene, Wanted(None, None, None, None))))
    return [
        figure("GET /fleet: in the loop", "ms", fleet, "< 1"),
        figure("GET /residency: in the loop", "ms", residency, "< 1"),
    ]


def run() -> list[Figure]:
    """Return all figures."""
    figures = _in_the_loop()
    with server_process() as url, _pages(url) as start:
        found = asyncio.run(_latencies(url, start))
    p99 = {has_pages: float(np.percentile(times, 99)) for has_pages, times in found.items()}
    return [
        *figures,
        figure("POST /query, no page open", "ms", found[False]),
        figure(f"POST /query, {_PAGES} pages open", "ms", found[True]),
        figure("POST /query, no page open, p99", "ms", [p99[False]]),
        figure(f"POST /query, {_PAGES} pages open, p99", "ms", [p99[True]]),
        figure("p99 with pages / without", "", [p99[True] / p99[False]], "<= 1.1"),
    ]


if __name__ == "__main__":
    main("open pages beside a caller", run)
