"""Requests that a client sends before it has the answers to those before, and in any pieces."""

import asyncio
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.fast import connection
from tests.rigs.raw_http import HEALTH, QUERY, Connect, a_service, every_kind, prompts, request
from tests.support.effort import num_examples


async def test_many_pipelined_requests_of_every_kind_are_answered_in_order(connect: Connect) -> None:
    kinds = every_kind()

    line, single = await connect(), await connect()
    expected = [await single.ask(data) for data in kinds]
    for times in (1, 10):
        line.writer.write(b"".join(kinds * times))
        assert [await line.answer() for _ in kinds * times] == expected * times
    line.writer.write(kinds[0] + kinds[4] + b"garbage")
    assert [await line.answer() for _ in range(2)] == [expected[0], expected[4]]
    assert (await line.answer())[0] == b"HTTP/1.1 400 Bad Request"
    assert await line.is_at_end()


@settings(max_examples=num_examples(16))
@given(st.integers(0, 2**32))
async def test_requests_of_every_kind_may_arrive_in_any_pieces(seed: int) -> None:
    choices = random.Random(seed)
    kinds = every_kind()
    usual = prompts()

    async with a_service() as connect:
        line, single = await connect(), await connect()
        expected = {data: await single.ask(data) for data in kinds + usual}
        asked: list[bytes] = []
        for _ in range(40):
            source = usual if choices.random() < 0.7 else kinds
            burst = choices.choices(source, k=choices.choice([1, 1, 1, 5]))
            asked += burst
            text = b"".join(burst)
            cuts = sorted(choices.choices(range(len(text)), k=choices.choice([0, 0, 1, 4])))
            for start, end in itertools.pairwise([0, *cuts, len(text)]):
                line.writer.write(text[start:end])
                await single.ask(usual[0])  # so the server has read what was sent before
            while len(asked) > choices.choice([0, 0, 5]):
                assert await line.answer() == expected[asked.pop(0)]
        for data in asked:
            assert await line.answer() == expected[data]


async def test_what_looks_like_a_query_is_none_if_it_belongs_to_a_header_that_has_begun(connect: Connect) -> None:
    line, single = await connect(), await connect()
    line.writer.write(b"GET /health HTTP/1.1\r\nX-Note: ")
    health = await single.ask(HEALTH)  # the server has read what was sent before
    line.writer.write(request(QUERY))
    assert await line.answer() == health


async def test_a_client_that_pipelines_does_not_hold_up_others(connect: Connect) -> None:
    hostile, other = await connect(), await connect()
    hostile.writer.write(HEALTH * 1000)
    await hostile.answer()
    for _ in range(100):
        await other.ask(request(QUERY))
    expected = await other.ask(HEALTH)
    assert [await hostile.answer() for _ in range(50)] == [expected] * 50


async def test_a_client_that_pipelines_without_end_is_not_read_on(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers: list[connection.FastConnection] = []
    original = connection.FastConnection.connection_made

    def noted(server: connection.FastConnection, transport: asyncio.Transport) -> None:
        servers.append(server)
        original(server, transport)

    monkeypatch.setattr(connection.FastConnection, "connection_made", noted)

    hostile, other = await connect(), await connect()
    text = (request(QUERY) * 10 + HEALTH) * 3000
    hostile.writer.write(text)
    for _ in range(8):
        for _ in range(10):
            assert (await hostile.answer())[0] == b"HTTP/1.1 200 OK"
        await other.ask(request(QUERY))
    assert max(len(server.rest) for server in servers) < 2**20 < len(text) / 4
    hostile.writer.transport.abort()
