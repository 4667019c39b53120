"""Slow and hostile clients beside an ordinary one: `python -m benchmarks.bench_hostile [--json FILE]`

One caller asks for 64 pages, again and again, on one connection. Each row has another client beside it, in a process of
its own with the lowest priority. The quiet figure is measured before each row, so that rows are compared with their own
moment.
"""

import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Event
from urllib.parse import urlsplit

import msgspec
import numpy as np

from benchmarks.bench_http import PAGE_TOKENS, PROMPTS, Caller, Request, prompts, server_process
from benchmarks.report import Figure, figure, main

_PAGES, _SECONDS, _WARM = 64, 2.0, 200
_SLOW_CLIENTS = 200
_LARGE_BODY = 32 * 2**20
_HEAD = b"POST /query HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"

_Stranger = Callable[[str, int, Event], None]


def ordinary() -> Request:
    """Return the request of the ordinary caller."""
    asked = [tokens[: _PAGES * PAGE_TOKENS].tolist() for tokens in prompts()]
    bodies = [msgspec.json.encode({"model_name": "m", "token_ids": tokens}) for tokens in asked]
    return Request("64 pages", "/query", "application/json", bodies, "")


# --- strangers, each in a process of its own ---


def _one_byte_a_second(host: str, port: int, stop: Event) -> None:
    """Many connections that send a request byte by byte."""
    request = _HEAD % 100_000 + b"["
    lines = [socket.create_connection((host, port)) for _ in range(_SLOW_CLIENTS)]
    for byte in request:
        for line in lines:
            line.send(bytes([byte]))
        if stop.wait(1.0):
            return


def _large_bodies(host: str, port: int, stop: Event) -> None:
    """Bodies of 32 MiB, one after the other."""
    tokens = b",".join(b"%d" % token for token in np.random.default_rng(1).integers(0, 128_000, 4 * 2**20))
    body = (b'{"model_name":"m","token_ids":[' + tokens)[: _LARGE_BODY - 4].rpartition(b",")[0] + b"]}"
    head = b"POST /query HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
        body
    )
    with socket.create_connection((host, port)) as line:
        while not stop.is_set():
            line.sendall(head + body)
            if not line.recv(2**20).startswith(b"HTTP/1.1 200 "):
                raise RuntimeError("a large body was refused")


def _endless_headers(host: str, port: int, stop: Event) -> None:
    """A million bytes of headers, on one connection after the other."""
    headers = b"".join(b"x-%d: %s\r\n" % (i, b"y" * 90) for i in range(10_000))
    while not stop.is_set():
        _send(host, port, b"POST /query HTTP/1.1\r\nhost: x\r\n" + headers)


def _pipelined_garbage(host: str, port: int, stop: Event) -> None:
    """Requests without end in one packet after the other, of which most are no requests."""
    garbage = (_HEAD % 9 + b'{"x":[1]}') * 50 + bytes(range(256)) * 20
    while not stop.is_set():
        _send(host, port, garbage)


def _send(host: str, port: int, data: bytes) -> None:
    """Send as much as the server takes, and read until it closes the connection."""
    with socket.create_connection((host, port), timeout=5.0) as line, suppress(OSError):  # the server closes it
        line.sendall(data)
        line.shutdown(socket.SHUT_WR)
        while line.recv(2**16):
            pass


STRANGERS: dict[str, _Stranger] = {
    f"{_SLOW_CLIENTS} clients that send one byte a second": _one_byte_a_second,
    "bodies of 32 MiB": _large_bodies,
    "a million header bytes": _endless_headers,
    "pipelined garbage": _pipelined_garbage,
}


def _behave(stranger: str, host: str, port: int, begun: Event, stop: Event) -> None:
    os.nice(19)
    begun.set()
    STRANGERS[stranger](host, port, stop)


@contextmanager
def _beside(stranger: str, url: str) -> Iterator[None]:
    parts, spawn = urlsplit(url), multiprocessing.get_context("spawn")
    begun, stop = spawn.Event(), spawn.Event()
    process = spawn.Process(target=_behave, args=(stranger, parts.hostname, parts.port, begun, stop))
    process.start()
    begun.wait()
    try:
        yield
    finally:
        stop.set()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{stranger}: the client failed")


# --- the ordinary caller ---


async def _milliseconds(url: str, request: Request) -> list[float]:
    caller = await Caller.connect(url)
    for number in range(_WARM):
        await caller.ask(request, number)
    seconds: list[float] = []
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        seconds.append(await caller.ask(request, len(seconds) % PROMPTS))
    return [1000 * s for s in seconds]


def _rows(url: str, stranger: str, request: Request) -> list[Figure]:
    quiet = asyncio.run(_milliseconds(url, request))
    with _beside(stranger, url):
        disturbed = asyncio.run(_milliseconds(url, request))
    p99_quiet, p99 = np.percentile(quiet, 99), np.percentile(disturbed, 99)
    return [
        figure(f"{stranger}: an ordinary query", "ms", disturbed),
        figure(f"{stranger}: its p99", "ms", [float(p99)]),
        figure(f"{stranger}: its p99, to the quiet one", "x", [float(p99 / p99_quiet)], "<= 2"),
    ]


def run() -> list[Figure]:
    """Return all figures."""
    request = ordinary()
    with server_process() as url:
        return [row for stranger in STRANGERS for row in _rows(url, stranger, request)]


if __name__ == "__main__":
    main("slow and hostile clients", run)
