"""Connections to the other members of a group, which are kept open."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import NamedTuple

import httpx
import msgspec

from api.shards.wire import PATH, Told, decode_told
from indexer.shards.assignment import MAX_MEMBERS, Member
from kv_events.tls import connection_reason

_FORWARD_S = 10.0
_KEEPALIVE_S = 4.0  # the server closes idle connections after 5
_CONNECTIONS_PER_MEMBER = 32


class PeerAnswer(NamedTuple):
    """An answer of a member."""

    status: int
    body: bytes
    content_type: str


class PeerError(Exception):
    """A member did not answer. The text says why."""


class Peer:
    """One other member. Without an answer it is not asked again until `Peers` has reached it."""

    def __init__(self, member: Member, http: httpx.AsyncClient, headers: dict[str, str], deadline_s: float) -> None:
        self.member = member
        self.failure = ""
        """Why the newest attempt failed, or ""."""
        self._http = http
        self._url = member.url + PATH
        self._headers = headers
        self._deadline_s = deadline_s

    async def ask(self, body: bytes) -> Told:
        """Send a question. Raises PeerError, also if the answer is not there in time."""
        try:
            async with asyncio.timeout(self._deadline_s):
                told = await self._ask(body)
        except TimeoutError:
            self.failure = f"no answer within {self._deadline_s:g} s"
        except httpx.HTTPError as error:
            cause = error.__cause__.__context__ if error.__cause__ is not None else None
            self.failure = connection_reason(cause) or str(error) or type(error).__name__
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.failure = "its answer cannot be read"
        else:
            self.failure = "" if told.member == self.member.id else "another service answers at its address"
            if not self.failure:
                return told
        raise PeerError(self.failure)

    async def forward(self, method: str, target: str, headers: dict[str, str]) -> PeerAnswer | PeerError:
        """Send another request, without a body. target: path and query. Returns the error if there is no answer."""
        try:
            async with asyncio.timeout(_FORWARD_S):
                answer = await self._http.request(method, self.member.url + target, headers=self._headers | headers)
        except (TimeoutError, httpx.HTTPError) as error:
            return PeerError(str(error) or type(error).__name__)
        return PeerAnswer(answer.status_code, answer.content, answer.headers.get("content-type", ""))

    async def _ask(self, body: bytes) -> Told:
        answer = await self._http.post(self._url, content=body, headers=self._headers)
        if answer.status_code != httpx.codes.OK:
            raise httpx.HTTPError(f"it answers with status {answer.status_code}")
        return decode_told(answer.content)


class Peers:
    """All other members. Belongs to one event loop."""

    def __init__(self, own_id: str, token: str | None, tls: ssl.SSLContext | None, deadline_s: float) -> None:
        """token: sent to the members. tls: trusts their certificates; None: that of the system."""
        self._own_id = own_id
        self._deadline_s = deadline_s
        self._headers = {"Content-Type": "application/msgpack"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._http = httpx.AsyncClient(
            verify=tls or True,
            timeout=None,  # noqa: S113  (`Peer.ask` has a deadline for everything)
            trust_env=False,
            limits=httpx.Limits(
                max_connections=MAX_MEMBERS * _CONNECTIONS_PER_MEMBER,
                max_keepalive_connections=MAX_MEMBERS * _CONNECTIONS_PER_MEMBER,
                keepalive_expiry=_KEEPALIVE_S,
            ),
        )
        self._peers: dict[str, Peer] = {}

    def of(self, members: Iterable[Member]) -> list[Peer]:
        """Return the connections to members, without this process itself."""
        found = {}
        for member in members:
            if member.id != self._own_id:
                known = self._peers.get(member.id)
                found[member.id] = known or Peer(member, self._http, self._headers, self._deadline_s)
        self._peers = found
        return list(found.values())

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()
