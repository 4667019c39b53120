"""GET /events over real connections, read by both clients; a server that stops or has too many callers."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import pytest

from api.app import create_app
from api.server import running_server
from api.service import LiveService
from api.settings import ApiSettings
from kv_events.http.events import BatchApplied, FeedEvent, StateChanged
from kvsight import AsyncClient, Client, KvsightConnectionError, KvsightHttpError
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, stored
from tests.support.waiting import async_wait_until


@asynccontextmanager
async def served(fed: HandFed, **settings: Any) -> AsyncIterator[str]:
    api = ApiSettings(port=0, **settings)
    async with running_server(create_app(LiveService(fed.consumer, api)), api) as url:
        yield url


class Listener:
    """Events of either kind of client."""

    def __init__(self, kind: str, url: str, **wanted: str) -> None:
        self._sync: Iterator[FeedEvent] | None = None
        if kind == "sync":
            self._client = Client(url)
            self._sync = self._client.events(**wanted)
        else:
            self._async = AsyncClient(url).events(**wanted)

    async def next(self) -> FeedEvent | None:
        """None: the stream has ended."""
        if self._sync is not None:
            return await asyncio.to_thread(next, self._sync, None)
        return await anext(self._async, None)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_client_hears_states_then_batches_until_the_server_stops(kind: str) -> None:
    fed = HandFed()
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(served(fed))
        worker = Stream("w")
        await fed.feed(worker.batch(stored((0, [1, 2]))), Stream("other").batch())
        listener = Listener(kind, url, worker="w")
        first = await listener.next()
        assert isinstance(first, StateChanged)
        assert (first.instance_id, first.before, first.state) == ("w", None, "live")
        await fed.feed(Stream("other").batch(), worker.batch(stored((2, [3]))))
        batch = await listener.next()
        assert isinstance(batch, BatchApplied)
        assert (batch.instance_id, batch.seq, batch.stored, batch.pages["GPU"]) == ("w", 1, {"GPU": 1}, 3)
        began = time.monotonic()
        await stack.aclose()
        assert time.monotonic() - began < 4  # without the five seconds that requests get to finish
        assert await listener.next() is None


async def test_a_listener_that_disconnects_makes_room_for_another() -> None:
    fed = HandFed()
    async with served(fed, max_event_clients=1) as url, AsyncClient(url) as client:
        async with aclosing(client.events()) as first:
            await fed.feed(Stream("w").batch())
            assert await anext(first)
            with pytest.raises(KvsightHttpError, match="listen to events already"):
                await anext(client.events())

        async def another() -> bool:
            async with aclosing(client.events()) as events:
                try:
                    return bool(await anext(events))
                except KvsightHttpError:
                    return False

        await async_wait_until(another, what="the place is free again")


def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    with Client("http://127.0.0.1:1") as client, pytest.raises(KvsightConnectionError, match="/events"):
        next(client.events())
