"""Connections to the other members of a group, which are kept open."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from http import HTTPStatus
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


class MemberAnswer(NamedTuple):
    """An answer of a member."""

    status: int
    body: bytes


class MemberError(Exception):
    """A member did not answer. The text says why."""


class MemberClient:
    """One other member. Without an answer it is asked again only by `ScatterGather`, in the background."""

    def __init__(self, member: Member, members: Members) -> None:
        self.member = member
        self.failure = ""
        """Why the newest attempt failed, or ""."""
        self._members = members

    async def ask(self, body: bytes) -> ShardReply:
        """Send a question with this member's own token. Raises MemberError, also if there is no answer in time."""
        members, self.failure = self._members, ""
        try:
            answer = await members.send("POST", self.member.url + PATH, members.deadline_s, members.own_headers, body)
            told: ShardReply | None = decode_reply(answer.body) if answer.status == HTTPStatus.OK else None
        except MemberError as error:
            self.failure = str(error)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.failure = "its answer cannot be read"
        else:
            if told is None:
                self.failure = f"it answers with status {answer.status}"
            elif told.member == self.member.id:
                return told
            else:
                self.failure = "another service answers at its address"
        raise MemberError(self.failure)

    async def forward(self, method: str, target: str, headers: dict[str, str]) -> MemberAnswer | MemberError:
        """Send another request, without a body. Returns the error if there is no answer.

        target: path and query, percent-encoded. headers: of the request, which has no token but theirs.
        """
        deadline_s = _FORWARD_DEADLINES * self._members.deadline_s
        try:
            return await self._members.send(method, self.member.url + target, deadline_s, headers)
        except MemberError as error:
            return error


class Members:
    """All other members, over one pool of connections. Belongs to one event loop."""

    def __init__(
        self,
        own_id: str,
        deadline_s: float,
        token: str | None,
        tls: ssl.SSLContext | None = None,
        *,
        serves_tls: bool = False,
        max_answer_bytes: int = _MAX_ANSWER_BYTES,
    ) -> None:
        """token: sent with each question. tls: trusts the members' certificates; None: as the system does.

        serves_tls: this member has TLS itself, so no token is sent to an address without it.
        """
        self.deadline_s = deadline_s
        self.own_headers = {"Content-Type": "application/msgpack"}
        if token is not None:
            self.own_headers["Authorization"] = f"Bearer {token}"
        self._own_id = own_id
        self._tls = tls
        self._serves_tls = serves_tls
        self._max_answer_bytes = max_answer_bytes
        self._clients: dict[str, MemberClient] = {}
        self._session: aiohttp.ClientSession | None = None  # the first request opens it

    def of(self, members: Iterable[Member]) -> list[MemberClient]:
        """Return the clients of members, without this process itself."""
        others = [member for member in members if member.id != self._own_id]
        self._clients = {each.id: self._clients.get(each.id) or MemberClient(each, self) for each in others}
        return list(self._clients.values())

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
