"""The query routes, from bytes to bytes: read, decode, answer. No models are built."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.access.rate_limits import OF_REQUEST, TenantRates
from api.problems import ProblemError, ProblemKind
from api.prompts.renderer import PromptRenderer
from api.queries.answers import MISSING_HEADER, Answerer
from api.queries.body_formats import (
    JSON,
    Body,
    BodyFormat,
    Data,
    LargeBodies,
    decode_as,
    decode_query_batch,
    format_of,
)
from api.queries.parsing import BY_ANY, BY_HASH, BY_TOKENS, decode_question
from api.queries.text import has_text, without_text
from indexer.slices import Slices
from kv_events.http.parsed_query import ParsedQuery, PromptArray
from kv_events.http.queries import Missing

Handler = Callable[[Body, BodyFormat], Awaitable[Response]]
_REQUEST: ContextVar[Request] = ContextVar("request")  # of the route that runs


class QueryRoutes:
    """The three routes."""

    def __init__(
        self,
        answerer: Answerer,
        check_ready: Callable[[], None],
        max_body_bytes: int,
        tenants: TenantRates | None = None,
        renderer: PromptRenderer | None = None,
    ) -> None:
        """check_ready: raises ProblemError (503) if nothing may be answered yet. tenants: bounds on their queries, if
        any. renderer: makes the tokens of text. None: prompts must not be text.
        """
        self._answerer = answerer
        self._check_ready = check_ready
        self._max_body_bytes = max_body_bytes
        self._tenants = tenants
        self._renderer = renderer
        self._in_thread = LargeBodies().in_thread

    def endpoints(self) -> dict[str, RawEndpoint]:
        """Path -> ASGI application for POST."""
        handlers: dict[str, Handler] = {
            "/query": partial(self._query, BY_TOKENS),
            "/query_by_hash": partial(self._query, BY_HASH),
            "/query/batch": self._batch,
        }
        return {path: RawEndpoint(handler, self._max_body_bytes) for path, handler in handlers.items()}

    async def _query(self, fields: Collection[str], body: Body, body_format: BodyFormat) -> Response:
        self._check_ready()
        renderer = self._renderer if fields is BY_TOKENS else None
        if renderer is not None and await self._in_thread(body, has_text, body, body_format):
            given = await self._in_thread(body, decode_as, dict, body, body_format)
            asked = await self._admitted(without_text(given, body_format), body_format, fields)  # before the engine
            rendered = await renderer.tokens(given)
            asked = replace(asked[0], media=rendered.media), rendered.token_ids
        else:
            asked = await self._admitted(body, body_format, fields)
        (answer,), missing = await self._answerer.answer([asked])
        if isinstance(answer, ProblemError):
            raise answer
        headers = _header_of(missing)  # the RFC's dialect has no other place for them
        if asked[0].is_detailed and body_format is not JSON:
            packed = msgspec.msgpack.encode(msgspec.json.decode(answer))
            return Response(packed, headers=headers, media_type="application/msgpack")
        return Response(answer, headers=headers, media_type="application/json")

    async def _batch(self, body: Body, body_format: BodyFormat) -> Response:
        self._check_ready()
        queries = await self._in_thread(body, decode_query_batch, body, body_format)
        if (limit := OF_REQUEST.get()) is not None:
            limit.note(max(0, len(queries) - 1))  # each query counts as a request with the caller's token
        results: list[bytes | ProblemError] = []
        asked = []
        slices = Slices()  # lets events and other callers run
        for query in queries:
            try:
                asked.append(await self._admitted(query, body_format, BY_ANY))
                results.append(b"")
            except ProblemError as problem:
                results.append(problem)
            await slices.yield_if_due()
        answers, missing = await self._answerer.answer(asked)
        following = iter(answers)
        results = [each or next(following) for each in results]
        parts = [msgspec.json.encode(each.document()) if isinstance(each, ProblemError) else each for each in results]
        tail = b',"missing":' + msgspec.json.encode(missing) if missing else b""
        body = b'{"results":[' + b",".join(parts) + b"]" + tail + b"}"
        headers = _header_of(missing)
        return Response(body, headers=headers, media_type="application/json")

    async def _admitted(
        self, data: Data, body_format: BodyFormat, fields: Collection[str]
    ) -> tuple[ParsedQuery, PromptArray]:
        """Decode a query, and count it if its tenant has a bound. Raises ProblemError."""
        asked = await self._in_thread(data, decode_question, data, body_format, fields)
        if self._tenants is not None and self._answerer.knows(asked[0]):
            self._tenants.admit(asked[0])
        return asked


class RawEndpoint:
    """One route as a bare ASGI application."""

    def __init__(self, handler: Handler, max_body_bytes: int) -> None:
        self._handler = handler
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body_format = format_of(request.headers.get("content-type"))
            body = await read_body(request, self._max_body_bytes)
            _REQUEST.set(request)
            response = await self._handler(body, body_format)
        except ProblemError as problem:
            response = problem.response()
        except ClientDisconnect:
            return
        await response(scope, receive, send)


async def check_connected() -> None:
    """Raise ClientDisconnect if nobody waits for the answer of the route that runs."""
    if await _REQUEST.get().is_disconnected():
        raise ClientDisconnect


def json_response(answer: Any, status: int = HTTPStatus.OK) -> Response:
    """Return an answer. answer: a struct or a list of structs, or bytes that are already JSON."""
    body = answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
    return Response(body, status, media_type="application/json")


def _header_of(missing: Sequence[Missing]) -> dict[str, str] | None:
    return missing_header(partition for each in missing for partition in each.partitions) if missing else None


def missing_header(partitions: Iterable[int]) -> dict[str, str]:
    """Return the header that names the partitions which an answer lacks, if it lacks any."""
    named = ",".join(map(str, sorted(partitions)))
    return {MISSING_HEADER: named} if named else {}


async def read_body(request: Request, limit: int) -> Body:
    """Read the whole body, at most `limit` bytes, whatever length was announced.

    Raises ProblemError (413), and ClientDisconnect if the client leaves before.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    body: Body = b""
    is_complete = False
    while not is_complete:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk, is_complete = message.get("body", b""), not message.get("more_body", False)
        if len(body) + len(chunk) > limit:
            raise _too_large(limit)
        if body and chunk and isinstance(body, bytes):
            body = bytearray(body)  # grows in place; to join many parts of a large body would hold up other callers
        body += chunk
    return body


def _too_large(limit: int) -> ProblemError:
    return ProblemError(413, ProblemKind.BODY_TOO_LARGE, f"body: more than {limit} bytes", "body")
