"""`kvsight route` in front of the real SMG, with three engines and a real `kvsight serve`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.rigs.routed_fleet import INSTALLS_A_ROUTER, RoutedFleet, conversations, run
from tests.routers.test_route import CHAT, DEAD_URL, Route
from tests.support.http_checks import WITHOUT_TLS
from tests.support.servers.smg_gateway import SmgGateway

pytestmark = INSTALLS_A_ROUTER


@pytest.fixture
def gateway(fleet: RoutedFleet, tmp_path: Path) -> Iterator[SmgGateway]:
    with SmgGateway(tmp_path, fleet.addresses) as running:
        yield running


def test_the_gateway_sends_requests_where_kvsight_says(fleet: RoutedFleet, gateway: SmgGateway) -> None:
    with Route("--url", fleet.url, "--gateway", gateway.url) as route:
        outcome = asyncio.run(run(route.url, conversations(12, 5), model="m"))
        assert outcome.failures == 0
        assert outcome.share > 0.8
        assert route.counted("kvsight") > 50
        fleet.wait_for_release()


def test_a_caller_cannot_name_the_worker_and_an_engine_that_the_gateway_lacks_is_no_candidate(
    fleet: RoutedFleet, tmp_path: Path
) -> None:
    with (
        SmgGateway(tmp_path, fleet.addresses[:2]) as gateway,
        Route("--url", fleet.url, "--gateway", gateway.url) as route,
    ):
        chosen = set()
        for number in range(6):
            chat = CHAT | {"messages": [{"role": "user", "content": f"{number} " * 40}]}
            headers = {"X-SMG-Target-Worker": "7"}  # the gateway would refuse it
            url = f"{route.url}/v1/chat/completions"
            answer = httpx.post(url, json=chat, headers=headers, timeout=30, verify=WITHOUT_TLS).raise_for_status()
            chosen.add(answer.headers["x-kvsight-worker"])
        assert chosen <= {"e0", "e1", "gateway"}


def test_an_engine_that_fails_is_followed_by_the_gateways_choice(fleet: RoutedFleet, gateway: SmgGateway) -> None:
    with Route("--url", fleet.url, "--gateway", gateway.url) as route:
        first = route.chat().raise_for_status().headers["x-kvsight-worker"]
        fleet.engines[int(first.removeprefix("e"))].kill()
        answers = [route.chat() for _ in range(6)]
        assert {answer.status_code for answer in answers} == {200}
        assert first not in {answer.headers["x-kvsight-worker"] for answer in answers}
        fleet.wait_for_release()


def test_without_kvsight_the_gateway_chooses(fleet: RoutedFleet, gateway: SmgGateway) -> None:
    waves = conversations(6, 4)
    with Route("--url", fleet.url, "--gateway", gateway.url) as route:
        first = asyncio.run(run(route.url, waves[:2], model="m"))
        fleet.kill_kvsight()
        second = asyncio.run(run(route.url, waves[2:], model="m"))
        assert first.failures + second.failures == 0
    with Route("--url", DEAD_URL, "--gateway", gateway.url) as route:
        assert route.chat().raise_for_status().headers["x-kvsight-worker"] == "gateway"
