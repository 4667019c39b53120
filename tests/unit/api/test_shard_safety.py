"""What a member of a group sends to others, and what it makes of what they answer. The others are real servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import unquote

import pytest
from aiohttp import web
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.shards.others import AskOthers
from api.shards.peers import Connections, Peers
from indexer.shards.assignment import Assignment, Member
from indexer.shards.membership import Membership

TOKEN = "the-token-of-this-member"
DEADLINE_S = 5.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def member(handler: Handler, partition: int = 1) -> AsyncIterator[Member]:
    """Another member, all whose answers a test gives."""
    application = web.Application()
    application.router.add_route("*", "/{anything:.*}", handler)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield Member(f"member-{partition}", f"http://127.0.0.1:{runner.addresses[0][1]}", [partition])
    finally:
        await runner.cleanup()


@asynccontextmanager
async def asking(
    *others: Member, own: ASGIApp, deadline_s: float = DEADLINE_S, is_assigned: bool = True
) -> AsyncIterator[AskOthers]:
    """The middleware of a member that has no workers, unless `own` has some."""
    assignment = Assignment(7, 0, [Member("me", "http://127.0.0.1:1", [0]), *others])
    membership = SimpleNamespace(id="me", group="g", assignment=assignment, is_assigned=is_assigned)
    peers = Peers("me", Connections(TOKEN, None), deadline_s)
    try:
        yield AskOthers(own, cast(Membership, membership), peers)
    finally:
        await peers.close()


async def nobody(scope: Scope, receive: Receive, send: Send) -> None:
    """The routes of a member without workers."""
    answer = JSONResponse([]) if scope["path"] == "/workers" else JSONResponse({"detail": "unknown"}, 404)
    await answer(scope, receive, send)


async def call(app: ASGIApp, path: str, method: str = "GET", authorization: str | None = None) -> Response:
    """Send a request whose path is exactly this one, which clients would change."""
    raw_path, _, query = path.partition("?")
    headers = [] if authorization is None else [(b"authorization", authorization.encode())]
    scope = {"type": "http", "method": method, "path": unquote(raw_path), "raw_path": raw_path.encode()}
    scope |= {"query_string": query.encode(), "headers": headers}
    messages: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        messages.append(message)

    await app(scope, receive, send)
    answer = Response(b"".join(message.get("body", b"") for message in messages), messages[0]["status"])
    answer.raw_headers = messages[0]["headers"]
    return answer


@pytest.mark.parametrize(
    "path",
    [
        "/workers/../dump",
        "/workers/%2e%2e/dump",
        "/workers/x/../../dump",
        "/workers/../../dump/view",
        "/workers/%2e%2e%2fdump%3f/view",
        "/workers/./w/view",
        "/workers/../unregister",
        "/workers/w/elsewhere",
        "/dump",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_path_that_could_lead_to_another_route_is_not_forwarded(path: str, method: str) -> None:
    asked = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(request.raw_path)
        return web.json_response({"pages": "all of them"})

    async with member(handler) as other, asking(other, own=nobody) as app:
        assert (await call(app, path, method, f"Bearer {TOKEN}")).status_code == 404
    assert not asked


@pytest.mark.parametrize(
    ("method", "path", "forwarded"),
    [
        ("GET", "/workers?model_name=m%26x%23&other=1", "/workers?model_name=m%26x%23"),
        ("GET", "/workers/w1/view?limit=5&cursor=0", "/workers/w1/view?limit=5&cursor=0"),
        ("GET", "/workers/a%2Fb%3Fc%23d%25e%20f/view", "/workers/a%2Fb%3Fc%23d%25e%20f/view"),
        ("GET", "/workers/a/..b/%00/view", "/workers/a%2F..b%2F%00/view"),
        ("POST", "/workers/w%C3%A9/resync?dp_rank=1&limit=5", "/workers/w%C3%A9/resync?dp_rank=1"),
    ],
)
@pytest.mark.parametrize("authorization", [None, "Bearer the-token-of-the-caller"])
async def test_a_forwarded_request_has_the_path_of_its_route_and_the_rights_of_its_caller(
    method: str, path: str, forwarded: str, authorization: str | None
) -> None:
    asked: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append((request.method, request.raw_path, request.headers.get("Authorization")))
        return web.json_response([])

    async with member(handler) as other, asking(other, own=nobody) as app:
        assert (await call(app, path, method, authorization)).status_code == 200
    assert asked == [(method, forwarded, authorization)]
