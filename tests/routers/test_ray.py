"""The request routers in the real Ray Serve, with three engines and a real `kvsight serve`."""

import asyncio
from itertools import count, islice

import httpx
import pytest

from tests.rigs.routed_fleet import INSTALLS_A_ROUTER, RoutedFleet, conversations, run
from tests.support.http_checks import WITHOUT_TLS
from tests.support.servers.ray_apps import ray_serve
from tests.support.waiting import wait_until

CHATS = conversations(8, 6)
pytestmark = INSTALLS_A_ROUTER


@pytest.mark.parametrize("has_tokens", [False, True], ids=["Serve", "stand-in for Ray LLM"])
def test_an_app_reuses_all_releases_all_and_outlives_kvsight(fleet: RoutedFleet, has_tokens: bool) -> None:
    known = httpx.get(f"{fleet.url}/workers", verify=WITHOUT_TLS).json() if has_tokens else []
    events = [each["endpoints"]["0"] for each in known]
    name = "ray_llm.KvsightKVAwareRouter" if has_tokens else "ray.KvsightRouter"
    with ray_serve(fleet.addresses, fleet.url, name, events=events) as app:
        before = asyncio.run(run(app.url, CHATS[:4], at_once=1, model="m"))
        assert (before.failures, before.share > 0.9) == (0, True), (before.share, app.log.read_text())
        fleet.wait_for_release()
        fleet.kill_kvsight()
        assert asyncio.run(run(app.url, CHATS[4:], model="m")).failures == 0


def test_a_replica_without_room_is_passed_over_and_a_caller_that_gives_up_is_released(fleet: RoutedFleet) -> None:
    with ray_serve(fleet.addresses, fleet.url, room=1) as app:
        assert asyncio.run(run(app.url, CHATS[:2], at_once=6, model="m")).failures == 0
        fleet.wait_for_release()
        asyncio.run(give_up(app.url, fleet))  # one has no replica yet
        fleet.wait_for_release()


async def give_up(url: str, fleet: RoutedFleet) -> None:
    body = {"messages": [{"role": "user", "content": "which city is it? " * 8}], "user": "never answer", "model": "m"}
    async with httpx.AsyncClient(verify=WITHOUT_TLS, timeout=60) as client:
        asked = [asyncio.create_task(client.post(f"{url}/v1/chat/completions", json=body)) for _ in range(4)]
        booked = (fleet.requests() == 4 for _ in count())
        await asyncio.to_thread(wait_until, lambda: all(islice(booked, 20)), what="all to be booked, between two tries")
        for each in asked:
            each.cancel()


def test_replicas_that_kvsight_does_not_know_get_requests_too(fleet: RoutedFleet) -> None:
    first, *others = fleet.addresses
    elsewhere = [url.replace("127.0.0.1", "localhost") for url in others]
    with ray_serve([first, *elsewhere], fleet.url) as app:
        outcome = asyncio.run(run(app.url, CHATS[:4], at_once=1, model="m"))
        assert (outcome.failures, outcome.share < 0.9) == (0, True), outcome.share
