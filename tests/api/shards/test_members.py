"""What a member of a group sends to others, and what it makes of what they answer. The others are real servers."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import unquote

import msgspec
import pytest
from aiohttp import web
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http_pool import NoAnswerError
from api.queries.routes import QueryRoutes
from api.shards.group import ForwardToMembers
from api.shards.scatter_gather import ScatterGather
from api.shards.wire import Members, ShardReply, encode
from indexer.shards.assignment import Assignment, Member
from indexer.shards.membership import Membership

pytestmark = pytest.mark.timing("a member that hangs must be given up within its deadline")

TOKEN = "the-token-of-this-member"
DEADLINE_S = 5.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def members(
    *handlers: Handler, deadline_s: float = DEADLINE_S, **options: Any
) -> AsyncIterator[tuple[list[Member], Members]]:
    """Other members, all whose answers a test gives, and the connections to them. They have the partitions 1, 2, ..."""
    async with AsyncExitStack() as stack:
        found = []
        for partition, handler in enumerate(handlers, 1):
            application = web.Application()
            application.router.add_route("*", "/{anything:.*}", handler)
            runner = web.AppRunner(application, shutdown_timeout=0.01)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            found.append(Member(f"member-{partition}", f"http://127.0.0.1:{runner.addresses[0][1]}", [partition]))
        peers = Members("me", deadline_s, TOKEN, **options)
        stack.push_async_callback(peers.close)
        yield found, peers


@asynccontextmanager
async def asking(
    *handlers: Handler, is_assigned: bool = True, deadline_s: float = DEADLINE_S
) -> AsyncIterator[ForwardToMembers]:
    """The middleware of a member without workers, which asks others."""
    async with members(*handlers, deadline_s=deadline_s) as (others, peers):
        assignment = Assignment(7, 0, [Member("me", "http://127.0.0.1:1", [0]), *others])
        membership = SimpleNamespace(id="me", group="g", assignment=assignment, is_assigned=is_assigned)
        yield ForwardToMembers(nobody, cast(Membership, membership), peers)


async def nobody(scope: Scope, receive: Receive, send: Send) -> None:
    """The routes of a member without workers."""
    answer = JSONResponse([]) if scope["path"] == "/workers" else JSONResponse({"detail": "unknown"}, 404)
    await answer(scope, receive, send)


async def call(app: ASGIApp, path: str, method: str = "GET", authorization: str | None = None) -> Response:
    """Send a request whose path is exactly this one, which clients would change."""
    raw_path, _, query = path.partition("?")
    headers = [(b"content-type", b"application/json")]
    headers += [] if authorization is None else [(b"authorization", authorization.encode())]
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

    async with asking(handler) as app:
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

    async with asking(handler) as app:
        assert (await call(app, path, method, authorization)).status_code == 200
    assert asked == [(method, forwarded, authorization)]


def answering(status: int, document: Any = None) -> Handler:
    async def handler(_request: web.Request) -> web.Response:
        return web.json_response(document, status=status)

    return handler


async def hang(_request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503, 302])
async def test_a_worker_is_unknown_only_if_all_members_say_so(status: int) -> None:
    async with asking(answering(status), answering(200, {"pages": []})) as app:
        answer = await call(app, "/workers/w/view")
    assert (answer.status_code, answer.body) == (200, b'{"pages": []}')
    async with asking(answering(404)) as app:
        assert (await call(app, "/workers/w/view")).status_code == 404
    async with asking(answering(404), answering(status)) as app:
        answer = await call(app, "/workers/w/view")
    assert answer.status_code == 503
    assert f"status {status}" in bytes(answer.body).decode()
    assert (answer.headers["Retry-After"], answer.headers["Kvsight-Missing"]) == ("1", "2")


async def test_a_member_that_hangs_costs_a_list_of_workers_two_deadlines_and_is_named() -> None:
    async with asking(hang, deadline_s=0.1) as app, asyncio.timeout(9):  # without a bound, it hangs for ever
        workers = await call(app, "/workers")
        view = await call(app, "/workers/w/view")
    assert (workers.status_code, workers.body, workers.headers["Kvsight-Missing"]) == (200, b"[]", "1")
    assert (view.status_code, view.headers["Kvsight-Missing"]) == (503, "1")


def worker(**fields: Any) -> dict[str, Any]:
    names = {"model_name": "m", "routing_group": "default", "block_size": 4, "instance_id": "w"}
    return names | {"state": "live", "age_ms": 5, "more": [1]} | fields


@pytest.mark.parametrize(
    "wrong", [{}, [1], [{}], [worker(state=[])], [worker(age_ms="x")], [worker(block_size=None)], "x", None]
)
async def test_a_list_of_workers_that_cannot_be_read_is_missing(wrong: Any) -> None:
    good = [worker(), worker(age_ms=3), worker(state="stale", age_ms=1), worker(instance_id="a")]
    async with asking(answering(200, wrong), answering(200, good)) as app:
        answer = await call(app, "/workers")
    assert (answer.status_code, answer.headers["Kvsight-Missing"]) == (200, "1")
    assert json.loads(bytes(answer.body)) == [worker(instance_id="a"), worker(age_ms=3)]


async def test_before_it_has_joined_a_member_says_so() -> None:
    nothing: Any = None
    gatherer = ScatterGather(nothing, cast(Membership, SimpleNamespace(group="g", is_assigned=False)), nothing)
    routes = QueryRoutes(gatherer, gatherer.check_ready, 1000).endpoints()
    async with asking(is_assigned=False) as app:
        answers = [await call(app, path) for path in ("/workers", "/workers/w/view")]
    for answer in [*answers, *[await call(endpoint, path, "POST") for path, endpoint in routes.items()]]:
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert b"has not joined the consumer group g yet" in answer.body


MEMBER = "member-1"
ROW = (1, "w", 0, 4, 0, 0, 0, 0, 5)


def told(**fields: Any) -> list[Any]:
    """An answer to one prompt, as another member sends it."""
    good = {"member": MEMBER, "generation": 7, "claims": {1: True}, "block_sizes": [4], "rows": [ROW], "known": []}
    member, generation, claims, *found = (good | fields).values()
    return [member, generation, claims, [found], None]


def in_row(place: int, value: object) -> list[Any]:
    return told(rows=[[*ROW[:place], value, *ROW[place + 1 :]]])


async def ask(body: bytes, headers: dict[str, str] | None = None, max_answer_bytes: int = 2**20) -> ShardReply:
    """Ask a member that sends this body in parts."""

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "identity"
        response = web.StreamResponse(headers=headers)
        response.enable_chunked_encoding()
        await response.prepare(request)
        for start in range(0, len(body), 1000):
            await response.write(body[start : start + 1000])
        return response

    async with members(handler, max_answer_bytes=max_answer_bytes) as (others, peers):
        (peer,) = peers.of(others)
        return await peer.ask(b"")


async def test_a_good_answer_can_be_read() -> None:
    (found,) = (await ask(encode(told()))).found
    assert (found.rows[0].worker, found.block_sizes) == ("w", [4])


@pytest.mark.parametrize(
    "answer",
    [
        told(generation=2**64 - 1),
        told(generation=-1),
        told(block_sizes=[0]),
        told(block_sizes=[-3]),
        told(block_sizes=[65_537]),
        told(block_sizes=[4] * 65),
        told(known=[("m", "t")] * 101),
        told(known=[("m" * 257, "t")]),
        told(claims={-1: True}),
        told(claims=dict.fromkeys(range(4097), True)),
        in_row(0, -1),
        in_row(1, "w" * 257),
        in_row(2, 65_536),
        in_row(3, -1),
        in_row(7, 4),
        in_row(7, -1),
        in_row(8, 2**63),
        {},
        None,
        msgspec.Raw(encode(told())[:-1].replace(b"\x95", b"\x96", 1) + b"\xc0" + b"\x91" * 100_000 + b"\xc0"),
    ],
)
async def test_an_answer_beyond_its_bounds_cannot_be_read(answer: Any) -> None:
    with pytest.raises(NoAnswerError, match=r"^its answer cannot be read$"):
        await ask(encode(answer))


async def test_an_answer_in_parts_has_a_bound_and_none_is_decompressed() -> None:
    with pytest.raises(NoAnswerError, match=r"^its answer has more than 5000 bytes$"):
        await ask(bytes(100_000), max_answer_bytes=5000)
    with pytest.raises(NoAnswerError, match="compressed"):
        await ask(gzip.compress(encode(told())), {"Content-Encoding": "gzip"})


@pytest.mark.parametrize("authorization", ["Bearer the-token-of-the-caller", None])
async def test_a_member_with_tls_sends_no_token_to_an_address_without_it(authorization: str | None) -> None:
    asked = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(request.headers.get("Authorization"))
        return web.json_response([])

    async with members(handler, serves_tls=True) as (others, peers):
        (peer,) = peers.of(others)
        with pytest.raises(NoAnswerError, match="without TLS"):
            await peer.ask(b"")
        headers = {} if authorization is None else {"Authorization": authorization}
        is_refused = isinstance(await peer.forward("GET", "/workers", headers), NoAnswerError)
    assert is_refused == (authorization is not None)
    assert asked == ([] if is_refused else [None])
