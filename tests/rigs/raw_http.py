"""Connections to a served API byte by byte, and requests as bytes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import uvloop

from api.fast.fast_path import FastPath
from api.fast.heads import Head
from indexer.settings import IndexerSettings
from tests.rigs.api import listening
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream

TOKENS = list(range(1, 17))
_VARIABLE = re.compile(rb'"age_ms":\d+|"state":"(?:live|stale)"')  # a slow test has no heartbeats


class Line:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, url: str, source: str = "127.0.0.1") -> Line:
        host, _, port = url.removeprefix("http://").partition(":")
        return cls(*await asyncio.open_connection(host, int(port), local_addr=(source, 0)))

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):  # the server may have closed it before it read everything
            await self.writer.wait_closed()

    async def is_at_end(self) -> bool:
        """Return whether the server closes the connection without another byte."""
        with suppress(ConnectionResetError):  # it had not read everything
            return await self._reader.read() == b""
        return True

    async def begin(self) -> bytes:
        """Return the head of an answer."""
        return await self._reader.readuntil(b"\r\n\r\n")

    async def answer(self) -> tuple[bytes, bytes, bytes]:
        """Return status line, headers without the date, and the body without ages and states."""
        head = await self.begin()
        if head.startswith(b"HTTP/1.1 100"):
            head = await self.begin()
        status, *headers = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
        length = next(int(line.partition(b":")[2]) for line in headers if line.startswith(b"content-length:"))
        body = _VARIABLE.sub(b'""', await self._reader.readexactly(length))
        shown = sorted(line for line in headers if not line.startswith((b"date:", b"content-length:")))
        return status, b"\n".join(shown), body

    async def ask(self, data: bytes, *, pieces: int = 1) -> tuple[bytes, bytes, bytes]:
        """Send a request in some pieces, each in a packet of its own, and return the answer."""
        size = -(-len(data) // pieces)
        for start in range(0, len(data), size):
            self.writer.write(data[start : start + size])
            await self.writer.drain()
            await asyncio.sleep(0)
        return await self.answer()


@contextmanager
def heads_taken() -> Iterator[list[Head]]:
    """Yield the heads of requests that reach the fast path in Python, because no kernel answers them."""
    taken: list[Head] = []
    answer = FastPath.answer

    def noted(fast_path: FastPath, head: Head, data: bytes, start: int) -> bytes | None:
        taken.append(head)
        return answer(fast_path, head, data, start)

    with patch.object(FastPath, "answer", noted):
        yield taken


Connect = Callable[..., Coroutine[Any, Any, Line]]
"""Opens a connection, from an address of this machine."""


@asynccontextmanager
async def connecting(url: str) -> AsyncIterator[Connect]:
    """Yield a function that connects to a server. Close its connections at the end."""
    async with AsyncExitStack() as lines:

        async def connect(source: str = "127.0.0.1") -> Line:
            line = await Line.connect(url, source)
            lines.push_async_callback(line.close)
            return line

        yield connect


@asynccontextmanager
async def a_service(*, num_more: int = 0, **settings: Any) -> AsyncIterator[Connect]:
    """Run a service of three workers, and of more that hold nothing else. Yields a function that connects."""
    fed = HandFed(IndexerSettings(max_pages=2**18, worker_ttl_s=3600, forget_after_s=3600))
    async with listening(fed.consumer, **settings) as url, connecting(url) as connect:
        await fed.hold(Stream("1"), TOKENS)
        await fed.hold(Stream("2", dp_rank=1), TOKENS[:8])
        await fed.hold(Stream("3"), TOKENS, {0: range(1), 1: range(1, 3)})
        for number in range(num_more):
            await fed.hold(Stream(f"more-{number}"), TOKENS)
        yield connect


async def is_listening(url: str) -> bool:
    try:
        await (await Line.connect(url)).close()
    except ConnectionError:
        return False
    return True


def run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main, 200))


def request(body: bytes, path: str = "/query", content_type: str = "application/json", extra: bytes = b"") -> bytes:
    known = f"Host: h\r\nX-Request-ID: r\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}"
    head = f"POST {path} HTTP/1.1\r\n{known}\r\n"
    return head.encode() + extra + b"\r\n" + body


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model_name": "m", **fields}).encode()


QUERY = body_of(token_ids=TOKENS)


HEALTH = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
CHUNKED = b"POST /query HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


def in_chunks(*parts: bytes) -> bytes:
    """Return a request whose body comes in chunks."""
    return CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def every_kind() -> list[bytes]:
    """Return requests that take different ways through the server."""
    return [
        request(QUERY),
        HEALTH,
        request(body_of(token_ids=[1.5])),
        request(QUERY, "/query?"),
        request(body_of(token_ids=list(range(1000)))),
        request(b"0\r\n\r\n", extra=b"Transfer-Encoding: chunked\r\n").replace(b"Content-Length: 5\r\n", b""),
    ]


def prompts() -> list[bytes]:
    """Return requests that differ only in their numbers and their length."""
    return [request(body_of(token_ids=TOKENS[:end] + [end] * (end % 3))) for end in range(4, 17)]
