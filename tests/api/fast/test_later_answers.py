"""Queries of a group's member in the fast path: their answers come later, and their connection waits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from api.app import create_app
from api.fast.fast_path import GroupAnswers
from api.server import running_server
from api.service import LiveService
from api.settings import ApiSettings
from tests.rigs.raw_http import HEALTH, QUERY, Line, connecting, is_listening, request
from tests.support.log.hand_fed import HandFed

UNKNOWN = b"HTTP/1.1 404 Not Found"


class Others:
    """Stands for the other members: queries wait until `may_answer` is set."""

    def __init__(self, answer: bytes | None = b"{}") -> None:
        self.may_answer = asyncio.Event()
        self.is_asked = asyncio.Event()
        self._answer = answer

    async def ask(self, body: bytes, media_type: str) -> bytes | None:
        assert (body, media_type) == (QUERY, "application/json")
        self.is_asked.set()
        await self.may_answer.wait()
        return self._answer


@asynccontextmanager
async def a_member(others: Others) -> AsyncIterator[str]:
    """Yield the URL of a service that knows no worker."""
    api = ApiSettings(port=0)
    service = LiveService(HandFed().consumer, api)
    async with running_server(create_app(service), api) as url:
        line = await Line.connect(url)
        while (await line.ask(request(QUERY)))[0] != UNKNOWN:
            pass  # the service starts
        await line.close()
        service.fast_path._group = GroupAnswers({}, {"/query": others.ask})
        yield url


async def test_what_follows_a_query_waits_for_its_answer() -> None:
    others = Others()
    async with a_member(others) as url, connecting(url) as connect:
        line = await connect()
        line.writer.write(request(QUERY) + request(QUERY)[:-5])
        await others.is_asked.wait()
        line.writer.write(request(QUERY)[-5:] + HEALTH)
        others.may_answer.set()
        bodies = [(await line.answer())[2] for _ in range(3)]
        assert bodies[:2] == [b"{}", b"{}"]
        assert b"status" in bodies[2]


async def test_a_query_that_the_others_do_not_answer_is_passed_to_fastapi() -> None:
    others = Others(None)
    others.may_answer.set()
    async with a_member(others) as url, connecting(url) as connect:
        line = await connect()
        line.writer.write(request(QUERY) + HEALTH)
        assert (await line.answer())[0] == UNKNOWN
        assert (await line.answer())[0] == b"HTTP/1.1 200 OK"


async def test_a_client_that_leaves_before_its_answer_harms_nobody() -> None:
    others = Others()
    async with a_member(others) as url, connecting(url) as connect:
        gone, other = await connect(), await connect()
        gone.writer.write(request(QUERY))
        await others.is_asked.wait()
        await gone.close()
        others.may_answer.set()
        assert (await other.ask(request(QUERY)))[2] == b"{}"


async def test_an_answer_that_comes_while_the_server_ends_is_the_last_one() -> None:
    others = Others()
    async with AsyncExitStack() as lines, AsyncExitStack() as service:
        url = await service.enter_async_context(a_member(others))
        connect = await lines.enter_async_context(connecting(url))
        line = await connect()
        line.writer.write(request(QUERY) + request(QUERY))
        await others.is_asked.wait()
        ending = asyncio.create_task(service.aclose())
        while await is_listening(url):
            pass
        others.may_answer.set()
        _, headers, body = await line.answer()
        assert (b"connection: close" in headers, body) == (True, b"{}")
        assert await line.is_at_end()
        await ending
