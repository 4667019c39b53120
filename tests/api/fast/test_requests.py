"""Requests in the fast path get the answers of FastAPI, over real connections to the real server."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.fast import http_limits
from api.fast.fast_path import FastPath
from api.fast.heads import Head
from api.fast.http_limits import MAX_HEAD_BYTES
from api.server import running_server
from api.settings import ApiSettings
from tests.rigs.api import listening
from tests.rigs.raw_http import CHUNKED, HEALTH, QUERY, TOKENS, Connect, body_of, connecting, is_listening, request
from tests.support.log.hand_fed import HandFed

TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large"


async def test_the_fast_path_answers_good_queries_to_its_own_paths(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool] = []
    answer = FastPath.answer

    def noted(fast_path: FastPath, head: Head, data: bytes, start: int) -> bytes | None:
        body = answer(fast_path, head, data, start)
        taken.append(body is not None)
        return body

    monkeypatch.setattr(FastPath, "answer", noted)

    line, other = await connect(), await connect()
    await line.ask(request(QUERY))
    line.writer.write(request(QUERY)[:-9])  # with the whole head
    await other.ask(request(QUERY))  # so the server has read what was sent before
    await line.ask(request(QUERY)[-9:])
    assert taken == [True, True, True]
    await line.ask(request(body_of(token_ids=[1.5])))
    assert taken == [True, True, True, False]
    await line.ask(request(QUERY, "/query?"))
    assert len(taken) == 4


@pytest.mark.parametrize("begin", [b"POST /query HTTP/1.1\r\nHost: h\r\n", CHUNKED + b"1\r\n{\r\n0\r\n"])
async def test_heads_and_trailers_without_end_are_refused(connect: Connect, begin: bytes) -> None:
    line, other = await connect(), await connect()
    line.writer.write(begin)
    await other.ask(request(QUERY))  # so the server has read what was sent before
    line.writer.write(b"X: %b\r\n" % (b"y" * MAX_HEAD_BYTES))
    status, _, body = await line.answer()
    assert status == TOO_LARGE
    assert json.loads(body)["detail"] == f"headers: more than {MAX_HEAD_BYTES} bytes"
    assert await line.is_at_end()
    assert (await other.ask(request(QUERY)))[0] == b"HTTP/1.1 200 OK"


async def test_a_large_chunk_is_no_trailer(connect: Connect) -> None:
    line = await connect()
    body = QUERY + b" " * 8 * MAX_HEAD_BYTES
    line.writer.write(CHUNKED + b"%x\r\n" % len(body))
    await (await connect()).ask(request(QUERY))  # so the server has read what was sent before
    assert (await line.ask(body + b"\r\n0\r\n\r\n"))[0] == b"HTTP/1.1 200 OK"


async def test_another_application_has_the_same_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "ARRIVAL_S", 0.5)

    async def echo(asked: Request) -> Response:
        return Response(await asked.body(), media_type="text/plain")

    app = Starlette(routes=[Route("/query", echo, methods=["POST"])])
    async with running_server(app, ApiSettings(port=0)) as url, connecting(url) as connect:
        late, endless, ahead = [await connect() for _ in range(3)]
        ahead.writer.write(request(b"one") + request(b"two"))
        assert [(await ahead.answer())[2] for _ in range(2)] == [b"one", b"two"]
        late.writer.write(request(QUERY)[:-1])
        assert (await late.answer())[0] == b"HTTP/1.1 408 Request Timeout"
        head = b"POST /query HTTP/1.1\r\nHost: h\r\nX: %b\r\n" % (b"y" * 2 * MAX_HEAD_BYTES)
        assert (await endless.ask(head))[0] == TOO_LARGE


async def test_requests_that_arrive_in_time_are_never_given_up(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "ARRIVAL_S", 0.5)

    line = await connect()
    data = request(QUERY)
    loop, number = asyncio.get_running_loop(), 0
    end = loop.time() + 1.0
    line.writer.write(data[:50])
    while loop.time() < end:  # each packet ends inside a request
        assert (await line.ask(data[50:] + data[:50]))[0] == b"HTTP/1.1 200 OK"
        await asyncio.sleep(0.02)
        number += 1
    assert number > 2


@pytest.mark.parametrize("path", ["/query", "/query?"])
async def test_a_request_that_does_not_arrive_is_given_up(
    connect: Connect, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "ARRIVAL_S", 0.5)

    line = await connect()
    assert (await line.ask(request(QUERY, path), pieces=3))[0] == b"HTTP/1.1 200 OK"
    line.writer.write(request(QUERY, path)[:-1])
    status, _, body = await line.answer()
    assert status == b"HTTP/1.1 408 Request Timeout"
    assert "not complete" in json.loads(body)["detail"]
    assert await line.is_at_end()
    second = await connect()
    await second.ask(request(QUERY, path))
    second.writer.write(b"POST /query HTTP/1.1\r\nHost: h\r\n")
    assert (await second.answer())[0] == b"HTTP/1.1 408 Request Timeout"


async def test_a_client_that_asks_for_it_is_disconnected_after_the_answer(connect: Connect) -> None:
    line = await connect()
    status, headers, _ = await line.ask(request(QUERY, extra=b"Connection: close\r\n"))
    assert (status, b"connection: close" in headers) == (b"HTTP/1.1 200 OK", True)
    assert await line.is_at_end()


async def test_queries_of_the_fast_path_are_counted(connect: Connect) -> None:
    line = await connect()
    for _ in range(3):
        await line.ask(request(QUERY))
    await line.ask(request(QUERY, "/query?"))
    scrape = await line.ask(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n")
    assert b'kvsight_queries_total{route="/query"} 4.0' in scrape[2]
    assert b'kvsight_query_seconds_count{route="/query"} 4.0' in scrape[2]


async def test_a_request_that_is_arriving_when_the_server_ends_is_answered() -> None:
    async with AsyncExitStack() as lines, AsyncExitStack() as service:
        url = await service.enter_async_context(listening(HandFed().consumer))
        connect = await lines.enter_async_context(connecting(url))
        line, other = await connect(), await connect()
        while (known := await line.ask(request(QUERY)))[0] != b"HTTP/1.1 404 Not Found":
            pass  # the service starts
        line.writer.write(request(QUERY)[:-5])
        await other.ask(request(QUERY))  # so the server has read what was sent before
        ending = asyncio.create_task(service.aclose())
        while await is_listening(url):
            pass
        status, headers, body = await line.ask(request(QUERY)[-5:])
        assert (status, body) == (known[0], known[2])
        assert b"connection: close" in headers
        await ending


async def test_a_connection_lost_in_the_middle_of_a_request_leaves_the_others_alone(connect: Connect) -> None:
    for end in (10, 120, len(request(QUERY)) - 1):
        lost = await connect()
        lost.writer.write(request(QUERY)[:end])
        await lost.close()
    assert (await (await connect()).ask(request(QUERY)))[0] == b"HTTP/1.1 200 OK"


@pytest.mark.soak
async def test_an_idle_connection_is_closed_and_a_slow_request_is_not(connect: Connect) -> None:
    idle, slow = await connect(), await connect()
    for line in (idle, slow):
        await line.ask(request(QUERY))
    slow.writer.write(request(QUERY)[:-1])
    async with asyncio.timeout(20):
        assert await idle.is_at_end()  # uvicorn's keep-alive ends after 5 s
    assert (await slow.ask(request(QUERY)[-1:]))[0] == b"HTTP/1.1 200 OK"
    async with asyncio.timeout(20):
        assert await slow.is_at_end()


@pytest.mark.parametrize("path", ["/query", "/query?", "/query_by_hash", "/query/batch", "/workers", "/health", "/no"])
async def test_faulty_heads_are_refused_on_every_path(connect: Connect, path: str) -> None:
    for old, new, status, field in (
        (b"Host: h", b"Host: h\r\nHost: other", 400, "Host"),
        (b"Host: h\r\n", b"", 400, "Host"),
        (b"Host: h", b"Host: a/b", 400, "Host"),
        (b"Host: h", b"Host: h\r\nContent-Encoding: gzip", 415, "Content-Encoding"),
    ):
        line = await connect()
        for _ in range(3):  # the connection is direct then
            await line.ask(request(QUERY))
        head, headers, body = await line.ask(request(QUERY, path).replace(old, new))
        assert head.startswith(b"HTTP/1.1 %d " % status), head
        assert b"application/problem+json" in headers
        assert json.loads(body)["field"] == field
        assert (await line.ask(request(QUERY)))[0] == b"HTTP/1.1 200 OK"
    plain = await line.ask(request(QUERY))
    assert await line.ask(request(QUERY, extra=b"Content-Encoding: identity\r\n")) == plain


async def test_all_requests_before_garbage_are_answered(connect: Connect) -> None:
    line = await connect()
    line.writer.write(HEALTH * 5 + CHUNKED + b'4\r\n{"x\r\nno number')
    assert [(await line.answer())[0] for _ in range(5)] == [b"HTTP/1.1 200 OK"] * 5
    assert (await line.answer())[0] == b"HTTP/1.1 400 Bad Request"
    assert await line.is_at_end()


async def test_a_request_for_another_protocol_and_the_one_after_it_are_answered(connect: Connect) -> None:
    line = await connect()
    more = b"Connection: upgrade\r\nUpgrade: websocket\r\n"
    plain = await line.ask(request(QUERY))
    line.writer.write(HEALTH[:-2] + more + b"\r\n" + request(QUERY))
    assert (await line.answer())[0] == b"HTTP/1.1 200 OK"
    assert await line.answer() == plain
    status, _, body = await line.ask(request(QUERY, extra=more))  # httptools does not read the body
    assert status == b"HTTP/1.1 400 Bad Request"
    assert json.loads(body)["field"] == "Upgrade"
    assert await line.is_at_end()


@pytest.mark.parametrize("offset", [0, 300, 700, 1000])
async def test_the_bound_of_a_head_does_not_depend_on_its_place_in_a_packet(connect: Connect, offset: int) -> None:
    line = await connect()
    before = request(body_of(token_ids=TOKENS, x="x" * offset), "/query?")
    line.writer.write(before + request(QUERY, extra=b"X: %b\r\n" % (b"y" * (MAX_HEAD_BYTES - 200))))
    assert [(await line.answer())[0] for _ in range(2)] == [b"HTTP/1.1 200 OK"] * 2
    line.writer.write(before + request(QUERY, extra=b"X: %b\r\n" % (b"y" * (MAX_HEAD_BYTES - 20))))
    assert [(await line.answer())[0] for _ in range(2)] == [b"HTTP/1.1 200 OK", TOO_LARGE]


@pytest.mark.parametrize("path", ["/query", "/query?"])
async def test_an_unknown_kind_of_body_is_refused_before_it_arrives(connect: Connect, path: str) -> None:
    line = await connect()
    line.writer.write(request(QUERY, path, "text/plain")[:-9])
    assert (await line.answer())[0] == b"HTTP/1.1 415 Unsupported Media Type"
