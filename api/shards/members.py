"""Connections to the other members of a group, which are kept open."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from http import HTTPStatus

import msgspec

from api.http_pool import HttpAnswer, HttpPool, NoAnswerError
from api.shards.wire import PATH, ShardReply, decode_reply
from indexer.shards.assignment import Member

_FORWARD_DEADLINES = 2
"""Deadlines that a forwarded request may take: lists and pages are larger than answers to questions."""
_MAX_ANSWER_BYTES = 256 * 2**20


class MemberClient:
    """One other member. Without an answer it is asked again only by `ScatterGather`, in the background."""

    def __init__(self, member: Member, members: Members) -> None:
        self.member = member
        self.failure = ""
        """Why the newest attempt failed, or ""."""
        self._members = members

    async def ask(self, body: bytes) -> ShardReply:
        """Send a question with this member's own token. Raises NoAnswerError, also if there is no answer in time."""
        members, self.failure = self._members, ""
        try:
            answer = await members.send("POST", self.member.url + PATH, members.deadline_s, members.own_headers, body)
            told: ShardReply | None = decode_reply(answer.body) if answer.status == HTTPStatus.OK else None
        except NoAnswerError as error:
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
        raise NoAnswerError(self.failure)

    async def forward(self, method: str, target: str, headers: dict[str, str]) -> HttpAnswer | NoAnswerError:
        """Send another request, without a body. Returns the error if there is no answer.

        target: path and query, percent-encoded. headers: of the request, which has no token but theirs.
        """
        deadline_s = _FORWARD_DEADLINES * self._members.deadline_s
        try:
            return await self._members.send(method, self.member.url + target, deadline_s, headers)
        except NoAnswerError as error:
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
        self._serves_tls = serves_tls
        self._clients: dict[str, MemberClient] = {}
        self._http = HttpPool(max_answer_bytes, tls)

    def of(self, members: Iterable[Member]) -> list[MemberClient]:
        """Return the clients of members, without this process itself."""
        others = [member for member in members if member.id != self._own_id]
        self._clients = {each.id: self._clients.get(each.id) or MemberClient(each, self) for each in others}
        return list(self._clients.values())

    async def send(
        self, method: str, url: str, deadline_s: float, headers: dict[str, str], body: bytes = b""
    ) -> HttpAnswer:
        """See `HttpPool.send`."""
        if self._serves_tls and "Authorization" in headers and not url.startswith("https://"):
            raise NoAnswerError("its address is without TLS, so it gets no token")
        return await self._http.send(method, url, deadline_s, headers, body)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()
