"""The hot routes, from bytes to bytes: read, decode, hash, score, encode. No models are built."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import ParamSpec, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.access.rate_limits import OF_REQUEST
from api.access.tenants import TenantQueries
from api.problems import ProblemError, ProblemKind
from api.queries.answers import Answers
from api.queries.body_formats import Body, Codec, Data, codec_of, decode_query_batch
from api.queries.large_bodies import is_large
from api.queries.questions import BY_ANY, BY_HASH, BY_TOKENS, Numbers, Question, decode_question
from api.served_views import ServedViews

_SLICE_S = 0.001
_MANY_TOKENS = 2**17  # hashed in a third of a millisecond
_JSON = codec_of("application/json")

_P = ParamSpec("_P")
_T = TypeVar("_T")

Handler = Callable[[Body, Codec], Awaitable[Response]]


class ClientDisconnectedError(Exception):
    """The caller disconnected before the whole body arrived."""


class HotRoutes:
    """The shared part of the three routes."""

    def __init__(
        self,
        served: ServedViews,
        max_body_bytes: int,
        *,
        must_be_ready: bool = False,
        tenants: TenantQueries | None = None,
    ) -> None:
        """must_be_ready: refuse queries until everything is applied. tenants: bounds on their queries, if any."""
        self._served = served
        self._max_body_bytes = max_body_bytes
        self._must_be_ready = must_be_ready
        self._tenants = tenants
        self._answers = Answers(tenants)
        self._large_decodes = asyncio.Semaphore()  # decoded one at a time: the loop needs the interpreter, too

    def endpoints(self) -> dict[str, HotEndpoint]:
        """Path -> ASGI application for POST."""
        handlers = {"/query": self._query, "/query_by_hash": self._query_by_hash, "/query/batch": self._batch}
        return {path: HotEndpoint(handler, self._max_body_bytes) for path, handler in handlers.items()}

    async def _query(self, body: Body, codec: Codec) -> Response:
        self._check_ready()
        return encoded_response(*await self._answer(body, codec, BY_TOKENS), codec)

    async def _query_by_hash(self, body: Body, codec: Codec) -> Response:
        self._check_ready()
        return encoded_response(*await self._answer(body, codec, BY_HASH), codec)

    async def _batch(self, body: Body, codec: Codec) -> Response:
        queries = await self._queries(body, codec)
        results = []
        slice_began = time.perf_counter()
        for query in queries:
            results.append(await self._answer_or_problem(query, codec))
            if time.perf_counter() - slice_began > _SLICE_S:
                await asyncio.sleep(0)  # lets events and other callers run
                slice_began = time.perf_counter()
        return json_response(b'{"results":[' + b",".join(results) + b"]}")

    async def _queries(self, body: Body, codec: Codec) -> Sequence[Data]:
        """Return the queries of a batch. Each of them counts as a request with the caller's token."""
        self._check_ready()
        queries = await self._in_thread(body, decode_query_batch, body, codec)
        if (limit := OF_REQUEST.get()) is not None:
            limit.note(max(0, len(queries) - 1))
        return queries

    def _check_ready(self) -> None:
        if self._must_be_ready and not self._served.ready:
            raise ProblemError(503, ProblemKind.UNAVAILABLE, "the log is not applied yet, see /ready", retry_after_s=1)

    async def _answer(self, data: Data, codec: Codec, fields: Collection[str]) -> tuple[Question, bytes]:
        question, numbers = await self._in_thread(data, decode_question, data, codec, fields)
        if len(numbers) > _MANY_TOKENS:
            question, numbers = await self._hashed(question, numbers)
        served = self._served
        try:
            return question, self._answers.answer(question, numbers, served.namespaces, served.freshness, served.now())
        except ProblemError as problem:
            if problem.kind == ProblemKind.TENANT_LIMIT and self._tenants is not None:
                self._tenants.count_refused(question.tenant)
            if problem.kind == ProblemKind.UNKNOWN_MODEL and (reason := self._served.why_not_ready()):
                detail = f"{problem.detail}; {reason}"  # the model may be in what is not applied yet
                raise ProblemError(
                    503, ProblemKind.UNAVAILABLE, detail, problem.field, problem.value, retry_after_s=1
                ) from None
            raise

    async def _answer_or_problem(self, data: Data, codec: Codec) -> bytes:
        try:
            return (await self._answer(data, codec, BY_ANY))[1]
        except ProblemError as problem:
            return msgspec.json.encode(problem.document())

    async def _hashed(self, question: Question, tokens: Numbers) -> tuple[Question, Numbers]:
        """Hash a long prompt in another thread, if all workers of the model use one block size."""
        namespaces = self._served.namespaces.find(question.model, question.tenant)
        if question.field != "token_ids" or len(namespaces) != 1:
            return question, tokens
        (namespace,) = namespaces
        hashes = await asyncio.to_thread(question.hashes, tokens, namespace.key.block_size)
        if list(self._served.namespaces.find(question.model, question.tenant)) != [namespace]:
            return question, tokens  # workers with another block size have come
        return replace(question, field="seq_hashes"), hashes

    async def _in_thread(self, data: Data, decode: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call `decode` directly for small data and in a thread for large data."""
        if not is_large(data):
            return decode(*args, **kwargs)
        async with self._large_decodes:
            return await asyncio.to_thread(decode, *args, **kwargs)


class HotEndpoint:
    """One route as a bare ASGI application."""

    def __init__(self, handler: Handler, max_body_bytes: int) -> None:
        self._handler = handler
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            codec = codec_of(headers.get("content-type"))
            body = await read_body(receive, headers.get("content-length"), self._max_body_bytes)
            response = await self._handler(body, codec)
        except ProblemError as problem:
            response = problem.response()
        except ClientDisconnectedError:
            return
        await response(scope, receive, send)


def json_response(body: bytes, status: int = HTTPStatus.OK) -> Response:
    """Return an answer that is already JSON."""
    return Response(body, status, media_type="application/json")


def encoded_response(question: Question, answer: bytes, codec: Codec) -> Response:
    """Return an answer to a query. answer: as JSON."""
    if question.is_detailed and codec is not _JSON:
        return Response(msgspec.msgpack.encode(msgspec.json.decode(answer)), media_type="application/msgpack")
    return json_response(answer)


async def read_body(receive: Receive, content_length: str | None, limit: int) -> Body:
    """Read the whole body, at most `limit` bytes, whatever length was announced.

    Raises ProblemError (413), and ClientDisconnectedError if the client leaves before.
    """
    if content_length is not None and content_length.isdecimal() and int(content_length) > limit:
        raise _too_large(limit)
    body = bytearray()  # grows in place; to join many parts of a large body would hold up other callers
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        chunk = message.get("body", b"")
        if len(body) + len(chunk) > limit:
            raise _too_large(limit)
        if not body and not message.get("more_body", False):
            return bytes(chunk)
        body += chunk
        if not message.get("more_body", False):
            return body


def _too_large(limit: int) -> ProblemError:
    return ProblemError(413, ProblemKind.BODY_TOO_LARGE, f"body: more than {limit} bytes", "body")
