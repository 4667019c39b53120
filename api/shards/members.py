"""Connections to the other members of a group, which are kept open."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import NamedTuple

import aiohttp
import msgspec
from yarl import URL

from api.shards.wire import PATH, ShardReply, decode_reply
from indexer.shards.assignment import Member
from kv_events.runtime.tls import connection_reason

_FORWARD_DEADLINES = 2
"""Deadlines that a forwarded request may take: lists and pages are larger than answers to questions."""
_KEEPALIVE_S = 4.0  # the server closes idle connections after 5
_CONNECTIONS_PER_MEMBER = 32
_MAX_ANSWER_BYTES = 256 * 2**20
_OK = 200


class MemberAnswer(NamedTuple):
    """An answer of a member."""

    status: int
    body: bytes


class MemberError(Exception):
    """A member did not answer. The text says why."""


class MemberClient:
    """One other member. Without an answer it is asked again only by `ScatterGather`, in the background."""

    def __init__(self, member: Member, connections: Connections, deadline_s: float) -> None:
        self.member = member
        self.failure = ""
        """Why the newest attempt failed, or ""."""
        self._connections = connections
        self._deadline_s = deadline_s

    async def ask(self, body: bytes) -> ShardReply:
        """Send a question. Raises MemberError, also if the answer is not there in time."""
        self.failure = ""
        try:
            answer = await self._connections.ask(self.member.url + PATH, body, self._deadline_s)
            told: ShardReply = decode_reply(answer.body) if answer.status == _OK else _refused(answer)
        except MemberError as error:
            self.failure = str(error)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.failure = "its answer cannot be read"
        else:
            if told.member == self.member.id:
                return told
            self.failure = "another service answers at its address"
        raise MemberError(self.failure)

    async def forward(self, method: str, target: str, headers: dict[str, str]) -> MemberAnswer | MemberError:
        """Send another request, without a body. Returns the error if there is no answer.

        target: path and query, percent-encoded. headers: of the request, which has no token but theirs.
        """
        deadline_s = _FORWARD_DEADLINES * self._deadline_s
        try:
            return await self._connections.send(method, self.member.url + target, deadline_s, headers)
        except MemberError as error:
            return error


def _refused(answer: MemberAnswer) -> ShardReply:
    raise MemberError(f"it answers with status {answer.status}")


class Connections:
    """Open connections to all members. Belongs to one event loop, in which the first request opens the pool."""

    def __init__(
        self,
        token: str | None,
        tls: ssl.SSLContext | None,
        *,
        serves_tls: bool = False,
        max_answer_bytes: int = _MAX_ANSWER_BYTES,
    ) -> None:
        """token: sent with each question. tls: trusts the members' certificates; None: as the system does.

        serves_tls: this member has TLS itself, so no token is sent to an address without it.
        """
        self._serves_tls = serves_tls
        self._own_headers = {"Content-Type": "application/msgpack"}
        if token is not None:
            self._own_headers["Authorization"] = f"Bearer {token}"
        self._tls = tls
        self._max_answer_bytes = max_answer_bytes
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, url: str, body: bytes, deadline_s: float) -> MemberAnswer:
        """Send a question with this member's own token. Raises MemberError."""
        return await self.send("POST", url, deadline_s, self._own_headers, body)

    async def send(
        self, method: str, url: str, deadline_s: float, headers: dict[str, str], body: bytes = b""
    ) -> MemberAnswer:
        """Send a request and receive the whole answer. url: percent-encoded, sent as it is. Raises MemberError."""
        if self._serves_tls and "Authorization" in headers and not url.startswith("https://"):
            raise MemberError("its address is without TLS, so it gets no token")
        session = self._session = self._session or self._opened()
        try:
            target = URL(url, encoded=True)
            async with (
                asyncio.timeout(deadline_s),
                session.request(method, target, data=body, headers=headers, allow_redirects=False) as answer,
            ):
                return MemberAnswer(answer.status, await self._whole(answer))
        except TimeoutError:
            reason = f"no answer within {deadline_s:g} s"
        except aiohttp.ClientConnectorError as error:
            reason = connection_reason(error.os_error) or str(error)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
        raise MemberError(reason)

    async def _whole(self, answer: aiohttp.ClientResponse) -> bytes:
        """Return the body. Nothing is decompressed: a few bytes could become more than the memory holds."""
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise MemberError("its answer cannot be read: it is compressed")
        body = bytearray()
        async for part in answer.content.iter_any():
            body += part
            if len(body) > self._max_answer_bytes:
                raise MemberError(f"its answer has more than {self._max_answer_bytes} bytes")
        return bytes(body)

    def _opened(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            ssl=self._tls or True, limit=0, limit_per_host=_CONNECTIONS_PER_MEMBER, keepalive_timeout=_KEEPALIVE_S
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


class Members:
    """All other members."""

    def __init__(self, own_id: str, connections: Connections, deadline_s: float) -> None:
        self._own_id = own_id
        self._connections = connections
        self._deadline_s = deadline_s
        self._peers: dict[str, MemberClient] = {}

    def of(self, members: Iterable[Member]) -> list[MemberClient]:
        """Return the connections to members, without this process itself."""
        found = {}
        for member in members:
            if member.id != self._own_id:
                known = self._peers.get(member.id)
                found[member.id] = known or MemberClient(member, self._connections, self._deadline_s)
        self._peers = found
        return list(found.values())

    async def close(self) -> None:
        """Close all connections."""
        await self._connections.close()
