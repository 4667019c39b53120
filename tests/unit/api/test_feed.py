"""The feed of events without a server: who is told what, and what becomes of slow clients."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from hand_fed import HandFed
from http_checks import check_problem
from wire import Stream, removed, stored

from api.app import create_app
from api.feed import MOST_WAITING, EventFeed, Wanted
from api.problems import ProblemError
from api.settings import ApiSettings
from indexer.freshness import Freshness
from kv_events.schema import AllBlocksCleared

TOKENS = list(range(1, 17))


def events_of(chunk: bytes) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of every event of a chunk; comments left out."""
    blocks = [block.split("\n") for block in chunk.decode().split("\n\n") if block and not block.startswith(":")]
    return [(lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))) for lines in blocks]


async def next_events(stream: AsyncIterator[bytes]) -> list[tuple[str, dict[str, Any]]]:
    """Of the next chunk that holds any."""
    async for chunk in stream:
        if events := events_of(chunk):
            return events
    return []


async def test_a_batch_is_told_with_its_counts_and_the_state_after_it() -> None:
    fed = HandFed()
    feed = EventFeed(fed.consumer, max_clients=1)
    async with fed.consumer.running(), aclosing(feed.open(Wanted())) as stream:
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
        "cleared": True,  # as every incarnation begins
        "pages": {"GPU": 3, "CPU_PINNED": 0, "DISK": 0, "EXTERNAL": 0},
        "state": "live",
    }
    assert change == {**of, "before": None, "state": "live", "reason": ""}


async def test_a_wrong_view_and_a_cleared_one_are_told() -> None:
    fed = HandFed()
    feed = EventFeed(fed.consumer, max_clients=1)
    async with fed.consumer.running():
        worker = Stream("w")
        await fed.feed(worker.batch(stored((0, [1]))))
        async with aclosing(feed.open(Wanted())) as stream:
            assert [(kind, data["state"]) for kind, data in await next_events(stream)] == [("state", "live")]
            await fed.feed(worker.batch(AllBlocksCleared(), digest=b"\x01" * 64))
            (_, batch), (kind, change) = await next_events(stream)
            assert batch["cleared"]
            assert (kind, change["before"], change["state"], change["reason"]) == ("state", "live", "stale", "digest")


async def test_silence_and_the_end_of_a_view_are_told_too() -> None:
    fed = HandFed()
    feed = EventFeed(fed.consumer, max_clients=1)
    async with fed.consumer.running():
        worker = Stream("w")
        await fed.feed(worker.batch(stored((0, [1]))))
        async with aclosing(feed.open(Wanted())) as stream:
            assert [data["state"] for _, data in await next_events(stream)] == ["live"]
            fed.consumer.freshness = Freshness(ttl_s=-1.0, now=time.monotonic())
            ((kind, change),) = await next_events(stream)
            assert (kind, change["before"], change["state"]) == ("state", "live", "expired")
            await fed.consumer.forget([worker.id])
            ((kind, change),) = await next_events(stream)
            assert (kind, change["before"], change["state"]) == ("state", "expired", "forgotten")


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (Wanted(), ["a", "b"]),
        (Wanted(worker="a"), ["a"]),
        (Wanted(tenant="t"), ["b"]),
        (Wanted(model="m2"), ["b"]),
        (Wanted(worker="a", tenant="t"), []),
    ],
)
async def test_only_what_was_asked_for_is_told(wanted: Wanted, names: list[str]) -> None:
    fed = HandFed()
    feed = EventFeed(fed.consumer, max_clients=2)
    async with (
        fed.consumer.running(),
        aclosing(feed.open(Wanted())) as everything,
        aclosing(feed.open(wanted)) as stream,
    ):
        await anext(everything)
        await anext(stream)
        await fed.feed(Stream("a").batch(), Stream("b", model="m2", tenant="t").batch())
        assert {data["instance_id"] for _, data in await next_events(everything)} == {"a", "b"}
        feed.close()  # so that a stream with nothing to say ends
        chunks = [chunk async for chunk in stream]
    assert sorted({data["instance_id"] for chunk in chunks for _, data in events_of(chunk)}) == names


async def test_a_slow_client_is_told_and_sent_away_and_the_others_go_on() -> None:
    fed = HandFed()
    feed = EventFeed(fed.consumer, max_clients=2)
    async with (
        fed.consumer.running(),
        aclosing(feed.open(Wanted())) as slow,
        aclosing(feed.open(Wanted())) as quick,
    ):
        await anext(slow)
        await anext(quick)
        worker, heard = Stream("w"), 0
        for _ in range(5):
            await fed.feed(*(worker.batch() for _ in range(MOST_WAITING // 4)))
            heard += sum(kind == "batch" for kind, _ in await next_events(quick))
        ((kind, data),) = await next_events(slow)
        assert (kind, data) == ("dropped", {"lost": 5 * (MOST_WAITING // 4) + 1})  # and one change of state
        assert [chunk async for chunk in slow] == []
        assert heard == 5 * (MOST_WAITING // 4)
        assert feed.num_clients == 1


async def test_there_is_a_bound_on_clients() -> None:
    fed = HandFed()
    feed = EventFeed(fed.consumer, max_clients=1)
    async with fed.consumer.running():
        async with aclosing(feed.open(Wanted())) as stream:
            await anext(stream)
            with pytest.raises(ProblemError, match="KVSIGHT_MAX_EVENT_CLIENTS"):
                feed.open(Wanted())
        feed.open(Wanted())


async def test_a_refused_listener_gets_a_problem_document() -> None:
    app = create_app(HandFed().consumer, ApiSettings(max_event_clients=0))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        check_problem(await client.get("/events"), 429)
