"""The query routes of a member of a group, and the one that members ask each other."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial

import msgspec
from starlette.responses import Response

from api.access.tenants import TenantQueries
from api.fast.fast_path import GroupAnswers
from api.problems import ProblemError, ProblemKind
from api.queries.body_formats import Body, Codec, codec_of
from api.queries.large_bodies import is_large
from api.queries.questions import BY_ANY, BY_HASH, BY_TOKENS, Numbers, Question, decode_question
from api.queries.routes import HotEndpoint, HotRoutes, encoded_response, json_response
from api.shards.local_shard import OwnViews
from api.shards.scatter_gather import Gatherer
from api.shards.wire import MISSING_HEADER, PATH, Asked, decode_asked, encode
from indexer.consumer import Consumer
from kv_events.http.queries import Missing

_GROWTH = 4
"""Bytes of the hashes of a prompt for each byte of its tokens: a page of one token is two bytes of JSON."""
_ROOM = 2**20


class ShardRoutes(HotRoutes):
    """`HotRoutes` for a whole group: answers come from all members."""

    def __init__(
        self,
        consumer: Consumer,
        gatherer: Gatherer,
        own: OwnViews,
        max_body_bytes: int,
        *,
        must_be_ready: bool,
        tenants: TenantQueries | None = None,
    ) -> None:
        super().__init__(consumer, max_body_bytes, must_be_ready=must_be_ready, tenants=tenants)
        self._gatherer = gatherer
        self._own = own
        self._max_body_bytes = max_body_bytes

    def endpoints(self) -> dict[str, HotEndpoint]:
        """Path -> ASGI application for POST."""
        return super().endpoints() | {PATH: HotEndpoint(self._tell, _GROWTH * self._max_body_bytes + _ROOM)}

    def _check_ready(self) -> None:
        self._gatherer.check_joined()
        super()._check_ready()

    async def _query(self, body: Body, codec: Codec) -> Response:
        self._check_ready()
        return await self._one(await self._in_thread(body, decode_question, body, codec, BY_TOKENS), codec)

    async def _query_by_hash(self, body: Body, codec: Codec) -> Response:
        self._check_ready()
        return await self._one(await self._in_thread(body, decode_question, body, codec, BY_HASH), codec)

    async def _batch(self, body: Body, codec: Codec) -> Response:
        queries = await self._queries(body, codec)
        results: list[bytes | ProblemError | None] = [None] * len(queries)
        questions, places = [], []
        for place, query in enumerate(queries):
            try:
                asked = await self._in_thread(query, decode_question, query, codec, BY_ANY)
                self._admit(asked[0])
                questions.append(asked)
                places.append(place)
            except ProblemError as problem:
                results[place] = problem
        found, missing = await self._gatherer.answer(questions)
        for place, result in zip(places, found, strict=True):
            results[place] = result
        parts = [msgspec.json.encode(each.document()) if isinstance(each, ProblemError) else each for each in results]
        tail = b',"missing":' + msgspec.json.encode(missing) if missing else b""
        return _marked(json_response(b'{"results":[' + b",".join(filter(None, parts)) + b"]" + tail + b"}"), missing)

    async def _one(self, asked: tuple[Question, Numbers], codec: Codec) -> Response:
        self._admit(asked[0])
        (found,), missing = await self._gatherer.answer([asked])
        if isinstance(found, ProblemError):
            raise found
        return _marked(encoded_response(asked[0], found, codec), missing)

    def _admit(self, question: Question) -> None:
        """Count a query of a tenant. Raises ProblemError (429) if it has sent too many to this member."""
        if self._tenants is None or not self._gatherer.knows(question):
            return
        rate = self._tenants.rate(question.tenant)
        if rate is None:
            return
        if rate.wait_s():
            self._tenants.count_refused(question.tenant)
            raise self._tenants.too_many(question, rate)
        rate.note()

    async def _tell(self, body: Body, codec: Codec) -> Response:
        asked = await asyncio.to_thread(_asked, body) if is_large(body) else _asked(body)
        return Response(encode(await self._own.tell(asked)), media_type="application/msgpack")

    def answers(self) -> GroupAnswers:
        """Return how small requests are answered in the hot lane."""
        asks = {"/query": partial(self._ask_at_once, BY_TOKENS), "/query_by_hash": partial(self._ask_at_once, BY_HASH)}
        return GroupAnswers({PATH: self._tell_at_once}, asks)

    async def _ask_at_once(self, fields: Collection[str], body: bytes, content_type: str) -> bytes | None:
        """Answer a query if nothing is missing. What is missing goes into a header, too."""
        if is_large(body) or self._tenants is not None or self._gatherer.missing:
            return None
        self._gatherer.check_joined()
        asked = decode_question(body, codec_of(content_type), fields)
        if asked[0].is_detailed or not self._gatherer.knows(asked[0]):
            return None
        (found,), missing = await self._gatherer.answer([asked])
        return None if missing or isinstance(found, ProblemError) else found

    def _tell_at_once(self, body: bytes) -> bytes | None:
        if is_large(body):
            return None
        asked = _asked(body)
        return encode(self._own.tell_at_once(asked)) if len(asked.prompts) <= 1 else None


def _asked(body: Body) -> Asked:
    try:
        asked = decode_asked(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProblemError(400, ProblemKind.MALFORMED_BODY, f"body: {error}") from None
    for ask in asked.prompts:
        for packed in ask.hashes.values():
            if len(packed) % 8:
                raise ProblemError(422, ProblemKind.INVALID_VALUE, "hashes: expected a multiple of 8 bytes", "hashes")
    return asked


def _marked(response: Response, missing: list[Missing]) -> Response:
    """Name the missing partitions in a header as well: the RFC's dialect has no other place for them."""
    if missing:
        partitions = sorted(partition for each in missing for partition in each.partitions)
        response.headers[MISSING_HEADER] = ",".join(map(str, partitions))
    return response
