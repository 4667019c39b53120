"""Several processes of one service behind one port: `python -m benchmarks.bench_replicas [--json FILE]`

The views and the requests of `bench_http`, in one process as `kvsight serve` runs it, and in several as with
`--processes N`. The callers are one process that uses a core of its own: on two cores a second process of the service
only takes that core from it, and requests per second do not grow. The CPU time of the service for a request, over all
its processes, tells what each further core adds. Memory is PSS: pages that processes share count once.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from api.app import create_app
from api.replicas.replica import Replica, SharedState
from api.replicas.supervisor import Supervisor
from api.server import listen, reserve, run_server, share, url_of
from api.settings import ApiSettings
from benchmarks.bench_http import Caller, Request, filled_consumer, requests
from benchmarks.report import Figure, figure, main

COUNTS = (1, 2)
CALLERS, PER_CALLER, ROUNDS = 16, 300, 5
_SETTINGS = ApiSettings(port=0)


def _serve(pipe: Connection, count: int) -> None:
    if count == 1:
        bound = listen(_SETTINGS)
        pipe.send(url_of(bound, _SETTINGS))
        run_server(create_app(filled_consumer(), _SETTINGS), _SETTINGS, bound)
        return
    with reserve(_SETTINGS) as reserved, tempfile.TemporaryDirectory() as folder:

        def run(replica: Replica) -> None:
            run_server(
                create_app(filled_consumer(), _SETTINGS, replica=replica),
                _SETTINGS,
                share(reserved, _SETTINGS),
                replica,
            )

        Supervisor(SharedState(count, Path(folder)), run, lambda: pipe.send(url_of(reserved, _SETTINGS))).run()


@contextmanager
def service(count: int) -> Iterator[tuple[str, int]]:
    """Yield the URL of a service with so many processes that all answer, and the id of their parent."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, count))
    process.start()
    try:
        url, seen = ours.recv(), set[str]()
        while len(seen) < count:
            with httpx.Client(base_url=url, timeout=60) as client:
                seen.add(client.get("/ready").headers.get("x-kvsight-process", "0"))
        assert process.pid is not None
        yield url, process.pid
    finally:
        os.kill(process.pid or 0, signal.SIGTERM)
        process.join()


def tree(pid: int) -> list[str]:
    """Return the ids of a process and its children."""
    return [str(pid), *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process and its children have used."""
    fields = [Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split() for each in tree(pid)]
    return sum(int(field[11]) + int(field[12]) for field in fields) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> float:
    """Return the proportional memory of a process and its children."""
    lines = [
        line
        for each in tree(pid)
        for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        if line.startswith("Pss:")
    ]
    return sum(int(line.split()[1]) for line in lines) / 1024


async def measure(url: str, pid: int, request: Request) -> tuple[list[float], list[float]]:
    """Return requests in a second, and microseconds of the service's CPU time for each, of several rounds."""
    callers = [await Caller.connect(url) for _ in range(CALLERS)]

    async def work(each: Caller, first: int) -> None:
        for number in range(first, first + PER_CALLER):
            await each.ask(request, number)

    rates, costs_us = [], []
    for _ in range(ROUNDS + 1):
        began, used = time.perf_counter(), cpu_s(pid)
        await asyncio.gather(*(work(each, i * PER_CALLER) for i, each in enumerate(callers)))
        rates.append(CALLERS * PER_CALLER / (time.perf_counter() - began))
        costs_us.append(1e6 * (cpu_s(pid) - used) / (CALLERS * PER_CALLER))
    return rates[1:], costs_us[1:]


def run() -> list[Figure]:
    """Return all figures."""
    request = requests()[0]
    figures = []
    for count in COUNTS:
        with service(count) as (url, pid):
            name = f"{count} process{'es' if count > 1 else ''}"
            rates, costs_us = asyncio.run(measure(url, pid, request))
            figures.append(figure(f"{name}: {request.name}, {CALLERS} callers", "requests/s", rates))
            figures.append(figure(f"{name}: CPU time of a request", "us", costs_us))
            figures.append(figure(f"{name}: memory of all", "MiB", [memory_mib(pid)]))
    return figures


if __name__ == "__main__":
    main("several processes of one service", run)
