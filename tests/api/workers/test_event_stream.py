"""The event feed without a server: the events that each client receives, and the handling of slow clients."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect

from api.app import create_app
from api.server import running_server
from api.service import LiveService
from api.settings import ApiSettings
from api.workers.event_stream import MAX_QUEUED_EVENTS, EventStream, StreamFilter
from kv_events.schema import AllBlocksCleared
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


async def test_a_batch_is_reported_with_its_counts_and_the_state_after_it() -> None:
    fed = HandFed()
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


async def test_a_wrong_view_and_a_cleared_one_are_reported() -> None:
    fed = HandFed()
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


async def test_silence_and_the_end_of_a_view_are_reported_too() -> None:
    fed = HandFed()
    feed = EventStream(fed.consumer, max_clients=1)
    async with fed.consumer.running():
        worker = Stream("w")
        await fed.feed(worker.batch(stored((0, [1]))))
        async with feed.listening(StreamFilter()) as stream:
            assert [data["state"] for _, data in await next_events(stream)] == ["live"]
            fed.consumer.freshness.log_read_at += 100.0
            ((kind, change),) = await next_events(stream)
            assert (kind, change["before"], change["state"]) == ("state", "live", "expired")
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
async def test_only_what_was_asked_for_is_reported(wanted: StreamFilter, names: list[str]) -> None:
    fed = HandFed()
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


async def test_a_slow_client_is_notified_and_disconnected_and_the_others_continue() -> None:
    fed = HandFed()
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


async def test_there_is_a_bound_on_clients_even_on_those_that_came_together() -> None:
    fed = HandFed()
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


async def test_a_refused_listener_gets_a_problem_document() -> None:
    app = create_app(LiveService(HandFed().consumer, ApiSettings(max_event_clients=0)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        check_problem(await client.get("/events"), 429)
