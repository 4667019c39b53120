"""Connections that send queries are served by kernels, and answer as before."""

import asyncio
import errno
import select
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from api.fast import connection, templates
from api.fast.heads import Head
from kvsight.prompts import Prompt
from tests.rigs.api import listening
from tests.rigs.raw_http import QUERY, TOKENS, Connect, a_service, body_of, connecting, prompts, request
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream


async def test_requests_that_are_alike_do_not_reach_the_protocol(connect: Connect, taken: list[Head]) -> None:
    lines = [await connect() for _ in range(40)]
    single, large = await connect(), request(body_of(token_ids=list(range(10_000))))
    for data in prompts():
        expected = await single.ask(data.replace(b"/query", b"/query?"))
        own = [data.replace(b"ID: r", b"ID: %d\r\nX-Own-%d: %d" % (i, i, i)) for i in range(len(lines))]
        assert {await line.ask(each) for line, each in zip(lines, own, strict=True)} == {expected}
    assert len(taken) == 2 * len(lines)
    for data in (large, prompts()[0]):  # more than fit into one pass
        for line in lines:
            line.writer.write(data)
        assert {await line.answer() for line in lines} == {await single.ask(data)}
    scrape = await single.ask(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n")
    count = 41 * (len(prompts()) + 2)
    assert b'kvsight_queries_total{route="/query"} %d.0' % count in scrape[2]


@pytest.mark.parametrize("field", ["token_ids", "seq_hashes", "block_hashes"])
async def test_queries_of_the_client_do_not_reach_the_protocol(field: str, connect: Connect, taken: list[Head]) -> None:
    path = "/query" if field == "token_ids" else "/query_by_hash"
    prompts: list[dict[str, Any]] = [{field: TOKENS[:end]} for end in range(4, 17)]
    bodies = [msgspec.msgpack.encode(Prompt("m", **prompt).body()) for prompt in prompts]
    queries = [request(body, path, "application/msgpack") for body in bodies]
    first, line, single = await connect(), await connect(), await connect()
    for data in queries[:3]:
        await first.ask(data)
    del taken[:]
    for data in queries:
        assert await line.ask(data) == await single.ask(data.replace(path.encode(), path.encode() + b"?"))
    assert len(taken) == 2


async def test_requests_that_vary_are_answered_by_kernels_once_each_was_seen(
    connect: Connect, taken: list[Head]
) -> None:
    bodies = [body_of(token_ids=TOKENS, cache_salt=f"user-{i}") for i in range(20)]
    bodies += [body_of(token_ids=TOKENS, lora_name=f"adapter-{i}") for i in range(20)]
    bodies += [
        body_of(token_ids=TOKENS, tier_weights=[1, 0.5, 0.2, 0.1]),
        b'{"token_ids": [1, 2, 3, 4] , "model_name": "m"}',
    ]
    line, single = await connect(), await connect()
    for _ in range(3):
        await line.ask(prompts()[0])
    expected = [await single.ask(request(body, "/query?")) for body in bodies]
    del taken[:]
    for _ in range(3):
        assert [await line.ask(request(body)) for body in bodies] == expected
    assert len(taken) == len(bodies)


async def test_more_templates_than_are_kept(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "_MAX_KEPT", 4)

    line, single = await connect(), await connect()
    bodies = [body_of(token_ids=TOKENS[: i + 1], cache_salt=f"user-{i % 6}") for i in range(40)]
    for body in bodies:
        assert await line.ask(request(body)) == await single.ask(request(body, "/query?"))


@pytest.mark.parametrize(
    ("known", "other", "status"),
    [
        (b"Bearer right", b"Bearer wrong", b"401"),
        (b"Bearer right", b"Bearer righ", b"401"),
        (b"Bearer right", b"Bearer rightt", b"401"),
        (b"Authorization: Bearer right\r\n", b"", b"401"),
        (b"Host: h\r\n", b"Host: x\r\n", b"421"),
        (b"Host: h\r\n", b"Host: hh\r\n", b"421"),
        (b"Host: h\r\n", b"", b"400"),
        (b"application/json", b"application/jsox", b"415"),
    ],
)
async def test_each_request_of_a_direct_connection_needs_its_own_lines(
    known: bytes, other: bytes, status: bytes
) -> None:
    async with a_service(api_token="right", allowed_hosts="h") as connect:
        line, usual = await connect(), request(QUERY, extra=b"Authorization: Bearer right\r\n")
        for _ in range(5):
            assert (await line.ask(usual))[0] == b"HTTP/1.1 200 OK"
        assert (await line.ask(usual.replace(known, other)))[0].split()[1] == status


async def test_direct_connections_may_end_at_any_time(connect: Connect) -> None:
    kept = await connect()
    expected = await kept.ask(prompts()[0])
    for number in range(60):  # file descriptors are used again
        lines = [await connect() for _ in range(3)]
        for line in lines:
            for data in prompts()[:3]:
                await line.ask(data)
        lines[0].writer.transport.abort()
        lines[1].writer.write(prompts()[0][: number % 40])
        await lines[1].close()
        lines[2].writer.write(prompts()[0])
        lines[2].writer.write_eof()
        assert await lines[2].answer() == expected
        assert await lines[2].is_at_end()
        assert await kept.ask(prompts()[0]) == expected


async def test_a_client_that_reads_late_gets_all_answers() -> None:
    async with a_service(num_more=200) as connect:
        line, other = await connect(), await connect()
        expected = await line.ask(request(QUERY))
        for _ in range(3):
            await line.ask(request(QUERY))
        for _ in range(500):
            line.writer.write(request(QUERY))
            await other.ask(prompts()[0])  # so the server has read what was sent before
        for _ in range(500):
            assert await line.answer() == expected


async def test_a_connection_is_read_by_its_protocol_while_too_many_files_are_open(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(select, "epoll", fails)

    line, single = await connect(), await connect()
    for data in prompts() * 2:
        assert await line.ask(data) == await single.ask(data)


async def test_an_error_of_one_direct_connection_is_none_of_the_others(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = connection.FastConnection.resume

    def fails_once(server: connection.FastConnection, data: bytes, rest: bytes) -> None:
        if b"hostile" in data:
            raise ValueError("hostile")
        original(server, data, rest)

    monkeypatch.setattr(connection.FastConnection, "resume", fails_once)

    hostile, line, single = await connect(), await connect(), await connect()
    for data in prompts()[:5]:
        for each in (hostile, line):
            await each.ask(data)
    other = request(body_of(token_ids=TOKENS, x=1))
    hostile.writer.write(b"hostile")
    line.writer.write(other)
    assert await line.answer() == await single.ask(other)
    assert await hostile.is_at_end()


async def test_an_idle_direct_connection_makes_room_for_a_new_one() -> None:
    async with a_service(max_connections=1) as connect:
        line = await connect()
        for data in prompts():
            assert (await line.ask(data))[0] == b"HTTP/1.1 200 OK"
        new = await connect()
        assert (await new.ask(prompts()[0]))[0] == b"HTTP/1.1 200 OK"
        assert await line.is_at_end()


async def test_a_server_ends_with_its_direct_connections() -> None:
    async with AsyncExitStack() as lines, AsyncExitStack() as service:
        fed = HandFed()
        url = await service.enter_async_context(listening(fed.consumer))
        await fed.hold(Stream("1"), TOKENS)
        line = await (await lines.enter_async_context(connecting(url)))()
        for data in prompts():
            assert (await line.ask(data))[0] == b"HTTP/1.1 200 OK"
        await service.aclose()
        assert await line.is_at_end()


@pytest.mark.soak
async def test_an_idle_direct_connection_is_closed_and_a_busy_one_is_not(connect: Connect) -> None:
    idle, busy = await connect(), await connect()
    for line in (idle, busy):
        for data in prompts():
            await line.ask(data)
    closed = asyncio.create_task(idle.is_at_end())
    while not closed.done():  # uvicorn's keep-alive ends after 5 s
        assert (await busy.ask(prompts()[0]))[0] == b"HTTP/1.1 200 OK"
        await asyncio.sleep(0.1)
    assert closed.result()
    async with asyncio.timeout(20):
        assert await busy.is_at_end()
