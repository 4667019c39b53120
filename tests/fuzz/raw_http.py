"""The same bytes get the same answers in all ways of the service, over real connections.

Each stream of `raw_requests` is sent to a listener without a fast path, to one with it, and over a connection that has
become direct. What comes back until the connection ends is compared, byte by byte.
"""

import asyncio
import logging
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from starlette.types import Receive, Scope, Send

from api.app import Application, create_app
from api.fast.http_limits import MAX_HEAD_BYTES
from api.server import running_server
from api.service import LiveService
from api.settings import ApiSettings
from indexer.settings import IndexerSettings
from tests.fuzz.raw_requests import USUAL, stream
from tests.rigs.raw_http import TOKENS
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream

NAME = "raw HTTP"
_AT_ONCE = 40
"""Streams at once. Each has three connections."""
_TICK_S = 0.005
_IDLE_TICKS, _PATIENT_IDLE_TICKS = 20, 400
"""A client closes a connection on which it has received nothing for so many ticks of the loop, which may be busy."""
_PAUSE_S = 0.05
"""Pause before each packet of a stream that is sent again, patiently, because its outcomes differed: a request with a
faulty body may be refused, or be answered before its body is read.
"""
_VARIABLE = re.compile(
    rb'content-length: \d+\r\n|date: [^\r]*\r\n|x-request-id: [0-9a-f]{16}\r\n|"age_ms":\d+|"state":"(?:live|stale)"'
    rb'|"stale_reason":"[^"]*"'
)

_REFUSAL = re.compile(rb"HTTP/1.1 4(?:00|31) [^\r]*\r\nconnection: close\r\n.*", re.DOTALL)


class Outcome(NamedTuple):
    """What a client saw."""

    received: bytes
    """Without dates, ages and their like."""
    is_closed: bool
    """Whether the server has closed the connection."""


class Divergence(NamedTuple):
    """A stream with different outcomes."""

    seed: int
    number: int
    packets: list[bytes]
    outcomes: dict[str, Outcome]

    def __str__(self) -> str:
        seen = "".join(f"\n  {way}: {outcome}" for way, outcome in self.outcomes.items())
        return f"stream {self.number} of seed {self.seed}: {self.packets}{seen}"


class Ways:
    """The listeners of one service."""

    def __init__(self, urls: list[str]) -> None:
        """urls: see `ways`."""
        self._ways = dict(zip(("ordinary", "fast path", "direct"), zip(urls, (0, 0, 2), strict=True), strict=True))
        self._clients: set[_Client] = set()

    async def compare(self, seed: int, number: int, *, is_patient: bool = False) -> Divergence | None:
        """Send a stream in all ways. Returns what differs."""
        packets = stream(seed, number)
        sent = (self._send(url, usual, packets, is_patient=is_patient) for url, usual in self._ways.values())
        outcomes = await asyncio.gather(*sent)
        if len({_alike(outcome, packets) for outcome in outcomes}) == 1:
            return None
        return Divergence(seed, number, packets, dict(zip(self._ways, outcomes, strict=True)))

    async def tick(self) -> None:
        """Count idle time, forever."""
        while True:
            await asyncio.sleep(_TICK_S)
            for client in self._clients:
                client.tick()

    async def _send(self, url: str, usual: int, packets: list[bytes], *, is_patient: bool) -> Outcome:
        """Send packets after some usual requests."""
        host, _, port = url.removeprefix("http://").partition(":")
        loop = asyncio.get_running_loop()
        transport, client = await loop.create_connection(_Client, host, int(port))
        self._clients.add(client)
        try:
            for _ in range(usual):
                transport.write(USUAL)
                await client.answer()
            for packet in packets:
                await asyncio.sleep(_PAUSE_S if is_patient else 0)
                if transport.is_closing():
                    break
                transport.write(packet)
                await asyncio.sleep(0)  # the server has read the packet
            return await client.outcome(_PATIENT_IDLE_TICKS if is_patient else _IDLE_TICKS)
        finally:
            self._clients.remove(client)
            transport.abort()


