"""The request routers in the real Ray Serve, with three engines and a real `kvsight serve`."""

import asyncio
from itertools import count, islice

import httpx
import pytest

from tests.rigs.routed_fleet import RoutedFleet, conversations, run
from tests.support.http_checks import WITHOUT_TLS
from tests.support.servers.ray_apps import ray_serve
from tests.support.waiting import wait_until

CHATS = conversations(8, 6)
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),  # the first test installs Ray
    pytest.mark.timing("several processes must start and answer within their time"),
]


def addresses(fleet: RoutedFleet) -> list[str]:
    return [engine.url for engine in fleet.engines]


def test_an_app_reuses_all_releases_all_and_outlives_kvsight(fleet: RoutedFleet) -> None:
    with ray_serve(addresses(fleet), fleet.url) as app:
        before = asyncio.run(run(app.url, CHATS[:4], at_once=1, model="m"))
        assert (before.failures, before.share > 0.9) == (0, True), (before.share, app.log.read_text())
        wait_until(lambda: fleet.requests() == 0, what="all reservations to end")
        fleet.kill_kvsight()
        assert asyncio.run(run(app.url, CHATS[4:], model="m")).failures == 0


def test_a_replica_without_room_is_passed_over_and_a_caller_that_gives_up_is_released(fleet: RoutedFleet) -> None:
    with ray_serve(addresses(fleet), fleet.url, room=1) as app:
        assert asyncio.run(run(app.url, CHATS[:2], at_once=6, model="m")).failures == 0
        wait_until(lambda: fleet.requests() == 0, what="all reservations to end")
        asyncio.run(give_up(app.url, fleet))  # one has no replica yet
        wait_until(lambda: fleet.requests() == 0, what="all reservations to end")


async def give_up(url: str, fleet: RoutedFleet) -> None:
    body = {"messages": [{"role": "user", "content": "which city is it? " * 8}], "user": "never answer", "model": "m"}
    async with httpx.AsyncClient(verify=WITHOUT_TLS, timeout=60) as client:
        asked = [asyncio.create_task(client.post(f"{url}/v1/chat/completions", json=body)) for _ in range(4)]
        booked = (fleet.requests() == 4 for _ in count())
        await asyncio.to_thread(wait_until, lambda: all(islice(booked, 20)), what="all to be booked, between two tries")
        for each in asked:
            each.cancel()


def test_replicas_that_kvsight_does_not_know_get_requests_too(fleet: RoutedFleet) -> None:
    first, *others = addresses(fleet)
    elsewhere = [url.replace("127.0.0.1", "localhost") for url in others]
    with ray_serve([first, *elsewhere], fleet.url) as app:
        outcome = asyncio.run(run(app.url, CHATS[:4], at_once=1, model="m"))
        assert (outcome.failures, outcome.share < 0.9) == (0, True), outcome.share


def test_with_tokens_from_a_stand_in_for_ray_llms_ingress_all_is_reused_and_released(fleet: RoutedFleet) -> None:
    events = [each["endpoints"]["0"] for each in httpx.get(f"{fleet.url}/workers", verify=WITHOUT_TLS).json()]
    with ray_serve(addresses(fleet), fleet.url, "ray_llm.KvsightKVAwareRouter", events=events) as app:
        before = asyncio.run(run(app.url, CHATS[:4], at_once=1, model="m"))
        assert (before.failures, before.share > 0.9) == (0, True), (before.share, app.log.read_text())
        wait_until(lambda: fleet.requests() == 0, what="all reservations to end")
        fleet.kill_kvsight()
        assert asyncio.run(run(app.url, CHATS[4:], model="m")).failures == 0
