"""A member of a shard group: its parts, put together for the application."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from functools import partial

import msgspec
from fastapi import APIRouter
from prometheus_client.core import Metric
from starlette.middleware import Middleware
from starlette.responses import Response

from api.fast.fast_path import GroupAnswers
from api.openapi import answers
from api.problems import ProblemError, ProblemKind
from api.queries.body_formats import Body, BodyFormat, format_of, is_large
from api.queries.parsing import BY_HASH, BY_TOKENS, decode_question
from api.queries.routes import RawEndpoint, json_response
from api.settings import ApiSettings
from api.shards.forwarding import ForwardToMembers
from api.shards.scatter_gather import LocalShard, ScatterGather
from api.shards.wire import PATH, Members, ShardRequest, decode_request, encode
from api.telemetry.families import counter, gauge
from indexer.consumer import Consumer
from indexer.shards.membership import Membership
from indexer.shards.settings import GroupSettings
from kv_events.errors import InvalidValueError
from kv_events.http.service import Shards
from kv_events.runtime.settings import read_secret
from kv_events.runtime.tls import TlsFiles
from kv_events.runtime.variables import variable

_GROWTH = 4
"""Bytes of the hashes of a prompt for each byte of its tokens: a page of one token is two bytes of JSON."""
_ROOM = 2**20


class ShardGroup:
    """The group as its member sees it."""

    def __init__(self, consumer: Consumer, membership: Membership, settings: GroupSettings, api: ApiSettings) -> None:
        """consumer: that of a member. Raises InvalidValueError for settings that do not fit each other."""
        assert consumer.owned is not None
        self.membership = membership
        self._consumer = consumer
        self._own = LocalShard(consumer, consumer.owned)
        tls = None
        if settings.group_ca_file is not None:
            tls = TlsFiles("group", settings.group_ca_file, None, None, None).context()
        self._peers = Members(
            membership.id,
            settings.group_deadline_s,
            _token(settings, api),
            tls,
            serves_tls=api.tls_cert_file is not None,
        )
        self.gatherer = ScatterGather(self._own, membership, self._peers)
        """Answers questions for the whole group."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Be a member during a block, in which the consumer runs. It ends before the group is left."""
        async with self.membership.running(), self.gatherer.running():
            yield

    def middleware(self) -> Middleware:
        """Return the innermost middleware of the application."""
        return Middleware(ForwardToMembers, membership=self.membership, peers=self._peers)

    def routes(self) -> APIRouter:
        """Return the route that shows the group."""
        router = APIRouter(tags=["service"])

        @router.get("/shards", response_class=Response, responses=answers(Shards, "The group as this member sees it"))
        async def shards() -> Response:
            """Return the members of the group with their partitions, and what answers lack at the moment."""
            return json_response(self.gatherer.shards())

        return router

    def families(self) -> Iterator[Metric]:
        """Yield the metric families."""
        shards = self.gatherer.shards()
        missing = sum(len(each.partitions) for each in shards.missing)
        yield gauge("kvsight_group_members", "Members of the shard group", len(shards.members))
        yield gauge("kvsight_group_partitions", "Partitions of this member", len(shards.claims))
        yield gauge("kvsight_group_missing_partitions", "Partitions that answers lack", missing)
        yield counter("kvsight_group_given_up", "Answers of members that did not come", self.gatherer.given_up)

    def endpoints(self, max_body_bytes: int) -> dict[str, RawEndpoint]:
        """Path -> ASGI application for POST: what members ask each other."""
        return {PATH: RawEndpoint(self._reply, _GROWTH * max_body_bytes + _ROOM)}

    def fast_answers(self, *, has_tenants: bool) -> GroupAnswers:
        """Return how small requests are answered by the fast path. has_tenants: whether their queries have bounds."""
        fields = {} if has_tenants else {"/query": BY_TOKENS, "/query_by_hash": BY_HASH}
        asks = {path: partial(self._answer_inline, names) for path, names in fields.items()}
        return GroupAnswers({PATH: self._reply_inline}, asks)

    async def _answer_inline(self, fields: Collection[str], body: bytes, content_type: str) -> bytes | None:
        """Answer a query if nothing is missing. What is missing goes into a header, too."""
        if is_large(body) or self.gatherer.missing:
            return None
        self.gatherer.check_ready()
        asked = decode_question(body, format_of(content_type), fields)
        if asked[0].is_detailed or not self.gatherer.knows(asked[0]):
            return None
        (found,), missing = await self.gatherer.answer([asked])
        return None if missing or isinstance(found, ProblemError) else found

    async def _reply(self, body: Body, _body_format: BodyFormat) -> Response:
        asked = await asyncio.to_thread(_decoded, body) if is_large(body) else _decoded(body)
        return Response(encode(await self._own.reply(asked)), media_type="application/msgpack")

    def _reply_inline(self, body: bytes) -> bytes | None:
        if is_large(body):
            return None
        asked = _decoded(body)
        return encode(self._own.reply_inline(asked)) if len(asked.prompts) <= 1 else None


def _token(settings: GroupSettings, api: ApiSettings) -> str | None:
    if settings.group_token_file is not None:
        return read_secret("group_token_file", settings.group_token_file)
    if api.api_token is not None:
        return api.api_token.get_secret_value()
    if api.api_tokens_file is not None:
        expected = "a token with the scope read, because the members need one to ask each other"
        raise InvalidValueError(variable("group_token_file"), None, expected)
    return None


def _decoded(body: Body) -> ShardRequest:
    try:
        asked = decode_request(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProblemError(400, ProblemKind.MALFORMED_BODY, f"body: {error}") from None
    for ask in asked.prompts:
        for packed in ask.hashes.values():
            if len(packed) % 8:
                raise ProblemError(422, ProblemKind.INVALID_VALUE, "hashes: expected a multiple of 8 bytes", "hashes")
    return asked
