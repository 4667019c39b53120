"""Requests to other servers, over connections that are kept open."""

from __future__ import annotations

import asyncio
import ssl
from typing import NamedTuple

import aiohttp
from yarl import URL

from kv_events.runtime.tls import connection_reason

_KEEPALIVE_S = 4.0  # servers close idle connections after 5
_CONNECTIONS_PER_HOST = 32


class HttpAnswer(NamedTuple):
    """A whole answer."""

    status: int
    body: bytes


class NoAnswerError(Exception):
    """A server did not answer, or not in time. The text says why."""


class HttpPool:
    """A client of several servers. Belongs to one event loop."""

    def __init__(self, max_answer_bytes: int, tls: ssl.SSLContext | None = None) -> None:
        """tls: trusts the servers' certificates. None: those that the system trusts."""
        self._max_answer_bytes = max_answer_bytes
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None  # the first request opens it

    async def send(
        self, method: str, url: str, deadline_s: float, headers: dict[str, str], body: bytes = b""
    ) -> HttpAnswer:
        """Send a request and receive the whole answer. url: percent-encoded, sent as it is. Raises NoAnswerError."""
        session = self._session = self._session or self._opened()
        try:
            target = URL(url, encoded=True)
            async with (
                asyncio.timeout(deadline_s),
                session.request(method, target, data=body, headers=headers, allow_redirects=False) as answer,
            ):
                return HttpAnswer(answer.status, await self._whole(answer))
        except TimeoutError:
            reason = f"no answer within {deadline_s:g} s"
        except aiohttp.ClientConnectorError as error:
            reason = connection_reason(error.os_error) or str(error)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
        raise NoAnswerError(reason)

    async def _whole(self, answer: aiohttp.ClientResponse) -> bytes:
        """Return the body. Nothing is decompressed: a few bytes could become more than the memory holds."""
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise NoAnswerError("its answer cannot be read: it is compressed")
        body = bytearray()
        async for part in answer.content.iter_any():
            body += part
            if len(body) > self._max_answer_bytes:
                raise NoAnswerError(f"its answer has more than {self._max_answer_bytes} bytes")
        return bytes(body)

    def _opened(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            ssl=self._tls or True, limit=0, limit_per_host=_CONNECTIONS_PER_HOST, keepalive_timeout=_KEEPALIVE_S
        )
        return aiohttp.ClientSession(
            connector=connector,
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(),  # `send` has a deadline for everything
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
