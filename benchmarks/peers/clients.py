"""Clients of `POST /query` in Python: aiohttp's as fast as it can, and one that sends at a fixed rate."""

import asyncio
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from http.client import HTTPConnection
from itertools import count, cycle

import aiohttp
import uvloop

NAME_GAP = "name-of-a-call--"
"""Clients put a name of its own, of 16 characters, in its place in each request."""
_JSON = {"Content-Type": "application/json"}


def own_lines(number: int) -> dict[str, str]:
    """Return header lines that each request of a router has for itself."""
    return {
        "x-request-id": f"{number:08x}-0000-4000-8000-{number * 7919:012x}",
        "traceparent": f"00-{number + 1:032x}-{number * 104729 + 1:016x}-01",
    }


def aiohttp_rate(service: HTTPConnection, bodies: Sequence[bytes], connections: int, seconds: float) -> float:
    """Return the requests a second of aiohttp's client, with headers of their own."""
    requests = cycle([(body, _JSON | own_lines(number)) for number, body in enumerate(bodies)])
    url = f"http://{service.host}:{service.port}/query"

    async def ask(session: aiohttp.ClientSession, until: float) -> int:
        count = 0
        while time.perf_counter() < until:
            body, headers = next(requests)
            async with session.post(url, data=body, headers=headers) as answer:
                answer.raise_for_status()
                await answer.read()
            count += 1
        return count

    async def ask_all() -> float:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=connections)) as session:
            began = time.perf_counter()
            counts = await asyncio.gather(*(ask(session, began + seconds) for _ in range(connections)))
            return sum(counts) / (time.perf_counter() - began)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(ask_all())


def paced_us(
    service: HTTPConnection,
    bodies: Sequence[bytes],
    connections: int,
    seconds: float,
    rate: float,
    path: str = "/query",
) -> list[float]:
    """Send requests at a fixed rate, and return how long each answer took since its request was due, in us.

    A request that is due while no connection is free waits for one. Raises RuntimeError for an answer that is not 200.
    """
    requests = cycle([_request(service, path, body, number) for number, body in enumerate(bodies)])
    names, gap = (f"{secrets.token_hex(4)}{number:08x}".encode() for number in count()), NAME_GAP.encode()
    lines = {line.fileno(): line for line in (_line(service) for _ in range(connections))}
    free, late = deque(lines), deque[float]()
    due_at, received, took = dict[int, float](), dict.fromkeys(lines, b""), list[float]()
    due, end = time.perf_counter(), time.perf_counter() + seconds
    while due < end or len(free) < connections:
        while due < min(end, time.perf_counter()):
            late.append(due)
            due += 1 / rate
        while late and free:
            line = free.popleft()
            due_at[line] = late.popleft()
            lines[line].sendall(next(requests).replace(gap, next(names)))
        wait_s = max(0.0, due - time.perf_counter())
        for line in select.select(lines, (), (), wait_s)[0]:  # epoll waits for whole milliseconds
            received[line] += lines[line].recv(2**16)
            if _is_complete(received[line]):
                took.append((time.perf_counter() - due_at[line]) * 1e6)
                received[line] = b""
                free.append(line)
    for each in lines.values():
        each.close()
    return took


def _line(service: HTTPConnection) -> socket.socket:
    line = socket.create_connection((service.host, service.port or 0))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


def _request(service: HTTPConnection, path: str, body: bytes, number: int) -> bytes:
    headers = {"Host": f"{service.host}:{service.port}", "Content-Length": str(len(body))} | _JSON | own_lines(number)
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def _is_complete(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    if end and not head.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"{head!r}")
    if b"transfer-encoding: chunked" in head.lower():
        return body.endswith(b"0\r\n\r\n")
    return bool(end) and len(body) == int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
