"""HAProxy and nginx with the Lua of `deploy/`, three engines and a real `kvsight serve`."""

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.rigs.endpoints import EchoingEngine
from tests.rigs.routed_fleet import IN_TIME, RoutedFleet, conversations, run
from tests.routers.test_route import CHAT
from tests.support.engines.zmq_engine import ZmqEngine
from tests.support.http_checks import WITHOUT_TLS
from tests.support.servers.lua_routers import HAProxy, LuaRouter, Nginx

pytestmark = IN_TIME


@pytest.fixture(params=[HAProxy, Nginx], ids=["HAProxy", "nginx"])
def start(request: pytest.FixtureRequest) -> Callable[..., LuaRouter]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def router(fleet: RoutedFleet, tmp_path: Path, start: Callable[..., LuaRouter]) -> Iterator[LuaRouter]:
    with start(tmp_path, fleet.url, fleet.addresses) as running:
        yield running


def chat(router: LuaRouter, **fields: object) -> httpx.Response:
    return httpx.post(f"{router.url}/v1/chat/completions", json=CHAT | fields, timeout=30, verify=WITHOUT_TLS)


def test_requests_go_where_their_prompt_is_and_are_released(fleet: RoutedFleet, router: LuaRouter) -> None:
    outcome = asyncio.run(run(router.url, conversations(12, 5), model="m"))
    assert outcome.failures == 0
    assert outcome.share > 0.8  # in turn: about a half
    fleet.wait_for_release()


def test_a_stream_passes_and_other_requests_reach_an_engine(fleet: RoutedFleet, router: LuaRouter) -> None:
    answer = chat(router, stream=True)
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert answer.headers["content-type"] == "text/event-stream"
    assert events.pop() == "[DONE]"
    parts = [json.loads(event)["choices"] for event in events]
    assert "".join(part[0]["delta"]["content"] for part in parts if part) == "yes"
    assert httpx.get(f"{router.url}/v1/models", verify=WITHOUT_TLS).json()["data"][0]["id"] == "m"
    for body in (b"", b"[1, 2]", b'{"model": "m", "messages"', b"\x00\xff}"):
        refusal = httpx.post(f"{router.url}/v1/chat/completions", content=body, timeout=30, verify=WITHOUT_TLS)
        assert refusal.status_code == 400
    fleet.wait_for_release()


def test_a_caller_does_not_choose_its_worker(router: LuaRouter) -> None:
    assert chat(router).is_success
    for number in range(3):
        wish = {"worker_id": f"e{number}", "dp_rank": 0}
        given = {"allowed_worker_ids": [f"e{number}"], "pinned_worker": wish, "affinity_target": wish}
        answer = chat(router, selection_id="same", **given)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_stream_passes_as_it_comes_and_a_stand_in_for_the_service_gets_the_token(
    start: Callable[..., LuaRouter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSIGHT_API_TOKEN", "secret")
    with ZmqEngine() as events:
        engine = EchoingEngine(events)
        address, content = f"http://{engine.address}", json.dumps(CHAT)
        with start(tmp_path, address, [address]) as router:
            target = f"{router.url}/v1/chat/completions"
            with httpx.stream("POST", target, content=content, headers={"x-hold": "1"}, timeout=20) as answer:
                first = next(parts := answer.iter_raw())
                assert len(first) == len(content) // 2
                engine.let_go.set()
                assert (first + b"".join(parts)).decode() == content
        (asked,) = [each for each in engine.received if each.path == "/select_and_reserve"]
        assert {name.lower(): value for name, value in asked.headers.items()}["authorization"] == "Bearer secret"


def test_a_large_body_passes(router: LuaRouter) -> None:
    assert chat(router, ignored="x" * 20_000_000).is_success


def test_no_request_fails_when_kvsight_hangs_or_an_engine_is_killed(fleet: RoutedFleet, router: LuaRouter) -> None:
    first, second = conversations(12, 4)[:2], conversations(12, 4)[2:]
    assert asyncio.run(run(router.url, first, model="m")).failures == 0
    fleet.kvsight.send(signal.SIGSTOP)
    began = time.monotonic()
    assert asyncio.run(run(router.url, second, model="m")).failures == 0
    assert time.monotonic() - began < 24 * 0.25  # it is not asked each time
    fleet.kvsight.send(signal.SIGCONT)
    fleet.engines[1].kill()
    assert asyncio.run(run(router.url, second, model="m")).failures == 0
    fleet.kill_kvsight()
    assert asyncio.run(run(router.url, second, model="m")).failures == 0
