"""The callback in the real LiteLLM: its SDK's router and its proxy, with three engines and a real `kvsight serve`."""

import asyncio
import json
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.rigs.routed_fleet import INSTALLS_A_ROUTER, RoutedFleet, conversations, run
from tests.support.http_checks import WITHOUT_TLS
from tests.support.servers.litellm_proxy import HEADERS, MODEL, LiteLLMProxy, litellm_python, model_list, variables

DEAD_URL = "http://127.0.0.1:9"
CHAT = [{"role": "user", "content": "which city is it? " * 8}]
pytestmark = INSTALLS_A_ROUTER


def called(kvsight: str, engines: list[str], **given: Any) -> Any:
    """What LiteLLM's SDK prints in a process of its own."""
    given |= {"kvsight": kvsight, "model_list": model_list(engines)}
    command: list[str | Path] = [litellm_python(), "-m", "tests.support.engines.litellm_calls", json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=variables(kvsight))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def deployments(engines: list[str], **params: Any) -> list[dict[str, Any]]:
    return [
        {**each, "model_info": {"id": str(number)}, "litellm_params": each["litellm_params"] | params}
        for number, each in enumerate(model_list(engines))
    ]


def kept(kvsight: str, *arguments: dict[str, Any]) -> list[list[str]]:
    filters = [{"messages": CHAT, "request_kwargs": {}} | each for each in arguments]
    return called(kvsight, [], filters=filters)  # type: ignore[no-any-return]


def test_the_sdk_sends_a_conversation_where_it_is_and_releases_it(fleet: RoutedFleet) -> None:
    (chat,) = zip(*conversations(1, 6), strict=True)
    reused = called(fleet.url, fleet.addresses, waves=chat)
    assert reused[0] == 0
    assert all(more > before for before, more in pairwise(reused)), reused
    fleet.wait_for_release()


@pytest.mark.parametrize("dead", range(3))
def test_an_engine_that_fails_is_not_asked_twice_by_one_request(fleet: RoutedFleet, dead: int) -> None:
    engines = fleet.addresses
    fleet.engines[dead].kill()
    if dead:  # the first one makes the tokens: without it, the choice is by load
        assert called(fleet.url, engines, waves=[CHAT] * 3)[-1] > 0
    else:
        assert len(called(fleet.url, engines, waves=[CHAT] * 3)) == 3


def test_the_choice_is_among_what_litellm_will_accept(fleet: RoutedFleet) -> None:
    given = deployments(fleet.addresses)
    first = deployments(fleet.addresses, order=1)[:1] + deployments(fleet.addresses, order=2)[1:]
    excluded = {"_excluded_deployment_ids": ["0"], "_retry_skipped_deployment_ids": ["2"]}
    tagged = deployments(fleet.addresses, tags=["a"])
    answers = kept(
        fleet.url,
        {"healthy_deployments": given},
        {"healthy_deployments": given[1:2]},
        {"healthy_deployments": first},
        {"healthy_deployments": given, "request_kwargs": excluded},
        {"healthy_deployments": tagged},
        {"healthy_deployments": given, "messages": None},
        {"healthy_deployments": []},
    )
    assert len(answers[0]) == 1
    assert answers[1:] == [["1"], ["0"], ["1"], ["0", "1", "2"], ["0", "1", "2"], []]


def test_what_litellm_gave_stays_if_kvsight_is_of_no_help(fleet: RoutedFleet) -> None:
    everything = ["0", "1", "2"]
    elsewhere = deployments(["http://elsewhere:1", "http://elsewhere:2", "http://elsewhere:3"])
    odd = [{"model_info": {"id": "0"}}, {"model_info": {"id": "1"}}, {"model_info": {"id": "2"}}]
    assert kept(DEAD_URL, {"healthy_deployments": deployments(fleet.addresses)}) == [everything]
    answers = kept(fleet.url, {"healthy_deployments": elsewhere}, {"healthy_deployments": odd})
    assert answers == [everything, everything]


def test_an_unknown_deployment_gets_its_share_too(fleet: RoutedFleet) -> None:
    given = deployments([fleet.engines[0].url, "http://elsewhere:1"])
    answers = kept(fleet.url, *[{"healthy_deployments": given}] * 40)
    assert {tuple(each) for each in answers} == {("0",), ("0", "1")}


def test_the_proxy_reuses_most_releases_all_and_outlives_kvsight(fleet: RoutedFleet, tmp_path: Path) -> None:
    waves = conversations(8, 6)
    with LiteLLMProxy(tmp_path, fleet.url, fleet.addresses) as proxy:
        asyncio.run(run(proxy.url, conversations(2, 2, seed=1), headers=HEADERS, model=MODEL))  # imports a lot
        before = asyncio.run(run(proxy.url, waves[:4], at_once=1, headers=HEADERS, model=MODEL))
        assert (before.failures, before.share > 0.9) == (0, True), (before.share, proxy.log.read_text())
        body = {"model": MODEL, "messages": CHAT, "stream": True}
        answer = httpx.post(f"{proxy.url}/v1/chat/completions", json=body, headers=HEADERS, verify=WITHOUT_TLS)
        assert answer.text.endswith("data: [DONE]\n\n")
        fleet.wait_for_release()
        fleet.kill_kvsight()
        assert asyncio.run(run(proxy.url, waves[4:], headers=HEADERS, model=MODEL)).failures == 0
