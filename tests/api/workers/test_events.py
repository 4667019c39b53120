"""GET /events: the events of each client, slow clients, and real connections."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect

from api.app import create_app
from api.server import running_server
from api.service import LiveService
from api.settings import ApiSettings
from api.workers.event_stream import MAX_QUEUED_EVENTS, EventStream, StreamFilter
from kv_events.http.events import BatchApplied, FeedEvent, StateChanged
from kv_events.schema import AllBlocksCleared
from kvsight import AsyncClient, Client, KvsightConnectionError, KvsightHttpError
from tests.rigs.api import listening
from tests.support.http_checks import check_problem
from tests.support.log.hand_fed import HandFed
from tests.support.log.records import Stream, removed, stored
from tests.support.waiting import async_wait_until

TOKENS = list(range(1, 17))


def events_of(chunk: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, data) of every event in a chunk, without comments."""
    blocks = [block.split("\n") for block in chunk.decode().split("\n\n") if block and not block.startswith(":")]
    return [(lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))) for lines in blocks]


async def next_events(stream: AsyncIterator[bytes]) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of the next chunk that contains any."""
    async for chunk in stream:
        if events := events_of(chunk):
            return events
    return []


async def test_a_batch_is_reported_with_its_counts_and_the_state_after_it(fed: HandFed) -> None:
    feed = EventStream(fed.consumer, max_clients=1)
    async with fed.consumer.running(), feed.listening(StreamFilter()) as stream:
        assert events_of(await anext(stream)) == []
        worker = Stream("w", dp_rank=2)
        await fed.feed(worker.batch(stored((0, [1, 2, 3])), stored((0, [9]), tier=2), removed([9], tier=2)))
        (kind, batch), (_, change) = await next_events(stream)
    assert kind == "batch"
    of = {"stream": "default/m/w/2", "model_name": "m", "routing_group": "default", "instance_id": "w", "dp_rank": 2}
    assert batch == {
        **of,
        "epoch": 1,
        "seq": 0,
        "stored": {"GPU": 3, "DISK": 1},
        "removed": {"DISK": 1},
        "cleared": True,  # every epoch starts with a clear
        "pages": {"GPU": 3, "CPU_PINNED": 0, "DISK": 0, "EXTERNAL": 0},
        "state": "live",
    }
    assert change == {**of, "before": None, "state": "live", "reason": ""}


async def test_a_wrong_view_a_cleared_one_silence_and_the_end_of_a_view_are_reported(fed: HandFed) -> None:
    feed = EventStream(fed.consumer, max_clients=1)
    async with fed.consumer.running():
        worker = Stream("w")
        await fed.feed(worker.batch(stored((0, [1]))))
        async with feed.listening(StreamFilter()) as stream:
            assert [(kind, data["state"]) for kind, data in await next_events(stream)] == [("state", "live")]
            await fed.feed(worker.batch(AllBlocksCleared(), digest=b"\x01" * 64))
            (_, batch), (kind, change) = await next_events(stream)
            assert batch["cleared"]
            assert (kind, change["before"], change["state"], change["reason"]) == ("state", "live", "stale", "digest")
            fed.consumer.freshness.log_read_at += 100.0
            ((kind, change),) = await next_events(stream)
            assert (kind, change["before"], change["state"]) == ("state", "stale", "expired")
            await fed.consumer.forget([worker.id])
            ((kind, change),) = await next_events(stream)
            assert (kind, change["before"], change["state"]) == ("state", "expired", "forgotten")


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (StreamFilter(), ["a", "b"]),
        (StreamFilter(worker="a"), ["a"]),
        (StreamFilter(tenant="t"), ["b"]),
        (StreamFilter(model="m2"), ["b"]),
        (StreamFilter(worker="a", tenant="t"), []),
        (StreamFilter(kind="batch"), ["a", "b"]),
        (StreamFilter(kind="state", worker="a"), ["a"]),
    ],
)
async def test_only_what_was_asked_for_is_reported(fed: HandFed, wanted: StreamFilter, names: list[str]) -> None:
    feed = EventStream(fed.consumer, max_clients=2)
    async with (
        fed.consumer.running(),
        feed.listening(StreamFilter()) as everything,
        feed.listening(wanted) as stream,
    ):
        await anext(everything)
        await anext(stream)
        await fed.feed(Stream("a").batch(), Stream("b", model="m2", tenant="t").batch())
        assert {data["instance_id"] for _, data in await next_events(everything)} == {"a", "b"}
        feed.close()  # ends streams without events
        events = [event for chunk in [chunk async for chunk in stream] for event in events_of(chunk)]
    assert sorted({data["instance_id"] for _, data in events}) == names
    assert {name for name, _ in events} <= ({wanted.kind} if wanted.kind else {"batch", "state"})


async def test_a_slow_client_is_notified_and_disconnected_and_the_others_continue(fed: HandFed) -> None:
    feed = EventStream(fed.consumer, max_clients=2)
    async with (
        fed.consumer.running(),
        feed.listening(StreamFilter()) as slow,
        feed.listening(StreamFilter()) as quick,
    ):
        await anext(slow)
        await anext(quick)
        worker, heard = Stream("w"), 0
        for _ in range(5):
            await fed.feed(*(worker.batch() for _ in range(MAX_QUEUED_EVENTS // 4)))
            heard += sum(kind == "batch" for kind, _ in await next_events(quick))
        ((kind, data),) = await next_events(slow)
        assert (kind, data) == ("dropped", {"lost": 5 * (MAX_QUEUED_EVENTS // 4) + 1})  # and one change of state
        assert [chunk async for chunk in slow] == []
        assert heard == 5 * (MAX_QUEUED_EVENTS // 4)


async def test_there_is_a_bound_on_clients_even_on_those_that_came_together(fed: HandFed) -> None:
    service = LiveService(fed.consumer, ApiSettings(max_event_clients=4))
    app, feed = create_app(service), service.feed
    statuses: list[int] = []

    async def listen(client: httpx.AsyncClient) -> None:
        async with client.stream("GET", "/events") as response:
            statuses.append(response.status_code)
            if response.is_success:
                chunks = response.aiter_bytes()  # closes the answer when it is deleted
                await anext(chunks)
                await asyncio.Event().wait()

    limits = httpx.Limits(max_connections=None)
    settings = ApiSettings(port=0)
    async with running_server(app, settings) as url, httpx.AsyncClient(base_url=url, limits=limits) as client:
        listening = [asyncio.create_task(listen(client)) for _ in range(40)]
        await async_wait_until(lambda: len(statuses) == 40, what="everybody is answered")
        check_problem(await client.get("/events"), 429)
        assert sorted(statuses) == [200] * 4 + [429] * 36
        assert feed.num_clients == 4
        for each in listening:
            each.cancel()
        await asyncio.gather(*listening, return_exceptions=True)
        await async_wait_until(lambda: feed.num_clients == 0, what="places are free again")
        async with client.stream("GET", "/events") as response:
            assert response.status_code == 200


async def test_a_caller_that_disconnects_before_its_answer_begins_frees_its_place() -> None:
    service = LiveService(HandFed().consumer, ApiSettings(max_event_clients=1))
    app, feed = create_app(service), service.feed

    async def disconnected(_message: Any) -> None:
        raise OSError("no peer")

    async def receive_never() -> Any:
        await asyncio.Event().wait()

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "GET",
        "path": "/events", "raw_path": b"/events", "root_path": "", "query_string": b"", "headers": [],
    }  # fmt: skip
    with pytest.raises((ClientDisconnect, OSError)):
        await app(scope, receive_never, disconnected)
    assert feed.num_clients == 0


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


@pytest.mark.timing("streams must end before the five seconds that requests get to finish")
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_client_hears_states_then_batches_until_the_server_stops(fed: HandFed, kind: str) -> None:
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(listening(fed.consumer))
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
        assert time.monotonic() - began < 4
        assert await listener.next() is None


async def test_a_listener_that_disconnects_makes_room_for_another(fed: HandFed) -> None:
    async with listening(fed.consumer, max_event_clients=1) as url, AsyncClient(url) as client:
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