def _alike(outcome: Outcome, packets: list[bytes]) -> Outcome:
    """Return an outcome without the reason of a refusal, if a head may be both too large and invalid."""
    if sum(map(len, packets)) > MAX_HEAD_BYTES and (refusal := _REFUSAL.search(outcome.received)):
        return outcome._replace(received=outcome.received[: refusal.start()])
    return outcome


class _Client(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._news = asyncio.Event()
        self._is_closed = False
        self._ticks = self._most_ticks = 0  # since something was received

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._ticks = 0
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed = True
        self._news.set()

    def tick(self) -> None:
        """Count idle time."""
        self._ticks += 1
        if self._ticks == self._most_ticks:
            self._news.set()

    async def answer(self) -> None:
        """Wait for one answer to `USUAL`, and forget it."""
        while not self._received.endswith(b"}"):
            await self._news.wait()
            self._news.clear()
        self._received.clear()

    async def outcome(self, idle_ticks: int) -> Outcome:
        """Wait for the end of the connection, or an idle time."""
        self._ticks, self._most_ticks = 0, idle_ticks
        while not self._is_closed and self._ticks < idle_ticks:
            self._news.clear()
            await self._news.wait()
        return Outcome(_VARIABLE.sub(b"", self._received), self._is_closed)


@asynccontextmanager
async def ways() -> AsyncIterator[Ways]:
    """Run a service with three listeners, two of them with a fast path, as each accepts one client at a time."""
    fed = HandFed(IndexerSettings(max_pages=2**18, worker_ttl_s=1e6, forget_after_s=1e6))
    settings = ApiSettings(port=0, max_connections=10 * _AT_ONCE, tokenize_url="http://127.0.0.1:9")
    app = create_app(LiveService(fed.consumer, settings))
    apps: list[Any] = [_Beside(app), app, _BesideWithFastPath(app)]
    async with AsyncExitStack() as listeners:
        urls = [await listeners.enter_async_context(running_server(each, settings)) for each in apps]
        await fed.hold(Stream("1"), TOKENS)
        await fed.hold(Stream("2", dp_rank=1), TOKENS[:8])
        yield Ways(urls)


class _Beside:
    """The same application for another server, which does not start it and knows no fast path."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self.service = app.service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        for event in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{event}.complete"})


class _BesideWithFastPath(_Beside, Application):
    """The same with the fast path."""


async def compare_many(seed: int, go_on: Callable[[int], bool]) -> tuple[int, list[Divergence]]:
    """Compare streams while `go_on`, which gets their number, is true. Returns how many there were, and what differs.

    Streams whose outcomes differ are sent again in the end, one at a time.
    """
    number, suspects, differing = 0, list[int](), list[Divergence]()
    async with ways() as found:
        ticking = asyncio.create_task(found.tick())

        async def work() -> None:
            nonlocal number
            while go_on(number):
                number += 1
                own = number
                if await found.compare(seed, own) is not None:
                    suspects.append(own)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(_AT_ONCE):
                tasks.create_task(work())
        for suspect in suspects:
            if (divergence := await found.compare(seed, suspect, is_patient=True)) is not None:
                differing.append(divergence)
        ticking.cancel()
    return number, differing


def run_raw_http(seconds: float, last_input: Path) -> None:
    """Compare new streams for some time. Ends the process if any of them differ; they are in the file then."""
    logging.disable(logging.WARNING)  # refused requests
    began, seed = time.monotonic(), os.getpid()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        number, differing = runner.run(compare_many(seed, lambda _: time.monotonic() - began < seconds))
    print(f"{NAME}: {number} streams of seed {seed}, {len(differing)} differ", flush=True)
    if differing:
        last_input.write_text("\n".join(map(str, differing)))
        sys.exit(1)
