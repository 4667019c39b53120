"""The messages of the members of a group: msgpack, over `POST /shards/query` and connections that are kept open."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from http import HTTPStatus
from typing import Annotated

import msgspec

from api.http_pool import HttpAnswer, HttpPool, NoAnswerError
from indexer.shards.assignment import MAX_PARTITIONS, Assignment, Member
from indexer.views import STATES
from kv_events.http.queries import MAX_QUERIES_PER_BATCH
from kv_events.limits import MAX_BLOCK_SIZE, MAX_DP_RANK, MAX_NAME_BYTES

PATH = "/shards/query"
ANY_BLOCK_SIZE = 0

MAX_BLOCK_SIZES = 64
"""Bound on the block sizes of a model that a member names: each costs a hashing of the prompt."""
MAX_NAMES = 100
"""Bound on the names of models in the answer to a query about an unknown one."""

_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
_Partition = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_BYTES)]


class ShardPrompt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One prompt."""

    model: str
    tenant: str
    hashes: dict[int, bytes]
    """Block size -> the prompt's sequence hashes, little-endian u64. `ANY_BLOCK_SIZE`: they suit every size."""
    num_positions: _Number | None = None
    """Tokens of the prompt. None: not known."""


class ShardRequest(msgspec.Struct, frozen=True, array_like=True):
    """What one member asks another one."""

    generation: _Number
    """That of the newest assignment that the asking member knows."""
    prompts: Annotated[list[ShardPrompt], msgspec.Meta(max_length=MAX_QUERIES_PER_BATCH)]


class StreamRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a prompt that one stream can reuse, in tokens. See `indexer.scores.StreamScore`."""

    partition: _Partition
    worker: _Name
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=MAX_DP_RANK)]
    gpu: _Number
    cpu: _Number
    disk: _Number
    external: _Number
    state: Annotated[int, msgspec.Meta(ge=0, lt=len(STATES))]
    """Index in `indexer.views.STATES`."""
    age_ms: _Number


class PromptRows(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one prompt."""

    block_sizes: Annotated[
        list[Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_SIZE)]], msgspec.Meta(max_length=MAX_BLOCK_SIZES)
    ]
    """Those that the member's workers of the model use. Sizes for which it got no hashes have no rows."""
    rows: list[StreamRow]
    known: Annotated[list[tuple[_Name, _Name]], msgspec.Meta(max_length=MAX_NAMES)]
    """Models and tenants of this member, if it does not know the one that was asked for."""


class ShardReply(msgspec.Struct, frozen=True, array_like=True):
    """What another member answers."""

    member: str
    generation: _Number
    claims: Annotated[dict[_Partition, bool], msgspec.Meta(max_length=MAX_PARTITIONS)]
    """Partition that the member answers for -> whether its views are up to date with the log."""
    found: Annotated[list[PromptRows], msgspec.Meta(max_length=MAX_QUERIES_PER_BATCH)]
    assignment: Assignment | None = None
    """The newest assignment, if the asking member has an older one."""


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(ShardRequest).decode
decode_reply = msgspec.msgpack.Decoder(ShardReply).decode


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
